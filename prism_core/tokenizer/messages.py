"""Chat messages as clients send them, checked and brought into the one form that templates expect.

Invariant: what leaves here is a list of dicts with a known `role` and a string `content`, free of what the caller may
change later. Other fields pass through untouched for the templates that know them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from reprlib import repr as show
from typing import Any, Final

from prism_core.errors import InvalidRequest

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES: Final = 16_384


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies; InvalidRequest names the message and the field.

    Text parts (`[{"type": "text", "text": ...}]`) are joined by newlines, absent content becomes "", fields that are
    None are left out, and tool arguments given as a JSON object in a string become that object.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages must be a list, not {type(messages).__name__}")
    if not messages:
        raise InvalidRequest("messages is empty")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are accepted")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object with role and content, not {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role is {show(role)}; it must be one of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": role}
    for name, value in message.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"{where} has a field name that is no string: {show(name)}")
        if value is not None:
            out[name] = value
    calls = out.get("tool_calls")
    if calls == [] or calls == ():
        del out["tool_calls"]
        calls = None
    if calls is not None:
        if role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls belongs to assistant messages, not to {role!r}")
        out["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    if "content" not in out and calls is None and "reasoning_content" not in out:
        raise InvalidRequest(f"{where} has no content")
    out["content"] = _content(out.get("content", ""), f"{where}.content")
    return out


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest(f"{where} must be a string or a list of text parts, not {type(content).__name__}")
    texts: list[str] = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{where}[{index}] must be an object with type and text, not {type(part).__name__}")
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text", "output_text"):
            raise InvalidRequest(f"{where}[{index}].type is {show(kind)}; this model takes text only")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{index}].text must be a string, not {type(text).__name__}")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, (list, tuple)):
        raise InvalidRequest(f"{where} must be a list, not {type(calls).__name__}")
    out: list[dict[str, Any]] = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidRequest(f"{where}[{index}] must be an object with function.name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _object_or_text(arguments)
        elif not isinstance(arguments, Mapping):
            raise InvalidRequest(
                f"{where}[{index}].function.arguments must be an object or its JSON, not {type(arguments).__name__}"
            )
        out.append({"type": "function", **call, "function": {**function, "arguments": arguments}})
    return out


def _object_or_text(arguments: str) -> Any:
    """Templates print arguments as JSON themselves; what is no object (the model erred) is passed as it stands."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
