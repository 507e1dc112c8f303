"""Plots of a report, drawn by matplotlib from the report's JSON form (`Report.to_dict()`).

On the page they are inline SVG. Their colours are variables of the style sheet, for light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...decode.benchmark import Ratio

Data = Mapping[str, Any]

INK, QUIET, LINE = "#1a1d21", "#59616b", "#d5d9de"
SERIES = ("#b85300", "#0064a8", "#00805f", "#a5487d", "#7a6500")
"""Colours that colour-blind readers can distinguish (Okabe and Ito 2008, darkened). Each series also has a marker."""

VARIABLES = {INK: "--ink", QUIET: "--quiet", LINE: "--line"} | {code: f"--s{at}" for at, code in enumerate(SERIES, 1)}
"""Variables of the style sheet by colour."""

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": QUIET,
    "axes.prop_cycle": cycler(color=SERIES, marker=list("o^sDv"), linestyle=["-", "--", "-.", ":", "-"]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9.5,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",  # text stays text: it can be searched, and has the font of the page
    "text.color": INK,
    "text.parse_math": False,  # names of policies may contain dollar signs
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}

WIDTH = 5.2
"""Inches. At this width text is readable on a screen of 390 pixels."""

DESCRIPTION = "The table of this section has the figures."
"""For readers who cannot see a plot."""

MAX_CURVES, MAX_DEPTHS, MAX_CHARACTERS = len(SERIES), 4, 40

KINDS = {
    "fixed": (QUIET, "s"),
    "static": (QUIET, "D"),
    "rule": (SERIES[0], "^"),
    "learned": (SERIES[1], "o"),
    "hindsight": (QUIET, "P"),
    "achievable": (SERIES[2], "v"),
    "bound": (INK, "X"),
}
"""Colour and marker by kind of policy."""


@dataclass(frozen=True)
class Plot:
    """A figure with its caption."""

    figure: Figure
    caption: str

    def svg(self, name: str) -> str:
        """Return the figure as an SVG element for a page. Its ids begin with `name`."""
        file = io.StringIO()
        with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
            self.figure.savefig(file, format="svg", transparent=True)
        root = ET.fromstring(file.getvalue())
        for parent in root.iter():
            for child in list(parent):  # matplotlib's style element would apply to the whole page
                if child.tag.endswith(("}metadata", "}style")):
                    parent.remove(child)
        for element in root.iter():
            element.tag = element.tag.partition("}")[2]
            if element.tag == "g":
                element.attrib.pop("id", None)  # every figure has the same ids, and nothing refers to them
            if target := element.attrib.pop("{http://www.w3.org/1999/xlink}href", ""):
                element.set("href", target)
            if style := element.get("style"):
                style = re.sub(r"font-family: [^;]*; ", "", style)
                element.set("style", re.sub(r"(?<=: )#\w{6}\b", lambda code: f"var({VARIABLES[code[0]]})", style))
        root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-labelledby": f"{name}-title {name}-desc"}
        for at, (tag, text) in enumerate((("title", self.caption), ("desc", DESCRIPTION))):
            root.insert(at, ET.Element(tag, id=f"{name}-{tag}"))
            root[at].text = text
        return ET.tostring(root, encoding="unicode")


@matplotlib.rc_context(STYLE)
def draw(data: Data, time_columns: Mapping[str, str]) -> dict[str, Plot]:
    """Return the plots of a report by the id of their section; `time_columns` are the headings of the section on time."""
    if data["places"]:
        return {f"policies-{at}": gains(place["lines"]) for at, place in enumerate(data["places"].values(), 1)}
    details = data["details"]
    plots = {
        "policies": gains(data["lines"]),
        "fixed": fixed_lengths(data),
        "acceptance": acceptance(data["bands"]) if data["bands"] else None,
        "reliability": calibration(details["reliability"], details["subject"]) if details.get("reliability") else None,
        "time": time_shares(details["time"], time_columns) if details.get("time") else None,
        "batch": batch_sizes(details["batch"]) if details.get("batch") else None,
    }
    return {name: plot for name, plot in plots.items() if plot is not None}


@matplotlib.rc_context(STYLE)
def gains(lines: Sequence[Data]) -> Plot:
    """Draw the speed of every policy against the best fixed length, one row per policy."""
    shown = [x for x in lines if x["kind"] not in ("bound", "achievable") and x["name"] != "plain decoding"]
    values = [Ratio(**x["to_best_fixed"]).text() for x in shown]
    figure, axes = _rows([x["name"] for x in shown], values, "speed, best fixed length = 1")
    axes.axvline(1.0, color=QUIET, linewidth=1, linestyle="--")
    for kind in dict.fromkeys(x["kind"] for x in shown):
        rows = [at for at, x in enumerate(shown) if x["kind"] == kind]
        ratios, (color, marker) = [shown[at]["to_best_fixed"] for at in rows], KINDS[kind]
        x, y = [r["value"] for r in ratios], [-at for at in rows]
        axes.errorbar(x, y, xerr=_errors(ratios), fmt=marker, color=color, elinewidth=2, markersize=6, label=kind)
    axes.margins(x=0.08)
    _legend(figure, axes)
    return Plot(figure, "Speed relative to the best fixed length, with 95% intervals")


def fixed_lengths(data: Data) -> Plot:
    """Draw tokens/s by fixed length, with those of the candidate policy and of the bound as levels."""
    rates = data["fixed"]
    figure, axes = _axes(xlabel="tokens drafted per round", ylabel="tokens/s")
    axes.plot(rates, color=QUIET, marker="s", linestyle="-", label="fixed length")
    candidate = (data["answer"] or {}).get("candidate")
    for line in data["lines"]:
        if line["kind"] == "bound" or line["name"] == candidate:
            style: dict[str, Any] = {
                "color": KINDS[line["kind"]][0],
                "linestyle": ":" if line["kind"] == "bound" else "--",
            }
            axes.axhline(line["tokens_per_s"], label=_short(line["name"]), **style)
    axes.set_ylim(bottom=0)
    axes.locator_params(axis="x", integer=True)
    _legend(figure, axes)
    return Plot(figure, "Tokens per second by fixed length")


def acceptance(bands: Sequence[Data]) -> Plot:
    """Draw P(A >= k) with its interval."""
    depths = range(1, len(bands) + 1)
    figure, axes = _axes(xlabel="k", ylabel="P(A ≥ k)", ylim=(0, 1))
    axes.plot(depths, [band["value"] for band in bands], color=SERIES[1])
    observed = [k for k in depths if bands[k - 1]["low"] is not None]
    low, high = ([bands[k - 1][end] for k in observed] for end in ("low", "high"))
    axes.fill_between(observed, low, high, color=SERIES[1], alpha=0.18, linewidth=0)
    axes.locator_params(axis="x", integer=True)
    return Plot(figure, "Share of positions with at least k accepted draft tokens, with 95% interval")


def calibration(policies: Sequence[Data], subject: str) -> Plot | None:
    """Draw observed against predicted survival for the policy that the report is about, or else for the first one."""
    policy = next((p for p in policies if p["name"] == subject), policies[0])
    if not policy["depths"]:
        return None
    figure, axes = _axes(3.6, xlabel="predicted survival", ylabel="observed survival", xlim=(0, 1), ylim=(0, 1))
    axes.axline((0, 0), slope=1, color=QUIET, linestyle="--", linewidth=1)
    for depth in policy["depths"][:MAX_DEPTHS]:
        bins = [{**each, "value": each["observed"]} for each in depth["bins"]]
        x, y = ([each[name] for each in bins] for name in ("predicted", "observed"))
        axes.errorbar(x, y, yerr=_errors(bins), elinewidth=1, label=f"depth {depth['depth']}")
    _legend(figure, axes)
    return Plot(figure, f"{policy['name']}: observed against predicted survival, with 95% intervals")


def time_shares(entries: Sequence[Data], columns: Mapping[str, str]) -> Plot:
    """Draw milliseconds per token by cause, one row per policy."""
    totals = [f"{entry['total_ms']:.2f} ms" for entry in entries]
    figure, axes = _rows([entry["name"] for entry in entries], totals, "ms per token")
    left = [0.0] * len(entries)
    parts = [(key, label) for key, label in columns.items() if key not in ("name", "total_ms")]
    for color, (key, label) in zip(SERIES, parts, strict=True):
        widths = [entry[key] for entry in entries]
        places = [-row - 0.05 for row in range(len(entries))]
        axes.barh(places, widths, 0.3, left, color=color, label=label, edgecolor=LINE, linewidth=0.5)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _legend(figure, axes)
    return Plot(figure, "Milliseconds per token by cause")


def batch_sizes(batch: Data) -> Plot | None:
    """Draw the ratio of every policy to the best fixed length over the batch size, on a logarithmic axis."""
    sizes, lines = batch["sizes"], batch["lines"][1:-1]
    if len(sizes) < 2 or not lines:
        return None
    figure, axes = _axes(xlabel="batch size", ylabel="speed, best fixed length = 1", xscale="log")
    axes.axhline(1.0, color=QUIET, linewidth=1, linestyle="--")
    for line in lines[:MAX_CURVES]:
        ratios = line["to_best_fixed"]
        values, label = [r["value"] for r in ratios], _short(line["name"])
        axes.errorbar(sizes, values, yerr=_errors(ratios), label=label, elinewidth=0.8)
    axes.set_xticks(sizes, [f"{size:.2g}" for size in sizes])
    axes.minorticks_off()
    _legend(figure, axes)
    return Plot(figure, "Speed by batch size, best fixed length of that batch size = 1, with 95% intervals")


def _axes(height: float = 3.2, **properties: Any) -> tuple[Figure, Axes]:
    # Not by pyplot, which keeps figures in memory and chooses a backend for the whole process.
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.set(**properties)
    return figure, axes


def _rows(names: Sequence[str], values: Sequence[str], label: str) -> tuple[Figure, Axes]:
    """Return axes with rows at y = 0, -1, ... Long names fit above their rows. Values are on the right."""
    figure, axes = _axes(0.46 * len(names) + 0.9, xlabel=label, ylim=(0.4 - len(names), 0.85))
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    for at, (name, value) in enumerate(zip(names, values, strict=True)):
        axes.text(0.0, 0.3 - at, _short(name), transform=axes.get_yaxis_transform())
        axes.text(1.03, -at, value, transform=axes.get_yaxis_transform(), va="center")
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = max(1, 64 // (8 + max(map(len, labels))))  # about 64 characters fit beside each other, 8 for the marker
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def _short(name: str) -> str:
    return name if len(name) <= MAX_CHARACTERS else name[: MAX_CHARACTERS - 1] + "…"


def _errors(ratios: Sequence[Data]) -> list[list[float]]:
    """Return the distances of the ends of intervals from their values, [2, n]. They are 0 if there is no interval."""
    # A bootstrap interval does not always contain its value.
    low = [0.0 if r["low"] is None else max(r["value"] - r["low"], 0.0) for r in ratios]
    return [low, [0.0 if r["high"] is None else max(r["high"] - r["value"], 0.0) for r in ratios]]
