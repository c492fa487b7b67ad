"""Decoding is bit-equal to the gguf package where it knows a type, and to a slow second decoder where it does not."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from prism_core.gguf import SUPPORTED, TensorType, dequantize


def _load_slow_decoders():
    spec = importlib.util.spec_from_file_location("slow_decoders", Path(__file__).with_name("slow_decoders.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SLOW


SLOW = _load_slow_decoders()
BY_ORACLE = [kind for kind in SUPPORTED if kind.name not in SLOW]


def random_blocks(kind: TensorType, count: int, seed: int) -> np.ndarray:
    """Random bytes with finite scales of both signs, subnormals and zeros among them."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    if kind.scale_form == "f16":
        for at in kind.scales:
            scales = rng.normal(0, 2.0 ** rng.integers(-24, 8, count)).astype("<f2")
            scales[:2] = 0.0, -0.0
            blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def assert_bits_equal(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == expected.dtype == np.float32
    both_nan = np.isnan(got) & np.isnan(expected)
    differ = np.flatnonzero((got.view(np.uint32) != expected.view(np.uint32)) & ~both_nan)
    assert not len(differ), (
        f"{len(differ)} values differ, first {differ[:3]}: {got[differ[:3]]}, {expected[differ[:3]]}"
    )


@pytest.mark.parametrize("kind", BY_ORACLE, ids=lambda kind: kind.name)
def test_random_blocks_decode_bit_for_bit_as_the_gguf_package_decodes_them(kind):
    blocks = random_blocks(kind, 4000, seed=kind.id)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = quants.dequantize(blocks, GGMLQuantizationType[kind.name])
    got = dequantize(kind, blocks.reshape(-1), len(blocks) * kind.block_size)
    assert_bits_equal(got, np.ascontiguousarray(expected, dtype=np.float32).reshape(-1))


@pytest.mark.parametrize(
    "kind", [t for t in SUPPORTED if t.name not in ("F32", "Q1_0_V1", "PQ2_0", "PTQ1_0")], ids=lambda kind: kind.name
)
def test_stored_vectors_of_llama_cpp_are_matched_bit_for_bit(kind, data):
    with np.load(data / "dequantize.npz") as stored:
        blocks, expected = stored[f"{kind.name}.bytes"], stored[f"{kind.name}.values"]
    assert_bits_equal(dequantize(kind, blocks, len(expected)), expected)


@pytest.mark.parametrize("name", SLOW)
def test_random_blocks_of_prism_types_decode_as_their_written_definition_says(name):
    kind = TensorType[name]
    blocks = random_blocks(kind, 300, seed=kind.id)
    expected = np.array([value for block in blocks for value in SLOW[name](block.tobytes())], dtype=np.float32)
    assert_bits_equal(dequantize(kind, blocks.reshape(-1), len(blocks) * kind.block_size), expected)


def test_every_byte_of_a_base_3_block_decodes_at_every_place():
    kind = TensorType.PTQ1_0
    blocks = np.repeat(np.arange(256, dtype=np.uint8)[:, None], kind.block_bytes, axis=1)
    blocks[:, 26:] = np.array([0x00, 0x3C], dtype=np.uint8)  # d = 1
    got = dequantize(kind, blocks.reshape(-1), 256 * 128)
    assert_bits_equal(got, np.array([v for b in blocks for v in SLOW["PTQ1_0"](b.tobytes())], dtype=np.float32))
    assert set(np.unique(got)) == {-1.0, 0.0, 1.0}


def test_the_fourth_two_bit_code_means_plus_two():
    blocks = np.full(TensorType.Q2_0.block_bytes, 0xFF, dtype=np.uint8)
    blocks[:2] = 0x00, 0x3C
    assert (dequantize(TensorType.Q2_0, blocks, 64) == 2.0).all()


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_non_finite_scales_decode_without_a_warning(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dequantize(kind, np.full(4 * kind.block_bytes, 0xFF, dtype=np.uint8), 4 * kind.block_size)


def test_pieces_join_without_a_seam():
    kind = TensorType.Q4_K
    blocks = random_blocks(kind, 5000, seed=5)
    whole = dequantize(kind, blocks.reshape(-1), len(blocks) * 256)
    rows = [dequantize(kind, block, 256) for block in blocks]
    assert_bits_equal(whole, np.concatenate(rows))


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_unaligned_data_decodes_the_same(kind):
    blocks = random_blocks(kind, 3, seed=1).reshape(-1)
    shifted = np.concatenate([np.zeros(1, dtype=np.uint8), blocks])[1:]
    count = 3 * kind.block_size
    assert_bits_equal(dequantize(kind, shifted, count), dequantize(kind, blocks, count))


@pytest.mark.parametrize("kind", [kind for kind in TensorType if not kind.supported], ids=lambda kind: kind.name)
def test_a_type_known_by_size_only_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=kind.name):
        dequantize(kind, np.zeros(kind.block_bytes, dtype=np.uint8), kind.block_size)


def test_too_few_bytes_and_part_blocks_are_refused():
    with pytest.raises(ValueError, match="need 36 bytes, not 35"):
        dequantize(TensorType.Q4_0, np.zeros(35, dtype=np.uint8), 64)
    with pytest.raises(ValueError, match="33 elements are not a multiple of the Q4_0 block of 32"):
        dequantize(TensorType.Q4_0, np.zeros(64, dtype=np.uint8), 33)
    with pytest.raises(ValueError, match="-32"):
        dequantize(TensorType.Q4_0, np.zeros(64, dtype=np.uint8), -32)
    assert dequantize(TensorType.Q4_0, np.zeros(0, dtype=np.uint8), 0).shape == (0,)
