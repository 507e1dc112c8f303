"""`specstop compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console.output import output, print_json, table
from ..options.shared import Json, Seed

if TYPE_CHECKING:
    from ...train.report.comparing.compare import Comparison, Difference

COLUMNS = ("policy", "tokens/s, A", "tokens/s, B", "vs best fixed, A", "vs best fixed, B", "overlap")


def compare(
    a: Annotated[Path, typer.Argument(help="A report of `specstop evaluate`: its folder, or report.json.")],
    b: Annotated[Path, typer.Argument(help="The report to set beside it.")],
    seed: Seed = 0,
    json: Json = False,
) -> None:
    """Set two reports side by side: what changed by policy, how sure that is, and what else differs."""
    from ...train.report.comparing.compare import compare as run

    found = run(a, b, seed=seed)
    if json:
        print_json(found.to_dict())
    else:
        _show(found)


def _show(found: Comparison) -> None:
    """Print the lines, what B / A is, what its intervals leave out, and what else differs."""
    from ...train.report.comparing.compare import PAIRED, SAME

    is_paired = found.method == PAIRED
    # On one profile tokens/s say it all: no pace can have changed.
    over_best = not is_paired or found.profiles != SAME
    heads = (*COLUMNS, *["B / A"] * is_paired, *["B / A, vs best fixed"] * over_best)
    table(f"A: {found.a}   B: {found.b}", heads, [_cells(line, is_paired, over_best) for line in found.lines])
    if is_paired:
        output().print(f"B / A: tokens/s, paired {found.why}")
    if over_best:
        over = (
            "a change of pace that all rounds share cancels"
            if is_paired
            else f"unpaired, as of independent prompts ({found.why})"
        )
        output().print(f"B / A, vs best fixed: ratio to the best fixed length of each report; {over}")
    for caveat in found.caveats:
        output().print(caveat)
    if found.differs:
        table("The reports differ in", ("what", "A", "B"), found.differs)
    else:
        output().print("Traces, temperature, pair and profile are the same.")


def _cells(line: Difference, is_paired: bool, over_best: bool) -> tuple[str, ...]:
    rates = ("-" if rate is None else f"{rate:.1f}" for rate in (line.rate_a, line.rate_b))
    gains = [line.gain] * is_paired + [line.gain_over_best] * over_best
    to_best_a, to_best_b, *ratios = (
        "-" if ratio is None else ratio.text() for ratio in (line.to_best_a, line.to_best_b, *gains)
    )
    overlap = "-" if line.overlap is None else "yes" if line.overlap else "no"
    return (line.name, *rates, to_best_a, to_best_b, overlap, *ratios)
