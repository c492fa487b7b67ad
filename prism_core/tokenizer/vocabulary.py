"""The vocabulary of a GGUF file, checked before anything is built from it.

Invariant: a `Vocabulary` that exists is consistent: arrays of equal length, no duplicate text, every special id in
range, every merge made of tokens. Whatever is wrong in the file is a `ModelError` that names the key and the index.
Not promised: that the vocabulary is a good one; bytes without a token are dropped or become the unknown token.

Tokens that end a generation by their text, and the fill-in-the-middle tokens, are control tokens whatever type the
file gives them (as llama.cpp decides): such a spelling in a user's text stays text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as show
from typing import Final

import numpy as np

from prism_core.errors import ModelError

MAX_VOCAB: Final = 1_048_576
MAX_TOKEN_BYTES: Final = 1024
MAX_SPECIAL_WORK: Final = 1 << 24
"""Sum of the squared lengths of the special tokens' texts: finding them takes tables of all their parts."""
MAX_MERGES: Final = 4 * MAX_VOCAB

NORMAL: Final = 1
UNKNOWN: Final = 2
CONTROL: Final = 3
USER_DEFINED: Final = 4
UNUSED: Final = 5
BYTE: Final = 6
_SPECIAL: Final = (UNKNOWN, CONTROL, USER_DEFINED)

# fmt: off
END_OF_GENERATION_TEXTS: Final = frozenset((
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<end_of_turn>",
    "</s>", "<eos>", "<EOT>",
))
# padding, repository and file separators: a model that emits one of these has left the answer
FIM_END_TEXTS: Final = frozenset((
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]",
    "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
))
FIM_TEXTS: Final = frozenset((
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<｜fim▁begin｜>",
    "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<｜fim▁hole｜>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<MID>", "▁<MID>", "<|code_middle|>", "<｜fim▁end｜>",
))
_STOP_KEYS: Final = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ID_KEYS: Final = (
    "bos", "eos", "eot", "eom", "unknown", "padding", "seperator", "separator", "cls", "mask",
    "fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep",
)
# fmt: on
_BYTE_NAME: Final = re.compile("<0x[0-9A-Fa-f]{2}>")


def byte_alphabet() -> tuple[str, ...]:
    """The character that stands for each of the 256 bytes in the tokens of a byte-level vocabulary."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_TO_CHAR: Final = byte_alphabet()
CHAR_TO_BYTE: Final[dict[str, int]] = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`texts[id]`, `types` uint8[n], `scores` float32[n] or None, `ids` of the non-empty texts, special ids
    by the name in their key (`bos`, `eos`, `unknown`, ...).
    """

    model: str
    texts: Sequence[str]
    types: np.ndarray
    scores: np.ndarray | None
    ids: Mapping[str, int]
    special_ids: Mapping[str, int]
    stop_tokens: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def ids_of_type(self, *types: int) -> list[int]:
        found: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return found

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Read and check `tokenizer.ggml.*`; ModelError names the key that is wrong."""
        model = text_of(metadata, "tokenizer.ggml.model")
        if model not in ("gpt2", "llama"):
            raise ModelError(f"tokenizer.ggml.model is {show(model)}; supported are 'gpt2' (BPE) and 'llama' (SPM)")
        texts = _tokens(metadata)
        ids = {text: index for index, text in enumerate(texts)}
        empty = texts.count("")
        ids.pop("", None)
        if len(ids) + empty != len(texts):
            index = next(i for i, text in enumerate(texts) if text and ids[text] != i)
            raise ModelError(
                f"tokenizer.ggml.tokens: {show(texts[index])} is both token {index} and token {ids[texts[index]]}"
            )
        types = _types(metadata, len(texts))
        scores = _scores(metadata, len(texts))
        special_ids = _special_ids(metadata, len(texts))
        if model == "llama":
            if scores is None:
                raise ModelError("tokenizer.ggml.scores is missing; a 'llama' (SPM) vocabulary is merged by its scores")
            for index in np.flatnonzero(types == BYTE).tolist():
                if not _BYTE_NAME.fullmatch(texts[index]):
                    raise ModelError(
                        f"tokenizer.ggml.tokens[{index}] is {show(texts[index])}; a byte token is named <0xNN>"
                    )
            for name, index, wanted in (("bos", 1, CONTROL), ("eos", 2, CONTROL), ("unknown", 0, UNKNOWN)):
                # files written before these keys existed rely on the fixed ids of Llama 2
                if index < len(texts) and types[index] == wanted:
                    special_ids.setdefault(name, index)
        stops = {special_ids[name] for name in _STOP_KEYS if name in special_ids}
        stops |= {ids[text] for text in END_OF_GENERATION_TEXTS | FIM_END_TEXTS if text in ids}
        for text in END_OF_GENERATION_TEXTS | FIM_END_TEXTS | FIM_TEXTS:
            if text in ids:
                types[ids[text]] = CONTROL
        work = sum(len(texts[index]) ** 2 for index in np.flatnonzero(np.isin(types, _SPECIAL)).tolist())
        if work > MAX_SPECIAL_WORK:
            raise ModelError(
                f"tokenizer.ggml.tokens: the squared lengths of the special tokens' texts add up to {work}; "
                f"at most {MAX_SPECIAL_WORK} are accepted"
            )
        return cls(model, texts, types, scores, ids, special_ids, tuple(sorted(stops)))


def text_of(metadata: Mapping[str, object], key: str, default: str | None = None) -> str:
    """A string value; ModelError if it is missing without a default, or no string."""
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{key} is missing: this file carries no tokenizer")
    if not isinstance(value, str):
        raise ModelError(f"{key} must be a string, not {type(value).__name__}")
    return value


def flag_of(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    """A boolean value; ModelError if it is present and no boolean."""
    value = metadata.get(key, default)
    if not isinstance(value, (bool, np.bool_)):
        raise ModelError(f"{key} must be a boolean, not {type(value).__name__}")
    return bool(value)


def _tokens(metadata: Mapping[str, object]) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = metadata.get(key)
    if not isinstance(tokens, (list, tuple)):
        raise ModelError(f"{key} must be an array of strings" if tokens is not None else f"{key} is missing")
    if not 0 < len(tokens) <= MAX_VOCAB:
        raise ModelError(f"{key} has {len(tokens)} entries; between 1 and {MAX_VOCAB} are supported")
    if set(map(type, tokens)) != {str}:
        index = next(i for i, token in enumerate(tokens) if type(token) is not str)
        raise ModelError(f"{key}[{index}] must be a string, not {type(tokens[index]).__name__}")
    if max(map(len, tokens)) > MAX_TOKEN_BYTES // 4:  # no character takes more than four bytes
        for index, token in enumerate(tokens):
            size = len(token.encode(errors="surrogatepass"))
            if size > MAX_TOKEN_BYTES:
                raise ModelError(f"{key}[{index}] is {size} bytes long; at most {MAX_TOKEN_BYTES} are accepted")
    try:
        "".join(tokens).encode()
    except UnicodeEncodeError:
        index = next(i for i, t in enumerate(tokens) if any(0xD800 <= ord(c) <= 0xDFFF for c in t))
        raise ModelError(f"{key}[{index}] is not valid Unicode text") from None
    return list(tokens)


def _numbers(metadata: Mapping[str, object], key: str, count: int, dtype: str, kinds: tuple[type, ...]) -> np.ndarray:
    value = metadata[key]
    wanted = {"float32": "an array of f32", "int32": "an array of i32"}[dtype]
    if isinstance(value, np.ndarray):
        if value.dtype != np.dtype(dtype) or value.ndim != 1:
            raise ModelError(f"{key} must be {wanted}, not of {value.dtype}")
        array = value
    elif isinstance(value, (list, tuple)):
        if not set(map(type, value)) <= set(kinds):
            raise ModelError(f"{key} must be {wanted}")
        try:
            array = np.array(value, dtype=dtype)
        except OverflowError:
            raise ModelError(f"{key} must be {wanted}") from None
    else:
        raise ModelError(f"{key} must be {wanted}, not {type(value).__name__}")
    if len(array) != count:
        raise ModelError(f"{key} has {len(array)} entries for {count} tokens")
    return array


def _types(metadata: Mapping[str, object], count: int) -> np.ndarray:
    key = "tokenizer.ggml.token_type"
    if key not in metadata:
        return np.full(count, NORMAL, dtype=np.uint8)
    types = _numbers(metadata, key, count, "int32", (int, np.int32))
    wrong = np.flatnonzero((types < 0) | (types > BYTE))
    if len(wrong):
        raise ModelError(f"{key}[{wrong[0]}] is {types[wrong[0]]}; token types are 1 to {BYTE}")
    return np.where(types == 0, NORMAL, types).astype(np.uint8)


def _scores(metadata: Mapping[str, object], count: int) -> np.ndarray | None:
    key = "tokenizer.ggml.scores"
    if key not in metadata:
        return None
    scores = _numbers(metadata, key, count, "float32", (float, np.float32))
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ModelError(f"{key}[{wrong[0]}] is {scores[wrong[0]]}; scores must be finite")
    return scores


def _special_ids(metadata: Mapping[str, object], count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in _ID_KEYS:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in metadata:
            continue
        value = metadata[key]
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise ModelError(f"{key} must be an integer, not {type(value).__name__}")
        if not 0 <= int(value) < count:
            raise ModelError(f"{key} is {value}, but the vocabulary has {count} tokens")
        found[name] = int(value)
    return found
