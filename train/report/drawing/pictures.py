"""The pictures of a report by section, drawn from its JSON form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ....decode.benchmark import Ratio
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
    title = "Speed of every policy, best fixed length = 1, 95% intervals"
    rows = []
    for line in shown:
        ratio = line["to_best_fixed"]
        rows.append((line["name"], ratio, _KINDS[line["kind"]], f"{line['name']}: {Ratio(**ratio).text()}"))
    used = list(dict.fromkeys(line["kind"] for line in shown))
    return [Picture(_ratio_rows(title, rows), title, tuple((_KINDS[k], k) for k in used)), _fixed_curve(data)]


def _ratio_rows(title: str, rows: Sequence[tuple[str, Interval, str, str]]) -> str:
    """Return a drawing of speeds against the best fixed length, a row each of (name, ratio, class, hint)."""

    def draw(chart: Chart, at: int, y: float) -> None:
        _, ratio, look, hint = rows[at]
        if not at:
            chart.rule((1.0, 0.0), (1.0, float(len(rows))))
        if ratio["low"] is not None and ratio["high"] is not None:
            chart.whisker((ratio["low"], y), (ratio["high"], y), look)
        chart.dot((ratio["value"], y), look, hint)
        chart.words(chart.x(ratio["value"]), chart.y(y) + 16, f"{ratio['value']:.3f}", "value", "middle")

    limits = room(_ends([ratio for _, ratio, *_ in rows]), 1.0, share=0.12)
    return rows_chart(title, [name for name, *_ in rows], limits, "times the best fixed length", draw).svg()


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
    points = [(float(k), rate) for k, rate in enumerate(rates)]
    _series(chart, points, "s0", lambda k, rate: f"fixed:{k:g}: {rate:.3f} times plain decoding")
    return Picture(chart.svg(), title, (("s0", "fixed length"), *((_KINDS[x["kind"]], x["name"]) for x in levels)))


def _series(
    chart: Chart, points: Sequence[Point], look: str, hint: Callable[[float, float], str], size: float = 4.0
) -> None:
    chart.line(points, look)
    for point in points:
        chart.dot(point, look, hint(*point), size)


def acceptance(data: Data) -> list[Picture]:
    """P(A >= k) with its band."""
    bands = list(enumerate(data["bands"], 1))
    title = "Share of positions with at least k accepted tokens, 95% band"
    chart = Chart(title, (0.5, len(bands) + 0.5), (0.0, 1.0), "k", "P(A >= k)", x_ticks=_counts(1, len(bands)))
    _band(chart, bands, "s0")
    _series(chart, [(float(k), b["value"]) for k, b in bands], "s0", lambda k, share: f"k = {k:g}: {share:.3f}")
    return [Picture(chart.svg(), title)]


def _ends(ratios: Sequence[Interval]) -> list[float]:
    """Return all values and ends of intervals."""
    return [end for ratio in ratios for end in ratio.values() if end is not None]


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
    _series(chart, predicted, "s1", lambda depth, share: f"depth {depth:g}: predicted {share:.3f}")
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
        name = f"depth {d['depth']}"
        _series(chart, points, series(at), partial("{}: predicted {:.3f}, observed {:.3f}".format, name), 3.0)
    legend = tuple((series(at), f"depth {d['depth']}") for at, d in enumerate(shown))
    return [by_depth, Picture(chart.svg(), title, legend)]


def time(data: Data) -> list[Picture]:
    """Milliseconds per token by cause."""
    found = data["details"]["time"]
    parts = [[one[key] for key, _ in TIME_PARTS] for one in found]
    labels = [label for _, label in TIME_PARTS]
    title = "Where time goes, ms per token"
    return [stacked_rows(title, [one["name"] for one in found], parts, labels)]


def stops(data: Data) -> list[Picture]:
    """Milliseconds per token lost against the oracle."""
    found = data["details"]["stops"]
    title = "Lost against the oracle, ms per token"
    names, parts = [one["name"] for one in found], [one["ms_per_token"] for one in found]
    return [stacked_rows(title, names, parts, STOP_PARTS)]


def groups(data: Data) -> list[Picture]:
    """The policy of the report, group by group."""
    found, subject = data["details"]["groups"], data["details"]["subject"]
    title = f"{subject} by group, best fixed length of all prompts = 1"
    rows = []
    for group in found:
        name, ratio = f"{group['name'] or '(no name)'} ({group['prompts']} prompts)", group["ratios"][subject]
        rows.append((name, ratio, "s2", f"{group['name']}: {ratio['value']:.3f}"))
    return [Picture(_ratio_rows(title, rows), title)]


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
    lines = []
    for what in ("draft", "verification"):
        rows = sorted([*(one for one in found if one["what"] == what), centre], key=lambda one: float(one["factor"]))
        factors = [float(one["factor"]) for one in rows]
        lines.append((what, [one["ratios"][subject] for one in rows]))
    title = f"{subject} against the best fixed length if calls were more expensive or cheaper"
    ticks = [(factor, f"x{factor:g}") for factor in factors]
    looks = [series(0), series(2)]
    return [_curves(title, "cost, profile = 1", factors, lines, ticks, "{} x{:g}: {:.3f}", looks, size=4.0)]


def sweep(data: Data) -> list[Picture]:
    """Each policy over the cost ratio."""
    found: dict[str, Any] = data["details"]["sweep"]
    x, lines = found["ratios"], [(one["name"], one["to_best_fixed"]) for one in found["lines"][:_MOST_LINES]]
    title = "Speed against the best fixed length by the cost of a draft step, target step = 1"
    ticks = [(ratio, f"{ratio:.2g}") for ratio in x[:: 1 + (len(x) - 1) // 5]]
    return [_curves(title, "cost ratio", x, lines, ticks, "{} at {:.3g}: {:.3f}", banded=False, here=found["here"])]


def batches(data: Data) -> list[Picture]:
    """Each policy over the batch size."""
    found: dict[str, Any] = data["details"]["batch"]
    lines = [(one["name"], one["to_best_fixed"]) for one in found["lines"][1:-1][:_MOST_LINES]]
    if len(found["sizes"]) < 2 or not lines:
        return []
    sizes = [float(size) for size in found["sizes"]]
    title = "Speed by batch size, best fixed length of that size = 1, 95% intervals"
    ticks = [(size, f"{size:g}") for size in sizes]
    return [_curves(title, "texts side by side", sizes, lines, ticks, "{} at {:g}: {:.3f}")]


def _curves(
    title: str,
    x_label: str,
    x: Sequence[float],
    lines: Sequence[tuple[str, Sequence[Interval]]],
    ticks: Sequence[tuple[float, str]],
    hint: str,
    looks: Sequence[str] | None = None,
    size: float = 3.0,
    banded: bool = True,
    here: float | None = None,
) -> Picture:
    """Return speeds against the best fixed length over x, which is shown on a logarithmic axis.

    Args:
        title, x_label: as of `Chart`.
        x: rising.
        lines: (name, ratio at each x).
        ticks: of x.
        hint: of a dot, from name, x and ratio.
        looks: classes of the lines; None = one after the other.
        size: of the dots.
        banded: whether intervals are shown.
        here: an x to be marked.
    """
    ratios = [ratio for _, some in lines for ratio in some]
    low, high = room(_ends(ratios) if banded else [ratio["value"] for ratio in ratios], 1.0)
    chart = Chart(
        title, (x[0] / 1.05, x[-1] * 1.05), (low, high), x_label, "times best fixed", x_ticks=ticks, log_x=True
    )
    chart.rule((x[0], 1.0), (x[-1], 1.0))
    if here is not None and x[0] <= here <= x[-1]:
        chart.rule((here, low), (here, high), "here")
    looks = looks or [series(at) for at in range(len(lines))]
    for look, (name, some) in zip(looks, lines, strict=True):
        if banded:
            _band(chart, list(zip(x, some, strict=True)), look)
        points = [(at, ratio["value"]) for at, ratio in zip(x, some, strict=True)]
        _series(chart, points, look, partial(hint.format, name), size)
    return Picture(chart.svg(), title, tuple(zip(looks, (name for name, _ in lines), strict=True)))


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
