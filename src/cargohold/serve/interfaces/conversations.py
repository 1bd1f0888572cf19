"""Conversations as clients write them, turned into what chat templates read."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from cargohold.serve.errors import invalid

ToolChoice = Literal["none", "auto", "required"] | dict[str, Any] | None


class Message(BaseModel):
    """One message. Fields that are not declared here say nothing to a template."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    def for_template(self, param: str) -> dict[str, Any]:
        """The message as templates know it. Raises ``ApiError`` for what is no text."""
        # Templates know the older name of that role.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": text_of(self.content, f"{param}.content")}
        if self.content is None and not self.tool_calls:
            raise invalid(f"{param} has no content", param)
        if self.tool_calls:
            message["tool_calls"] = [
                _call(call, f"{param}.tool_calls[{at}]") for at, call in enumerate(self.tool_calls)
            ]
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        return message


def text_of(content: str | list[dict[str, Any]] | None, param: str) -> str:
    """The text of a message's content, whose parts are joined. Raises ``ApiError`` for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type")
            raise invalid(
                f"{param}[{at}] is of type {kind!r:.40}: this server reads text only", param, "unsupported_content"
            )
    return "".join(part["text"] for part in content)


def _call(call: dict[str, Any], param: str) -> dict[str, Any]:
    """A call of a function. Clients send arguments as JSON in a string; templates want them as an object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{param}.function needs a name", param)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise invalid(f"{param}.function.arguments is no JSON", param) from error
    return {"type": "function", "id": call.get("id"), "function": {"name": function["name"], "arguments": arguments}}


def offered_tools(tools: list[dict[str, Any]] | None, choice: ToolChoice) -> list[dict[str, Any]] | None:
    """The tools that the model may call. Raises ``ApiError`` if it must call one: nothing here can make it."""
    if choice == "required" or isinstance(choice, dict):
        raise invalid("tool_choice: the model decides itself whether it calls a tool; use auto or none", "tool_choice")
    return None if choice == "none" else tools
