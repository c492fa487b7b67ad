"""Vocabularies for the tests: real ones read from files, small ones made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from prism_core.gguf import open_gguf
from prism_core.tokenizer.vocabulary import BYTE_TO_CHAR

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def metadata_of(path: Path) -> dict[str, object]:
    file = open_gguf(path)
    try:
        return dict(file.metadata)
    finally:
        file.close()


def bpe_metadata(
    *,
    pre: str = "qwen2",
    words: tuple[str, ...] = ("hello", "world", "the", "answer", " the", " hello", "user", "assistant", "system"),
    control: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    user_defined: tuple[str, ...] = ("<think>", "</think>", "<tool_call>"),
    **more: object,
) -> dict[str, object]:
    """All 256 bytes, the words with the merges that build them left to right, then the special tokens."""
    tokens = list(BYTE_TO_CHAR)
    merges: list[str] = []
    for word in words:
        symbols = [BYTE_TO_CHAR[byte] for byte in word.encode()]
        built = symbols[0]
        for symbol in symbols[1:]:
            if built + symbol not in tokens:
                tokens.append(built + symbol)
                merges.append(f"{built} {symbol}")
            built += symbol
    types = [NORMAL] * len(tokens) + [CONTROL] * len(control) + [USER_DEFINED] * len(user_defined)
    tokens += [*control, *user_defined]
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.merges": tuple(merges),
    }
    if control:
        metadata["tokenizer.ggml.eos_token_id"] = tokens.index(control[-1])
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def spm_metadata(
    pieces: dict[str, float],
    *,
    user_defined: tuple[str, ...] = (),
    control: tuple[str, ...] = ("<unk>", "<s>", "</s>"),
    **more: object,
) -> dict[str, object]:
    """The layout of Llama 2: three special tokens, 256 byte tokens, then `pieces` with their scores."""
    tokens = list(control) + [f"<0x{byte:02X}>" for byte in range(256)] + list(pieces) + list(user_defined)
    types = (
        [UNKNOWN if token == "<unk>" else CONTROL for token in control]
        + [BYTE] * 256
        + [NORMAL] * len(pieces)
        + [USER_DEFINED] * len(user_defined)
    )
    scores = [0.0] * (len(control) + 256) + list(pieces.values()) + [0.0] * len(user_defined)
    metadata: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tuple(tokens),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
    }
    return metadata | {f"tokenizer.ggml.{key}": value for key, value in more.items()}
