"""The engine of Prism: the transactional Runtime, GGUF models and their Numba kernels.

Names are imported on first use, so that a client or a gateway, which needs only errors and the codec,
never pays for (or even imports) numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "prism_core.errors": (
        "PrismError InvalidRequest Cancelled DeadlineExceeded RuntimeFaulted RestoreFailed DecoderError SamplerError "
        "BudgetExceeded ModelError"
    ),
    "prism_core.runtime": (
        "Runtime Limits Generation Prefill Finish Completion Cancellation Timings MAX_CONTEXT_TOKENS MAX_CHECKPOINTS "
        "MAX_VOCAB MAX_STOP_TOKENS MAX_PREFILL_BLOCK_TOKENS SNAPSHOT_OVERHEAD_BYTES"
    ),
    "prism_core.decoder": "Decoder DecoderBase",
    "prism_core.sampling": "Sampler Greedy greedy TemperatureSampler",
    "prism_core.model": "Model open_model",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'prism_core' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
