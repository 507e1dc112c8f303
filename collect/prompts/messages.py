"""What a column of prompts holds: a text, turns, chat messages, or a text in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT_PARTS = ("text", "input_text")
_USER = ("user", "human")


def prompt_text(value: Any) -> tuple[str, str]:
    """Return (system message, text) of a value.

    Args:
        value: a text; turns, of which the first is taken; messages with role and content, or from and value (ShareGPT), of
            which the first one of the user is taken, and the system message. Contents may be lists of text parts.

    Raises:
        ValueError: it is none of these; the message says what it is.
    """
    if not isinstance(value, list):
        return "", _content(value)
    if not value:
        raise ValueError("an empty list")
    if not all(isinstance(one, Mapping) for one in value):
        return "", _content(value[0])
    if all("content" in one or "value" in one for one in value):
        return _conversation(value)
    if all("type" in one for one in value):
        return "", _content(value)
    names = ", ".join(map(str, value[0])) or "nothing"
    raise ValueError(f"a list of objects with {names}; messages have role and content, or from and value")


def _conversation(messages: list[Mapping[str, Any]]) -> tuple[str, str]:
    roles = [str(one.get("role", one.get("from"))) for one in messages]
    contents = [one["content"] if "content" in one else one["value"] for one in messages]
    user = next((at for at, role in enumerate(roles) if role in _USER), None)
    if user is None:
        raise ValueError(f"messages of {', '.join(dict.fromkeys(roles))} alone; one of a user is required")
    system = contents[roles.index("system")] if "system" in roles else None
    return "" if system is None else _content(system), _content(contents[user])


def _content(value: Any) -> str:
    """Return a text, or the texts of a list of parts with newlines between."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(_kind(value))
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_PARTS:
            raise ValueError(f"a part of type {kind!r}; only parts of type text can be read, leave such prompts out")
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValueError(f"a part with {_kind(text)} as its text")
        texts.append(text)
    return "\n".join(texts)


def _kind(value: Any) -> str:
    """Return what a value is, in words."""
    if isinstance(value, list):
        return f"a list of {type(value[0]).__name__}" if value else "an empty list"
    return f"a value of type {type(value).__name__}" if not isinstance(value, Mapping) else "an object"
