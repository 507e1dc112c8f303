"""What `deploy` writes is what its figures are of: the settled policy, batches as they replay, the traces' drafter."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from specstop.collect.store.folder import Trace
from specstop.policies.batch_rules import for_batches
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.evaluate.batches import by_batch
from specstop.train.export.deploy import deploy, deploy_hf_replayed
from specstop.train.export.serving import split_sides
from specstop.train.fit.run import train
from specstop.train.fit.trained import facts_of
from specstop.train.fit.tuning.settled import settle_for
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays

EXACT = 1e-9


@pytest.fixture(scope="module")
def timed(full_profile: Profile) -> Profile:
    """The profile with batches of 2 and 4, in which rows cost more and more."""
    verify = {n: ((n, 4e-3), (2 * n, 5e-3), (7 * n, 6e-3 + 2e-3 * n)) for n in (2, 4)}
    side = BatchTable(8.0, ((1, 8e-4), (4, 1.5e-3)), verify)
    costs = BatchCosts(side, dataclasses.replace(side, context=40.0))
    return dataclasses.replace(full_profile, batch=costs)


@pytest.fixture(scope="module")
def slow(full_profile: Profile) -> Profile:
    """Another profile: drafting is four times as expensive."""

    def table(of: Any) -> Any:
        return dataclasses.replace(of, draft_s=tuple(4 * s for s in of.draft_s))

    return dataclasses.replace(full_profile, low=table(full_profile.low), high=table(full_profile.high))


def batched(policy: LearnedPolicy, profile: Profile) -> LearnedPolicy:
    return for_batches(policy, profile=profile)


@pytest.mark.parametrize("made", [lambda policy, _: policy, batched], ids=["derived", "batch"])
def test_the_folder_of_another_profile_holds_the_policy_that_was_replayed(
    made: Callable[[LearnedPolicy, Profile], LearnedPolicy], learned: LearnedPolicy, sides: tuple[Trace, Trace],
    full_profile: Profile, slow: Profile, tmp_path: Path,
) -> None:  # fmt: skip
    policy = made(learned, full_profile)
    slow = slow.with_decisions({policy.cost_name: 7e-5})
    before = save_policy(policy, tmp_path / "policy")
    figures = deploy_hf_replayed(before, sides[0], slow, tmp_path / "hf", held_out=sides[1])
    written = load_policy_folder(tmp_path / "hf" / "policy")
    asked = load_policy_folder(before)
    assert slow.same_costs(written.metadata.profile) and not slow.same_costs(asked.metadata.profile)
    held = trace_arrays(sides[1])
    depth = min(held.depth, slow.max_depth)
    rate = replay(held, written.limited(depth), slow).rate
    assert figures["alone"]["to_plain"]["value"] == pytest.approx(
        rate / replay(held, FixedLength(0), slow).rate, rel=EXACT
    )
    assert rate != replay(held, asked.limited(depth), slow).rate
    card = (tmp_path / "hf" / "README.md").read_text()
    assert "trained under another profile" in card and figures["settled"] in card
    assert load_policy_folder(before).metadata == asked.metadata, "what was given stays as it is"


def test_vllm_gets_the_policy_that_was_replayed(
    traces: dict[float, Trace], full_profile: Profile, slow: Profile, tmp_path: Path
) -> None:
    train(traces[0.0], full_profile, head="logistic", host="vllm", folds=2, out=tmp_path / "policy")
    policy = load_policy_folder(tmp_path / "policy")
    figures = deploy("vllm", traces[0.0], slow, tmp_path / "out", policy, max_batch=1)
    written = load_policy_folder(tmp_path / "out" / "policy")
    held = split_sides(trace_arrays(traces[0.0]), slow).held
    fixed = replay(held, FixedLength(figures["batches"][0]["length"]), slow).rate
    mine = replay(held, written.limited(min(held.depth, slow.max_depth)), slow).rate
    assert figures["alone"]["policy_to_this"]["value"] == pytest.approx(mine / fixed, rel=EXACT)
    assert written.rule.to_dict() != policy.rule.to_dict()
    assert "Figures and files are of what it is here" in (tmp_path / "out" / "README.md").read_text()


def test_a_policy_without_costs_and_one_of_this_profile_come_back(
    learned: LearnedPolicy, sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    arrays = trace_arrays(sides[0])
    for policy in (Confidence(0.3, 4), learned):
        assert settle_for(policy, arrays, full_profile) == (policy, "")


def test_tables_of_measured_batches_are_what_evaluate_says(
    sides: tuple[Trace, Trace], timed: Profile, tmp_path: Path
) -> None:
    policy = Confidence(0.3, 4)
    figures = deploy("vllm", sides[0], timed, tmp_path / "v", policy, held_out=sides[1], max_batch=6)
    lines = {line["batch"]: line for line in figures["batches"]}
    assert [size for size, line in lines.items() if line["extrapolated"]] == [6], "of 1, 2, 3, 4 and 6"
    held = trace_arrays(sides[1])
    for size in (1, 2, 3, 4):
        line = lines[size]
        told = [("table", FixedLength(line["length"])), ("policy", policy)]
        batches = by_batch(held, told, timed, [size])
        best, table, mine, _ = batches["lines"]
        assert line["to_plain"] == pytest.approx(table["tokens_per_s"][0] / batches["plain"][0], rel=EXACT)
        assert line["to_best_here"] == pytest.approx(table["to_best_fixed"][0]["value"], rel=EXACT)
        ratio = mine["tokens_per_s"][0] / table["tokens_per_s"][0]
        assert line["policy_to_this"]["value"] == pytest.approx(ratio, rel=EXACT)
        assert best["to_best_fixed"][0]["value"] == 1.0
    assert figures["alone"]["policy_to_this"]["value"] == pytest.approx(lines[1]["policy_to_this"]["value"], rel=EXACT)
    page = (tmp_path / "v" / "README.md").read_text()
    assert "the policy, to this | beyond 4 |" in page and "Nothing is known here about larger" not in page
    assert "Batches were not replayed" not in page


def test_without_batches_the_page_says_that_none_was_replayed(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    figures = deploy("vllm", sides[0], full_profile, tmp_path / "v", Confidence(0.3, 4), max_batch=16)
    page = (tmp_path / "v" / "README.md").read_text()
    assert "Batches were not replayed" in page and "Nothing is known here about larger batches" in page
    assert "policy_to_this" not in figures["batches"][0] and figures["batches"][-1]["extrapolated"]


@pytest.mark.parametrize("engine", ["trtllm", "sglang", "llama.cpp"])
def test_pages_say_where_the_engine_cannot_run_the_traces_drafter(
    engine: str, sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    for drafter, draft in (("model", "small"), ("suffix+model", "suffix+model")):
        told = {} if drafter == "model" else {"drafter": drafter, "draft model": "small"}
        trace = copy.copy(sides[0])
        trace.header = dataclasses.replace(trace.header, draft=draft, facts={**trace.header.facts, **told})
        out = tmp_path / drafter
        deploy(engine, trace, full_profile, out, max_batch=1)
        said = "of the drafter `suffix+model`, which" in (out / "README.md").read_text()
        assert said == (drafter != "model")
        if engine == "trtllm":
            written = yaml.safe_load((out / "speculative_config.yaml").read_text())
            assert written["speculative_config"]["speculative_model"] == "small"


def test_a_policy_remembers_the_drafter_of_its_traces(sides: tuple[Trace, Trace]) -> None:
    header = sides[0].header
    assert "drafter" not in facts_of(header, [0.7], ["traces"], 0).provenance
    other = dataclasses.replace(header, facts={**header.facts, "drafter": "hydra:heads"})
    assert facts_of(other, [0.7], ["traces"], 0).provenance["drafter"] == "hydra:heads"
