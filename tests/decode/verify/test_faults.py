"""Faults put into the shipped code on purpose: the check of exactness must see each of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case
from deciders import DECIDERS
from enumeration import EXACT, prove
from specstop.decode import loop, model_source
from specstop.decode.model_source import ModelSource
from specstop.decode.models import cache as cache_module
from specstop.decode.round_state import RoundState
from specstop.decode.topology import Topology
from specstop.decode.verify import modes
from specstop.decode.verify.modes import Block, Rejection, RejectionReplace
from specstop.decode.verify.noise import Choices, Purpose
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


def patched_accept(kind: type[Rejection], change: Callable[..., tuple[Any, ...]]) -> tuple[Any, str, Any]:
    """Return a fault that calls `accept_one` of a mode with changed arguments (mode, round, stream, sent, sampled)."""
    shipped = kind.accept_one
    return kind, "accept_one", lambda *args: shipped(*change(*args))


@pytest.mark.parametrize("case", [CHAIN, TREE, BLOCK], ids=str)
def test_a_residual_left_out(case: Case, monkeypatch: Patch) -> None:
    def whole(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
        return p if otherwise is None else otherwise

    assert is_seen(case, monkeypatch, (modes, "residual", whole))


@pytest.mark.parametrize("case", [CHAIN, TREE, BLOCK], ids=str)
def test_the_targets_row_of_the_parents_parent(case: Case, monkeypatch: Patch) -> None:
    def shifted(mode: Rejection, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Any:
        parents = [sent.index(max(round.topology.parent[row], 0)) for row in sent]
        return mode, round, stream, sent, sampled[parents]

    kind = Block if case is BLOCK else Rejection
    assert is_seen(case, monkeypatch, patched_accept(kind, shifted))


@pytest.mark.parametrize("case", [LONG_CHAIN, LONG_TREE], ids=str)
def test_the_drafts_row_of_the_parents_parent(case: Case, monkeypatch: Patch) -> None:
    def shifted(mode: Rejection, round: RoundState, *args: Any) -> Any:
        moved, parent = copy.copy(round), round.topology.parent
        moved.draft_probs = {(s, row): round.draft_probs[s, max(parent[row], 0)] for s, row in round.draft_probs}
        return mode, moved, *args

    assert is_seen(case, monkeypatch, patched_accept(Rejection, shifted))


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
    shipped = RoundState.draft_tree
    shown = (RoundState, "draft_tree", lambda round, hide_tokens=False: shipped(round))
    assert is_seen(replace(TREE, decider="selects-even"), monkeypatch, shown)


def test_selecting_once_all_is_drafted(monkeypatch: Patch) -> None:
    """What could be drafted below a token tells whether it ends the text."""
    case = replace(LONG_TREE, decider="selects-by-token")
    assert is_seen(case, monkeypatch, (model_source, "is_trimming", lambda policy: False))


def test_trimming_that_spares_what_ends_a_text(monkeypatch: Patch) -> None:
    case = Case("rejection", "chain:2", "trims-unsure", "mixed", 2, eos=True)
    assert is_exact(case)
    shipped = ModelSource.__init__

    def spares(self: ModelSource, *args: Any, **more: Any) -> None:
        shipped(self, *args, **more)
        self.decides_ended = False

    monkeypatch.setattr(ModelSource, "__init__", spares)
    assert prove(case).distance > SEEN


def test_roots_drawn_from_a_sharper_distribution(monkeypatch: Patch) -> None:
    shipped = Rejection.start

    def sharper(self: Rejection, sampled: Tensor, choices: Choices) -> int:
        return shipped(self, 1.1 * sampled, choices)

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
    shipped = Choices.__init__

    def stuck(self: Choices, source: Any, round: int, position: int, greedy: bool) -> None:
        shipped(self, source, min(round, 1), position, greedy)

    assert is_seen(CHAIN, monkeypatch, (Choices, "__init__", stuck))


def test_siblings_tried_against_a_draft_that_is_not_reduced(monkeypatch: Patch) -> None:
    unreduced = patched_accept(Rejection, lambda mode, *args: (RejectionReplace(), *args))
    assert is_seen(replace(TREE, tree="2"), monkeypatch, unreduced)


def test_siblings_tried_in_another_order_than_drawn(monkeypatch: Patch) -> None:
    shipped = RoundState.drawn_below
    backwards = (RoundState, "drawn_below", lambda round, stream, row: shipped(round, stream, row)[::-1])
    assert is_seen(replace(TREE, tree="2"), monkeypatch, backwards)


@pytest.mark.parametrize(
    "fault",
    [
        (cache_module.KVCache, "move", lambda self, stream, slots, to: None),
        (Topology, "sees", property(lambda self: torch.ones(len(self), len(self), dtype=torch.bool).tril())),
        (RoundState, "path_tokens", lambda self, stream, row: self.tokens[stream, : row + 1].tolist()),
    ],
    ids=["a path that is not compacted", "siblings that see each other", "processors that see siblings"],
)
def test_trees_that_lose_their_paths(fault: tuple[Any, str, Any], monkeypatch: Patch) -> None:
    case = Case("rejection", "2,1", kind="sparse", seed=4, sampling="by-prefix")
    assert is_seen(case, monkeypatch, fault)
