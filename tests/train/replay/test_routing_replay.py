"""Replay of policies that route: the rounds of the live loop, the trace of each drafter, and the costs of rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import NEW
from specstop.collect import collect
from specstop.decode import Settings, Speculator, stream_key
from specstop.decode.drafters import with_drafter
from specstop.decode.loop import Request
from specstop.policies import Confidence, FixedLength
from specstop.policies.contract import Array, State, StopPolicy
from specstop.policies.routing import RoutingPolicy, ThresholdRoute, ValueRoute
from specstop.train import Rounds, TraceArrays, trace_arrays
from specstop.train.replay.run import replay

DEPTH = 4


class Idle(RoutingPolicy):
    """Uses the first drafter where it agrees with the text, or was not used for some tokens; sometimes both."""

    name, joins = "idle", True

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        agrees, idle = features[:, 0, 0] >= 1, features[:, 0, 1]
        return np.stack([agrees | (idle >= 3), ~agrees], 1), state


class Past(RoutingPolicy):
    """Uses the drafter that accepted less on average, and none where both are good."""

    name = "past"

    def route(self, features: Array, state: State) -> tuple[Array, State]:
        values = features[..., 0]
        return (np.arange(2) == values.argmin(1)[:, None]) & (values.sum(1) < 1.5)[:, None], state


def stops(second: StopPolicy) -> list[StopPolicy]:
    return [FixedLength(3), second.limited(DEPTH)]


ROUTES: dict[str, Callable[[], StopPolicy]] = {
    "agreement": lambda: ThresholdRoute("agreement_run", 1, stops(Confidence(0.3))),
    "match": lambda: ThresholdRoute("match_prob", 0.6, stops(FixedLength(4))),
    "idle": lambda: Idle(stops(Confidence(0.4)), ["agreement_run", "idle_tokens"]),
    "past": lambda: Past(stops(Confidence(0.4)), ["mean_accepted", "prompt_tokens"]),
    "always": lambda: ValueRoute("always", (), (), 1, [FixedLength(3), FixedLength(2)]),
    "one": lambda: Confidence(0.3, DEPTH),
}


@pytest.fixture(scope="module")
def recorded(pair, prompts, tmp_path_factory):
    """Collect a trace of a drafter, once for each kind."""
    double = [dataclasses.replace(prompt, text=f"{prompt.text} {prompt.text}") for prompt in prompts]

    @functools.cache
    def run(drafter: str, temperature: float, route: str = "", tree: str | None = None) -> TraceArrays:
        out = tmp_path_factory.mktemp("recorded")
        options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "verification": "match", "tree": tree}
        if route:
            options |= {"policy": ROUTES[route](), "collector": "live"}
        return trace_arrays(collect(with_drafter(pair, drafter), double, out, temperature=temperature, **options))

    return run


@pytest.fixture(scope="module")
def costs(profile):
    return dataclasses.replace(profile, others=(dataclasses.replace(profile, step_s=9e-4),))


def by_text(rounds: Rounds) -> list[list[tuple[int, ...]]]:
    """Return anchor, drafted, verified, accepted, backlog, decisions of each round, by text."""
    backlog = rounds.backlog.numpy().reshape(len(rounds.sequence), -1)
    read = backlog.sum(1) if backlog.shape[1] == 1 else (backlog * rounds.drafting.numpy()).sum(1)
    names = ("anchor", "drafted", "verified", "accepted")
    columns = [*(getattr(rounds, name).tolist() for name in names), read.tolist(), rounds.decisions.tolist()]
    rows = list(zip(rounds.sequence.tolist(), *columns, strict=True))
    return [[row[1:] for row in rows if row[0] == text] for text in range(len(rounds.prompt_tokens))]


@pytest.mark.parametrize(("drafter", "temperature", "batch"), [("suffix+model", 0.0, 1), ("lookup+model", 0.7, 4)])
@pytest.mark.parametrize("name", ROUTES)
def test_rounds_are_those_of_the_live_loop(
    recorded, pair, costs, prompts, prompt_ids, drafter, name, temperature, batch
):
    policy, arrays = ROUTES[name](), recorded(drafter, temperature)
    rounds = replay(arrays, policy, costs)
    settings = Settings(temperature, NEW, DEPTH, verification="match")
    requests = [Request(ids * 2, stream_key(0, p.id)) for p, ids in zip(prompts, prompt_ids, strict=True)]
    texts = Speculator(with_drafter(pair, drafter), policy, settings, batch=batch).run(requests)
    names = ("anchor", "drafted", "verified", "accepted", "backlog", "decisions")
    assert by_text(rounds) == [[tuple(getattr(r, column) for column in names) for r in text.rounds] for text in texts]
    if policy.routes:
        used = rounds.drafting.numpy()
        assert used.any(0).tolist() == [name != "always", True], "each drafter is used"
        assert rounds.decisions.any() == (name != "always"), "nothing is to be decided"
        assert (used.sum(1) == 2).any() == (name == "idle") and (name != "past" or not used.any(1).all())


@pytest.mark.parametrize("name", ["match", "idle", "past"])
def test_a_live_trace_of_a_route_replays_itself(recorded, costs, name):
    dense, live = recorded("suffix+model", 0.7), recorded("suffix+model", 0.7, name)
    assert by_text(replay(live, ROUTES[name](), costs)) == by_text(replay(dense, ROUTES[name](), costs))


@pytest.mark.parametrize("tree", [None, "1,1|2,1"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_trace_of_one_drafter_is_that_collected_with_it_alone(recorded, temperature, tree):
    both = recorded("suffix+model", temperature, tree=tree)
    for index, (drafter, own) in enumerate(zip(("suffix", "model"), (tree or "|").split("|"), strict=True)):
        part, alone = both.each_drafter[index], recorded(drafter, temperature, tree=own or None)
        assert part.header.topology == alone.header.topology and part.header.readings == alone.header.readings
        names = [name for name in alone.columns if name in part.columns]
        assert {"top1", "drawn_prob", "anchor_top1"} <= set(names)
        drawn = part.tokens >= 0  # the collector of the model also records what stands below an end of text
        for name in names:
            one, other = part.columns[name], alone.columns[name]
            where = drawn if one.shape == drawn.shape else np.ones(one.shape, dtype=bool)
            np.testing.assert_allclose(one[where], other[where], atol=1e-5, err_msg=name)
        for name in ("accepted", "tokens", "cut", "text_tokens", "anchor_by_row"):
            one, other = getattr(part, name), getattr(alone, name)
            where = drawn if name == "tokens" else np.ones(one.shape, dtype=bool)
            assert (one[where] == other[where]).all(), name
