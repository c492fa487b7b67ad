"""What must come of the requests of a chaos run, and whether it did: judged from the outside.

Invariant: the expected answers come from a bare Runtime in this process and the tokenizer's own chat template; nothing
of `workers` or of the broker's client side takes part in the judgement.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from broker.keys import conversation_key
from broker.spec import RequestSpec
from ops.bench.watch import Ear, Story, Violation
from prism_core.runtime import Generation, Limits, Prefill, Runtime
from prism_core.sampling import TemperatureSampler

OWNER = "local"


@dataclass
class Ask:
    """One request and what must come of it."""

    request: str
    spec: RequestSpec
    conversation: str = ""
    expected: list[int] = field(default_factory=list)
    submission: list[Any] = field(default_factory=list)
    """Arguments of its submission, good for another one."""
    cancelled: bool = False
    story: Story | None = None
    error: str = ""


class Oracle:
    """What an uninterrupted run gives: the bare Runtime, in this process, on the same model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._runtime = Runtime(model.decoder(), Limits(model.context_tokens, 8, 1 << 30), retention="lru")
        self._lock = threading.Lock()

    def prompt(self, spec: RequestSpec, past: list[dict[str, Any]], answers: dict[int, list[int]]) -> list[int]:
        if spec.messages is None:
            return list(self.model.tokenizer.encode(spec.prompt))
        return list(self.model.chat.encode_turn([*past, *spec.messages], answers=answers).token_ids)

    def answer(self, spec: RequestSpec, prompt: list[int]) -> list[int]:
        sampler = None
        if spec.temperature:
            sampler = TemperatureSampler(
                seed=spec.seed or 0, temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p,
                frequency_penalty=spec.frequency_penalty,
            )  # fmt: skip
        ids: list[int] = []
        with self._lock:
            self._runtime.generate(
                prompt,
                Generation(spec.max_tokens or 1, stop_tokens=self.model.tokenizer.stop_tokens),
                prefill=Prefill(128),
                sampler=sampler,
                emit=ids.append,
            )
        return ids


class Verdict:
    """Checks every request and conversation of a run; `violate` is told of each broken promise."""

    def __init__(
        self, client: Any, oracle: Oracle, ear: Ear, violate: Callable[[str], None], *, broker_died: bool
    ) -> None:
        """`broker_died`: the broker was killed in the run, so the last moments of its file may have been lost."""
        self._raw, self._oracle, self._ear, self._violate = client, oracle, ear, violate
        self.stories: list[Story] = []
        self.heard = 0
        self.broker_died = broker_died
        self.made_again = 0

    def judge(self, asks: list[Ask]) -> None:
        conversations: dict[str, list[Ask]] = {}
        for ask in asks:
            if ask.conversation:
                conversations.setdefault(ask.conversation, []).append(ask)
            else:
                self._guard(self._check, ask, [], {})
        for name, turns in conversations.items():
            self._guard(self._check_conversation, name, turns)
        self._check_pool()

    def _guard(self, check: Callable[..., object], *what: Any) -> None:
        try:
            check(*what)
        except Violation as error:
            self._violate(str(error))

    def _check(self, ask: Ask, past: list[dict[str, Any]], answers: dict[int, list[int]]) -> Story:
        if ask.story is None:
            raise Violation(f"request {ask.request}: {ask.error or 'its reader never came back'}")
        story, record = ask.story, self._raw.hgetall(f"prism:r:{ask.request}")
        self.stories.append(story)
        entries = {entry: fields[b"d"] for entry, fields in self._raw.xrange(f"prism:r:{ask.request}:log")}
        if story.readings > 1 or list(entries.items()) != story.entries:
            self._check_made_again(ask, story, entries)
        else:
            self.heard += self._ear.check(ask.request, entries)
        expected = self._oracle.answer(ask.spec, self._oracle.prompt(ask.spec, past, answers))
        if ask.cancelled and story.state == "cancelled":
            _hold(ask, story.ids == expected[: len(story.ids)], "a cancelled turn's ids differ from the bare Runtime's")
        else:
            _hold(ask, story.state == "done", f"ended as {story.state}: {story.end}")
            _hold(ask, story.ids == expected, _difference(story.ids, expected))
            _hold(ask, story.text == self._oracle.model.tokenizer.decode(expected), "the text is not that of the ids")
        _hold(ask, record[b"state"].decode() == story.state, "the record's state is not the end event's")
        status = self._raw.hget(f"prism:rq:job:{ask.request}", "status")
        want = b"finished" if story.state == "done" else b"canceled"
        _hold(ask, status == want, f"RQ says {status!r}, not {want!r}")
        _hold(ask, not self._raw.exists(f"prism:rq:executions:{ask.request}"), "RQ still shows an execution")
        return story

    def _check_made_again(self, ask: Ask, story: Story, entries: dict[bytes, bytes]) -> None:
        """The log is not the one that was read: a killed broker lost the last moments of its file (see `watch`), and
        they were made again. Then it must be the same turn, told to its one end."""
        again = Story(ask.request)
        for entry, payload in entries.items():
            again.take(entry, payload)
        same = (again.ids, again.text, again.state) == (story.ids, story.text, story.state)
        _hold(ask, self.broker_died and same, "the log changed after its end was read")
        self.made_again += 1

    def _check_conversation(self, name: str, asks: list[Ask]) -> None:
        past: list[dict[str, Any]] = []
        answers: dict[int, list[int]] = {}
        before = 0
        for ask in asks:
            story = self._check(ask, past, answers)
            record = self._raw.hgetall(f"prism:r:{ask.request}")
            _hold(ask, int(record[b"taken"]) >= before, "its last take came before the turn ahead had ended")
            before = int(record[b"ended"])
            past += [*(ask.spec.messages or []), {"role": "assistant", "content": story.text}]
            answers[len(past) - 1] = story.ids
        turns = self._raw.llen(f"prism:c:{conversation_key(OWNER, name)}:hist")
        _hold(asks[0], turns == len(asks), f"the transcript of {name} has {turns} turns of {len(asks)}")

    def _check_pool(self) -> None:
        for pattern in ("prism:rq:queue:*", "prism:c:*:box", "prism:c:*:act", "prism:rq:wip:*"):
            for key in self._raw.scan_iter(pattern):
                self._violate(f"{key.decode()} was left behind")
        boot = self._raw.get("prism:boot")
        if not boot:
            self._violate("the boot id is gone")


def _hold(ask: Ask, holds: bool, what: str) -> None:
    if not holds:
        raise Violation(f"request {ask.request}: {what}")


def _difference(seen: list[int], expected: list[int]) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b), min(len(seen), len(expected))
    )
    return (
        f"ids differ from the bare Runtime's at {at}: {seen[at : at + 3]} of {len(seen)}, not {expected[at : at + 3]}"
    )
