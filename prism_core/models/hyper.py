"""The hyperparameters that all architectures share, read and checked before any tensor is looked at.

Keys and defaults follow the GGUF conventions; every limit is one of this loader's own and is named in its error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prism_core.errors import ModelError
from prism_core.models.metadata import Keys

MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17
MAX_FEED_FORWARD = 1 << 20
MAX_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_CONTEXT = 1 << 24
MAX_VOCAB = 1 << 20
MIN_EPS = 2.0**-126
"""The smallest normal float32: what is added to a mean of float32 squares must not round to nothing."""
MIN_FACTOR = 1e-3
"""Of every factor that scales positions or angles: far below, angles are no longer finite."""


STEPS_NOT_TAKEN: dict[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
"""Keys that change what a model computes, with the values that do not; an architecture may read some itself."""
STEPS_OF = {"gemma3": ("final_logit_softcapping",)}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: theta_i = position * frequency_i, cos and sin both times `magnitude`."""

    dims: int
    """How many leading elements of a head turn; the others pass through. Even."""
    base: float
    scaling: str = "none"
    """`none`, `linear` or `yarn`."""
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation: float = 1.0

    def frequencies(self) -> list[float]:
        """dims/2 angles per position step, before any per-pair factors of the file (`rope_freqs.weight`)."""
        pairs = self.dims // 2
        plain = [self.base ** (-2.0 * i / self.dims) for i in range(pairs)]
        if self.scaling == "linear":
            return [f / self.factor for f in plain]
        if self.scaling != "yarn":
            return plain
        low = max(0.0, math.floor(self._turns(self.beta_fast)))
        high = min(self.dims - 1.0, math.ceil(self._turns(self.beta_slow)))
        scaled = []
        for i, frequency in enumerate(plain):
            ramp = 1.0 - min(1.0, max(0.0, (i - low) / max(0.001, high - low)))
            ramp *= self.extrapolation
            scaled.append(frequency / self.factor * (1.0 - ramp) + frequency * ramp)
        return scaled

    def _turns(self, rotations: float) -> float:
        """The pair index whose angle makes `rotations` full turns over the original context."""
        return self.dims * math.log(self.original_context / (rotations * 2 * math.pi)) / (2 * math.log(self.base))

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin (YaRN's temperature; 1 otherwise)."""
        if self.scaling != "yarn" or self.extrapolation == 0.0:
            return self.attention_factor
        return self.attention_factor * (1.0 + 0.1 * math.log(self.factor))


@dataclass(frozen=True)
class Hyper:
    """The shared hyperparameters of a model; `keys` gives an architecture its own ones."""

    keys: Keys
    layers: int
    width: int
    feed_forward: tuple[int, ...]
    heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    head_dim: int
    eps: float
    context: int
    vocab: int
    rope: Rope

    def attention_sizes(self, layer: int) -> tuple[int, int, int]:
        """(heads, kv heads, head size) of a layer that attends."""
        if not self.kv_heads[layer]:
            raise ModelError(f"layer {layer} attends, but its attention.head_count_kv is 0")
        return self.heads[layer], self.kv_heads[layer], self.head_dim

    @property
    def architecture(self) -> str:
        """The file's `general.architecture`."""
        return self.keys.architecture


def read_hyper(metadata: Mapping[str, object], architecture: str, vocab: int) -> Hyper:
    """Read and check the shared keys. `vocab` = rows of the embedding table.

    Raises:
        ModelError: a key is missing, of the wrong type or outside its range.
    """
    keys = Keys(metadata, architecture)
    for key, neutral in STEPS_NOT_TAKEN.items():
        if key not in STEPS_OF.get(architecture, ()):
            keys.refuse_unless(key, neutral)
    layers = keys.integer("block_count", 1, MAX_LAYERS)
    width = keys.integer("embedding_length", 1, MAX_WIDTH)
    context = keys.integer("context_length", 1, MAX_CONTEXT)
    heads = keys.per_layer("attention.head_count", layers, 1, MAX_HEADS)
    kv_heads = keys.per_layer("attention.head_count_kv", layers, 0, MAX_HEADS, default=_scalar(heads))
    head_dim = _head_dim(keys, width, heads[0])
    for count, kv_count in zip(heads, kv_heads, strict=True):
        if kv_count and count % kv_count:
            raise ModelError(
                f"{architecture}.attention.head_count {count} is not a multiple of attention.head_count_kv {kv_count}"
            )
    declared = keys.integer("vocab_size", 1, MAX_VOCAB, default=vocab)
    if declared != vocab:
        raise ModelError(f"{architecture}.vocab_size is {declared} but token_embd.weight has {vocab} rows")
    return Hyper(
        keys=keys,
        layers=layers,
        width=width,
        feed_forward=keys.per_layer("feed_forward_length", layers, 1, MAX_FEED_FORWARD),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_positive(keys, "attention.layer_norm_rms_epsilon", 1.0, low=MIN_EPS),
        context=context,
        vocab=vocab,
        rope=read_rope(keys, head_dim, context),
    )


def _scalar(heads: tuple[int, ...]) -> object:
    return heads[0] if len(set(heads)) == 1 else list(heads)


def _positive(keys: Keys, key: str, high: float, default: float | None = None, low: float = MIN_FACTOR) -> float:
    value = keys.real(key, 0.0, high) if default is None else keys.real(key, 0.0, high, default=default)
    if value <= 0.0:
        raise ModelError(f"{keys.architecture}.{key} must be above 0, not {value:g}")
    if value < low:
        raise ModelError(f"{keys.architecture}.{key} must be at least {low:g}, not {value:g}")
    return value


def _head_dim(keys: Keys, width: int, heads: int) -> int:
    if not keys.has("attention.key_length") and width % heads:
        raise ModelError(f"{keys.architecture}.embedding_length {width} is not a multiple of {heads} attention heads")
    head_dim = keys.integer("attention.key_length", 1, MAX_HEAD_DIM, default=width // heads)
    value_dim = keys.integer("attention.value_length", 1, MAX_HEAD_DIM, default=width // heads)
    if head_dim % 2:
        raise ModelError(f"{keys.architecture}.attention.key_length must be even, not {head_dim}")
    if value_dim != head_dim:
        raise ModelError(
            f"{keys.architecture}.attention.value_length {value_dim} differs from key_length {head_dim}: "
            "this engine needs them equal"
        )
    return head_dim


def read_rope(keys: Keys, head_dim: int, context: int, base_key: str = "rope.freq_base") -> Rope:
    """The rotary settings of the `rope.*` keys."""
    dims = keys.integer("rope.dimension_count", 2, MAX_HEAD_DIM, default=head_dim)
    if dims > head_dim or dims % 2:
        raise ModelError(
            f"{keys.architecture}.rope.dimension_count must be even and at most {head_dim} (the head size), not {dims}"
        )
    base = _positive(keys, base_key, 1e12, default=10000.0)
    if base <= 1.0:
        raise ModelError(f"{keys.architecture}.{base_key} must be above 1, not {base:g}")
    scaling = keys.text("rope.scaling.type", ("none", "linear", "yarn"), "linear")
    if keys.has("rope.scaling.factor"):
        factor = _positive(keys, "rope.scaling.factor", 1e6)
    else:
        factor = 1.0
        if keys.real("rope.scale_linear", 0.0, 1e6, default=1.0):  # there, 0 meant "not scaled"
            factor = _positive(keys, "rope.scale_linear", 1e6, default=1.0)
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return Rope(dims, base)
    attention_factor = _positive(keys, "rope.scaling.attn_factor", 1e3, default=1.0)
    if scaling == "linear":
        return Rope(dims, base, "linear", factor, attention_factor=attention_factor)
    attention_factor *= _positive(keys, "rope.scaling.yarn_attn_factor", 1e3, default=1.0)
    return Rope(
        dims,
        base,
        "yarn",
        factor,
        original_context=keys.integer("rope.scaling.original_context_length", 1, MAX_CONTEXT, default=context),
        attention_factor=attention_factor,
        beta_fast=_positive(keys, "rope.scaling.yarn_beta_fast", 1e6, default=32.0),
        beta_slow=_positive(keys, "rope.scaling.yarn_beta_slow", 1e6, default=1.0),
        extrapolation=keys.real("rope.scaling.yarn_ext_factor", 0.0, 1.0, default=1.0),
    )
