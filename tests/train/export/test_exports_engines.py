"""What `deploy` writes for engines beside tables for vLLM and SGLang: the policy inside vLLM, acceptance, TensorRT-LLM."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from specstop.collect.schema import drafter_of
from specstop.collect.store import Trace
from specstop.decode.engines.settings import read_settings
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train import train
from specstop.train.export.acceptance import CLAMP, fit_acceptance, log_odds
from specstop.train.export.deploy import deploy
from specstop.train.export.proposer import proposer_files, proposer_use
from specstop.train.export.trtllm import older_schedule, schedule
from specstop.train.export.vllm import table_drafter


def test_a_policy_that_vllm_can_run_is_written_with_its_folder(
    traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    trained = train(traces[0.0], profile, host="vllm", folds=2, out=tmp_path / "policy")
    policy = load_policy(tmp_path / "policy")
    deploy("vllm", traces[0.0], profile, tmp_path / "out", policy, max_batch=2)
    drafts = json.loads((tmp_path / "out" / "proposer.json").read_text())
    assert drafts == {
        "method": "custom_class",
        "model": "specstop.decode.engines.vllm.Proposer",
        "num_speculative_tokens": trained.policy.max_depth,
    }
    settings = read_settings(json.loads((tmp_path / "out" / "additional_config.json").read_text()))
    assert settings.policy == str(tmp_path / "out" / "policy") and settings.temperature == 0.0
    assert load_policy(settings.policy).metadata == policy.metadata
    assert "ends each request's draft" in (tmp_path / "out" / "README.md").read_text()


def test_a_rule_is_named_and_what_vllm_cannot_run_is_said(
    traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    deploy("vllm", traces[0.0], profile, tmp_path / "a", load_policy("confidence:0.3"), max_batch=1)
    settings = read_settings(json.loads((tmp_path / "a" / "additional_config.json").read_text()))
    assert settings.policy == "confidence:0.3" and not (tmp_path / "a" / "policy").exists()
    deploy("vllm", traces[0.0], profile, tmp_path / "c", load_policy("load?table=1:4,8:2"), max_batch=1)
    settings = read_settings(json.loads((tmp_path / "c" / "additional_config.json").read_text()))
    assert settings.policy == "load?table=1:4,8:2" and load_policy(settings.policy).max_depth == 4
    sampled = train(traces[0.7], profile, folds=2).policy
    deploy("vllm", traces[0.7], profile, tmp_path / "b", sampled, max_batch=1)
    assert not (tmp_path / "b" / "proposer.json").exists()
    assert "cannot run in vLLM: it reads noisy_margin" in (tmp_path / "b" / "README.md").read_text()


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        ("suffix", {"drafter": "suffix"}),
        ("suffix?sure=0.8+model", {"drafter": "suffix?sure=0.8+model", "draft": "small"}),
    ],
)
def test_the_traces_drafter_is_written(
    drafter: str, told: dict[str, str], traces: dict[float, Trace], tmp_path: Path
) -> None:
    facts = {"drafter": drafter, "draft model": told.get("draft", "")}
    header = replace(traces[0.0].header, draft=drafter, facts=facts)
    files = proposer_files(load_policy("confidence:0.3"), header, 3, tmp_path)
    raw = json.loads(files["additional_config.json"])
    assert raw == {"specstop": {**told, "policy": "confidence:0.3"}}
    assert read_settings(raw).drafter == drafter


def test_the_file_of_a_drafter_is_named_from_the_root(
    traces: dict[float, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is started in another folder than that in which the traces were recorded."""
    monkeypatch.chdir(tmp_path)
    header = replace(traces[0.0].header, draft="suffix", facts={"drafter": "suffix:notes.txt"})
    policy = load_policy("fixed:2")
    files = proposer_files(policy, header, 3, tmp_path)
    settings = read_settings(json.loads(files["additional_config.json"]))
    assert settings.drafter == f"suffix:{tmp_path / 'notes.txt'}"
    assert "what `drafter` names in `additional_config.json` are paths" in proposer_use(policy, settings.drafter, files)


@pytest.mark.parametrize(
    ("drafter", "named"),
    [
        ("model", {"method": "draft_model", "model": "pairs/draft"}),
        ("lookup", {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}),
        ("lookup:5", {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 1}),
        ("lookup?longest=2", {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1}),
        ("suffix", {"method": "draft_model", "model": "DRAFT"}),
        ("lookup+model", {"method": "draft_model", "model": "small"}),
    ],
)
def test_a_table_is_for_vllm_s_own_drafter_of_the_traces_kind(
    drafter: str, named: dict[str, str], traces: dict[float, Trace]
) -> None:
    facts = {"drafter": drafter, "draft model": "small" if "+" in drafter else ""}
    draft = "pairs/draft" if drafter == "model" else drafter
    assert table_drafter(replace(traces[0.0].header, draft=draft, facts=facts)) == named


def test_a_drafter_on_the_target_s_states_has_no_class(traces: dict[float, Trace], tmp_path: Path) -> None:
    policy, header = load_policy("fixed:2"), replace(traces[0.0].header, facts={"drafter": "suffix+hydra:heads"})
    files = proposer_files(policy, header, 3, tmp_path)
    assert not files
    assert "its drafter, suffix+hydra:heads, reads the target's hidden" in proposer_use(
        policy, drafter_of(header), files
    )


@pytest.mark.parametrize("length", [0, 3])
def test_a_policy_that_never_drafts_has_no_class(
    length: int, traces: dict[float, Trace], profile: Profile, tmp_path: Path
) -> None:
    deploy("vllm", traces[0.0], profile, tmp_path / "out", load_policy(f"fixed:{length}"), max_batch=1)
    assert (tmp_path / "out" / "proposer.json").exists() == (length > 0)


def test_acceptance_is_found_again() -> None:
    """Labels are drawn from a slope and intercepts, as vLLM reads them; 40,000 rounds give them back within .05 and .1."""
    slope, intercepts = 0.8, [0.3, -0.2, -0.6]
    chance = np.random.default_rng(0)
    top = chance.uniform(0.02, 0.999, (40_000, 3)).astype(np.float32)
    accepted = chance.random(top.shape) < 1 / (1 + np.exp(-(slope * log_odds(top.astype(float)) + intercepts)))
    arrays = SimpleNamespace(
        columns={"top1": torch.from_numpy(top)},
        column=lambda name: torch.from_numpy(top),
        accepted=torch.from_numpy(accepted.cumprod(1).sum(1)),
        cut=torch.zeros(len(top), dtype=torch.bool),
    )
    found = fit_acceptance(arrays, 3)  # type: ignore[arg-type]
    assert found is not None and abs(found["slope"] - slope) < 0.05
    assert np.abs(np.array(found["intercepts"]) - intercepts).max() < 0.1
    assert found["rows"] == int((accepted.cumprod(1).sum(1) + 1).clip(max=3).sum())


def test_log_odds_are_bounded() -> None:
    assert log_odds(np.array([0.0, 0.5, 1.0])).tolist() == [-CLAMP, 0.0, CLAMP]


def test_too_few_rows_give_no_coefficients(traces: dict[float, Trace]) -> None:
    arrays = SimpleNamespace(
        columns={"top1": None}, column=lambda name: torch.rand(4, 2), accepted=torch.tensor([0, 1, 2, 1]),
        cut=torch.zeros(4, dtype=torch.bool),
    )  # fmt: skip
    assert fit_acceptance(arrays, 2) is None  # type: ignore[arg-type]


def test_a_schedule_says_up_to_where_a_length_is_good() -> None:
    ranges = [(1, 4, 4), (5, 8, 2), (9, 32, 1)]
    assert schedule(ranges) == {4: 4, 8: 2, 32: 1}
    assert older_schedule(ranges) == {1: 4, 5: 2, 9: 1}


def test_trtllm_gets_the_lengths_that_vllm_gets(traces: dict[float, Trace], profile: Profile, tmp_path: Path) -> None:
    figures = deploy("trtllm", traces[0.0], profile, tmp_path / "t", max_batch=16)
    written = yaml.safe_load((tmp_path / "t" / "speculative_config.yaml").read_text())["speculative_config"]
    lengths = {line["batch"]: line["length"] for line in figures["batches"]}
    table = written["draft_len_schedule"]
    assert max(table) == 16 and written["max_draft_len"] == max(1, *table.values())
    for size, length in lengths.items():
        assert table[min(last for last in table if last >= size)] == length
    assert written["decoding_type"] == "Draft_Target"
    assert "draft_len_schedule" in (tmp_path / "t" / "README.md").read_text()
