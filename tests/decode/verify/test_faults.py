"""Faults put into the shipped code on purpose: the check of exactness must see each of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from deciders import DECIDERS
from enumeration import EXACT, prove
from specstop.decode import loop, model_source
from specstop.decode.candidates import draft_tree
from specstop.decode.model_source import ModelSource
from specstop.decode.models import kv_cache
from specstop.decode.stream import Text
from specstop.decode.topology import Topology
from specstop.decode.verify import modes, rejection
from specstop.decode.verify.base import Turn
from specstop.decode.verify.given_text import Candidates
from specstop.decode.verify.lossy import TargetInit
from specstop.decode.verify.noise import Choices, Purpose
from specstop.decode.verify.rejection import Block, Rejection, RejectionReplace
from specstop.policies.contract import Array, DraftStep, DraftTree, State, StopPolicy
from torch import Tensor

SEEN = 1e-3
CHAIN = Case("rejection", "chain:2", kind="dense", seed=1, new=3)
TREE = Case("rejection", "2,1", kind="dense", seed=1, eos=True, new=3)
BLOCK = Case("block", "chain:2", kind="dense", seed=1, new=3)
LONG_CHAIN, LONG_TREE, LONG_BLOCK = (replace(case, new=4) for case in (CHAIN, TREE, BLOCK))
"""Texts of one token more, for faults that shorter ones do not show."""

Patch = pytest.MonkeyPatch
is_exact = functools.cache(lambda case: prove(case).distance <= EXACT)
"""Of the code as it is: to be asked before a fault is put in."""


def is_seen(case: Case, monkeypatch: Patch, *faults: tuple[Any, str, Any]) -> bool:
    """Whether the check passes without the faults and fails by a margin with them."""
    assert is_exact(case)
    for where, name, what in faults:
        monkeypatch.setattr(where, name, what)
    return prove(case).distance > SEEN


@pytest.mark.parametrize("case", [CHAIN, TREE, BLOCK], ids=str)
def test_a_residual_left_out(case: Case, monkeypatch: Patch) -> None:
    def whole(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
        return p if otherwise is None else otherwise

    assert is_seen(case, monkeypatch, (rejection, "residual", whole))


Rows = dict[int, Tensor]


def of_parents(found: Candidates, rows: Rows) -> Rows:
    """Return by place the row of its parent."""
    return {place: rows[max(found.parent[place], 0)] for place in rows}


def tried_with(shown: Callable[[Candidates, Rows], tuple[Candidates, Rows]]) -> list[tuple[Any, str, Any]]:
    """Return the faults that have candidates tried with other rows than the round's."""
    ratios, shipped = rejection.first_ratios, Rejection._try

    def tried(self: Rejection, found: Candidates, place: int, probs: Rows, known: Any, choices: Choices) -> Any:
        found, probs = shown(found, probs)
        return shipped(self, found, place, probs, known, choices)

    return [(rejection, "first_ratios", lambda *given: ratios(*shown(*given))), (Rejection, "_try", tried)]


@pytest.mark.parametrize("case", [CHAIN, TREE], ids=str)
def test_the_targets_row_of_the_parents_parent(case: Case, monkeypatch: Patch) -> None:
    assert is_seen(case, monkeypatch, *tried_with(lambda found, probs: (found, of_parents(found, probs))))


@pytest.mark.parametrize("case", [LONG_CHAIN, LONG_TREE], ids=str)
def test_the_drafts_row_of_the_parents_parent(case: Case, monkeypatch: Patch) -> None:
    def shifted(found: Candidates, probs: Rows) -> tuple[Candidates, Rows]:
        return replace(found, drawn_from=of_parents(found, found.drawn_from)), probs

    assert is_seen(case, monkeypatch, *tried_with(shifted))


def test_the_row_before_the_one_where_a_block_ends(monkeypatch: Patch) -> None:
    shipped = Block.accept_one

    def shifted(self: Block, turn: Turn, sampled: Tensor) -> tuple[list[int], list[int]]:
        return shipped(self, turn, torch.cat([sampled[:1], sampled[:-1]]))

    assert is_seen(BLOCK, monkeypatch, (Block, "accept_one", shifted))


class TrimsUnlikely(StopPolicy):
    """Drops tokens that the draft found unlikely."""

    name, features, trims, max_depth = "trims-unlikely", ("drawn_prob",), True, 3

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.features[..., 0] > 0.4), state


@pytest.mark.parametrize("case", [LONG_CHAIN, LONG_TREE, LONG_BLOCK], ids=str)
def test_trimming_by_what_was_drawn(case: Case, monkeypatch: Patch) -> None:
    monkeypatch.setattr(loop, "check_mode", lambda *args: None)
    monkeypatch.setitem(DECIDERS, "trims-unlikely", TrimsUnlikely)
    assert is_exact(case)
    assert prove(replace(case, decider="trims-unlikely")).distance > SEEN


class SelectsEven(StopPolicy):
    """Leaves odd tokens out."""

    name, max_depth = "selects-even", 3

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive, state

    def select(self, tree: DraftTree, state: State) -> Array:
        return tree.drawn & (np.maximum(tree.tokens, 0) % 2 == 0)


def test_selecting_among_tokens_that_are_shown(monkeypatch: Patch) -> None:
    monkeypatch.setitem(DECIDERS, "selects-even", SelectsEven)
    shown = (model_source, "draft_tree", lambda found, sent, hide_tokens=False: draft_tree(found, sent))
    assert is_seen(replace(TREE, decider="selects-even"), monkeypatch, shown)


def test_selecting_once_all_is_drafted(monkeypatch: Patch) -> None:
    """What could be drafted below a token tells whether it ends the text."""
    case = replace(LONG_TREE, decider="selects-by-token")
    assert is_seen(case, monkeypatch, (loop, "is_trimming", lambda policy: False))


def test_trimming_that_spares_what_ends_a_text(monkeypatch: Patch) -> None:
    case = Case("rejection", "chain:2", "trims-unsure", "mixed", 2, eos=True)
    assert is_exact(case)
    shipped = ModelSource.__init__

    def spares(self: ModelSource, *args: Any) -> None:
        shipped(self, *args)
        self.asks_ended = False

    monkeypatch.setattr(ModelSource, "__init__", spares)
    assert prove(case).distance > SEEN


def test_a_root_that_is_chosen_by_how_its_branch_went(monkeypatch: Patch) -> None:
    case = Case("rejection", "2,1", kind="dense", seed=1, new=2)
    assert is_exact(case)
    monkeypatch.setitem(modes.MODES, "rejection", TargetInit)
    assert prove(case).distance > SEEN


def test_roots_drawn_from_a_sharper_distribution(monkeypatch: Patch) -> None:
    shipped = Rejection.start

    def sharper(self: Rejection, sampled: Tensor, count: int, choices: Choices) -> list[int]:
        return shipped(self, 1.1 * sampled, count, choices)

    assert is_seen(CHAIN, monkeypatch, (Rejection, "start", sharper))


def test_acceptance_and_residual_that_share_a_number(monkeypatch: Patch) -> None:
    """The number by which a token was accepted draws the one after it."""
    assert prove(CHAIN).reused == 0
    shipped = Choices.draw

    def shared(self: Choices, probs: Tensor, node: int, purpose: Purpose) -> int:
        return shipped(self, probs, node, Purpose.ACCEPT if purpose is Purpose.RESIDUAL else purpose)

    assert is_seen(CHAIN, monkeypatch, (Choices, "draw", shared))
    assert prove(CHAIN).reused > 0


def test_rounds_that_share_their_numbers(monkeypatch: Patch) -> None:
    """All choices of a round after the first are made by the numbers of round 1."""
    shipped = Text.choices

    def stuck(self: Text, position: int, greedy: bool) -> Choices:
        self.round = min(self.round, 1)
        return shipped(self, position, greedy)

    assert is_seen(CHAIN, monkeypatch, (Text, "choices", stuck))


def test_siblings_tried_against_a_draft_that_is_not_reduced(monkeypatch: Patch) -> None:
    shipped = Rejection._try

    def unreduced(self: Rejection, *args: Any) -> Any:
        return shipped(RejectionReplace(), *args)

    assert is_seen(replace(TREE, tree="2"), monkeypatch, (Rejection, "_try", unreduced))


def test_siblings_tried_in_another_order_than_drawn(monkeypatch: Patch) -> None:
    shipped = Rejection._try

    def backwards(self: Rejection, found: Candidates, *args: Any) -> Any:
        return shipped(self, replace(found, children=[below[::-1] for below in found.children]), *args)

    assert is_seen(replace(TREE, tree="2"), monkeypatch, (Rejection, "_try", backwards))


@pytest.mark.parametrize(
    "fault",
    [
        (kv_cache.KVCache, "move", lambda self, stream, slots, to: None),
        (Topology, "sees", property(lambda self: torch.ones(len(self), len(self), dtype=torch.bool).tril())),
        (Candidates, "tokens_to", lambda self, place: self.tokens[: place + 1]),
    ],
    ids=["a path that is not compacted", "siblings that see each other", "processors that see siblings"],
)
def test_trees_that_lose_their_paths(fault: tuple[Any, str, Any], monkeypatch: Patch) -> None:
    case = Case("rejection", "2,1", kind="sparse", seed=4, shaping="by-prefix")
    assert is_seen(case, monkeypatch, fault)
