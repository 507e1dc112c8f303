"""Small SVG charts that take their colours from the page: readable in light and dark, on paper, without a script.

Elements are built as a tree and escaped when it is written. Series are told apart by colour and by shape or dash: classes
s0, s1, ... of the page, in a palette that colour-blind readers can tell apart (Okabe and Ito).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree as ET

WIDTH, HEIGHT = 420, 270
SERIES = 7
"""Classes s0..s6; more series begin again."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 12, 12, 40
_ROW = 46
Point = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """An SVG with its caption and legend: (class, words) by series."""

    svg: str
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


def series(index: int) -> str:
    """Return the class of a series."""
    return f"s{index % SERIES}"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers within [low, high]."""
    from matplotlib.ticker import MaxNLocator

    if not high > low:
        return [low]
    return [float(t) for t in MaxNLocator(count, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high) if low <= t <= high]


def room(values: Sequence[float], *also: float, share: float = 0.06) -> tuple[float, float]:
    """Return limits around values, with some room."""
    every = [v for v in (*values, *also) if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(every), max(every)
    pad = share * (high - low) or 0.5 * abs(high) or 1.0
    return low - pad, high + pad


class Chart:
    """Two axes and what is drawn on them.

    Args:
        title: read out by screen readers, and on hovering.
        x, y: limits.
        x_label, y_label: under and above the axes.
        x_ticks: (place, words); by default round numbers.
        log_x: whether x is a logarithmic axis.
        height: in the units of the drawing, of which it is `WIDTH` wide.
        y_axis: whether y has ticks; rows that carry their names have none.
    """

    def __init__(
        self,
        title: str,
        x: Point,
        y: Point,
        x_label: str,
        y_label: str = "",
        *,
        x_ticks: Sequence[tuple[float, str]] | None = None,
        log_x: bool = False,
        height: int = HEIGHT,
        y_axis: bool = True,
    ) -> None:
        self._x, self._y, self._log, self._height = x, y, log_x, height
        self._left = _LEFT if y_axis else 18  # half the first tick of the other axis
        self.root = ET.Element("svg", viewBox=f"0 0 {WIDTH} {height}", role="img")
        self.root.set("aria-label", title)
        ET.SubElement(self.root, "title").text = title
        bottom = height - _BOTTOM
        for place, words in [(t, f"{t:g}") for t in ticks(*x)] if x_ticks is None else x_ticks:
            self._line((self.x(place), _TOP), (self.x(place), bottom), "grid")
            self.words(self.x(place), bottom + 15, words, "tick", "middle")
        for place in ticks(*y) if y_axis else []:
            self._line((self._left, self.y(place)), (WIDTH - _RIGHT, self.y(place)), "grid")
            self.words(self._left - 5, self.y(place) + 4, f"{place:g}", "tick", "end")
        self._line((self._left, bottom), (WIDTH - _RIGHT, bottom), "axis")
        self.words((self._left + WIDTH - _RIGHT) / 2, height - 7, x_label, "label", "middle")
        if y_label:
            up = self.words(11, (_TOP + bottom) / 2, y_label, "label", "middle")
            up.set("transform", f"rotate(-90 11 {(_TOP + bottom) / 2:g})")

    def x(self, value: float) -> float:
        """Return where a value is across."""
        low, high = self._x
        share = math.log(value / low) / math.log(high / low) if self._log else (value - low) / (high - low)
        return self._left + share * (WIDTH - _RIGHT - self._left)

    def y(self, value: float) -> float:
        """Return where a value is from the top."""
        low, high = self._y
        return self._height - _BOTTOM - (value - low) / (high - low) * (self._height - _BOTTOM - _TOP)

    def _add(self, kind: str, look: str, hint: str = "", **values: float | str) -> ET.Element:
        # Keywords cannot have the hyphens of SVG's attributes.
        given = {k.replace("_", "-"): f"{v:.2f}" if isinstance(v, float) else str(v) for k, v in values.items()}
        made = ET.SubElement(self.root, kind, {"class": look, **given})
        if hint:
            ET.SubElement(made, "title").text = hint
        return made

    def _line(self, a: Point, b: Point, look: str) -> None:
        self._add("line", look, x1=float(a[0]), y1=float(a[1]), x2=float(b[0]), y2=float(b[1]))

    def words(self, x: float, y: float, words: str, look: str, anchor: str = "start") -> ET.Element:
        """Write words at a place of the drawing."""
        made = self._add("text", look, x=float(x), y=float(y), text_anchor=anchor)
        made.text = words
        return made

    def line(self, points: Sequence[Point], look: str, hint: str = "") -> None:
        """Draw a line through points, with a mark at each."""
        path = " ".join(f"{self.x(a):.2f},{self.y(b):.2f}" for a, b in points)
        self._add("polyline", f"line {look}", hint, points=path)

    def band(self, lower: Sequence[Point], upper: Sequence[Point], look: str) -> None:
        """Fill between two lines."""
        path = " ".join(f"{self.x(a):.2f},{self.y(b):.2f}" for a, b in [*lower, *reversed(upper)])
        self._add("polygon", f"band {look}", points=path)

    def dot(self, at: Point, look: str, hint: str = "", size: float = 4.0) -> None:
        """Draw a dot."""
        self._add("circle", f"dot {look}", hint, cx=self.x(at[0]), cy=self.y(at[1]), r=size)

    def whisker(self, a: Point, b: Point, look: str) -> None:
        """Draw an interval."""
        self.rule(a, b, f"whisker {look}")

    def rule(self, a: Point, b: Point, look: str = "rule") -> None:
        """Draw a line of reference."""
        self._line((self.x(a[0]), self.y(a[1])), (self.x(b[0]), self.y(b[1])), look)

    def bar(self, x: Point, y: Point, look: str, hint: str = "") -> None:
        """Fill a rectangle between two x and two y."""
        left, right = sorted((self.x(x[0]), self.x(x[1])))
        top, bottom = sorted((self.y(y[0]), self.y(y[1])))
        self._add("rect", f"bar {look}", hint, x=left, y=top, width=right - left, height=bottom - top)

    def svg(self) -> str:
        """Return the drawing."""
        return ET.tostring(self.root, encoding="unicode")


def rows_chart(
    title: str, names: Sequence[str], limits: Point, x_label: str, draw: Callable[[Chart, int, float], None]
) -> Chart:
    """Return a chart of one row a name, the name above its row, so that long names fit on a phone.

    Args:
        title, x_label: as of `Chart`.
        names: by row, from the top.
        limits: of x.
        draw: (chart, index, y of the row) draws a row.
    """
    count = max(len(names), 1)
    height = _ROW * count + _TOP + _BOTTOM
    chart = Chart(title, limits, (0.0, float(count)), x_label, height=height, y_axis=False)
    for at, name in enumerate(names):
        y = count - at - 0.62
        short = name if len(name) <= 44 else name[:43] + "…"
        chart.words(8, chart.y(y) - 11, short, "name")
        draw(chart, at, y)
    return chart


def stacked_rows(title: str, names: Sequence[str], parts: Sequence[Sequence[float]], labels: Sequence[str]) -> Picture:
    """Return bars of parts in ms per token, one row a name; negative parts are drawn as nothing.

    Args:
        title: as of `Chart`.
        names: by row.
        parts: [row][label] values.
        labels: of the parts.
    """
    most = max((sum(max(v, 0.0) for v in row) for row in parts), default=1.0) or 1.0

    def draw(chart: Chart, at: int, y: float) -> None:
        begin = 0.0
        for index, value in enumerate(parts[at]):
            width = max(value, 0.0)
            hint = f"{names[at]}: {labels[index]} {value:.3g} ms per token"
            chart.bar((begin, begin + width), (y - 0.16, y + 0.14), series(index), hint)
            begin += width
        chart.words(chart.x(begin) + 4, chart.y(y) + 5, f"{sum(parts[at]):.3g}", "value")

    chart = rows_chart(title, names, (0.0, 1.15 * most), "ms per token", draw)
    return Picture(chart.svg(), title, tuple((series(i), label) for i, label in enumerate(labels)))
