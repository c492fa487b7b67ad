"""The one configuration record of a worker and its supervisor, checked when it is made.

What is not here: the limits of one request (broker.spec) and the timing of leases (broker.keys), which all processes
of a pool must share.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from prism_core.errors import InvalidRequest
from prism_core.limits import MAX_CONTEXT_TOKENS

MIN_CONTEXT_TOKENS = 8
MAX_THREADS = 256
MAX_WORKERS = 256
MIN_MEMORY_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Everything that one worker process needs to know. Picklable, and JSON-able through `to_dict`."""

    model: str
    """Path of the GGUF file; names are resolved before a worker is started."""
    redis_url: str
    """The broker: `redis://`, `rediss://` or `unix://`."""
    threads: int = 1
    """Kernel threads of this worker's Runtime, 1..256."""
    context_tokens: int | None = None
    """Longest prompt + answer, 8..262,144 tokens; None is the file's own context, up to 4096."""
    memory_bytes: int | None = None
    """Budget for weights, KV cache and saved prefixes together; None means no limit beyond the saved prefixes' own."""
    saved_prefixes: int = 64
    """How many prefixes (conversations, system prompts) this worker may keep ready, 1..64."""
    prefill_block_tokens: int = 128
    """Prompt tokens per prefill call, 1..512; a call lasts 250 ms at most whatever this says."""
    grace_s: float = 30.0
    """Seconds that a draining worker gives a running turn before it hands it back."""
    buffer_events: int = 4096
    """Events of one turn kept for an absent broker before the decoder waits."""
    buffer_s: float = 30.0
    """Seconds without a broker before the decoder waits."""

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidRequest("model: a path is needed, got an empty string")
        if not self.redis_url:
            raise InvalidRequest("redis_url: a URL is needed, got an empty string")
        _whole("threads", self.threads, 1, MAX_THREADS)
        if self.context_tokens is not None:
            _whole("context_tokens", self.context_tokens, MIN_CONTEXT_TOKENS, MAX_CONTEXT_TOKENS)
        if self.memory_bytes is not None:
            _whole("memory_bytes", self.memory_bytes, MIN_MEMORY_BYTES, 1 << 50)
        _whole("saved_prefixes", self.saved_prefixes, 1, 64)
        _whole("prefill_block_tokens", self.prefill_block_tokens, 1, 512)
        _whole("buffer_events", self.buffer_events, 1, 1_000_000)
        _seconds("grace_s", self.grace_s)
        _seconds("buffer_s", self.buffer_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for the pipe to a worker process."""
        return dataclasses.asdict(self)


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(f"{name}: must be a whole number in {low}..{high}, got {value!r}")


def _seconds(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 86_400:
        raise InvalidRequest(f"{name}: must be 0..86400 seconds, got {value!r}")
