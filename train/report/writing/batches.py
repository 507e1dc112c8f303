"""The section of a report on texts decoded side by side."""

from __future__ import annotations

from .model import Cell, Data, Num, Path, Section, Spread, Table


def batches(data: Data) -> Section | None:
    """What each policy gains at each batch size."""
    found = data["details"].get("batch")
    if not found:
        return None
    where: Path = ("details", "batch")
    names = [line["name"] for line in found["lines"]]
    columns = ("batch", "plain, tokens/s", "best fixed", "tokens/s", *names[1:])
    speeds: list[tuple[Cell, ...]] = []
    gaps: list[tuple[Cell, ...]] = []
    waits: list[tuple[Cell, ...]] = []
    for at, size in enumerate(found["sizes"]):

        def cells(name: str, lines: range, digits: int = 3, at: int = at) -> list[Cell]:
            return [Spread((*where, "lines", i, name, at), digits) for i in lines]

        best = (Num((*where, "plain", at), ".1f"), str(found["best_fixed"][at]))
        rate = Num((*where, "lines", 0, "tokens_per_s", at), ".1f")
        policies = range(1, len(names) - 1)
        speeds.append((str(size), *best, rate, *cells("to_best_fixed", range(1, len(names)))))
        gaps.append((str(size), *cells("oracle_share", policies, 2)))
        timed: list[Cell] = []
        for i in range(len(names) - 1):
            mean, tail = ((*where, "lines", i, name, at) for name in ("latency_s", "latency_p95_s"))
            timed.append((Spread(mean, 2), " / ", Spread(tail, 2)))
        waits.append((str(size), *timed))
    tables = (
        Table("Speed by batch size, best fixed length of that size = 1", columns, tuple(speeds)),
        Table("Share of the gap between best fixed length and bound", ("batch", *names[1:-1]), tuple(gaps)),
        Table("Seconds from arrival to the last token, mean / 95th percentile", ("batch", *names[:-1]), tuple(waits)),
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
