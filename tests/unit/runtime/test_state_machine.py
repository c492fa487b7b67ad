"""Random requests, edits, faults, cancellations, deadlines, resets and budgets, against the plain model of the page."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prism_core import Generation, Limits, PrismError, RestoreFailed

from .fixture import DEADLINE, VOCAB, Bench, Trace, raising
from .model import Answer, Asked, Fault, Model, snapshot_size
from .test_prefixes import saved

CONTEXT = 24
TOKENS = st.integers(0, 2)  # few different ones, so that prompts meet prefixes
LIMITS = st.tuples(
    st.sampled_from([CONTEXT, CONTEXT, CONTEXT, 12, 3]),
    st.sampled_from([4, 3, 2, 1, 0]),
    st.sampled_from([4000, 1200, 900, 700, 500, 392, 300, 208, 128, 80, 79]),
    st.booleans(),
)
FAULTS = st.lists(
    st.builds(Fault, st.integers(0, 16), st.sampled_from(["expire", "cancel", "Error", "Interrupt"])),
    max_size=2,
)


class Error(Exception):
    """A fault of the decoder, the sampler or emit."""


class Interrupt(BaseException):
    """A signal's exception."""


class RuntimeMachine(RuleBasedStateMachine):
    """Each rule does the same to the Runtime and to the model; everything visible must agree."""

    @initialize(limits=LIMITS)
    def build(self, limits):
        context, checkpoints, budget, lru = limits
        self.bench = Bench(Limits(context, checkpoints, budget), retention="lru" if lru else "fifo")
        self.model = Model(context, checkpoints, budget, lru)

    @rule(
        what=st.sampled_from(["too late", "too late", "reset", "broken reset", "rebuild"]),
        limits=LIMITS,
        tail=st.lists(TOKENS, max_size=3),
        already=st.sampled_from(["cancel", "expire"]),
    )
    def interfere(self, what, limits, tail, already):
        if what == "too late":
            self.compare(Asked(self.prompt("history", 0, tail)), already=already)
        elif what == "rebuild":
            self.build(limits)
        else:
            self.reset(what == "broken reset")

    def reset(self, fails):
        self.bench.trace.clear()
        self.bench.decoder.reset_error = Error() if fails else None
        try:
            self.bench.runtime.reset()
            assert not fails
        except Error:
            assert fails
        self.bench.decoder.reset_error = None
        self.model.reset(fails)

    @rule(
        start=st.sampled_from(["history", "edit", "saved", "saved", "new"]),
        keep=st.integers(0, 8),
        tail=st.lists(TOKENS, min_size=1, max_size=4),
        max_tokens=st.sampled_from([1, 1, 2, 3, 6]),
        stop=st.sampled_from([(), (), (0,), (1, 5)]),
        block=st.sampled_from([1, 2, 3, 512]),
        stop_after=st.sampled_from([None, None, 1, 2]),
        save=st.sampled_from([(), (), (1,), (2, 4), (1, 2, 3)]),
        keep_saved=st.booleans(),
    )
    def ask(self, start, keep, tail, max_tokens, stop, block, stop_after, save, keep_saved):
        prompt = self.prompt(start, keep, tail)
        self.compare(self.asked(prompt, max_tokens, stop, block, stop_after, save, keep_saved))

    @precondition(lambda self: self.stuck)
    @rule()
    def revive(self):
        self.reset(fails=False)

    @property
    def stuck(self):
        """Whether every request is refused."""
        return self.model.latched or snapshot_size(self.model.history, True) > self.model.budget

    @precondition(lambda self: not self.stuck)
    @rule(
        start=st.sampled_from(["history", "edit", "saved", "new"]),
        keep=st.integers(0, 8),
        tail=st.lists(TOKENS, min_size=1, max_size=4),
        max_tokens=st.integers(1, 3),
        block=st.sampled_from([1, 2, 512]),
        save=st.sampled_from([(), (1,), (1, 2, 3)]),
        keep_saved=st.booleans(),
        faults=FAULTS,
        restore_fails=st.sampled_from([False, False, False, True]),
    )
    def ask_with_faults(self, start, keep, tail, max_tokens, block, save, keep_saved, faults, restore_fails):
        asked = self.asked(self.prompt(start, keep, tail), max_tokens, (), block, None, save, keep_saved)
        at_once = {fault.at: fault for fault in faults}
        self.compare(asked, faults=tuple(at_once.values()), restore_fails=restore_fails)

    def prompt(self, start, keep, tail):
        """One that continues the history, or a saved prefix, or the start of the history, or nothing."""
        if len(self.model.history) + len(tail) >= self.model.context and start == "history":
            start = "edit"
        known = {
            "history": self.model.history,
            "edit": self.model.history[:keep],
            "saved": self.model.saved[keep % len(self.model.saved)].tokens if self.model.saved else (),
            "new": (),
        }[start]
        return (*known, *tail)[: self.model.context + 1]

    def asked(self, prompt, max_tokens, stop, block, stop_after, save, keep_saved):
        positions = tuple(position for position in save if position < len(prompt))
        return Asked(prompt, max_tokens, frozenset(stop), block, positions, keep_saved, stop_after)

    def compare(self, asked: Asked, **faults) -> None:
        asked = Asked(**{**asked.__dict__, **faults})
        before = self.model.history
        expected = self.model.ask(asked)
        answer = self.ask_the_runtime(asked, before)
        assert (answer.outcome, answer.operations) == (expected.outcome, expected.operations)
        assert not without_a_check(self.bench.trace.entries, failed=isinstance(expected.outcome, str))
        if isinstance(expected.outcome, tuple):
            assert answer.draws == expected.draws
            generated = expected.outcome[2]
            assert self.bench.emitted == list(self.model.history[len(self.model.history) - generated :])
        else:
            assert answer.draws == 0

    def ask_the_runtime(self, asked: Asked, history: tuple[int, ...]) -> Answer:
        bench = self.bench
        bench.emitted.clear()
        bench.decoder.restore_errors = {history: Error()} if asked.restore_fails else {}
        self.plan(bench.trace, asked)
        asked_before = bench.sampler.asked
        causes: list[type] = []
        arguments = {} if asked.stop_after is None else {"stop_when": lambda: len(bench.emitted) == asked.stop_after}
        try:
            done = bench.ask(
                asked.prompt,
                Generation(asked.max_tokens, asked.stop),
                block=asked.block,
                save_at=asked.save_at,
                keep_saved=asked.keep_saved,
                **arguments,
            )
            outcome = (done.prompt_tokens, done.reused_tokens, done.generated_tokens, str(done.finish))
        except RestoreFailed as failed:
            outcome = f"{type(failed.original).__name__}, {type(failed).__name__}"
            causes.append(type(failed.__cause__))
        except (PrismError, Error, Interrupt) as error:
            outcome = type(error).__name__
        assert causes in ([], [Error])
        bench.decoder.restore_errors = {}
        return Answer(outcome, bench.trace.operations, bench.sampler.asked - asked_before)

    @staticmethod
    def plan(trace: Trace, asked: Asked) -> None:
        trace.clear()
        disturb = {"expire": trace.expire, "cancel": trace.cancellation.cancel}
        if asked.already:
            disturb[asked.already]()
        for fault in asked.faults:
            if fault.kind in disturb:
                trace.after[fault.at] = disturb[fault.kind]
            else:
                trace.instead[fault.at] = raising(Error() if fault.kind == "Error" else Interrupt())

    @invariant()
    def everything_visible_agrees(self):
        if not hasattr(self, "bench"):
            return
        runtime, model = self.bench.runtime, self.model
        assert runtime.tokens == model.history
        assert runtime.is_faulted == model.latched
        assert runtime.checkpoint_count == len(model.saved) <= model.checkpoints
        assert saved(self.bench) == [list(one.tokens) for one in model.saved]
        assert self.bench.sampler.asked == model.draws
        assert sum(one.size for one in model.saved) <= model.budget
        if not model.latched:
            assert self.bench.decoder.state == list(model.history)


def without_a_check(entries: list[str], *, failed: bool) -> list[tuple[str, str]]:
    """Operations with no check between them: none but the tokens of a block, and a failed request's last restore."""
    if failed and entries[-1:] == ["S"]:
        entries = entries[:-1]
    return [(a, b) for a, b in pairwise(entries) if "." not in (a, b) and (a[0], b[0]) != ("I", "I")]


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        RuntimeMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_runtime_agrees_with_the_plain_model_of_its_contract():
    assert (DEADLINE, VOCAB) == (100.0, 8)
    run(500, 50)


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_runtime_agrees_with_the_plain_model_for_longer():
    run(5000, 100)
