"""Text from ids that arrive one at a time.

Invariant: the concatenation of every `push` and the final `finish` equals `Tokenizer.decode` of all ids, however the
ids were spread over the calls, and no call returns part of a character. At most three bytes are held back.
Bytes that cannot become UTF-8 turn into U+FFFD, once that is certain: at the next byte that does not continue them,
or at `finish`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TextStream:
    """One answer in the making; made by `Tokenizer.stream`."""

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool, whole: dict[int, str]) -> None:
        """`whole`: texts of ids that are whole characters by themselves; all streams of a vocabulary fill and use it.

        After a decoder step the processor's caches hold nothing of ours: then a decoder of bytes takes 12 us, a look
        into `whole` 3.
        """
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = strip_space
        self._whole = whole
        # Nothing is held back and no space is to be stripped: the text of an id depends on the id alone.
        self._between = not strip_space

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly empty; InvalidRequest if it is no id of the vocabulary."""
        between = self._between
        if between and (known := self._whole.get(token_id)) is not None:
            return known
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        text = self._decoder.decode(data)
        self._between = not self._strip_space and not self._decoder.getstate()[0]
        if between and self._between and text:
            self._whole[token_id] = text
        return text

    def finish(self) -> str:
        """What is still held back, as U+FFFD. The stream is then as new, but for the space at its start."""
        self._between = not self._strip_space
        return self._decoder.decode(b"", final=True)
