"""The section of a report on texts decoded side by side."""

from __future__ import annotations

from typing import Any

from .model import Cell, Data, Num, Path, Section, Spread, Table


def batches(found: Any, data: Data) -> Section:
    """What each policy gains at each batch size."""
    where: Path = ("details", "batch")
    names = [line["name"] for line in found["lines"]]
    sizes = range(len(found["sizes"]))
    columns = ("batch", *map(str, found["sizes"]))

    def row(line: int, name: str, digits: int = 3) -> tuple[Cell, ...]:
        return (names[line], *(Spread((*where, "lines", line, name, at), digits) for at in sizes))

    def rates(title: str, of: Path) -> tuple[Cell, ...]:
        return (title, *(Num((*where, *of, at), ".1f") for at in sizes))

    def waits(line: int) -> tuple[Cell, ...]:
        places = [[(*where, "lines", line, name, at) for name in ("latency_s", "latency_p95_s")] for at in sizes]
        return (names[line], *((Spread(mean, 2), " / ", Spread(tail, 2)) for mean, tail in places))

    speeds = [
        rates("plain decoding, tokens/s", ("plain",)),
        ("best fixed length", *map(str, found["best_fixed"])),
        rates("best fixed, tokens/s", ("lines", 0, "tokens_per_s")),
        *(row(line, "to_best_fixed") for line in range(1, len(names))),
    ]
    gaps = [row(line, "oracle_share", 2) for line in range(1, len(names) - 1)]
    tables = (
        Table("Speed by batch size, best fixed length of that size = 1", columns, tuple(speeds)),
        Table("Share of the oracle gain", columns, tuple(gaps)),
        Table(
            "Seconds from arrival to the last token, mean / 95th percentile",
            columns,
            tuple(waits(line) for line in range(len(names) - 1)),
        ),
    )
    return Section(
        "batch",
        "Texts side by side",
        (
            found["words"],
            "Every text is decoded beside others, which share each draft step and each verification; one that ends gives its "
            "place to the next. The best fixed length is that of the batch size, chosen on these prompts and again in each "
            "bootstrap replicate; intervals are over prompts. The bound knows every accepted length of every stream and "
            "shares each step as well as steps can be shared: nothing is above it; it may be out of reach.",
        ),
        tables,
        open=True,
    )
