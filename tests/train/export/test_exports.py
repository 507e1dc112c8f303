"""Tables for serving engines: what is chosen, that it is written as the engines read it, and what the page says.

The engines' formats are transcribed here as facts, so that they are held without the engines; `benchmarks/engines.py` runs
the engines' own parsers. vLLM 0.33.0: `vllm/v1/spec_decode/dynamic/utils.py`, `vllm/config/speculative.py`. SGLang 0.5.23:
`sglang/srt/speculative/adaptive_spec_params.py`. llama.cpp: `tools/server/README.md` at 00dc805.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from specstop.collect.store import Trace
from specstop.policies.costs import CostTable
from specstop.policies.errors import InputError, TraceError
from specstop.policies.files import STAGE_PREFIX
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.export.deploy import deploy, deploy_hf_replayed
from specstop.train.export.folder import find_sizes
from specstop.train.export.llama_cpp import Share, replay_shares, shares
from specstop.train.export.sglang import rules_around
from specstop.train.export.vllm import length_at
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from timed import timed_profile

ENGINES = ("vllm", "sglang", "llama.cpp")
PARTS = ("## Use", "## What to expect", "## What is lost", "## What is assumed", "## Where it comes from")


@pytest.fixture(scope="module")
def written(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, dict[str, Any]]]:
    """The folder and the figures of each engine, beside the policy confidence:0.3."""
    folder = tmp_path_factory.mktemp("out")
    policy = Confidence(0.3, 4)
    return {
        name: (folder / name, deploy(name, sides[0], full_profile, folder / name, policy, held_out=sides[1]))
        for name in ENGINES
    }


def growing(profile: Profile, share: float) -> Profile:
    """Return the profile with each row more at that share of the first, whatever the context."""
    first = profile.low.verify_s[0]
    verify = tuple(first * (1 + share * n) for n in range(len(profile.low.verify_s)))
    low = dataclasses.replace(profile.low, verify_s=verify)
    return dataclasses.replace(profile, low=low, high=dataclasses.replace(low, context=profile.high.context))


def check_vllm(config: dict[str, Any]) -> None:
    """What vLLM's parser demands."""
    assert set(config) == {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    assert config["method"] == "draft_model" and isinstance(config["model"], str)
    table = config["num_speculative_tokens_per_batch_size"]
    assert isinstance(table, list) and table and all(isinstance(e, list) and len(e) == 3 for e in table)
    assert table[0][0] == 1
    for before, (first, last, length) in zip([[0, 0, 0], *table], table, strict=False):
        assert all(type(n) is int for n in (first, last, length))
        assert before[1] < first <= last and length >= 0
    most = config["num_speculative_tokens"]
    assert most > 0 and most == max(1, *(e[2] for e in table))


def check_sglang(config: dict[str, Any]) -> None:
    """What SGLang's loader demands; a batch below the least key would fall to that one."""
    assert config and all(key.isdigit() for key in config) and min(map(int, config)) == 1
    for entry in config.values():
        assert set(entry) == {"candidate_steps", "up_hysteresis", "down_hysteresis", "ceiling_coeff"}
        steps = entry["candidate_steps"]
        assert steps and all(type(s) is int and s >= 0 for s in steps) and steps == sorted(set(steps))


def test_the_files_are_what_the_engines_read(written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    check_vllm(json.loads((written["vllm"][0] / "speculative_config.json").read_text()))
    check_sglang(json.loads((written["sglang"][0] / "adaptive.json").read_text()))
    folder, figures = written["llama.cpp"]
    now = (folder / "llama.args").read_text().split()
    older = (folder / "llama-older.args").read_text().split()
    assert now[::2] == ["--spec-type", "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min"]
    assert now[1] == "draft-simple"
    assert older[::2] == ["--draft-max", "--draft-min", "--draft-p-min"]
    assert int(now[3]) == figures["settings"]["n_max"] > 0 and 0 <= float(now[7]) < 1


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 2.0])
def test_tables_stay_readable_whatever_rows_cost(
    share: float, sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path
) -> None:
    costs = growing(profile, share)
    deploy("vllm", sides[0], costs, tmp_path / "v", max_batch=24)
    config = json.loads((tmp_path / "v" / "speculative_config.json").read_text())
    check_vllm(config)
    table = config["num_speculative_tokens_per_batch_size"]
    if share == 0.0:
        assert all(length > 0 for *_, length in table), "rows cost nothing: drafting pays in every batch"
    if share == 2.0:
        assert table == [[1, 24, 0]], "a row more costs more than a step of its own: nothing is drafted"
    deploy("sglang", sides[0], costs, tmp_path / "s", max_batch=4)
    check_sglang(json.loads((tmp_path / "s" / "adaptive.json").read_text()))


def test_lengths_fall_with_the_batch_where_rows_cost(
    sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path
) -> None:
    figures = deploy("vllm", sides[0], growing(profile, 0.05), tmp_path / "v", max_batch=64)
    lengths = [line["length"] for line in figures["batches"]]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]
    assert figures["mix_to_common"]["value"] >= 1.0


def jagged(profile: Profile, seed: int) -> Profile:
    """Return the profile as a noisy machine has it: every cost up to a third off, the second draft step on its own."""
    chance = np.random.default_rng(seed)

    def off(table: CostTable) -> CostTable:
        verify = tuple(s * chance.uniform(0.67, 1.33) for s in table.verify_s)
        return dataclasses.replace(table, verify_s=verify)

    return dataclasses.replace(profile, low=off(profile.low), high=off(profile.high))


@pytest.mark.parametrize("seed", range(4))
def test_tables_of_noisy_profiles_do_not_rise_and_agree_with_their_page(
    seed: int, sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path
) -> None:
    costs = jagged(profile, seed)
    alone_best = None
    for name in ("vllm", "sglang"):
        figures = deploy(name, sides[0], costs, tmp_path / name, max_batch=16, held_out=sides[1])
        lines, alone = figures["batches"], figures["alone"]
        most = [max(line["steps"]) if "steps" in line else line["length"] for line in lines]
        assert most == sorted(most, reverse=True)
        assert alone["to_best_fixed"]["high"] >= 1.0
        assert lines[0]["to_plain"] == pytest.approx(alone["to_plain"]["value"], rel=0.05), "prompts are read besides"
        if name == "vllm":
            assert most[0] == alone["best_fixed"] and alone["to_best_fixed"]["value"] == 1.0
            assert lines[0]["to_plain"] == pytest.approx(alone["to_plain"]["value"], rel=1e-12)
        else:
            assert all(line["to_fixed_here"]["high"] >= 1.0 for line in lines)
        assert alone_best in (None, alone["best_fixed"])
        alone_best = alone["best_fixed"]


def test_a_length_that_is_clearly_faster_in_a_larger_batch_is_chosen(
    sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path
) -> None:
    """A second row costs three steps and further ones nothing: alone drafting never pays, side by side it is free."""
    cliff = (4e-3, *[12e-3] * (len(profile.low.verify_s) - 1))
    low, high = (dataclasses.replace(t, verify_s=cliff, draft_s=(1e-5, 1e-5)) for t in (profile.low, profile.high))
    steep = dataclasses.replace(profile, low=low, high=high)
    for name in ("vllm", "sglang"):
        for noise in (0.02, 1.5):
            costs = timed_profile(steep, jitter=noise, each=2)
            lines = deploy(name, sides[0], costs, tmp_path / f"{name}{noise}", max_batch=2)["batches"]
            most = [max(line["steps"]) if "steps" in line else line["length"] for line in lines]
            assert most[0] == 0 and (most[1] > 0 if noise < 1 else most[1] == 0)
        blind = deploy(name, sides[0], steep, tmp_path / f"{name}-blind", max_batch=2)["batches"]
        assert blind[1]["to_plain"] == 1.0, "no timings, so nothing is clear"


def test_the_best_of_each_batch_is_chosen(written: dict[str, tuple[Path, dict[str, Any]]], sides: tuple[Trace, Trace],
                                          full_profile: Profile) -> None:  # fmt: skip
    arrays = trace_arrays(sides[0])
    rates = [replay(arrays, FixedLength(k), full_profile).rate for k in range(full_profile.max_depth)]
    table = json.loads((written["vllm"][0] / "speculative_config.json").read_text())[
        "num_speculative_tokens_per_batch_size"
    ]
    assert length_at([tuple(e) for e in table], 1) == max(range(len(rates)), key=rates.__getitem__)


def test_ratios_are_those_of_replay_on_the_other_prompts(
    written: dict[str, tuple[Path, dict[str, Any]]], sides: tuple[Trace, Trace], full_profile: Profile
) -> None:
    held = trace_arrays(sides[1])
    alone = written["vllm"][1]["alone"]
    plain, fixed = (replay(held, FixedLength(k), full_profile).rate for k in (0, alone["best_fixed"]))
    assert alone["to_plain"]["value"] == pytest.approx(fixed / plain)
    assert alone["policy_to_this"]["value"] == pytest.approx(
        replay(held, Confidence(0.3, 4), full_profile).rate / fixed
    )
    assert alone["oracle_bound_to_this"]["value"] >= 1.0
    for _, figures in written.values():
        assert figures["alone"]["to_plain"]["low"] <= figures["alone"]["to_plain"]["value"]


def test_the_pages_say_what_is_lost(written: dict[str, tuple[Path, dict[str, Any]]]) -> None:
    for name, (folder, figures) in written.items():
        page = (folder / "README.md").read_text()
        assert [part for part in PARTS if part in page] == list(PARTS), name
        assert json.loads((folder / "figures.json").read_text()) == figures
        assert f"{figures['alone']['policy_to_this']['value']:.3f}" in page
        assert "`confidence:0.3`" in page and "temperature 0.7" in page
        assert sorted(p.name for p in folder.iterdir() if p.name.startswith(STAGE_PREFIX)) == []


def test_without_a_policy_the_page_says_so(sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path) -> None:
    figures = deploy("vllm", sides[0], profile, tmp_path / "v", max_batch=1)
    assert "policy_to_this" not in figures["alone"]
    assert "No policy was given" in (tmp_path / "v" / "README.md").read_text()
    assert "held-out prompts" in figures["alone"]["prompts"]


def test_a_policy_with_a_mangled_price_is_refused(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, tmp_path: Path
) -> None:
    policy = learned.with_rule(learned.rule)
    record = {**full_profile.to_dict(), "decision_s": {policy.cost_name: -1.0}}
    policy.metadata = dataclasses.replace(policy.metadata, profile=record)
    bare = dataclasses.replace(full_profile, decision_s={})
    with pytest.raises(InputError, match="the policy's profile lacks or mangles decision_s"):
        deploy("vllm", sides[0], bare, tmp_path / "v", policy, max_batch=1)
    assert not (tmp_path / "v").exists()


def reference(arrays: TraceArrays, rule: Share) -> list[tuple[int, int]]:
    """Return (tokens drafted, tokens verified) of every round, as llama.cpp's loop drafts, one after the other."""
    p = shares(arrays)
    out = []
    for sequence in range(arrays.sequences):
        first, text = int(arrays.first_anchor[sequence]), int(arrays.text_tokens[sequence])
        anchor = first
        while anchor < text:
            row = int(arrays.offset[sequence]) + anchor - first
            most = min(rule.n_max, arrays.header.max_new_tokens - anchor - 1)
            drafted, result = 0, 0
            while result < most:
                drafted += 1
                sure = float(p[row, result]) >= rule.p_min
                if not sure and not rule.older:
                    break
                result += 1
                if not sure or bool(arrays.ends[row, result - 1]):
                    break
            verified = result if result >= rule.n_min else 0
            out.append((drafted, verified))
            anchor += min(int(arrays.accepted[row]), verified) + 1
    return out


@pytest.mark.parametrize("rule", [Share(0.3, 4), Share(0.45, 5, 2), Share(0.3, 4, 0, older=True), Share(0.0, 3)])
def test_the_share_rule_drafts_as_llama_cpp_does(rule: Share, traces: dict[float, Trace]) -> None:
    arrays = trace_arrays(traces[0.0])
    replayed = replay_shares(arrays, [rule])
    order = torch.argsort(replayed.every.sequence, stable=True)
    found = list(zip(replayed.every.drafted[order].tolist(), replayed.every.verified[order].tolist(), strict=True))
    assert found == reference(arrays, rule)
    assert len(set(found)) > 1 or rule.p_min == 0.0


def test_the_share_is_of_the_ten_likeliest(traces: dict[float, Trace]) -> None:
    arrays = trace_arrays(traces[0.0])
    top = torch.stack([arrays.column(f"top{i}") for i in range(1, 11)])
    torch.testing.assert_close(shares(arrays), top[0] / top.sum(0))
    bare = dataclasses.replace(arrays, columns={"top1": arrays.column("top1")})
    assert torch.equal(shares(bare), arrays.column("top1"))


def test_rules_are_tried_around_the_best_length_within_the_depth() -> None:
    rules = rules_around(2, 3)
    assert rules[0].candidates == (2,)
    assert {rule.candidates for rule in rules} >= {(1, 2), (2, 3), (1, 2, 3), (0, 2)}
    assert all(0 <= k <= 3 for rule in rules for k in rule.candidates)
    assert all(rule.up >= rule.down for rule in rules)
    assert next(iter(rules_around(0, 3))).candidates == (0,)


def test_sizes_are_those_up_to_the_largest() -> None:
    assert find_sizes(1) == [1] and find_sizes(8) == [1, 2, 3, 4, 6, 8]
    with pytest.raises(InputError, match="max_batch"):
        find_sizes(0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_full_folder_is_left_alone(engine: str, sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(InputError, match="not empty"):
        deploy(engine, sides[0], profile, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_traces_without_the_probability_are_refused(
    sides: tuple[Trace, Trace], profile: Profile, tmp_path: Path
) -> None:
    bare = copy.copy(sides[0])
    bare.header = dataclasses.replace(bare.header, features=("entropy",))
    with pytest.raises(TraceError, match="expected the feature top1"):
        deploy("llama.cpp", bare, profile, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_card_of_a_hub_folder_has_the_replayed_gain(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    figures = deploy_hf_replayed("confidence:0.3", sides[0], full_profile, tmp_path / "h", held_out=sides[1])
    held = trace_arrays(sides[1])
    ratio = (
        replay(held, Confidence(0.3, min(20, held.depth)), full_profile).rate
        / replay(held, FixedLength(0), full_profile).rate
    )
    assert figures["alone"]["to_plain"]["value"] == pytest.approx(ratio)
    card = (tmp_path / "h" / "README.md").read_text()
    assert re.search(rf"plain decoding \| {ratio:.3f} ", card)
