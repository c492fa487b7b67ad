"""Tokenizer metadata for synthetic models: a byte-level BPE and a score-merging SPM vocabulary of any size.

Both cover every byte, every merge's parts and result are tokens, and no token appears twice, so a tokenizer built from
them encodes any text and gives it back.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from .container import Typed

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
BPE_CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
SPM_CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + m['role'] + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
_LETTERS = "etaoinshrdlcumwfgypbvk"
_LONGEST_PART = 6


def byte_alphabet() -> list[str]:
    """The character that stands for each of the 256 bytes in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    other = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(other)}
    return [table[byte] for byte in range(256)]


def _grow(start: list[str], pieces: list[str], count: int, seed: int) -> tuple[list[str], list[tuple[str, str]]]:
    """`count` new tokens, each the join of two known ones, and the pairs they come from, in merge order."""
    draw = random.Random(seed)
    known = set(start)
    made: list[str] = []
    pairs: list[tuple[str, str]] = []
    pool = list(pieces)
    while len(made) < count:
        left, right = draw.choice(pool), draw.choice(pool)
        joined = left + right
        if joined in known:
            continue
        known.add(joined)
        made.append(joined)
        pairs.append((left, right))
        if len(joined) <= _LONGEST_PART:
            pool.append(joined)
    return made, pairs


def bpe(vocab: int, *, pre: str = "qwen2", seed: int = 0, chat_template: str | None = CHATML) -> dict[str, Any]:
    """Keys of a gpt2-style tokenizer with `vocab` tokens, the last three of them control tokens."""
    alphabet = sorted(byte_alphabet())
    room = vocab - len(alphabet) - len(BPE_CONTROLS)
    if room < 0:
        raise ValueError(f"a BPE vocabulary has at least {len(alphabet) + len(BPE_CONTROLS)} tokens, not {vocab}")
    made, pairs = _grow(alphabet, [*_LETTERS, "Ġ"], room, seed)
    tokens = [*alphabet, *made, *BPE_CONTROLS]
    kinds = [NORMAL] * (vocab - len(BPE_CONTROLS)) + [CONTROL] * len(BPE_CONTROLS)
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": Typed("string", tokens),
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": Typed("string", [f"{left} {right}" for left, right in pairs]),
        "tokenizer.ggml.bos_token_id": vocab - 3,
        "tokenizer.ggml.eos_token_id": vocab - 1,
        "tokenizer.ggml.padding_token_id": vocab - 3,
        "tokenizer.ggml.add_bos_token": False,
    }
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    return keys


def spm(vocab: int, *, seed: int = 0, chat_template: str | None = TURNS) -> dict[str, Any]:
    """Keys of a llama-style (SPM) tokenizer with `vocab` tokens: controls, bytes, merged pieces, single characters."""
    singles = [*(chr(byte) for byte in range(33, 127)), "▁", "\n", "\t"]
    head = [*SPM_CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256))]
    room = vocab - len(head) - len(singles)
    if room < 0:
        raise ValueError(f"an SPM vocabulary has at least {len(head) + len(singles)} tokens, not {vocab}")
    made, _ = _grow([*head, *singles], [*_LETTERS, "▁"], room, seed)
    scores = [-1000.0] * len(head) + [-float(n) for n in range(room)] + [-1e4] * len(singles)
    kinds = [UNKNOWN if token == "<unk>" else CONTROL for token in SPM_CONTROLS] + [BYTE] * 256
    keys: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": Typed("string", [*head, *made, *singles]),
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(kinds + [NORMAL] * (vocab - len(kinds)), dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
    if chat_template is not None:
        keys["tokenizer.chat_template"] = chat_template
    return keys
