"""Sections of a report on what would be elsewhere: other latencies, a cheaper draft, other places of use."""

from __future__ import annotations

from typing import Any

from .model import Cell, Data, Num, Path, Section, Spread, Table


def sensitivity(found: Any, data: Data) -> Section:
    """Other latencies."""
    names = list(found[0]["ratios"])
    rows = tuple(
        (
            one["what"] if one["factor"] == 1.0 else f"{one['what']} x {one['factor']:g}",
            one["best_fixed"],
            *(Spread(("details", "sensitivity", at, "ratios", name)) for name in names),
        )
        for at, one in enumerate(found)
    )
    return Section(
        "sensitivity",
        "If the latency were another",
        (
            "Speed against the best fixed length, chosen again, if a part of the profile were so many times what it is; "
            "policies stop where they did.",
        ),
        (Table("Against the best fixed length", ("latency", "best fixed", *names), rows),),
    )


def sweep(found: Any, data: Data) -> Section:
    """Where each policy starts to pay."""
    where: Path = ("details", "sweep")
    rows: list[tuple[Cell, ...]] = []
    for at in range(len(found["ratios"])):
        point = (Num((*where, "ratios", at), ".3g"), Num((*where, "best_fixed", at), ".0f"))
        rows.append((*point, *(Spread((*where, "lines", i, "to_best_fixed", at)) for i in range(len(found["lines"])))))
    words = tuple(
        f"{line['name']}: {line['verdict']}" + (f" ({line['note']})." if line["note"] else ".")
        for line in found["lines"]
    )
    names = tuple(line["name"] for line in found["lines"])
    return Section(
        "sweep",
        "If the draft were cheaper or more expensive",
        (
            "Speed against the best fixed length by the cost of a draft step over that of a one-token target step; the "
            f"profile's own is {found['here']:.3g}.",
            *words,
        ),
        (Table("By cost ratio", ("cost ratio", "best fixed", *names), tuple(rows)),),
    )


def prepared(name: str, found: Any, data: Data) -> Section:
    """Return a section of which the report has title, text, columns and rows."""
    rows = tuple(
        tuple(
            Spread(("details", name, "rows", at, i)) if isinstance(cell, dict) else str(cell)
            for i, cell in enumerate(row)
        )
        for at, row in enumerate(found["rows"])
    )
    return Section(name, found["title"], (found["text"],), (Table(found["title"], tuple(found["columns"]), rows),))
