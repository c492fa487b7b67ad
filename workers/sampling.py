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


def sampler_for(spec: RequestSpec, emitted: Sequence[int]) -> TurnSampler | None:
    """The spec's sampler, standing after `emitted`; None: the Runtime's own greedy, which has the best token at hand.

    `InvalidRequest` names a parameter out of the sampler's range.
    """
    plain = spec.repetition_penalty == 1.0 and spec.presence_penalty == 0.0 and spec.frequency_penalty == 0.0
    if spec.temperature == 0.0 and plain:
        return None if spec.logprobs is None else TurnSampler(Greedy(), spec.logprobs)
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
    return TurnSampler(sampler, spec.logprobs)


class TurnSampler:
    """Wraps a turn's sampler to remember what it drew from.

    With `alternatives`, `last` holds natural log-probabilities of the unmodified logits for the last draw:
    `{"lp": float, "top": [[id, lp], ...]}` with so many of the best ids, best first, ties by lower id.
    """

    def __init__(self, inner: Sampler, alternatives: int | None = None) -> None:
        self.inner = inner
        self._alternatives = alternatives
        self.last: dict[str, Any] | None = None

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        token = int(self.inner.sample(logits))
        if self._alternatives is not None:
            self.last = _logprobs(logits, token, self._alternatives)
        return token

    def copy(self) -> Any:
        return self.inner.copy()

    def restore(self, copy: Any) -> None:
        give_back(self.inner, copy)
        self.last = None


def _logprobs(logits: npt.NDArray[np.float32], token: int, alternatives: int) -> dict[str, Any]:
    wide = logits.astype(np.float64)
    wide -= wide.max()
    wide -= np.log(np.exp(wide).sum())
    top: list[list[Any]] = []
    if alternatives:
        count = min(alternatives, len(wide))
        floor = np.partition(wide, len(wide) - count)[len(wide) - count]
        best = np.flatnonzero(wide >= floor)
        best = best[np.lexsort((best, -wide[best]))][:count]
        top = [[int(index), float(wide[index])] for index in best]
    return {"lp": float(wide[token]) if 0 <= token < len(wide) else 0.0, "top": top}
