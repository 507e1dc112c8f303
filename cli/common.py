"""What several commands do first: find the pair, read the prompts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..policies import kernels
from ..policies.errors import InputError
from ..policies.limits import check_limits
from ..policies.progress import Progress, silent

if TYPE_CHECKING:
    from ..collect.prompts.read import Prompt
    from ..decode.models.pair import Pair


PHASES = {"outside": "framework overhead"}
"""What phases of a round are called for people, where that is not their name."""


def quiet_libraries() -> None:
    """Keep loading bars and advice of transformers and datasets off the console."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def find_target(
    target: str | None, draft: str | None, drafter: str, progress: Progress = silent
) -> tuple[str, str | None, Path | None]:
    """Do as `find_pair`, but with a target alone where candidates come from elsewhere than a draft model."""
    from ..decode.drafters.find import needs_draft

    if target is not None and not needs_draft(drafter):
        kernels.load(progress)
        return target, None, None
    return find_pair(target, draft, progress)


def find_pair(target: str | None, draft: str | None, progress: Progress = silent) -> tuple[str, str, Path | None]:
    """Return the names of target and draft, and the folder of the demo pair where it stands in for them."""
    if (target is None) != (draft is None):
        raise InputError("expected both --target and --draft, or neither for the demo pair")
    kernels.load(progress)
    if target is not None and draft is not None:
        return target, draft, None
    from ..train.demo.pair import demo_pair

    folder = demo_pair(progress=progress)
    return str(folder / "target"), str(folder / "draft"), folder


def open_pair(
    target: str,
    draft: str | None,
    device: str,
    dtype: str,
    engine: str = "auto",
    drafter: str = "model",
    device_map: str | None = None,
) -> Pair:
    """Load both models, or the target and a drafter in the place of the draft, without the libraries' own output."""
    from ..decode.drafters.find import needs_draft, with_drafter
    from ..decode.models.pair import load_pair

    quiet_libraries()
    small = draft if needs_draft(drafter) else None
    pair = load_pair(target, small, device=device, dtype=dtype, engine=engine, device_map=device_map)
    return with_drafter(pair, drafter)


def find_prompts(path: Path | None, demo: Path | None, side: str, limit: int | None) -> list[Prompt]:
    """Read prompts from `path`, or the demo pair's own ("train" or "test")."""
    from ..collect.prompts.read import read_prompts

    if path is None and demo is None:
        raise InputError("--prompts: expected a JSON Lines file; only the demo pair brings prompts of its own")
    return read_prompts(path if path is not None else Path(str(demo)) / f"prompts-{side}.jsonl", limit)


def fitting(
    prompts: list[Prompt], pair: Pair, new_tokens: int, chat: bool, long: str
) -> tuple[list[Prompt], list[list[int]]]:
    """Return the prompts that a pair can read with so many new tokens, and their token ids (`prompts.tokens.fit`)."""
    from ..collect.prompts.read import apply_chat_template, fit
    from ..collect.run import reading_room

    written = apply_chat_template(prompts, pair.tokenizer) if chat else prompts
    return fit(written, pair.tokenizer, reading_room(pair, new_tokens), long)


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
