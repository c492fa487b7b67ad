"""Typed access says what is wrong with a value instead of converting it."""

from __future__ import annotations

import numpy as np
import pytest

from prism_core.errors import ModelError
from prism_core.gguf import Metadata

KEYS = Metadata(
    {
        "int": 7, "zero": 0, "float": 1.5, "nan": float("nan"), "inf": float("inf"), "text": "abc", "flag": True,
        "words": ("a", "b"), "none": (), "ints": np.array([1, -2, 3], np.int8),
        "floats": np.array([0.5, 2], np.float32),
        "bad": np.array([1, np.nan], np.float32), "flags": np.array([True, False]),
    },
    "file.gguf",
)  # fmt: skip


def test_values_of_the_asked_type_come_back():
    assert KEYS.require("int", int) == 7
    assert KEYS.require("float", float) == 1.5
    assert KEYS.require("text", str) == "abc"
    assert KEYS.require("flag", bool) is True
    assert KEYS.strings("words") == ("a", "b")
    assert KEYS.strings("none", length=0) == ()
    assert KEYS.integers("ints", low=-2, high=3).tolist() == [1, -2, 3]
    assert KEYS.floats("floats", length=2).tolist() == [0.5, 2]
    assert KEYS.booleans("flags").tolist() == [True, False]


@pytest.mark.parametrize(
    ("key", "kind", "words"),
    [
        ("float", int, "'float' must be an integer, not a float"),
        ("flag", int, "'flag' must be an integer, not a boolean"),
        ("text", int, "'text' must be an integer, not a string"),
        ("ints", int, "'ints' must be an integer, not an array of 3 int8 values"),
        ("int", float, "'int' must be a float, not an integer"),
        ("int", bool, "'int' must be a boolean, not an integer"),
        ("int", str, "'int' must be a string, not an integer"),
        ("words", str, "'words' must be a string, not an array of 2 strings"),
        ("gone", int, "'gone' is missing"),
        ("nan", float, "'nan' must be finite, not nan"),
        ("inf", float, "'inf' must be finite, not inf"),
    ],
)
def test_a_wrong_type_is_named_in_words(key, kind, words):
    with pytest.raises(ModelError) as caught:
        KEYS.require(key, kind)
    assert str(caught.value) == f"file.gguf: key {words}"


def test_ranges_name_the_limit_and_the_value():
    with pytest.raises(ModelError, match="'int' must be at least 8, not 7"):
        KEYS.require("int", int, low=8)
    with pytest.raises(ModelError, match=r"'float' must be at most 1, not 1\.5"):
        KEYS.require("float", float, high=1)
    with pytest.raises(ModelError, match="'text' must be at most 2 characters, not 3"):
        KEYS.require("text", str, high=2)
    assert KEYS.require("zero", int, low=0, high=0) == 0


def test_a_default_replaces_a_missing_key_and_never_a_wrong_one():
    assert KEYS.optional("gone", int, 3) == 3
    assert KEYS.optional("int", int, 3) == 7
    with pytest.raises(ModelError, match="must be an integer"):
        KEYS.optional("float", int, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda k: k.strings("ints"), "'ints' must be an array of strings, not an array of 3 int8"),
        (lambda k: k.strings("words", length=3), "'words' must have 3 entries, not 2"),
        (lambda k: k.strings("int"), "'int' must be an array, not an integer"),
        (lambda k: k.integers("floats"), "'floats' must be an array of integers, not an array of 2 float32"),
        (lambda k: k.integers("flags"), "'flags' must be an array of integers, not an array of 2 bool"),
        (lambda k: k.integers("words"), "'words' must be an array of integers"),
        (lambda k: k.integers("ints", low=0), "'ints': entry 1 must be at least 0, not -2"),
        (lambda k: k.integers("ints", high=2), "'ints': entry 2 must be at most 2, not 3"),
        (lambda k: k.floats("bad"), "'bad': entry 1 must be finite, not nan"),
        (lambda k: k.floats("ints"), "'ints' must be an array of floats"),
        (lambda k: k.booleans("ints"), "'ints' must be an array of booleans"),
        (lambda k: k.floats("gone"), "'gone' is missing"),
    ],
)
def test_arrays_are_checked_as_strictly(call, words):
    with pytest.raises(ModelError) as caught:
        call(KEYS)
    assert words in str(caught.value)


def test_it_is_a_read_only_mapping():
    assert dict(KEYS).keys() == set(KEYS)
    assert len(KEYS) == 13
    with pytest.raises(TypeError):
        KEYS["int"] = 3
