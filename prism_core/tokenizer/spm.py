"""Score-merged vocabularies (`tokenizer.ggml.model` = llama: Llama 2, gemma).

Spaces become U+2581, then neighbouring symbols are merged, the pair whose union has the highest score first and the
leftmost among equals, until no union is a token. What is left and no token falls apart into byte tokens <0xNN>.
This is a greedy merge, not the unigram search that the same files were trained for.

Invariant: the result is that of merging the whole text at once. Two neighbouring characters that stand side by side in
no token can never end up in one, so the text is cut there first; each part costs O(n log n), and short ones are
remembered. Control, unknown and byte tokens are never produced from their own spelling.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
import numpy.typing as npt

from prism_core.tokenizer.vocabulary import BYTE, CONTROL, UNKNOWN, Vocabulary

SPACE: Final = "▁"
_Points = npt.NDArray[np.uint32]
_PAIR_BITS: Final = 22
_CACHED_PARTS: Final = 32_768
_CACHED_CHARS: Final = 32


class SpmEncoder:
    """Text to ids, without any special token."""

    def __init__(self, vocabulary: Vocabulary, add_space_prefix: bool) -> None:
        assert vocabulary.scores is not None
        self._add_space_prefix = add_space_prefix
        hidden = vocabulary.ids_of_type(CONTROL, UNKNOWN, BYTE)
        self._ids = dict(vocabulary.ids)
        for index in hidden:
            self._ids.pop(vocabulary.texts[index], None)
        # equal scores share a rank, so that the place decides between them
        self._ranks: list[int] = np.unique(-vocabulary.scores, return_inverse=True)[1].tolist()
        self._joined = _neighbours(self._ids)
        self._bytes = _byte_ids(vocabulary)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """Ids of a text; `after_special`: it starts the input or follows a special token."""
        if not text:
            return []
        if self._add_space_prefix and after_special:
            text = " " + text
        text = text.replace(" ", SPACE)
        points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        cuts = (np.flatnonzero(~self._joined[_pair_slots(points[:-1], points[1:])]) + 1).tolist()
        ids: list[int] = []
        start = 0
        cache = self._cache
        for end in [*cuts, len(text)]:
            part = text[start:end]
            start = end
            known = cache.get(part)
            if known is None:
                known = tuple(self._merge(part))
                if len(part) <= _CACHED_CHARS:
                    if len(cache) >= _CACHED_PARTS:
                        cache.clear()
                    cache[part] = known
            ids.extend(known)
        return ids

    def _merge(self, text: str) -> list[int]:
        """The greedy merge of one part; `ends[i]` is the end of the symbol that starts at i, or 0 if none does."""
        known = self._ids.get(text)
        if len(text) == 1:
            return [known] if known is not None else self._fall_back(text)
        ids, ranks, size = self._ids, self._ranks, len(text)
        # one integer per candidate: rank, place and end, so that the heap compares machine-sized numbers only
        width = size.bit_length()
        heap = [
            (ranks[found] << width | place) << width | (place + 2)
            for place in range(size - 1)
            if (found := ids.get(text[place : place + 2])) is not None
        ]
        heapify(heap)
        ends = list(range(1, size + 1))
        starts = list(range(size))  # starts[end - 1]: start of the symbol that ends there
        mask = (1 << width) - 1
        while heap:
            item = heappop(heap)
            end = item & mask
            place = item >> width & mask
            seam = ends[place]
            # stale unless the pair (place, seam) still spans exactly to `end`
            if seam == 0 or seam >= end or ends[seam] != end:
                continue
            ends[place] = end
            ends[seam] = 0
            starts[end - 1] = place
            if end < size:
                after = ends[end]
                found = ids.get(text[place:after])
                if found is not None:
                    heappush(heap, (ranks[found] << width | place) << width | after)
            if place:
                before = starts[place - 1]
                found = ids.get(text[before:end])
                if found is not None:
                    heappush(heap, (ranks[found] << width | before) << width | end)
        out: list[int] = []
        place = 0
        while place < size:
            end = ends[place]
            found = ids.get(text[place:end])
            if found is not None:
                out.append(found)
            else:
                out.extend(self._fall_back(text[place:end]))
            place = end
        return out

    def _fall_back(self, char: str) -> list[int]:
        byte_ids = self._bytes
        return [index for byte in char.encode() if (index := byte_ids[byte]) is not None]


def _pair_slots(left: _Points, right: _Points) -> _Points:
    """A slot of the table for each pair of code points; a shared slot costs a cut, never a wrong one."""
    mixed = left * np.uint32(0x9E3779B1) + right * np.uint32(0x85EBCA77)
    return mixed >> np.uint32(32 - _PAIR_BITS)


def _neighbours(texts: dict[str, int]) -> np.ndarray:
    """bool[2^22]: true where some token may hold this pair of neighbouring characters."""
    table = np.zeros(1 << _PAIR_BITS, dtype=np.bool_)
    # the separator makes pairs of its own, which only mark slots too many
    points = np.frombuffer("\0".join(texts).encode("utf-32-le"), dtype=np.uint32)
    table[_pair_slots(points[:-1], points[1:])] = True
    return table


def _byte_ids(vocabulary: Vocabulary) -> list[int | None]:
    """The token of each byte: <0xNN>, else the unknown token, else none (the byte is dropped)."""
    found: list[int | None] = [vocabulary.special_ids.get("unknown")] * 256
    for index in vocabulary.ids_of_type(BYTE):
        found[int(vocabulary.texts[index][3:5], 16)] = index
    return found
