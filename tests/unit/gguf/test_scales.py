"""Group 13: NaN, infinity and absurd size in scales and plain values are refused, and nothing that a model has."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench import synthetic
from prism_core.errors import ModelError
from prism_core.gguf import SUPPORTED, TensorType, check_all_scales, check_scales, dequantize, gguf_from_buffers
from prism_core.gguf.scales import PIECE

HALF = [t for t in SUPPORTED if t.scale_form == "f16"]
NON_FINITE = {"inf": 0x7C00, "-inf": 0xFC00, "nan": 0x7E00, "signalling nan": 0x7C01}


def tensor(kind: TensorType, data: np.ndarray):
    elements = data.size // kind.block_bytes * kind.block_size
    raw = synthetic.gguf_bytes({"general.architecture": "x"}, [("some.weight", (elements,), kind.id, data.reshape(-1))])
    # A second tensor after it makes the spans of ids 40 and 42 certain.
    return gguf_from_buffers([raw]).tensors["some.weight"]


def blocks(kind: TensorType, count: int = 300) -> np.ndarray:
    return synthetic.random_blocks(np.random.default_rng(1), count, kind.block_size, kind).reshape(count, -1).copy()


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda t: t.name)
def test_ordinary_tensors_pass(kind):
    check_scales(tensor(kind, blocks(kind)))


@pytest.mark.parametrize("bits", NON_FINITE.values(), ids=NON_FINITE.keys())
@pytest.mark.parametrize("kind", HALF, ids=lambda t: t.name)
def test_every_scale_of_every_block_type_is_looked_at(kind, bits):
    for at in kind.scales:
        for block in (0, 150, 299):
            data = blocks(kind)
            data[block, at : at + 2] = np.array([bits], dtype="<u2").view(np.uint8)
            with pytest.raises(ModelError, match=rf"'some\.weight': the scale of block {block} is -?(inf|nan)"):
                check_scales(tensor(kind, data))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 4294967296.0, -3e38])
def test_plain_values_are_looked_at(name, value):
    kind = TensorType[name]
    rows = np.ones((1, 500), dtype=np.float32)
    rows[0, 321] = value
    with np.errstate(invalid="ignore", over="ignore"):
        data = synthetic.quantize(kind, rows)
    if name == "BF16" and np.isnan(value):
        data[0, 642:644] = 0xC0, 0x7F
    with pytest.raises(ModelError, match=r"value 321 is .*; stored numbers must be finite and below 2\^32"):
        check_scales(tensor(kind, data))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_the_largest_numbers_that_a_model_could_have_pass(name):
    value = {"F32": 4294967040.0, "F16": 65504.0, "BF16": 4278190080.0}[name]
    rows = np.array([[value, -value]], dtype=np.float32)
    check_scales(tensor(TensorType[name], synthetic.quantize(TensorType[name], rows)))


def test_one_flipped_bit_of_the_exponent_is_noticed_in_any_ordinary_number():
    values = np.random.default_rng(3).uniform(2.0**-90, 1, 1000).astype(np.float32)
    for flipped in (values.view(np.uint32) ^ (1 << 30)).view(np.float32)[:, None]:
        with pytest.raises(ModelError, match="value 0 is"):
            check_scales(tensor(TensorType.F32, flipped[None].view(np.uint8)))


@pytest.mark.parametrize("kind", HALF, ids=lambda t: t.name)
def test_negative_zero_and_subnormal_scales_pass(kind):
    data = blocks(kind, 6)
    for at in kind.scales:
        data[:, at : at + 2] = (
            np.array([0, 0x8000, 1, 0x83FF, 0x7BFF, 0xFBFF], dtype="<u2").view(np.uint8).reshape(6, 2)
        )
    check_scales(tensor(kind, data))
    assert np.isfinite(dequantize(kind, data.reshape(-1), 6 * kind.block_size)).all()


def test_an_mxfp4_exponent_passes_exactly_where_its_levels_stay_in_bounds():
    kind = TensorType.MXFP4
    for exponent in range(256):
        data = np.full((1, 17), 0x77, dtype=np.uint8)
        data[0, 0] = exponent
        if np.abs(dequantize(kind, data.reshape(-1), 32)).max() < 2.0**32:
            check_scales(tensor(kind, data))
        else:
            with pytest.raises(ModelError, match=f"scale exponent {exponent}; the limit is 156"):
                check_scales(tensor(kind, data))


def test_the_last_block_of_a_long_tensor_is_looked_at():
    kind = TensorType.Q1_0
    data = np.zeros((2 * PIECE + 3, kind.block_bytes), dtype=np.uint8)
    data[-1, :2] = 0xFF
    with pytest.raises(ModelError, match=f"the scale of block {2 * PIECE + 2} is nan"):
        check_scales(tensor(kind, data))


def test_all_the_tensors_of_a_file_are_checked(data):
    raw = bytearray((data / "tiny-qwen3-q8_0" / "tiny-qwen3-q8_0.gguf").read_bytes())
    check_all_scales(gguf_from_buffers([raw]).tensors.values())
    norm = gguf_from_buffers([raw]).tensors["output_norm.weight"]
    raw[norm.offset + 16 : norm.offset + 20] = np.array([np.nan], dtype="<f4").tobytes()
    with pytest.raises(ModelError, match=r"'output_norm\.weight': value 4 is nan"):
        check_all_scales(gguf_from_buffers([raw]).tensors.values())
