"""Weights from nothing: seeded float rows for small models, and random quantised bytes for large ones.

Every matrix has zero mean and a standard deviation near 1/sqrt(columns), so that activations of a model built from
them keep their size from layer to layer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf import TensorType

from .quantizers import base3_byte, f16_bytes, join, pack_q3_k_scales, pack_scales_and_minimums

TERNARY = frozenset(
    {TensorType.Q2_0, TensorType.PQ2_0, TensorType.PTQ1_0, TensorType.TQ1_0, TensorType.TQ2_0}
)  # fmt: skip

_SPREAD = {"Q1_0": 1.0, "Q1_0_V1": 1.0, "Q2_0": 0.816, "PQ2_0": 0.816, "PTQ1_0": 0.816, "TQ1_0": 0.816, "TQ2_0": 0.816}
_SPREAD |= {"Q4_0": 4.61, "Q4_1": 4.61, "Q5_0": 9.23, "Q5_1": 9.23, "Q8_0": 73.9, "IQ4_NL": 69.0, "MXFP4": 5.9}
_SPREAD |= {"Q2_K": 1.12 * 9.1, "Q3_K": 2.3 * 18.5, "Q4_K": 4.61 * 48.4, "Q5_K": 9.23 * 48.4, "Q6_K": 18.5 * 73.9}
"""Standard deviation of a random block's values for a scale of 1."""


def float_rows(rng: np.random.Generator, rows: int, cols: int, kind: TensorType) -> NDArray[np.float32]:
    """float32[rows, cols] that suit a type: Gaussian, or exactly ternary with an f16 scale per 128 columns.

    Q2_0, PQ2_0 and PTQ1_0 get the same values from the same generator state, so that files which differ only in the
    type hold equal weights. TQ1_0 and TQ2_0 have one scale to 256 columns.
    """
    spread = cols**-0.5
    if kind not in TERNARY:
        return np.asarray(rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(spread), dtype=np.float32)
    digits = rng.integers(-1, 2, (rows, cols), dtype=np.int8)
    # The group's first weight is never zero: its scale must be found again from the largest weight.
    digits[:, ::64] = np.where(digits[:, ::64] == 0, 1, digits[:, ::64])
    groups = -(-cols // 128)
    scale = (1.22 * spread * rng.uniform(0.75, 1.25, (rows, groups))).astype(np.float16).astype(np.float32)
    if kind.block_size == 256:
        scale = np.repeat(scale[:, ::2], 2, axis=1)[:, :groups]
    return np.asarray(digits * np.repeat(scale, 128, axis=1)[:, :cols], dtype=np.float32)


def random_blocks(rng: np.random.Generator, rows: int, cols: int, kind: TensorType) -> NDArray[np.uint8]:
    """uint8[rows, row_bytes] of random quanta under sane scales, made at the speed of the random generator."""
    count = rows * cols // kind.block_size
    name = kind.name
    if name in ("F32", "F16", "BF16"):
        from .quantizers import quantize

        return quantize(kind, float_rows(rng, rows, cols, kind))
    raw = np.frombuffer(rng.bytes(count * kind.block_bytes), dtype=np.uint8).reshape(count, kind.block_bytes).copy()
    d = (cols**-0.5 / _SPREAD[name] * rng.uniform(0.75, 1.25, count)).astype(np.float32)
    if kind in TERNARY:
        _make_ternary(rng, raw, kind)
    _make_scales_sane(rng, raw, d, kind)
    return raw.reshape(rows, -1)


def _make_ternary(rng: np.random.Generator, raw: NDArray[np.uint8], kind: TensorType) -> None:
    """Map random bytes to bytes that a ternary writer produces, in place."""
    four = np.stack(np.meshgrid(*[np.arange(3)] * 4, indexing="ij"), axis=-1).reshape(81, 4).astype(np.uint8)
    five = np.stack(np.meshgrid(*[np.arange(3)] * 5, indexing="ij"), axis=-1).reshape(243, 5).astype(np.uint8)
    if kind in (TensorType.PTQ1_0, TensorType.TQ1_0):
        split = {TensorType.PTQ1_0: 24, TensorType.TQ1_0: 48}[kind]
        end = kind.scales[0]
        table5 = base3_byte(five[:, :, None])[:, 0]
        table4 = base3_byte(four[:, :, None])[:, 0]
        raw[:, :split] = np.resize(table5, 256)[raw[:, :split]]
        raw[:, split:end] = np.resize(table4, 256)[raw[:, split:end]]
        return
    codes = (four * np.array([1, 4, 16, 64], dtype=np.uint8)).sum(axis=1).astype(np.uint8)
    body = slice(2, None) if kind.scales == (0,) else slice(0, 64)
    raw[:, body] = np.resize(rng.permutation(codes), 256)[raw[:, body]]


def _make_scales_sane(
    rng: np.random.Generator, raw: NDArray[np.uint8], d: NDArray[np.float32], kind: TensorType
) -> None:
    """Overwrite the scales of random blocks, in place, such that values have zero mean and the wanted spread."""
    name = kind.name
    middle = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}.get(name, 0.0)
    if name == "MXFP4":
        raw[:, 0] = np.clip(np.rint(np.log2(d)) + 128, 0, 252)
        return
    if name == "Q2_K":
        raw[:, :16] = rng.integers(1, 16, (len(raw), 16), dtype=np.uint8) * 17
    elif name == "Q3_K":
        raw[:, 96:108] = pack_q3_k_scales(rng.integers(0, 64, (len(raw), 16), dtype=np.uint8))
    elif name in ("Q4_K", "Q5_K"):
        scales = rng.integers(32, 64, (len(raw), 8), dtype=np.uint8)
        raw[:, 4:16] = pack_scales_and_minimums(scales, scales)
    for at, scale in zip(kind.scales, (d, d * np.float32(middle)), strict=False):
        raw[:, at : at + 2] = join(f16_bytes(scale))
