"""`specstop combine`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...policies.errors import InputError
from ..console.output import next_step, output, print_json, progress_bars, table
from ..options.shared import Json, Policies, Quiet

if TYPE_CHECKING:
    from ...train.report.comparing.drafters import BothChoice


def combine(
    *,
    first: Annotated[Path, typer.Option(help="Traces of the drafter that costs nothing: suffix, lookup or a plugin.")],
    other: Annotated[Path, typer.Option(help="Traces of the other drafter, over the same prompts.")],
    first_profile: Annotated[Path, typer.Option(help="Latency profile of the first drafter.")],
    other_profile: Annotated[Path, typer.Option(help="Latency profile of the other one.")],
    first_test: Annotated[
        Path | None, typer.Option(help="Traces of the first drafter over test prompts, to say what the choice gives.")
    ] = None,
    other_test: Annotated[Path | None, typer.Option(help="The same of the other one.")] = None,
    policy: Policies = [],  # noqa: B006
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say from dense traces of two drafters which to use, or both, and from which chance on the first drafts.

    All figures are replayed: put together row by row the two traces are the trace of both. Without --policy every fixed
    length is tried.
    """
    from ...policies.profile import Profile

    if (first_test is None) != (other_test is None):
        given, lacks = ("--first-test", "--other-test") if other_test is None else ("--other-test", "--first-test")
        raise InputError(f"{lacks}: expected test traces of both drafters, but only {given} was given")
    profiles = Profile.load(first_profile, "--first-profile"), Profile.load(other_profile, "--other-profile")
    from ...decode.drafters.spec import needs_draft
    from ...policies.registry import load_policy
    from ...train.replay.traces.arrays import TraceArrays, trace_arrays
    from ...train.replay.traces.checking import load_traces, tell_other_rounds
    from ...train.report.comparing.drafters import choose_both

    def read(one: Path, another: Path) -> tuple[TraceArrays, TraceArrays]:
        return trace_arrays(load_traces(one)), trace_arrays(load_traces(another))

    fit = read(first, other)
    for arrays, profile in zip(fit, profiles, strict=True):
        tell_other_rounds(profile, arrays.header)
    with progress_bars(quiet or json) as progress:
        held = read(first_test, other_test) if first_test is not None and other_test is not None else None
        found = choose_both(fit, profiles, held, [load_policy(spec) for spec in policy], progress=progress)
    if json:
        print_json(_facts(found))
        return
    _show(found, "test prompts" if held else "the prompts that were chosen on")
    if found.spec in found.alone:
        at = list(found.alone).index(found.spec)
        next_step(
            "train", "--traces", (first, other)[at], "--profile", (first_profile, other_profile)[at], "--out", "policy"
        )
        return
    draft = ("--draft", "D") if needs_draft(found.spec) else ()
    next_step("collect", "--target", "T", *draft, "--drafter", found.spec, "--prompts", "PROMPTS", "--out", "traces")


def _facts(found: BothChoice) -> dict[str, Any]:
    return {
        "drafter": found.spec,
        "policy": found.policy_name,
        "tokens_per_s": found.rate,
        "alone": found.alone,
        "over_the_better": dataclasses.asdict(found.over),
        "intervals": found.intervals,
        "tried": {name: one.rates for name, one in found.tried.items()},
    }


def _show(found: BothChoice, where: str) -> None:
    """Print tokens a second by policy and chance on the texts that were chosen on, and what the choice gives."""
    sures = list(next(iter(found.tried.values())).rates)
    rows = [
        (name, f"{one.first:.0f}", f"{one.other:.0f}", *(f"{one.rates[sure]:.0f}" for sure in sures))
        for name, one in found.tried.items()
    ]
    heads = ("policy", "first alone", "other alone", *(f"{sure:g}" for sure in sures))
    table("Tokens/s, the first one drafting from a chance of ... on", heads, rows)
    alone = [(name, f"{rate:.0f}", "", "") for name, rate in found.alone.items() if name != found.spec]
    chosen = (found.spec, f"{found.rate:.0f}", found.policy_name, found.over.text())
    table(f"On {where}", ("drafter", "tokens/s", "policy", "of the better one alone"), [*alone, chosen])
    output().print(f"Interval: {found.intervals}")
    output().print(f"Draft with --drafter {found.spec}")
