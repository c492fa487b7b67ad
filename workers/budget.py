"""The memory of one worker: weights, live KV cache and saved prefixes, planned before the first turn.

Invariant: the plan's parts add up to no more than the budget, and the saved prefixes' part can hold two snapshots of a
full context (the rollback and one completed prefix), so no conversation grows into a length at which every request
fails. A budget that cannot is refused with the context that would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prism_core.errors import InvalidRequest
from prism_core.runtime import SNAPSHOT_OVERHEAD_BYTES, Limits

SLACK_BYTES = 8 << 20
MIN_CONTEXT_TOKENS = 32


@dataclass(frozen=True)
class Plan:
    """Bytes by use, and the Runtime's limits that keep to them."""

    context_tokens: int
    weight_bytes: int
    kv_bytes: int
    prefix_bytes: int
    limits: Limits

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.prefix_bytes

    def stats(self) -> dict[str, int]:
        """For `prism top` and the metrics."""
        return {
            "memory_bytes": self.memory_bytes,
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "prefix_bytes": self.prefix_bytes,
            "context_tokens": self.context_tokens,
        }


def plan(model: Any, decoder: Any, *, memory_bytes: int | None, saved_prefixes: int) -> Plan:
    """The plan for `model` within `memory_bytes` (None: two snapshots of a full context and some slack).

    Raises `InvalidRequest` naming the need, the budget and a context that fits.
    """
    context = int(model.context_tokens)
    weights, live, prefixes = _parts(model, decoder, context)
    if memory_bytes is not None:
        if weights + live + prefixes > memory_bytes:
            raise InvalidRequest(_refusal(model, decoder, weights + live + prefixes, memory_bytes))
        prefixes = memory_bytes - weights - live
    limits = Limits(context, saved_prefixes, prefixes)
    return Plan(context_tokens=context, weight_bytes=weights, kv_bytes=live, prefix_bytes=prefixes, limits=limits)


def _parts(model: Any, decoder: Any, context: int) -> tuple[int, int, int]:
    """(weights, live state and scratch, least for saved prefixes) at a context, in bytes."""
    memory = model.memory(context)
    snapshot = int(decoder.checkpoint_bytes_at(context)) + 4 * (context + int(model.vocab_size))
    snapshot += SNAPSHOT_OVERHEAD_BYTES
    return int(memory["weights"]), int(memory["total"] - memory["weights"]), 2 * snapshot + SLACK_BYTES


def _refusal(model: Any, decoder: Any, need: int, budget: int) -> str:
    fits, low, high = 0, MIN_CONTEXT_TOKENS, int(model.context_tokens)
    while low <= high:
        middle = (low + high) // 2
        if sum(_parts(model, decoder, middle)) <= budget:
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    advice = f"a context of {fits} tokens fits" if fits else "not even a short context fits"
    return (
        f"memory_bytes: weights and a context of {model.context_tokens} tokens need {need} bytes, "
        f"the budget is {budget}: {advice}"
    )
