"""Hadamard-rotated twins of synthetic models, as `prism.hadamard.*` files have them.

With R the map x -> H(s * P(x)), which is orthogonal, a row w becomes R(w), so that R(w) . R(x) = w . x. An embedding
row z0 becomes z = R(z0) as well, which the reader undoes by s * H(z).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .container import Typed

ROTATED = re.compile(
    r"output\.weight|blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down)|ssm_out)\.weight"
)  # fmt: skip
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Rotation:
    """What to declare, and whether to rotate the weights (`rotate`) or to take them as rotated already.

    `version` None means 2 for a tied model and 1 for others. With `embedding` false (version 1 only) the table is left
    as it is. `heads` (key heads, value heads per key head, head size) is needed with `grouped`, for ssm_out.
    """

    block: int = 64
    version: int | None = None
    explicit_signs: bool = True
    embedding: bool = True
    grouped: bool = False
    heads: tuple[int, int, int] = (1, 1, 1)
    rotate: bool = True
    seed: int = 77
    extra: Mapping[str, Any] = field(default_factory=dict)

    def signs(self, width: int) -> NDArray[np.int8]:
        """The +1/-1 vector of a width."""
        if not self.explicit_signs:
            return np.ones(width, dtype=np.int8)
        return (np.random.default_rng([self.seed, width]).integers(0, 2, width) * 2 - 1).astype(np.int8)

    def applies_to(self, name: str) -> bool:
        return ROTATED.fullmatch(name) is not None or (name == EMBEDDING and self.embedding)

    def apply(self, name: str, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Rotate the rows of the tensor called `name`; others come back unchanged."""
        if not self.rotate or not self.applies_to(name):
            return rows
        values = rows.astype(np.float64)
        if self.grouped and name.endswith("ssm_out.weight"):
            values = group_value_heads(values, *self.heads)
        return hadamard(values * self.signs(rows.shape[-1]), self.block).astype(np.float32)

    def metadata(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
        """The keys to declare for a model whose tensors have `shapes` (ne order)."""
        tied = HEAD not in shapes
        version = self.version or (2 if tied and self.embedding else 1)
        names = [name for name in shapes if ROTATED.fullmatch(name)]
        listed = names + ([EMBEDDING] if self.embedding else [])
        widths = sorted({shapes[name][0] for name in listed})
        keys: dict[str, Any] = {
            "version": version,
            "block_size": self.block,
            "transform": "normalized-sylvester-walsh-hadamard",
            "axis": "input-last-dimension",
            "sign_mode": "explicit" if self.explicit_signs else "identity",
            "weight_names": Typed("string", names),
        }
        if self.explicit_signs:
            keys["sign_widths"] = np.array(widths, dtype=np.int32)
            keys["sign_values"] = np.concatenate([self.signs(width) for width in widths])
        if self.embedding:
            keys["inverse_weight_names"] = Typed("string", [EMBEDDING])
        if self.grouped:
            keys["gdn_v_grouped"] = True
        if version == 2:
            keys["tied_output"] = True
        keys |= self.extra
        return {f"prism.hadamard.{name}": value for name, value in keys.items() if value is not None}


def hadamard(values: NDArray[np.float64], block: int) -> NDArray[np.float64]:
    """The normalised transform of every contiguous `block` of the last axis, in natural order."""
    shape = values.shape
    work = values.reshape(-1, block)
    step = 1
    while step < block:
        pairs = work.reshape(-1, block // (2 * step), 2, step)
        work = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2).reshape(-1, block)
        step *= 2
    turned: NDArray[np.float64] = (work / np.sqrt(block)).reshape(shape)
    return turned


def group_value_heads(values: NDArray[Any], key_heads: int, repeat: int, size: int) -> NDArray[Any]:
    """Tiled value heads (index r * key_heads + k) to grouped ones (index k * repeat + r), on the last axis."""
    tiled = values.reshape(*values.shape[:-1], repeat, key_heads, size)
    return np.swapaxes(tiled, -3, -2).reshape(values.shape)
