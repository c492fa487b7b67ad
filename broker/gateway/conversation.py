"""A client's whole message list beside the pool's transcript of the same conversation.

Kept: an assistant message that says what a committed answer says, but in the client's form (reasoning left out or
apart, tool calls as objects), is sent on as the text that was committed: so the list counts as going on from the
transcript and not as an edit of it, and the committed tokens are used again. Nothing else of the list is touched.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from broker.gateway.answer import AnswerParser
from broker.transcript import TurnRecord

__all__ = ["as_committed"]

Message = dict[str, Any]


def as_committed(messages: Sequence[Message], turns: Sequence[TurnRecord]) -> list[Message]:
    """`messages` with the answers that `turns` committed at the same places put back as they were generated."""
    past = [message for turn in turns for message in [*turn.messages, turn.answer]]
    return [
        dict(past[at]) if at < len(past) and _says_the_same(message, past[at]) else message
        for at, message in enumerate(messages)
    ]


def _says_the_same(message: Message, committed: Mapping[str, Any]) -> bool:
    if message.get("role") != "assistant" or committed.get("role") != "assistant" or message == committed:
        return False
    text = committed.get("content")
    if not isinstance(text, str):
        return False
    shown = (message.get("content") or "", _calls(message))
    return any(_apart(text, thinking) == shown for thinking in (False, True))


def _apart(text: str, thinking: bool) -> tuple[str, list[tuple[Any, Any]]]:
    """Content and calls of a committed text, as its client was shown them."""
    parser = AnswerParser(thinking=thinking, tools=True)
    pieces = [*parser.push(text), *parser.finish()]
    calls: list[tuple[Any, Any]] = [(piece.call.name, _value(piece.call.arguments)) for piece in pieces if piece.call]
    return "".join(piece.text for piece in pieces if piece.kind == "content"), calls


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call.get("function") or {} for call in message.get("tool_calls") or []]
    return [(function.get("name"), _value(function.get("arguments"))) for function in functions]


def _value(arguments: Any) -> Any:
    """Arguments as a value, whatever their spelling."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
