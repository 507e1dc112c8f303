"""The data card of a trace folder, and the texts that describe a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ..policies.display import markdown, markdown_cell, printable
from ..policies.learned import shaping_text
from .schema import Header


def data_card(header: Header) -> str:
    """Return the data card, which depends on the header alone: all processes of a run write the same one."""

    def model(name: str) -> str:
        """Return a hub name, or the end of a path: cards are published, and home folders are private."""
        return "/".join(name.replace("\\", "/").split("/")[-2:]) or "a model without a name"

    name = printable(f"Draft traces of {model(header.draft)} for {model(header.target)}")
    front = {
        "pretty_name": name,
        "tags": ["speculative-decoding", "specstop"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    }
    shown = header.shown_temperature
    facts = {
        "target": model(header.target),
        "drafter": model(header.draft),
        "temperature": shown if isinstance(shown, str) else f"{shown:g}",
        "filter": shaping_text(header.shaping),
        "verification": header.verification,
        "replay": replay_text(header),
        "depth": header.depth,
        "prompts": header.prompts,
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "schema version": header.schema,
        "hidden states": hidden_text(header),
    }
    lines = "\n".join(f"| {name} | {markdown_cell(str(value))} |" for name, value in facts.items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---
# {markdown(name)}

What a draft model proposed at positions of the target's text, the features of its proposals, and what the target
accepted. Recorded by `specstop collect`. A row is one anchor; columns of nodes are lists over the nodes of the
topology. A node was accepted (`observed` and `accepted`), rejected (`observed` and not `accepted`), or not observed.

| what | value |
|---|---|
{lines}

    from datasets import load_dataset
    rows = load_dataset("path/to/this/folder", split="train", streaming=True)

`header.json` holds what is true of all rows, and `prompts.jsonl` the prompts if they are known. The rows contain prompt
ids and drafted tokens, so the licence of the prompts applies to them. `specstop info FOLDER --check` verifies the whole
folder.
"""


def hidden_text(header: Header) -> str:
    """Return the recorded hidden states and their shapes in a row."""
    shapes = {name: " x ".join(map(str, header.hidden_shape(name))) for name in header.hidden}
    return ", ".join(f"{name} ({shape}, float16)" for name, shape in shapes.items()) or "none"


def replay_text(header: Header) -> str:
    """Return how exact replay of a trace is."""
    draws = f"{header.draws} draw{'s' * (header.draws > 1)} of each text"
    return {
        "": "single rounds only" if header.collector == "live" else "none: its texts are not whole texts of the target",
        "path": "exact path by path",
        "law": f"exact in law, {draws}",
        "nearly": f"nearly exact in law (--off-text approximate), {draws}",
    }[header.exactness]


def balance_text(checked: Mapping[str, Any]) -> str:
    """Return the result of the check of completions (`dense.completion_check.Balance`)."""
    return (
        f"{checked['texts']} checked: log p + entropy {checked['mean']:+.4f} a token (standard error "
        f"{checked['standard_error']:.4f}), {checked['impossible']} of {checked['tokens']} tokens cannot be drawn"
    )
