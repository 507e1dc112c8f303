"""How a command line names the pair and the drafter that a trace is of."""

from __future__ import annotations

from ..decode.drafters.spec import needs_draft
from .schema import Header


def drafter_of(header: Header) -> str:
    """Return the drafter of a trace, as of `--drafter`."""
    return str(header.facts.get("drafter", "model"))


def draft_of(header: Header) -> str:
    """Return the draft model of a trace, `DRAFT` where it has none."""
    return str((header.draft if drafter_of(header) == "model" else header.facts.get("draft model")) or "DRAFT")


def pair_options(header: Header) -> list[str]:
    """Return the options that name a trace's pair and how it computes; what it does not tell stands in capitals."""
    drafter, dtype = drafter_of(header), str(header.facts.get("dtype", "float32"))
    device = str(header.facts.get("device", "cpu"))
    kind = device.partition(":")[0]
    return [
        *("--target", header.target or "TARGET"),
        *(("--draft", draft_of(header)) if needs_draft(drafter) else ()),
        *(() if drafter == "model" else ("--drafter", drafter)),
        # Of CUDA the facts have the product's name.
        *(() if kind == "cpu" else ("--device", kind if kind in ("mps", "xpu") else "cuda")),
        *(() if dtype == "float32" else ("--dtype", dtype)),
    ]
