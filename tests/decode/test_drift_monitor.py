"""What a plugin does wrong never reaches the text; and a policy whose promises do not come true is noticed."""

from __future__ import annotations

import dataclasses
import math
import random
import signal
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from joint_policies import batch_policy, synthetic_profile
from specstop.decode.drift_monitor import (
    DEVIATIONS,
    MIN_ROUNDS,
    SLACK,
    WINDOW,
    DriftMonitor,
    make_monitor,
)
from specstop.decode.loop import Request, Settings, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.batch_rules import for_batches
from specstop.policies.contract import Array, DraftStep, RoundOutcome, State, StopPolicy
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import Confidence
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator, LearnedPolicy, TrainingMetadata
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold

NEW = 20


class Plugin(StopPolicy):
    """Does something wrong in the method that is replaced; else it drafts two tokens."""

    name, features, max_depth = "plugin", ("top1",), 4

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        return step.alive & (step.depth < 2), state


def fail(*args: Any) -> Any:
    raise ZeroDivisionError("inside a plugin")


def leave(*args: Any) -> Any:
    raise SystemExit(0)


WRONGS: dict[str, dict[str, Callable[..., Any]]] = {
    "raises in keep": {"keep": fail},
    "raises in start": {"start": fail},
    "raises in observe": {"observe": fail},
    "raises in select": {"select": fail},
    "NaN for an answer": {"keep": lambda self, step, state: (step.features[..., 0] * math.nan, state)},
    "NaN where nothing is compared": {"keep": lambda self, step, state: (math.nan, state)},
    "a wrong shape": {"keep": lambda self, step, state: (step.alive[:, :, None], state)},
    "too many branches": {"keep": lambda self, step, state: (np.ones((3, 7), dtype=bool), state)},
    "a tensor": {"keep": lambda self, step, state: (torch.from_numpy(step.alive), state)},
    "numbers for truth": {"keep": lambda self, step, state: (step.alive.astype(np.int64), state)},
    "no state": {"keep": lambda self, step, state: step.alive},
    "nothing": {"keep": lambda self, step, state: None},
    "never stops": {"keep": lambda self, step, state: (step.alive, state)},
    "selects orphans": {"select": lambda self, tree, state: tree.depth != 1},
    "selects a wrong shape": {"select": lambda self, tree, state: tree.drawn[:, :1]},
    "changes what it is shown": {
        "keep": lambda self, step, state: (np.logical_not(step.alive, step.alive), step.features.fill(0))
    },
    "changes the tree": {"select": lambda self, tree, state: np.add(tree.tokens, 7, tree.tokens) > 0},
    "revives the dead": {"keep": lambda self, step, state: (np.ones_like(step.alive), state)},
    "exits in start": {"start": leave},
    "exits in keep": {"keep": leave},
    "exits in select": {"select": leave},
    "exits in observe": {"observe": leave},
    "another policy in the middle": {"keep": lambda self, step, state: setattr(self, "first", None)},
}


def broken(name: str) -> StopPolicy:
    policy: StopPolicy = type("Broken", (Plugin,), WRONGS[name])()
    return policy


def texts(speculator: Speculator, prompts: list[list[int]]) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecstopWarning)
        return [list(speculator.generate(p, stream_key(0, f"p{i}")).tokens) for i, p in enumerate(prompts)]


@pytest.fixture(scope="module")
def undisturbed(pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Texts by plain decoding."""
    return plain_texts(pair, prompt_ids[:3], [stream_key(0, f"p{i}") for i in range(3)], NEW, 0.7).tokens


@pytest.mark.parametrize(
    ("name", "tree"),
    [  # on a chain and a tree what is told of several branches; the rest on one of the two, in turn
        *((name, tree) for name in WRONGS if "select" in WRONGS[name] or "branches" in name for tree in (None, "2,2,1")),
        *((name, (None, "2,2,1")[at % 2]) for at, name in enumerate(WRONGS)
          if "select" not in WRONGS[name] and "branches" not in name),
    ],
)  # fmt: skip
def test_a_plugin_that_misbehaves_does_not_change_the_text(
    pair: Pair, prompt_ids: list[list[int]], undisturbed: list[list[int]], name: str, tree: str | None
) -> None:
    speculator = Speculator(pair, broken(name), Settings(0.7, NEW, 4, tree=tree, verification="match"))
    assert texts(speculator, prompt_ids[:3]) == undisturbed


@pytest.mark.parametrize("name", ["raises in keep", "NaN for an answer", "a wrong shape", "a tensor"])
def test_a_plugin_that_misbehaves_is_named_once_and_replaced(
    pair: Pair, prompt_ids: list[list[int]], name: str
) -> None:
    speculator = Speculator(pair, broken(name), Settings(0.0, NEW, 4, fallback=3))
    with pytest.warns(SpecstopWarning, match="policy plugin failed") as seen:
        for prompt in prompt_ids[:3]:
            speculator.generate(prompt)
    assert len(seen) == 1
    assert speculator.policy.name == "fixed:3"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *((f"exits in {method}", f"{method}.*SystemExit") for method in ("keep", "start", "observe", "select")),
        ("nothing", "keep.*None"),
        ("numbers for truth", "keep.*bool.*int64"),
        ("a tensor", "keep.*bool.*Tensor"),
    ],
)
def test_the_warning_says_which_method_failed_and_why(
    pair: Pair, prompt_ids: list[list[int]], name: str, why: str
) -> None:
    with pytest.warns(SpecstopWarning, match=rf"policy plugin failed .*{why}.*\.py:.*fixed:4"):
        Speculator(pair, broken(name), Settings(0.0, NEW, 4)).generate(prompt_ids[3])


@pytest.mark.parametrize("by_signal", [True, False])
def test_ctrl_c_stops_the_program_wherever_it_falls(pair: Pair, prompt_ids: list[list[int]], by_signal: bool) -> None:
    def interrupted(*args: Any) -> Any:
        if by_signal:
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    for method in ("start", "keep", "select", "observe"):
        policy = type("Interrupted", (Plugin,), {method: interrupted})()
        with pytest.raises(KeyboardInterrupt):
            Speculator(pair, policy, Settings(0.0, NEW, 4)).generate(prompt_ids[3])


def test_a_policy_that_failed_can_be_asked_again(pair: Pair, prompt_ids: list[list[int]]) -> None:
    """`reset`, as alternating runs do."""
    speculator = Speculator(pair, broken("raises in observe"), Settings(0.0, NEW, 4))
    found = []
    for _ in range(2):
        found += texts(speculator, prompt_ids[:2])
        assert speculator.policy.name == "fixed:4"
        speculator.reset()
        assert (speculator.policy.name, speculator.policy.first) == ("plugin", 1)
    assert found[:2] == found[2:]


def test_a_policy_that_never_stops_ends_at_the_depth_allowed(pair: Pair, prompt_ids: list[list[int]]) -> None:
    policy = broken("never stops")
    policy.max_depth = 1000
    rounds = [r for p in prompt_ids for r in Speculator(pair, policy, Settings(0.0, NEW, 5)).generate(p).rounds]
    assert max(r.drafted for r in rounds) == 5


# The drift monitor


def promising(accept: float, depth: int = 4, profile: dict[str, Any] | None = None) -> LearnedPolicy:
    """A policy that says of every token that it is accepted with this probability, and always drafts on."""
    logit = math.log(accept / (1 - accept))
    tensors = {
        "mean": np.zeros(1, dtype=np.float32),
        "scale": np.ones(1, dtype=np.float32),
        "weight": np.zeros((3, 1), dtype=np.float32),
        "bias": np.full(3, logit, dtype=np.float32),
    }
    head = build_head("logistic", ("depth",), tensors)
    rule, facts = Threshold("survival", 0.0), TrainingMetadata(profile=profile or {})
    return LearnedPolicy("promising", ("depth",), head, Calibrator(), Calibrator(), rule, depth, facts)


def simulate(truth: float, said: float, rounds: int, seed: int) -> DriftMonitor:
    chance, watch = random.Random(seed), DriftMonitor(promising(said), "warn")
    for _ in range(rounds):
        k = chance.randint(1, 5)
        accepted = next((j for j in range(k) if chance.random() >= truth), k)
        watch.add([said**depth for depth in range(1, k + 1)], accepted)
    return watch


def test_the_band_holds_a_policy_that_keeps_its_promise() -> None:
    """60 windows of 200 rounds; the band is made for a thousand times as many looks."""
    for seed in range(60):
        band = simulate(0.7, 0.7, 200, seed).band()
        assert band is not None
        live, low, high = band
        assert low < live < high


@pytest.mark.parametrize("truth", [0.4, 0.95])
def test_the_band_is_left_by_one_that_does_not(truth: float) -> None:
    for seed in range(10):
        band = simulate(truth, 0.7, 200, seed).band()
        assert band is not None
        live, low, high = band
        assert not low <= live <= high


def test_the_mean_and_its_variance_are_those_of_the_accepted_length() -> None:
    """Against the distribution of min(A, 3) itself, survival .8, .4, .3."""
    chances = {0: 0.2, 1: 0.4, 2: 0.1, 3: 0.3}
    mean = sum(a * p for a, p in chances.items())
    variance = sum(a * a * p for a, p in chances.items()) - mean**2
    watch = DriftMonitor(promising(0.8), "warn")
    for _ in range(WINDOW):
        watch.add((0.8, 0.4, 0.3), 2)
    band = watch.band()
    assert band is not None
    half = DEVIATIONS * math.sqrt(variance / WINDOW) + SLACK * mean
    assert band == pytest.approx((2.0, mean - half, mean + half))


@pytest.mark.parametrize(("depths", "cut"), [(4, True), (0, False)])
def test_rounds_that_were_cut_or_without_a_decision_do_not_count(depths: int, cut: bool) -> None:
    monitor = make_monitor(promising(0.9), "warn", True)
    assert monitor is not None
    one, true = np.ones(1, dtype=np.int64), np.array([True])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(WINDOW):  # nothing is accepted
            state = monitor._policy.start(1, one)
            for depth in range(1, depths):
                features = np.full((1, 1, 1), depth, dtype=np.float32)
                step = DraftStep(depth, true[:, None], one[:, None] - 1, features, {}, one - 1)
                state = monitor._policy.keep(step, state)[1]
                monitor.on_decision(step, state)
            assert monitor.on_outcome(RoundOutcome(true, 4 * one, 4 * one, 0 * one, true & cut, np.zeros(1))) is None


@pytest.fixture(scope="module")
def endless_pair(pair: Pair) -> Pair:
    """The pair without an end of text, under its own forward."""
    return dataclasses.replace(pair, eos=())


@pytest.fixture(scope="module")
def plain(endless_pair: Pair, prompt_ids: list[list[int]]) -> list[list[int]]:
    """Texts of 100 tokens by plain decoding."""
    return plain_texts(endless_pair, prompt_ids[:3], [0, 1, 2], 100, 0.7).tokens


@pytest.mark.parametrize("mode", ["off", "warn", "fallback"])
def test_a_broken_promise_is_told_once_and_left_only_on_request(
    endless_pair: Pair, prompt_ids: list[list[int]], plain: list[list[int]], mode: str
) -> None:
    settings = Settings(0.7, 100, 4, fallback=1, drift=mode, verification="match")
    speculator = Speculator(endless_pair, promising(0.99), settings)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = [list(speculator.generate(p, i).tokens) for i, p in enumerate(prompt_ids[:3])]
    assert found == plain
    assert len(seen) == (mode != "off")
    assert speculator.policy.name == ("fixed:1" if mode == "fallback" else "promising")
    if seen:
        assert "its calibration predicts" in str(seen[0].message)


def test_a_promise_that_is_kept_is_passed_over(endless_pair: Pair, prompt_ids: list[list[int]]) -> None:
    """The draft is the target: everything is accepted."""
    twin = dataclasses.replace(join(endless_pair.target, endless_pair.target), eos=())
    speculator = Speculator(twin, promising(0.999, 2), Settings(0.0, 100, 2, drift="fallback"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rounds = sum(len(speculator.generate(p).rounds) for p in prompt_ids[:4])
    assert rounds > MIN_ROUNDS and speculator.policy.name == "promising"


def best_length(policy: LearnedPolicy, *rounds: tuple[int, int], streams: int = 1) -> int:
    """Return the best length after rounds of (accepted, verified) tokens."""
    monitor = DriftMonitor(policy, "fallback", 3, streams)
    for accepted, verified in rounds:
        monitor.add([0.9] * verified, accepted)
    return monitor.best_length()


def test_the_best_fixed_length_follows_acceptance_and_costs() -> None:
    table = CostTable(10.0, (1e-3, 1e-3), 0.0, tuple(5e-3 + 1e-4 * k for k in range(5)))
    profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0)).to_dict()
    policy = promising(0.9, 4, profile)
    assert best_length(policy, (0, 2)) == 0, "nothing is accepted: plain decoding"
    half = max(range(5), key=lambda k: (2 - 0.5**k) / (5e-3 + 1.1e-3 * k))
    assert best_length(policy, (1, 2)) == half, "one of two tokens whose predecessors were accepted"
    assert best_length(policy, (2, 2)) == 4
    assert best_length(promising(0.9), (1, 2)) == 3, "no profile was saved"
    assert best_length(promising(0.9, 4, {"kind": "odd"}), (1, 2)) == 3


def test_the_best_fixed_length_of_a_batch_is_by_the_costs_of_the_batch() -> None:
    table = CostTable(10.0, (1e-3, 1e-3), 0.0, tuple(5e-3 + 1e-4 * k for k in range(5)))
    step = ((1, 1e-3), (4, 4e-3))
    shared = BatchTable(10.0, step, {4: ((4, 5e-3), (20, 0.1))})
    cheap = dataclasses.replace(shared, verify_s={4: ((4, 5e-3), (20, 5e-3))}, draft_s=((1, 1e-4), (4, 1e-4)))
    rounds = ((1, 2), (2, 4))  # 3 of 5 tokens whose predecessors were accepted
    alone = best_length(promising(0.9, 4, Profile(table, table, 0.0, 0.0, (0.0, 0.0)).to_dict()), *rounds)
    for side, expected in ((shared, 0), (cheap, 4)):
        profile = Profile(table, table, 0.0, 0.0, (0.0, 0.0), batch=BatchCosts(side, side)).to_dict()
        assert best_length(promising(0.9, 4, profile), *rounds, streams=4) == expected
        assert best_length(promising(0.9, 4, profile), *rounds) == alone > 0, "of one text, whatever batches cost"


@pytest.mark.parametrize("mode", ["off", "warn", "fallback"])
def test_a_rule_for_batches_that_sees_no_use_in_drafting_goes_on(
    endless_pair: Pair, prompt_ids: list[list[int]], mode: str
) -> None:
    costly = synthetic_profile(tuple(1.0 + n for n in range(40)), 0.5)
    policy = for_batches(batch_policy(names=("depth", "mean_accepted")), profile=costly)
    settings = Settings(0.0, 8, policy.max_depth, drift=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        texts = Speculator(endless_pair, policy, settings, batch=2).run([Request(p) for p in prompt_ids[:2]])
    assert [r.drafted for text in texts for r in text.rounds] == [0] * sum(len(text.rounds) for text in texts)


def test_only_learned_policies_on_chains_are_watched() -> None:
    assert make_monitor(promising(0.9), "warn", True) is not None
    for policy, mode, chain in (
        (promising(0.9), "off", True),
        (promising(0.9), "warn", False),
        (Confidence(), "warn", True),
    ):
        assert make_monitor(policy, mode, chain) is None
    with pytest.raises(InputError, match="drift: expected one of off, warn, fallback, not 'on'"):
        Settings(drift="on")
