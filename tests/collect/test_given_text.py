"""Rounds drawn given the text have the law of the live loop's; so have their chances. Traces hold both."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from drawn_law import drawn_traces, replay_law
from enumeration import EXACT
from random_stops import ByTokens, TrimmingByRows
from specstop.collect.given_text import KeyedDraws, block_candidates, block_states, rejection_candidates
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.store import Trace
from specstop.decode.drafters import with_drafter
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies import Confidence, FixedLength
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import InputError, PolicyError, TraceError
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from text_law import Case, apart, live_law

OPTIONS: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 2}
STOPS: dict[str, Callable[[int], StopPolicy]] = {
    "by-tokens": partial(ByTokens, 3, stops=0.5),
    "by-tokens-from-the-anchor": partial(ByTokens, 5, first=0, stops=0.2),
    "trims-by-rows": partial(TrimmingByRows, 4),
}


@pytest.mark.parametrize(
    ("mode", "tree", "stop"),
    [  # all of them, rejection's and block's, are in the benchmark of exactness
        *(("rejection", "chain:3", stop) for stop in ("by-tokens", "by-tokens-from-the-anchor")),
        *(("block", "chain:3", stop) for stop in ("by-tokens", "trims-by-rows")),
        *(("point", "chain:3", stop) for stop in STOPS),
        *(("rejection", tree, "by-tokens-from-the-anchor") for tree in ("2,1", "2,2")),
        ("rejection_replace", "1,2", "by-tokens-from-the-anchor"),
    ],
)
def test_replay_has_the_joint_law_of_the_live_loop(mode: str, tree: str, stop: str) -> None:
    is_tree = not tree.startswith("chain")
    seed, eos = (2, True) if stop == "by-tokens" else (1, is_tree)
    case = Case(mode, tree, STOPS[stop], "mixed", seed, eos, new=4 if is_tree else 5)
    live = live_law(case)
    assert math.isclose(sum(live.values()), 1.0) and len(live) > 20
    assert apart(live, replay_law(case)) <= EXACT


def test_a_dense_table_of_probabilities() -> None:
    """Every token has a chance: a part of the texts, whose probabilities both sides know."""
    case = Case("block", "chain:3", STOPS["by-tokens"], "dense", 1)
    texts = dict(list(case.texts().items())[::16])
    live = {key: value for key, value in live_law(case).items() if key[0] in texts}
    assert len(live) > 40
    assert apart(live, replay_law(case, texts)) <= EXACT


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_chances_are_those_of_acceptance_given_prefix_and_token(mode: str) -> None:
    """Over texts and draws, the share of accepted tokens among those that look alike."""
    case = Case(mode, "chain:2", STOPS["by-tokens"], "dense", 4, new=4)
    sums: dict[object, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for text, probability in case.texts().items():
        arrays, weights = drawn_traces(case, text)
        row = arrays.offset
        tokens, accepted = arrays.tokens[row].tolist(), arrays.accepted[row].tolist()
        chance, before = (arrays.extra[name][row].tolist() for name in ("accept_chance", "next_chance"))
        for at, weight in enumerate((weights * probability).tolist()):
            for depth in range(2):  # deeper ones are beyond what the draws of a short text go through
                if accepted[at] < depth:
                    break
                prefix, hit = tuple(tokens[at][:depth]), float(accepted[at] > depth)
                for key in ((prefix, tokens[at][depth], chance[at][depth]), (prefix, before[at][depth])):
                    sums[key][0] += weight
                    sums[key][1] += weight * hit
    assert len(sums) >= 16
    for key, (weight, kept) in sums.items():
        assert kept / weight == pytest.approx(key[-1], abs=2e-7)  # type: ignore[index]  # chances are kept as float32


def test_a_policy_that_leaves_out_some_siblings_is_refused() -> None:
    class TrimsOneSibling(TrimmingByRows):
        features = ("branch_rank",)

        def keep(self, step, state):  # type: ignore[no-untyped-def]
            return step.alive & (step.features[..., 0] < 1), state

    case = Case("rejection", "2,1", lambda depth: TrimsOneSibling(1, depth), "dense", 1, new=4)
    with pytest.raises(TraceError, match="candidates"):
        replay_law(case)


def test_keyed_draws_have_the_weights_law_and_depend_on_nothing_else() -> None:
    count = 40_000
    weights = torch.tensor([0.2, 0.0, 0.5, 0.3, 0.0], dtype=torch.float64)
    position, node = torch.arange(count), torch.full((count,), 3)
    draws = KeyedDraws(7, 0, position, node)
    tokens = draws.tokens(5.0 * weights.expand(count, -1), 0)
    share = np.bincount(tokens, minlength=5) / count
    assert np.abs(share - weights.numpy()).max() < 4 * 0.5 / math.sqrt(count) and share[1] == share[4] == 0.0
    accepted = draws.accepts(torch.full((count,), 0.3, dtype=torch.float64), 0)
    assert abs(float(accepted.double().mean()) - 0.3) < 4 * 0.46 / math.sqrt(count)
    both = float((accepted & (tokens == 2)).double().mean())
    assert abs(both - 0.15) < 4 * 0.36 / math.sqrt(count)
    part = KeyedDraws(7, 0, position[10:20], node[10:20])
    assert torch.equal(part.tokens(weights.expand(10, -1), 0), tokens[10:20])
    for other in (KeyedDraws(7, 1, position, node), KeyedDraws(7, 0, position, node + 1)):
        agreed = float((other.tokens(weights.expand(count, -1), 0) == tokens).double().mean())
        assert abs(agreed - 0.38) < 4 * 0.49 / math.sqrt(count)


def test_rows_on_and_off_the_text_are_drawn_alike_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.softmax(2 * torch.randn(64, 9, generator=generator, dtype=torch.float64), -1) for _ in range(2))
    token, weight = torch.randint(-1, 9, (64,), generator=generator), torch.rand(64, generator=generator).double()
    every, part = slice(None), slice(5, 9)

    def draws(at: slice) -> KeyedDraws:
        return KeyedDraws(3, 0, torch.arange(64)[at], torch.zeros(64, dtype=torch.int64)[at])

    for replacement in (False, True):
        whole, some = (rejection_candidates(q[at], p[at], token[at], 3, replacement, draws(at)) for at in (every, part))
        assert torch.equal(whole.tokens[part], some.tokens) and torch.equal(whole.accepted[part], some.accepted)
        hit = whole.accepted >= 0
        assert torch.equal(whole.tokens[hit, whole.accepted[hit]], token[hit]) and 5 < int(hit.sum()) < 64
        assert replacement or all(len(set(row)) == 3 for row in whole.tokens.tolist())
    whole, some = (block_candidates(q[at], p[at], token[at], weight[at], draws(at)) for at in (every, part))
    assert torch.equal(whole.tokens[part], some.tokens)
    assert bool(((whole.accepted == 0) == (whole.tokens[:, 0] == token)).all())


@pytest.mark.parametrize(("depth", "anchors"), [(1, 9), (3, 9), (4, 5)])
def test_the_states_of_block_verification_are_the_weights_of_rounds_from_each_anchor(depth: int, anchors: int) -> None:
    step = np.random.default_rng(depth).choice([0.3, 0.8, 1.0, 1.5, 4.0, 0.0], 9)
    begin, place, after, weight = block_states(step, depth, anchors)
    for anchor in range(anchors):
        state, expected = begin[anchor], 1.0
        for at in range(anchor, min(anchor + depth, 9)):
            assert (place[state], weight[state]) == (at, expected)
            state, expected = after[state], min(1.0, expected * step[at])
    assert len({(p, w) for p, w in zip(place, weight, strict=True)}) == len(place)
    assert (np.diff(place) >= 0).all(), "the states of a place are adjacent"


@pytest.fixture(scope="module")
def drawn(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trace]:
    """A trace by verification, of two draws if they differ."""
    folder = tmp_path_factory.mktemp("drawn")
    return {
        name: collect(pair, prompts, folder / name, verification=name, draws=draws, **OPTIONS)
        for name, draws in (("rejection", 2), ("block", 2), ("point", 1))
    }


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({}, "block"), ({"temperature": 0.0}, "match"), ({"tree": "2,1"}, "match"), ({"mix": 0.3, "depth": 1}, "match"),
        ({"collector": "live"}, "match"), ({"drafter": "lookup"}, "match"), ({"verification": "rejection"}, "rejection"),
        ({"verification": "block", "temperature": 0.0}, "match"),
    ],
)  # fmt: skip
def test_by_default_rounds_are_those_of_the_fastest_verification_that_can_be_replayed(
    pair: Pair, prompts: list[Prompt], options: dict[str, Any], mode: str
) -> None:
    chosen = with_drafter(pair, options.pop("drafter")) if "drafter" in options else pair
    assert plan_run(chosen, prompts, **{**OPTIONS, **options}).header.verification == mode


def test_draws_are_sequences_of_one_text(drawn: dict[str, Trace], traces: dict[float, Trace]) -> None:
    plain = trace_arrays(traces[0.7])
    for name in ("rejection", "block"):
        header, columns = (
            drawn[name].header,
            ("accept_chance", "next_chance", "overlap", "draft_prob", "target_prob", "observed"),
        )
        assert (header.exactness, header.draws, type(header).from_json(header.to_json(), "x")) == ("law", 2, header)
        arrays = trace_arrays(drawn[name], extra=columns)
        assert arrays.prompt_ids == [prompt for prompt in plain.prompt_ids for _ in range(2)]
        assert arrays.text_tokens.tolist() == plain.text_tokens.repeat_interleave(2).tolist(), "the texts are the same"
        assert arrays.keys.tolist()[1] == stream_key(0, arrays.prompt_ids[1], 1)
        first, second = (arrays.subset(range(side, arrays.sequences, 2)) for side in (0, 1))
        assert (first.tokens != second.tokens).any() and (first.accepted != second.accepted).any()
        chance, before, depths = arrays.extra["accept_chance"], arrays.extra["next_chance"], torch.arange(DEPTH)
        on_text = (arrays.accepted[:, None] >= depths) & ~arrays.cut[:, None]
        hard = (arrays.accepted[:, None] > depths)[on_text]
        assert abs(float(chance[on_text].mean()) - float(hard.float().mean())) < 0.05
        assert not chance[arrays.accepted[:, None] < depths].any()
        if name == "rejection":
            known = arrays.extra["observed"]
            ratio = (arrays.extra["target_prob"] / arrays.extra["draft_prob"].clamp_min(1e-30)).clamp_max(1.0)
            np.testing.assert_allclose(chance[known], ratio[known], rtol=1e-5)
            np.testing.assert_allclose(before[known], arrays.extra["overlap"][known], rtol=1e-5)


def test_any_policy_is_replayed_and_block_verification_accepts_more(drawn: dict[str, Trace], profile: Profile) -> None:
    committed = {}
    for name, trace in drawn.items():
        arrays = trace_arrays(trace)
        results = [replay(arrays, policy, profile) for policy in (FixedLength(4), Confidence(0.3, DEPTH))]
        assert all(one.tokens.tolist() == arrays.text_tokens.tolist() for one in results)
        committed[name] = results[0].block_efficiency
    assert committed["block"] > committed["rejection"] > committed["point"]


def test_point_rounds_are_those_of_the_live_loop(
    pair: Pair, prompt_ids: list[list[int]], drawn: dict[str, Trace], profile: Profile
) -> None:
    policy = Confidence(0.3, DEPTH)
    assert drawn["point"].header.exactness == "path"
    log = replay(trace_arrays(drawn["point"]), policy, profile).log.tolist()
    for sequence, prompt in enumerate(prompt_ids):
        speculator = Speculator(pair, policy, Settings(0.7, NEW, verification="point"))
        rounds = speculator.generate(prompt, stream_key(0, f"p{sequence}")).rounds
        live = [[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds]
        assert live == [line[1:] for line in log if line[0] == sequence]


def test_completions_are_drawn_like_sampled_texts(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], drawn: dict[str, Trace], tmp_path: Path
) -> None:
    """Given as completions the texts have the anchors with labels all the way, and the same draws."""
    texts = plain_texts(pair, prompt_ids, [stream_key(0, p.id) for p in prompts], NEW + DEPTH, 0.7).tokens
    completions = {p.id: text for p, text in zip(prompts, texts, strict=True)}
    trace = collect(pair, prompts, tmp_path, verification="block", draws=2, completions=completions, **OPTIONS)
    assert (trace.header.texts, trace.header.exactness) == ("sampled", "law")
    one, other = trace_arrays(trace), trace_arrays(drawn["block"])
    for sequence in range(one.sequences):
        given, sampled = one.subset([sequence]), other.subset([sequence])
        rows = int(given.rows[0])
        assert given.tokens.tolist() == sampled.tokens[:rows].tolist()
        assert given.accepted.tolist() == sampled.accepted[:rows].tolist()


@pytest.mark.parametrize(
    ("options", "noun"),
    [
        ({"verification": "typical"}, "verification"), ({"verification": "block", "tree": "2,2"}, "chain"),
        ({"verification": "match", "draws": 2}, "draws"),
        ({"verification": "block", "temperature": 0.0, "draws": 2}, "draws"),
        ({"verification": "block", "draws": 0}, "draws"), ({"verification": "rejection", "depth": 1, "mix": 0.2}, "mix"),
        ({"mix": 0.2}, "mix"), ({"collector": "live", "draws": 2}, "draws"), ({"collector": "live", "mix": 0.2}, "mix"),
        ({"collector": "live", "memory": 9}, "memory"), ({"collector": "live", "explore": 1.5}, "explore"),
        ({"collector": "live", "completions": {}}, "completions"), ({"collector": "alive"}, "collector"),
        ({"policy": FixedLength(2)}, "policy"), ({"explore": 0.5}, "explore"), ({"batch": 2}, "batch"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_are_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict[str, Any], noun: str
) -> None:
    with pytest.raises(InputError, match=noun):
        collect(pair, prompts[:2], tmp_path / "t", **{**OPTIONS, "shards": 1, **options})
    assert not (tmp_path / "t").exists()


def test_replay_refuses_what_the_live_loop_would(drawn: dict[str, Trace], profile: Profile) -> None:
    class Trims(Confidence):
        trims = True

    class Noisy(FixedLength):
        features = ("noisy_margin",)

    arrays = trace_arrays(drawn["rejection"])
    for policy, feature in ((Trims(0.3, DEPTH), "drawn_prob"), (Noisy(2), "noisy_margin")):
        with pytest.raises(PolicyError, match=feature):
            replay(arrays, policy, profile)


def test_what_carries_its_state_meets_a_text_once(drawn: dict[str, Trace], profile: Profile) -> None:
    class Carrying(FixedLength):
        carries = True

    arrays = trace_arrays(drawn["block"])
    carried, plain = replay(arrays, Carrying(3), profile), replay(arrays, FixedLength(3), profile)
    assert torch.equal(carried.log, plain.log)
