"""Text to token ids and back, from the metadata of a GGUF file.

Invariants: text given as `special="literal"` never becomes a control token, whatever it spells; `decode` of the ids of
a text gives the text back (BPE: for every text whose bytes all have tokens); nothing is normalised.
Not promised: thread safety of the caches beyond what the interpreter's lock gives (results stay right).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, Protocol

from prism_core.errors import InvalidRequest, ModelError
from prism_core.machine import require_room
from prism_core.tokenizer.pretokenizers import PRE_TOKENIZERS
from prism_core.tokenizer.special import SpecialTokens
from prism_core.tokenizer.spm import SPACE, SpmEncoder
from prism_core.tokenizer.stream import TextStream
from prism_core.tokenizer.vocabulary import (
    BYTE,
    CHAR_TO_BYTE,
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    flag_of,
    text_of,
)

MAX_INPUT_BYTES: Final = 1024 * 1024
LIBRARY_BYTES: Final = 32 << 20
"""Address space that the Rust library is given, beside that of its tables."""
Special = Literal["literal", "parse"]


class _Encoder(Protocol):
    def encode(self, text: str, after_special: bool = True) -> list[int]: ...


class Tokenizer:
    """The tokenizer of one model; made by `from_metadata`."""

    def __init__(
        self, vocabulary: Vocabulary, encoder: _Encoder, *, add_bos: bool, strip_space: bool, pre: str
    ) -> None:
        self.vocabulary = vocabulary
        self.add_bos = add_bos
        self.pre = pre
        self._encoder = encoder
        self._strip_space = strip_space
        self._types = vocabulary.types.tolist()
        self._bytes: dict[int, bytes] = {}
        self._whole: dict[int, str] = {}
        self._always = SpecialTokens(_spellings(vocabulary, USER_DEFINED))
        self._parsed: SpecialTokens | None = None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """From the keys `tokenizer.ggml.*`; ModelError names the key that is missing or wrong."""
        vocabulary = Vocabulary.from_metadata(metadata)
        pre = text_of(metadata, "tokenizer.ggml.pre", "default")
        encoder: _Encoder
        if vocabulary.model == "gpt2":
            require_room(LIBRARY_BYTES)
            from prism_core.tokenizer.bpe import BpeEncoder  # loads the Rust library

            rules = PRE_TOKENIZERS.get(pre, PRE_TOKENIZERS["default"])
            encoder = BpeEncoder(vocabulary, metadata, rules)
            prefix = False
            bos_default = rules.add_bos and "bos" in vocabulary.special_ids
        else:
            prefix = flag_of(metadata, "tokenizer.ggml.add_space_prefix", True)
            encoder = SpmEncoder(vocabulary, prefix)
            bos_default = "bos" in vocabulary.special_ids
        add_bos = flag_of(metadata, "tokenizer.ggml.add_bos_token", bos_default)
        if add_bos and "bos" not in vocabulary.special_ids:
            raise ModelError("tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id")
        return cls(vocabulary, encoder, add_bos=add_bos, strip_space=prefix, pre=pre)

    @property
    def vocab_size(self) -> int:
        """Tokens with a text; the model's embedding may have more rows (padding), never fewer."""
        return len(self.vocabulary)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Ids that end an answer, ascending: eos, eot and eom by id, and the known texts."""
        return self.vocabulary.stop_tokens

    @property
    def bos(self) -> int | None:
        return self.vocabulary.special_ids.get("bos")

    @property
    def eos(self) -> int | None:
        return self.vocabulary.special_ids.get("eos")

    def describe(self) -> dict[str, object]:
        """What `models inspect` shows; `pre_known` is False where an unknown pre-tokenizer fell back to `default`."""
        return {
            "model": self.vocabulary.model,
            "pre": self.pre,
            "pre_known": self.vocabulary.model != "gpt2" or self.pre in PRE_TOKENIZERS,
            "tokens": self.vocab_size,
            "bos": self.bos,
            "eos": self.eos,
            "add_bos": self.add_bos,
            "stop_tokens": list(self.stop_tokens),
        }

    def encode(self, text: str, *, special: Special = "literal", add_bos: bool | None = None) -> list[int]:
        """Ids of `text`, at most MAX_INPUT_BYTES of UTF-8.

        `special="parse"` turns the spellings of control tokens into these tokens: for trusted text only. User-defined
        tokens are found either way. `add_bos=None` does what the file says. An `add_eos_token` of the file is ignored:
        the ids are the start of something that goes on.
        """
        if special not in ("literal", "parse"):
            raise InvalidRequest(f"special must be 'literal' or 'parse', not {special!r}")
        check_text(text)
        head: list[int] = []
        if self.add_bos if add_bos is None else add_bos:
            if self.bos is None:
                raise InvalidRequest("add_bos was asked for, but this model has no BOS token")
            head.append(self.bos)
        return head + self._encode(text, self.control_spellings if special == "parse" else self._always, True)

    def encode_part(self, text: str, *, after_special: bool) -> list[int]:
        """Literal ids of a checked text that stands inside a longer input, `after_special` token or at its start."""
        return self._encode(text, self._always, after_special)

    def _encode(self, text: str, specials: SpecialTokens, after_special: bool) -> list[int]:
        out: list[int] = []
        place = 0
        for start, end, index in specials.find(text):
            if start > place:
                out += self._encoder.encode(text[place:start], after_special)
            out.append(index)
            place = end
            after_special = True
        if place < len(text):
            out += self._encoder.encode(text[place:], after_special)
        return out

    @property
    def control_spellings(self) -> SpecialTokens:
        """The spellings that count in trusted text: control, unknown and user-defined tokens."""
        if self._parsed is None:
            self._parsed = SpecialTokens(_spellings(self.vocabulary, USER_DEFINED, CONTROL, UNKNOWN))
        return self._parsed

    def token_bytes(self, token_id: int, *, show_control: bool = False) -> bytes:
        """The bytes that a token adds to the text: none for control and unknown tokens unless shown, or for padding."""
        data = self._bytes.get(token_id)
        if data is None or (show_control and not data):
            if token_id < 0:
                raise InvalidRequest(f"token id {token_id} is negative")
            if token_id >= len(self._types):
                return b""
            if show_control and self._types[token_id] in (CONTROL, UNKNOWN):
                return self.vocabulary.texts[token_id].encode()
            data = self._bytes[token_id] = self._spell(token_id)
        return data

    def _spell(self, token_id: int) -> bytes:
        kind, text = self._types[token_id], self.vocabulary.texts[token_id]
        if kind in (CONTROL, UNKNOWN):
            return b""
        if kind == USER_DEFINED:
            return text.encode()
        if self.vocabulary.model == "gpt2":
            return b"".join(
                bytes((byte,)) if (byte := CHAR_TO_BYTE.get(char)) is not None else char.encode() for char in text
            )
        if kind == BYTE:
            return bytes((int(text[3:5], 16),))
        return text.replace(SPACE, " ").encode()

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD. Control tokens are left out unless shown."""
        data = b"".join(self.token_bytes(int(index), show_control=show_control) for index in ids)
        if self._strip_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    def drops_space(self, ids: Sequence[int]) -> bool:
        """Whether `decode` leaves out a space that these ids start with (the one that encoding puts before a text)."""
        return self._strip_space and next(filter(None, map(self.token_bytes, ids)), b"").startswith(b" ")

    def stream(self) -> TextStream:
        """A stream whose pieces join to what `decode` gives for all its ids."""
        return TextStream(self.token_bytes, self._strip_space, self._whole)


def check_text(text: str) -> None:
    """InvalidRequest unless `text` is a string of Unicode characters within MAX_INPUT_BYTES."""
    if not isinstance(text, str):
        raise InvalidRequest(f"text must be a string, not {type(text).__name__}")
    if len(text) > MAX_INPUT_BYTES:
        raise InvalidRequest(f"the text has {len(text)} characters; at most {MAX_INPUT_BYTES} bytes are accepted")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the text holds half a surrogate pair at character {error.start}") from None
    if size > MAX_INPUT_BYTES:
        raise InvalidRequest(f"the text has {size} bytes; at most {MAX_INPUT_BYTES} are accepted")


def _spellings(vocabulary: Vocabulary, *types: int) -> dict[str, int]:
    return {vocabulary.texts[index]: index for index in vocabulary.ids_of_type(*types)}
