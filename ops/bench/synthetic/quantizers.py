"""Reference quantisers in numpy: float32 rows to the bytes of every type that Prism runs.

They aim at being plainly right, not at the smallest error: a scale comes from the largest value of its group, and each
value goes to the nearest level. The scale is rounded to f16 before levels are chosen, except where a type's own
definition says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prism_core.gguf import TensorType

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

LEGACY_Q2_0 = "Q2_0_G128"
"""Name of the 128-weight Q2_0 that older Prism files carry under type id 42: PQ2_0 blocks with another id."""

IQ4_NL_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
MXFP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)


def resolve(kind: TensorType | str) -> tuple[TensorType, int]:
    """The block layout and the type id to write for a type, its name, or "Q2_0_G128"."""
    if kind == LEGACY_Q2_0:
        return TensorType.PQ2_0, 42
    found = kind if isinstance(kind, TensorType) else TensorType[kind]
    return found, found.id


def quantize(kind: TensorType | str, rows: Floats) -> Bytes:
    """float32[rows, cols] to uint8[rows, row_bytes]; cols must be a multiple of the block size."""
    layout, _ = resolve(kind)
    values = np.ascontiguousarray(np.atleast_2d(rows), dtype=np.float32)
    if values.shape[-1] % layout.block_size:
        raise ValueError(f"{values.shape[-1]} columns are not a multiple of the {layout.name} block")
    blocks = values.reshape(-1, layout.block_size)
    step = max(1, (1 << 20) // layout.block_size)
    encode = _ENCODERS[layout]
    pieces = [encode(blocks[at : at + step]) for at in range(0, len(blocks), step)]
    return np.concatenate(pieces).reshape(len(values), -1)


def f16_bytes(scale: Any) -> Bytes:
    """[n] floats to uint8[n, 2]."""
    return np.asarray(scale, dtype="<f2").reshape(-1, 1).view(np.uint8)


def join(*parts: Any) -> Bytes:
    """Concatenate the fields of blocks."""
    return np.concatenate([np.asarray(part, dtype=np.uint8) for part in parts], axis=1)


def _rounded(scale: Any) -> Floats:
    return np.asarray(scale, dtype="<f2").astype(np.float32)


def _divide(values: Any, by: Any) -> Floats:
    """values / by, and 0 where `by` is 0."""
    out = np.zeros(np.broadcast_shapes(values.shape, by.shape), np.float32)
    np.divide(values, by, out=out, where=by != 0)
    return out


def _extreme(blocks: Floats) -> Floats:
    """The value of largest magnitude of each group (last axis), with its sign."""
    at = np.abs(blocks).argmax(axis=-1)
    extreme: Floats = np.take_along_axis(blocks, at[..., None], axis=-1)[..., 0]
    return extreme


def _levels(values: Floats, low: int, high: int) -> NDArray[np.int16]:
    return np.clip(np.rint(values), low, high).astype(np.int16)


def pack_nibbles(q: Any) -> Bytes:
    """[n, 32] of 0..15 to uint8[n, 16]: first half low, second half high."""
    q = np.asarray(q, dtype=np.uint8)
    packed: Bytes = q[:, :16] | (q[:, 16:] << 4)
    return packed


def _fifth_bits(q: Any) -> Bytes:
    return np.packbits(np.asarray(q, dtype=np.uint8) >> 4, axis=1, bitorder="little")


def _symmetric(blocks: Floats, half: int) -> tuple[Floats, NDArray[np.int16]]:
    """A scale that sends the extreme value to -half, and levels -half..half-1."""
    d = _rounded(_extreme(blocks) / -half)
    return d, _levels(_divide(blocks, d[:, None]), -half, half - 1)


def _affine(blocks: Floats, top: int) -> tuple[Floats, Floats, NDArray[np.int16]]:
    low, high = blocks.min(axis=1), blocks.max(axis=1)
    d, m = _rounded((high - low) / top), _rounded(low)
    return d, m, _levels(_divide(blocks - m[:, None], d[:, None]), 0, top)


def _q4_0(blocks: Floats) -> Bytes:
    d, q = _symmetric(blocks, 8)
    return join(f16_bytes(d), pack_nibbles(q + 8))


def _q4_1(blocks: Floats) -> Bytes:
    d, m, q = _affine(blocks, 15)
    return join(f16_bytes(d), f16_bytes(m), pack_nibbles(q))


def _q5_0(blocks: Floats) -> Bytes:
    d, q = _symmetric(blocks, 16)
    return join(f16_bytes(d), _fifth_bits(q + 16), pack_nibbles((q + 16) & 15))


def _q5_1(blocks: Floats) -> Bytes:
    d, m, q = _affine(blocks, 31)
    return join(f16_bytes(d), f16_bytes(m), _fifth_bits(q), pack_nibbles(q & 15))


def _q8_0(blocks: Floats) -> Bytes:
    d = _rounded(np.abs(blocks).max(axis=1) / 127)
    q = _levels(_divide(blocks, d[:, None]), -127, 127).astype(np.int8)
    return join(f16_bytes(d), q.view(np.uint8))


def _nearest(values: Floats, levels: Floats) -> Bytes:
    order = np.argsort(levels, kind="stable")
    ordered = levels[order]
    middles = (ordered[1:] + ordered[:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def _iq4_nl(blocks: Floats) -> Bytes:
    d = _rounded(_extreme(blocks) / -127)
    return join(f16_bytes(d), pack_nibbles(_nearest(_divide(blocks, d[:, None]), IQ4_NL_LEVELS)))


def _mxfp4(blocks: Floats) -> Bytes:
    largest = np.abs(blocks).max(axis=1)
    exponent = np.where(largest > 0, np.floor(np.log2(np.where(largest > 0, largest, 1))) - 2 + 127, 0)
    e = np.clip(exponent, 0, 252).astype(np.uint8)
    scale = np.ldexp(np.float32(1), e.astype(np.int32) - 128).astype(np.float32)
    return join(e[:, None], pack_nibbles(_nearest(_divide(blocks, scale[:, None]), MXFP4_LEVELS)))


def _q1_0(blocks: Floats) -> Bytes:
    d = np.abs(blocks).mean(axis=1)
    return join(f16_bytes(d), np.packbits(blocks >= 0, axis=1, bitorder="little"))


def _ternary(blocks: Floats) -> tuple[Floats, Bytes]:
    """The scale and the digits 0, 1, 2 for -d, 0, +d."""
    d = _rounded(np.abs(blocks).max(axis=1))
    return d, (_levels(_divide(blocks, d[:, None]), -1, 1) + 1).astype(np.uint8)


def _q2_0(blocks: Floats) -> Bytes:
    d, q = _ternary(blocks)
    c = q.reshape(len(q), -1, 4)
    return join(f16_bytes(d), c[:, :, 0] | (c[:, :, 1] << 2) | (c[:, :, 2] << 4) | (c[:, :, 3] << 6))


def base3_byte(digits: Any) -> Bytes:
    """[n, places, m] digits 0..2, most significant first, to uint8[n, m]; four places leave the fifth digit 0."""
    value = np.zeros((digits.shape[0], digits.shape[2]), dtype=np.uint32)
    for place in range(5):
        value = value * 3 + (digits[:, place] if place < digits.shape[1] else 0)
    return ((value * 256 + 242) // 243).astype(np.uint8)


def _ptq1_0(blocks: Floats) -> Bytes:
    d, q = _ternary(blocks)
    parts = [q[:, :80].reshape(-1, 5, 16), q[:, 80:120].reshape(-1, 5, 8), q[:, 120:].reshape(-1, 4, 2)]
    return join(*(base3_byte(part) for part in parts), f16_bytes(d))


def _tq1_0(blocks: Floats) -> Bytes:
    d, q = _ternary(blocks)
    parts = [q[:, :160].reshape(-1, 5, 32), q[:, 160:240].reshape(-1, 5, 16), q[:, 240:].reshape(-1, 4, 4)]
    return join(*(base3_byte(part) for part in parts), f16_bytes(d))


def _tq2_0(blocks: Floats) -> Bytes:
    d, q = _ternary(blocks)
    return join(pack_two_bits(q), f16_bytes(d))


def pack_two_bits(q: Any) -> Bytes:
    """[n, 256] of 0..3 to uint8[n, 64]: group g of a half in bits 2g."""
    c = np.asarray(q, dtype=np.uint8).reshape(-1, 2, 4, 32)
    packed = c[:, :, 0] | (c[:, :, 1] << 2) | (c[:, :, 2] << 4) | (c[:, :, 3] << 6)
    return packed.astype(np.uint8).reshape(-1, 64)


def pack_scales_and_minimums(scales: Any, minimums: Any) -> Bytes:
    """Two [n, 8] of 0..63 to the uint8[n, 12] of Q4_K and Q5_K."""
    sc, mn = np.asarray(scales, dtype=np.uint8), np.asarray(minimums, dtype=np.uint8)
    first = sc[:, :4] | ((sc[:, 4:] >> 4) << 6)
    second = mn[:, :4] | ((mn[:, 4:] >> 4) << 6)
    return join(first, second, (sc[:, 4:] & 15) | ((mn[:, 4:] & 15) << 4))


def _two_level(blocks: Floats, width: int, top: int, scale_top: int) -> tuple[Floats, Floats, Any, Any, Any]:
    """d, dmin, integer scales and minimums of each `width` values, and levels 0..top, of 256-value blocks."""
    groups = blocks.reshape(len(blocks), -1, width)
    least = np.maximum(0, -groups.min(axis=2))
    scale = (groups.max(axis=2) + least) / top
    d, dmin = _rounded(scale.max(axis=1) / scale_top), _rounded(least.max(axis=1) / scale_top)
    sc = _levels(_divide(scale, d[:, None]), 0, scale_top)
    mn = _levels(_divide(least, dmin[:, None]), 0, scale_top)
    step, floor = d[:, None] * sc, dmin[:, None] * mn
    q = _levels(_divide(groups + floor[:, :, None], step[:, :, None]), 0, top)
    return d, dmin, sc, mn, q.reshape(len(blocks), 256).astype(np.uint8)


def _runs(q: Bytes) -> Bytes:
    """[n, 256] of 0..15 to uint8[n, 128]: of each 64 values, the first 32 low, the others high."""
    pairs = (q & 15).reshape(-1, 4, 2, 32)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).astype(np.uint8).reshape(-1, 128)


def _q2_k(blocks: Floats) -> Bytes:
    d, dmin, sc, mn, q = _two_level(blocks, 16, 3, 15)
    return join(sc | (mn << 4), pack_two_bits(q), f16_bytes(d), f16_bytes(dmin))


def _q4_k(blocks: Floats) -> Bytes:
    d, dmin, sc, mn, q = _two_level(blocks, 32, 15, 63)
    return join(f16_bytes(d), f16_bytes(dmin), pack_scales_and_minimums(sc, mn), _runs(q))


def _q5_k(blocks: Floats) -> Bytes:
    d, dmin, sc, mn, q = _two_level(blocks, 32, 31, 63)
    qh = np.packbits((q >> 4).reshape(-1, 8, 32).transpose(0, 2, 1), axis=2, bitorder="little").reshape(-1, 32)
    return join(f16_bytes(d), f16_bytes(dmin), pack_scales_and_minimums(sc, mn), qh, _runs(q))


def _signed_groups(blocks: Floats, half: int, scale_top: int) -> tuple[Floats, Any, Any]:
    """d, signed integer scales of each 16 values, and levels -half..half-1, of 256-value blocks."""
    groups = blocks.reshape(len(blocks), 16, 16)
    scale = _extreme(groups) / -half
    d = _rounded(np.abs(scale).max(axis=1) / scale_top)
    sc = _levels(_divide(scale, d[:, None]), -scale_top, scale_top)
    q = _levels(_divide(groups, (d[:, None] * sc)[:, :, None]), -half, half - 1)
    return d, sc, q.reshape(len(blocks), 256)


def pack_q3_k_scales(scales: Any) -> Bytes:
    """[n, 16] of 0..63 to the uint8[n, 12] of Q3_K."""
    sc = np.asarray(scales, dtype=np.uint8)
    low = (sc[:, :8] & 15) | ((sc[:, 8:] & 15) << 4)
    top = (sc >> 4).reshape(-1, 4, 4)
    return join(low, top[:, 0] | (top[:, 1] << 2) | (top[:, 2] << 4) | (top[:, 3] << 6))


def _q3_k(blocks: Floats) -> Bytes:
    d, sc, q = _signed_groups(blocks, 4, 31)
    code = (q + 4).astype(np.uint8)
    hmask = np.packbits((code >> 2).reshape(-1, 8, 32).transpose(0, 2, 1), axis=2, bitorder="little").reshape(-1, 32)
    return join(hmask, pack_two_bits(code & 3), pack_q3_k_scales(sc + 32), f16_bytes(d))


def pack_q6_k(code: Any) -> Bytes:
    """[n, 256] of 0..63 to the low nibbles and high pairs of Q6_K, uint8[n, 192]."""
    c = np.asarray(code, dtype=np.uint8)
    groups = (c & 15).reshape(-1, 2, 4, 32)
    low = np.stack([groups[:, :, 0] | (groups[:, :, 2] << 4), groups[:, :, 1] | (groups[:, :, 3] << 4)], axis=2)
    return join(low.reshape(-1, 128), pack_two_bits(c >> 4))


def _q6_k(blocks: Floats) -> Bytes:
    d, sc, q = _signed_groups(blocks, 32, 127)
    return join(pack_q6_k(q + 32), sc.astype(np.int8).view(np.uint8), f16_bytes(d))


def _f32(blocks: Floats) -> Bytes:
    return blocks.astype("<f4").view(np.uint8)


def _f16(blocks: Floats) -> Bytes:
    return blocks.astype("<f2").view(np.uint8)


def _bf16(blocks: Floats) -> Bytes:
    bits = blocks.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").view(np.uint8)


_ENCODERS: dict[TensorType, Callable[[Floats], Bytes]] = {
    TensorType[name]: encode
    for name, encode in {
        "F32": _f32, "F16": _f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
        "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl,
        "MXFP4": _mxfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, "Q1_0_V1": _q1_0, "Q1_0": _q1_0, "Q2_0": _q2_0,
        "PQ2_0": _q2_0, "PTQ1_0": _ptq1_0,
    }.items()
}  # fmt: skip
