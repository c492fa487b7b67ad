"""Byte-level BPE (`tokenizer.ggml.model` = gpt2), merged by the Rust library `tokenizers`.

Invariant: no control or unknown token is ever produced from text: they are kept out of the merge table.
Text is not normalised (a Hugging Face Qwen tokenizer would apply NFC; the GGUF engines do not, and neither do we).
A byte that has no token is dropped silently, as in the engine that the reference values come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from reprlib import repr as show
from typing import Final, cast

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from prism_core.errors import InvalidRequest, ModelError
from prism_core.machine import require_room
from prism_core.tokenizer.pretokenizers import PreTokenizer
from prism_core.tokenizer.vocabulary import BYTE_TO_CHAR, CONTROL, MAX_MERGES, UNKNOWN, Vocabulary

MAX_PIECE_BYTES: Final = 64 * 1024
WINDOW_CHARS: Final = 32 * 1024
BYTES_PER_ENTRY: Final = 384
"""About what the library takes for a token or a merge; refused that, it would end the process."""


class BpeEncoder:
    """Text to ids, without any special token; `after_special` is of no consequence for BPE."""

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, object], pre: PreTokenizer) -> None:
        control = set(vocabulary.ids_of_type(CONTROL, UNKNOWN))
        merges = _merges(metadata, vocabulary, control)
        ids = dict(vocabulary.ids)
        for index in control:
            ids.pop(vocabulary.texts[index], None)
        # A byte without a token still parts its neighbours: it gets an id beyond the vocabulary, removed afterwards.
        self._limit = len(vocabulary)
        missing = [char for char in BYTE_TO_CHAR if char not in ids]
        ids.update(zip(missing, range(self._limit, self._limit + len(missing)), strict=True))
        self._drop = bool(missing)
        self._splits = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
        )
        require_room(BYTES_PER_ENTRY * (len(ids) + len(merges)))
        self._tokenizer = RustTokenizer(models.BPE(ids, merges, ignore_merges=pre.whole_pieces))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [self._splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    def encode(self, text: str, after_special: bool = True) -> list[int]:
        """Ids of a text of at most MAX_INPUT_BYTES; InvalidRequest if one of its pieces is too long.

        A long text goes window by window: the library keeps the interpreter's lock during a call, and a worker's other
        threads (its heartbeat) must not wait for seconds.
        """
        if len(text) <= MAX_PIECE_BYTES // 4:
            return self._encode(text)
        ids: list[int] = []
        place = 0
        while place < len(text):
            cut = self._cut(text, place)
            ids += self._encode(text[place:cut])
            place = cut
        return ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [index for index in ids if index < self._limit] if self._drop else ids

    def _cut(self, text: str, place: int) -> int:
        """An end of a piece, about a window after `place`, that the text beyond the window has no part in.

        The rules look ahead by one character and back by none, so only the last piece of a window, and the run of
        white space before it, may go on differently in the whole text.
        """
        size = WINDOW_CHARS
        while True:
            pieces = self._splits.pre_tokenize_str(text[place : place + size])
            for piece, _ in pieces:
                if len(piece) > MAX_PIECE_BYTES // 4 and len(piece.encode()) > MAX_PIECE_BYTES:
                    raise InvalidRequest(
                        f"the text holds an unbroken piece of {len(piece.encode())} bytes or more, starting "
                        f"{piece[:20]!r}; at most {MAX_PIECE_BYTES} bytes may stand without a break"
                    )
            if place + size >= len(text):
                return len(text)
            index = len(pieces) - 1
            while index > 0 and pieces[index - 1][0].isspace():
                index -= 1
            if index > 0:
                return place + int(pieces[index][1][0])
            size *= 2


def _merges(metadata: Mapping[str, object], vocabulary: Vocabulary, control: set[int]) -> list[tuple[str, str]]:
    key = "tokenizer.ggml.merges"
    lines = metadata.get(key)
    if not isinstance(lines, (list, tuple)):
        raise ModelError(f"{key} must be an array of strings" if lines is not None else f"{key} is missing")
    if len(lines) > MAX_MERGES:
        raise ModelError(f"{key} has {len(lines)} entries; at most {MAX_MERGES} are supported")
    if not set(map(type, lines)) <= {str}:
        index = next(i for i, line in enumerate(lines) if not isinstance(line, str))
        raise ModelError(f"{key}[{index}] must be a string, not {type(lines[index]).__name__}")
    # whole-array tests first: a table of a quarter million lines is checked on every start of a worker
    merges = [tuple(line.split(" ")) for line in lines]
    parts_used = set(chain.from_iterable(merges))
    if not set(map(len, merges)) <= {2} or "" in parts_used:
        index = next(i for i, parts in enumerate(merges) if len(parts) != 2 or "" in parts)
        raise ModelError(f"{key}[{index}] is {show(lines[index])}; two tokens with one space between them are needed")
    known = vocabulary.ids.keys()
    products = [line.replace(" ", "", 1) for line in lines]
    products_made = set(products)
    if not (known >= parts_used and known >= products_made):
        for index, parts in enumerate(merges):
            for part in (*parts, products[index]):
                if part not in known:
                    raise ModelError(f"{key}[{index}] is {show(lines[index])}, but {show(part)} is no token")
    if len(set(lines)) != len(lines):
        merges = list(dict.fromkeys(merges))  # the first mention has the rank
    texts = {vocabulary.texts[index] for index in control}
    if texts & products_made or texts & parts_used:
        merges = [parts for parts in merges if "".join(parts) not in texts and texts.isdisjoint(parts)]
    return cast("list[tuple[str, str]]", merges)
