"""Rounds drawn given the text have the law of the live loop's; so have the chances that go with them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from drawn_law import drawn_traces, replay_law
from enumeration import EXACT
from random_stops import ByTokens, TrimmingByRows
from specstop.collect.given_text import KeyedDraws, block_candidates, draw_key, rejection_candidates
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import TraceError
from text_law import Case, apart, live_law

WRONG = 1e-3
"""Total variation that a law which is not the live loop's exceeds."""

STOPS: dict[str, Callable[[int], StopPolicy]] = {
    "by-tokens": partial(ByTokens, 3, stops=0.5),
    "by-tokens-from-the-anchor": partial(ByTokens, 5, first=0, stops=0.2),
    "trims-by-rows": partial(TrimmingByRows, 4),
}


@pytest.mark.parametrize(
    ("mode", "stop"),
    [  # all of them, rejection's and block's, are in `benchmarks/given_text.py`
        *(("rejection", stop) for stop in ("by-tokens", "by-tokens-from-the-anchor")),
        *(("block", stop) for stop in ("by-tokens", "trims-by-rows")),
        *(("point", stop) for stop in STOPS),
    ],
)
def test_replay_of_a_chain_has_the_joint_law_of_the_live_loop(mode: str, stop: str) -> None:
    seed, eos = (2, True) if stop == "by-tokens" else (1, False)
    case = Case(mode, "chain:3", STOPS[stop], "mixed", seed, eos)
    live = live_law(case)
    assert math.isclose(sum(live.values()), 1.0) and len(live) > 20
    assert apart(live, replay_law(case)) <= EXACT


@pytest.mark.parametrize(("mode", "tree"), [("rejection", "2,1"), ("rejection", "2,2"), ("rejection_replace", "1,2")])
def test_replay_of_a_tree_has_the_joint_law_of_the_live_loop(mode: str, tree: str) -> None:
    case = Case(mode, tree, STOPS["by-tokens-from-the-anchor"], "mixed", 1, True, new=4)
    live = live_law(case)
    assert len(live) > 20
    assert apart(live, replay_law(case)) <= EXACT


def test_a_dense_table() -> None:
    """Every token has a chance: a part of the texts, whose probabilities both sides know."""
    case = Case("block", "chain:3", STOPS["by-tokens"], "dense", 1)
    texts = dict(list(case.texts().items())[::16])
    live = {key: value for key, value in live_law(case).items() if key[0] in texts}
    assert len(live) > 40
    assert apart(live, replay_law(case, texts)) <= EXACT


def test_the_proof_tells_a_law_that_is_nearly_right() -> None:
    case = Case("block", "chain:3", STOPS["by-tokens"], "mixed", 1, off_text="approximate")
    assert apart(live_law(case), replay_law(case)) > WRONG


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_chances_are_those_of_acceptance_given_prefix_and_token(mode: str) -> None:
    """Over texts and draws, the share of accepted tokens among those that look alike."""
    case = Case(mode, "chain:2", STOPS["by-tokens"], "dense", 4, new=4)
    told: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text, probability in case.texts().items():
        arrays, weights = drawn_traces(case, text)
        first = arrays.first_anchor == 1
        assert bool(first.all())
        row = arrays.offset
        tokens, accepted = arrays.tokens[row].tolist(), arrays.accepted[row].tolist()
        chance, before = (arrays.extra[name][row].tolist() for name in ("accept_chance", "next_chance"))
        for at, weight in enumerate((weights * probability).tolist()):
            for depth in range(2):  # deeper ones are beyond what the draws of a short text go through
                if accepted[at] < depth:
                    break
                seen = tuple(tokens[at][:depth])
                for key, value in (
                    ((seen, tokens[at][depth], chance[at][depth]), float(accepted[at] > depth)),
                    ((seen, before[at][depth]), float(accepted[at] > depth)),
                ):
                    told[key][0] += weight
                    told[key][1] += weight * value
    assert len(told) >= 16
    for key, (weight, kept) in told.items():
        assert kept / weight == pytest.approx(key[-1], abs=2e-7)  # chances are kept as float32


def test_a_policy_that_leaves_out_some_siblings_is_refused() -> None:
    from specstop.train.replay.source import TraceSource  # noqa: F401 - what refuses it

    class TrimsOneSibling(TrimmingByRows):
        features = ("branch_rank",)

        def keep(self, step, state):  # type: ignore[no-untyped-def]
            return step.alive & (step.features[..., 0] < 1), state

    case = Case("rejection", "2,1", lambda depth: TrimsOneSibling(1, depth), "dense", 1, new=4)
    with pytest.raises(TraceError, match="sends only a part of the candidates"):
        replay_law(case)


def test_keyed_draws_have_the_weights_law_and_depend_on_nothing_else() -> None:
    count = 40_000
    weights = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    position, node = torch.arange(count), torch.full((count,), 3)
    draws = KeyedDraws(draw_key(7, 0), position, node)
    tokens = draws.tokens(5.0 * weights.expand(count, -1), 0)
    share = np.bincount(tokens, minlength=5) / count
    assert np.abs(share - weights.numpy()).max() < 4 * 0.5 / math.sqrt(count) and share[1] == share[4] == 0.0
    accepted = draws.accepts(torch.full((count,), 0.3, dtype=torch.float64), 0)
    assert abs(float(accepted.double().mean()) - 0.3) < 4 * 0.46 / math.sqrt(count)
    both = float((accepted & (tokens == 2)).double().mean())
    assert abs(both - 0.15) < 4 * 0.36 / math.sqrt(count)
    part = KeyedDraws(draw_key(7, 0), position[10:20], node[10:20])
    assert torch.equal(part.tokens(weights.expand(10, -1), 0), tokens[10:20])
    other = KeyedDraws(draw_key(7, 1), position, node).tokens(weights.expand(count, -1), 0)
    assert abs(float((other == tokens).double().mean()) - 0.38) < 4 * 0.49 / math.sqrt(count)


def test_rows_on_and_off_the_text_are_drawn_alike_in_any_company() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(64, 9, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    own, weight = torch.randint(-1, 9, (64,), generator=generator), torch.rand(64, generator=generator).double()
    position, node = torch.arange(64), torch.zeros(64, dtype=torch.int64)

    def draws(at: slice) -> KeyedDraws:
        return KeyedDraws(draw_key(3, 0), position[at], node[at])

    every, some = slice(None), slice(5, 9)
    for replacement in (False, True):
        whole = rejection_candidates(q, p, own, 3, replacement, draws(every))
        part = rejection_candidates(q[some], p[some], own[some], 3, replacement, draws(some))
        assert torch.equal(whole.tokens[some], part.tokens) and torch.equal(whole.accepted[some], part.accepted)
        hit = whole.accepted >= 0
        assert torch.equal(whole.tokens[hit, whole.accepted[hit]], own[hit]) and 5 < int(hit.sum()) < 64
        assert replacement or all(len(set(row)) == 3 for row in whole.tokens.tolist())
    whole = block_candidates(q, p, own, weight, draws(every))
    part = block_candidates(q[some], p[some], own[some], weight[some], draws(some))
    assert torch.equal(whole.tokens[some], part.tokens) and whole.weight is not None
    assert bool(((whole.accepted == 0) == (whole.tokens[:, 0] == own)).all())
