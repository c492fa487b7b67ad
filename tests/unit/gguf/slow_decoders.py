"""A second, slow opinion on every block layout that the gguf package cannot decode.

One value at a time, in plain Python, straight from the written definition of the layout: no code and no table is
shared with `prism_core.gguf.dequantize`. Single precision is kept by numpy scalars.
"""

from __future__ import annotations

import struct

import numpy as np


def f16(raw: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", raw, at)[0])


def sign_block(raw: bytes, size: int) -> list[np.float32]:
    """Q1_0 and its 32-weight first version: scale, then one bit per weight, least significant first."""
    d = f16(raw, 0)
    return [d if raw[2 + j // 8] >> (j % 8) & 1 else -d for j in range(size)]


def two_bit_block(raw: bytes, size: int) -> list[np.float32]:
    """Q2_0 and PQ2_0: scale, then four two-bit codes to a byte, lowest first, code 1 is zero."""
    d = f16(raw, 0)
    return [np.float32((raw[2 + j // 4] >> (2 * (j % 4)) & 3) - 1) * d for j in range(size)]


def base3_digit(byte: int, place: int) -> int:
    """Digit `place` (0 is the most significant of five) of a base-3 byte."""
    power = 1
    for _ in range(place):
        power *= 3
    return (byte * power & 0xFF) * 3 // 256


def ptq1_0_block(raw: bytes) -> list[np.float32]:
    d = f16(raw, 26)
    digits = [0] * 128
    for n in range(5):
        for m in range(16):
            digits[n * 16 + m] = base3_digit(raw[m], n)
        for m in range(8):
            digits[80 + n * 8 + m] = base3_digit(raw[16 + m], n)
    for n in range(4):
        for h in range(2):
            digits[120 + n * 2 + h] = base3_digit(raw[24 + h], n)
    return [np.float32(digit - 1) * d for digit in digits]


SLOW = {
    "Q1_0": lambda raw: sign_block(raw, 128),
    "Q1_0_V1": lambda raw: sign_block(raw, 32),
    "Q2_0": lambda raw: two_bit_block(raw, 64),
    "PQ2_0": lambda raw: two_bit_block(raw, 128),
    "PTQ1_0": ptq1_0_block,
}
