"""Messages, tools and formats of a chat, as the engine's templates take them.

Kept: what leaves here has passed the engine's own check of messages, so a bad list is refused before it is queued.
Not promised: that a model was trained for tools; they are handed to its template, and it may ignore them.
"""

from __future__ import annotations

from typing import Any

from broker.gateway.body import Body
from broker.gateway.config import GatewayConfig
from broker.gateway.errors import invalid
from prism_core.errors import InvalidRequest
from prism_core.tokenizer.messages import normalise

__all__ = ["check_format", "check_messages", "check_text", "tool_variables"]

MAX_TOOLS = 128


def check_messages(messages: list[Any], config: GatewayConfig, param: str = "messages") -> list[dict[str, Any]]:
    """The engine's form of `messages`; 400 names the message."""
    if not messages:
        raise invalid(f"{param} must not be empty", param)
    if len(messages) > config.max_messages:
        raise invalid(f"{param} has {len(messages)} entries; the limit is {config.max_messages}", param)
    try:
        checked = normalise(messages)
    except InvalidRequest as error:
        raise invalid(str(error), param) from None
    for index, message in enumerate(checked):
        check_text(message["content"], config, f"{param}[{index}].content")
    return checked


def check_text(text: str, config: GatewayConfig, param: str) -> None:
    """400 for text over the limit of one message, or that is no Unicode."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise invalid(f"{param} is no valid Unicode text: {error.reason} at character {error.start}", param) from None
    if size > config.max_message_bytes:
        raise invalid(f"{param} has {size} bytes; the limit is {config.max_message_bytes}", param)


def tool_variables(body: Body, *, flat: bool = False) -> dict[str, Any]:
    """`{"tools": [...]}` for the template, or {} if there are none or `tool_choice` is "none".

    `flat`: the tools come in the Responses API's form. A choice that must be enforced is refused: nothing here keeps a
    model from answering otherwise.
    """
    tools = body.array("tools", most=MAX_TOOLS) or []
    found = [_tool(tool, f"tools[{index}]", flat) for index, tool in enumerate(tools)]
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        message = 'tool_choice must be "auto" or "none": this pool cannot make a model call a tool'
        raise invalid(message, "tool_choice", "unsupported_parameter")
    return {"tools": found} if found and choice != "none" else {}


def _tool(tool: Any, where: str, flat: bool) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        raise invalid(f'{where} must be an object of type "function": no other tools exist here', where)
    function = {name: value for name, value in tool.items() if name != "type"} if flat else tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise invalid(f"{where} must have a function with a name", where)
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise invalid(f"{where}: parameters must be an object (a JSON schema)", where)
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": kept}


def check_format(value: Any, param: str) -> None:
    """A response format other than plain text is refused: nothing here makes a model keep to a grammar."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "text":
        message = f'{param} must be {{"type": "text"}}: this pool does not constrain answers to JSON or a schema'
        raise invalid(message, param, "unsupported_parameter")
