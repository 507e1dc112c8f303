"""Deployment: files as the engines read them, figures of these files, and ONNX models."""

from __future__ import annotations

import dataclasses
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from commands import cli
from head_tensors import HIGH, LOW, NAMES, features, learned
from specstop.collect.schema import NO_TOKEN, drafter_of
from specstop.decode.engines.settings import read_settings
from specstop.policies import Confidence, FixedLength, PolicyError, TraceError
from specstop.policies.batch_rules import for_batches
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator
from specstop.policies.storage import load_policy_folder
from specstop.train import TraceArrays, trace_arrays, train
from specstop.train.evaluate.batches import by_batch
from specstop.train.export import onnx_model
from specstop.train.export.basis import Basis, largest_share, replay_thresholds
from specstop.train.export.engines import ENGINES, fit_acceptance, log_odds, vllm_obstacle
from specstop.train.export.onnx_model import OUTPUTS, TOLERANCE, build_onnx, export_onnx
from specstop.train.replay.rounds import scale_costs
from synthetic import with_batches

from specstop import LearnedPolicy, Trace, deploy, load_policy, replay, save_policy

EXACT = 1e-9


@pytest.fixture(scope="module")
def slow(full_profile):
    """Another profile: drafting is four times as expensive."""
    return scale_costs(full_profile, draft=4.0)


@pytest.fixture(scope="module")
def timed(full_profile):
    return with_batches(full_profile)


@pytest.fixture(scope="module")
def written(sides, timed, tmp_path_factory):
    """The folder and the figures of each engine, with the policy confidence:0.3."""
    folder, options = tmp_path_factory.mktemp("out"), {"traces": sides[0], "profile": timed, "held_out": sides[1]}
    return {name: (folder / name, deploy(name, folder / name, Confidence(0.3, 4), **options)) for name in ENGINES}


def test_files_are_what_the_engines_read(written):
    config = json.loads((written["vllm"][0] / "speculative_config.json").read_text())
    table = config["num_speculative_tokens_per_batch_size"]
    assert table[0][0] == 1
    for before, (first, last, length) in zip([[0, 0, 0], *table], table, strict=False):
        assert all(type(n) is int for n in (first, last, length)) and before[1] < first <= last and length >= 0
    assert config["num_speculative_tokens"] == max(1, *(length for *_, length in table))
    folder, figures = written["sglang"]
    steps = json.loads((folder / "adaptive.json").read_text())
    assert min(map(int, steps)) == 1 and steps["1"]["candidate_steps"] == [figures["start"]]
    costed = json.loads((folder / "costed.json").read_text())
    assert set(costed["specstop"]) == {"acceptance", "strength", "seconds"} and "1" in costed
    folder, figures = written["llama.cpp"]
    words = (folder / "llama.args").read_text().split()
    assert words[::2] == ["--spec-type", "--spec-draft-n-max", "--spec-draft-p-min"]
    assert int(words[3]) == figures["settings"]["n_max"] > 0 and 0 <= float(words[5]) < 1
    schedule = yaml.safe_load((written["trtllm"][0] / "speculative_config.yaml").read_text())["speculative_config"]
    assert schedule["draft_len_schedule"] == {last: length for _, last, length in table}
    assert schedule["decoding_type"] == "Draft_Target"
    for name, costs in (("vllm", "cost_curves"), ("sglang", "sps"), ("trtllm", "confidence_cost_table")):
        folder, figures = written[name]
        assert json.loads((folder / f"{costs}.json").read_text())
        lengths = json.loads((folder / "lengths.json").read_text())
        assert lengths == {"lengths": figures["lengths"], "off_from": figures["off_from"]}
        assert {row["batch"] for row in lengths["lengths"]} == {1, 2, 4} and len(lengths["off_from"]) == 2
        assert "tokens of context" in (folder / "README.md").read_text()


def test_tables_are_those_of_evaluate(written, sides, timed):
    folder, figures = written["vllm"]
    assert json.loads((folder / "figures.json").read_text()) == figures
    assert f"{figures['alone']['policy_to_this']['value']:.3f}" in (folder / "README.md").read_text()
    held, rows = trace_arrays(sides[1]), figures["batches"]
    assert [row["batch"] for row in rows] == [1, 2, 4]
    assert [row["length"] for row in rows] == sorted((row["length"] for row in rows), reverse=True)
    for row in rows:
        batches = by_batch(held, [("table", FixedLength(row["length"]))], timed, [row["batch"]])
        ratio = batches["lines"][1]["tokens_per_s"][0] / batches["plain"][0]
        assert row["to_plain"]["value"] == pytest.approx(ratio, rel=EXACT)
        assert row["to_plain"]["low"] <= row["to_plain"]["value"] <= row["to_plain"]["high"]
    alone = figures["alone"]
    plain, fixed = (replay(held, FixedLength(k), timed).rate for k in (0, alone["best_fixed"]))
    mine = replay(held, Confidence(0.3, 4), timed).rate
    assert alone["to_plain"]["value"] == pytest.approx(fixed / plain)
    assert alone["policy_to_this"]["value"] == pytest.approx(mine / fixed)
    assert alone["oracle_bound_to_this"]["value"] >= 1.0


def reference(arrays: TraceArrays, p_min: float, n_max: int) -> list[tuple[int, int]]:
    """Return (tokens drafted, tokens verified) of every round, as llama.cpp's loop drafts, one after the other."""
    p, out = largest_share(arrays), []
    for sequence in range(arrays.sequences):
        first, text = int(arrays.first_anchor[sequence]), int(arrays.text_tokens[sequence])
        anchor = first
        while anchor < text:
            row = int(arrays.offset[sequence]) + anchor - first
            most = min(n_max, arrays.header.max_new_tokens - anchor - 1)
            drafted = verified = 0
            while verified < most:
                drafted += 1
                if float(p[row, verified]) < p_min:
                    break
                verified += 1
                if bool(arrays.ends[row, verified - 1]):
                    break
            out.append((drafted, verified))
            anchor += min(int(arrays.accepted[row]), verified) + 1
    return out


@pytest.mark.parametrize("rule", [(0.3, 4), (0.45, 5), (0.0, 3)])
def test_the_threshold_drafts_as_llama_cpp(rule, traces, profile):
    arrays = trace_arrays(traces[0.0])
    (rounds,) = replay_thresholds(arrays, [rule], profile)
    drafts = list(zip(rounds.drafted.tolist(), rounds.verified.tolist(), strict=True))
    assert drafts == reference(arrays, *rule)
    assert len(set(drafts)) > 1 or rule[0] == 0.0


def test_prompts_of_choice_and_report_are_disjoint_and_other_traces_are_refused(sides, learned, full_profile, tmp_path):
    basis = Basis(sides[0], full_profile)
    assert not set(basis.fit.clusters) & set(basis.held.clusters)
    assert basis.fit.sequences + basis.held.sequences == trace_arrays(sides[0]).sequences
    for policy in (None, learned):
        with pytest.raises(TraceError, match="prompts are in"):
            Basis(sides[0], full_profile, policy, held_out=sides[0])
    few = Trace(sides[0].folder, sides[0].header, sides[0].rows.select(range(20)))
    with pytest.raises(TraceError, match="prompts"):
        Basis(few, full_profile)
    bare = Trace(sides[0].folder, dataclasses.replace(sides[0].header, features=("entropy",)), sides[0].rows)
    with pytest.raises(TraceError, match="expected the feature top1"):
        deploy("llama.cpp", tmp_path / "x", traces=bare, profile=full_profile)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("batched", [False, True])
def test_the_hub_folder_has_the_policy_that_was_replayed(learned, sides, full_profile, slow, tmp_path, batched):
    policy = for_batches(learned, profile=full_profile) if batched else learned
    slow = slow.with_decisions({policy.cost_name: 7e-5})
    before = save_policy(policy, tmp_path / "policy")
    figures = deploy("hf", tmp_path / "hf", before, traces=sides[0], profile=slow, held_out=sides[1])
    exported, original = load_policy_folder(tmp_path / "hf" / "policy"), load_policy_folder(before)
    assert slow.same_costs(exported.metadata.profile) and not slow.same_costs(original.metadata.profile)
    held = trace_arrays(sides[1])
    depth = min(held.depth, slow.max_depth)
    rate, plain = (replay(held, one, slow).rate for one in (exported.limited(depth), FixedLength(0)))
    assert figures["alone"]["to_plain"]["value"] == pytest.approx(rate / plain, rel=EXACT)
    assert rate != replay(held, original.limited(depth), slow).rate


def test_vllm_gets_the_replayed_policy(traces, full_profile, slow, tmp_path):
    trained = train(traces[0.0], full_profile, head="logistic", host="vllm", folds=2, out=tmp_path / "policy")
    policy = load_policy_folder(tmp_path / "policy")
    figures = deploy("vllm", tmp_path / "out", policy, traces=traces[0.0], profile=slow)
    exported, basis = load_policy_folder(tmp_path / "out" / "policy"), Basis(traces[0.0], slow, policy)
    fixed = replay(basis.held, FixedLength(figures["batches"][0]["length"]), slow).rate
    mine = replay(basis.held, exported.limited(basis.depth), slow).rate
    assert figures["alone"]["policy_to_this"]["value"] == pytest.approx(mine / fixed, rel=EXACT)
    assert exported.rule.to_dict() != policy.rule.to_dict()
    proposer = json.loads((tmp_path / "out" / "proposer.json").read_text())
    assert proposer["num_speculative_tokens"] == trained.policy.max_depth
    settings = read_settings(json.loads((tmp_path / "out" / "additional_config.json").read_text()))
    assert settings.policy == str(tmp_path / "out" / "policy") and settings.temperature == 0.0


def test_a_policy_that_vllm_cannot_run_is_not_written(traces, profile, tmp_path):
    deploy("vllm", tmp_path / "b", train(traces[0.7], profile, folds=2).policy, traces=traces[0.7], profile=profile)
    assert not (tmp_path / "b" / "proposer.json").exists()
    assert "cannot run in vLLM: it reads noisy_margin" in (tmp_path / "b" / "README.md").read_text()
    header = dataclasses.replace(traces[0.0].header, facts={"drafter": "hydra:heads"})
    assert "hidden states" in vllm_obstacle(load_policy("fixed:2"), drafter_of(header))
    assert vllm_obstacle(load_policy("fixed:0"), "model") == "it never drafts"


def test_acceptance_coefficients_are_recovered():
    """Labels drawn from a slope and intercepts, as vLLM reads them; 40,000 rounds recover them within .05 and .1."""
    slope, intercepts = 0.8, [0.3, -0.2, -0.6]
    chance = np.random.default_rng(0)
    top = chance.uniform(0.02, 0.999, (40_000, 3)).astype(np.float32)
    accepted = chance.random(top.shape) < 1 / (1 + np.exp(-(slope * log_odds(top.astype(float)) + intercepts)))
    tokens = np.where(chance.random(top.shape) < 0.1, NO_TOKEN, 5)  # a filter may leave no token
    accepted &= tokens != NO_TOKEN
    length = accepted.cumprod(1).sum(1)
    arrays = SimpleNamespace(
        columns={"top1": torch.from_numpy(top)},
        column=lambda name: torch.from_numpy(top),
        tokens=torch.from_numpy(tokens),
        accepted=torch.from_numpy(length),
        cut=torch.zeros(len(top), dtype=torch.bool),
    )
    fitted = fit_acceptance(arrays, 3)  # type: ignore[arg-type]
    assert fitted is not None and abs(fitted["slope"] - slope) < 0.05
    assert np.abs(np.array(fitted["intercepts"]) - intercepts).max() < 0.1
    assert fitted["rows"] == int(((np.arange(3) <= length[:, None]) & (tokens != NO_TOKEN)).sum())


@pytest.mark.parametrize("ranged", [False, True], ids=["any number", "ranges"])
@pytest.mark.parametrize("kind", ["logistic", "mlp", "xgboost"])
def test_onnxruntime_answers_as_the_policy_does(kind, ranged):
    pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    policy = learned(kind)
    if ranged:
        head = build_head(kind, NAMES, policy.head.tensors() | {"low": LOW, "high": HIGH})
        policy = LearnedPolicy("mine", NAMES, head, policy.accept, policy.next, policy.rule, 4, policy.metadata)
    session = runtime.InferenceSession(build_onnx(policy).SerializeToString(), providers=["CPUExecutionProvider"])
    x = features(300)
    x[:3, 1] = [0.0, 1.0, 0.5]
    if kind == "xgboost":
        x[50:90, 2] = np.nan
    result = session.run(list(OUTPUTS), {"features": x})
    expected = [*policy.probabilities(x, 1), policy.probabilities(x, 0)[1]]
    for ours, theirs in zip(result, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    facts = json.loads({p.key: p.value for p in build_onnx(policy).metadata_props}["specstop"])
    assert facts["features"] == list(NAMES) and facts["rule"] == policy.rule.to_dict()


def test_a_model_that_answers_otherwise_is_not_written(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    policy = learned()
    other = LearnedPolicy("mine", NAMES, policy.head, Calibrator("temperature", 3.0), policy.next, policy.rule, 4)
    monkeypatch.setattr(onnx_model, "build_onnx", lambda policy: build_onnx(other))
    with pytest.raises(PolicyError, match="nothing was written"):
        export_onnx(policy, tmp_path / "m.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    answer = cli("deploy", "--policy", save_policy(policy, tmp_path / "p"), "--out", tmp_path / "m.onnx")
    assert answer.code == 2 and 'pip install "specstop[onnx]"' in answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
