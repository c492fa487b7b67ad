"""The events of a response's stream, numbered.

Kept: `sequence_number` counts 0, 1, 2, ... over the whole stream and depends on the request's log alone, whose entries
are never rewritten: a reader that comes back reads the log from its beginning and goes on after the number that it saw
last. A takeover shows nothing here: the text goes on.
Not promised: a delta before `response.completed` or `.incomplete` stands; after `response.failed` it does not.
"""

from __future__ import annotations

from typing import Any

from broker.events import Event
from broker.gateway.answer import AnswerParser, Piece
from broker.gateway.asked import Chunk
from broker.gateway.logprobs import chat_logprobs
from broker.gateway.response_object import Frame, Item, Items, final_status

__all__ = ["ResponseAnswer"]

_FINAL = {"completed": "response.completed", "incomplete": "response.incomplete"}


class ResponseAnswer:
    """Stream events and final object of one response."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._items = Items(frame.request)
        self._open: Item | None = None
        self._parser: AnswerParser | None = None
        self._logprobs: list[dict[str, Any]] = []
        self._result: dict[str, Any] = {}
        self.sequence = 0
        """Events so far: the number of the next one."""

    def opening(self) -> list[Chunk]:
        """What comes before anything has happened. Call once, first."""
        if self._frame.background:
            queued = self._frame.open("queued")
            return [self._event("response.created", response=queued), self._event("response.queued", response=queued)]
        return [self._event("response.created", response=self._frame.open("in_progress")), self._in_progress()]

    def push(self, index: int, event: Event) -> list[Chunk]:
        if event.kind == "start" and self._parser is None:
            self._parser = self._new_parser(event)
            return [self._in_progress()] if self._frame.background else []
        if event.kind == "delta":
            if self._parser is None:
                self._parser = self._new_parser(event)
            if self._frame.spec.logprobs is not None:
                self._logprobs += chat_logprobs(event.data.get("lp") or ())
            return [chunk for piece in self._parser.push(event.text) for chunk in self._piece(piece)]
        return self._end(event) if event.kind == "end" else []

    def closing(self) -> list[Chunk]:
        return []

    def result(self) -> Chunk:
        return self._result

    def _new_parser(self, event: Event) -> AnswerParser:
        return AnswerParser(thinking=bool(event.data.get("thinking")), tools=self._frame.tools)

    def _end(self, event: Event) -> list[Chunk]:
        state, reason = str(event.state), str(event.data.get("reason", ""))
        chunks: list[Chunk] = []
        if state == "done":
            pieces = self._parser.finish() if self._parser else []
            chunks = [chunk for piece in pieces for chunk in self._piece(piece)]
            if not self._items.all:
                chunks += self._begin(self._items.add("message"))
            chunks += self._close("incomplete" if reason == "length" else "completed")
        usage = dict(event.data.get("usage") or {})
        self._result = self._frame.ended(state, reason, self._items, usage)
        final = _FINAL.get(final_status(state, reason), "response.failed")
        return [*chunks, self._event(final, response=self._result)]

    def _piece(self, piece: Piece) -> list[Chunk]:
        item = self._items.take(piece)
        chunks: list[Chunk] = []
        if item is not self._open:
            chunks += self._close("completed")
            chunks += self._begin(item)
        if item.kind == "function_call":
            text = "".join(item.text)
            chunks.append(self._of(item, "response.function_call_arguments.delta", delta=text))
        elif item.kind == "reasoning":
            chunks.append(self._of(item, "response.reasoning_text.delta", content_index=0, delta=piece.text))
        else:
            logprobs, self._logprobs = self._logprobs, []
            item.logprobs += logprobs
            chunks.append(
                self._of(item, "response.output_text.delta", content_index=0, delta=piece.text, logprobs=logprobs)
            )
        return chunks

    def _begin(self, item: Item) -> list[Chunk]:
        self._open = item
        text, item.text = item.text, []
        chunks = [
            self._event("response.output_item.added", output_index=self._at(item), item=item.shown("in_progress"))
        ]
        if item.kind != "function_call":
            chunks.append(self._of(item, "response.content_part.added", content_index=0, part=item.part()))
        item.text = text
        return chunks

    def _close(self, status: str) -> list[Chunk]:
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(item.text)
        if item.kind == "function_call":
            chunks = [self._of(item, "response.function_call_arguments.done", arguments=text, name=item.name)]
        else:
            if item.kind == "reasoning":
                done = self._of(item, "response.reasoning_text.done", content_index=0, text=text)
            else:
                done = self._of(item, "response.output_text.done", content_index=0, text=text, logprobs=item.logprobs)
            chunks = [done, self._of(item, "response.content_part.done", content_index=0, part=item.part())]
        return [
            *chunks,
            self._event("response.output_item.done", output_index=self._at(item), item=item.shown(status)),
        ]

    def _in_progress(self) -> Chunk:
        return self._event("response.in_progress", response=self._frame.open("in_progress"))

    def _at(self, item: Item) -> int:
        return self._items.all.index(item)

    def _of(self, item: Item, kind: str, **fields: Any) -> Chunk:
        return self._event(kind, item_id=item.id, output_index=self._at(item), **fields)

    def _event(self, kind: str, **fields: Any) -> Chunk:
        chunk = {"type": kind, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return chunk
