"""Every way a GGUF header can lie is refused with one sentence that names the place, the limit and the value."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest

from ops.bench.synthetic import Typed, gguf_bytes, header_bytes, record_bytes, string_bytes, value_bytes
from prism_core.errors import ModelError
from prism_core.gguf import container, gguf_from_buffers, open_gguf
from prism_core.gguf.container import parse

ARCH = {"general.architecture": "llama"}
U64_EXTREMES = [2**20, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


def key_value(key: str | bytes, value: object) -> bytes:
    return string_bytes(key) + value_bytes(value)


def raw_key(key: str, kind: int, body: bytes) -> bytes:
    """A key with a value type and bytes of our choice."""
    return string_bytes(key) + struct.pack("<I", kind) + body


def raw_array(key: str, kind: int, count: int, body: bytes = b"") -> bytes:
    return raw_key(key, 9, struct.pack("<IQ", kind, count) + body)


def with_keys(*keys: bytes, tensors: bytes = b"", tensor_count: int = 0) -> bytes:
    return header_bytes(tensor_count, len(keys)) + b"".join(keys) + tensors


def refusal(buffer: bytes) -> str:
    with pytest.raises(ModelError) as caught:
        parse(buffer, "file.gguf")
    text = str(caught.value)
    assert text.startswith("file.gguf: ")
    assert "\n" not in text
    assert len(text) < 400
    return text


class TestGroup1Header:
    @pytest.mark.parametrize("length", [0, 1, 4, 12, 23])
    def test_a_file_shorter_than_its_header_is_refused(self, length):
        assert f"{length} bytes are too short" in refusal(gguf_bytes(ARCH)[:length])

    @pytest.mark.parametrize("magic", [b"GGML", b"gguf", b"\0\0\0\0", b"FUGG", b"PK\3\4"])
    def test_another_magic_is_refused(self, magic):
        assert f"begins with {magic!r}" in refusal(header_bytes(0, 0, magic=magic))

    @pytest.mark.parametrize("version", [0, 1, 4, 5, 0xFFFFFFFF, 0x7FFFFFFF])
    def test_other_versions_are_refused_by_number(self, version):
        text = refusal(header_bytes(0, 0, version=version))
        assert f"version {version} is not supported; versions 2 and 3 are" in text

    @pytest.mark.parametrize("version", [2, 3])
    def test_a_big_endian_file_is_recognised_as_one(self, version):
        swapped = b"GGUF" + struct.pack(">IQQ", version, 0, 1)
        assert "big-endian" in refusal(swapped)

    @pytest.mark.parametrize("version", [2, 3])
    def test_versions_2_and_3_are_read(self, version):
        raw = bytearray(gguf_bytes(ARCH))
        raw[4:8] = struct.pack("<I", version)
        assert parse(raw).version == version


class TestGroup2Counts:
    @pytest.mark.parametrize("count", U64_EXTREMES)
    def test_a_huge_or_negative_number_of_keys_is_refused(self, count):
        assert f"announces {count} keys; the limit is 65536" in refusal(header_bytes(0, count) + bytes(100))

    @pytest.mark.parametrize("count", U64_EXTREMES)
    def test_a_huge_or_negative_number_of_tensors_is_refused(self, count):
        assert f"announces {count} tensors; the limit is 32768" in refusal(header_bytes(count, 0) + bytes(100))

    def test_more_keys_or_tensors_than_bytes_for_them_are_refused(self):
        assert "announces 8 keys, but only 100 bytes follow" in refusal(header_bytes(0, 8) + bytes(100))
        assert "announces 4 tensors, but only 108 bytes follow" in refusal(header_bytes(4, 0) + bytes(100))


class TestGroup3Strings:
    @pytest.mark.parametrize("length", [65536, *U64_EXTREMES])
    def test_a_key_name_longer_than_64_kib_is_refused(self, length):
        text = refusal(header_bytes(0, 1) + struct.pack("<Q", length) + bytes(100))
        assert f"the name of key 0 is {length} bytes long; the limit is 65535" in text

    @pytest.mark.parametrize("length", U64_EXTREMES[1:])
    def test_a_string_value_longer_than_its_limit_is_refused(self, length):
        text = refusal(with_keys(raw_key("general.name", 8, struct.pack("<Q", length) + bytes(50))))
        assert f"key 'general.name' is {length} bytes long; the limit is 16777216" in text

    def test_a_string_that_runs_past_the_end_is_refused(self):
        text = refusal(with_keys(raw_key("general.name", 8, struct.pack("<Q", 51) + bytes(50))))
        assert "key 'general.name' needs 51 bytes" in text
        assert "the file ends after 50" in text

    @pytest.mark.parametrize("length", [64, 1000, *U64_EXTREMES])
    def test_a_tensor_name_longer_than_63_bytes_is_refused(self, length):
        text = refusal(header_bytes(1, 0) + struct.pack("<Q", length) + bytes(2000))
        assert f"the name of tensor 0 is {length} bytes long; the limit is 63" in text

    @pytest.mark.parametrize("bad", [b"\xff", b"ab\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"\xf5\x80\x80\x80"])
    def test_invalid_utf_8_is_refused_wherever_it_stands(self, bad):
        assert "name of key 0 is not valid UTF-8" in refusal(with_keys(key_value(bad, 1)))
        assert "key 'k' is not valid UTF-8" in refusal(with_keys(key_value("k", Typed("string", bad))))
        assert "key 'k': string 1 is not valid UTF-8" in refusal(with_keys(key_value("k", Typed("string", ["a", bad]))))
        record = string_bytes(bad) + struct.pack("<IQIQ", 1, 32, 0, 0)
        assert "name of tensor 0 is not valid UTF-8" in refusal(header_bytes(1, 0) + record)

    def test_empty_names_and_names_with_a_nul_are_refused(self):
        assert "the name of key 0 is empty" in refusal(with_keys(key_value("", 1)))
        assert "'a\\x00b' contains a NUL" in refusal(with_keys(key_value("a\0b", 1)))
        assert "the name of tensor 0 is empty" in refusal(header_bytes(1, 0) + record_bytes("", (32,), 0, 0))
        assert "contains a NUL" in refusal(header_bytes(1, 0) + record_bytes("a\0b", (32,), 0, 0))

    def test_an_empty_value_and_a_nul_in_a_value_are_kept(self):
        keys = parse(gguf_bytes({"a": "", "b": "x\0y", "c": Typed("string", ["", "\0"])})).metadata
        assert dict(keys) == {"a": "", "b": "x\0y", "c": ("", "\0")}


class TestGroup4Arrays:
    @pytest.mark.parametrize("kind", [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12])
    @pytest.mark.parametrize("count", U64_EXTREMES)
    def test_an_array_longer_than_the_file_is_refused(self, kind, count):
        text = refusal(with_keys(raw_array("numbers", kind, count, bytes(60))))
        assert "key 'numbers'" in text
        assert "limit" in text or "ends after" in text

    @pytest.mark.parametrize("count", U64_EXTREMES)
    def test_a_string_array_longer_than_the_file_is_refused(self, count):
        text = refusal(with_keys(raw_array("tokens", 8, count, bytes(60))))
        assert f"key 'tokens' is an array of {count} strings" in text

    def test_a_string_array_cut_anywhere_is_refused(self):
        whole = with_keys(key_value("tokens", Typed("string", ["alpha", "beta", "gamma"])))
        for length in range(24, len(whole)):
            refusal(whole[:length])
        assert parse(whole).metadata["tokens"] == ("alpha", "beta", "gamma")

    @pytest.mark.parametrize("length", [17 << 20, *U64_EXTREMES[1:]])
    def test_one_entry_that_runs_past_the_end_is_named(self, length):
        body = string_bytes("ok") + struct.pack("<Q", length) + bytes(40)
        assert "string 1 of key 'tokens'" in refusal(with_keys(raw_array("tokens", 8, 2, body)))

    def test_an_array_of_arrays_is_refused(self):
        assert "array of arrays" in refusal(with_keys(raw_array("nested", 9, 1, struct.pack("<IQ", 4, 0))))

    def test_a_hundred_thousand_nested_arrays_do_not_exhaust_the_stack(self):
        assert "array of arrays" in refusal(with_keys(raw_array("deep", 9, 1, struct.pack("<IQ", 9, 1) * 100_000)))

    @pytest.mark.parametrize("kind", [13, 14, 255, 2**31, 2**32 - 1])
    def test_unknown_types_are_refused_by_number(self, kind):
        assert f"array of the unknown element type {kind}" in refusal(with_keys(raw_array("k", kind, 1, bytes(8))))
        assert f"unknown value type {kind}" in refusal(with_keys(raw_key("k", kind, bytes(8))))

    def test_a_boolean_other_than_0_and_1_is_refused(self):
        assert "a boolean with the value 2" in refusal(with_keys(raw_key("flag", 7, b"\2")))
        assert "booleans with the value 7" in refusal(with_keys(raw_array("flags", 7, 3, b"\0\7\1")))

    def test_values_of_every_type_come_back(self):
        values = {
            "u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5,
            "bool": True, "string": "schön", "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1,
        }  # fmt: skip
        made = {f"one.{kind}": Typed(kind, value) for kind, value in values.items()}
        made |= {f"many.{kind}": Typed(kind, [value] * 3) for kind, value in values.items()}
        made |= {f"none.{kind}": Typed(kind, []) for kind in values}
        got = parse(gguf_bytes(made)).metadata
        for kind, value in values.items():
            assert got[f"one.{kind}"] == value
            assert type(got[f"one.{kind}"]) is type(value)
            assert list(got[f"many.{kind}"]) == [value] * 3
            assert len(got[f"none.{kind}"]) == 0

    def test_number_arrays_are_read_only_and_their_own_memory(self):
        raw = bytearray(gguf_bytes({"a": np.arange(5, dtype=np.int32)}))
        array = parse(raw).metadata["a"]
        raw[:] = bytes(len(raw))
        np.testing.assert_array_equal(array, np.arange(5))
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


class TestGroup5Names:
    def test_a_key_that_appears_twice_is_refused(self):
        assert "key 'k' appears twice" in refusal(with_keys(key_value("k", 1), key_value("k", 2)))

    def test_a_tensor_that_appears_twice_is_refused(self):
        table = record_bytes("t", (32,), 0, 0) * 2
        assert "tensor 't' appears twice" in refusal(header_bytes(2, 0) + table + bytes(256))

    @pytest.mark.parametrize("value", ["32", 32.0, True, Typed("u32", [32])])
    def test_an_alignment_that_is_no_integer_is_refused(self, value):
        text = refusal(gguf_bytes({"general.alignment": value}))
        assert "key 'general.alignment' must be an integer, not a" in text

    @pytest.mark.parametrize("value", [7, 1.5, True, Typed("string", ["llama"])])
    def test_an_architecture_that_is_no_string_is_refused(self, value):
        with pytest.raises(ModelError, match=r"'general\.architecture' must be a string"):
            gguf_from_buffers([gguf_bytes({"general.architecture": value})])

    def test_a_file_without_an_architecture_is_refused(self):
        with pytest.raises(ModelError, match=r"'general\.architecture' is missing"):
            gguf_from_buffers([gguf_bytes({})])


class TestGroup6Alignment:
    @pytest.mark.parametrize("value", [0, 1, 4, Typed("i32", -32)])
    def test_an_alignment_below_8_is_refused(self, value):
        assert "'general.alignment' must be at least 8" in refusal(gguf_bytes({"general.alignment": value}))

    @pytest.mark.parametrize("value", [2**21, 2**30, 2**31, Typed("u64", 2**63)])
    def test_an_alignment_above_a_mebibyte_is_refused(self, value):
        assert "'general.alignment' must be at most 1048576" in refusal(gguf_bytes({"general.alignment": value}))

    @pytest.mark.parametrize("value", [24, 33, 96, 1000])
    def test_an_alignment_that_is_no_power_of_two_is_refused(self, value):
        text = refusal(gguf_bytes({"general.alignment": value}))
        assert f"'general.alignment' must be a power of two, not {value}" in text

    @pytest.mark.parametrize("value", [8, 32, 64, 4096, 2**20])
    def test_other_alignments_are_followed(self, value):
        tensors = [("a", (40,), 0, bytes(160)), ("b", (8,), 0, np.arange(8, dtype="<f4").tobytes())]
        file = gguf_from_buffers([gguf_bytes({**ARCH, "general.alignment": value}, tensors, alignment=value)])
        assert file.tensors["b"].offset % value == 0
        np.testing.assert_array_equal(file.tensors["b"].data.view("<f4"), np.arange(8))


class TestGroup7Shapes:
    @pytest.mark.parametrize("dims", [0, 5, 6, 2**16, 2**31, 2**32 - 1])
    def test_other_dimension_counts_than_1_to_4_are_refused(self, dims):
        record = string_bytes("t") + struct.pack("<I", dims) + bytes(200)
        assert f"tensor 't' has {dims} dimensions; 1 to 4 are allowed" in refusal(header_bytes(1, 0) + record)

    @pytest.mark.parametrize("dim", [0, -1, 2**40 + 1, 2**63 - 1, -(2**63)])
    def test_a_dimension_out_of_range_is_refused(self, dim):
        for shape in ((dim,), (32, dim), (32, 1, 1, dim)):
            record = record_bytes("t", shape, 0, 0)
            text = refusal(header_bytes(1, 0) + record + bytes(64))
            assert f"tensor 't' has the dimension {dim}" in text
            assert str(2**40) in text

    @pytest.mark.parametrize(
        "shape", [(2**32, 2**32), (2**31, 2**31), (2**20, 2**20, 2**20), (2**40, 2**40, 2**40, 2**40)]
    )
    def test_a_product_of_dimensions_that_overflows_is_refused(self, shape):
        text = refusal(header_bytes(1, 0) + record_bytes("t", shape, 0, 0) + bytes(64))
        assert "elements" in text
        assert str(2**60 - 1) in text

    @pytest.mark.parametrize("shape", [(2**30, 2**29), (2**40, 2**19), (2**29, 2**10, 2**10, 2**10)])
    def test_a_byte_size_near_the_top_of_the_range_is_past_the_end(self, shape):
        with pytest.raises(ModelError, match=r"tensor 't': its .* bytes end at .*: the file is truncated"):
            gguf_from_buffers([with_keys(key_value("general.architecture", "x"), tensor_count=1,
                                         tensors=record_bytes("t", shape, 0, 0) + bytes(64))])  # fmt: skip


def test_a_header_cut_at_any_byte_is_refused():
    whole = gguf_bytes(
        {**ARCH, "a": 1, "b": [1, 2], "c": "text", "d": Typed("string", ["x", "y"])}, [("t", (32,), 0, bytes(128))]
    )
    gguf_from_buffers([whole])
    for length in range(len(whole) - 1):
        with pytest.raises(ModelError):
            gguf_from_buffers([whole[:length]])


def test_parsing_allocates_no_more_than_a_small_multiple_of_the_header():
    shapes = {
        "strings": gguf_bytes({"s": Typed("string", ["ab"] * 40_000)}),
        "numbers": gguf_bytes({"n": np.zeros(200_000, dtype=np.float64)}),
        "keys": gguf_bytes({f"k{n}": n for n in range(12_000)}),
        "tensors": header_bytes(12_000, 0) + b"".join(record_bytes(f"t{n}", (1,), 0, 0) for n in range(12_000)),
    }
    for name, raw in shapes.items():
        tracemalloc.start()
        parse(raw)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 12 * len(raw), name


def test_the_string_budget_spans_all_the_arrays(monkeypatch):
    monkeypatch.setattr(container, "MAX_STRINGS", 5)
    parse(gguf_bytes({"a": Typed("string", ["x"] * 3), "b": Typed("string", ["y"] * 2)}))
    text = refusal(gguf_bytes({"a": Typed("string", ["x"] * 3), "b": Typed("string", ["y"] * 3)}))
    assert "key 'b' is an array of 3 strings; the limit over all keys is 5" in text


def test_any_readable_buffer_will_do():
    raw = gguf_bytes(ARCH)
    for buffer in (raw, bytearray(raw), memoryview(raw), np.frombuffer(raw, dtype=np.uint8)):
        assert parse(buffer).metadata["general.architecture"] == "llama"


def test_a_header_longer_than_any_real_one_is_refused_before_it_is_read(tmp_path):
    # a sparse file costs its maker nothing, and a reader all that it is told to keep
    path = tmp_path / "long.gguf"
    keys = [raw_array(f"key{n}", 0, 1 << 26) for n in range(40)]
    with path.open("wb") as file:
        file.write(header_bytes(0, len(keys)))
        for key in keys:
            file.write(key)
            file.seek(1 << 26, 1)
        file.truncate(file.tell())
    tracemalloc.start()
    with pytest.raises(ModelError, match=r"'key1' ends at offset \d+; a header may have 134217728 bytes"):
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * (1 << 26)
