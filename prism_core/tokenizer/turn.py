"""The renderings that make one prompt: the chat with its committed answers marked, and those it is compared with.

Invariant: without its markers the marked rendering is what the template writes for the same messages, white space at
the edges of answers excepted. Answers for which that would not hold stay unmarked: their text is encoded as rendered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from prism_core.errors import InvalidRequest
from prism_core.tokenizer.rendered import Mark, MarkedText
from prism_core.tokenizer.shield import Shield
from prism_core.tokenizer.tokenizer import Tokenizer

_SYSTEM_ROLES: Final = ("system", "developer")

Render = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], list[str | InvalidRequest]]
"""(variables, changes to them) to one outcome for each change."""


@dataclass(frozen=True, slots=True)
class TurnText:
    """A rendered chat, and places in it as characters of the raw rendering, None where unknown.

    `system_end`: where the first message that is not the system's has its content. `turn_end`: where the generation
    prompt begins.
    """

    chat: MarkedText
    system_end: int | None
    turn_end: int | None


def render_turn(
    variables: Mapping[str, Any], answers: Mapping[int, list[int]], shield: Shield, tokenizer: Tokenizer, render: Render
) -> TurnText:
    """Renders `variables["messages"]`, shielded, with the answers (ids by message index) marked where it is faithful.

    Raises the InvalidRequest that the template's refusal or failure is.
    """
    turn, verbatim = _render_marked(variables, answers, shield, tokenizer, render)
    if turn is None:
        # the template saw a marker: perhaps only one in an answer that it alters, which needs none
        some = {index: ids for index, ids in answers.items() if index in verbatim and len(verbatim) < len(answers)}
        turn, _ = _render_marked(variables, some, shield, tokenizer, render)
    if turn is None:
        turn, _ = _render_marked(variables, {}, shield, tokenizer, render)
    assert turn is not None
    return turn


def _render_marked(
    variables: Mapping[str, Any], answers: Mapping[int, list[int]], shield: Shield, tokenizer: Tokenizer, render: Render
) -> tuple[TurnText | None, set[int]]:
    """The turn, or None if the markers changed more than they may; and the answers found verbatim."""
    plain: list[dict[str, Any]] = list(variables["messages"])
    messages = list(plain)
    marks: dict[str, Mark] = {}
    for index, ids in answers.items():
        mark = Mark(index, shield.fresh(), shield.fresh(), plain[index]["content"], ids)
        messages[index] = {**plain[index], "content": mark.opening + mark.text + mark.closing}
        marks[mark.opening] = mark
    changes: list[dict[str, Any]] = [{}, {"add_generation_prompt": False}]
    opening = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM_ROLES), None)
    if opening is not None:
        # another content in its place: what both renderings start with belongs to the system prompt
        probe = {**plain[opening], "content": shield.fresh()}
        changes.append({"messages": [*plain[:opening], probe], "add_generation_prompt": False})
    if marks:
        changes.append({"messages": plain})
    text, *others = [
        shield.unescaped(result) if isinstance(result, str) else result
        for result in render({**variables, "messages": messages}, changes)
    ]
    if isinstance(text, InvalidRequest):
        raise text
    chat = MarkedText(text, marks)
    verbatim = {stored.mark.index for stored in chat.stored}
    if marks and not (isinstance(others[-1], str) and chat.settle(others[-1], tokenizer)):
        return None, verbatim
    turn_end = len(others[0]) if isinstance(others[0], str) and text.startswith(others[0]) else None
    system_end = None
    if opening is not None and isinstance(others[1], str):
        system_end = _common_length(text, others[1])
    return TurnText(chat, system_end, turn_end), verbatim


def _common_length(left: str, right: str) -> int:
    """Length of the longest common start, by halving (a loop over characters would cost more than the rendering)."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
