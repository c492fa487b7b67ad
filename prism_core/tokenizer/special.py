"""Cutting a text at the spellings of special tokens.

Invariant: the parts, in order, spell the text again, and the choice between overlapping spellings is that of the
reference engine: longer spellings first over the whole text, equal lengths by lower id, each from left to right.
The time is linear in the text for ordinary vocabularies: only stretches where spellings overlap are looked at twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

_CACHED_STRETCHES: Final = 1024
_CACHED_CHARS: Final = 64
_FEW_FIRSTS: Final = 16

Match = tuple[int, int, int]
"""(start, end, token id), offsets in characters."""


class SpecialTokens:
    """A set of spellings, `ids[spelling]`, that can be found in a text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: index for text, index in ids.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
        # a spelling of one character competes with every longer one that starts with it
        for head in list(lengths):
            if len(head) == 2:
                lengths[head] |= lengths.get(head[0], set())
        self._lengths = {head: tuple(sorted(found, reverse=True)) for head, found in lengths.items()}
        self._heads = _heads_pattern(self._lengths)
        self._overlapping = _overlapping(self._ids)
        self._stretches: dict[str, list[Match]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def find(self, text: str) -> Iterator[Match]:
        """The spellings that cut this text, in order of their place."""
        if self._heads is None:
            return
        place = 0
        while found := self._heads.search(text, place):
            start = found.start()
            end = self._longest(text, start)
            if end == 0:
                place = start + 1
                continue
            spelling = text[start:end]
            if spelling not in self._overlapping:
                yield start, end, self._ids[spelling]
                place = end
                continue
            place = self._stretch_end(text, start, end)
            for first, last, index in self._longest_first(text[start:place]):
                yield start + first, start + last, index

    def _longest(self, text: str, start: int) -> int:
        for length in self._lengths.get(text[start : start + 2]) or self._lengths.get(text[start : start + 1], ()):
            if start + length <= len(text) and text[start : start + length] in self._ids:
                return start + length
        return 0

    def _stretch_end(self, text: str, start: int, end: int) -> int:
        """Where no spelling reaches across any more."""
        place = start + 1
        while place < end:
            end = max(end, self._longest(text, place))
            place += 1
        return end

    def _longest_first(self, stretch: str) -> list[Match]:
        known = self._stretches.get(stretch)
        if known is not None:
            return known
        characters = set(stretch)
        candidates = [text for text in self._ids if len(text) <= len(stretch) and characters.issuperset(text)]
        candidates.sort(key=lambda text: (-len(text), self._ids[text]))
        free = [(0, len(stretch))]
        matches: list[Match] = []
        for text in candidates:
            left_over: list[tuple[int, int]] = []
            for begin, end in free:
                place = begin
                while (found := stretch.find(text, place, end)) >= 0:
                    matches.append((found, found + len(text), self._ids[text]))
                    if found > place:
                        left_over.append((place, found))
                    place = found + len(text)
                if place < end:
                    left_over.append((place, end))
            free = left_over
            if not free:
                break
        matches.sort()
        if len(stretch) <= _CACHED_CHARS and len(self._stretches) < _CACHED_STRETCHES:
            self._stretches[stretch] = matches
        return matches


def _heads_pattern(heads: Mapping[str, object]) -> re.Pattern[str] | None:
    """Finds the places where a spelling may start, by its first one or two characters."""
    seconds: dict[str, set[str]] = {}
    for head in heads:
        seconds.setdefault(head[0], set()).add(head[1:])
    if not seconds:
        return None
    if len(seconds) > _FEW_FIRSTS:  # one character class is fast however many there are, alternatives are not
        return re.compile(_class_of(seconds))
    return re.compile(
        "|".join(
            re.escape(first) + ("" if "" in following else _class_of(following))
            for first, following in sorted(seconds.items())
        )
    )


def _class_of(characters: Iterable[str]) -> str:
    return "[" + "".join(re.escape(char) for char in sorted(characters)) + "]"


def _overlapping(texts: Mapping[str, object]) -> frozenset[str]:
    """The spellings whose end can be the start of another: a choice is needed there."""
    starts = {text[:length] for text in texts for length in range(1, len(text))}
    return frozenset(text for text in texts if any(text[place:] in starts for place in range(1, len(text))))
