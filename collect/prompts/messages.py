"""Values of a prompt column: a text, a list of turns, chat messages, or a list of text parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT_PARTS = ("text", "input_text")
_USER = ("user", "human")


def prompt_text(value: Any) -> tuple[str, str]:
    """Return the system message and the prompt text of a value.

    Args:
        value: a text, a list of turns, or a list of messages with keys role and content, or from and value (ShareGPT). The
            first turn or the first user message is the prompt. Contents may be lists of text parts.

    Raises:
        ValueError: the value has another form; the message describes it.
    """
    if not isinstance(value, list):
        return "", _content(value)
    if not value:
        raise ValueError("an empty list")
    if not all(isinstance(item, Mapping) for item in value):
        return "", _content(value[0])
    if all("content" in item or "value" in item for item in value):
        return _conversation(value)
    if all("type" in item for item in value):
        return "", _content(value)
    names = ", ".join(map(str, value[0])) or "nothing"
    raise ValueError(f"a list of objects with {names}; messages have role and content, or from and value")


def _conversation(messages: list[Mapping[str, Any]]) -> tuple[str, str]:
    roles = [str(message.get("role", message.get("from"))) for message in messages]
    contents = [message["content"] if "content" in message else message["value"] for message in messages]
    user = next((index for index, role in enumerate(roles) if role in _USER), None)
    if user is None:
        raise ValueError(f"only messages of {', '.join(dict.fromkeys(roles))}; a user message is required")
    system = contents[roles.index("system")] if "system" in roles else None
    return "" if system is None else _content(system), _content(contents[user])


def _content(value: Any) -> str:
    """Return a text, or the texts of a list of parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(_kind(value))
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            raise ValueError(f"a part of type {kind!r}; only parts of type text are supported, remove such prompts")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a part with {_kind(text)} as its text")
        texts.append(text)
    return "\n".join(texts)


def _kind(value: Any) -> str:
    """Return a description of a value's type for messages."""
    if isinstance(value, list):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return f"a value of type {type(value).__name__}" if not isinstance(value, Mapping) else "an object"
