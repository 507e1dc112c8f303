"""A report as sections of words and tables, made from its JSON form alone; page, Markdown and CSV are written from them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ....decode.benchmark import Ratio
from ...evaluate.statistics import FEWEST
from .batches import batches
from .model import Cell, Data, Mark, Num, Path, Section, Spread, Table, nums
from .whatif import prepared, sensitivity, sweep

_REFERENCES = ("plain decoding", "best fixed", "oracle bound")


def speed_table(data: Data) -> Table:
    """Return the table of policies."""
    rows: list[tuple[Cell, ...]] = []
    for at, line in enumerate(data["lines"]):
        path: Path = ("lines", at)
        counts: tuple[Cell, ...] = ("", "", "")
        if line["kind"] not in ("bound", "achievable"):
            counts = nums(path, "block_efficiency", "drafted", "accepted", form=".2f")
        gap = "" if line["name"] in _REFERENCES or not _has_bound(data) else Spread((*path, "oracle_share"), 2)
        told = Mark(line["verdict"]) if line["verdict"] else ""
        ratios = (Spread((*path, "to_plain")), Spread((*path, "to_best_fixed")))
        rows.append((line["name"], Num((*path, "tokens_per_s"), ".1f"), told, *ratios, gap, *counts))
    notes = tuple(line["note"] for line in data["lines"])
    return Table("Speed of every policy", COLUMNS, tuple(rows), notes=notes)


COLUMNS = (
    "policy",
    "tokens/s",
    "verdict",
    "vs plain",
    "vs best fixed",
    "share of the oracle gain",
    "block eff.",
    "drafted",
    "accepted",
)


def _has_bound(data: Data) -> bool:
    return any(line["kind"] == "bound" for line in data["lines"])


def speeds(found: Any, data: Data) -> Section:
    """Every policy, and every fixed length."""
    fixed = tuple((str(k), Num(("fixed", k), ".1f")) for k in range(len(data["fixed"])))
    return Section(
        "speed",
        "Speed",
        (
            f"Ratios, paired between policies ({data['facts']['intervals']}); intervals of the ratios hold for all rules and "
            "learned policies at once, except that of a primary policy. Share of the oracle gain: 0 is the best fixed "
            "length, 1 the oracle bound. Verdict: the interval against the best fixed length (on trees, the best static "
            "tree as well) lies above 1 (deploy), contains 1 (inconclusive) or lies below 1 (do not deploy), unless there "
            "are too few prompts, the profile is too noisy, or the report contradicts itself (measure again).",
        ),
        (speed_table(data), Table("Tokens/s by fixed length", ("length", "tokens/s"), fixed)),
        open=True,
    )


PARTS_OF = (
    ("all", "interval"),
    ("prompts", "prompts alone"),
    ("profile", "model calls alone"),
    ("decisions", "decisions alone"),
)


def parts(found: Any, data: Data) -> Section:
    """What the intervals behind each verdict are made of."""
    rows = tuple(
        (line["name"], *(Spread(("lines", at, "parts", part)) for part, _ in PARTS_OF), Mark(line["verdict"]))
        for at, line in enumerate(found)
        if line.get("parts")
    )
    columns = ("policy", *(label for _, label in PARTS_OF), "verdict")
    return Section(
        "parts",
        "What the intervals are made of",
        (
            "Speed against what needs no policy. Other prompts would have given another figure, and so would other timings "
            "on this machine: of draft steps and verifications, and of the policy's decisions. Each column draws one of them "
            "anew and leaves the others as they were found; the interval draws all. Nothing is to be deployed where timings "
            "alone could turn the sign.",
        ),
        (Table("Intervals by what is drawn", columns, rows),),
    )


def acceptance(found: Any, data: Data) -> Section:
    """How long the draft holds."""
    rows: list[tuple[Cell, ...]] = [(str(k), Spread(("bands", k - 1))) for k in range(1, len(found) + 1)]
    rows += [(str(k), "-") for k in range(len(found) + 1, int(data["facts"].get("depth", 0)) + 1)]  # not observed
    return Section(
        "acceptance",
        "Acceptance by depth",
        (
            "Share of positions at which the target accepts at least so many drafted tokens; the band is the 95% interval.",
        ),
        (Table("P(A >= k)", ("k", "P(A >= k)"), tuple(rows)),),
    )


def lengths(found: Any, data: Data) -> Section:
    """Chosen against ideal."""
    mine = found[0]
    depth = range(len(mine["chosen"]))
    where: Path = ("details", "lengths")
    columns = ((0, "chosen"), (0, "ideal"), (1, "chosen"))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (str(k), *(Num((*where, i, name, k), ".0f") for i, name in columns)) for k in depth
    )
    return Section(
        "lengths",
        "Chosen against ideal length",
        (
            f"Rounds of {mine['name']} by the depth it drafted to, beside what the oracle would have drafted at the "
            "same positions.",
        ),
        (Table("Rounds by depth", ("depth", f"{mine['name']}: chosen", "ideal", "best fixed: chosen"), rows),),
    )


def reliability(found: Any, data: Data) -> Section:
    """Predicted against observed survival."""
    tables = []
    for at, policy in enumerate(found):
        path: Path = ("details", "reliability", at)
        rows: list[tuple[Cell, ...]] = []
        for i, depth in enumerate(policy["depths"]):
            here: Path = (*path, "depths", i)
            predicted, observed, low, high = nums((*here, "all"), "predicted", "observed", "low", "high")
            shown = (observed, " [", low, ", ", high, "]")
            count = Num((*here, "all", "count"), ",.0f")
            rows.append((str(depth["depth"]), count, predicted, shown, *nums(here, "ece", "ece_perfect")))
        rows.append(("all", "", "", "", *nums(path, "ece", "ece_perfect")))
        columns = ("depth", "candidates", "predicted", "observed", "calibration error", "if perfect")
        tables.append(Table(policy["name"], columns, tuple(rows)))
    late = tuple(
        f"{policy['name']} first decides at depth {policy['depths'][0]['depth']}: there its survival begins, given what "
        "lies before it."
        for policy in found
        if policy["depths"] and policy["depths"][0]["depth"] > 1
    )
    return Section(
        "reliability",
        "Can the predictions be believed?",
        (
            "Predicted survival, the chance that a token and all before it are accepted, against what was accepted, in the "
            "rounds that the policy itself comes to. Calibration error: mean distance over ten bins of equal size; if "
            "perfect: what a perfectly calibrated predictor of the same predictions would show by chance.",
            *late,
        ),
        tuple(tables),
    )


TIME_PARTS = (
    ("draft_ms", "draft"),
    ("verify_ms", "verification"),
    ("decision_ms", "decisions"),
    ("outside_ms", "framework overhead"),
    ("prompt_ms", "reading prompts"),
)
STOP_PARTS = ("too early", "too late", "decisions", "catching up")


def time(found: Any, data: Data) -> Section:
    """Where time goes."""
    keys = [key for key, _ in TIME_PARTS]
    rows = tuple((one["name"], *nums(("details", "time", at), *keys, "total_ms")) for at, one in enumerate(found))
    columns = ("policy", *(label for _, label in TIME_PARTS), "all")
    return Section(
        "time",
        "Where time goes",
        ("Modelled milliseconds for each token of text.",),
        (Table("ms per token", columns, rows),),
    )


def stops(found: Any, data: Data) -> Section:
    """What wrong stops cost."""
    rows: list[tuple[Cell, ...]] = []
    for at, one in enumerate(found):
        path: Path = ("details", "stops", at)
        formats = (
            ("rounds", ",.0f"), ("early_rounds", ",.0f"), ("early_s", ".3f"), ("late_rounds", ",.0f"),
            ("late_s", ".3f"), ("decision_s", ".3f"), ("other_s", ".3f"), ("total_s", ".3f"),
        )  # fmt: skip
        rows.append((one["name"], *(Num((*path, name), form) for name, form in formats)))
    columns = (
        "policy", "rounds", "too early", "s", "too late", "s", "decisions, s", "catching up, s", "all, s",
    )  # fmt: skip
    return Section(
        "stops",
        "The cost of wrong stops",
        (
            "Against the oracle going on from the same anchor. Too early: the round committed less than the ideal one. "
            "Too late: it drafted or sent more for nothing. Catching up: reading what the draft had not read. The parts add "
            "up to the time by which a policy is slower than the bound.",
        ),
        (Table("Losses against the oracle", columns, tuple(rows)),),
    )


def groups(found: Any, data: Data) -> Section:
    """By group of prompts."""
    names = list(found[0]["ratios"])
    rows: list[tuple[Cell, ...]] = []
    for at, group in enumerate(found):
        path: Path = ("details", "groups", at)
        cells: list[Cell] = []
        for name in names:
            ratio = group["ratios"][name]
            number = Spread((*path, "ratios", name))
            is_below = group["prompts"] >= FEWEST and Ratio(**ratio).is_below
            cells.append((number, " below") if is_below else number)
        counts = nums(path, "prompts", "tokens", form=",.0f")
        rows.append((group["name"] or "(no name)", *counts, group["best_fixed"], *cells))
    best = next(line["note"] for line in data["lines"] if line["name"] == "best fixed").partition(",")[0]
    return Section(
        "groups",
        "By group",
        (
            f"Speed against {best}, the best fixed length of all prompts together. Below: the interval of a group of "
            f"{FEWEST} prompts or more lies below 1. Intervals are of one policy and group at a time.",
        ),
        (Table("By group of prompts", ("group", "prompts", "tokens", "its best fixed", *names), tuple(rows)),),
    )


def prompts(found: Any, data: Data) -> Section:
    """By prompt."""
    order = sorted(range(len(found)), key=lambda i: found[i]["policy"] / found[i]["fixed"])
    shown = order if len(order) <= 16 else [*order[:8], *order[-8:]]
    rows = tuple(
        (found[i]["prompt"], found[i]["group"], *nums(("details", "prompts", i), "fixed", "policy")) for i in shown
    )
    subject = data["details"]["subject"]
    slower = sum(one["policy"] < one["fixed"] for one in found)
    return Section(
        "prompts",
        "Prompt by prompt",
        (
            f"Speed-up over plain decoding: {subject} against the best fixed length. Above the line {subject} is faster; on "
            f"{slower} of {len(found)} prompts it is slower.",
        ),
        (Table("The prompts at both ends", ("prompt", "group", "best fixed", subject), rows),),
    )


def losses(found: Any, data: Data) -> Section:
    """The text where it went wrong."""
    rows: list[tuple[Cell, ...]] = []
    for at, one in enumerate(found):
        path: Path = ("details", "losses", at)
        figures = (*nums(path, "early_ms", "late_ms", form=".1f"), Num((*path, "to_best_fixed")))
        rows.append((one["prompt"], one["group"], *figures))
    return Section(
        "losses",
        f"Where {data['details']['subject']} loses most",
        (
            "The texts with the largest cost of wrong stops, and the worst rounds of each. ▢ stands for a token that only "
            "the target proposed, which a trace does not hold.",
        ),
        (Table("Largest losses", ("prompt", "group", "too early, ms", "too late, ms", "vs best fixed"), tuple(rows)),),
    )


SECTIONS: dict[str, Callable[[Any, Data], Section]] = {
    "speed": speeds, "batch": batches, "parts": parts, "acceptance": acceptance, "lengths": lengths,
    "reliability": reliability, "time": time, "stops": stops, "groups": groups, "prompts": prompts,
    "sensitivity": sensitivity, "sweep": sweep, "losses": losses,
    "importance": partial(prepared, "importance"), "comparison": partial(prepared, "comparison"),
}  # fmt: skip
"""What writes each section, in order: from what the JSON has of it, and the whole."""


def sections(data: Data) -> list[Section]:
    """Return the sections that a report has, in order.

    Args:
        data: `Report.to_dict()` as JSON values.
    """
    lines = data["lines"]
    with_parts = lines if any(line.get("parts") for line in lines) else None
    found = {**data["details"], "speed": lines, "parts": with_parts, "acceptance": data["bands"]}
    return [write(found[name], data) for name, write in SECTIONS.items() if found.get(name)]
