"""A report on disk: JSON for machines, Markdown for people, one picture."""

from __future__ import annotations

from pathlib import Path

from ..policies.files import claim_folder, write_atomic, write_json
from .plot import save_speed_plot
from .records import Line, Ratio, Report

COLUMNS = (
    "policy",
    "tokens/s",
    "vs plain",
    "vs best fixed",
    "gap closed",
    "block eff.",
    "drafted",
    "accepted",
    "note",
)


def write_report(report: Report, out: Path, *, overwrite: bool = False) -> None:
    """Write `report.json`, `report.md` and `report.png` into `out`."""
    claim_folder(out, overwrite=overwrite)
    write_json(out / "report.json", report.to_dict())
    write_atomic(out / "report.md", to_markdown(report))
    save_speed_plot(report, out / "report.png")


def interval(ratio: Ratio, digits: int = 3) -> str:
    """Return `1.042 [1.021, 1.063]`."""
    return f"{ratio.value:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def cells(line: Line) -> tuple[str, ...]:
    """Return a line as the texts of `COLUMNS`."""
    rounds = (
        ("", "", "")
        if line.kind == "bound"
        else (f"{line.block_efficiency:.2f}", f"{line.drafted:.2f}", f"{line.accepted:.2f}")
    )
    gap = "" if line.name in ("plain decoding", "best fixed", "clairvoyant bound") else interval(line.gap_closed, 2)
    return (
        line.name,
        f"{line.tokens_per_s:.1f}",
        interval(line.to_plain),
        interval(line.to_best_fixed),
        gap,
        *rounds,
        line.note,
    )


def headline(report: Report) -> str:
    """Return the one sentence a reader came for."""
    learned = [line for line in report.lines if line.kind in ("learned", "rule")]
    top = max(learned, key=lambda line: line.tokens_per_s)
    gain = top.to_best_fixed
    sure = "clear of 1" if gain.low > 1 else "not clear of 1"
    return (
        f"{top.name}: {top.to_plain.value:.2f} times plain decoding, {gain.value:.3f} times the best fixed length "
        f"({LEVEL_TEXT} {gain.low:.3f} to {gain.high:.3f}, {sure})"
    )


LEVEL_TEXT = "95% interval"


def to_markdown(report: Report) -> str:
    """Return the report as Markdown."""
    facts = report.facts
    head = "| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)
    body = "\n".join("| " + " | ".join(cells(line)) + " |" for line in report.lines)
    fixed = " ".join(f"{k}: {rate:.1f}" for k, rate in enumerate(report.fixed))
    depth = " ".join(f"{k}: {p:.3f}" for k, p in enumerate(report.acceptance, 1))
    return (
        f"# What each policy gains\n\n{headline(report)}\n\n{head}\n{body}\n\n"
        f"Tokens/s by fixed length: {fixed}\n\nP(A >= k) over all anchors: {depth}\n\n"
        f"{facts['prompts']} prompts, {facts['tokens']} tokens, temperature {facts['temperature']:g}, "
        f"{facts['verification']} verification (lossless), {facts['intervals']}. Rates are modelled with the latency "
        f"profile ({facts['profile'].get('device', 'unknown device')}); every count is exact.\n"
    )
