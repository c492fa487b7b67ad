"""The maker of synthetic files: its quantisers invert decoding, its files open, its twins are equal."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGUFReader

from ops.bench import synthetic
from prism_core.gguf import SUPPORTED, TensorType, dequantize, open_gguf

# The largest allowed rms error of unit Gaussian rows, from the number of levels each type has.
RMS = {
    "F32": 0, "F16": 3e-4, "BF16": 3e-3, "Q8_0": 0.007, "Q6_K": 0.03, "Q5_0": 0.05, "Q5_1": 0.05, "Q5_K": 0.05,
    "Q4_0": 0.1, "Q4_1": 0.1, "Q4_K": 0.1, "IQ4_NL": 0.1, "MXFP4": 0.15, "Q3_K": 0.2, "Q2_K": 0.4, "Q1_0": 0.65,
    "Q1_0_V1": 0.65, "Q2_0": 0.9, "PQ2_0": 0.9, "PTQ1_0": 0.9, "TQ1_0": 0.9, "TQ2_0": 0.9,
}  # fmt: skip


def decode(kind: TensorType, data: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    return dequantize(kind, data.reshape(-1), shape[0] * shape[1]).reshape(shape)


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_quantised_rows_decode_to_nearly_what_they_were(kind):
    rows = np.random.default_rng(3).standard_normal((40, 512)).astype(np.float32)
    rows[0] = 0
    data = synthetic.quantize(kind, rows)
    assert data.shape == (40, kind.nbytes(512))
    got = decode(kind, data, rows.shape)
    assert (got[0] == 0).all()
    assert np.sqrt(np.mean((got - rows) ** 2)) <= RMS[kind.name]


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_random_blocks_have_zero_mean_and_the_wanted_spread(kind):
    cols = 1024
    values = decode(kind, synthetic.random_blocks(np.random.default_rng(4), 256, cols, kind), (256, cols))
    assert np.isfinite(values).all()
    assert abs(values.mean()) * cols**0.5 < 0.12
    assert 0.9 < values.std() * cols**0.5 < 1.15


@pytest.mark.parametrize("name", ["Q2_0", "PQ2_0", "PTQ1_0", "TQ1_0", "TQ2_0"])
def test_ternary_rows_survive_their_types_exactly(name):
    kind = TensorType[name]
    rows = synthetic.float_rows(np.random.default_rng(5), 16, 768, kind)
    np.testing.assert_array_equal(decode(kind, synthetic.quantize(kind, rows), rows.shape), rows)
    assert (synthetic.float_rows(np.random.default_rng(5), 16, 768, TensorType.PQ2_0) != 0).mean() > 0.6


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "qwen35"])
def test_a_synthetic_model_has_the_keys_and_tensors_of_its_reference_fixture(architecture, tmp_path, data):
    with (
        open_gguf(synthetic.build(tmp_path / "made.gguf", architecture, layers=4)) as made,
        open_gguf(next(data.glob(f"tiny-{architecture}-q8_0/*.gguf"))) as fixture,
    ):
        shared = {name for name in fixture.tensors if "blk" not in name or name.startswith(("blk.0.", "blk.3."))}
        assert shared - {"output.weight"} <= set(made.tensors)
        assert made.architecture == architecture
        optional = {"general.file_type", "general.license", "general.quantization_version", "general.type"}
        optional |= {"llama.vocab_size"}
        assert set(fixture.metadata) - optional <= set(made.metadata)
        for name in shared & set(made.tensors):
            assert len(made.tensors[name].shape) == len(fixture.tensors[name].shape), name
            assert made.tensors[name].type is fixture.tensors[name].type, name


def test_another_reader_finds_the_same_bytes(tmp_path):
    path = synthetic.qwen3(tmp_path / "model.gguf", type="Q4_K")
    reader = GGUFReader(path)
    with open_gguf(path) as ours:
        assert [tensor.name for tensor in reader.tensors] == list(ours.tensors)
        for tensor in reader.tensors:
            assert tuple(tensor.shape) == ours.tensors[tensor.name].shape
            assert tensor.data.tobytes() == ours.tensors[tensor.name].data.tobytes()
        for key, field in reader.fields.items():
            if not key.startswith("GGUF."):
                assert list(np.atleast_1d(field.contents())) == list(np.atleast_1d(ours.metadata[key])), key


def test_the_four_ternary_containers_hold_equal_weights(tmp_path):
    def weights(kind: str) -> dict[str, np.ndarray]:
        with open_gguf(synthetic.qwen3(tmp_path / f"{kind}.gguf", type=kind, seed=9)) as file:
            return {name: dequantize(t.type, t.data, t.elements) for name, t in file.tensors.items()}

    first = weights("Q2_0")
    for kind in ("PQ2_0", "PTQ1_0", "Q2_0_G128"):
        other = weights(kind)
        assert all((first[name] == other[name]).all() for name in first), kind


def test_a_rotated_twin_gives_the_same_products(tmp_path):
    rotation = synthetic.Rotation(block=64, grouped=True, heads=(2, 2, 64))
    options = {"layers": 4, "type": "F32", "seed": 2}
    with (
        open_gguf(synthetic.qwen35(tmp_path / "plain.gguf", **options)) as plain,
        open_gguf(synthetic.qwen35(tmp_path / "turned.gguf", **options, hadamard=rotation)) as turned,
    ):
        spec = turned.hadamard
        assert plain.hadamard is None
        assert spec.version == 1
        for name in ("blk.0.ssm_out.weight", "blk.3.attn_q.weight", "output.weight"):
            cols = plain.tensors[name].shape[0]
            x = np.random.default_rng(1).standard_normal(cols)
            moved = synthetic.group_value_heads(x, 2, 2, 64) if "ssm_out" in name else x
            moved = synthetic.hadamard(moved * spec.signs_for(cols), spec.block_size)
            before, after = (dequantize(t.type, t.data, t.elements).reshape(-1, cols) for t in
                             (plain.tensors[name], turned.tensors[name]))  # fmt: skip
            assert not np.allclose(before, after)
            np.testing.assert_allclose(after @ moved, before @ x, atol=1e-5)
        table, original = (dequantize(t.type, t.data, t.elements).reshape(-1, 256) for t in
                           (turned.tensors["token_embd.weight"], plain.tensors["token_embd.weight"]))  # fmt: skip
        undone = synthetic.hadamard(table.astype(np.float64), 64) * spec.signs_for(256)
        np.testing.assert_allclose(undone, original, atol=1e-6)


def test_the_fast_transform_is_the_sylvester_matrix():
    size = 32
    matrix = np.array([[(-1) ** (r & c).bit_count() for c in range(size)] for r in range(size)]) / size**0.5
    x = np.random.default_rng(0).standard_normal((3, 64))
    expected = np.concatenate([x[:, :32] @ matrix, x[:, 32:] @ matrix], axis=1)
    np.testing.assert_allclose(synthetic.hadamard(x, size), expected, atol=1e-12)


def test_a_large_shape_is_written_from_random_bits(tmp_path):
    path = synthetic.preset(tmp_path / "m.gguf", "qwen3-0.6b", type="Q1_0", layers=1, vocab=2000)
    direct = synthetic.preset(tmp_path / "d.gguf", "qwen3-0.6b", type="Q1_0", layers=1, vocab=2000, random_bits=True)
    assert path.stat().st_size == direct.stat().st_size
    with open_gguf(direct) as file:
        head = file.tensors["token_embd.weight"]
        assert dequantize(head.type, head.data, head.elements).std() * 32 == pytest.approx(1, abs=0.1)


def test_the_narrow_q4_k_m_mix_has_its_types(tmp_path):
    path = synthetic.preset(tmp_path / "m.gguf", "qwen2-0.5b", type="Q4_K_M", vocab=600, random_bits=True)
    with open_gguf(path) as file:
        kinds = {name: tensor.type.name for name, tensor in file.tensors.items()}
    down = [kinds[f"blk.{layer}.ffn_down.weight"] for layer in range(24)]
    assert (down.count("Q6_K"), down.count("Q4_K")) == (12, 12)
    assert kinds["output.weight"] == "Q8_0"
    assert kinds["blk.3.ffn_up.weight"] == "Q5_0"


@pytest.mark.full
def test_the_1_7b_shape_in_one_bit_is_242_megabytes(tmp_path):
    path = synthetic.preset(tmp_path / "big.gguf", "qwen3-1.7b")
    assert 240e6 < path.stat().st_size < 252e6
    with open_gguf(path) as file:
        assert sum(t.nbytes for t in file.tensors.values()) == pytest.approx(242e6, rel=0.01)
