"""The page of an export: what it is, how to use it, what to expect, what is lost, what is assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...decode.benchmark import Ratio
from ...policies.display import markdown_table

FIGURES = "figures.json"


def page_text(
    title: str,
    what: str,
    use: str,
    tables: Sequence[str],
    lost: Sequence[str],
    assumed: Sequence[str],
    facts: Mapping[str, Any],
) -> str:
    """Return a README: what it is, how to use it, what to expect, what is lost, what is assumed, where it comes from."""
    known = dict(facts)
    origin = f"`specstop deploy` {known['specstop']}, from the traces `{known['traces']}`"
    device = known["profile"].get("device")
    pair = f"target `{known['target']}`, draft `{known['draft']}`" if known.get("target") else "a pair without names"
    return (
        "\n\n".join(
            [
                f"# {title}",
                what,
                f"## Use\n\n{use}",
                "## What to expect\n\n" + "\n\n".join(tables),
                "## What is lost\n\n" + bullets(lost),
                "## What is assumed\n\n" + bullets(assumed),
                f"## Where it comes from\n\n{origin}; {pair}; temperature {known['temperature']:g}, drafts of up to "
                f"{known['depth']} tokens; profile of {device or 'an unnamed device'}. All figures are in `{FIGURES}`.",
            ]
        )
        + "\n"
    )


def bullets(lines: Sequence[str]) -> str:
    """Return a Markdown list."""
    return "\n".join(f"* {line}" for line in lines)


def alone_table(alone: Mapping[str, Any]) -> str:
    """Return the figures at one request as a table."""
    rows = [
        ("this export, to plain decoding", alone["to_plain"].text()),
        (f"this export, to the best fixed length ({alone['best_fixed']})", alone["to_best_fixed"].text()),
    ]
    if "policy" in alone:
        rows.append((f"the policy `{alone['policy']}`, to this export", alone["policy_to_this"].text()))
    rows.append(("knowing every accepted length, to this export", alone["oracle_bound_to_this"].text()))
    return f"One request at a time, replayed on {alone['prompts']}; {alone['intervals']}:\n\n" + markdown_table(
        ("times as fast", "ratio"), rows
    )


def policy_loss(alone: Mapping[str, Any]) -> str:
    """Return the sentence that says what the policy would have brought beyond the export at one request."""
    if "policy" not in alone:
        return "No policy was given, so its loss is not stated here: run again with `--policy`."
    gain: Ratio = alone["policy_to_this"]
    sure = "" if gain.is_above or gain.is_below else " (the interval contains 1)"
    meaning = "that is what is lost" if gain.value >= 1.0 else "by replay nothing is lost, the policy does not pay here"
    return (
        f"At one request the policy `{alone['policy']}` decodes {gain.text()} times as fast as this export, decision "
        f"time included{sure}: {meaning}."
    )
