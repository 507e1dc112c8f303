"""`specstop demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.file_proxy import FileProxy

from ..console.interrupt import Interrupted
from ..console.output import output, print_json, progress_bars, table
from ..console.streams import results
from ..options.config import config_saved
from ..options.models import quiet_libraries
from ..options.shared import Json, Overwrite, Quiet, Seed, Temperature, Verification

if TYPE_CHECKING:
    from ...train.demo.demo import Demo
    from ...train.demo.live import LiveLine


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results. Default: specstop-demo, with a number if it exists.")
    ] = None,
    pair: Annotated[
        Path | None,
        typer.Option(help="Folder of a pair with prompts (benchmarks/make_pair.py). Default: the shipped pair."),
    ] = None,
    temperature: Temperature = 0.0,
    verification: Verification = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and policies: less than a minute.")] = False,
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run the whole pipeline on the shipped pair: collect, profile, train, evaluate, decode live.

    The same command continues a run that was interrupted.
    """
    from ...policies.files import prepare_output_dir, staging_path
    from ...train.demo.pair import check_pair

    folder = out or _unused(Path("specstop-demo"))
    prepare_output_dir(folder, overwrite=overwrite, inputs=[pair])  # bad input is refused before anything is printed
    if pair is not None:
        check_pair(pair)
    quiet_libraries()
    try:
        with progress_bars(quiet or json) as progress, config_saved(folder):
            progress("import libraries", 0, 1)
            from ...train.demo.demo import demo as run

            progress("import libraries", 1, 1)
            result = run(
                folder, pair=pair, temperature=temperature, verification=verification, quick=quick, seed=seed,
                overwrite=overwrite, progress=progress, announce=_ignore if quiet or json else _print_line,
            )  # fmt: skip
    except Interrupted as error:
        if staging_path(folder).exists():
            error.line += "; complete stages are kept, and the same command continues with the next one"
        raise
    if json:
        from ...train.demo.texts import explain

        print_json(
            {
                "report": result.report.to_dict(),
                "verdict": explain(result.report),
                "live": [_record(line) for line in result.live],
                "out": str(folder),
            }
        )
        return
    show(result)


def _print_line(line: str) -> None:
    """Print a line of result; in a terminal above the progress bars, for which rich replaces `sys.stdout`."""
    stream = sys.stdout if isinstance(sys.stdout, FileProxy) and results().isatty() else results()
    stream.write(line + "\n")
    stream.flush()


def _ignore(line: str) -> None:
    """Print nothing."""


def _unused(base: Path) -> Path:
    """Return the first of base, base-2, base-3, ... that does not exist."""
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
    """Print the table, the verdict, the path of the report and the commands to run next."""
    from ...train.demo.texts import explain

    report, best = result.report, result.live[1]
    live = {line.name: line for line in result.live} | {"plain decoding": result.live[0], "best fixed": best}
    candidate = report.answer.candidate if report.answer else ""
    rows = []
    for line in report.lines:
        if line.kind in ("learned", "bound") or line.name in ("plain decoding", "best fixed", candidate):
            one = live.get(line.name)
            measured = f"{one.measured / best.measured:.3f} ({one.predicted / best.predicted:.3f})" if one else ""
            speed, to_plain = f"{line.tokens_per_s:.0f}", f"{line.to_plain.value:.2f}"
            rows.append((line.name, speed, to_plain, line.to_best_fixed.text(), measured))
    fixed = report["best fixed"].note.partition(",")[0]
    table(
        f"{report.facts['prompts']} held-out prompts by replay, {result.live[0].tally.texts} of them live. Best fixed: "
        f"{fixed}, live {best.name}",
        ("decoding", "tokens/s", "÷ plain", "÷ best fixed [95%]", "live (replay)"),
        rows,
    )
    console = output()
    for text in (*explain(report), *(f"Note: {finding}" for finding in report.findings)):
        console.print(text, soft_wrap=True)
    console.print(
        f"Report: {result.folder / 'report' / 'report.html'}\n"
        "Next, on your models (T and D: folders or names on the hub):\n"
        "  specstop collect --target T --draft D --prompts train.jsonl --out traces\n"
        "  specstop profile --target T --draft D --prompts train.jsonl --out profile.json\n"
        "  specstop train --traces traces --profile profile.json --out policy",
        soft_wrap=True,
    )
