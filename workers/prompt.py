"""From a request and its conversation's transcript to the prompt's token ids, and to what a commit will record.

Invariant: the ids of a committed answer are put back as they were generated; committed text is never tokenised again.
The same request over the same transcript gives the same ids on every worker of the model: a takeover counts on that.
Two ways to speak: only the new messages (appended to the transcript), or the whole list. Where a whole list leaves the
transcript, the turn is an EDIT: its commit replaces the transcript from there.
Not promised: that a template which rewrites an answer (strips it, drops it) keeps its ids; such parts are encoded as
rendered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from broker.spec import RequestSpec
from broker.transcript import TurnCommit, TurnRecord
from prism_core import codec
from prism_core.errors import InvalidRequest
from prism_core.tokenizer.chat import Answer


class Prompted(Protocol):
    """What a chat template's `encode_turn` returns."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def save_at(self) -> Sequence[int]: ...


class ChatModel(Protocol):
    """The parts of `prism_core.Model` that make a prompt."""

    tokenizer: Any
    chat: Any


@dataclass(frozen=True, kw_only=True)
class TurnPrompt:
    """A prompt, and the turn's place in the transcript."""

    token_ids: list[int]
    save_at: tuple[int, ...] = ()
    """Positions, strictly increasing inside the prompt, whose prefixes are worth keeping."""
    base: int = 0
    """Committed turns that stay; the commit replaces what follows them."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages that this turn adds after those of the kept turns."""
    prompt_ids: list[int] | None = None
    """Of a turn without messages: the ids that it adds after those of the kept turns."""

    def commit(self, *, request: str, model: str, answer_ids: list[int], text: str, parent: str) -> TurnCommit:
        """What `finish` is to write, for a turn that ended as done. `parent` is the digest of the last kept turn."""
        answer = {} if self.prompt_ids is not None else {"role": "assistant", "content": text}
        record = TurnRecord(
            request=request,
            model=model,
            messages=self.messages,
            answer=answer,
            answer_ids=answer_ids,
            text=text,
            prompt_ids=self.prompt_ids,
            tokens=len(self.token_ids) + len(answer_ids),
            digest=chain(parent, [*self.messages, answer]),
        )
        return TurnCommit(base=self.base, record=record)


def chain(parent: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Digest of a message list: of the digest before it and each message's fields in order of their names."""
    digest = parent
    for message in messages:
        flat = codec.pack([digest, [[name, message[name]] for name in sorted(message)]])
        digest = hashlib.sha256(flat).hexdigest()
    return digest


def build(spec: RequestSpec, model: ChatModel, turns: Sequence[TurnRecord] = ()) -> TurnPrompt:
    """The prompt of one turn after `turns`, the committed ones (empty without a conversation).

    Raises `InvalidRequest` when the two do not go together, and passes on a chat template's own refusal.
    """
    if spec.messages is not None:
        return _from_messages(spec, spec.messages, model, turns)
    return _from_text(spec, model, turns)


def _from_text(spec: RequestSpec, model: ChatModel, turns: Sequence[TurnRecord]) -> TurnPrompt:
    """Plain text and ready ids go on after the ids of the turns before; ready ids may also repeat those."""
    if spec.history == "replace":
        turns = ()
    if any(turn.prompt_ids is None for turn in turns):
        raise InvalidRequest("this conversation is made of messages: send messages, not a prompt or token_ids")
    ends: list[int] = []
    past: list[int] = []
    for turn in turns:
        past += [*(turn.prompt_ids or []), *turn.answer_ids]
        ends.append(len(past))
    if spec.token_ids is None:
        new = list(model.tokenizer.encode(spec.prompt, add_bos=False if past else None))
        return TurnPrompt(token_ids=past + new, base=len(turns), prompt_ids=new)
    given = list(spec.token_ids)
    kept = 0 if spec.history == "append" else _repeated(given, past, ends)
    if kept:
        return TurnPrompt(token_ids=given, base=kept, prompt_ids=given[ends[kept - 1] :])
    return TurnPrompt(token_ids=past + given, base=len(turns), prompt_ids=given)


def _repeated(given: list[int], past: list[int], ends: Sequence[int]) -> int:
    """How many whole turns the given ids repeat from the start, leaving at least one new id."""
    kept = 0
    for count, end in enumerate(ends, 1):
        if end >= len(given) or given[:end] != past[:end]:
            break
        kept = count
    return kept


def _from_messages(
    spec: RequestSpec, messages: list[dict[str, Any]], model: ChatModel, turns: Sequence[TurnRecord]
) -> TurnPrompt:
    if any(turn.prompt_ids is not None for turn in turns):
        if spec.history != "replace":
            raise InvalidRequest("this conversation is made of plain text: send a prompt or token_ids, not messages")
        turns = ()
    past: list[Mapping[str, Any]] = []
    ends: list[int] = []
    answers: dict[int, Answer] = {}
    for turn in turns:
        past += [*turn.messages, turn.answer]
        ends.append(len(past))
        answers[len(past) - 1] = Answer(turn.answer_ids, turn.text)
    if turns and not _is_whole(spec, messages):
        whole = [*map(dict, past), *messages]
        base, added = len(turns), messages
    else:
        whole = messages
        common = _common(messages, past)
        base = sum(end <= common for end in ends)
        added = messages[ends[base - 1] if base else 0 :]
    kept = {index: answer for index, answer in answers.items() if base and index < ends[base - 1]}
    prompt: Prompted = model.chat.encode_turn(whole, answers=kept, add_generation_prompt=True, **spec.template)
    ids = list(prompt.token_ids)
    save_at = {*prompt.save_at, *(_end_of(turns[base - 1], ids) if base else ())}
    return TurnPrompt(token_ids=ids, save_at=tuple(sorted(save_at)), base=base, messages=list(added))


def _end_of(turn: TurnRecord, ids: Sequence[int]) -> tuple[int, ...]:
    """Where the turn ends in a prompt that goes on from it: kept, so an edit of what follows reuses all before it."""
    begin = turn.tokens - len(turn.answer_ids)
    fits = turn.answer_ids and 0 < turn.tokens < len(ids) and list(ids[begin : turn.tokens]) == turn.answer_ids
    return (turn.tokens,) if fits else ()


def _is_whole(spec: RequestSpec, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the list stands for the whole conversation rather than for what is new in it."""
    if spec.history != "auto":
        return spec.history == "replace"
    first = messages[0]["role"] in ("system", "developer")
    return first or any(message["role"] == "assistant" for message in messages)


def _common(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> int:
    """How many leading messages are the same; absent and None fields are equal, as clients differ in spelling them."""
    count = 0
    for mine, theirs in zip(left, right, strict=False):
        if any(mine.get(name) != theirs.get(name) for name in mine.keys() | theirs.keys()):
            break
        count += 1
    return count
