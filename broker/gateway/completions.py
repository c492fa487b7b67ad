"""`/v1/completions`: text in, text out, without a chat template.

`prompt` is a string, an array of strings, an array of token ids, or an array of those; each prompt gets `n` answers.
`echo`, `suffix`, `logit_bias` and a `best_of` above `n` are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from broker.events import Event
from broker.gateway import options
from broker.gateway.asked import Asked, Chunk, created_at
from broker.gateway.body import Body
from broker.gateway.chat import stream_options
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import invalid, of_end
from broker.gateway.logprobs import completion_logprobs
from broker.gateway.messages import check_text
from broker.gateway.usage import completion_usage, timings_ms
from broker.spec import MAX_LOGPROBS, MAX_TOKENS, RequestSpec

__all__ = ["CompletionAnswer", "read_completion"]

API = "completions"
DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


def read_completion(value: object, config: GatewayConfig) -> Asked:
    """The requests of a body; `ApiError` (400) names the field at fault."""
    body = Body(value)
    prompts = _prompts(body.get("prompt"), config)
    count = body.integer("n", 1, config.max_choices) or 1
    if len(prompts) * count > config.max_choices:
        message = f"{len(prompts)} prompts with n {count} make {len(prompts) * count} answers"
        raise invalid(f"{message}; the limit is {config.max_choices}", "n")
    common = {
        "max_tokens": options.max_tokens(body, "max_tokens", default=DEFAULT_MAX_TOKENS),
        "stop": options.stops(body),
        "logprobs": body.integer("logprobs", 0, MAX_LOGPROBS),
        "note": {"api": API},
        **options.sampling(body),
    }
    seeds = options.seeds(body, count)
    asked = Asked(
        api=API,
        model=body.text("model") or "",
        specs=[RequestSpec(**prompt, **common, seed=seed) for prompt in prompts for seed in seeds],
        stream=body.flag("stream"),
        n=count,
        include_usage=stream_options(body),
    )
    body.ignore(*options.IGNORED)
    body.refuse("echo", "the answer holds generated text only; put the prompt before it yourself", allowed=[False])
    body.refuse("suffix", "text is only continued, not filled in")
    body.refuse("logit_bias", "the sampler has no biases for single tokens")
    body.refuse("best_of", "it must not exceed n", allowed=range(count + 1))
    body.finish()
    return asked


def _prompts(value: Any, config: GatewayConfig) -> list[dict[str, Any]]:
    """Each prompt as the field of a spec that holds it."""
    if value is None:
        raise invalid("prompt is required", "prompt", "missing_required_parameter")
    if isinstance(value, str) or (isinstance(value, list) and value and all(_is_id(item) for item in value)):
        value = [value]
    if not isinstance(value, list) or not 1 <= len(value) <= config.max_choices:
        message = f"prompt must be a string, token ids, or an array of 1 to {config.max_choices} of those"
        raise invalid(message, "prompt")
    found: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"prompt[{index}]"
        if isinstance(item, str) and item:
            check_text(item, config, where)
            found.append({"prompt": item})
        elif isinstance(item, list) and 1 <= len(item) <= MAX_TOKENS and all(_is_id(token) for token in item):
            found.append({"token_ids": item})
        else:
            raise invalid(f"{where} must be a string that is not empty, or an array of token ids", "prompt")
    return found


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 20


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    token_chars: int = 0
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    finish: str | None = None
    usage: dict[str, int] = field(default_factory=dict)


class CompletionAnswer:
    """Chunks and completion of one request of any number of prompts and answers."""

    sequence = 0

    def __init__(self, asked: Asked, requests: Sequence[str], model: str) -> None:
        self._asked = asked
        self._choices = [_Choice() for _ in requests]
        self._with_logprobs = asked.specs[0].logprobs is not None
        self._head = {"created": created_at(requests[0]), "model": model}
        self._id = f"cmpl-{requests[0]}"

    def push(self, index: int, event: Event) -> list[Chunk]:
        choice = self._choices[index]
        if event.kind == "delta":
            logprobs = self._logprobs(choice, event)
            choice.text.append(event.text)
            return [self._chunk(index, event.text, logprobs)] if event.text or logprobs else []
        if event.kind != "end":
            return []
        reason = str(event.data.get("reason", ""))
        choice.usage = dict(event.data.get("usage") or {})
        if event.state != "done":
            raise of_end(str(event.state), reason)
        choice.finish = reason
        return [self._chunk(index, "", None, reason)]

    def closing(self) -> list[Chunk]:
        return [self._object([], usage=self._usage(), timings=self._timings())] if self._asked.include_usage else []

    def result(self) -> Chunk:
        choices = [
            {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": choice.logprobs or None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(self._choices)
        ]
        return self._object(choices, usage=self._usage(), timings=self._timings())

    def _logprobs(self, choice: _Choice, event: Event) -> dict[str, Any] | None:
        entries = event.data.get("lp") or ()
        if not self._with_logprobs or not entries:
            return None
        found = completion_logprobs(entries, choice.token_chars)
        choice.token_chars += sum(map(len, found["tokens"]))
        for name, values in found.items():
            choice.logprobs.setdefault(name, []).extend(values)
        return found

    def _chunk(self, index: int, text: str, logprobs: Any, finish: str | None = None) -> Chunk:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
        return self._object([choice], **({"usage": None} if self._asked.include_usage else {}))

    def _usage(self) -> dict[str, Any]:
        usages, n = [choice.usage for choice in self._choices], self._asked.n
        return completion_usage([usages[at : at + n] for at in range(0, len(usages), n)])

    def _timings(self) -> dict[str, float]:
        return timings_ms(self._choices[0].usage)

    def _object(self, choices: list[Any], **extra: Any) -> Chunk:
        return {"id": self._id, "object": "text_completion", **self._head, "choices": choices, **extra}
