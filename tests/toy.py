"""A small deterministic model for tests of the pool: a real Decoder, tokenizer and chat, no GGUF file, no numba.

Its next-token logits depend on every token since the start, a step takes as long as asked, and the floats of a step are
the same whatever the prefill block. Only tests can name it: a worker process gets its opener from the test in
process, never from a command line.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prism_core.tokenizer.chat import Answer

BYTES = 256
START, END, STOP = 256, 257, 258  # <|start|> opens a message, <|end|> closes it, <|stop|> ends an answer
VOCAB = 259
WIDTH = 32
MARKS = {START: "<|start|>", END: "<|end|>", STOP: "<|stop|>"}


class ToyCheckpoint(NamedTuple):
    state: np.ndarray
    length: int
    last: int


class ToyDecoder:
    """A recurrent hash of the whole past; `step_s` and `token_s` are the seconds of a step and of a prefill token."""

    vocab_size = VOCAB

    def __init__(
        self, *, identity: str, seed: int, step_s: float, token_s: float, stop_bias: float, hang: str = ""
    ) -> None:
        """While a file `hang` exists, the first decoder to see it removes it and never comes back from its step."""
        self._hang = hang
        random = np.random.default_rng(seed)
        self.identity = identity
        self._mix = random.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH) * 1.5
        self._embed = random.standard_normal((VOCAB, WIDTH))
        self._clock = random.uniform(0.1, 3.0, WIDTH)  # so that a token too many or too few changes all that follow
        self._head = random.standard_normal((VOCAB, WIDTH)) * 2.0
        self._step_s, self._token_s, self._stop_bias = step_s, token_s, stop_bias
        self._debt = 0.0
        self.operations: list[tuple[str, int]] = []
        self.reset()

    def reset(self) -> None:
        self._state = np.zeros(WIDTH)
        self._length = 0
        self._last = START
        self.operations.append(("reset", 0))

    def _advance(self, token: int) -> None:
        self._state = np.tanh(self._mix @ self._state + self._embed[token] + np.sin(self._length * self._clock))
        self._length += 1
        self._last = token

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        """Advances token by token; sleeps off the time owed in slices of at most 20 ms."""
        self.operations.append(("ingest", len(tokens)))
        for token in tokens:
            self._advance(int(token))
            self._debt += self._token_s
            if self._debt >= 0.02:
                time.sleep(self._debt)
                self._debt = 0.0
                check()

    def evaluate_into(self, token: int, logits: np.ndarray) -> None:
        self.operations.append(("evaluate", 1))
        self._advance(int(token))
        if self._hang and os.path.exists(self._hang):
            os.unlink(self._hang)
            threading.Event().wait()
        if self._step_s:
            time.sleep(self._step_s)
        logits[:] = (self._head @ self._state).astype(np.float32)
        self._shape_text(logits)

    def _shape_text(self, logits: np.ndarray) -> None:
        """Keeps the bytes valid UTF-8 with many two-byte characters, so that cut characters are met all the time."""
        last = self._last
        allowed = np.zeros(VOCAB, dtype=bool)
        if last in (0xC3, 0xC4):
            allowed[0x80:0xC0] = True
        else:
            allowed[[*range(0x61, 0x7B), 0x20, 0x0A, 0xC3, 0xC4]] = True
            if self._stop_bias:
                allowed[STOP] = True
                logits[STOP] += self._stop_bias
        logits[~allowed] -= 1000.0

    def checkpoint_bytes(self) -> int:
        return self.checkpoint_bytes_at(self._length)

    def checkpoint_bytes_at(self, tokens: int) -> int:
        return 8 * WIDTH + 16 + 64 * tokens

    def checkpoint(self) -> ToyCheckpoint:
        return ToyCheckpoint(self._state.copy(), self._length, self._last)

    def restore(self, checkpoint: ToyCheckpoint) -> None:
        self._state, self._length, self._last = checkpoint.state.copy(), checkpoint.length, checkpoint.last
        self.operations.append(("restore", self._length))


class ToyStream:
    """Incremental bytes to text, whole characters only."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._decoder.decode(bytes([token]) if token < BYTES else b"")

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class ToyTokenizer:
    """One token per byte, and three control tokens."""

    vocab_size = VOCAB
    stop_tokens = (STOP,)
    bos: int | None = None
    eos = STOP

    def encode(self, text: str, *, special: str = "literal", add_bos: bool | None = None) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < BYTES).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else MARKS[token].encode()

    def stream(self) -> ToyStream:
        return ToyStream()


class ToyPrompt(NamedTuple):
    token_ids: list[int]
    save_at: tuple[int, ...]


class ToyChat:
    """`<|start|>role:content<|end|>` per message; user text is literal, so it can never spell a control token."""

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self._tokenizer = tokenizer

    def warm(self) -> None: ...

    def encode_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Sequence[int] | Answer] | None = None,
        add_generation_prompt: bool = True,
        **template_vars: Any,
    ) -> ToyPrompt:
        answers = answers or {}
        ids: list[int] = []
        save_at: list[int] = []
        for index, message in enumerate(messages):
            ids += [START, *self._tokenizer.encode(message["role"] + ":")]
            kept = answers.get(index)
            ids += kept.token_ids if isinstance(kept, Answer) else kept or self._tokenizer.encode(message["content"])
            ids.append(END)
            if message["role"] == "system":
                save_at.append(len(ids))
        if add_generation_prompt:
            save_at.append(len(ids))
            ids += [START, *self._tokenizer.encode("assistant:")]
        return ToyPrompt(ids, tuple(sorted(set(save_at))))


class ToyModel:
    """What `prism_core.open_model` gives, in small."""

    architecture = "toy"

    def __init__(
        self,
        *,
        seed: int = 7,
        context_tokens: int = 4096,
        step_s: float = 0.0,
        token_s: float = 0.0,
        stop_bias: float = 0.0,
        hang: str = "",
    ) -> None:
        self._options: dict[str, Any] = {
            "seed": seed, "step_s": step_s, "token_s": token_s, "stop_bias": stop_bias, "hang": hang,
        }  # fmt: skip
        self.identity = hashlib.sha256(f"toy {seed} {stop_bias}".encode()).hexdigest() + "+toy.1"
        self.context_tokens = context_tokens
        self.vocab_size = VOCAB
        self.tokenizer = ToyTokenizer()
        self.chat = ToyChat(self.tokenizer)

    def memory(self, context_tokens: int | None = None) -> dict[str, int]:
        parts = {"weights": 3 * VOCAB * WIDTH * 8, "kv_cache": 64 * (context_tokens or self.context_tokens)}
        return parts | {"total": sum(parts.values())}

    def decoder(self, progress: Any = None) -> ToyDecoder:
        return ToyDecoder(identity=self.identity, **self._options)


def open_toy(
    path: str, *, threads: int | None = None, context_tokens: int | None = None, memory_budget: int | None = None
) -> ToyModel:
    """The opener that tests hand to worker processes; options ride in the path, as `toy?step_s=0.01&seed=3`."""
    _, _, query = str(path).partition("?")
    options = dict(item.split("=", 1) for item in query.split("&") if item)
    return ToyModel(
        seed=int(options.get("seed", 7)),
        context_tokens=context_tokens or 4096,
        step_s=float(options.get("step_s", 0.0)),
        token_s=float(options.get("token_s", 0.0)),
        stop_bias=float(options.get("stop_bias", 0.0)),
        hang=options.get("hang", ""),
    )
