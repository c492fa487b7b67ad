"""The sampler of one turn: greedy or seeded, resumed after a takeover, with log-probabilities when they are asked for.

Invariant: a sampler made for the ids emitted so far draws what an uninterrupted one would draw next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from broker.spec import RequestSpec
from prism_core.sampling import Greedy, Sampler, TemperatureSampler, give_back


def sampler_for(spec: RequestSpec, emitted: Sequence[int]) -> Sampler:
    """The spec's sampler, standing after `emitted`. `InvalidRequest` names a parameter out of the sampler's range."""
    plain = spec.repetition_penalty == 1.0 and spec.presence_penalty == 0.0 and spec.frequency_penalty == 0.0
    if spec.temperature == 0.0 and plain:
        return Greedy()
    sampler = TemperatureSampler(
        seed=spec.seed or 0,
        temperature=spec.temperature,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
    )
    sampler.resume(emitted)
    return sampler


class LogprobSampler:
    """Wraps a sampler and keeps, for the last draw, natural log-probabilities of the unmodified logits.

    `last` is `{"lp": float, "top": [[id, lp], ...]}` with the `alternatives` best ids, best first, ties by lower id.
    """

    def __init__(self, inner: Any, alternatives: int) -> None:
        self.inner = inner
        self.alternatives = alternatives
        self.last: dict[str, Any] = {}

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        token = int(self.inner.sample(logits))
        wide = logits.astype(np.float64)
        wide -= wide.max()
        wide -= np.log(np.exp(wide).sum())
        top: list[list[Any]] = []
        if self.alternatives:
            count = min(self.alternatives, len(wide))
            floor = np.partition(wide, len(wide) - count)[len(wide) - count]
            best = np.flatnonzero(wide >= floor)
            best = best[np.lexsort((best, -wide[best]))][:count]
            top = [[int(index), float(wide[index])] for index in best]
        self.last = {"lp": float(wide[token]) if 0 <= token < len(wide) else 0.0, "top": top}
        return token

    def copy(self) -> LogprobSampler:
        return LogprobSampler(self.inner.copy(), self.alternatives)

    def restore(self, copy: LogprobSampler) -> None:
        give_back(self.inner, copy.inner)
        self.last = {}
