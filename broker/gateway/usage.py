"""Token counts and timings of an end event, in the forms of OpenAI's objects.

Kept: `completion_tokens` is the pool's own count. Not promised: `reasoning_tokens` is an estimate, the share of the
text that is reasoning: the gateway has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PHASES", "chat_usage", "completion_usage", "estimated_share", "response_usage", "timings_ms"]

Usage = Mapping[str, int]

PHASES = ("queue", "prefix", "prefill", "decode", "sampling", "flush", "snapshot")
"""Where a turn's time goes, in order, by the names of the usage fields less `_us`."""


def estimated_share(tokens: int, part_chars: int, all_chars: int) -> int:
    """Of `tokens`, those that made `part_chars` of `all_chars` characters, about."""
    return round(tokens * part_chars / all_chars) if all_chars else 0


def chat_usage(usages: Sequence[Usage], reasoning_tokens: int) -> dict[str, Any]:
    """Of one request with one or more answers to the same prompt: the prompt counts once."""
    prompt = max((usage.get("prompt_tokens", 0) for usage in usages), default=0)
    return _chat(prompt, usages, reasoning_tokens)


def completion_usage(groups: Sequence[Sequence[Usage]]) -> dict[str, Any]:
    """Of one request with several prompts, each with its answers."""
    prompt = sum(max((usage.get("prompt_tokens", 0) for usage in group), default=0) for group in groups)
    return _chat(prompt, [usage for group in groups for usage in group], 0)


def _chat(prompt: int, usages: Sequence[Usage], reasoning_tokens: int) -> dict[str, Any]:
    made = sum(usage.get("completion_tokens", 0) for usage in usages)
    reused = min(prompt, max((usage.get("reused_tokens", 0) for usage in usages), default=0))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": reused},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def response_usage(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """In the Responses API's names."""
    prompt, made = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": min(prompt, usage.get("reused_tokens", 0)), "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt + made,
    }


def timings_ms(usage: Usage) -> dict[str, float]:
    """Milliseconds by phase, as far as the worker reported them."""
    return {phase: usage[f"{phase}_us"] / 1000 for phase in PHASES if f"{phase}_us" in usage}
