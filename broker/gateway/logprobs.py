"""Log-probabilities of a delta in OpenAI's forms. Tokens are named by their bytes, read as UTF-8 with replacements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["chat_logprobs", "completion_logprobs"]

Entry = dict[str, Any]
"""One token of a delta: `lp`, `b` (its bytes), `top`: [[id, lp, bytes], ...]."""


def chat_logprobs(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """For chat and responses."""
    return [
        {**_named(entry["b"], entry["lp"]), "top_logprobs": [_named(raw, lp) for _, lp, raw in entry["top"]]}
        for entry in entries
    ]


def completion_logprobs(entries: Sequence[Entry], offset: int) -> dict[str, Any]:
    """For the older completions; `offset` is the number of characters before the first token."""
    tokens = [_text(entry["b"]) for entry in entries]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [entry["lp"] for entry in entries],
        "top_logprobs": [{_text(raw): lp for _, lp, raw in entry["top"]} for entry in entries],
        "text_offset": offsets,
    }


def _named(raw: bytes, lp: float) -> dict[str, Any]:
    return {"token": _text(raw), "logprob": lp, "bytes": list(raw)}


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
