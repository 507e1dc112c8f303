"""`specstop demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..console.output import output, print_json, progress_bars, table
from ..options.config import config_saved
from ..options.models import quiet_libraries
from ..options.shared import Json, Overwrite, Quiet, Seed, Temperature, Verification

if TYPE_CHECKING:
    from ...train.demo.demo import Demo
    from ...train.demo.live import LiveLine


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default: specstop-demo, numbered if taken.")
    ] = None,
    pair: Annotated[
        Path | None, typer.Option(help="A pair made by benchmarks/make_pair.py; default: the embedded one.")
    ] = None,
    temperature: Temperature = 0.0,
    verification: Verification = "auto",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the whole pipeline on the embedded pair: collect, train, evaluate, decode live."""
    from ...train.demo.demo import demo as run

    quiet_libraries()
    folder = out or _free(Path("specstop-demo"))
    with progress_bars(quiet or json) as progress, config_saved(folder):
        result = run(
            folder, pair=pair, temperature=temperature, verification=verification, seed=seed, overwrite=overwrite,
            progress=progress,
        )  # fmt: skip
    if json:
        print_json(
            {
                "report": result.report.to_dict(),
                "live": [_record(line) for line in result.live],
                "out": str(folder),
            }
        )
        return
    show(result)


def _free(base: Path) -> Path:
    """Return the first of base, base-2, base-3, ... that is not taken."""
    names = (base if n == 1 else base.with_name(f"{base.name}-{n}") for n in range(1, 1000))
    return next(p for p in names if not p.exists())


def _record(line: LiveLine) -> dict[str, object]:
    return {
        "policy": line.name,
        "tokens_per_s": line.tally.tokens_per_s,
        "measured": line.measured,
        "predicted": line.predicted,
        "miss": line.miss,
        "same_text": line.same_text,
    }


def show(result: Demo) -> None:
    """Print the report, the live comparison and where everything is."""
    from ..reports.evaluate import show_report

    show_report(result.report)
    texts = result.live[0].tally.texts
    rows = [
        (
            line.name,
            f"{line.tally.tokens_per_s:.1f}",
            f"{line.predicted:.3f}",
            f"{line.measured:.3f}",
            f"{100 * line.miss:+.1f}%",
            f"{line.spread[0]:.2f} to {line.spread[1]:.2f}",
            *([] if line.same_text is None else [f"{line.same_text} of {texts}"]),
        )
        for line in result.live
    ]
    columns = (
        "policy, live",
        "tokens/s",
        "predicted",
        "measured",
        "miss",
        "quartiles over prompts",
        *([] if result.live[0].same_text is None else ["same text as plain"]),
    )
    table(f"Live on {texts} held-out prompts, as ratio to plain decoding", columns, rows)
    folder = result.folder
    output().print(
        f"In {folder}: traces-train, traces-test, profile.json, policies/, report/ (open report.html; also .md, .json, "
        ".csv and .png).\n"
        f"Try: specstop decode --policy {folder}/policies/mlp   or   specstop info {folder}/traces-test"
    )
