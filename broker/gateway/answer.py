"""An answer's text taken apart while it comes: reasoning, content, and tool calls.

    <think> reasoning </think> content <tool_call> {"name": ..., "arguments": {...}} </tool_call> ...

Kept: the parts depend on the text alone, not on how it was cut into pieces, so a replayed stream gives the same parts;
no piece of a tag ever leaves. A tag that does not end, or a call that is no JSON, is given out as the text it is:
nothing that the model wrote is lost but the tags, and the white space around them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal, NoReturn

__all__ = ["AnswerParser", "Piece", "ToolCall"]

THINK, THINK_END = "<think>", "</think>"
CALL, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class ToolCall:
    """One complete call. `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Piece:
    """The next part of an answer."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class AnswerParser:
    """Push the text of one answer, in pieces of any size."""

    def __init__(self, *, thinking: bool = False, thoughts: bool = True, tools: bool = False) -> None:
        """thinking: the answer begins inside `<think>`. thoughts: look for `<think>`. tools: look for tool calls."""
        self._state: Literal["begin", "thought", "after", "content", "call"] = "content"
        if thoughts:
            self._state = "thought" if thinking else "begin"
        self._tools = tools
        self._held = ""
        self._begun = False
        """Something of the present part is out: white space before it is over."""

    def push(self, text: str) -> list[Piece]:
        """The parts that this text completes or goes on with."""
        self._held += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """What was held back for a tag or for white space, once no more text comes."""
        pieces = self.push("")
        held, self._held = self._held, ""
        if self._state == "call":
            call = _call_of(held)
            pieces.append(Piece("call", call=call) if call else Piece("content", CALL + held))
        elif self._state == "thought":
            pieces.append(Piece("reasoning", held.rstrip()))
        elif self._state == "begin" or not self._tools or held.strip():
            # Of white space after a call nothing is told; without tools the text is given as it came.
            pieces.append(Piece("content", held))
        elif self._begun and self._state == "content":
            pieces.append(Piece("content", held))
        return _joined(pieces)

    def _step(self, pieces: list[Piece]) -> bool:
        """One move of the machine; False when more text is needed."""
        if not self._held:
            return False
        return {
            "begin": self._at_begin,
            "thought": self._in_thought,
            "after": self._after_tag,
            "content": self._in_content,
            "call": self._in_call,
        }[self._state](pieces)

    def _at_begin(self, pieces: list[Piece]) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._enter("thought")
            return True
        if THINK.startswith(text):
            return False
        self._enter("content")
        return True

    def _in_thought(self, pieces: list[Piece]) -> bool:
        if not self._begun:
            self._held = self._held.lstrip()
        body, found, rest = self._held.partition(THINK_END)
        if found:
            pieces.append(Piece("reasoning", body.rstrip()))
            self._held = rest
            self._enter("after")
            return True
        out = body[: len(body) - _begun_tag(body, THINK_END)].rstrip()
        self._give(pieces, "reasoning", out)
        return False

    def _after_tag(self, pieces: list[Piece]) -> bool:
        self._held = self._held.lstrip()
        if self._held:
            self._enter("content")
        return bool(self._held)

    def _in_content(self, pieces: list[Piece]) -> bool:
        if not self._tools:
            self._give(pieces, "content", self._held)
            return False
        body, found, rest = self._held.partition(CALL)
        if found:
            pieces.append(Piece("content", body.rstrip()))
            self._held = rest
            self._enter("call")
            return True
        out = body[: len(body) - _begun_tag(body, CALL)].rstrip()
        self._give(pieces, "content", out)
        return False

    def _in_call(self, pieces: list[Piece]) -> bool:
        body, found, rest = self._held.partition(CALL_END)
        if not found:
            return False
        call = _call_of(body)
        pieces.append(Piece("call", call=call) if call else Piece("content", CALL + body + CALL_END))
        self._held = rest
        self._enter("after")
        return True

    def _enter(self, state: Literal["thought", "after", "content", "call"]) -> None:
        self._state = state
        self._begun = False

    def _give(self, pieces: list[Piece], kind: Literal["reasoning", "content"], out: str) -> None:
        if out:
            pieces.append(Piece(kind, out))
            self._held = self._held[len(out) :]
            self._begun = True


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces without empty ones, neighbours of a kind made one."""
    out: list[Piece] = []
    for piece in pieces:
        if piece.kind != "call" and not piece.text:
            continue
        if out and piece.kind != "call" and out[-1].kind == piece.kind:
            out[-1] = Piece(piece.kind, out[-1].text + piece.text)
        else:
            out.append(piece)
    return out


def _begun_tag(text: str, tag: str) -> int:
    """How many last characters of the text may be the beginning of `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if tag.startswith(text[len(text) - length :]):
            return length
    return 0


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _call_of(text: str) -> ToolCall | None:
    """The call in the body of a `<tool_call>`, or None if it is none."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name, arguments)
