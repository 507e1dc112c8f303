"""Write a report as HTML, Markdown, CSV and JSON, all from its JSON form (`Report.to_dict()`).

`sections` turns the JSON into headings, sentences and tables. One template writes them as HTML, one as Markdown.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...policies.display import markdown, markdown_cell, printable
from ...policies.files import prepare_output_dir, staged_folder, write_atomic, write_json
from ...policies.learned import sampling_text

if TYPE_CHECKING:
    from jinja2 import Environment

    from .records import Report

Data = Mapping[str, Any]

FILES = ("report.html", "report.json", "report.md", "report.csv")

RATIOS, COUNTS = ("to_plain", "to_best_fixed", "oracle_share"), ("block_efficiency", "drafted", "verified", "accepted")

EXCERPT, COLUMN = 160, 48
"""Characters of a prompt that a report keeps, and those that it shows."""

MAX_ROWS = 20
"""Longer tables are folded on the page, and cut in Markdown."""


class Cell(NamedTuple):
    """A cell of a table: its text, the number by which its column is sorted (None: by the text), and a note."""

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
    """

    id: str
    title: str
    text: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Any]]

    @functools.cached_property
    def cells(self) -> list[list[Cell]]:
        """The rows of the table."""
        return [[cell(value) for value in row] for row in self.rows]


def number(value: float | None, form: str = ".3f") -> Cell:
    """Return a formatted number as a cell, a hyphen for None."""
    if value is None:
        return Cell("-")
    text = f"{value:{form}}"
    return Cell(text if text.strip("-0.,") else text.replace("-", ""), value)  # -0.000 is shown as 0.000


def interval(ratio: Data, digits: int = 3) -> Cell:
    """Return a ratio as a cell, with its interval if it has one: `1.042 [1.021, 1.063]`."""
    value, low, high = (number(ratio[part], f".{digits}f").text for part in ("value", "low", "high"))
    return Cell(value if ratio["low"] is None else f"{value} [{low}, {high}]", ratio["value"])


def cell(value: Any) -> Cell:
    """Return a JSON value as a cell: a text, a number, or a ratio as of `interval`."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, Mapping):
        return interval(value)
    if value is None or isinstance(value, float):
        return number(value)
    return number(value, ",d") if isinstance(value, int) else Cell(str(value))


def write_report(report: Report, out: Path, *, overwrite: bool = False) -> None:
    """Write `FILES` into the folder `out`, all or none.

    Args:
        report: to write.
        out: folder.
        overwrite: whether to replace a report in `out`.

    Raises:
        InputError: `out` is not empty, or as `prepare_output_dir`.
    """
    data = {**report.to_dict(), "run": run_facts()}
    data["prompt_texts"] = prompt_texts(data)
    with staged_folder(prepare_output_dir(out, overwrite=overwrite)) as stage:
        write_json(stage / "report.json", data)
        write_atomic(stage / "report.html", to_html(data))
        write_atomic(stage / "report.md", to_markdown(data))
        write_atomic(stage / "report.csv", to_csv(data))


def run_facts() -> dict[str, str]:
    """Return the version of specstop, the time, and the command of this process ("" if it is none of specstop)."""
    return {
        "specstop": version("specstop"),
        "created": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "command": shlex.join(["specstop", *sys.argv[1:]]) if Path(sys.argv[0]).stem == "specstop" else "",
    }


def prompt_texts(data: Data) -> dict[str, str]:
    """Return the beginning of the prompts that a report names, by id; nothing if the trace keeps no texts.

    Text that all of them begin with is left out if it fills the column, such as that of a chat template.
    """
    details, path = data["details"], Path(data["facts"]["traces"], "prompts.jsonl")
    names = {x["prompt"] for x in details.get("prompts", ())}
    if not names or not path.is_file():
        return {}
    with path.open(encoding="utf-8") as lines:
        prompts = [x for x in map(json.loads, lines) if x.get("id") in names]
    common = len(os.path.commonprefix([x["text"] for x in prompts]))  # noqa: RUF071 - of characters
    begin = common if len(prompts) > 1 and common > COLUMN // 2 else 0
    return {x["id"]: " ".join(x["text"][begin:].split())[:EXCERPT] for x in prompts}


def to_html(data: Data) -> str:
    """Return the page, complete in one file.

    Args:
        data: `Report.to_dict()`, with `run_facts` as "run" and `prompt_texts` if they are known.
    """
    from . import plots  # imports matplotlib

    drawings = plots.draw(data, SECTIONS["time"][2])
    return printable(_environment().get_template("report.html.j2").render(_context(data), plots=drawings))


def to_markdown(data: Data) -> str:
    """Return the report as Markdown; see `to_html`."""
    return _environment().get_template("report.md.j2").render(_context(data))


def to_csv(data: Data) -> str:
    """Return the policies as CSV with all digits. A ratio has three columns: its value, `_low` and `_high`."""
    rows: list[dict[str, Any]] = []
    for place, report in (data["places"] or {"": data}).items():
        for line in report["lines"]:
            rows.append({"place": place, "policy": line["name"]} if place else {"policy": line["name"]})
            for name in ("kind", "tokens_per_s", *RATIOS, *COUNTS, "verdict", "note"):
                ratio = line[name] if name in RATIOS else {"value": line[name]}
                rows[-1] |= {name if part == "value" else f"{name}_{part}": value for part, value in ratio.items()}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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
    }
    return environment


def _context(data: Data) -> dict[str, Any]:
    """Return what both templates are rendered with."""
    answer, facts, run = data["answer"], data["facts"], data.get("run", {})
    verb = "" if answer is None else "Deploy" if answer["deploy"] else "Use"
    profile = [facts.get("profile file"), *(facts.get("profile", {}).get(name) for name in ("device", "dtype"))]
    header = {
        "specstop": run.get("specstop"),
        "Date": run.get("created"),
        **{name.capitalize(): text for name, text in facts.get("models", {}).items()},
        "Trace": facts["traces"],
        "Profile": ", ".join(str(text) for text in profile if text),
        "Prompts": "" if data["places"] else f"{facts['prompts']:,} held-out prompts, {facts['tokens']:,} tokens",
        "Command": run.get("command"),
    }
    nothing = "Where to deploy each policy" if data["places"] else "No policy was compared"
    return {
        "data": data,
        "action": f"{verb} {answer['use']}" if answer else nothing,
        "key_figures": _key_figures(data) if answer else {},
        "header": {label: text for label, text in header.items() if text},
        "sections": sections(data),
        "notes": {
            "Caveats": data["caveats"],
            "Warnings": data["findings"],
            "How this was measured": ([] if data["places"] else _measured(facts)) + [INTERVALS, VERDICTS],
        },
        "max_rows": MAX_ROWS,
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
    sampled = sampling_text(facts["temperature"], facts.get("sampling", {}))
    mode, shape = facts["mode"].replace(" (", " verification (", 1), str(facts.get("topology", ""))
    rounds = f", {facts['rounds']:,} single rounds" if "rounds" in facts else ""
    is_chain = not set(shape) - set("1,|")
    candidates = f"a chain of up to {facts['depth']}" if is_chain else f"a tree ({shape[:40]})"
    exactness = facts.get("exactness", "")
    return [
        f"Held-out data: {facts['prompts']:,} prompts, {facts['tokens']:,} tokens{rounds}.",
        f"Sampling: {sampled}, {mode}. Candidates of a round: {candidates}.",
        *([f"Replay: {exactness}."] if exactness.startswith("exact") else []),
        f"Rates are modelled with the latency profile ({facts['profile'].get('device', 'unknown device')}). Counts are"
        " exact.",
        f"Intervals: {facts['intervals']}.",
    ]


INTERVALS = (
    "Ratios are paired between policies. Their intervals hold for all rules and learned policies at once. A primary policy "
    "has an interval for itself alone."
)
VERDICTS = (
    "Verdict, from the interval against the best fixed length (on trees, also against the best static tree): deploy if it "
    "lies above 1, inconclusive if it contains 1, do not deploy if it lies below 1. Too few prompts or a noisy profile are "
    "reported instead."
)

SECTIONS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "policies": (
        "Policies",
        "Speed of every policy on the same prompts, with 95% intervals. Share of the oracle gain: 0 is the best fixed"
        " length, 1 is the oracle bound, which knows every accepted length. Tokens per call are committed tokens per"
        " target call. Drafted and accepted are tokens per round.",
        {"policy": "policy", "tokens_per_s": "tokens/s", "to_best_fixed": "vs best fixed", "verdict": "verdict",
         "to_plain": "vs plain", "oracle_share": "share of the oracle gain", "block_efficiency": "tokens per call",
         "drafted": "drafted", "accepted": "accepted",
         "drafters": "rounds of each drafter"},
    ),
    "fixed": (
        "Fixed lengths",
        "Speed if every round drafts the same number of tokens, with the drafter for which that is fastest. Length 0 is "
        "plain decoding.",
        {"length": "length", "rate": "tokens/s", "ratio": "vs plain"},
    ),
    "acceptance": (
        "Acceptance by depth",
        "Share of positions at which the target accepts at least k drafted tokens, with its 95% interval.",
        {"k": "k", "share": "P(A >= k)"},
    ),
    "reliability": (
        "Calibration",
        "Survival is the probability that a token and all tokens before it are accepted, in the rounds that the "
        "policy itself visits. The calibration error is the mean distance between predicted and observed survival "
        "over ten bins of equal size. The last column is the error that perfect predictions would show by chance. For"
        " a policy that first decides at a depth above 1, survival is conditional on acceptance up to that depth.",
        {"name": "policy", "depth": "depth", "count": "candidates", "predicted": "predicted", "observed": "observed",
         "ece": "calibration error", "ece_perfect": "error if perfect"},
    ),
    "time": (
        "Time per token",
        "Modelled milliseconds for each token of text, by cause.",
        {"name": "policy", "draft_ms": "draft", "verify_ms": "verification", "decision_ms": "decisions",
         "outside_ms": "framework overhead", "prompt_ms": "reading prompts", "total_ms": "total"},
    ),
    "batch": (
        "Batch sizes",
        "Texts are decoded in batches that share draft steps and verifications. When a text ends, the next one takes "
        "its slot. The best fixed length is chosen for each batch size, and again in each bootstrap replicate. "
        "Latency is the time from the arrival of a request to its last token.",
        {"size": "batch size", "name": "policy", "tokens_per_s": "tokens/s", "to_best_fixed": "vs best fixed",
         "oracle_share": "share of the oracle gain", "latency_s": "mean latency, s",
         "latency_p95_s": "95th percentile of latency, s"},
    ),
    "stops": (
        "Cost of wrong stops",
        "Seconds lost against the oracle from the same anchors. Too early: the round committed less than the ideal "
        "round. Too late: it drafted or verified more without a gain. Catching up: the draft reads tokens that it has"
        " not read. The total is the difference to the oracle bound.",
        {"name": "policy", "rounds": "rounds", "early_rounds": "rounds stopped too early", "early_s": "too early, s",
         "late_rounds": "rounds stopped too late", "late_s": "too late, s", "decision_s": "decisions, s",
         "other_s": "catching up, s", "total_s": "total, s"},
    ),
    "routes": (
        "Cost of wrong routes",
        "Seconds lost against the oracle from the same anchors by the choice of the drafter, without decisions. Other "
        "drafter: it used a worse drafter than the ideal round. Other length: it used the same one, and drafted too "
        "much or too little. Drafted in vain: plain decoding was best. Not drafted: drafting was best.",
        {"name": "policy", "rounds": "rounds", "drafter_rounds": "other drafter", "drafter_s": "other drafter, s",
         "length_rounds": "other length", "length_s": "other length, s", "drafted_rounds": "drafted in vain",
         "drafted_s": "drafted in vain, s", "plain_rounds": "not drafted", "plain_s": "not drafted, s"},
    ),
    "uncertainty": (
        "Sources of uncertainty",
        "Speed against the best fixed length or static tree. Each column resamples one source of error and keeps the "
        "others. A policy is not deployed if the timings alone could change the sign of its gain.",
        {"policy": "policy", "all": "all sources", "prompts": "prompts", "profile": "timings of the profile",
         "verdict": "verdict"},
    ),
    "groups": (
        "Groups of prompts",
        "Speed against the best fixed length of the group, chosen on its prompts. Each interval is for one policy and one "
        "group alone.",
        {"name": "group", "prompts": "prompts", "tokens": "tokens", "best_fixed": "best fixed of the group"},
    ),
    "prompts": (
        "Speed by prompt",
        "Speed-up over plain decoding, the prompts on which {subject} loses most first.",
        {"prompt": "prompt", "group": "group", "fixed": "best fixed", "policy": "{subject}", "ratio": "vs best fixed"},
    ),
}  # fmt: skip
"""Title, text and columns (heading by key of the rows) of every section in order. Ratios by policy are more columns."""


def sections(data: Data) -> list[Section]:
    """Return the sections of a report in order: the policies, any details with title, text, columns and rows, and others.

    A report on several places has a section with the policies of each.
    """
    if data["places"]:
        at_places = [(name, sections(place)[0]) for name, place in data["places"].items()]
        return [
            dataclasses.replace(section, id=f"policies-{at}", title=f"Policies on {name}", text=_place_text(data, name))
            for at, (name, section) in enumerate(at_places, 1)
        ]
    subject = data["details"].get("subject", "")
    tables = {name: rows for name, rows in _rows(data).items() if rows}
    out = []
    for name, (title, text, keys) in SECTIONS.items():
        if name in tables:
            rows = tables[name]
            if not any(row.get("drafters") for row in rows):  # no policy routes
                keys = {key: heading for key, heading in keys.items() if key != "drafters"}
            by_policy = rows[0].get("ratios", {})
            columns = [*(heading.replace("{subject}", subject) for heading in keys.values()), *by_policy]
            cells = [[*(row.get(key, "") for key in keys), *row.get("ratios", {}).values()] for row in rows]
            text = text.replace("{subject}", subject) + (
                f" {data['details']['batch']['words']}" if name == "batch" else ""
            )
            out.append(Section(name, title, text, columns, cells))
    complete = {"title", "text", "columns", "rows"}
    details = {name: value for name, value in data["details"].items() if isinstance(value, Mapping)}
    out[1:1] = [Section(name, **value) for name, value in details.items() if value.keys() == complete]
    return out


def _place_text(data: Data, name: str) -> str:
    """Return what a place is, and the verdict there."""
    place = data["places"][name]
    facts = place["facts"]
    answer = f" {place['answer']['headline']}" if place["answer"] else ""
    return f"{facts['prompts']:,} held-out prompts, {facts['tokens']:,} tokens; {facts['intervals']}.{answer}"


def _rows(data: Data) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the tables by section. A row has values that `cell` accepts by the keys of `SECTIONS`."""
    details, fixed, bands, lines = data["details"], data["fixed"], data["bands"], data["lines"]
    depth = max(len(bands), int(data["facts"].get("depth", 0)))
    texts = data.get("prompt_texts", {})

    def prompt(row: Data) -> dict[str, Any]:
        text, name = texts.get(row["prompt"]), row["prompt"]
        return {**row, "prompt": Cell(text[:COLUMN], note=name) if text else name}

    prompts = [prompt({**x, "ratio": x["policy"] / x["fixed"]}) for x in details.get("prompts", ())]
    return {
        **{name: details.get(name) or [] for name in ("time", "stops", "routes", "groups")},
        "policies": _policies(data),
        "fixed": [{"length": k, "rate": number(x, ".1f"), "ratio": x / fixed[0]} for k, x in enumerate(fixed)],
        "acceptance": [{"k": k + 1, "share": bands[k] if k < len(bands) else None} for k in range(depth)],
        "reliability": [row for policy in details.get("reliability", ()) for row in _calibration(policy)],
        "batch": _batches(details["batch"]) if details.get("batch") else [],
        "uncertainty": [{"policy": x["name"], **x["parts"], "verdict": x["verdict"]} for x in lines if x.get("parts")],
        "prompts": sorted(prompts, key=lambda row: float(row["ratio"])),
    }


def _policies(data: Data) -> list[dict[str, Any]]:
    has_bound = any(line["kind"] == "bound" for line in data["lines"])
    rows: list[dict[str, Any]] = []
    for line in data["lines"]:
        row = {
            **line,
            "policy": Cell(line["name"], note=line["note"]),
            "tokens_per_s": number(line["tokens_per_s"], ".1f"),
        }
        has_share = has_bound and line["name"] not in ("plain decoding", "best fixed", "oracle bound")
        row["oracle_share"] = interval(line["oracle_share"], 2) if has_share else ""
        shares = (f"{name} {100 * share:.0f}%" for name, share in line["drafters"].items())
        row["drafters"] = ", ".join(shares)
        has_counts = line["kind"] not in ("bound", "achievable", "hindsight")
        rows.append(row | {name: number(line[name], ".2f") if has_counts else "" for name in COUNTS})
    return rows + [{"policy": Cell(x["policy"], note=x["error"]), "verdict": "failed"} for x in data["failed"]]


def _calibration(policy: Data) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for depth in policy["depths"]:
        observed = {**depth["all"], "value": depth["all"]["observed"]}
        rows.append({**depth, **depth["all"], "name": policy["name"], "observed": observed})
    return [*rows, {"name": policy["name"], "depth": "all", "ece": policy["ece"], "ece_perfect": policy["ece_perfect"]}]


def _batches(batch: Data) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for at, size in enumerate(batch["sizes"]):
        rows.append({"size": size, "name": "plain decoding", "tokens_per_s": number(batch["plain"][at], ".1f")})
        for line in batch["lines"]:
            row = {key: values[at] for key, values in line.items() if key != "name"}
            name = f"best fixed (fixed:{batch['best_fixed'][at]})" if line["name"] == "best fixed" else line["name"]
            rows.append({**row, "size": size, "name": name, "tokens_per_s": number(row["tokens_per_s"], ".1f")})
    return rows
