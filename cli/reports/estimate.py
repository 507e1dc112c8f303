"""`specstop estimate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..console.output import output, print_json, table
from ..options.shared import Json, ProfileFile, Seed, Traces

if TYPE_CHECKING:
    from ...train.off_policy.estimate import Offline

NAMES = {"ipw": "inverse propensity", "snipw": "self-normalised", "dm": "direct method", "dr": "doubly robust"}
COLUMNS = ("estimator", "tokens a round", "ms a round", "tokens/s", "net tokens", "vs logging policy")


def estimate(
    traces: Traces,
    profile: ProfileFile,
    policy: Annotated[str, typer.Option(help="What to estimate: fixed:4, a policy folder, or plugin?key=value.")],
    logging_policy: Annotated[
        str | None,
        typer.Option(
            help="Policy that the trace was recorded under; default: as the trace names it, if that is a built-in one."
        ),
    ] = None,
    rho: Annotated[
        float | None,
        typer.Option(help="Rate in tokens a second at which net tokens count time; default: the logging policy's."),
    ] = None,
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Estimate a policy's rounds from a live trace of another policy that explored."""
    from ...policies.profile import Profile

    costs = Profile.load(profile)  # report an invalid profile before torch is imported
    from ...policies.registry import load_policy
    from ...train.off_policy.estimate import estimate_offline
    from ...train.replay.traces.checking import load_traces

    found = estimate_offline(
        load_traces(traces),
        load_policy(policy),
        costs,
        logging=load_policy(logging_policy) if logging_policy else None,
        rho=rho,
        seed=seed,
    )
    if json:
        print_json(found.to_dict())
    else:
        _show(found)


def _show(found: Offline) -> None:
    """Print the table, what it rests on, and the caveats."""
    rows = []
    for line in found.lines:
        cells = [line.tokens.text(), line.seconds.times(1e3).text(), line.rate.text(1)]
        rows.append([NAMES[line.name], *cells, line.net.text(), line.to_logging.text()])
    recorded = f"recorded under {found.logging or 'an unnamed policy'}, {found.explore:.0%} explored"
    table(f"{found.policy}, by rounds {recorded}; {found.facts['intervals']}", COLUMNS, rows)
    say = output().print
    say(
        f"{found.rounds} rounds of {found.prompts} prompts; {found.shown:.0%} show this policy, {found.by_exploration} of "
        f"them by exploration alone; worth {found.effective_rounds:.0f} rounds. Net tokens: tokens less seconds at "
        f"{found.rho:.1f} tokens/s."
    )
    for caveat in found.caveats:
        say(f"- {caveat}")
