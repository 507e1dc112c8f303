"""The pictures of a report by section, drawn from its JSON form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..records import Ratio
from ..writing.model import Data
from ..writing.sections import STOP_PARTS, TIME_PARTS
from .charts import Chart, Picture, Point, room, rows_chart, series, stacked_rows

Interval = Mapping[str, Any]
"""A ratio as the JSON has it: value, low and high, the latter two null where there is no interval."""

_MOST_LINES = 6
_KINDS = {"fixed": "s0", "static": "s0", "rule": "s1", "learned": "s2", "achievable": "s3", "bound": "s4"}


def speed(data: Data) -> list[Picture]:
    """Every policy against the best fixed length, and the curve of fixed lengths."""
    shown = [x for x in data["lines"] if x["kind"] not in ("bound", "achievable") and x["name"] != "plain decoding"]
    ratios = [line["to_best_fixed"] for line in shown]
    limits = room(_ends(ratios), 1.0, share=0.12)

    def draw(chart: Chart, at: int, y: float) -> None:
        line, ratio, look = shown[at], ratios[at], _KINDS[shown[at]["kind"]]
        if not at:
            chart.rule((1.0, 0.0), (1.0, float(len(shown))))
        _whisker(chart, ratio, y, look)
        chart.dot((ratio["value"], y), look, f"{line['name']}: {Ratio(**ratio).text()}")
        chart.words(chart.x(ratio["value"]), chart.y(y) + 16, f"{ratio['value']:.3f}", "value", "middle")

    title = "Speed of every policy, best fixed length = 1, 95% intervals"
    rows = rows_chart(title, [line["name"] for line in shown], limits, "times the best fixed length", draw)
    used = list(dict.fromkeys(line["kind"] for line in shown))
    return [Picture(rows.svg(), title, tuple((_KINDS[k], k) for k in used)), _fixed_curve(data)]


def _fixed_curve(data: Data) -> Picture:
    rates = [rate / data["fixed"][0] for rate in data["fixed"]]
    levels = [line for line in data["lines"] if line["kind"] == "bound"]
    found = data["answer"]
    if found:
        levels.insert(0, next(line for line in data["lines"] if line["name"] == found["candidate"]))
    heights = [line["to_plain"]["value"] for line in levels]
    low, high = room([*rates, *heights], 1.0)
    title = "Speed by fixed length, plain decoding = 1"
    chart = Chart(title, (0.0, max(len(rates) - 1.0, 1.0)), (max(low, 0.0), high), "tokens drafted per round", "speed",
                  x_ticks=_counts(0, len(rates) - 1))  # fmt: skip
    for line, height in zip(levels, heights, strict=True):
        chart.rule((0.0, height), (max(len(rates) - 1.0, 1.0), height), f"level {_KINDS[line['kind']]}")
    _series(
        chart, [(float(k), rate) for k, rate in enumerate(rates)], "s0", "fixed:{0:g}: {1:.3f} times plain decoding"
    )
    return Picture(chart.svg(), title, (("s0", "fixed length"), *((_KINDS[x["kind"]], x["name"]) for x in levels)))


def _series(chart: Chart, points: Sequence[Point], look: str, hint: str, size: float = 4.0) -> None:
    chart.line(points, look)
    for point in points:
        chart.dot(point, look, hint.format(*point), size)


def acceptance(data: Data) -> list[Picture]:
    """P(A >= k) with its band."""
    bands = list(enumerate(data["bands"], 1))
    title = "Share of positions with at least k accepted tokens, 95% band"
    chart = Chart(title, (0.5, len(bands) + 0.5), (0.0, 1.0), "k", "P(A >= k)", x_ticks=_counts(1, len(bands)))
    _band(chart, bands, "s0")
    _series(chart, [(float(k), b["value"]) for k, b in bands], "s0", "k = {0:g}: {1:.3f}")
    return [Picture(chart.svg(), title)]


def _ends(ratios: Sequence[Interval]) -> list[float]:
    """Return all values and ends of intervals."""
    return [end for ratio in ratios for end in ratio.values() if end is not None]


def _whisker(chart: Chart, ratio: Interval, y: float, look: str) -> None:
    """Draw an interval; nothing where there is none."""
    if ratio["low"] is not None and ratio["high"] is not None:
        chart.whisker((ratio["low"], y), (ratio["high"], y), look)


def _band(chart: Chart, rows: Sequence[tuple[float, Interval]], look: str) -> None:
    """Fill between the ends of intervals; nothing where there are none."""
    ends = [(x, r["low"], r["high"]) for x, r in rows if r["low"] is not None and r["high"] is not None]
    if ends:
        chart.band([(x, low) for x, low, _ in ends], [(x, high) for x, _, high in ends], look)


def _counts(first: int, last: int) -> list[tuple[float, str]]:
    step = 1 + (last - first) // 12
    return [(float(k), str(k)) for k in range(first, last + 1, step)]


def lengths(data: Data) -> list[Picture]:
    """Chosen against ideal depth."""
    mine = data["details"]["lengths"][0]
    depth = len(mine["chosen"]) - 1
    total = sum(mine["chosen"]) or 1
    most = max(*mine["chosen"], *mine["ideal"], 1) / total
    title = f"Depth of the rounds of {mine['name']}, chosen and ideal"
    chart = Chart(title, (-0.6, depth + 0.6), (0.0, 1.08 * most), "depth", "share", x_ticks=_counts(0, depth))
    for at, name in enumerate(("chosen", "ideal")):
        for k, count in enumerate(mine[name]):
            left = k - 0.4 + 0.4 * at
            chart.bar((left, left + 0.38), (0.0, count / total), series(2 * at), f"{name} {k}: {count} rounds")
    return [Picture(chart.svg(), title, ((series(0), "chosen"), (series(2), "ideal")))]


def reliability(data: Data) -> list[Picture]:
    """Predicted against observed survival by depth, and over bins, of the policy that the report is about."""
    found = data["details"]["reliability"]
    subject = data["details"]["subject"]
    one = next((policy for policy in found if policy["name"] == subject), found[0])
    depths = one["depths"]
    if not depths:
        return []
    title = f"{one['name']}: survival by depth, predicted and observed"
    last = depths[-1]["depth"]
    chart = Chart(title, (0.5, last + 0.5), (0.0, 1.0), "depth", "survival", x_ticks=_counts(1, last))
    predicted = [(float(d["depth"]), d["all"]["predicted"]) for d in depths]
    _series(chart, predicted, "s1", "depth {0:g}: predicted {1:.3f}")
    for d in depths:
        chart.whisker((d["depth"], d["all"]["low"]), (d["depth"], d["all"]["high"]), "s0")
        hint = f"depth {d['depth']}: observed {d['all']['observed']:.3f}"
        chart.dot((d["depth"], d["all"]["observed"]), "s0", hint, 3.0)
    by_depth = Picture(chart.svg(), title, (("s1", "predicted"), ("s0", "observed")))
    title = f"{one['name']}: observed against predicted survival"
    chart = Chart(title, (0.0, 1.0), (0.0, 1.0), "predicted", "observed")
    chart.rule((0.0, 0.0), (1.0, 1.0))
    shown = depths[:4]
    for at, d in enumerate(shown):
        for each in d["bins"]:
            chart.whisker((each["predicted"], each["low"]), (each["predicted"], each["high"]), series(at))
        points = [(each["predicted"], each["observed"]) for each in d["bins"]]
        _series(chart, points, series(at), f"depth {d['depth']}: predicted {{0:.3f}}, observed {{1:.3f}}", 3.0)
    legend = tuple((series(at), f"depth {d['depth']}") for at, d in enumerate(shown))
    return [by_depth, Picture(chart.svg(), title, legend)]


def time(data: Data) -> list[Picture]:
    """Milliseconds per token by cause."""
    found = data["details"]["time"]
    parts = [[one[key] for key, _ in TIME_PARTS] for one in found]
    labels = [label for _, label in TIME_PARTS]
    title = "Where time goes, ms per token"
    return [stacked_rows(title, [one["name"] for one in found], parts, labels, "ms per token", "ms per token")]


def stops(data: Data) -> list[Picture]:
    """Milliseconds per token lost against the oracle."""
    found = data["details"]["stops"]
    title = "Lost against the oracle, ms per token"
    names, parts = [one["name"] for one in found], [one["ms_per_token"] for one in found]
    return [stacked_rows(title, names, parts, STOP_PARTS, "ms per token", "ms per token")]


def groups(data: Data) -> list[Picture]:
    """The policy of the report, group by group."""
    found, subject = data["details"]["groups"], data["details"]["subject"]
    ratios = [group["ratios"][subject] for group in found]

    def draw(chart: Chart, at: int, y: float) -> None:
        ratio = ratios[at]
        if not at:
            chart.rule((1.0, 0.0), (1.0, float(len(found))))
        _whisker(chart, ratio, y, "s2")
        chart.dot((ratio["value"], y), "s2", f"{found[at]['name']}: {ratio['value']:.3f}")
        chart.words(chart.x(ratio["value"]), chart.y(y) + 16, f"{ratio['value']:.3f}", "value", "middle")

    title = f"{subject} by group, best fixed length of all prompts = 1"
    limits = room(_ends(ratios), 1.0, share=0.12)
    names = [f"{group['name'] or '(no name)'} ({group['prompts']} prompts)" for group in found]
    return [Picture(rows_chart(title, names, limits, "times the best fixed length", draw).svg(), title)]


def prompts(data: Data) -> list[Picture]:
    """Policy against best fixed length, a dot a prompt."""
    found, subject = data["details"]["prompts"], data["details"]["subject"]
    limits = room([one[key] for one in found for key in ("fixed", "policy")])
    title = f"Speed-up over plain decoding by prompt: {subject} against the best fixed length"
    chart = Chart(title, limits, limits, "best fixed length", subject if len(subject) < 36 else "policy")
    chart.rule((limits[0], limits[0]), (limits[1], limits[1]))
    for one in found:
        look = "s2" if one["policy"] >= one["fixed"] else "s1 open"
        hint = f"{one['prompt']}: {one['policy']:.3f} against {one['fixed']:.3f}"
        chart.dot((one["fixed"], one["policy"]), f"{look} point", hint, 3.5)
    return [Picture(chart.svg(), title, (("s2", f"{subject} faster"), ("s1 open", "slower")))]


def sensitivity(data: Data) -> list[Picture]:
    """The policy of the report under other latencies."""
    found, subject = data["details"]["sensitivity"], data["details"]["subject"]
    centre = next(one for one in found if one["factor"] == 1.0)
    lines: dict[str, list[tuple[float, Interval]]] = {}
    for what in ("draft", "verification"):
        rows = sorted([*(one for one in found if one["what"] == what), centre], key=lambda one: float(one["factor"]))
        lines[what] = [(one["factor"], one["ratios"][subject]) for one in rows]
    limits = room(_ends([r for rows in lines.values() for _, r in rows]), 1.0)
    factors = [factor for factor, _ in lines["draft"]]
    title = f"{subject} against the best fixed length if calls were more expensive or cheaper"
    shown = [(f, f"x{f:g}") for f in factors]
    chart = Chart(title, (factors[0] / 1.05, factors[-1] * 1.05), limits, "cost, profile = 1", "times best fixed",
                  x_ticks=shown, log_x=True)  # fmt: skip
    chart.rule((factors[0], 1.0), (factors[-1], 1.0))
    for at, (what, rows) in enumerate(lines.items()):
        look = series(2 * at)
        _band(chart, rows, look)
        _series(chart, [(f, r["value"]) for f, r in rows], look, f"{what} x{{0:g}}: {{1:.3f}}")
    return [Picture(chart.svg(), title, tuple((series(2 * at), what) for at, what in enumerate(lines)))]


def sweep(data: Data) -> list[Picture]:
    """Each policy over the cost ratio."""
    found: dict[str, Any] = data["details"]["sweep"]
    x, lines = found["ratios"], found["lines"][:_MOST_LINES]
    values = [r["value"] for line in lines for r in line["to_best_fixed"]]
    title = "Speed against the best fixed length by the cost of a draft step, target step = 1"
    low, high = room(values, 1.0)
    ticks = [(r, f"{r:.2g}") for r in x[:: 1 + (len(x) - 1) // 5]]
    chart = Chart(
        title, (x[0] / 1.05, x[-1] * 1.05), (low, high), "cost ratio", "times best fixed", x_ticks=ticks, log_x=True
    )
    chart.rule((x[0], 1.0), (x[-1], 1.0))
    if x[0] <= found["here"] <= x[-1]:
        chart.rule((found["here"], low), (found["here"], high), "here")
    for at, line in enumerate(lines):
        points = [(ratio, r["value"]) for ratio, r in zip(x, line["to_best_fixed"], strict=True)]
        _series(chart, points, series(at), f"{line['name']} at {{0:.3g}}: {{1:.3f}}", 3.0)
    return [Picture(chart.svg(), title, tuple((series(at), line["name"]) for at, line in enumerate(lines)))]


def batches(data: Data) -> list[Picture]:
    """Each policy over the batch size."""
    found: dict[str, Any] = data["details"]["batch"]
    x, lines = [float(size) for size in found["sizes"]], found["lines"][1:-1][:_MOST_LINES]
    if len(x) < 2 or not lines:
        return []
    title = "Speed by batch size, best fixed length of that size = 1, 95% intervals"
    limits = room([end for line in lines for end in _ends(line["to_best_fixed"])], 1.0)
    ticks = [(size, f"{size:g}") for size in x]
    chart = Chart(
        title, (x[0] / 1.05, x[-1] * 1.05), limits, "texts side by side", "times best fixed", x_ticks=ticks, log_x=True
    )
    chart.rule((x[0], 1.0), (x[-1], 1.0))
    for at, line in enumerate(lines):
        rows = list(zip(x, line["to_best_fixed"], strict=True))
        _band(chart, rows, series(at))
        _series(
            chart, [(size, r["value"]) for size, r in rows], series(at), f"{line['name']} at {{0:g}}: {{1:.3f}}", 3.0
        )
    return [Picture(chart.svg(), title, tuple((series(at), line["name"]) for at, line in enumerate(lines)))]


DRAWN: Mapping[str, Callable[[Data], list[Picture]]] = {
    "speed": speed,
    "acceptance": acceptance,
    "lengths": lengths,
    "reliability": reliability,
    "time": time,
    "stops": stops,
    "groups": groups,
    "prompts": prompts,
    "sensitivity": sensitivity,
    "sweep": sweep,
    "batch": batches,
}
