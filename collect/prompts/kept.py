"""Prompts stored in the folder of a run, as read and rendered with the chat template.

A resumed run uses the stored prompts, because a template may insert the current date and a pipe can be read only once.
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
    """Return the file contents: one line with the options that selected the prompts, then one line per prompt."""
    values = [{_OPTIONS: dict(options)}, *map(dataclasses.asdict, prompts)]
    return "".join(json.dumps(value) + "\n" for value in values)


def kept_prompts(folder: Path, options: Mapping[str, Any]) -> list[Prompt] | None:
    """Load the stored prompts of a run. Return None if there are none, or if they were selected with other options.

    Args:
        folder: folder of the trace.
        options: options that select prompts.

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
    """Store the prompts of a run, unless another process has stored them, and return the stored prompts.

    If the stored prompts were selected with other options, `prompts` is returned. The header check then compares the two.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / PROMPTS_FILE, kept_text(prompts, options), once=True)
    kept = kept_prompts(folder, options)
    return list(prompts) if kept is None else kept


def require_stored(source: str | None) -> None:
    """Check that the source of the prompts is not a pipe, which several processes cannot share.

    Raises:
        InputError: the source is a pipe.
    """
    if source is not None and is_stream(source):
        raise InputError(
            f"--prompts {source}: expected a file or a data set, because several processes read the prompts, got a pipe; "
            "write the prompts to a file first"
        )


def _completion(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
