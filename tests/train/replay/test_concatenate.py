"""Several temperatures, one model: traces joined as one, the temperature a feature that is live as it is in replay."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEW, make_prompts
from contract_policies import DEPTH
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.fit.plan import FEATURES
from specstop.train.fit.run import Trained, train
from specstop.train.heads.crossfit import prompt_folds
from specstop.train.replay.run import replay
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.checks import check_fit
from specstop.train.replay.arrays import join_arrays, joined_arrays, temperatures

TEMPERATURES = (0.0, 0.7)


@pytest.fixture(scope="module")
def both(pair: Pair, sides: tuple[Trace, Trace], tmp_path_factory: pytest.TempPathFactory) -> list[Trace]:
    """The training prompts at two temperatures, the warmer one first."""
    folder = tmp_path_factory.mktemp("cold")
    cold = collect(pair, make_prompts(24, "fit", 21), folder / "t", depth=DEPTH, max_new_tokens=NEW, shards=2)
    return [sides[0], cold]


@pytest.fixture(scope="module")
def trained(both: list[Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(both, full_profile, head="xgboost", out=tmp_path_factory.mktemp("several") / "p")


@pytest.fixture(scope="module")
def by_temperature(both: list[Trace], full_profile: Profile) -> LearnedPolicy:
    """A policy whose head hangs on the temperature alone, so that a wrong one would show."""
    return train(both, full_profile, features=("temperature", "depth"), rule="step", threshold=0.55).policy


def test_joined_traces_replay_as_each_alone(both: list[Trace], profile: Profile) -> None:
    joined = joined_arrays(both)
    alone = [trace_arrays(trace) for trace in both]
    assert joined.sequences == sum(part.sequences for part in alone) > 40
    together = replay(joined, FixedLength(3), profile)
    parts = [replay(part, FixedLength(3), profile) for part in alone]
    for name in ("tokens", "seconds", "rounds", "accepted", "committed"):
        assert torch.equal(getattr(together, name), torch.cat([getattr(part, name) for part in parts]))
    first = len(alone[0].accepted)
    temperature = joined.column("temperature")
    assert set(temperature[:first].tolist()) == {float(torch.tensor(0.7))}
    assert set(temperature[first:].tolist()) == {0.0}
    assert set(alone[1].column("temperature").tolist()) == {0.0}
    assert temperatures(both) == TEMPERATURES


def test_a_prompt_is_in_one_fold_at_all_temperatures(both: list[Trace]) -> None:
    joined = joined_arrays(both, ("top1",))
    folds = prompt_folds(joined, 4, 0)
    owner = {}
    for name, fold in zip(joined.prompt_ids, folds.of.tolist(), strict=True):
        assert owner.setdefault(name, fold) == fold
    assert joined.sequences > len(owner) > 20
    assert folds.of.unique().tolist() == [0, 1, 2, 3]
    counts = [len({n for n, f in owner.items() if f == fold}) for fold in range(4)]
    assert max(counts) - min(counts) <= 1
    assert folds.sequences(1) == [s for s in range(joined.sequences) if int(folds.of[s]) == 1]
    assert sorted(folds.sequences(1) + folds.sequences(1, False)) == list(range(joined.sequences))


def test_one_trace_is_itself(both: list[Trace]) -> None:
    arrays = trace_arrays(both[0])
    assert join_arrays([arrays]) is arrays


def test_the_temperature_is_read_and_kept(trained: Trained, both: list[Trace]) -> None:
    assert trained.path is not None
    policy = load_policy_folder(trained.path)
    assert policy.features == (*FEATURES, "temperature")
    assert policy.metadata.temperature == TEMPERATURES
    assert "temperature 0, 0.7 |" in (trained.path / "README.md").read_text()
    found = {row["temperature"] for row in trained.metrics["reliability"]}
    assert found == {None, *TEMPERATURES}
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecstopWarning)
        for trace in both:
            check_fit(policy, trace)
    other = Trace(both[0].folder, dataclasses.replace(both[0].header, temperature=1.3), both[0].rows)
    with pytest.warns(SpecstopWarning, match=r"another temperature \(\(0.0, 0.7\)\) than these traces \(1.3\)"):
        check_fit(policy, other)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_live_decisions_read_the_temperature_as_replay_does(
    pair: Pair, both: list[Trace], by_temperature: LearnedPolicy, full_profile: Profile, temperature: float
) -> None:
    trace, policy = next(t for t in both if t.header.temperature == temperature), by_temperature
    arrays = trace_arrays(trace)
    log = replay(arrays, policy, full_profile).log.tolist()
    prompts = make_prompts(24, "fit", 21)[:6]
    speculator = Speculator(pair, policy, Settings(temperature, NEW, verification="match"))
    for prompt in prompts:
        made = speculator.generate(pair.tokenizer(prompt.text)["input_ids"], stream_key(0, prompt.id))
        s = arrays.prompt_ids.index(prompt.id)
        live = [[s, r.anchor, r.drafted, r.verified, r.accepted] for r in made.rounds]
        assert live == [line for line in log if line[0] == s]


def test_heads_that_read_the_temperature_tell_them_apart(by_temperature: LearnedPolicy) -> None:
    cold, warm = (
        by_temperature.probabilities(np.array([[temperature, 1.0]], dtype=np.float32), 1)[0]
        for temperature in TEMPERATURES
    )
    assert abs((cold - warm).item()) > 1e-3


def test_traces_that_do_not_belong_together_are_refused(both: list[Trace], full_profile: Profile) -> None:
    for change, message in (
        ({"pair": {"target": "x"}}, "differ in pair"),
        ({"max_new_tokens": 9}, r"differ in max_new_tokens \(\d+, 9\); expected one pair"),
        ({"verification": "rejection"}, "differ in verification"),
    ):
        other = Trace(both[1].folder, dataclasses.replace(both[1].header, **change), both[1].rows)
        with pytest.raises(TraceError, match=message):
            train([both[0], other], full_profile)
    with pytest.raises(TraceError, match="at least one trace"):
        train([], full_profile)


def test_a_folder_says_which_traces_it_comes_from(trained: Trained, both: list[Trace]) -> None:
    assert trained.path is not None
    sources = load_policy_folder(Path(trained.path)).metadata.provenance["traces"]
    assert sources == ", ".join(str(trace.folder) for trace in both)
