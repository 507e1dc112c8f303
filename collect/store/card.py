"""The data card of a trace folder: what `datasets` and the hub need to read it as it is, and what a reader should know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from ...policies.display import markdown, markdown_cell, printable
from ...policies.learned import shaping_text
from ..schema import Header

CARD_FILE = "README.md"


def data_card(header: Header) -> str:
    """Return the card; it depends on the header alone, so every process of a run writes the same one."""
    name = printable(f"Draft traces of {_model(header.draft)} for {_model(header.target)}")
    front = {
        "pretty_name": name,
        "tags": ["speculative-decoding", "specstop"],
        "configs": [
            {"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]},
        ],
    }
    lines = "\n".join(f"| {name} | {_cell(value)} |" for name, value in _facts(header).items())
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True).strip()}
---
# {markdown(name)}

At positions of the target's text: what the draft proposed, what it saw, and what the target accepted. Recorded by
`specstop collect`; one row is one anchor, per-node columns are lists over the nodes of the topology.

| what | value |
|---|---|
{lines}

    from datasets import load_dataset
    rows = load_dataset("path/to/this/folder", split="train", streaming=True)

`header.json` holds everything that is true of all rows, `checksums/` the SHA-256 of every shard (`sha256sum -c
checksums/*`). Columns after the first rejection are void where `labelled` is false. `prompts.jsonl`, where there is
one, holds the prompts, and the rows their ids and drafted tokens: the licence of the prompts holds for them.
"""


def _facts(header: Header) -> dict[str, Any]:
    return {
        "target": _model(header.target),
        "drafter": _model(header.draft),
        "temperature": shown if isinstance(shown := header.shown_temperature, str) else f"{shown:g}",
        "filter": shaping_text(header.shaping),
        "verification": header.verification,
        "replay": replay_text(header),
        "depth": header.depth,
        "nodes": len(header.topology),
        "collector": header.collector,
        "prompts": header.prompts,
        "prompts from": header.facts.get("prompts from") or "not recorded",
        "tokens of a text, at most": header.max_new_tokens,
        "seed": header.seed,
        "shards": header.shards,
        "schema version": header.schema,
        "features": ", ".join((*header.anchor_features, *header.features)),
        "hidden states": hidden_text(header),
    }


def hidden_text(header: Header) -> str:
    """Return which hidden states a trace has, with their shape in a row."""
    shapes = {name: " x ".join(map(str, header.hidden_shape(name))) for name in header.hidden}
    return ", ".join(f"{name} ({shape}, float16)" for name, shape in shapes.items()) or "none"


def replay_text(header: Header) -> str:
    """Return in words how replay of a trace is exact."""
    return {
        "": "single rounds only" if header.collector == "live" else "none: its texts are not whole texts of the target",
        "path": "exact path by path",
        "law": f"exact in law, {header.draws} draw{'s' * (header.draws > 1)} of each text",
        "nearly": f"nearly exact in law (--off-text approximate), {header.draws} draw{'s' * (header.draws > 1)} of each text",
    }[header.exactness]


def balance_text(checked: Mapping[str, Any]) -> str:
    """Return what was found of completions (`completions.sampling_balance`) in words."""
    return (
        f"{checked['texts']} checked: log p + entropy {checked['mean']:+.4f} a token (standard error "
        f"{checked['standard_error']:.4f}), {checked['impossible']} of {checked['tokens']} tokens cannot be drawn"
    )


def _model(name: str) -> str:
    """Return a hub name, or the end of a path: a card is made to be shared, and home folders are not."""
    return "/".join(name.replace("\\", "/").split("/")[-2:]) or "a model without a name"


def _cell(value: Any) -> str:
    return markdown_cell(str(value))
