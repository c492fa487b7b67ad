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

    def __init__(self, token_bytes: Callable[[int], bytes], strip_space: bool) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_space = strip_space

    def push(self, token_id: int) -> str:
        """The text that this id completes, possibly empty; InvalidRequest if it is no id of the vocabulary."""
        data = self._token_bytes(token_id)
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held back, as U+FFFD. The stream is then as new, but for the space at its start."""
        return self._decoder.decode(b"", final=True)
