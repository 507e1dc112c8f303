"""Write a report as HTML, Markdown, CSV and JSON, all from its JSON form (`Report.to_dict()`).

`sections` turns the JSON into headings, sentences and tables, which one template writes as HTML and another one as Markdown.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...policies.display import markdown, markdown_cell, printable
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import sampling_text
from ..report.decision_costs import FILE as DECISIONS_FILE
from ..statistics import FEWEST

if TYPE_CHECKING:
    from jinja2 import Environment

    from ..report.records import Report

Data = Mapping[str, Any]

FILES = ("report.html", "report.json", "report.md", "report.csv")

EXCERPT = 160
"""Characters of a prompt that a report shows."""

MOST_ROWS = 60
"""Rows of a table in Markdown."""


class Cell(NamedTuple):
    """A cell of a table: its text, the number by which its column is sorted (None = by the text), and a note below it."""

    text: str
    value: float | None = None
    note: str = ""

    @property
    def full_text(self) -> str:
        """The text, with the note in brackets."""
        return f"{self.text} ({self.note})" if self.note else self.text


@dataclass(frozen=True)
class Section:
    """A heading, sentences and a table. Its plot, if there is one, has the same id (`plots.draw`).

    Attributes:
        id, title, text: of the section.
        columns: headings of the table.
        rows: values that `cell` accepts. The first one of a row is its heading.
        is_long: whether the table is folded on the page and cut in Markdown.
    """

    id: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]
    is_long: bool = False

    @functools.cached_property
    def cells(self) -> list[list[Cell]]:
        """The rows of the table."""
        return [[cell(value) for value in row] for row in self.rows]


def number(value: float | None, form: str = ".3f", suffix: str = "") -> Cell:
    """Return a formatted number as a cell, a hyphen for None."""
    if value is None:
        return Cell("-")
    text = f"{value:{form}}"
    return Cell((text.replace("-", "") if not text.strip("-0.,%") else text) + suffix, value)  # -0.000 is shown as 0.000


def interval(ratio: Data, digits: int = 3, suffix: str = "") -> Cell:
    """Return a ratio with its interval as a cell: `1.042 [1.021, 1.063]`."""
    value, low, high = (number(ratio[part], f".{digits}f").text for part in ("value", "low", "high"))
    return Cell((value if ratio["low"] is None else f"{value} [{low}, {high}]") + suffix, ratio["value"])


def cell(value: Any) -> Cell:
    """Return a JSON value as a cell: a text, a number, or a ratio with `value`, `low`, `high` and perhaps a `verdict`."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, Mapping):
        return interval(value, suffix=f" {value['verdict']}" if value.get("verdict") else "")
    if value is None or isinstance(value, float):
        return number(value)
    return number(value, ",d") if isinstance(value, int) else Cell(str(value))


def write_report(
    report: Report, out: Path, *, overwrite: bool = False, decisions: Mapping[str, Any] | None = None
) -> None:
    """Write `FILES` into the folder `out`, all or none.

    Args:
        report: to write.
        out: folder.
        overwrite: whether to replace a report in `out`.
        decisions: timings of decisions that the profile lacks, written beside the report.

    Raises:
        InputError: `out` is not empty, or as `prepare_output_dir`.
    """
    data = {**report.to_dict(), "run": run_facts()}
    with staged_folder(prepare_output_dir(out, overwrite=overwrite)) as stage:
        if decisions is not None:
            write_json(stage / DECISIONS_FILE, decisions)
        write_json(stage / "report.json", data)
        write_atomic(stage / "report.html", to_html(data))
        write_atomic(stage / "report.md", to_markdown(data))
        write_atomic(stage / "report.csv", to_csv(data))


def run_facts() -> dict[str, str]:
    """Return the version of specstop, the time, and the command of this process ("" if it is not a specstop command)."""
    program = Path(sys.argv[0])
    is_command = program.name == "specstop" or program.parts[-3:] == ("specstop", "cli", "__main__.py")
    return {
        "specstop": version("specstop"),
        "created": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join(["specstop", *sys.argv[1:]]) if is_command else "",
    }


def prompt_excerpts(prompts_file: Path) -> dict[str, str]:
    """Return the beginning of each prompt by its id; nothing if the trace keeps no texts."""
    if not prompts_file.is_file():
        return {}
    with prompts_file.open(encoding="utf-8") as lines:
        prompts = [json.loads(line) for line in lines]
    return {x["id"]: " ".join(x["text"].split())[:EXCERPT] for x in prompts if "id" in x}


def to_html(data: Data) -> str:
    """Return the page, complete in one file.

    Args:
        data: `Report.to_dict()`, and `run_facts` under "run" if they are known.
    """
    from . import plots  # imports matplotlib

    drawn = {name: {"svg": plot.svg(f"plot-{name}"), "caption": plot.caption} for name, plot in plots.draw(data).items()}
    return printable(_environment().get_template("report.html.j2").render(_context(data), plots=drawn))


def to_markdown(data: Data) -> str:
    """Return the report as Markdown; see `to_html`."""
    return _environment().get_template("report.md.j2").render(_context(data))


def to_csv(data: Data) -> str:
    """Return the policies as CSV with all digits. A ratio has three columns: its value, `_low` and `_high`."""
    rows = []
    for line in data["lines"]:
        row = {}
        for name, value in line.items():
            if name not in ("parts", "to_rival"):
                is_ratio = isinstance(value, Mapping)
                row |= {name: value["value"], f"{name}_low": value["low"], f"{name}_high": value["high"]} if is_ratio else {name: value}  # fmt: skip
        rows.append({"policy": row.pop("name"), **row})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def headline(report: Report) -> str:
    """Return the verdict in one or two sentences."""
    return report.answer.headline if report.answer else "No policy was compared."


def policy_rows(report: Report) -> list[list[str]]:
    """Return the table of policies as texts, its headings first."""
    table = policies(report.to_dict())
    return [[*table.columns, "note"], *([*(each.text for each in row), row[0].note] for row in table.cells)]


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "anchor": lambda title: title.lower().replace(" ", "-"),
        "code": lambda text: Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))),
        "md": markdown,
        "md_cell": lambda text: markdown_cell(text, "|<`*[\\"),
        "quoted": lambda text: printable(json.dumps(text, ensure_ascii=False)),
        "visible": lambda text: re.sub(r"\n(?:[ \t]*\n)*", "⏎", text).translate({9: "⇥", 13: "␍"}),
    }
    return environment


def _context(data: Data) -> dict[str, Any]:
    """Return what both templates are rendered with."""
    answer, facts, run = data["answer"], data["facts"], data.get("run", {})
    profile = [facts.get("profile file"), *(facts["profile"].get(name) for name in ("device", "dtype"))]
    header = {
        "specstop": run.get("specstop"),
        "Date": run.get("created"),
        **{name.capitalize(): text for name, text in facts.get("models", {}).items()},
        "Trace": facts["traces"],
        "Profile": ", ".join(str(text) for text in profile if text),
        "Prompts": f"{facts['prompts']:,} held-out prompts, {facts['tokens']:,} tokens",
        "Command": run.get("command"),
    }
    action = f"{'Deploy' if answer['deploy'] else 'Use'} {answer['use']}" if answer else "No policy was compared"
    return {
        "data": data,
        "action": action,
        "key_figures": _key_figures(data) if answer else {},
        "header": {label: text for label, text in header.items() if text},
        "sections": sections(data),
        "notes": {
            "Caveats": data["caveats"],
            "Warnings": data["findings"],
            "How this was measured": _measured(facts),
        },
        "headline": answer["headline"] if answer else "No policy was compared.",
        "most_rows": MOST_ROWS,
        "prompt_texts": data["details"].get("prompt_texts", {}),
    }


def _key_figures(data: Data) -> dict[str, Cell]:
    """Return the ratios at the top by their label."""
    answer, lines = data["answer"], {line["name"]: line for line in data["lines"]}
    used, candidate = lines.get(answer["use"], lines["best fixed"]), lines[answer["candidate"]]
    ratios = {
        f"{answer['use']} relative to plain decoding": interval(used["to_plain"], 2),
        f"{answer['candidate']} relative to the best fixed length": interval(candidate["to_best_fixed"]),
    }
    if "oracle bound" in lines:
        ratios[f"{answer['candidate']}: share of the oracle gain"] = interval(candidate["oracle_share"], 2)
    return ratios


def _measured(facts: Data) -> list[str]:
    """Return how the figures were measured, one sentence each."""
    sampled = sampling_text(facts["temperature"], facts.get("shaping", {}))
    mode, shape = facts["mode"].replace(" (", " verification (", 1), str(facts.get("topology", ""))
    rounds = f", {facts['rounds']:,} single rounds" if "rounds" in facts else ""
    is_chain = not shape.replace("1", "").replace(",", "")
    candidates = f"a chain of up to {facts['depth']}" if is_chain else f"a tree of depth {facts['depth']} ({shape[:40]})"
    exactness = facts.get("exactness", "")
    clusters = f"; {facts['cluster choice']}" if facts.get("cluster choice") else ""
    return [
        f"Held-out data: {facts['prompts']:,} prompts, {facts['tokens']:,} tokens{rounds}.",
        f"Sampling: {sampled}, {mode}. Candidates of a round: {candidates}.",
        *([f"Replay: {exactness}."] if exactness.startswith(("exact", "nearly")) else []),
        f"Rates are modelled with the latency profile ({facts['profile'].get('device', 'unknown device')}). Counts are exact.",
        f"Intervals: {facts['intervals']}{clusters}. Ratios are paired between policies. Their intervals hold for all rules "
        "and learned policies at once. A primary policy has an interval for itself alone.",
        "Verdict, from the interval against the best fixed length (on trees, also against the best static tree): deploy if it "
        "lies above 1, inconclusive if it contains 1, do not deploy if it lies below 1. Too few prompts, a noisy profile or "
        "figures that contradict each other are reported instead.",
    ]


def policies(data: Data) -> Section:
    """Return the section with every policy, its speed and its verdict."""
    has_bound = any(line["kind"] == "bound" for line in data["lines"])
    rows: list[list[Any]] = []
    for line in data["lines"]:
        has_share = has_bound and line["name"] not in ("plain decoding", "best fixed", "oracle bound")
        has_counts = line["kind"] not in ("bound", "achievable")
        rows.append([
            Cell(line["name"], note=line["note"]), number(line["tokens_per_s"], ".1f"), line["to_best_fixed"],
            line["verdict"], line["to_plain"], interval(line["oracle_share"], 2) if has_share else "",
            *(number(line[name], ".2f") if has_counts else "" for name in ("block_efficiency", "drafted", "accepted")),
        ])  # fmt: skip
    rows += [[Cell(x["policy"], note=x["error"]), None, None, "failed", *[None] * 5] for x in data["failed"]]
    columns = (
        "policy", "tokens/s", "vs best fixed", "verdict", "vs plain", "share of the oracle gain", "tokens per target call",
        "drafted per round", "accepted per round",
    )  # fmt: skip
    text = (
        "Speed of every policy on the same prompts, with 95% intervals. Share of the oracle gain: 0 is the best fixed length, "
        "1 is the oracle bound, which knows every accepted length."
    )
    return Section("policies", "Policies", text, columns, rows)


def fixed_lengths(rates: Any, data: Data) -> Section:
    """Return the section on fixed lengths."""
    text = "Speed if every round drafts the same number of tokens. Length 0 is plain decoding."
    rows = [[k, number(rate, ".1f"), rate / rates[0]] for k, rate in enumerate(rates)]
    return Section("fixed", "Fixed lengths", text, ("length", "tokens/s", "vs plain"), rows)


def acceptance(bands: Any, data: Data) -> Section:
    """Return the section on P(A >= k)."""
    text = "Share of positions at which the target accepts at least k drafted tokens, with its 95% interval."
    rows = list(enumerate(bands, 1)) + [(k, None) for k in range(len(bands) + 1, int(data["facts"].get("depth", 0)) + 1)]
    return Section("acceptance", "Acceptance by depth", text, ("k", "P(A >= k)"), rows)


def calibration(found: Any, data: Data) -> Section:
    """Return the section on predicted and observed survival."""
    rows: list[list[Any]] = []
    for policy in found:
        for depth in policy["depths"]:
            every = depth["all"]
            observed = interval({**every, "value": every["observed"]})
            errors = (depth["ece"], depth["ece_perfect"])
            rows.append([policy["name"], depth["depth"], every["count"], every["predicted"], observed, *errors])
        rows.append([policy["name"], "all", "", "", "", policy["ece"], policy["ece_perfect"]])
    text = (
        "Survival is the probability that a token and all tokens before it are accepted, in the rounds that the policy itself "
        "visits. The calibration error is the mean distance between predicted and observed survival over ten bins of equal "
        "size. A perfectly calibrated predictor would have the error in the last column by chance. For a policy that first "
        "decides at a depth above 1, survival is conditional on acceptance up to that depth."
    )
    columns = ("policy", "depth", "candidates", "predicted", "observed", "calibration error", "error if perfect")
    return Section("reliability", "Calibration", text, columns, rows)


def batch_sizes(found: Any, data: Data) -> Section:
    """Return the section on batches, one row per batch size and policy."""
    rows: list[list[Any]] = []
    for at, size in enumerate(found["sizes"]):
        rows.append([size, "plain decoding", number(found["plain"][at], ".1f"), *[None] * 4])
        for line in found["lines"]:
            name = f"best fixed (fixed:{found['best_fixed'][at]})" if line is found["lines"][0] else line["name"]
            waits = [x and interval(x, 2) for x in (line["latency_s"][at], line["latency_p95_s"][at])]
            share = interval(line["oracle_share"][at], 2)
            rows.append([size, name, number(line["tokens_per_s"][at], ".1f"), line["to_best_fixed"][at], share, *waits])
    text = (
        f"{found['words']} Texts are decoded in batches that share draft steps and verifications. When a text ends, the next "
        "one takes its slot. The best fixed length is chosen for each batch size, and again in each bootstrap replicate. "
        "Latency is the time from the arrival of a request to its last token."
    )
    columns = (
        "batch size", "policy", "tokens/s", "vs best fixed", "share of the oracle gain", "mean latency, s",
        "95th percentile of latency, s",
    )  # fmt: skip
    return Section("batch", "Batch sizes", text, columns, rows)


def time_per_token(found: Any, data: Data) -> Section:
    """Return the section on where time goes."""
    columns = ("policy", "draft", "verification", "decisions", "framework overhead", "reading prompts", "total")
    parts = ("draft_ms", "verify_ms", "decision_ms", "outside_ms", "prompt_ms", "total_ms")
    rows = [[line["name"], *(line[part] for part in parts)] for line in found]
    return Section("time", "Time per token", "Modelled milliseconds for each token of text, by cause.", columns, rows)


def stop_costs(found: Any, data: Data) -> Section:
    """Return the section on what wrong stops cost."""
    rows = [
        [x["name"], x["rounds"], x["early_rounds"], x["early_s"], x["late_rounds"], x["late_s"], x["decision_s"],
         x["other_s"], x["total_s"]]
        for x in found
    ]  # fmt: skip
    columns = (
        "policy", "rounds", "rounds stopped too early", "too early, s", "rounds stopped too late", "too late, s",
        "decisions, s", "catching up, s", "total, s",
    )  # fmt: skip
    text = (
        "Seconds lost against the oracle from the same anchors. Too early: the round committed less than the ideal round. Too "
        "late: it drafted or verified more without a gain. Catching up: the draft reads tokens that it has not read. The "
        "total is the difference to the oracle bound."
    )
    return Section("stops", "Cost of wrong stops", text, columns, rows)


def uncertainty(lines: Any, data: Data) -> Section:
    """Return the section on the intervals behind the verdicts, by source of error."""
    sources = ("all", "prompts", "profile", "decisions")
    rows = [[x["name"], *(x["parts"][source] for source in sources), x["verdict"]] for x in lines if x.get("parts")]
    text = (
        "Speed against the best fixed length or static tree. Each column resamples one source of error and keeps the others. "
        "A policy is not deployed if the timings alone could change the sign of its gain."
    )
    columns = ("policy", "all sources", "prompts", "timings of model calls", "timings of decisions", "verdict")
    return Section("uncertainty", "Sources of uncertainty", text, columns, rows)


def lengths(found: Any, data: Data) -> Section:
    """Return the section on chosen and ideal depths."""
    policy, fixed = found
    rows = list(zip(range(len(policy["chosen"])), policy["chosen"], policy["ideal"], fixed["chosen"], strict=True))
    text = f"Rounds by draft depth: those of {policy['name']}, those of the oracle from the same anchors, and the best fixed length."
    return Section("lengths", "Chosen and ideal depth", text, ("depth", policy["name"], "ideal", "best fixed"), rows)


def groups(found: Any, data: Data) -> Section:
    """Return the section on groups of prompts."""
    rows = []
    for group in found:
        is_judged = group["prompts"] >= FEWEST
        ratios = [
            interval(r, suffix=" (below 1)" if is_judged and r["high"] is not None and r["high"] < 1 else "")
            for r in group["ratios"].values()
        ]
        rows.append([group["name"] or "(no name)", group["prompts"], group["tokens"], group["best_fixed"], *ratios])
    columns = ("group", "prompts", "tokens", "best fixed of the group", *found[0]["ratios"])
    text = (
        "Speed against the best fixed length of all prompts. Each interval is for one policy and one group alone. Intervals "
        f"below 1 are marked in groups of at least {FEWEST} prompts."
    )
    return Section("groups", "Groups of prompts", text, columns, rows, is_long=True)


def _prompt(entry: Data, data: Data) -> Cell:
    """Return a prompt as a cell: its text, and its id below."""
    text = data["details"].get("prompt_texts", {}).get(entry["prompt"])
    return Cell(text[:80], note=entry["prompt"]) if text else Cell(entry["prompt"])


def prompts(found: Any, data: Data) -> Section:
    """Return the section on single prompts, those with the largest loss first."""
    subject = data["details"]["subject"]
    ordered = sorted(found, key=lambda x: float(x["policy"] / x["fixed"]))
    rows = [[_prompt(x, data), x["group"], x["fixed"], x["policy"], x["policy"] / x["fixed"]] for x in ordered]
    slower = sum(x["policy"] < x["fixed"] for x in found)
    text = f"Speed-up over plain decoding. {subject} is slower than the best fixed length on {slower} of {len(found)} prompts."
    columns = ("prompt", "group", "best fixed", subject, f"{subject} vs best fixed")
    return Section("prompts", "Speed by prompt", text, columns, rows, is_long=True)


def sensitivity(found: Any, data: Data) -> Section:
    """Return the section on other latencies."""
    rows = [
        [x["what"] if x["factor"] == 1.0 else f"{x['what']} × {x['factor']:g}", x["best_fixed"], *x["ratios"].values()]
        for x in found
    ]
    text = (
        "Speed against the best fixed length if a part of the latency were several times what the profile says. The best "
        "fixed length is chosen again. Policies stop as they did."
    )
    return Section("sensitivity", "Other latencies", text, ("latency", "best fixed", *found[0]["ratios"]), rows)


def draft_costs(found: Any, data: Data) -> Section:
    """Return the section on cheaper and more expensive drafts."""
    rows = [
        [number(ratio, ".3g"), f"fixed:{found['best_fixed'][at]}", *(line["to_best_fixed"][at] for line in found["lines"])]
        for at, ratio in enumerate(found["ratios"])
    ]
    verdicts = " ".join(f"{x['name']}: {x['verdict']}{f' ({note})' if (note := x['note']) else ''}." for x in found["lines"])
    text = (
        "Speed against the best fixed length by the cost of a draft step relative to a one-token target step. In this profile "
        f"it is {found['here']:.3g}. {verdicts}"
    )
    columns = ("cost of a draft step", "best fixed", *(line["name"] for line in found["lines"]))
    return Section("sweep", "Cost of a draft step", text, columns, rows)


def largest_losses(found: Any, data: Data) -> Section:
    """Return the section on the prompts that lose most. The templates show the rounds themselves."""
    rows = [
        [_prompt(x, data), x["group"], number(x["early_ms"], ".1f"), number(x["late_ms"], ".1f"), x["to_best_fixed"]]
        for x in found
    ]
    text = (
        f"Prompts on which wrong stops cost {data['details']['subject']} most, and the worst rounds of each. ▢ is a token that "
        "only the target proposed: a trace does not contain it."
    )
    columns = ("prompt", "group", "too early, ms", "too late, ms", "vs best fixed")
    return Section("losses", "Prompts with the largest losses", text, columns, rows)


SECTIONS: Mapping[str, Callable[[Any, Data], Section]] = {
    "lines": lambda found, data: policies(data),
    "places": lambda found, data: Section("places", **found),
    "comparison": lambda found, data: Section("comparison", **found),
    "fixed": fixed_lengths,
    "bands": acceptance,
    "reliability": calibration,
    "time": time_per_token,
    "batch": batch_sizes,
    "stops": stop_costs,
    "lengths": lengths,
    "parts": uncertainty,
    "sensitivity": sensitivity,
    "sweep": draft_costs,
    "groups": groups,
    "prompts": prompts,
    "losses": largest_losses,
}
"""Function that writes a section, by its key in the report or in its details. Of "places" and "comparison", the JSON has the
arguments of `Section`: title, text, columns, rows."""


def sections(data: Data) -> list[Section]:
    """Return the sections of a report in order."""
    parts = data["lines"] if any(line.get("parts") for line in data["lines"]) else None
    found = {**data["details"], **{name: data[name] for name in ("lines", "fixed", "bands")}, "parts": parts}
    return [write(found[name], data) for name, write in SECTIONS.items() if found.get(name)]
