"""Chats to prompts: the model file's template, with user text kept text and committed answers kept as they were.

Invariants: every control token of the prompt comes from the template (or from a committed answer's own ids); committed
ids that the template reproduces verbatim stand in the prompt unchanged, and the text around them is cut exactly there,
so that the prompt and answer of a turn are a prefix of the next turn's prompt whenever the template leaves them alone;
what it alters or drops is encoded as it was rendered. The same messages, answers and variables give the same ids in
every process (a template that prints the time excepted).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prism_core.errors import InvalidRequest, ModelError
from prism_core.tokenizer.fallbacks import fallback_for
from prism_core.tokenizer.messages import normalise
from prism_core.tokenizer.rendered import RenderedChat
from prism_core.tokenizer.renderer import Renderer, shared_renderer
from prism_core.tokenizer.shield import ControlSpellings, Shield
from prism_core.tokenizer.tokenizer import Tokenizer
from prism_core.tokenizer.turn import render_turn
from prism_core.tokenizer.vocabulary import CONTROL, UNKNOWN, text_of

MAX_TEMPLATE_BYTES: Final = 256 * 1024
MIN_SAVED_TOKENS: Final = 8
"""A shorter start of a prompt is cheaper to evaluate again than to keep."""
_TOKEN_VARIABLES: Final = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
_RESERVED: Final = frozenset(
    ("messages", "answers", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", *_TOKEN_VARIABLES)
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A committed answer: its ids, and the text that the client was given for them (None: what they decode to)."""

    token_ids: Sequence[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """`save_at`: token positions worth keeping, strictly increasing, in 1..len(token_ids) - 1."""

    token_ids: list[int]
    save_at: tuple[int, ...]


class ChatTemplate:
    """The chat template of one model; made by `from_metadata`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        origin: str = "file",
        *,
        renderer: Renderer | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        size = len(source.encode(errors="surrogatepass"))
        if size > MAX_TEMPLATE_BYTES:
            raise ModelError(f"tokenizer.chat_template has {size} bytes; at most {MAX_TEMPLATE_BYTES} are accepted")
        self.source = source
        self.origin = origin
        self._tokenizer = tokenizer
        self._renderer = renderer or shared_renderer()
        self._clock = clock
        self._spellings: ControlSpellings | None = None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate:
        """The file's `tokenizer.chat_template`, or a fallback that suits its tokens (see `describe`)."""
        if "tokenizer.chat_template" in metadata:
            return cls(tokenizer, text_of(metadata, "tokenizer.chat_template"))
        origin, source = fallback_for(tokenizer.vocabulary)
        return cls(tokenizer, source, origin)

    def describe(self) -> dict[str, object]:
        """`template`: "file", or the name of the fallback in use; `bytes`: its size."""
        return {"template": self.origin, "bytes": len(self.source.encode(errors="surrogatepass"))}

    def warm(self) -> None:
        """Starts the process that renders templates, without waiting for it."""
        self._renderer.warm()

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The text of the chat as the template writes it, for showing; `encode` is what keeps user text apart."""
        context = self._context(self._checked(messages), variables, add_generation_prompt)
        text = self._renderer.render(self.source, context, [{}], self._clock())[0]
        if isinstance(text, InvalidRequest):
            raise InvalidRequest(_printable(str(text)))
        return text

    def encode(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The chat's token ids; InvalidRequest for bad messages or when the template refuses them."""
        return self._turn(messages, {}, add_generation_prompt, variables).token_ids

    def encode_turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        answers: Mapping[int, Sequence[int] | Answer] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> ChatPrompt:
        """The prompt of the next turn.

        `answers[i]` are the committed ids of assistant message i, without the token that ended it. They are used if the
        message still has that text and no tool calls, and the template writes the text as it is; otherwise the
        message's own text is encoded. Raises InvalidRequest as `encode` does.
        """
        return self._turn(messages, answers or {}, add_generation_prompt, variables)

    def _turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: Mapping[int, Sequence[int] | Answer],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> ChatPrompt:
        checked = self._checked(messages)
        usable = self._usable(checked, answers)
        shield = Shield(self._spellings or self._control_spellings(), self.source, [checked, variables])
        plain = [shield.message(message) for message in checked]
        shielded = {name: shield.value(value) for name, value in variables.items()}
        context = self._context(plain, shielded, add_generation_prompt)
        now = self._clock()

        def render(variables: Mapping[str, Any], changes: Sequence[Mapping[str, Any]]) -> list[str | InvalidRequest]:
            return self._renderer.render(self.source, variables, changes, now)

        try:
            turn = render_turn(context, usable, shield, self._tokenizer, render)
        except InvalidRequest as refused:
            raise InvalidRequest(_printable(shield.restore(str(refused)))) from refused
        chat = RenderedChat(turn.chat, shield, self._tokenizer)
        points: list[int | None] = []
        if turn.system_end is not None:
            start = chat.position(turn.system_end, nearest=True)
            points.append(start if start is not None and start >= MIN_SAVED_TOKENS else None)
        if turn.turn_end is not None:
            points.append(chat.position(turn.turn_end, nearest=False))
        ids = chat.ids
        bos = self._tokenizer.bos if self._tokenizer.add_bos else None
        head = [bos] if bos is not None and ids[:1] != [bos] else []
        saved = sorted({point + len(head) for point in points if point is not None})
        ids = head + ids
        return ChatPrompt(ids, tuple(point for point in saved if 0 < point < len(ids)))

    def _checked(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        checked = normalise(messages)
        if "developer" not in self.source:
            for message in checked:
                if message["role"] == "developer":
                    message["role"] = "system"
        return checked

    def _usable(
        self, messages: Sequence[Mapping[str, Any]], answers: Mapping[int, Sequence[int] | Answer]
    ) -> dict[int, list[int]]:
        """The ids of the answers whose messages still have their text."""
        usable: dict[int, list[int]] = {}
        for index, given in answers.items():
            answer = given if isinstance(given, Answer) else Answer(given)
            ids = [int(token) for token in answer.token_ids]
            if not 0 <= index < len(messages) or messages[index]["role"] != "assistant":
                raise InvalidRequest(f"answers[{index}] belongs to no assistant message")
            if any(not 0 <= token < self._tokenizer.vocab_size for token in ids):
                raise InvalidRequest(f"answers[{index}] holds an id outside 0..{self._tokenizer.vocab_size - 1}")
            text = self._tokenizer.decode(ids) if answer.text is None else answer.text
            if text and text == messages[index]["content"] and "tool_calls" not in messages[index]:
                usable[index] = ids
        return usable

    def _context(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any], add_generation_prompt: bool
    ) -> dict[str, Any]:
        taken = sorted(_RESERVED.intersection(variables))
        if taken:
            raise InvalidRequest(f"the template variable {taken[0]!r} is set by the engine")
        vocabulary = self._tokenizer.vocabulary
        tokens = {
            name: vocabulary.texts[vocabulary.special_ids[key]]
            for name, key in _TOKEN_VARIABLES.items()
            if key in vocabulary.special_ids
        }
        return {**tokens, **variables, "messages": messages, "add_generation_prompt": bool(add_generation_prompt)}

    def _control_spellings(self) -> ControlSpellings:
        vocabulary = self._tokenizer.vocabulary
        texts = [vocabulary.texts[index] for index in vocabulary.ids_of_type(CONTROL, UNKNOWN)]
        self._spellings = ControlSpellings(filter(None, texts), self.source)
        return self._spellings


def _printable(text: str) -> str:
    """A refusal in the words of a template or a user, as a terminal may be given it."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
