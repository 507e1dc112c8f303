"""`train`: traces in, a policy folder out, the same one for the same seed."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import make_prompts
from contract_policies import DEPTH
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair, join
from specstop.decode.plain import plain_texts
from specstop.decode.verify.noise import stream_key
from specstop.policies.errors import InputError, PolicyError, TraceError
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.plan import FEATURES
from specstop.train.fit.run import train
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

PLAIN = ("logistic", "mlp", "xgboost")
"""Heads of any scalar features; what other kinds ask for is in tests of their own."""


def few_epochs(head: str) -> dict[str, int]:
    """Return parameters for what holds however well a network is fitted."""
    return {"epochs": 6} if head == "mlp" else {}


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_rule_for_batches_keeps_costs_and_acceptance(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    full_profile = full_profile.with_decisions({"logistic?rule=batch": 1e-5})  # else it is timed
    made = train(sides[0], full_profile, rule="batch", out=tmp_path / "p").policy
    again = load_policy_folder(tmp_path / "p")
    assert again.joint and again.rule.to_dict() == {"kind": "batch", "send": "best"}
    assert full_profile.same_costs(again.metadata.profile) and len(again.metadata.acceptance) == DEPTH
    arrays = trace_arrays(sides[1])
    mine, theirs = (replay(arrays, policy, full_profile) for policy in (made, again))
    assert torch.equal(mine.log, theirs.log)
    assert len(mine.log[:, 2].unique()) > 1, "the policy decides something"
    report = evaluate(sides[1], dataclasses.replace(full_profile, round_s=full_profile.round_s + 1e-3), [again])
    assert report[again.name].note == "decides by the costs of this profile"


@pytest.mark.parametrize(
    ("head", "rule"),
    [  # every rule with the head that is fitted soonest, and one with each of the others
        *(("logistic", rule) for rule in ("derived", "survival", "step")),
        ("mlp", "survival"),
        ("xgboost", "derived"),
    ],
)
def test_a_trained_folder_replays_as_the_returned_policy(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, head: str, rule: str
) -> None:
    options = {"cross_fit": rule == "derived", "folds": 2, "params": few_epochs(head)}
    trained = train(sides[0], full_profile, head=head, rule=rule, threshold=0.45, out=tmp_path / "p", **options)
    assert trained.path == tmp_path / "p"
    again = load_policy_folder(tmp_path / "p")
    arrays = trace_arrays(sides[1])
    mine, theirs = (replay(arrays, policy, full_profile) for policy in (trained.policy, again))
    for name in ("log", "seconds", "tokens", "history"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name))
    assert again.metadata == trained.policy.metadata
    assert (again.name, again.head.kind, again.rule.kind, again.max_depth) == (head, head, rule, DEPTH)
    assert again.features == FEATURES
    facts = again.metadata
    assert (facts.temperature, facts.verification, facts.label) == (0.7, "match", "match")
    assert facts.pair == dict(sides[0].header.pair)
    assert len(facts.acceptance) == DEPTH
    assert full_profile.same_costs(facts.profile)
    assert (facts.rho > 0) == (rule == "derived")
    assert len(mine.log[:, 2].unique()) > 1, "the policy decides something"


@pytest.mark.parametrize("head", PLAIN)
def test_the_same_seed_gives_the_same_bytes_and_another_does_not(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, head: str
) -> None:
    for number, seed in enumerate((3, 3, 4)):
        train(
            sides[1], full_profile, head=head, out=tmp_path / str(number), seed=seed, folds=2, params=few_epochs(head)
        )
    first, second, third = (files(tmp_path / str(n)) for n in range(3))
    assert first == second
    assert first["weights.safetensors"] != third["weights.safetensors"]


def test_a_trained_policy_decodes_the_targets_text_as_replayed(
    pair: Pair, sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    policy = train(sides[0], full_profile, features=[*FEATURES, "mean_accepted", "last_verified"]).policy
    prompts = make_prompts(12, "held", 22)
    ids = [pair.tokenizer(p.text)["input_ids"] for p in prompts]
    keys = [stream_key(0, p.id) for p in prompts]
    new = sides[1].header.max_new_tokens
    speculator = Speculator(pair, policy, Settings(0.7, new, verification="match"))
    generations = [speculator.generate(i, k) for i, k in zip(ids, keys, strict=True)]
    assert [list(g.tokens) for g in generations] == plain_texts(pair, ids, keys, new, 0.7).tokens
    arrays = trace_arrays(sides[1])
    log = replay(arrays, policy, full_profile).log.tolist()
    played = dict(zip([p.id for p in prompts], generations, strict=True))
    live = [
        [s, r.anchor, r.drafted, r.verified, r.accepted]
        for s, name in enumerate(arrays.prompt_ids)
        for r in played[name].rounds
    ]
    assert log == live
    assert len(log) == sum(len(g.rounds) for g in generations) > 40


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"head": "xgbost"}, InputError, "xgboost"),
        ({"features": ["drawn_porb"]}, PolicyError, "drawn_prob"),
        ({"rule": "surviva"}, InputError, "survival"),
        ({"rule": "step", "threshold": 1.5}, PolicyError, "between 0 and 1"),
        ({"rule": "batch", "threshold": 0.3}, InputError, "threshold"),
        ({"rule": "derived", "nodes": [4]}, InputError, "nodes"),
        ({"folds": 1}, InputError, "folds"),
        ({"report_share": 1.5}, InputError, "report"),
    ],
)
def test_a_wrong_option_is_refused_with_a_hint_before_anything_is_written(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, options: dict[str, object],
    error: type[Exception], message: str,
) -> None:  # fmt: skip
    with pytest.raises(error, match=message):
        train(sides[0], full_profile, out=tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


def test_a_policy_never_replaces_what_it_is_made_from(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    trace = copy.copy(sides[0])
    trace.folder = shutil.copytree(sides[0].folder, place / "traces")
    full_profile.save(place / "profiles" / "p.json")
    costs = Profile.load(place / "profiles" / "p.json")
    before = files(place)
    for out in (place, place / "traces", place / "traces" / "data" / "new", place / "profiles"):
        with pytest.raises(InputError, match="which the command reads"):
            train(trace, costs, out=out, overwrite=True)
    (tmp_path / "work").mkdir()
    with pytest.raises(InputError, match="which is replaced"):
        train(trace, costs, out=tmp_path / "work", overwrite=True, tune=1, storage=tmp_path / "work" / "trials.log")
    assert files(place) == before


def test_too_few_prompts_are_refused(pair: Pair, full_profile: Profile, tmp_path: Path) -> None:
    trace = collect(pair, make_prompts(3, "few", 5), tmp_path / "t", depth=3, max_new_tokens=12)
    with pytest.raises(TraceError, match="at least 4 different prompts"):
        train(trace, full_profile)


def test_a_draft_that_is_never_wrong_can_be_trained_on(
    pair: Pair, endless_pair: Pair, full_profile: Profile, tmp_path: Path
) -> None:
    """All labels are of one kind: heads are constants, and what cannot be measured is not NaN in the file."""
    twin = join(endless_pair.target, endless_pair.target, pair.tokenizer)
    trace = collect(twin, make_prompts(6, "twin", 5), tmp_path / "t", depth=3, max_new_tokens=20)
    policy = train(trace, full_profile, out=tmp_path / "p").policy
    assert replay(trace_arrays(trace), policy, full_profile).log[:, 2].max() == 3
    json.loads((tmp_path / "p" / "policy.json").read_text(), parse_constant=pytest.fail)
