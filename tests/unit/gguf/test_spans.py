"""Where tensors lie, and what the two ambiguous type ids mean."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench import synthetic
from ops.bench.synthetic import gguf_bytes, header_bytes, metadata_bytes, record_bytes
from prism_core.errors import ModelError
from prism_core.gguf import TensorType, dequantize, describe, gguf_from_buffers, open_gguf
from prism_core.gguf.types import AMBIGUOUS, BY_ID, REMOVED_IDS

ARCH = {"general.architecture": "qwen3"}


def placed(*records: tuple[str, tuple[int, ...], int, int], data: int = 4096) -> bytes:
    """A file whose tensor table says what we like, with `data` bytes after it."""
    head = header_bytes(len(records), len(ARCH)) + metadata_bytes(ARCH) + b"".join(record_bytes(*r) for r in records)
    return head + bytes(-len(head) % 32) + bytes(data)


def refusal(raw: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        gguf_from_buffers([raw], "file.gguf")
    assert str(caught.value).startswith("file.gguf: tensor ")
    return str(caught.value)


class TestGroup8Types:
    @pytest.mark.parametrize("type_id", [43, 44, 100, 141, 144, 255, 2**31, 2**32 - 1])
    def test_an_unknown_type_id_is_refused(self, type_id):
        assert f"tensor 't': type id {type_id} is unknown" in refusal(placed(("t", (256,), type_id, 0)))

    @pytest.mark.parametrize("type_id", sorted(REMOVED_IDS))
    def test_a_removed_type_id_is_refused_as_removed(self, type_id):
        assert f"type id {type_id} was removed" in refusal(placed(("t", (256,), type_id, 0)))

    @pytest.mark.parametrize("kind", [t for t in BY_ID.values() if not t.supported], ids=lambda t: t.name)
    def test_an_unsupported_type_is_refused_by_name_and_can_still_be_described(self, kind):
        raw = placed(("t", (256,), kind.id, 0))
        assert f"tensor 't' has type {kind.name} (id {kind.id}), which Prism does not support" in refusal(raw)
        facts = describe(gguf_from_buffers([raw], inspect=True))
        assert facts["obstacles"] == [f"tensor type {kind.name} is not supported (1 tensors)"]

    @pytest.mark.parametrize("kind", [t for t in TensorType if t.block_size > 1], ids=lambda t: t.name)
    def test_rows_that_are_not_whole_blocks_are_refused(self, kind):
        if kind.id in AMBIGUOUS:
            return
        text = refusal(placed(("t", (kind.block_size + 8, 4), kind.id, 0)))
        assert f"rows of {kind.block_size + 8} values are not a multiple of the {kind.name} block" in text

    def test_every_type_id_has_the_size_of_its_block(self):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for kind in TensorType:
            if kind is TensorType.Q8_1:
                continue  # the package still has the size from when its two scales were f32
            if kind.name in GGMLQuantizationType.__members__:
                assert GGML_QUANT_SIZES[GGMLQuantizationType[kind.name]] == (kind.block_size, kind.block_bytes), kind
                assert int(GGMLQuantizationType[kind.name]) == kind.id


class TestGroup9Offsets:
    def test_an_unaligned_offset_is_refused(self):
        text = refusal(placed(("a", (32,), 0, 0), ("b", (32,), 0, 132)))
        assert "tensor 'b': offset 132 is not a multiple of the alignment 32" in text

    def test_overlapping_tensors_are_refused(self):
        text = refusal(placed(("a", (64,), 0, 0), ("b", (32,), 0, 128)))
        assert "tensor 'b': offset 128 overlaps the tensor before it, which ends at 256" in text

    def test_a_gap_between_tensors_is_refused(self):
        text = refusal(placed(("a", (32,), 0, 0), ("b", (32,), 0, 256)))
        assert "tensor 'b': offset 256 leaves a gap; the tensor before it ends at 128" in text

    def test_a_first_tensor_that_does_not_begin_the_data_is_refused(self):
        assert "leaves a gap" in refusal(placed(("a", (32,), 0, 64)))

    @pytest.mark.parametrize("offset", [2**40, 2**63 - 32, 2**64 - 32])
    def test_an_offset_far_beyond_the_file_is_refused(self, offset):
        assert f"offset {offset}" in refusal(placed(("a", (32,), 0, 0), ("b", (32,), 0, offset)))

    @pytest.mark.parametrize("missing", [1, 31, 128, 129, 200])
    def test_a_truncated_file_is_called_truncated(self, missing):
        raw = placed(("a", (32,), 0, 0), ("b", (32,), 0, 128), data=256)
        text = refusal(raw[: len(raw) - missing])
        assert "the file is truncated" in text
        assert f"but the file has {len(raw) - missing}" in text

    def test_padding_after_the_last_tensor_may_be_absent(self):
        raw = placed(("a", (32,), 0, 0), ("b", (3,), 0, 128), data=140)
        assert gguf_from_buffers([raw]).tensors["b"].nbytes == 12

    def test_a_file_without_tensors_is_a_container_all_the_same(self):
        assert len(gguf_from_buffers([gguf_bytes(ARCH)]).tensors) == 0


def ternary(kind: str, shape: tuple[int, int], name: str = "t", seed: int = 0) -> synthetic.Tensor:
    layout, type_id = synthetic.resolve(kind)
    rows = synthetic.float_rows(np.random.default_rng(seed), shape[1], shape[0], layout)
    return synthetic.Tensor(name, shape, type_id, synthetic.quantize(kind, rows).reshape(-1))


class TestIds40And42:
    @pytest.mark.parametrize(("kind", "meaning"), [("Q2_0", "Q2_0"), ("Q2_0_G128", "PQ2_0"), ("Q1_0_V1", "Q1_0_V1")])
    @pytest.mark.parametrize("last", [False, True])
    def test_spans_decide_whether_or_not_the_tensor_is_last(self, kind, meaning, last):
        tensors = [ternary(kind, (256, 64)), ("norm", (256,), 0, bytes(1024))]
        file = gguf_from_buffers([gguf_bytes(ARCH, tensors[::-1] if last else tensors)])
        assert file.tensors["t"].type is TensorType[meaning]
        assert file.tensors["t"].type_id == tensors[0].type_id

    def test_an_nvfp4_file_is_recognised_and_refused(self):
        raw = gguf_bytes(ARCH, [("t", (256, 64), 40, bytes(64 * 4 * 36))])
        assert "has type NVFP4 (id 40)" in refusal(raw)
        assert gguf_from_buffers([raw], inspect=True).tensors["t"].type is TensorType.NVFP4

    def test_a_legacy_file_decodes_as_its_modern_twin_and_says_so(self, tmp_path):
        modern = open_gguf(synthetic.qwen3(tmp_path / "a.gguf", type="PQ2_0"))
        legacy = open_gguf(synthetic.qwen3(tmp_path / "b.gguf", type="Q2_0_G128"))
        for name, tensor in modern.tensors.items():
            twin = legacy.tensors[name]
            assert (twin.type, twin.data.tobytes()) == (tensor.type, tensor.data.tobytes())
        assert describe(modern)["notes"] == []
        assert "128-weight groups" in describe(legacy)["notes"][0]

    def test_one_decision_holds_for_tensors_too_small_to_tell(self):
        # 128 weights are 36 or 34 bytes: both pad to 64. The large tensor speaks for the small one, wherever it is.
        for order in (1, -1):
            tensors = [ternary("Q2_0_G128", (128, 1), "small"), ternary("Q2_0_G128", (128, 64), "large")][::order]
            file = gguf_from_buffers([gguf_bytes(ARCH, tensors)])
            assert {t.type for t in file.tensors.values()} == {TensorType.PQ2_0}

    def test_only_tiny_tensors_mean_todays_type(self):
        file = gguf_from_buffers([gguf_bytes(ARCH, [ternary("Q2_0", (128, 1)), ("n", (8,), 0, bytes(32))])])
        assert file.tensors["t"].type is TensorType.Q2_0

    def test_a_mixture_is_refused_and_both_tensors_are_named(self):
        tensors = [ternary("Q2_0", (256, 64), "new"), ternary("Q2_0_G128", (256, 64), "old")]
        text = refusal(gguf_bytes(ARCH, tensors))
        assert "'old' is laid out as Q2_0 with 128-weight groups, but 'new' as Q2_0 with 64-weight groups" in text
        assert "type id 42 must mean one thing" in text

    @pytest.mark.parametrize("spare", [-64, 32, 64])
    def test_a_span_that_fits_neither_meaning_is_refused(self, spare):
        size = 64 * 4 * 18
        raw = placed(("t", (256, 64), 42, 0), ("n", (8,), 0, size + spare), data=size + 4096)
        text = refusal(raw)
        assert f"spans {size + spare} bytes, which is neither Q2_0 with 64-weight groups ({size} bytes) nor" in text

    @pytest.mark.parametrize("kind", ["Q2_0", "Q2_0_G128", "Q1_0_V1"])
    def test_a_truncated_last_tensor_does_not_change_the_meaning_of_the_others(self, kind):
        tensors = [ternary(kind, (256, 64), "first"), ternary(kind, (256, 64), "last")]
        raw = gguf_bytes(ARCH, tensors)
        assert "tensor 'last'" in refusal(raw[:-400])
        assert "truncated" in refusal(raw[:-400])

    def test_rows_of_64_forbid_the_128_weight_meaning(self):
        raw = placed(("t", (192, 64), 42, 0), ("n", (8,), 0, 64 * 192 // 128 * 34), data=8192)
        assert "spans" in refusal(raw)

    def test_the_decision_spans_all_parts_of_a_split_model(self, tmp_path):
        tensors = [ternary("Q2_0_G128", (128, 1), "small"), ternary("Q2_0_G128", (128, 64), "large")]
        first, _ = synthetic.write_split(tmp_path, "m", ARCH, tensors, parts=2)
        with open_gguf(first) as file:
            assert {t.type for t in file.tensors.values()} == {TensorType.PQ2_0}

    def test_the_reference_ternary_file_is_read_with_64_weight_groups(self, data):
        with open_gguf(data / "tiny-qwen3-q2_0" / "tiny-qwen3-q2_0.gguf") as file:
            tensor = file.tensors["blk.0.ffn_up.weight"]
            assert tensor.type is TensorType.Q2_0
            values = dequantize(tensor.type, tensor.data, tensor.elements)
            assert np.isfinite(values).all()


@pytest.mark.parametrize("type_id", [41, 142, 143])
def test_ids_with_one_meaning_are_read_as_that(type_id):
    kind = BY_ID[type_id]
    raw = gguf_bytes(ARCH, [("t", (256, 4), type_id, bytes(kind.nbytes(1024)))])
    assert gguf_from_buffers([raw]).tensors["t"].type is kind
