"""The prompts of a run, kept in its folder as they were read and written through a chat template.

A run goes on with these: a template may write today's date, and a pipe is read only once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...policies.errors import InputError, TraceError
from ..store.folder import PROMPTS_FILE
from ..store.staging import put
from .files import is_stream, lines
from .tokens import Prompt

_OPTIONS = "options"


def kept_text(prompts: Sequence[Prompt], options: Mapping[str, Any]) -> str:
    """Return the contents of the file: a line with the options that chose the prompts, and a line for each."""
    values = [{_OPTIONS: dict(options)}, *map(dataclasses.asdict, prompts)]
    return "".join(json.dumps(value) + "\n" for value in values)


def kept_prompts(folder: Path, options: Mapping[str, Any]) -> list[Prompt] | None:
    """Return the prompts of a run; None if it has none, or they were chosen by other options.

    Args:
        folder: of the trace.
        options: that choose prompts.

    Raises:
        TraceError: the file is damaged.
    """
    path = folder / PROMPTS_FILE
    if not path.is_file():
        return None
    try:
        first, *rest = (json.loads(line) for _, line in lines(path))
        if first[_OPTIONS] != json.loads(json.dumps(dict(options))):
            return None
        return [Prompt(**{**raw, "completion": _completion(raw["completion"])}) for raw in rest]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"--resume: {path} is damaged ({error}); collect the trace again") from None


def keep_prompts(folder: Path, prompts: Sequence[Prompt], options: Mapping[str, Any]) -> list[Prompt]:
    """Keep the prompts of a run unless another process has done so, and return those that are kept.

    If other options chose those that are there, the given ones are returned: the header tells whether they are the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / PROMPTS_FILE, kept_text(prompts, options), once=True)
    kept = kept_prompts(folder, options)
    return list(prompts) if kept is None else kept


def require_stored(source: str | None) -> None:
    """Refuse a pipe as the source of several processes.

    Raises:
        InputError: it is one.
    """
    if source is not None and is_stream(source):
        raise InputError(
            f"--prompts {source}: expected a file or a data set, which each of several processes can read; write the prompts "
            "into a file first"
        )


def _completion(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
