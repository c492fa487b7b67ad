"""From a rendered template to token ids: stored answers, control tokens and literal text, each with its place.

Invariant: the segments, in order, cover the rendering; a stored answer's ids appear exactly where its text stands
between its two markers, and text is never merged across the edge of one.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from prism_core.errors import InvalidRequest
from prism_core.tokenizer.shield import Shield
from prism_core.tokenizer.tokenizer import MAX_INPUT_BYTES, Tokenizer, check_text


@dataclass(frozen=True, slots=True)
class Mark:
    """A committed answer on its way through the template: `opening + text + closing` stands for `ids`."""

    opening: str
    closing: str
    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class _Segment:
    """`start`, `end`: characters of the cleaned rendering. `text` (still covered) is None where the ids are given."""

    start: int
    end: int
    ids: list[int]
    text: str | None = None
    after_special: bool = False


class RenderedChat:
    """One rendering, tokenised. `ids` are its token ids."""

    def __init__(self, text: str, marks: Mapping[str, Mark], shield: Shield, tokenizer: Tokenizer) -> None:
        self._shield = shield
        self._tokenizer = tokenizer
        self._strays: list[int] = []
        clean, stored = self._clean(text, marks)
        self._segments: list[_Segment] = []
        self._size = 0
        self._after_special = True
        place = 0
        for start, end, mark in stored:
            self._add_text(clean[place:start], place)
            self._segments.append(_Segment(start, end, mark.ids))
            self._after_special = False
            place = end
        self._add_text(clean[place:], place)
        self.ids = [index for segment in self._segments for index in segment.ids]

    def position(self, place: int, *, nearest: bool) -> int | None:
        """How many tokens spell the rendering's first `place` characters.

        If no token ends there: None, or with `nearest` the number that end at the last sure seam before.
        """
        place -= bisect_left(self._strays, place)
        count = 0
        for segment in self._segments:
            if segment.end <= place:
                count += len(segment.ids)
                continue
            if segment.start == place:
                return count
            if segment.text is not None and segment.start < place:
                part = self._shield.restore(segment.text[: place - segment.start])
                ids = self._tokenizer.encode_part(part, after_special=segment.after_special)
                if segment.ids[: len(ids)] == ids:
                    return count + len(ids)
            return count if nearest else None
        return count

    def _clean(self, text: str, marks: Mapping[str, Mark]) -> tuple[str, list[tuple[int, int, Mark]]]:
        """The text without the markers of answers that the template changed, and the places of the others."""
        if not marks:
            return text, []
        both = "".join(mark.opening + mark.closing for mark in marks.values())
        found = re.compile("[" + re.escape(both) + "]")
        parts: list[str] = []
        stored: list[tuple[int, int, Mark]] = []
        place = length = 0
        while match := found.search(text, place):
            start = match.start()
            parts.append(text[place:start])
            length += start - place
            mark = marks.get(match.group())
            if mark is not None and text.startswith(mark.text + mark.closing, start + 1):
                place = start + len(mark.text) + 2
                stored.append((length, length + place - start, mark))
                parts.append(text[start:place])
                length += place - start
            else:
                self._strays.append(start)
                place = start + 1
        parts.append(text[place:])
        return "".join(parts), stored

    def _add_text(self, text: str, base: int) -> None:
        self._size += len(text.encode(errors="surrogatepass"))
        if self._size > MAX_INPUT_BYTES:
            raise InvalidRequest(f"the chat has more than {MAX_INPUT_BYTES} bytes of text besides its stored answers")
        place = 0
        for start, end, index in self._tokenizer.control_spellings.find(text):
            self._add_literal(text[place:start], base + place)
            self._segments.append(_Segment(base + start, base + end, [index]))
            self._after_special = True
            place = end
        self._add_literal(text[place:], base + place)

    def _add_literal(self, covered: str, start: int) -> None:
        if not covered:
            return
        text = self._shield.restore(covered)
        check_text(text)
        after_special = self._after_special
        ids = self._tokenizer.encode_part(text, after_special=after_special)
        self._segments.append(_Segment(start, start + len(covered), ids, covered, after_special))
        self._after_special = False
