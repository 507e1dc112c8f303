"""`specstop demo`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..options import running
from ..output import print_json, progress_bars, quiet_libraries, results, table, write

if TYPE_CHECKING:
    from ...train.demo import Demo


def demo(
    out: Path | None = None,
    pair: Path | None = None,
    temperature: float = 0.0,
    quick: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Run all stages on the shipped pair: collect, profile, train, evaluate, decode live.

    Example: specstop demo --quick
    """
    from ...policies.files import prepare_output_dir
    from ...train.shipped_pair import check_pair

    names = (Path("specstop-demo" if number == 1 else f"specstop-demo-{number}") for number in range(1, 1000))
    folder = out or next(name for name in names if not name.exists())
    prepare_output_dir(folder, overwrite=overwrite, inputs=[pair])
    if context := running.get():
        context.params["out"] = folder  # for run.yaml
    if pair is not None:
        check_pair(pair)

    def announce(line: str) -> None:
        if not (quiet or json):
            write(line)
            results().flush()

    with progress_bars(quiet or json) as progress:
        progress("import libraries", 0, 1)
        quiet_libraries()
        from ...train.demo import demo as run

        progress("import libraries", 1, 1)
        result = run(
            folder, pair=pair, temperature=temperature, quick=quick, seed=seed, overwrite=overwrite, progress=progress,
            announce=announce,
        )  # fmt: skip
    if json:
        print_json(_to_dict(result))
    else:
        show(result)


def _to_dict(result: Demo) -> dict[str, object]:
    figures = ("measured", "predicted", "miss", "same_text")
    live = [
        {
            "policy": line.name,
            "tokens_per_s": line.tally.tokens_per_s,
            **{name: getattr(line, name) for name in figures},
        }
        for line in result.live
    ]
    routes = result.routes and result.routes.to_dict()
    return {
        "report": result.report.to_dict(),
        "routes": routes,
        "live": live,
        "out": str(result.folder),
    }


def show(result: Demo) -> None:
    """Print the table, the verdict, the path of the report and the commands to run next."""
    from ...train.demo import ROUTED

    report, best = result.report, result.live[1]
    live = {line.name: line for line in result.live} | {"plain decoding": result.live[0], "best fixed": best}
    names = ("plain decoding", "best fixed", report.answer.candidate if report.answer else "")
    rows = []
    for line in report.lines:
        if line.kind in ("learned", "bound") or line.name in names:
            measured, ratios = live.get(line.name), "-"
            if measured is not None:
                ratios = f"{measured.measured / best.measured:.3f} ({measured.predicted / best.predicted:.3f})"
            rows.append((line.name, f"{line.tokens_per_s:.0f}", line.to_best_fixed.text(), ratios))
    for line in result.routes.lines if result.routes else ():
        if line.drafters or line.name == "best fixed":
            rows.append((f"{ROUTED}: {line.name}", f"{line.tokens_per_s:.0f}", line.to_best_fixed.text(), "-"))
    fixed = report["best fixed"].note.partition(",")[0]
    table(
        f"{report.facts['prompts']} held-out prompts by replay, {result.live[0].tally.texts} of them live. Best fixed: "
        f"{fixed}, live {best.name}",
        ("policy", "tokens/s", "vs best fixed [95%]", "live (replay)"),
        rows,
    )
    for text in (*report.summary, *(f"Note: {finding}" for finding in report.findings)):
        write(text)
    write(
        f"Report: {result.folder / 'report' / 'report.html'}\n"
        "Next, on your models (T and D: folders or names on the hub):\n"
        "  specstop collect --target T --draft D --prompts train.jsonl --out traces\n"
        "  specstop profile --target T --draft D --prompts train.jsonl --out profile.json\n"
        "  specstop train --traces traces --profile profile.json --out policy"
    )
