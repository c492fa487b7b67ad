"""How a text is cut into pieces before byte-pair merging, by the file's `tokenizer.ggml.pre`.

Each entry is a list of regular expressions applied one after the other: every expression splits the pieces that the
previous one left, and what lies between two matches stays a piece of its own. Merges never cross a piece.
An unknown name gets the `default` rules (and is reported as unknown by `Tokenizer.describe`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CONTRACTIONS: Final = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2: Final = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
_QWEN35: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_LLAMA3: Final = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`patterns` in order; `whole_pieces`: a piece that is a token is taken as it is; `add_bos`: default of the key."""

    name: str
    patterns: tuple[str, ...]
    whole_pieces: bool = False
    add_bos: bool = False


_FAMILIES: Final = {
    PreTokenizer("qwen2", (_QWEN2,)): "qwen2 deepseek-r1-qwen stablelm2 megrez",
    PreTokenizer("qwen35", (_QWEN35,)): "qwen35",
    PreTokenizer("llama-bpe", (_LLAMA3,), whole_pieces=True, add_bos=True): (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2"
    ),
    PreTokenizer("dbrx", (_LLAMA3,)): "dbrx smaug-bpe",
    PreTokenizer("smollm", (r"\p{N}", _GPT2)): "smollm starcoder refact command-r codeshell exaone minerva-7b",
    PreTokenizer("gpt-2", (_GPT2,)): "gpt-2 mpt olmo jais trillion phi-2",
    PreTokenizer("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): "default",
}
PRE_TOKENIZERS: Final = {alias: family for family, aliases in _FAMILIES.items() for alias in aliases.split()}
