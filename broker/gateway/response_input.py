"""`/v1/responses`: the body, and its input items as messages.

`instructions` are a system message before the input and are not carried on by `previous_response_id`, as in OpenAI's
API. What this pool has not is refused with its name: tools other than functions, prompts kept elsewhere, references to
items, automatic truncation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from broker.gateway import options
from broker.gateway.asked import Asked
from broker.gateway.body import Body
from broker.gateway.chat import stream_options
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import invalid
from broker.gateway.messages import check_format, check_messages, tool_variables
from broker.keys import check_id
from broker.spec import MAX_LOGPROBS, RequestSpec
from prism_core.errors import InvalidRequest

__all__ = ["API", "Context", "messages_of", "read_response"]

API = "responses"
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16


@dataclass(frozen=True)
class Context:
    """Where a response goes on from, told by its body before the rest is read."""

    previous: str | None
    conversation: str | None
    instructions: bool

    @classmethod
    def of(cls, value: object, header: str | None = None) -> Context:
        """`header`: the conversation that a header names, which the body's own goes before."""
        body = Body(value)
        previous, conversation = body.text("previous_response_id", most=128), _conversation(body) or header
        if previous is not None and conversation is not None:
            raise invalid("previous_response_id and conversation cannot be given together", "previous_response_id")
        return cls(previous, conversation, bool(body.get("instructions")))


def read_response(
    value: object, config: GatewayConfig, context: Context, past: list[dict[str, Any]] | None = None
) -> Asked:
    """The request of a body; `ApiError` (400) names the field at fault.

    `past`: the messages before the input, of the previous response or of the conversation; None if there are none, or
    if the conversation's own transcript is to be gone on with.
    """
    body = Body(value)
    given = body.get("input")
    if given is None:
        raise invalid("input is required", "input", "missing_required_parameter")
    instructions = body.text("instructions", most=config.max_message_bytes)
    system = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*system, *(past or []), *check_messages(messages_of(given, config), config, "input")]
    if len(messages) > config.max_messages:
        message = f"input and what comes before it make {len(messages)} messages; the limit is {config.max_messages}"
        raise invalid(message, "input")
    background = body.flag("background")
    _conversation(body)
    conversation = context.conversation
    note = {
        "api": API,
        "model": body.text("model") or "",
        "background": background,
        "instructions": bool(instructions),
        "previous": body.text("previous_response_id", most=128),
        "conversation": conversation,
        "metadata": _metadata(body),
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
    }
    spec = RequestSpec(
        messages=messages,
        max_tokens=options.max_tokens(body, "max_output_tokens", default=None),
        stop=options.stops(body),
        seed=options.seeds(body, 1)[0],
        logprobs=_logprobs(body),
        template=_template(body),
        history="append" if conversation and not system else "replace",
        note=note,
        **options.sampling(body),
    )
    asked = Asked(
        api=API,
        model=str(note["model"]),
        specs=[spec],
        stream=body.flag("stream"),
        background=background,
        conversation=conversation,
    )
    _rest(body)
    return asked


def _rest(body: Body) -> None:
    """The fields that only need a check."""
    stream_options(body)
    text = body.object("text")
    if text is not None:
        check_format(text.get("format"), "text.format")
    body.ignore(*options.IGNORED, "max_tool_calls")
    body.refuse("truncation", "input that is too long is an error", allowed=["disabled"])
    for name in ("prompt", "moderation", "image", "context_management", "access_programs", "background_options"):
        body.refuse(name, "this pool has no such service")
    body.finish()


def _logprobs(body: Body) -> int | None:
    include = body.array("include", most=16) or []
    for name in include:
        if name != LOGPROBS and name != "reasoning.encrypted_content":
            raise invalid(f"include: only {LOGPROBS!r} has anything to add here", "include", "unsupported_parameter")
    top = body.integer("top_logprobs", 0, MAX_LOGPROBS)
    return (top or 0) if LOGPROBS in include or top else None


def _template(body: Body) -> dict[str, Any]:
    variables = {**options.template_variables(body), **tool_variables(body, flat=True)}
    effort = (body.object("reasoning") or {}).get("effort")
    if isinstance(effort, str):
        variables.setdefault("reasoning_effort", effort[:32])
        if effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def _conversation(body: Body) -> str | None:
    value = body.get("conversation")
    name = value.get("id") if isinstance(value, dict) else value
    try:
        return None if name is None else check_id(name, "conversation")
    except InvalidRequest as error:
        raise invalid(str(error), "conversation") from None


def _metadata(body: Body) -> dict[str, str]:
    """Kept with the response and given back, as OpenAI's API does."""
    found = body.object("metadata") or {}
    fits = len(found) <= MAX_METADATA and all(
        len(name) <= 64 and isinstance(value, str) and len(value) <= 512 for name, value in found.items()
    )
    if not fits:
        raise body.fail("metadata", f"an object of at most {MAX_METADATA} short strings")
    return found


def messages_of(given: Any, config: GatewayConfig) -> list[dict[str, Any]]:
    """Input text or items as chat messages; neighbouring calls and answers of the assistant become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not 1 <= len(given) <= config.max_messages:
        raise invalid(f"input must be a string, or an array of 1 to {config.max_messages} items", "input")
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(f"{where} must be an object", where)
        kind = item.get("type") or "message"
        if kind == "reasoning":
            thought = _thought_of(item)
        elif kind == "function_call":
            thought = _add_call(messages, item, where, thought)
        elif kind == "function_call_output":
            output = item.get("output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if thought and message["role"] == "assistant":
                message["reasoning_content"], thought = thought, ""
            messages.append(message)
        else:
            message_text = f"{where}: items of type {str(kind)[:40]!r} are not supported"
            raise invalid(message_text, where, "unsupported_parameter")
    return messages


def _thought_of(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "\n".join(text for text in texts if isinstance(text, str))


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any], where: str, thought: str) -> str:
    """Adds a call of a function; returns the thought that still has no message."""
    if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
        raise invalid(f"{where} must have a name and arguments (JSON text)", where)
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item["name"], "arguments": item["arguments"]},
    }
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
        if thought:
            messages[-1]["reasoning_content"], thought = thought, ""
    messages[-1].setdefault("tool_calls", []).append(call)
    return thought
