"""A report on disk: JSON for machines, a page and Markdown for people, a table as CSV, one picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

from ....decode.benchmark import Ratio
from ....policies.display import markdown, markdown_cell, printable
from ....policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...evaluate.records import Report
from ..drawing.plot import save_speed_plot
from .model import Data, Table
from .page import facts_text, to_html
from .sections import sections, speed_table

FILES = ("report.html", "report.json", "report.md", "report.csv", "report.png")


def write_report(report: Report, out: Path, *, overwrite: bool = False) -> None:
    """Write `FILES` into the folder `out`, all or none."""
    data = plain(report)
    with staged_folder(prepare_output_dir(out, overwrite=overwrite)) as stage:
        write_json(stage / "report.json", data)
        write_atomic(stage / "report.html", to_html(data))
        write_atomic(stage / "report.md", to_markdown(report))
        write_atomic(stage / "report.csv", to_csv(report))
        save_speed_plot(report, stage / "report.png")


def plain(report: Report) -> Data:
    """Return the report as JSON values, as they are read from `report.json`."""
    data: Data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    return data


def policy_rows(report: Report) -> list[list[str]]:
    """Return the table of policies as texts, its columns first."""
    data = plain(report)
    found = speed_table(data)
    return [list(found.heads), *found.texts(data)]


def headline(report: Report) -> str:
    """Return the one sentence a reader came for."""
    return report.answer.headline if report.answer else "no policy was compared"


def to_csv(report: Report) -> str:
    """Return a line a policy, all figures in full: those of the JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    ratios = ("to_plain", "to_best_fixed", "oracle_share")
    counts = ("block_efficiency", "drafted", "verified", "accepted")
    spreads = [f"{name}{part}" for name in ratios for part in ("", "_low", "_high")]
    writer.writerow(["policy", "kind", "tokens_per_s", *spreads, *counts, "note"])
    for line in report.lines:
        values = [x for name in ratios for x in _three(getattr(line, name))]
        writer.writerow(
            [line.name, line.kind, line.tokens_per_s, *values, *(getattr(line, name) for name in counts), line.note]
        )
    return out.getvalue()


def _three(ratio: Ratio) -> tuple[float, float | None, float | None]:
    return ratio.value, ratio.low, ratio.high


def to_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    data = plain(report)
    found = report.answer
    blocks = ["# What each policy gains", markdown(headline(report))]
    if found:
        blocks += [markdown(text) for text in (found.interval, *(["Why: " + " ".join(found.why)] if found.why else []))]
    blocks += ["\n".join(f"- {markdown(text)}" for text in some) for some in (report.findings, report.caveats) if some]
    for section in sections(data):
        blocks += [
            f"## {section.title}",
            *map(markdown, section.words),
            *(_markdown(table, data) for table in section.tables),
        ]
        if section.id == "losses":
            blocks += _texts(data)
    blocks.append(f"{markdown(facts_text(data))} Rates are modelled with the latency profile; every count is exact.")
    return "\n\n".join(blocks) + "\n"


def _markdown(table: Table, data: Data) -> str:
    def row(cells: list[str]) -> str:
        return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"

    head = row(list(table.heads)) + "\n|" + "---|" * len(table.heads)
    return f"{markdown(table.caption)}:\n\n" + "\n".join([head, *map(row, table.texts(data))])


def _escaped(text: str) -> str:
    """Return text that stays within a cell and is no markup."""
    return markdown_cell(text, "|<`*[\\")


def _texts(data: Data) -> list[str]:
    """Return the worst rounds as code: the text before it, then the drafted tokens, + in front of accepted ones."""
    marks = {"accepted": "+", "rejected": "-", "missed": "?"}
    out = [
        "Behind the bar the tokens of the round: + accepted, - rejected, ? not drafted and would have been accepted."
    ]
    for one in data["details"]["losses"]:
        for each in one["rounds"]:
            pieces = " ".join(marks[p["state"]] + json.dumps(p["text"], ensure_ascii=False) for p in each["pieces"])
            text = json.dumps("".join(each["context"]), ensure_ascii=False)
            title = f"{_escaped(one['prompt'])}, after token {each['anchor']}: {each['kind']}, {each['ms']:.2f} ms, drafted "
            out.append(f"{title}{each['chosen']}, ideal {each['ideal']}:\n\n    {printable(f'{text} | {pieces}')}")
    return out
