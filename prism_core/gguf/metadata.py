"""Typed access to the key-value part of a GGUF file.

Values are untrusted. `Metadata` is a plain read-only mapping for whoever wants to look, and a set of accessors that
either return a value of the asked type and range or raise a `ModelError` which names the key, the limit and the value.
No accessor converts between kinds: a float where an integer belongs is an error, and so is the reverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError

T = TypeVar("T", int, float, str, bool)

_NAMES: dict[type, str] = {int: "an integer", float: "a float", str: "a string", bool: "a boolean"}


def kind_of(value: object) -> str:
    """What a stored value is, in words, for error texts."""
    if isinstance(value, np.ndarray):
        return f"an array of {len(value)} {value.dtype.name} values"
    if isinstance(value, tuple):
        return f"an array of {len(value)} strings"
    return _NAMES.get(type(value), type(value).__name__)


def show(value: object, limit: int = 60) -> str:
    """A short, one-line spelling of an untrusted value."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


class Metadata(Mapping[str, object]):
    """The keys of a file. Scalars are int, float, bool or str; number arrays are read-only numpy arrays (bool arrays
    have dtype bool); string arrays are tuples of str."""

    def __init__(self, values: Mapping[str, object], source: str = "metadata") -> None:
        self._values = dict(values)
        self.source = source

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def require(self, key: str, kind: type[T], *, low: float | None = None, high: float | None = None) -> T:
        """The value of `key` as `kind` (int, float, str or bool), within [low, high] (of a string: its length).

        Raises ModelError where the key is missing, of another type, not finite, or out of range.
        """
        value = self._values.get(key)
        if value is None:
            raise ModelError(f"{self.source}: key {key!r} is missing")
        if type(value) is not kind:
            raise ModelError(f"{self.source}: key {key!r} must be {_NAMES[kind]}, not {kind_of(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ModelError(f"{self.source}: key {key!r} must be finite, not {value}")
        size: Any = len(value) if isinstance(value, str) else value
        unit = " characters" if isinstance(value, str) else ""
        if low is not None and size < low:
            raise ModelError(f"{self.source}: key {key!r} must be at least {low}{unit}, not {size}")
        if high is not None and size > high:
            raise ModelError(f"{self.source}: key {key!r} must be at most {high}{unit}, not {size}")
        return value

    def optional(
        self, key: str, kind: type[T], default: T, *, low: float | None = None, high: float | None = None
    ) -> T:
        """As `require`, or `default` where the key is absent. A present key of the wrong type is still an error."""
        return self.require(key, kind, low=low, high=high) if key in self._values else default

    def strings(self, key: str, *, length: int | None = None) -> tuple[str, ...]:
        """The string array of `key`; of `length` entries where that is given."""
        value = self._array(key, length)
        if isinstance(value, np.ndarray) and len(value):
            raise ModelError(f"{self.source}: key {key!r} must be an array of strings, not {kind_of(value)}")
        return tuple(value)

    def integers(
        self, key: str, *, length: int | None = None, low: int | None = None, high: int | None = None
    ) -> NDArray[Any]:
        """The integer array of `key` in the dtype of the file, every entry within [low, high]."""
        return self._numbers(key, "iu", "integers", length, low, high)

    def floats(
        self, key: str, *, length: int | None = None, low: float | None = None, high: float | None = None
    ) -> NDArray[Any]:
        """The float array of `key`, every entry finite and within [low, high]."""
        return self._numbers(key, "f", "floats", length, low, high)

    def booleans(self, key: str, *, length: int | None = None) -> NDArray[np.bool_]:
        """The boolean array of `key`."""
        return self._numbers(key, "b", "booleans", length, None, None)

    def _array(self, key: str, length: int | None) -> Any:
        value = self._values.get(key)
        if value is None:
            raise ModelError(f"{self.source}: key {key!r} is missing")
        if not isinstance(value, np.ndarray | tuple):
            raise ModelError(f"{self.source}: key {key!r} must be an array, not {kind_of(value)}")
        if length is not None and len(value) != length:
            raise ModelError(f"{self.source}: key {key!r} must have {length} entries, not {len(value)}")
        return value

    def _numbers(
        self, key: str, kinds: str, words: str, length: int | None, low: float | None, high: float | None
    ) -> NDArray[Any]:
        value = self._array(key, length)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds:
            raise ModelError(f"{self.source}: key {key!r} must be an array of {words}, not {kind_of(value)}")
        if "f" in kinds and not np.isfinite(value).all():
            at = int(np.argmin(np.isfinite(value)))
            raise ModelError(f"{self.source}: key {key!r}: entry {at} must be finite, not {value[at]}")
        if low is not None and len(value) and value.min() < low:
            at = int(np.argmin(value))
            raise ModelError(f"{self.source}: key {key!r}: entry {at} must be at least {low}, not {value[at]}")
        if high is not None and len(value) and value.max() > high:
            at = int(np.argmax(value))
            raise ModelError(f"{self.source}: key {key!r}: entry {at} must be at most {high}, not {value[at]}")
        return value
