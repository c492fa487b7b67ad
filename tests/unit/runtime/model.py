"""The contract page as a plain model: lists and ifs, no buffers, nothing shared with the Runtime but the page."""

from __future__ import annotations

from dataclasses import dataclass, field

from .fixture import VOCAB

OVERHEAD = 80


class Failure(Exception):
    """A request ends with the error of this name; `interrupt` if it is no Exception."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.interrupt = name == "Interrupt"


@dataclass(frozen=True)
class Saved:
    tokens: tuple[int, ...]
    logits: bool

    @property
    def size(self) -> int:
        return snapshot_size(self.tokens, self.logits)


def snapshot_size(tokens: tuple[int, ...], logits: bool) -> int:
    return 4 * (len(tokens) + (VOCAB if logits else 0)) + 4 * len(tokens) + OVERHEAD


@dataclass(frozen=True)
class Fault:
    """What happens at operation `at`: "expire" or "cancel" when it has completed, "Error" or "Interrupt" half-way."""

    at: int
    kind: str


@dataclass(frozen=True)
class Asked:
    prompt: tuple[int, ...]
    max_tokens: int = 1
    stop: frozenset[int] = frozenset()
    block: int = 1
    save_at: tuple[int, ...] = ()
    keep_saved: bool = False
    stop_after: int | None = None  # what `stop_when` says: after so many emits
    already: str | None = None  # "cancel" or "expire": before the request starts
    faults: tuple[Fault, ...] = ()
    restore_fails: bool = False


@dataclass
class Answer:
    outcome: object  # (prompt, reused, generated, finish) or an error's name
    operations: list[str] = field(default_factory=list)
    draws: int = 0


class Model:
    """The state that the page speaks of."""

    def __init__(self, context: int, checkpoints: int, budget: int, lru: bool) -> None:
        self.context, self.checkpoints, self.budget, self.lru = context, checkpoints, budget, lru
        self.history: tuple[int, ...] = ()
        self.saved: list[Saved] = []  # the oldest first
        self.latched = False
        self.draws = 0

    def reset(self, fails: bool) -> None:
        self.latched = True
        if not fails:
            self.history, self.saved, self.latched = (), [], False

    def ask(self, asked: Asked) -> Answer:
        if self.latched:
            return Answer("RuntimeFaulted")
        if asked.already:
            return Answer({"cancel": "Cancelled", "expire": "DeadlineExceeded"}[asked.already])
        if not asked.prompt or len(asked.prompt) + asked.max_tokens > self.context:
            return Answer("InvalidRequest")
        run = Run(self, asked)
        if not self.make_room(snapshot_size(self.history, bool(self.history)), 0):
            return Answer("BudgetExceeded")
        try:
            run.operation("C")
        except Failure as failure:
            return Answer(failure.name)
        try:
            outcome = run.generate()
        except Failure as failure:
            return Answer(self.recover(run, failure), run.operations)
        self.history = run.state
        replaced = [s for s in run.reused if run.completed and len(s.tokens) < len(run.state)]
        if asked.keep_saved:
            replaced = [s for s in replaced if len(s.tokens) not in asked.save_at]
        self.saved = [saved for saved in self.saved if not any(saved is other for other in replaced)]
        for saved in run.held:
            if len(self.saved) == self.checkpoints:
                self.saved.pop(0)
            self.saved.append(saved)
        self.draws += run.draws
        return Answer(outcome, run.operations, run.draws)

    def recover(self, run: Run, failure: Failure) -> str:
        """What the caller gets to see."""
        try:
            run.operation("S")
            if run.asked.restore_fails:
                run.operations.pop()
                raise Failure("Error")
        except Failure as second:
            self.latched = True
            return second.name if second.interrupt else failure.name + ", RestoreFailed"
        return failure.name

    def make_room(self, size: int, reserved: int) -> bool:
        if size > self.budget - reserved:
            return False
        while reserved + sum(saved.size for saved in self.saved) + size > self.budget:
            self.saved.pop(0)
        return True


class Run:
    """One request from its step 6 on."""

    def __init__(self, model: Model, asked: Asked) -> None:
        self.model, self.asked = model, asked
        self.operations: list[str] = []
        self.faults = list(asked.faults)
        self.happened: set[str] = set()
        self.held: list[Saved] = []
        self.reused: list[Saved] = []
        self.reserved = snapshot_size(model.history, bool(model.history))
        self.completed = False
        self.draws = 0

    def operation(self, name: str) -> None:
        at = len(self.operations)
        for fault in list(self.faults):
            if fault.at == at and fault.kind in ("Error", "Interrupt"):
                self.faults.remove(fault)
                raise Failure(fault.kind)
        self.operations.append(name)
        self.happened |= {fault.kind for fault in self.faults if fault.at == at}

    def check(self) -> None:
        if "cancel" in self.happened:
            raise Failure("Cancelled")
        if "expire" in self.happened:
            raise Failure("DeadlineExceeded")

    def generate(self) -> tuple[int, int, int, str]:
        self.check()
        self.choose_prefix()
        reused = len(self.state)
        self.prefill()
        generated, finish = self.decode()
        self.completed = self.save(logits=True)
        return len(self.asked.prompt), reused, generated, finish

    def choose_prefix(self) -> None:
        model, prompt = self.model, self.asked.prompt
        if model.history and prompt[: len(model.history)] == model.history:
            self.state = model.history
            self.reused = [saved for saved in model.saved if saved.tokens == model.history]
        else:
            longest = None
            for saved in model.saved:
                fits = prompt[: len(saved.tokens)] == saved.tokens and (saved.logits or saved.tokens != prompt)
                if fits and (longest is None or len(saved.tokens) >= len(longest.tokens)):
                    longest = saved
            self.operation("S" if longest else "R")
            self.check()
            self.state = longest.tokens if longest else ()
            self.reused = [longest] if longest else []
        if not model.lru:
            self.reused = []
        others = [saved for saved in model.saved if not any(saved is one for one in self.reused)]
        model.saved = others + self.reused

    def prefill(self) -> None:
        *rest, last = self.asked.prompt[len(self.state) :] or (None,)
        if last is None:
            return
        while rest:
            block = [rest.pop(0)]
            while rest and len(block) < self.asked.block and len(self.state) + len(block) not in self.asked.save_at:
                block.append(rest.pop(0))
            for token in block:
                self.operation(f"I{token}")
            self.check()
            self.state += tuple(block)
            if len(self.state) in self.asked.save_at:
                self.save(logits=False)
        self.evaluate(last)

    def evaluate(self, token: int) -> None:
        self.operation(f"E{token}")
        self.check()
        self.state += (token,)

    def decode(self) -> tuple[int, str]:
        for emitted in range(self.asked.max_tokens):
            self.operation("P")
            self.draws += 1
            self.check()
            token = sum(self.state) % VOCAB
            if token in self.asked.stop:
                return emitted, "stop"
            self.evaluate(token)
            self.operation(f"emit{token}")
            self.check()
            if self.asked.stop_after == emitted + 1:
                return emitted + 1, "stop"
        return self.asked.max_tokens, "length"

    def save(self, logits: bool) -> bool:
        if not self.model.checkpoints:
            return False
        saved = Saved(self.state, logits)
        reserved = self.reserved + sum(held.size for held in self.held)
        done = self.model.make_room(saved.size, reserved)
        if done:
            try:
                self.operation("C")
            except Failure as failure:
                if failure.interrupt:
                    raise
                done = False
        self.check()
        if done:
            self.held.append(saved)
        return done
