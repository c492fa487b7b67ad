"""How to generate: the parameters that all endpoints share, as fields of a `RequestSpec`.

Kept: OpenAI's names, ranges and defaults (temperature 1, top_p 1), plus `top_k`, `min_p`, `repetition_penalty` and
`chat_template_kwargs`, which other servers have under these names too.
"""

from __future__ import annotations

from typing import Any

from broker.gateway.body import Body
from broker.gateway.errors import invalid
from broker.spec import MAX_STOP_CHARS, MAX_STOPS, MAX_TOKENS

__all__ = ["max_tokens", "sampling", "seeds", "stops", "template_variables"]

MAX_SEED = (1 << 64) - 1
SMALLEST_TOP_P = 1e-9
"""What a `top_p` of 0 means: the one best token."""

IGNORED = (
    *("user", "metadata", "store", "safety_identifier", "service_tier", "parallel_tool_calls"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields of OpenAI's that say who asks or how to bill, cache and keep; they have no effect here."""


def sampling(body: Body) -> dict[str, Any]:
    """Temperature, filters and penalties."""
    temperature = body.number("temperature", 0, 2)
    top_p = body.number("top_p", 0, 1)
    top_k = body.integer("top_k", -1, 1 << 20)
    options = {
        "temperature": 1.0 if temperature is None else temperature,
        "top_p": 1.0 if top_p is None else max(top_p, SMALLEST_TOP_P),
        "top_k": max(0, top_k or 0),
        "min_p": body.number("min_p", 0, 1) or 0.0,
        "presence_penalty": body.number("presence_penalty", -2, 2) or 0.0,
        "frequency_penalty": body.number("frequency_penalty", -2, 2) or 0.0,
    }
    repetition = body.number("repetition_penalty", 0, 100)
    if repetition is not None:
        if repetition == 0:
            raise body.fail("repetition_penalty", "a number above 0 up to 100")
        options["repetition_penalty"] = repetition
    return options


def max_tokens(body: Body, *names: str, default: int | None) -> int | None:
    """The first of `names` that is given; None: as many as the context leaves."""
    given = [body.integer(name, 1, MAX_TOKENS) for name in names]
    return next((value for value in given if value is not None), default)


def stops(body: Body) -> list[str]:
    """`stop` as a list."""
    value = body.get("stop")
    found = [value] if isinstance(value, str) else value or []
    what = f"a string, or an array of at most {MAX_STOPS}, of 1 to {MAX_STOP_CHARS} characters"
    if not isinstance(found, list) or len(found) > MAX_STOPS:
        raise body.fail("stop", what)
    for text in found:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise body.fail("stop", what)
    return found


def seeds(body: Body, count: int) -> list[int | None]:
    """A seed for each of `count` answers: seed, seed + 1, ... (each draws its own if there is none)."""
    seed = body.integer("seed", -(1 << 63), MAX_SEED)
    return [None if seed is None else (seed + index) & MAX_SEED for index in range(count)]


def template_variables(body: Body) -> dict[str, Any]:
    """`chat_template_kwargs`: variables for the model's chat template, such as `enable_thinking`."""
    variables = body.object("chat_template_kwargs") or {}
    if "tools" in variables or "messages" in variables:
        raise invalid("chat_template_kwargs must not set tools or messages: they have parameters of their own")
    return dict(variables)
