"""Typed, range-checked access to one architecture's keys of a GGUF file.

Every getter either returns a value inside the documented range or raises `ModelError` with one sentence that names
the key, the limit and the value. Nothing here looks at tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from prism_core.errors import ModelError

_MISSING = object()
_T = TypeVar("_T")


class Keys:
    """The keys `<architecture>.*` of a file's metadata, or `llm.*`, which one converter wrote instead."""

    def __init__(self, metadata: Mapping[str, object], architecture: str) -> None:
        self._metadata = metadata
        self.architecture = architecture

    def _name(self, key: str) -> str:
        own, other = f"{self.architecture}.{key}", f"llm.{key}"
        return other if own not in self._metadata and other in self._metadata else own

    def has(self, key: str) -> bool:
        """Whether the file has `<architecture>.<key>`."""
        return self._name(key) in self._metadata

    def _get(self, key: str, default: object) -> object:
        value = self._metadata.get(self._name(key), default)
        if value is _MISSING:
            raise ModelError(f"the metadata lacks {self._name(key)}")
        return value

    def integer(self, key: str, low: int, high: int, default: object = _MISSING) -> int:
        """An integer in [low, high]."""
        return self._check_integer(key, self._get(key, default), low, high)

    def _check_integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self._name(key)} must be an integer, not {_kind(value)}")
        if not low <= value <= high:
            raise ModelError(f"{self._name(key)} must be in {low}..{high}, not {value}")
        return value

    def per_layer(self, key: str, layers: int, low: int, high: int, default: object = _MISSING) -> tuple[int, ...]:
        """One integer per layer in [low, high]: the file may give one number for all of them."""
        value = self._get(key, default)
        if _is_array(value):
            items = list(value)  # type: ignore[call-overload]
            if len(items) != layers:
                raise ModelError(f"{self._name(key)} has {len(items)} entries for {layers} layers")
            return tuple(self._check_integer(key, _plain(item), low, high) for item in items)
        return (self._check_integer(key, value, low, high),) * layers

    def flags(self, key: str, layers: int) -> tuple[bool, ...]:
        """One boolean per layer."""
        value = self._get(key, _MISSING)
        if not _is_array(value):
            raise ModelError(f"{self._name(key)} must be an array, not {_kind(value)}")
        items = [_plain(item) for item in value]  # type: ignore[attr-defined]
        if len(items) != layers:
            raise ModelError(f"{self._name(key)} has {len(items)} entries for {layers} layers")
        if not all(isinstance(item, bool) for item in items):
            raise ModelError(f"{self._name(key)} must hold booleans")
        return tuple(bool(item) for item in items)

    def real(self, key: str, low: float, high: float, default: object = _MISSING) -> float:
        """A finite number in [low, high]."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelError(f"{self._name(key)} must be a number, not {_kind(value)}")
        if not math.isfinite(value) or not low <= value <= high:
            raise ModelError(f"{self._name(key)} must be in {low:g}..{high:g}, not {value:g}")
        return float(value)

    def refuse_unless(self, key: str, neutral: Sequence[object]) -> None:
        """Raise `ModelError` where the file has this key and its value is none of those that change nothing."""
        value = self._get(key, neutral[0])
        if _is_array(value) or value not in neutral:
            shown = "an array" if _is_array(value) else repr(value)[:80]
            raise ModelError(f"{self._name(key)} asks for a step that this engine does not take: it is {shown}")

    def text(self, key: str, allowed: Sequence[str], default: str) -> str:
        """One of a few words."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise ModelError(f"{self._name(key)} must be a string, not {_kind(value)}")
        if value not in allowed:
            raise ModelError(f"{self._name(key)} must be one of {', '.join(allowed)}, not {value[:80]!r}")
        return value


def _is_array(value: object) -> bool:
    return not isinstance(value, (str, bytes)) and hasattr(value, "__len__") and hasattr(value, "__iter__")


def _plain(item: object) -> object:
    """A numpy scalar as the Python number it holds."""
    return item.item() if hasattr(item, "item") else item


def _kind(value: object) -> str:
    names = {bool: "a boolean", str: "a string", int: "an integer", float: "a float"}
    return names.get(type(value), "an array")
