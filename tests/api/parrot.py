"""A model for tests of what the gateway makes of text: it answers with the last user message, word for word.

A real Decoder, as `tests.toy` is, so the text comes through the Runtime, the worker and the broker; template variables
`think` and `tools` show what reached the template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from prism_core.tokenizer.chat import Answer
from tests.toy import END, START, STOP, VOCAB, ToyModel, ToyPrompt, ToyTokenizer

ANSWER = [START, *b"assistant:"]
OPEN_THOUGHT = [*b"<think>\n"]


class ParrotCheckpoint(NamedTuple):
    tokens: tuple[int, ...]


class ParrotDecoder:
    vocab_size = VOCAB

    def __init__(self, identity: str) -> None:
        self.identity = identity
        self._tokens: list[int] = []

    def reset(self) -> None:
        self._tokens = []

    def ingest_block(self, tokens: Sequence[int], check: Callable[[], None]) -> None:
        self._tokens += map(int, tokens)

    def evaluate_into(self, token: int, logits: np.ndarray) -> None:
        self._tokens.append(int(token))
        logits[:] = -1000.0
        logits[self._next()] = 10.0

    def _next(self) -> int:
        begin = _last(self._tokens, ANSWER)
        if begin < 0:
            return STOP
        said, made = self._said(begin), self._tokens[begin + len(ANSWER) :]
        size = len(OPEN_THOUGHT)
        if made[:size] == OPEN_THOUGHT != said[:size]:
            made = made[size:]  # the template opened the thought, not the answer
        return said[len(made)] if len(made) < len(said) else STOP

    def _said(self, begin: int) -> list[int]:
        user = _last(self._tokens[:begin], [START, *b"user:"])
        message = self._tokens[user:begin]
        return message[len(b"user:") + 1 : message.index(END)]

    def checkpoint_bytes(self) -> int:
        return self.checkpoint_bytes_at(len(self._tokens))

    def checkpoint_bytes_at(self, tokens: int) -> int:
        return 64 + 8 * tokens

    def checkpoint(self) -> ParrotCheckpoint:
        return ParrotCheckpoint(tuple(self._tokens))

    def restore(self, checkpoint: ParrotCheckpoint) -> None:
        self._tokens = list(checkpoint.tokens)


def _last(tokens: Sequence[int], wanted: Sequence[int]) -> int:
    for at in range(len(tokens) - len(wanted), -1, -1):
        if tokens[at : at + len(wanted)] == wanted:
            return at
    return -1


class ParrotChat:
    """The toy's chat, with the tools as a system message, and a thought opened when asked for."""

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self._tokenizer = tokenizer

    def warm(self) -> None: ...

    def encode_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Sequence[int] | Answer] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> ToyPrompt:
        ids: list[int] = []
        if variables.get("tools"):
            ids += [START, *self._tokenizer.encode("system:" + json.dumps(variables["tools"])), END]
        for index, message in enumerate(messages):
            kept = (answers or {}).get(index)
            content = kept.token_ids if isinstance(kept, Answer) else self._tokenizer.encode(message["content"])
            ids += [START, *self._tokenizer.encode(message["role"] + ":"), *content, END]
        ids += ANSWER
        if variables.get("think"):
            ids += OPEN_THOUGHT
        return ToyPrompt(ids, ())


class ParrotModel(ToyModel):
    architecture = "parrot"

    def __init__(self, context_tokens: int) -> None:
        super().__init__(context_tokens=context_tokens)
        self.identity = "0" * 64 + "+parrot.1"
        self.chat = ParrotChat(self.tokenizer)  # type: ignore[assignment]

    def decoder(self, progress: Any = None) -> Any:
        return ParrotDecoder(self.identity)


def open_parrot(
    path: str, *, threads: int | None = None, context_tokens: int | None = None, memory_budget: int | None = None
) -> ParrotModel:
    """The opener for worker processes."""
    return ParrotModel(context_tokens or 4096)
