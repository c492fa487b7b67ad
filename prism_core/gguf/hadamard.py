"""The rotation that a file declares under `prism.hadamard.*`: read, checked in full, never ignored.

Invariant: a file with any such key either yields a `HadamardSpec` that says for every tensor whether and how it is
rotated, or is refused. An unknown key, version or word is a refusal, since running a rotated file without the right
rotation gives fluent garbage and no error. Version 2 is known from its description only, no public file has been seen.

With H the normalised Walsh-Hadamard transform of each block of `block_size` values in natural order, s the signs of
the width and P the reordering of value heads (`gdn_v_grouped`, for ssm_out only): a listed weight is applied as
y = W . H(s * P(x)), and a row z of a table listed as inverse becomes h = s * H(z). In version 2 the head is the
embedding table, applied by the first rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .metadata import Metadata, show

PREFIX = "prism.hadamard."
TRANSFORM = "normalized-sylvester-walsh-hadamard"
AXIS = "input-last-dimension"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ARCHITECTURES = frozenset({"llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe", "qwen3next", "dspark"})
KEYS = frozenset(
    {"version", "block_size", "transform", "axis", "sign_mode", "sign_widths", "sign_values"}
    | {"weight_names", "inverse_weight_names", "gdn_v_grouped", "tied_output"}
)
MAX_BLOCK = 1 << 20
_ROTATED_KINDS = re.compile(
    r"output\.weight|blk\.\d+\.(attn_(q|k|v|qkv|gate|output)|ffn_(gate|up|down)|ssm_out)\.weight"
)

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class HadamardSpec:
    """A checked rotation.

    `signs` maps a width to its int8 vector of +1 and -1, or is empty where all signs are +1 (`signs_for`).
    `weight_names` are rotated on their input, `inverse_weight_names` are tables whose rows are rotated back.
    """

    version: int
    block_size: int
    signs: Mapping[int, NDArray[np.int8]]
    weight_names: frozenset[str]
    inverse_weight_names: frozenset[str]
    gdn_v_grouped: bool
    tied_output: bool

    def signs_for(self, width: int) -> NDArray[np.int8] | None:
        """The signs for inputs of `width` values, or None where all are +1."""
        return self.signs.get(width)


def read_hadamard(metadata: Metadata, shapes: Shapes) -> HadamardSpec | None:
    """The rotation of a file whose tensors have `shapes` (ne order), or None where it declares none.

    Raises ModelError for anything that is not understood in full.
    """
    present = {key[len(PREFIX) :] for key in metadata if key.startswith(PREFIX)}
    if not present:
        return None
    reader = _Reader(metadata, shapes)
    reader.check_keys(present)
    return reader.spec()


class _Reader:
    def __init__(self, metadata: Metadata, shapes: Shapes) -> None:
        self.metadata = metadata
        self.shapes = shapes

    def error(self, text: str) -> ModelError:
        return ModelError(f"{self.metadata.source}: {text}")

    def check_keys(self, present: set[str]) -> None:
        if "version" not in present:
            first = PREFIX + min(present)
            raise self.error(f"key {first!r} declares a rotation, but {PREFIX + 'version'!r} is missing")
        version = self.metadata.require(PREFIX + "version", int)
        if version not in (1, 2):
            raise self.error(f"key {PREFIX + 'version'!r} is {version}; versions 1 and 2 of the rotation are known")
        for name in sorted(present - KEYS):
            raise self.error(f"key {show(PREFIX + name)} is unknown: the file may need a newer Prism")
        architecture = self.metadata.require("general.architecture", str)
        if architecture not in ARCHITECTURES:
            raise self.error(f"a rotation is declared, which architecture {show(architecture)} does not have")

    def spec(self) -> HadamardSpec:
        metadata = self.metadata
        version = metadata.require(PREFIX + "version", int)
        block = metadata.require(PREFIX + "block_size", int, low=2, high=MAX_BLOCK)
        if block & (block - 1):
            raise self.error(f"key {PREFIX + 'block_size'!r} must be a power of two, not {block}")
        self.word("transform", TRANSFORM)
        self.word("axis", AXIS)
        weights = self.names("weight_names")
        inverse = self.names("inverse_weight_names") if PREFIX + "inverse_weight_names" in metadata else ()
        grouped = metadata.optional(PREFIX + "gdn_v_grouped", bool, False)
        for name in self.shapes if grouped else ():
            # Grouped value heads are put in order by the rotation of ssm_out's input: without it they would stay mixed.
            if name.endswith(".ssm_out.weight") and name not in weights:
                raise self.error(
                    f"key {PREFIX + 'gdn_v_grouped'!r} is true, but {PREFIX + 'weight_names'!r} lacks {show(name)}"
                )
        tied = metadata.optional(PREFIX + "tied_output", bool, False)
        widths = self.widths(weights, inverse, version, block)
        spec = HadamardSpec(
            version=version,
            block_size=block,
            signs=self.signs(widths),
            weight_names=frozenset(weights),
            inverse_weight_names=frozenset(inverse),
            gdn_v_grouped=grouped,
            tied_output=tied,
        )
        self.check_head(spec)
        return spec

    def word(self, name: str, known: str) -> None:
        value = self.metadata.require(PREFIX + name, str)
        if value != known:
            raise self.error(f"key {PREFIX + name!r} is {show(value)}; only {known!r} is known")

    def names(self, name: str) -> tuple[str, ...]:
        names = self.metadata.strings(PREFIX + name)
        seen: set[str] = set()
        for entry in names:
            if entry in seen:
                raise self.error(f"key {PREFIX + name!r} lists {show(entry)} twice")
            seen.add(entry)
        return names

    def widths(self, weights: tuple[str, ...], inverse: tuple[str, ...], version: int, block: int) -> dict[int, str]:
        """Every rotated width and one tensor that has it; checks each listed name, its kind and its shape."""
        widths: dict[int, str] = {}
        for key, names in (("weight_names", weights), ("inverse_weight_names", inverse)):
            for name in names:
                shape = self.shapes.get(name)
                if shape is None:
                    raise self.error(f"key {PREFIX + key!r} lists {show(name)}, which the file does not contain")
                if len(shape) != 2:
                    raise self.error(f"key {PREFIX + key!r} lists {show(name)} of shape {list(shape)}, not a matrix")
                known = name == EMBEDDING if key.startswith("inverse") else _ROTATED_KINDS.fullmatch(name) is not None
                # The tied head of version 2 is the embedding table under the forward rule: listing it says so twice.
                if not known and not (version == 2 and name == EMBEDDING):
                    raise self.error(f"key {PREFIX + key!r} lists {show(name)}, a kind that is never rotated")
                if shape[0] % block:
                    raise self.error(f"tensor {name!r} has rows of {shape[0]} values, not a multiple of block {block}")
                widths.setdefault(shape[0], name)
        if not weights:
            raise self.error(f"key {PREFIX + 'weight_names'!r} is empty")
        return widths

    def signs(self, widths: dict[int, str]) -> dict[int, NDArray[np.int8]]:
        mode = self.metadata.require(PREFIX + "sign_mode", str)
        if mode not in ("identity", "explicit"):
            raise self.error(f"key {PREFIX + 'sign_mode'!r} is {show(mode)}; 'identity' and 'explicit' are known")
        if mode == "identity" and PREFIX + "sign_values" not in self.metadata:
            return {}
        listed = self.metadata.integers(PREFIX + "sign_widths", low=1)
        if len(listed) > len(self.shapes):
            raise self.error(
                f"key {PREFIX + 'sign_widths'!r} has {len(listed)} entries, more than the {len(self.shapes)} tensors"
            )
        sizes = [int(width) for width in listed]
        values = self.metadata.integers(PREFIX + "sign_values")
        if sum(sizes) != len(values):
            raise self.error(
                f"key {PREFIX + 'sign_values'!r} has {len(values)} entries, but {PREFIX + 'sign_widths'!r} sums to "
                f"{sum(sizes)}"
            )
        wrong = np.flatnonzero((values != 1) & (values != -1))
        if len(wrong):
            raise self.error(f"key {PREFIX + 'sign_values'!r}: entry {wrong[0]} is {values[wrong[0]]}, not +1 or -1")
        if len(set(sizes)) < len(sizes):
            raise self.error(f"key {PREFIX + 'sign_widths'!r} lists a width twice in {show(sizes)}")
        if mode == "identity":
            if (values < 0).any():
                raise self.error(f"key {PREFIX + 'sign_mode'!r} is 'identity', but there are negative sign_values")
            return {}
        vectors = np.split(values.astype(np.int8), np.cumsum(sizes)[:-1]) if sizes else []
        signs = dict(zip(sizes, vectors, strict=True))
        for width, name in widths.items():
            if width not in signs:
                raise self.error(
                    f"tensor {name!r} is rotated over {width} values, but there are no signs of that width"
                )
        return signs

    def check_head(self, spec: HadamardSpec) -> None:
        """The head must be an own tensor (version 1), or the inverse-listed embedding table itself (version 2)."""
        tied, has_head = spec.tied_output, HEAD in self.shapes
        rotated_table = EMBEDDING in spec.inverse_weight_names
        if spec.version == 1 and tied:
            raise self.error(f"key {PREFIX + 'tied_output'!r} is true, which needs version 2 of the rotation, not 1")
        if spec.version == 1 and rotated_table and not has_head:
            raise self.error(
                f"{EMBEDDING!r} is rotated and also the head, which needs version 2 of the rotation, not 1"
            )
        if spec.version == 2 and not tied:
            raise self.error(f"version 2 of the rotation needs {PREFIX + 'tied_output'!r} to be true")
        if spec.version == 2 and has_head:
            raise self.error(f"version 2 of the rotation ties the head, but the file contains {HEAD!r}")
        if spec.version == 2 and not rotated_table:
            raise self.error(f"version 2 of the rotation needs {EMBEDDING!r} in {PREFIX + 'inverse_weight_names'!r}")
