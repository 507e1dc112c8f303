"""The one picture of a report: what each policy gains, with intervals."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from ....policies.files import write_atomic
from ...evaluate.records import Report

_COLOURS = {
    "fixed": "#6b7280",
    "static": "#6b7280",
    "rule": "#b45309",
    "learned": "#2563eb",
    "achievable": "#047857",
    "bound": "#111827",
}


def save_speed_plot(report: Report, path: Path) -> None:
    """Draw both panels and save them as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not by pyplot, which keeps figures and picks a backend for the whole process.
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.3))
    fixed_panel(left, report)
    policy_panel(right, report)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    write_atomic(path, buffer.getvalue())


def fixed_panel(axes: Any, report: Report) -> Any:
    """Draw speed by fixed length, with the best policy and the bound as levels; return the axes."""
    plain = report.fixed[0]
    axes.plot(
        range(len(report.fixed)),
        [r / plain for r in report.fixed],
        "o-",
        color=_COLOURS["fixed"],
        label="fixed length",
    )
    others = [line for line in report.lines if line.kind in ("rule", "learned")]
    top = max(others, key=lambda line: line.tokens_per_s)
    axes.axhline(top.to_plain.value, color=_COLOURS[top.kind], label=top.name)
    for bound in (line for line in report.lines if line.kind == "bound"):
        axes.axhline(bound.to_plain.value, color=_COLOURS["bound"], linestyle=":", label=bound.name)
    axes.set(
        xlabel="tokens drafted per round",
        ylabel="speed, plain decoding = 1",
        title="Fixed lengths",
        ylim=(0, None),
    )
    axes.legend(frameon=False, loc="lower left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def policy_panel(axes: Any, report: Report) -> Any:
    """Draw each policy against the best fixed length with its interval; return the axes."""
    lines = [line for line in report.lines if line.kind != "bound" and line.name != "plain decoding"][::-1]
    for place, line in enumerate(lines):
        ratio = line.to_best_fixed
        if ratio.low is not None:
            axes.plot([ratio.low, ratio.high], [place, place], color=_COLOURS[line.kind], linewidth=2)
        axes.plot(ratio.value, place, "o", color=_COLOURS[line.kind])
        axes.annotate(
            f"{ratio.value:.3f}",
            (ratio.value, place),
            (0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    axes.axvline(1.0, color=_COLOURS["fixed"], linewidth=1, linestyle="--")
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.set(
        xlabel="speed, best fixed length = 1 (95% interval)",
        title="Policies",
        ylim=(-0.6, len(lines) - 0.3),
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    return axes
