"""Acceptance records of simulated engines, in vLLM's form, with what longer drafts would have accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

DEPTH = 6


def at_random(confidence: Array, request: int, chance: np.random.Generator) -> Array:
    """A length for each round."""
    return chance.integers(1, DEPTH + 1, len(confidence))


def by_confidence(confidence: Array, request: int, chance: np.random.Generator) -> Array:
    """Draft on after a confident token."""
    return np.minimum((confidence > 0.6).cumprod(1).sum(1) + 1, DEPTH)


def all_or_none(confidence: Array, request: int, chance: np.random.Generator) -> Array:
    """Draft only if the first token is likely, as a lookup drafter without a match drafts nothing."""
    return np.where(confidence[:, 0] > 0.5, DEPTH, 0)


def fixed(confidence: Array, request: int, chance: np.random.Generator) -> Array:
    """The full depth."""
    return np.full(len(confidence), DEPTH)


def simulated(
    choose: Callable[[Array, int, np.random.Generator], Array], requests: int = 60, rounds: int = 60, seed: int = 0
) -> tuple[list[dict[str, Any]], list[Array]]:
    """Return detailed records, and the accepted lengths of all rounds at full depth by request."""
    chance = np.random.default_rng(seed)
    records, lengths = [], []
    for request in range(requests):
        odds = chance.normal(1.0, 0.8) + chance.normal(0.0, 0.7, (rounds, 1)) + chance.normal(0.0, 0.6, (rounds, DEPTH))
        confidence = 1.0 / (1.0 + np.exp(-odds))
        length = (chance.random(odds.shape) < confidence).cumprod(1).sum(1)
        drafted = choose(confidence, request, chance)
        steps = {"per_step_accepted": np.minimum(length, drafted).tolist(), "per_step_drafted": drafted.tolist()}
        counts = {"num_spec_tokens": DEPTH, "num_draft_tokens": int(drafted.sum()), **steps}
        records.append({"id": f"r{request}", "metrics": {"speculative_decoding": counts}})
        lengths.append(length)
    return records, lengths


def write(path: Path, records: list[Any]) -> Path:
    """Write records as JSON Lines."""
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path
