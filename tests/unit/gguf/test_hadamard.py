"""A declared rotation is read in full or refused; it is never ignored."""

from __future__ import annotations

import numpy as np
import pytest

from ops.bench import synthetic
from prism_core.errors import ModelError
from prism_core.gguf import Metadata, describe, open_gguf
from prism_core.gguf.hadamard import ARCHITECTURES, KEYS, PREFIX, read_hadamard

UNTIED = {
    "token_embd.weight": (256, 1000),
    "output.weight": (256, 1000),
    "output_norm.weight": (256,),
    "blk.0.attn_q.weight": (256, 512),
    "blk.0.attn_output.weight": (512, 256),
    "blk.0.ffn_down.weight": (768, 256),
    "blk.0.ssm_alpha.weight": (256, 16),
}
TIED = {name: shape for name, shape in UNTIED.items() if name != "output.weight"}
ROTATED = ("output.weight", "blk.0.attn_q.weight", "blk.0.attn_output.weight", "blk.0.ffn_down.weight")
SIGNS = np.where(np.arange(256 + 512 + 768) % 3 == 0, -1, 1).astype(np.int8)
VERSION_1 = {
    "version": 1,
    "block_size": 64,
    "transform": "normalized-sylvester-walsh-hadamard",
    "axis": "input-last-dimension",
    "sign_mode": "explicit",
    "sign_widths": np.array([256, 512, 768], dtype=np.int32),
    "sign_values": SIGNS,
    "weight_names": ROTATED,
    "inverse_weight_names": ("token_embd.weight",),
}
VERSION_2 = {**VERSION_1, "version": 2, "tied_output": True, "weight_names": ROTATED[1:]}


def read(shapes=None, architecture="qwen3", base=VERSION_1, **changes):
    keys = {name: value for name, value in {**base, **changes}.items() if value is not None}
    values = {"general.architecture": architecture} | {PREFIX + name: value for name, value in keys.items()}
    return read_hadamard(Metadata(values, "file.gguf"), UNTIED if shapes is None else shapes)


def refusal(*args, **changes) -> str:
    with pytest.raises(ModelError) as caught:
        read(*args, **changes)
    text = str(caught.value)
    assert text.startswith("file.gguf: ")
    assert len(text) < 300
    return text


def test_a_file_without_such_keys_has_no_rotation():
    assert read_hadamard(Metadata({"general.architecture": "gemma3", "prism.other": 1}), UNTIED) is None


def test_version_1_is_read_in_full():
    spec = read(gdn_v_grouped=True, architecture="qwen35")
    assert (spec.version, spec.block_size, spec.gdn_v_grouped, spec.tied_output) == (1, 64, True, False)
    assert spec.weight_names == set(ROTATED)
    assert spec.inverse_weight_names == {"token_embd.weight"}
    np.testing.assert_array_equal(spec.signs_for(256), SIGNS[:256])
    np.testing.assert_array_equal(spec.signs_for(512), SIGNS[256:768])
    np.testing.assert_array_equal(spec.signs_for(768), SIGNS[768:])
    assert spec.signs_for(256).dtype == np.int8


def test_version_2_is_read_in_full():
    spec = read(TIED, base=VERSION_2)
    assert (spec.version, spec.tied_output) == (2, True)
    assert read(TIED, base=VERSION_2, weight_names=(*ROTATED[1:], "token_embd.weight")).version == 2


def test_identity_signs_need_no_vectors_and_contradict_negative_ones():
    assert read(sign_mode="identity", sign_widths=None, sign_values=None).signs_for(256) is None
    assert read(sign_mode="identity", sign_values=np.ones(1536, np.int8)).signs_for(256) is None
    assert "'identity', but there are negative sign_values" in refusal(sign_mode="identity")


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64])
def test_signs_may_be_stored_in_any_signed_width(dtype):
    np.testing.assert_array_equal(read(sign_values=SIGNS.astype(dtype)).signs_for(512), SIGNS[256:768])


@pytest.mark.parametrize("name", sorted(KEYS - {"version"}))
def test_any_key_without_a_version_is_refused(name):
    keys = {"general.architecture": "qwen3", PREFIX + name: {**VERSION_1, **VERSION_2}.get(name, True)}
    with pytest.raises(ModelError, match=r"'prism\.hadamard\.version' is missing"):
        read_hadamard(Metadata(keys), UNTIED)


@pytest.mark.parametrize("version", [0, 3, 100, -1])
def test_an_unknown_version_is_refused(version):
    assert f"'prism.hadamard.version' is {version}; versions 1 and 2" in refusal(version=version)


@pytest.mark.parametrize("name", ["scale", "Version", "block", "version.minor", "sign_values_2", ""])
def test_an_unknown_key_is_refused(name):
    assert "is unknown: the file may need a newer Prism" in refusal(**{name: 1})


@pytest.mark.parametrize("name", ["block_size", "transform", "axis", "sign_mode", "weight_names"])
def test_a_missing_key_is_named(name):
    assert f"'prism.hadamard.{name}' is missing" in refusal(**{name: None})


@pytest.mark.parametrize("name", ["sign_widths", "sign_values"])
def test_explicit_signs_need_both_their_arrays(name):
    assert f"'prism.hadamard.{name}' is missing" in refusal(**{name: None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("version", 1.0), ("version", "1"), ("version", True), ("block_size", 64.0), ("block_size", "64"),
        ("transform", 1), ("axis", ("input-last-dimension",)), ("sign_mode", True), ("sign_widths", (1, 2)),
        ("sign_values", SIGNS.astype(np.float32)), ("sign_values", "+-"), ("weight_names", "output.weight"),
        ("weight_names", SIGNS), ("inverse_weight_names", "token_embd.weight"), ("gdn_v_grouped", 1),
        ("tied_output", "true"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused(name, value):
    assert f"'prism.hadamard.{name}' must be" in refusal(**{name: value})


@pytest.mark.parametrize("name", ["transform", "axis", "sign_mode"])
def test_an_unknown_word_is_refused_and_shown(name):
    assert f"'prism.hadamard.{name}' is 'other'" in refusal(**{name: "other"})
    assert len(refusal(**{name: "x" * 10_000})) < 300


@pytest.mark.parametrize("block", [3, 48, 100, 1000])
def test_a_block_that_is_no_power_of_two_is_refused(block):
    assert f"'prism.hadamard.block_size' must be a power of two, not {block}" in refusal(block_size=block)


@pytest.mark.parametrize("block", [0, 1, -64, 1 << 21])
def test_a_block_out_of_range_is_refused(block):
    assert "'prism.hadamard.block_size' must be at" in refusal(block_size=block)


def test_a_block_that_does_not_divide_a_width_is_refused():
    assert "tensor 'blk.0.ffn_down.weight' has rows of 768 values, not a multiple of block 512" in refusal(
        block_size=512, weight_names=("blk.0.ffn_down.weight",), inverse_weight_names=None
    )
    assert read(block_size=256).block_size == 256


def test_signs_that_do_not_add_up_are_refused():
    assert "has 1535 entries, but 'prism.hadamard.sign_widths' sums to 1536" in refusal(sign_values=SIGNS[1:])
    huge = np.array([2**31 - 1, 2**31 - 1, 1538], dtype=np.int32)
    assert "sums to 4294968832" in refusal(sign_widths=huge)


@pytest.mark.parametrize("value", [0, 2, -2, 127, -128])
def test_a_sign_other_than_plus_or_minus_one_is_refused(value):
    signs = SIGNS.copy()
    signs[700] = value
    assert f"entry 700 is {value}, not +1 or -1" in refusal(sign_values=signs)


def test_widths_must_be_positive_distinct_and_cover_every_listed_weight():
    assert "must be at least 1" in refusal(sign_widths=np.array([256, 512, 768, 0]))
    assert "lists a width twice" in refusal(sign_widths=np.array([768, 768]))
    text = refusal(sign_widths=np.array([256, 512]), sign_values=SIGNS[:768])
    assert "tensor 'blk.0.ffn_down.weight' is rotated over 768 values, but there are no signs of that width" in text


@pytest.mark.parametrize("key", ["weight_names", "inverse_weight_names"])
def test_a_listed_name_must_exist_be_a_matrix_and_stand_once(key):
    assert "lists 'blk.9.attn_q.weight', which the file does not contain" in refusal(**{key: ("blk.9.attn_q.weight",)})
    assert "lists 'output_norm.weight' of shape [256], not a matrix" in refusal(**{key: ("output_norm.weight",)})
    assert "lists 'output.weight' twice" in refusal(**{key: ("output.weight", "output.weight")})


def test_long_lists_are_checked_in_linear_time():
    names = tuple(f"blk.{n}.attn_q.weight" for n in range(300_000))
    assert "lists 'blk.299999.attn_q.weight' twice" in refusal(weight_names=(*names, names[-1]))
    assert "has 5000000 entries, more than the 7 tensors" in refusal(sign_widths=np.ones(5_000_000, np.int8))


@pytest.mark.parametrize("name", ["blk.0.ssm_alpha.weight", "token_embd.weight"])
def test_a_kind_that_is_never_rotated_is_refused(name):
    assert f"lists {name!r}, a kind that is never rotated" in refusal(weight_names=(*ROTATED, name))


def test_only_the_embedding_may_be_rotated_back():
    assert "a kind that is never rotated" in refusal(inverse_weight_names=("output.weight",))


def test_an_empty_list_of_weights_is_refused():
    assert "'prism.hadamard.weight_names' is empty" in refusal(weight_names=())


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2", "clip", ""])
def test_an_architecture_without_rotations_is_refused(architecture):
    assert f"which architecture {architecture!r} does not have" in refusal(architecture=architecture)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_architectures_with_rotations_are_read(architecture):
    assert read(architecture=architecture).version == 1


def test_version_2_ties_the_head():
    assert "needs 'prism.hadamard.tied_output' to be true" in refusal(TIED, base=VERSION_2, tied_output=None)
    assert "needs 'prism.hadamard.tied_output' to be true" in refusal(TIED, base=VERSION_2, tied_output=False)
    assert "ties the head, but the file contains 'output.weight'" in refusal(UNTIED, base=VERSION_2)
    assert "needs 'token_embd.weight' in" in refusal(TIED, base=VERSION_2, inverse_weight_names=None)


def test_version_1_has_a_head_of_its_own_where_the_embedding_is_rotated():
    assert "needs version 2 of the rotation" in refusal(tied_output=True)
    assert "also the head, which needs version 2" in refusal(TIED, weight_names=ROTATED[1:])
    assert read(TIED, weight_names=ROTATED[1:], inverse_weight_names=None).inverse_weight_names == frozenset()


@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q2_0", "PTQ1_0"])
def test_the_rotation_is_found_whatever_the_tensor_type(type, tmp_path):
    rotation = synthetic.Rotation(block=128, rotate=False)
    with open_gguf(synthetic.qwen3(tmp_path / "m.gguf", type=type, hadamard=rotation)) as file:
        assert file.hadamard.block_size == 128
        assert file.hadamard.version == 2
        assert describe(file)["rotation"]["rotated"] == len(file.hadamard.weight_names) == 14


@pytest.mark.parametrize("split", [1, 3])
def test_a_bad_rotation_stops_the_file_from_opening(split, tmp_path):
    rotation = synthetic.Rotation(extra={"axis": "output"})
    path = synthetic.qwen3(tmp_path / "m.gguf", hadamard=rotation, tied=False, parts=split)
    with pytest.raises(ModelError, match=r"'prism\.hadamard\.axis' is 'output'"):
        open_gguf(path)


def test_grouped_value_heads_need_the_rotation_that_puts_them_in_order():
    shapes = UNTIED | {"blk.0.ssm_out.weight": (512, 256)}
    sentence = refusal(shapes, architecture="qwen35", gdn_v_grouped=True)
    assert "'prism.hadamard.gdn_v_grouped' is true, but 'prism.hadamard.weight_names' lacks 'blk.0.ssm_out" in sentence
    names = (*ROTATED, "blk.0.ssm_out.weight")
    assert read(shapes, architecture="qwen35", gdn_v_grouped=True, weight_names=names).gdn_v_grouped
