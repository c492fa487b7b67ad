"""Split models: opened by their first part, checked as a whole."""

from __future__ import annotations

import pytest

from ops.bench import synthetic
from ops.bench.synthetic import Typed, write_gguf
from prism_core.errors import ModelError
from prism_core.gguf import describe, open_gguf
from prism_core.gguf.split import MAX_SHARDS

ARCH = {"general.architecture": "llama", "general.name": "split"}


def tensor(name: str, first: int = 0) -> tuple:
    return name, (32,), 0, bytes([first]) * 128


def part(folder, number: int, parts: int, tensors: list, *, alignment: int = 32, **changes):
    """Write one part; `changes` replace its split keys, or remove them with None."""
    values = {"no": Typed("u16", number), "count": Typed("u16", parts), "tensors.count": Typed("i32", 3)} | changes
    keys = (ARCH if number == 0 else {"general.alignment": alignment}) | {
        f"split.{name}": value for name, value in values.items() if value is not None
    }
    return write_gguf(folder / f"m-{number + 1:05d}-of-{parts:05d}.gguf", keys, tensors, alignment=alignment)


def refusal(path) -> str:
    with pytest.raises(ModelError) as caught:
        open_gguf(path)
    return str(caught.value)


def test_the_parts_of_a_model_are_one_file(tmp_path):
    whole = open_gguf(synthetic.qwen3(tmp_path / "whole.gguf", seed=4))
    split = open_gguf(synthetic.qwen3(tmp_path / "split.gguf", seed=4, parts=5))
    assert list(split.tensors) == list(whole.tensors)
    for name, tensor in whole.tensors.items():
        assert split.tensors[name].data.tobytes() == tensor.data.tobytes()
    assert len(split.shards) == describe(split)["parts"] == 5
    assert split.file_bytes == sum(path.stat().st_size for path in tmp_path.glob("split-*"))
    assert split.architecture == "qwen3"


def test_every_part_has_its_own_alignment(tmp_path):
    first = part(tmp_path, 0, 2, [tensor("a", 1)])
    part(tmp_path, 1, 2, [tensor("b", 2), tensor("c", 3)], alignment=8)
    with open_gguf(first) as file:
        assert [t.data[0] for t in file.tensors.values()] == [1, 2, 3]


def test_a_first_part_may_hold_no_tensors(tmp_path):
    first = part(tmp_path, 0, 2, [])
    part(tmp_path, 1, 2, [tensor("a"), tensor("b"), tensor("c")])
    with open_gguf(first) as file:
        assert list(file.tensors) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [0, 1])
def test_a_model_split_into_one_is_whole(tmp_path, count):
    path = write_gguf(tmp_path / "any.gguf", {**ARCH, "split.count": Typed("u16", count)}, [tensor("a")])
    with open_gguf(path) as file:
        assert len(file.tensors) == 1


def test_a_later_part_names_the_first(tmp_path):
    part(tmp_path, 0, 2, [tensor("a")])
    second = part(tmp_path, 1, 2, [tensor("b"), tensor("c")])
    assert "part 2 of 2 of a split model; open its first part, m-00001-of-00002.gguf" in refusal(second)


def test_a_missing_part_is_named(tmp_path):
    first = part(tmp_path, 0, 2, [tensor("a")])
    assert "m-00002-of-00002.gguf: cannot be opened: No such file" in refusal(first)


def test_a_renamed_first_part_is_refused(tmp_path):
    first = part(tmp_path, 0, 2, [tensor("a")])
    assert "not named like" in refusal(first.rename(tmp_path / "model.gguf"))
    assert "must be named m-00001-of-00002.gguf" in refusal(
        (tmp_path / "model.gguf").rename(tmp_path / "m-00001-of-00003.gguf")
    )


@pytest.mark.parametrize("count", [MAX_SHARDS + 1, 65535, -1])
def test_the_number_of_parts_has_a_limit(tmp_path, count):
    path = part(tmp_path, 0, 2, [tensor("a")], count=Typed("i32", count))
    assert "'split.count' must be at" in refusal(path)


@pytest.mark.parametrize("value", ["2", 2.0, True])
def test_a_count_of_the_wrong_type_is_refused(tmp_path, value):
    assert "'split.count' must be an integer" in refusal(part(tmp_path, 0, 2, [tensor("a")], count=value))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"no": 0}, "'split.no' must be 1 here, not 0"),
        ({"no": 7}, "'split.no' must be 1 here, not 7"),
        ({"no": None}, "'split.no' is missing"),
        ({"count": 3}, "'split.count' must be 2 as in the first part, not 3"),
        ({"count": None}, "'split.count' is missing"),
    ],
)
def test_a_part_of_another_split_is_refused(tmp_path, changes, words):
    first = part(tmp_path, 0, 2, [tensor("a")])
    part(tmp_path, 1, 2, [tensor("b"), tensor("c")], **changes)
    text = refusal(first)
    assert words in text
    assert "m-00002-of-00002.gguf" in text


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    first = part(tmp_path, 0, 2, [tensor("a")])
    part(tmp_path, 1, 2, [tensor("b"), tensor("a")])
    text = refusal(first)
    assert "m-00002-of-00002.gguf: tensor 'a' is in" in text
    assert "m-00001-of-00002.gguf as well" in text


@pytest.mark.parametrize(("total", "words"), [(2, "says 2 tensors"), (4, "says 4 tensors"), (None, "is missing")])
def test_the_total_of_tensors_must_agree(tmp_path, total, words):
    first = part(tmp_path, 0, 2, [tensor("a")], **{"tensors.count": total})
    part(tmp_path, 1, 2, [tensor("b"), tensor("c")])
    assert words in refusal(first)


def test_a_truncated_part_is_named(tmp_path):
    first = part(tmp_path, 0, 2, [tensor("a")])
    second = part(tmp_path, 1, 2, [tensor("b"), tensor("c")])
    second.write_bytes(second.read_bytes()[:-1])
    text = refusal(first)
    assert "m-00002-of-00002.gguf: tensor 'c'" in text
    assert "truncated" in text


def test_the_digest_covers_every_part(tmp_path, monkeypatch):
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "home"))
    first = part(tmp_path, 0, 2, [tensor("a")])
    part(tmp_path, 1, 2, [tensor("b"), tensor("c", 1)])
    before = open_gguf(first).sha256()
    part(tmp_path, 1, 2, [tensor("b"), tensor("c", 2)])
    assert open_gguf(first).sha256() != before
