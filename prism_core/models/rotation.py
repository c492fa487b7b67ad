"""How a Hadamard-rotated file changes the products of a graph: which inputs turn, with which signs, in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf import HadamardSpec

EMBEDDING = "token_embd.weight"


@dataclass(frozen=True, eq=False)
class Turn:
    """x -> H(signs * P(x)). `groups` 0: P is the identity; else it gathers the value heads of each key head."""

    key: str
    """Equal for two tensors that take the same turned input."""
    signs: NDArray[np.float32]
    groups: int = 0
    repeats: int = 0
    head_width: int = 0


class Rotation:
    """The rotation of a file, or none (`spec` None). Delta-net sizes are needed for files that group value heads."""

    def __init__(self, spec: HadamardSpec | None, key_heads: int = 0, value_heads: int = 0) -> None:
        self._spec = spec
        self._key_heads, self._value_heads = key_heads, value_heads
        self._signs: dict[int, NDArray[np.float32]] = {}
        self.block = spec.block_size if spec else 0

    def _signs_of(self, width: int) -> NDArray[np.float32]:
        assert self._spec is not None
        if width not in self._signs:
            given = self._spec.signs_for(width)
            self._signs[width] = np.ones(width, np.float32) if given is None else given.astype(np.float32)
        return self._signs[width]

    def embedding_signs(self, name: str, width: int) -> NDArray[np.float32] | None:
        """Signs of a table whose rows must be turned back, else None."""
        if self._spec is None or name not in self._spec.inverse_weight_names:
            return None
        return self._signs_of(width)

    def forward(self, name: str, width: int) -> Turn | None:
        """What the input of matrix `name` goes through. A table that is stored turned is also turned as a head."""
        spec = self._spec
        if spec is None or not (name in spec.weight_names or (name == EMBEDDING and name in spec.inverse_weight_names)):
            return None
        signs = self._signs_of(width)
        if not (spec.gdn_v_grouped and name.endswith(".ssm_out.weight")):
            return Turn("turned", signs)
        repeats = self._value_heads // self._key_heads
        return Turn("turned.grouped", signs, self._key_heads, repeats, width // self._value_heads)
