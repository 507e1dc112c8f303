"""Scores that are equal: a chain, a tree, a larger tree and a dense trace take the same candidates, the first token first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import VOCABULARY
from specstop.collect.given_text import best_candidates
from specstop.decode.topology import parse_tree
from specstop.decode.verify.modes import Draw, Match, best_tokens


def draw(rows: torch.Tensor, width: int) -> Draw:
    """Return the greedy candidates below as many roots as there are rows, one per stream."""
    round_state = SimpleNamespace(topology=parse_tree(str(width)), choices=[SimpleNamespace(greedy=True)] * len(rows))
    drawn = Match().draw(cast(Any, round_state), [(stream, [0]) for stream in range(len(rows))], rows)
    tokens = drawn.tokens if isinstance(drawn.tokens, list) else drawn.tokens[:, None].tolist()
    return drawn._replace(tokens=tokens)


def tied_rows() -> torch.Tensor:
    """Return rows [40, V] of a few values each, as frequencies are; some tokens are not known at all."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(0, 4, (40, VOCABULARY), generator=generator).float()
    return rows.where(rows > 0, -torch.inf)


def by_score_then_number(row: torch.Tensor) -> list[int]:
    known = [token for token in range(len(row)) if row[token] > -torch.inf]
    return sorted(known, key=lambda token: (-float(row[token]), token))


@pytest.mark.parametrize("width", [1, 2, 3, 10])
def test_of_equal_scores_the_first_token_is_drawn_first(width: int) -> None:
    rows = tied_rows()
    drawn = draw(rows, width)
    assert drawn.tokens == [by_score_then_number(row)[:width] for row in rows]
    assert best_tokens(rows, [width] * len(rows))[0] == drawn.tokens
    if width > 1:
        assert drawn.best == [[float(row[t]) for t in by_score_then_number(row)[: width + 1]] for row in rows]


@pytest.mark.parametrize("width", [1, 3])
def test_a_dense_trace_takes_the_same(width: int) -> None:
    rows = tied_rows()
    candidates = best_candidates(rows, torch.full((40,), -1), width, width + 1)
    assert candidates.tokens.tolist() == draw(rows, width).tokens
