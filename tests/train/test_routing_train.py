"""Routes among drafters: fitting, folders, specs, and the oracle bound."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from routing_traces import routing_profile, routing_trace
from specstop.collect.schema import NO_TOKEN, drafter_of
from specstop.policies.errors import PolicyError, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.registry import load_policy
from specstop.policies.routing import ThresholdRoute, ValueRoute
from specstop.policies.storage import content_digest, save_policy
from specstop.train import TraceArrays
from specstop.train.evaluate.comparison import Job, Setting, compare_texts
from specstop.train.evaluate.pricing import ProfileBootstrap
from specstop.train.evaluate.statistics import form_clusters
from specstop.train.fit.achievable import achievable_route
from specstop.train.fit.adapt import adapt_to_profile
from specstop.train.fit.plan import TrainOptions
from specstop.train.fit.route import anchor_values, fit_route, rule_lengths, tuned_rules
from specstop.train.fit.rules import best_of, fixed_grid
from specstop.train.heads import make_head
from specstop.train.replay.arrays import policy_features
from specstop.train.replay.bounds import ROUTE_ERRORS, oracle_plan, planned_rounds, round_regret, route_errors
from specstop.train.replay.checks import kept_back, require_disjoint_prompts
from specstop.train.replay.run import replay, replay_lengths

PROFILE = routing_profile()


@functools.cache
def fitted() -> ValueRoute:
    route = fit_route(routing_trace(texts=100, depth=4), PROFILE, make_head("logistic"), TrainOptions(passes=2))
    assert isinstance(route, ValueRoute)
    return route


def test_a_learned_route_beats_each_drafter_and_each_rule_on_other_prompts():
    unseen = routing_trace(texts=40, depth=4, seed=5)
    rate = replay(unseen, fitted(), PROFILE).rate
    assert rate > 1.02 * best_of(fixed_grid(unseen, PROFILE)).rate
    assert rate > max(replay(unseen, rule, PROFILE).rate for rule in tuned_rules(unseen, PROFILE))


def learned_route() -> ValueRoute:
    return fitted()


def rule() -> ThresholdRoute:
    policy = load_policy("agreement:2?lengths=4+3")
    assert isinstance(policy, ThresholdRoute)
    return policy


@pytest.mark.parametrize("build", [learned_route, rule])
def test_a_saved_route_plays_the_same_rounds(tmp_path, build):
    arrays, route = routing_trace(texts=4, depth=4, seed=9), build()  # type: ignore[operator]
    again = load_policy(save_policy(route, tmp_path / "policy"))
    assert content_digest(again) == content_digest(route)  # type: ignore[arg-type]
    rounds, same = (replay(arrays, policy, PROFILE) for policy in (route, again))
    assert torch.equal(rounds.log, same.log) and torch.equal(rounds.drafting, same.drafting)


def test_values_are_those_of_decoding_the_rest_of_the_text():
    arrays, route, rho = routing_trace(texts=6, anchors=20, depth=4), rule(), 300.0
    # A backlog costs nothing: values assume the usual one.
    low = dataclasses.replace(PROFILE.others[0].low, draft_s=(1e-3, 1e-3), draft_token_s=0.0)
    model = dataclasses.replace(PROFILE.others[0], low=low, high=dataclasses.replace(low, context=80.0))
    profile = dataclasses.replace(PROFILE, others=(model,))
    anchors = anchor_values(arrays, route, ("agreement_run",), profile, rho)
    played = replay(arrays, route, profile)
    drafting = played.drafting.numpy()
    chosen = np.where(drafting.any(1), drafting.argmax(1), 2)
    gains = (played.committed - rho * played.price(profile)).numpy()
    rows = (arrays.offset[played.sequence] + played.anchor - 1).numpy()
    assert (np.flatnonzero(anchors.visited) == rows).all()
    for text in range(6):
        rounds = np.flatnonzero(played.sequence.numpy() == text)
        rest = np.cumsum(gains[rounds][::-1])[::-1]  # of each round and all later ones
        np.testing.assert_allclose(anchors.values[rows[rounds], chosen[rounds]], rest, atol=1e-9)


@pytest.mark.parametrize("policies", ["fixed", "rules"])
def test_known_lengths_have_the_rounds_of_the_policies(policies: str) -> None:
    arrays = routing_trace(texts=6, anchors=30, depth=4, seed=3)
    # A drafter has no token at a few anchors, and the texts reach the length limit.
    arrays.tokens[::7, arrays.tree.roots[0][0] - 1] = NO_TOKEN
    accepted = arrays.path.clone()
    accepted[::7, [row - 1 for row in range(1, len(arrays.tree)) if arrays.tree.drafter[row] == 0]] = False
    arrays = dataclasses.replace(
        arrays, path=accepted, header=dataclasses.replace(arrays.header, max_new_tokens=32, facts={
            **arrays.header.facts, "reading": ["all", "path"]})
    )  # fmt: skip
    if policies == "fixed":
        known = fixed_grid(arrays, PROFILE)
        same = ("log", "committed", "decisions", "steps")
    else:
        rules = [
            *tuned_rules(arrays, PROFILE),
            ValueRoute("always-lookup", (), (), 0, [FixedLength(2), FixedLength(3)]),
        ]
        lengths = torch.stack([rule_lengths(one, arrays) for one in rules])
        known = replay_lengths(arrays, lengths, lengths, PROFILE, rules)
        same = ("log", "committed", "decisions", "steps", "backlog", "drafting", "context")
    for rounds in known:
        played = replay(arrays, rounds.policy, PROFILE)
        for name in same:
            assert torch.equal(getattr(rounds, name), getattr(played, name)), (rounds.name, name)
        torch.testing.assert_close(rounds.seconds, played.seconds, rtol=1e-12, atol=0.0)
        assert bool(rounds.decisions.any()) == (rounds.policy.routes and not rounds.name.startswith("always"))


def test_the_achievable_estimate_is_between_the_rules_and_the_bound() -> None:
    arrays = routing_trace(texts=100, depth=4, seed=5)
    estimate = achievable_route(arrays, PROFILE)
    best = max(replay(arrays, one, PROFILE).rate for one in tuned_rules(arrays, PROFILE))
    assert best < estimate.rate < float(arrays.text_tokens.sum() / oracle_plan(arrays, PROFILE).seconds.sum())
    assert (estimate.tokens == arrays.text_tokens).all() and not estimate.decision_seconds(PROFILE).any()


def test_heads_are_trained_on_the_signals_of_their_drafter() -> None:
    arrays = routing_trace(texts=3, anchors=12, depth=1)  # as many nodes as drafters
    row = torch.arange(len(arrays.accepted))
    for index, part in enumerate(arrays.each_drafter):
        seen = policy_features(part, ["match_length", "prompt_tokens"], row, torch.zeros(len(row), 4))
        expected = torch.stack([arrays.columns["match_length"][:, index], torch.full((len(row),), 7.0)], 1)
        assert torch.equal(seen, expected[:, None].expand(-1, 2, -1))


def test_errors_of_routes_are_those_of_the_plan() -> None:
    arrays = routing_trace(texts=8, anchors=30, depth=4, seed=6)
    plan = oracle_plan(arrays, PROFILE)
    for played in (replay(arrays, rule(), PROFILE), *fixed_grid(arrays, PROFILE)[:5:4]):
        regret = round_regret(arrays, played, plan, PROFILE)
        errors = route_errors(played, plan, regret)
        assert ((errors >= 0) == (regret.choice_s > 1e-12)).all()
        for at in range(len(played)):
            text = int(played.sequence[at])
            place = int(played.anchor[at] - arrays.first_anchor[text])
            used, best = played.drafting[at].tolist(), int(plan.drafter[text, place])
            ideal = int(plan.steps[text, place])
            name = "plain" if not any(used) else "drafted" if not ideal else "length" if used[best] else "drafter"
            assert errors[at] < 0 or ROUTE_ERRORS[errors[at]] == name
    ideal = planned_rounds(arrays, plan)
    assert (route_errors(ideal, plan, round_regret(arrays, ideal, plan, PROFILE)) < 0).all()


def test_a_route_is_adapted_to_another_profile() -> None:
    training = routing_trace(texts=30, depth=4, seed=7)
    route = fit_route(training, PROFILE, make_head("logistic"), TrainOptions(passes=1))
    adapt_to_profile(route, training, dataclasses.replace(PROFILE, round_s=1.01 * PROFILE.round_s))
    assert adapt_to_profile(route, training, PROFILE) == (route, ""), "adapting changes no policy"
    slow = PROFILE.others[0]
    low = dataclasses.replace(slow.low, draft_s=(9e-3, 9e-3))
    costs = dataclasses.replace(
        PROFILE, others=(dataclasses.replace(slow, low=low, high=dataclasses.replace(low, context=80.0)),)
    )
    adapted, note = adapt_to_profile(route, training, costs)
    assert note and replay(training, adapted, costs).rate > replay(training, route, costs).rate
    assert adapt_to_profile(route, None, costs)[0] is route
    with pytest.raises(TraceError, match="training prompts"):
        require_disjoint_prompts(training, None, [route])
    assert set(kept_back(training, [route]).clusters) == set(route.metadata.prompts["report"])


def brute_force(arrays: TraceArrays, text: int) -> float:
    """Return the least seconds of a text, over all drafters and lengths of all rounds."""
    count, depth = int(arrays.rows[text]), arrays.depth
    prompt, first = int(arrays.prompt_tokens[text]), int(arrays.first_anchor[text])

    @functools.cache
    def seconds(at: int) -> float:
        if at >= count:
            return 0.0
        best, row = np.inf, int(arrays.offset[text]) + at
        for drafter, own in enumerate(arrays.each_drafter):
            for length in range(depth + 1):
                fed = np.zeros((1, 2, depth), dtype=np.int64)
                fed[0, drafter, :length] = 1
                size, zero = np.array([length]), np.array([0])
                backlog = np.ones((1, 2), dtype=np.int64)
                cost = PROFILE.round_seconds(np.array([prompt + first + at]), size, size, backlog, zero, 0.0, fed)
                end = at + min(int(own.accepted[row]), length) + 1
                best = min(best, float(cost[0]) + seconds(end))
        return best

    return seconds(0) + float(PROFILE.prefill_seconds(np.array([prompt]))[0])


def test_the_bound_of_several_drafters_is_the_best_of_all_drafters_and_lengths():
    arrays = routing_trace(texts=5, anchors=12, depth=3, seed=2)
    plan = oracle_plan(arrays, PROFILE)
    expected = [brute_force(arrays, text) for text in range(5)]
    np.testing.assert_allclose(plan.seconds.numpy(), expected, rtol=1e-12)
    rounds = planned_rounds(arrays, plan)
    np.testing.assert_allclose(rounds.text_seconds(plan.profile).numpy(), expected, rtol=1e-12)
    for played in fixed_grid(arrays, PROFILE):
        assert (played.seconds >= plan.seconds - 1e-12).all()


def test_the_baseline_is_the_best_drafter_at_its_best_length():
    arrays = routing_trace(texts=24, depth=4)
    clusters = form_clusters(arrays.clusters, arrays.groups, arrays.text_tokens.tolist())
    setting = Setting(arrays, ProfileBootstrap(PROFILE), clusters)
    compared = compare_texts(setting, [Job("rule", "rule", "", rule())])
    lines, fastest = {line.name: line for line in compared.lines}, best_of(fixed_grid(arrays, PROFILE))
    assert lines["best fixed"].note.startswith(fastest.name) and "@" in fastest.name
    assert lines["best fixed"].tokens_per_s == pytest.approx(fastest.rate)
    assert sum(lines["rule"].drafters.values()) <= 1.0 and not compared.below_bound
    hindsight, bound = lines["best drafter by text"], lines["oracle bound"]
    assert fastest.rate <= hindsight.tokens_per_s <= bound.tokens_per_s


def test_a_policy_uses_the_drafter_after_the_at_sign():
    arrays = routing_trace(texts=4, depth=4)
    assert drafter_of(arrays.header) == "lookup+model"
    for index, name in enumerate(("lookup", "model")):
        rounds = replay(arrays, load_policy(f"fixed:3@{name}"), PROFILE)
        assert rounds.drafting[:, index].any() and not rounds.drafting[:, 1 - index].any()
    for spec in ("agreement:1@model", "agreement:1?lengths=a", "match:2"):
        with pytest.raises(PolicyError):
            load_policy(spec)
