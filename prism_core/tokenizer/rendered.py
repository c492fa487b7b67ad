"""From a rendered template to token ids: stored answers, control tokens and literal text, each with its place.

Invariant: the segments, in order, cover the rendering; a stored answer's ids appear exactly where its text stands
between its two markers, and text is never merged across the edge of one. The markers must not have changed what the
template wrote: it is compared with a rendering without them. Only white space that the template trims off an answer's
edges may differ; the stored ids keep it. A space that the template writes before an answer, but not at the end of the
prompt, is the one that the answer's ids start with: it stands there once.
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
    """A committed answer, message `index`, in the template: `opening + text + closing` stands for `ids`."""

    index: int
    opening: str
    closing: str
    text: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class _Stored:
    """An answer found verbatim: its place with its markers, and how many characters before it its ids spell too."""

    start: int
    end: int
    mark: Mark
    lead: int = 0


class MarkedText:
    """A rendering with the markers of answers that the template changed taken out.

    `text`: what is left, `stored`: the answers that stand in it verbatim, `strays`: where markers were taken out.
    """

    def __init__(self, rendered: str, marks: Mapping[str, Mark]) -> None:
        self.strays: list[int] = []
        self.stored: list[_Stored] = []
        self.text = self._clean(rendered, marks) if marks else rendered

    def _clean(self, rendered: str, marks: Mapping[str, Mark]) -> str:
        found = re.compile("[" + re.escape("".join(mark.opening + mark.closing for mark in marks.values())) + "]")
        parts: list[str] = []
        place = length = 0
        while match := found.search(rendered, place):
            start = match.start()
            parts.append(rendered[place:start])
            length += start - place
            mark = marks.get(match.group())
            if mark is not None and rendered.startswith(mark.text + mark.closing, start + 1):
                place = start + len(mark.text) + 2
                self.stored.append(_Stored(length, length + place - start, mark))
                parts.append(rendered[start:place])
                length += place - start
            else:
                self.strays.append(start)
                place = start + 1
        parts.append(rendered[place:])
        return "".join(parts)

    def settle(self, plain: str, tokenizer: Tokenizer) -> bool:
        """Whether the rendering without markers, `plain`, is the same text; sets the answers' leads."""
        settled: list[_Stored] = []
        place = done = 0
        for index, stored in enumerate(self.stored):
            before = self.text[done : stored.start]
            done = stored.end
            following = (
                self.text[done : self.stored[index + 1].start] if index + 1 < len(self.stored) else self.text[done:]
            )
            if not plain.startswith(before, place):
                return False
            place += len(before)
            shown = next((v for v in _trimmings(stored.mark.text) if plain.startswith(v + following, place)), None)
            if shown is None:
                return False
            place += len(shown)
            hidden = tokenizer.drops_space(stored.mark.ids) or (stored.mark.text[0] == " " and shown[:1] != " ")
            twice = hidden and before.endswith(" ") and not self.text.endswith(" ")
            settled.append(_Stored(stored.start, stored.end, stored.mark, lead=int(twice)))
        self.stored = settled
        return plain[place:] == self.text[done:]


def _trimmings(text: str) -> list[str]:
    """The text as templates trim it: not at all, or on one side or both, of all white space or line breaks only."""
    return [
        text,
        *(side for chars in (None, "\n") for side in (text.rstrip(chars), text.lstrip(chars), text.strip(chars))),
    ]


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

    def __init__(self, marked: MarkedText, shield: Shield, tokenizer: Tokenizer) -> None:
        self._shield = shield
        self._tokenizer = tokenizer
        self._strays = marked.strays
        self._segments: list[_Segment] = []
        self._size = 0
        self._after_special = True
        place = 0
        for stored in marked.stored:
            start = stored.start - stored.lead
            self._add_text(marked.text[place:start], place)
            self._segments.append(_Segment(start, stored.end, stored.mark.ids))
            self._after_special = False
            place = stored.end
        self._add_text(marked.text[place:], place)
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
