"""Whole synthetic models: right keys, right tensors, a working tokenizer, random weights.

A model's weights depend on its seed, its tensor's name and the family of its type only, so two files that differ in
`type` alone hold the same weights as far as the types allow, and exactly the same among Q2_0, "Q2_0_G128", PQ2_0 and
PTQ1_0. From `RANDOM_BITS_FROM` weights on (or with `random_bits=True`) the quantised bytes are drawn directly, which
writes a 242 MB file in seconds and gives up that equality.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prism_core.gguf import TensorType

from . import vocabulary
from .container import Tensor, write_gguf, write_split
from .quantizers import quantize, resolve
from .random_weights import float_rows, random_blocks
from .rotation import Rotation

Kind = TensorType | str
Kinds = Kind | Callable[[str], Kind]
RANDOM_BITS_FROM = 30_000_000


@dataclass(frozen=True)
class Spec:
    """One tensor to make: `shape` in ne order; `role` "matrix" takes the model's type, the others are F32."""

    name: str
    shape: tuple[int, ...]
    role: str = "matrix"


def qwen3(path: str | Path, **options: Any) -> Path:
    """A qwen3 model. Options: see `build`."""
    return build(path, "qwen3", **options)


def qwen2(path: str | Path, **options: Any) -> Path:
    """A qwen2 model (biases on q, k, v). Options: see `build`."""
    return build(path, "qwen2", **options)


def llama(path: str | Path, **options: Any) -> Path:
    """A llama model; `rope_factors=True` adds a llama3 rope_freqs tensor. Options: see `build`."""
    return build(path, "llama", **options)


def gemma3(path: str | Path, **options: Any) -> Path:
    """A gemma3 model (SPM tokenizer, sliding window of 32, tied). Options: see `build`."""
    return build(path, "gemma3", **options)


def qwen35(path: str | Path, **options: Any) -> Path:
    """A qwen35 hybrid; `layers` of which every fourth is full attention; `key_heads`, `value_heads`, `state`.

    Options: see `build`.
    """
    return build(path, "qwen35", **options)


def build(
    path: str | Path,
    architecture: str,
    *,
    layers: int = 2,
    embd: int = 256,
    ffn: int = 512,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    vocab: int = 1024,
    type: Kinds = "Q8_0",
    seed: int = 0,
    tied: bool | None = None,
    context: int = 2048,
    extra: Mapping[str, Any] | None = None,
    hadamard: Rotation | None = None,
    random_bits: bool | None = None,
    parts: int = 1,
    tokenizer: Mapping[str, Any] | None = None,
    rope_factors: bool = False,
    key_heads: int = 2,
    value_heads: int = 4,
    state: int = 64,
) -> Path:
    """Write a model of any shape and return its path (of the first part, where `parts` is more than 1).

    `type` is a TensorType, its name, "Q2_0_G128" (legacy id 42), or a function from tensor name to one of these.
    `extra` adds metadata keys or, with the value None, removes them. `hadamard` rotates the model or declares it so.
    `tied` None means: no output.weight, except for qwen35. `key_heads`, `value_heads` and `state` shape the delta net.
    """
    shape = _Shape(architecture, layers, embd, ffn, heads, kv_heads, head_dim, vocab, context)
    linear = _Linear(key_heads, value_heads, state)
    untied = architecture == "qwen35" if tied is None else not tied
    specs = _specs(shape, linear, untied, rope_factors)
    keys = _keys(shape, linear)
    keys |= tokenizer if tokenizer is not None else _tokenizer(architecture, vocab, seed)
    if hadamard is not None:
        keys |= hadamard.metadata({spec.name: spec.shape for spec in specs})
    keys |= extra or {}
    keys = {key: value for key, value in keys.items() if value is not None}
    weights = sum(int(np.prod(spec.shape)) for spec in specs)
    direct = weights >= RANDOM_BITS_FROM if random_bits is None else random_bits
    kind_of = type if callable(type) else lambda _name: type
    tensors = [make_tensor(spec, kind_of, seed, direct, hadamard) for spec in specs]
    if parts > 1:
        path = Path(path)
        return write_split(path.parent, path.name.removesuffix(".gguf"), keys, tensors, parts=parts)[0]
    return write_gguf(path, keys, tensors)


@dataclass(frozen=True)
class _Shape:
    architecture: str
    layers: int
    embd: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int


@dataclass(frozen=True)
class _Linear:
    key_heads: int
    value_heads: int
    state: int

    @property
    def inner(self) -> int:
        return self.value_heads * self.state

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.state + self.inner


def _keys(s: _Shape, linear: _Linear) -> dict[str, Any]:
    a = s.architecture
    bases = {"llama": 1e4, "qwen2": 1e6, "qwen3": 1e6, "gemma3": 1e6, "qwen35": 1e7}
    keys: dict[str, Any] = {
        "general.architecture": a,
        "general.name": f"synthetic-{a}",
        "general.description": "random weights; no meaning",
        f"{a}.context_length": s.context,
        f"{a}.embedding_length": s.embd,
        f"{a}.block_count": s.layers,
        f"{a}.feed_forward_length": s.ffn,
        f"{a}.attention.head_count": s.heads,
        f"{a}.attention.head_count_kv": s.kv_heads,
        f"{a}.rope.freq_base": bases[a],
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5 if a == "llama" else 1e-6,
        f"{a}.attention.key_length": s.head_dim,
        f"{a}.attention.value_length": s.head_dim,
    }
    if a == "llama":
        keys[f"{a}.rope.dimension_count"] = s.head_dim
    if a == "gemma3":
        keys[f"{a}.attention.sliding_window"] = 32
    if a == "qwen35":
        quarter = s.head_dim // 4
        sections = [quarter - 2 * (quarter // 3), quarter // 3, quarter // 3, 0]
        keys |= {
            f"{a}.rope.dimension_count": s.head_dim // 2,
            f"{a}.rope.dimension_sections": np.array(sections, dtype=np.int32),
            f"{a}.ssm.conv_kernel": 4,
            f"{a}.ssm.state_size": linear.state,
            f"{a}.ssm.group_count": linear.key_heads,
            f"{a}.ssm.time_step_rank": linear.value_heads,
            f"{a}.ssm.inner_size": linear.inner,
            f"{a}.full_attention_interval": 4,
        }
    return keys


def _tokenizer(architecture: str, vocab: int, seed: int) -> dict[str, Any]:
    if architecture == "gemma3":
        return vocabulary.spm(vocab, seed=seed)
    pre = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2", "qwen35": "qwen35"}[architecture]
    return vocabulary.bpe(vocab, pre=pre, seed=seed)


def _specs(s: _Shape, linear: _Linear, untied: bool, rope_factors: bool) -> list[Spec]:
    specs = [Spec("token_embd.weight", (s.embd, s.vocab))]
    if rope_factors:
        specs.append(Spec("rope_freqs.weight", (s.head_dim // 2,), "factor"))
    for layer in range(s.layers):
        block = f"blk.{layer}."
        specs.append(Spec(block + "attn_norm.weight", (s.embd,), "norm"))
        is_linear = s.architecture == "qwen35" and (layer + 1) % 4 != 0
        specs += _delta_net(block, s, linear) if is_linear else _attention(block, s)
        norm = "post_attention_norm" if s.architecture == "qwen35" else "ffn_norm"
        specs.append(Spec(block + norm + ".weight", (s.embd,), "norm"))
        specs += [Spec(f"{block}ffn_{name}.weight", (s.embd, s.ffn)) for name in ("gate", "up")]
        specs.append(Spec(block + "ffn_down.weight", (s.ffn, s.embd)))
        if s.architecture == "gemma3":
            specs.append(Spec(block + "post_ffw_norm.weight", (s.embd,), "norm"))
    specs.append(Spec("output_norm.weight", (s.embd,), "norm"))
    if untied:
        specs.append(Spec("output.weight", (s.embd, s.vocab)))
    return specs


def _attention(block: str, s: _Shape) -> list[Spec]:
    queries, keys = s.heads * s.head_dim, s.kv_heads * s.head_dim
    gate = 2 if s.architecture == "qwen35" else 1
    specs = [
        Spec(block + "attn_q.weight", (s.embd, gate * queries)),
        Spec(block + "attn_k.weight", (s.embd, keys)),
        Spec(block + "attn_v.weight", (s.embd, keys)),
        Spec(block + "attn_output.weight", (queries, s.embd)),
    ]
    if s.architecture in ("qwen3", "qwen35", "gemma3"):
        specs += [Spec(f"{block}attn_{name}_norm.weight", (s.head_dim,), "norm") for name in "qk"]
    if s.architecture == "qwen2":
        sizes = {"q": queries, "k": keys, "v": keys}
        specs += [Spec(f"{block}attn_{name}.bias", (size,), "bias") for name, size in sizes.items()]
    if s.architecture == "gemma3":
        specs.append(Spec(block + "post_attention_norm.weight", (s.embd,), "norm"))
    return specs


def _delta_net(block: str, s: _Shape, linear: _Linear) -> list[Spec]:
    return [
        Spec(block + "attn_qkv.weight", (s.embd, linear.channels)),
        Spec(block + "attn_gate.weight", (s.embd, linear.inner)),
        Spec(block + "ssm_conv1d.weight", (4, linear.channels), "conv"),
        Spec(block + "ssm_dt.bias", (linear.value_heads,), "bias"),
        Spec(block + "ssm_a", (linear.value_heads,), "decay"),
        Spec(block + "ssm_beta.weight", (s.embd, linear.value_heads), "float"),
        Spec(block + "ssm_alpha.weight", (s.embd, linear.value_heads), "float"),
        Spec(block + "ssm_norm.weight", (linear.state,), "norm"),
        Spec(block + "ssm_out.weight", (linear.inner, s.embd)),
    ]


def make_tensor(
    spec: Spec, kind_of: Callable[[str], Kind], seed: int, random_bits: bool, rotation: Rotation | None
) -> Tensor:
    """One tensor with its bytes; a matrix of the type that `kind_of` gives its name, anything else F32."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(spec.name.encode())]))
    cols, rows = spec.shape[0], int(np.prod(spec.shape[1:]))
    if spec.role != "matrix":
        return Tensor(spec.name, spec.shape, 0, quantize("F32", _plain(rng, spec, rows, cols)).reshape(-1))
    kind, type_id = resolve(kind_of(spec.name))
    if random_bits:
        if rotation is not None and rotation.rotate:
            raise ValueError("random bits cannot be rotated: use Rotation(rotate=False), or random_bits=False")
        data = random_blocks(rng, rows, cols, kind)
    else:
        values = float_rows(rng, rows, cols, kind)
        data = quantize(kind, values if rotation is None else rotation.apply(spec.name, values))
    return Tensor(spec.name, spec.shape, type_id, data.reshape(-1))


def _plain(rng: np.random.Generator, spec: Spec, rows: int, cols: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    noise = rng.standard_normal((rows, cols), dtype=np.float32)
    values = {
        "norm": 1 + 0.1 * noise,
        "bias": 0.1 * noise,
        "conv": 0.5 * noise,
        "decay": -np.exp(0.5 * noise),
        "float": noise * np.float32(cols**-0.5),
        "factor": 1 + 7 * np.sort(rng.uniform(size=(rows, cols)), axis=1),
    }[spec.role]
    return np.asarray(values, dtype=np.float32)
