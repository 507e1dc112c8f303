"""How a command line names the pair and the drafter that a trace is of."""

from __future__ import annotations

from ..decode.drafters.known import needs_draft
from .schema import Header


def drafter_of(header: Header) -> str:
    """Return the drafter of a trace, as of `--drafter`."""
    return str(header.facts.get("drafter", "model"))


def draft_of(header: Header) -> str:
    """Return the draft model of a trace, `DRAFT` where it has none."""
    return str((header.draft if drafter_of(header) == "model" else header.facts.get("draft model")) or "DRAFT")


def pair_options(header: Header) -> list[str]:
    """Return the options that name a trace's pair; what it does not tell stands in capitals."""
    drafter = drafter_of(header)
    return [
        *("--target", header.target or "TARGET"),
        *(("--draft", draft_of(header)) if needs_draft(drafter) else ()),
        *(() if drafter == "model" else ("--drafter", drafter)),
    ]
