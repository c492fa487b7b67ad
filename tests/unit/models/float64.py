"""The architectures once more, in float64 numpy, straight from their equations: what the engine is held against.

Nothing is shared with the engine but the GGUF reader and `dequantize`: one token after another, no cache tricks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf import dequantize, open_gguf

Array = NDArray[np.float64]


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def gelu_by_half_table(x: Array) -> Array:
    """GELU as the reference engine reads it: from a table of float16 for float16 arguments."""
    return gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


@functools.cache
def sylvester(block: int) -> Array:
    """The normalised transform as a matrix, by its definition."""
    ones = np.array([[(-1) ** (r & c).bit_count() for c in range(block)] for r in range(block)])
    return ones / math.sqrt(block)


class Forward:
    """One conversation with a file. `logits(token)` gives the float64 logits after one more token."""

    def __init__(self, path: Path, activation: Callable[[Array], Array] | None = None) -> None:
        self.file = open_gguf(path)
        self.arch = self.file.architecture
        self.layers = self.key("block_count") - self.key("nextn_predict_layers", 0)
        self.width = self.key("embedding_length")
        self.heads = self.per_layer("attention.head_count")
        self.kv_heads = self.per_layer("attention.head_count_kv", self.heads)
        self.dim = self.key("attention.key_length", self.width // self.heads[0])
        self.eps = self.key("attention.layer_norm_rms_epsilon")
        self.activation = activation or (gelu if self.arch == "gemma3" else silu)
        self.past: list[dict[str, Any]] = [{"k": [], "v": []} for _ in range(self.layers)]
        self.position = 0
        self._matrices: dict[str, Array] = {}

    def key(self, name: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.arch}.{name}", default)

    def per_layer(self, name: str, default: Any = None) -> list[int]:
        value = self.key(name, default)
        return [int(n) for n in value] if hasattr(value, "__len__") else [int(value)] * self.key("block_count")

    def has(self, name: str) -> bool:
        return name in self.file.tensors

    def tensor(self, name: str) -> Array:
        if name not in self._matrices:
            info = self.file.tensors[name]
            flat = dequantize(info.type, info.data, info.elements).astype(np.float64)
            rows = [n for n in info.shape[1:] if n > 1]
            self._matrices[name] = flat.reshape(*rows[::-1], info.shape[0])
        return self._matrices[name]

    def vector(self, name: str) -> Array:
        return self.tensor(name).reshape(-1)

    # -- the rotation of Hadamard files, by its matrix ------------------------------------------------------------

    def turned(self, name: str, x: Array) -> Array:
        spec = self.file.hadamard
        if spec is None:
            return x
        is_head = name == "token_embd.weight" and name in spec.inverse_weight_names
        if name not in spec.weight_names and not is_head:
            return x
        if spec.gdn_v_grouped and name.endswith("ssm_out.weight"):
            groups, heads = self.key("ssm.group_count"), self.key("ssm.time_step_rank")
            source = x.reshape(heads // groups, groups, -1)
            x = np.stack([source[r, k] for k in range(groups) for r in range(heads // groups)]).reshape(-1)
        return self.transform(self.signs(len(x)) * x)

    def signs(self, width: int) -> Array:
        assert self.file.hadamard is not None
        signs = self.file.hadamard.signs_for(width)
        return np.ones(width) if signs is None else signs.astype(np.float64)

    def transform(self, x: Array) -> Array:
        assert self.file.hadamard is not None
        block = self.file.hadamard.block_size
        return np.asarray((x.reshape(-1, block) @ sylvester(block).T).reshape(-1))

    def times(self, name: str, x: Array) -> Array:
        result = np.atleast_1d(self.tensor(name) @ self.turned(name, x))
        bias = name.replace(".weight", ".bias")
        return np.asarray(result + self.vector(bias) if self.has(bias) else result)

    # -- parts ----------------------------------------------------------------------------------------------------

    def norm(self, x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.eps) * self.vector(name))

    def angles(self, *, local: bool) -> tuple[Array, float]:
        """Angles of this position, and the magnitude of cos and sin."""
        n = self.key("rope.dimension_count", self.dim)
        base = self.key("rope.freq_base_swa", 10000.0) if local else self.key("rope.freq_base", 10000.0)
        t = self.position * base ** (-2.0 * np.arange(n // 2) / n)
        kind, factor = (
            self.key("rope.scaling.type", "linear"),
            self.key("rope.scaling.factor", self.key("rope.scale_linear", 1.0) or 1.0),
        )
        magnitude = 1.0
        if not local and kind == "linear":
            t = t / factor
        elif not local and kind == "yarn":
            original = self.key("rope.scaling.original_context_length", self.key("context_length"))

            def corner(turns: float) -> float:
                return float(n * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base)))

            low, high = max(0, math.floor(corner(32))), min(n - 1, math.ceil(corner(1)))
            ramp = 1 - np.clip((np.arange(n // 2) - low) / max(0.001, high - low), 0, 1)
            t = t / factor * (1 - ramp) + t * ramp
            magnitude = (1 + 0.1 * math.log(factor)) * self.key("rope.scaling.attn_factor", 1.0)
        if self.has("rope_freqs.weight"):
            t = t / self.vector("rope_freqs.weight")
        return t, magnitude

    def rope(self, x: Array, *, local: bool = False) -> Array:
        """x: [heads, dim]."""
        t, magnitude = self.angles(local=local)
        cos, sin = np.cos(t) * magnitude, np.sin(t) * magnitude
        out, half = x.copy(), len(t)
        first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if self.arch != "llama":
            first, second = slice(0, half), slice(half, 2 * half)
        a, b = x[:, first], x[:, second]
        out[:, first], out[:, second] = a * cos - b * sin, a * sin + b * cos
        return out

    def attend(self, layer: int, q: Array, k: Array, v: Array, scale: float, window: int = 0) -> Array:
        past = self.past[layer]
        past["k"].append(k)
        past["v"].append(v)
        first = max(0, len(past["k"]) - window) if window else 0
        keys, values = np.stack(past["k"][first:]), np.stack(past["v"][first:])
        out = np.empty_like(q)
        for head in range(len(q)):
            source = head // (len(q) // len(k))
            scores = keys[:, source] @ q[head] * scale
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ values[:, source]
        return out.reshape(-1)

    def attention(self, layer: int, a: Array) -> Array:
        at, window, local = f"blk.{layer}.", 0, False
        if self.arch == "gemma3":
            pattern, window = self.key("attention.sliding_window_pattern", 6), self.key("attention.sliding_window", 0)
            local = window > 0 and layer % pattern < pattern - 1
        q = self.times(f"{at}attn_q.weight", a).reshape(self.heads[layer], -1)
        gate = q[:, self.dim :]
        q = q[:, : self.dim]
        k = self.times(f"{at}attn_k.weight", a).reshape(self.kv_heads[layer], self.dim)
        v = self.times(f"{at}attn_v.weight", a).reshape(self.kv_heads[layer], self.dim)
        if self.has(f"{at}attn_q_norm.weight"):
            q, k = self.norm(q, f"{at}attn_q_norm.weight"), self.norm(k, f"{at}attn_k_norm.weight")
        q, k = self.rope(q, local=local), self.rope(k, local=local)
        out = self.attend(layer, q, k, v, self.dim**-0.5, window if local else 0)
        if gate.size:
            out = out / (1 + np.exp(-gate.reshape(-1)))
        return self.times(f"{at}attn_output.weight", out)

    def recurrent(self, layer: int) -> bool:
        listed = self.key("attention.recurrent_layers")
        if listed is not None:
            return bool(listed[layer])
        return (layer + 1) % int(self.key("full_attention_interval", 4)) != 0

    def delta_net(self, layer: int, a: Array) -> Array:
        at, past = f"blk.{layer}.", self.past[layer]
        groups, heads, size = (self.key(f"ssm.{n}") for n in ("group_count", "time_step_rank", "state_size"))
        u = self.times(f"{at}attn_qkv.weight", a)
        z = self.times(f"{at}attn_gate.weight", a).reshape(heads, size)
        beta = 1 / (1 + np.exp(-self.times(f"{at}ssm_beta.weight", a)))
        x = self.times(f"{at}ssm_alpha.weight", a) + self.vector(f"{at}ssm_dt.bias")
        g = self.vector(f"{at}ssm_a") * np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))
        window = [*past.setdefault("u", [np.zeros_like(u)] * 3), u]
        past["u"] = window[1:]
        c = silu(np.asarray(sum(self.tensor(f"{at}ssm_conv1d.weight")[:, tap] * window[tap] for tap in range(4))))
        q, k = c[: groups * size].reshape(groups, size), c[groups * size : 2 * groups * size].reshape(groups, size)
        v = c[2 * groups * size :].reshape(heads, size)
        q, k = (part / np.sqrt((part**2).sum(axis=1, keepdims=True) + self.eps) for part in (q, k))
        states = past.setdefault("s", np.zeros((heads, size, size)))
        y = np.empty((heads, size))
        for head in range(heads):
            s = states[head]
            s *= np.exp(g[head])
            d = (v[head] - k[head % groups] @ s) * beta[head]
            s += np.outer(k[head % groups], d)
            o = q[head % groups] @ s / math.sqrt(size)
            y[head] = self.norm(o, f"{at}ssm_norm.weight") * silu(z[head])
        return self.times(f"{at}ssm_out.weight", y.reshape(-1))

    def feed_forward(self, layer: int, h: Array) -> Array:
        at = f"blk.{layer}.ffn_"
        gate, up = self.times(f"{at}gate.weight", h), self.times(f"{at}up.weight", h)
        return self.times(f"{at}down.weight", self.activation(gate) * up)

    def logits(self, token: int) -> Array:
        x = self.tensor("token_embd.weight")[token].copy()
        x = np.atleast_1d(x)
        spec = self.file.hadamard
        if spec is not None and "token_embd.weight" in spec.inverse_weight_names:
            x = self.signs(self.width) * self.transform(x)
        if self.arch == "gemma3":
            x = x * math.sqrt(self.width)
        for layer in range(self.layers):
            at = f"blk.{layer}."
            recurrent = self.arch == "qwen35" and self.recurrent(layer)
            a = self.norm(x, f"{at}attn_norm.weight")
            mixed = self.delta_net(layer, a) if recurrent else self.attention(layer, a)
            if self.arch == "gemma3":
                mixed = self.norm(mixed, f"{at}post_attention_norm.weight")
            x = x + mixed
            name = "post_attention_norm" if self.arch == "qwen35" else "ffn_norm"
            out = self.feed_forward(layer, self.norm(x, f"{at}{name}.weight"))
            x = x + (self.norm(out, f"{at}post_ffw_norm.weight") if self.arch == "gemma3" else out)
        self.position += 1
        head = "output.weight" if self.has("output.weight") else "token_embd.weight"
        result = self.times(head, self.norm(x, "output_norm.weight"))
        cap = self.key("final_logit_softcapping", 0.0)
        return np.asarray(cap * np.tanh(result / cap) if cap else result)

    def each(self, ids: Sequence[int]) -> Array:
        """Logits after each token: [len(ids), vocab]."""
        return np.stack([self.logits(token) for token in ids])
