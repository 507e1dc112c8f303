"""What several commands do: read prompts and batch sizes, show numbers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..policies.arguments import check_limits
from ..policies.errors import InputError
from .console.streams import say

if TYPE_CHECKING:
    from ..collect.prompts.read import Prompt
    from ..decode.models.pair import Pair
    from ..decode.settings import Settings
    from ..policies.errors import PolicyFailure


PHASES = {"outside": "framework overhead"}
"""What phases of a round are called for people, where that is not their name."""


def piped_prompt() -> str | None:
    """Return standard input as one prompt, without its last newline; None if it is a terminal, closed or empty."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except OSError:  # closed, or not readable
        return None
    except UnicodeDecodeError as error:
        raise InputError(f"standard input: expected UTF-8 text: {error}") from None
    return text.removesuffix("\n") if text.strip() else None


def say_defaults(pair: Pair, settings: Settings) -> None:
    """Name the sampling defaults of the target that a run has, on standard error."""
    from ..decode.settings import inherited_text

    if text := inherited_text(pair, settings):
        say(f"{text} (--no-model-defaults leaves them out)")


def find_prompts(path: Path | None, demo: Path | None, side: str, limit: int | None) -> list[Prompt]:
    """Read prompts from `path`, or the shipped pair's own ("train" or "test")."""
    from ..collect.prompts.read import read_prompts

    if path is None and demo is None:
        raise InputError("--prompts: expected a JSON Lines file; only the shipped pair brings prompts of its own")
    return read_prompts(path if path is not None else Path(str(demo)) / f"prompts-{side}.jsonl", limit)


def fitting(
    prompts: list[Prompt], pair: Pair, new_tokens: int, chat: bool, long: str
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that a pair can read with so many new tokens, and their token ids (`prompts.tokens.fit`)."""
    from ..collect.prompts.read import apply_chat_template, fit

    written = apply_chat_template(prompts, pair.tokenizer) if chat else prompts
    return fit(written, pair.tokenizer, pair.readable - new_tokens, long)


def check_failures(failures: Sequence[PolicyFailure]) -> None:
    """Fail where a policy did, after the results are printed.

    Raises:
        PolicyFailure: the first one.
    """
    if failures:
        raise failures[0]


def batch_sizes(text: str | None) -> tuple[int, ...]:
    """Return the batch sizes in a list such as `1,2,4,8`, each once, rising; none of None."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 for word in words):
        raise InputError(f"--batch: expected batch sizes such as 1,2,4,8, not {text[:40]!r}")
    sizes = tuple(sorted({int(word) for word in words}))
    for size in sizes:
        check_limits(batch=size)
    return sizes


def percent(part: float, whole: float) -> str:
    """Return `part` of `whole` as a percentage."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    """Return a mapping as table rows."""
    return [(name, _plainly(value)) for name, value in values.items()]


def _plainly(value: Any) -> str:
    """Return a value as people read it: four digits of a number, a mapping without its brackets."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plainly(inner)}" for name, inner in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
