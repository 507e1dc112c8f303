"""vLLM and SGLang: the proposer, its settings, coefficients for adaptive verification, and the rule for steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from specstop.decode.engines.settings import EngineSettings, check_engine_policy, missing_in_engines, read_settings
from specstop.decode.engines.sglang import MEMORY, CostedSteps, costed_steps_factory, rule_entry
from specstop.decode.engines.vllm import Proposer, request_names
from specstop.decode.engines.vllm_plugin import SWITCH, read_coefficients, register
from specstop.policies.errors import InputError, PairError, PolicyError, SpecstopWarning
from specstop.policies.learned import LearnedPolicy, TrainingMetadata
from specstop.policies.registry import load_policy


def vllm_config(pair_folder: Path, vocabulary: int = 48, **settings: Any) -> SimpleNamespace:
    """Return a configuration like that of vLLM 0.32."""
    model = SimpleNamespace(
        model=str(pair_folder / "target"), dtype=torch.float64, max_model_len=128,
        hf_text_config=SimpleNamespace(eos_token_id=2), get_vocab_size=lambda: vocabulary,
        try_get_generation_config=lambda: {"eos_token_id": 16},
    )  # fmt: skip
    return SimpleNamespace(
        additional_config={"specstop": {"draft": str(pair_folder / "draft"), **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=5), model_config=model,
        device_config=SimpleNamespace(device=torch.device("cpu")), scheduler_config=SimpleNamespace(max_num_seqs=3),
    )  # fmt: skip


def test_requests_that_commit_nothing_have_no_draft(pair_folder, plain_pair):
    proposer = Proposer(vllm_config(pair_folder, policy="fixed:3"))
    proposer.load_model(None)
    tokens = np.zeros((3, 64), dtype=np.int32)
    tokens[:, :4] = [[20, 21, 22, 23], [30, 31, 32, 33], [20, 21, 25, 26]]
    drafts = proposer.propose([[23], [], [26]], np.array([4, 4, 4]), tokens, slot_mappings=None)
    assert drafts[1] == []
    with torch.inference_mode():
        for row in (0, 2):
            text = tokens[row, :4].tolist()
            for token in drafts[row]:
                assert int(plain_pair.draft_model(input_ids=torch.tensor([text])).logits[0, -1].argmax()) == token
                text.append(token)
            assert len(drafts[row]) == 3 or drafts[row][-1] == 16
    with pytest.raises(PairError, match=r"48 .*4000"):
        Proposer(vllm_config(pair_folder, vocabulary=4000)).load_model(None)


class ModelRunner:
    """The part of vLLM's model runner that calls its proposer."""

    def __init__(self, names: Any) -> None:
        self.input_batch = SimpleNamespace(token_ids_cpu=np.zeros((2, 8), dtype=np.int32), req_ids=names)

    def call(self, count: int) -> Any:
        return request_names(self.input_batch.token_ids_cpu, count)


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [(["a", "b", "c"], 2, ["a", "b"]), (["a"], 2, None), (["a", 3], 2, None), (("a", "b"), 2, None)],
)
def test_names_of_requests_come_from_the_calling_model_runner(names, count, expected):
    assert ModelRunner(names).call(count) == expected
    assert request_names(np.zeros((1, 4), dtype=np.int32), 1) is None


@pytest.mark.parametrize(
    ("features", "temperature", "hidden", "missing"),
    [
        (("anchor_prob", "anchor_token", "before_token", "temperature", "mean_full"), 0.7, (), ["anchor_prob"]),
        (("noisy_margin", "top1", "noisy_lead"), 0.7, (), ["noisy_margin", "noisy_lead"]),
        (("noisy_margin", "top1"), 0.0, (), []),  # without noise it is a margin of the draft's logits
        (("top1",), 0.0, ("draft_hidden", "target_hidden"), ["draft_hidden", "target_hidden"]),
    ],
)
def test_features_that_engines_do_not_provide_are_named(features, temperature, hidden, missing):
    policy = LearnedPolicy.__new__(LearnedPolicy)
    policy.name, policy.features, policy.hidden = "mine", features, hidden
    policy.metadata = TrainingMetadata(temperature=temperature)
    assert missing_in_engines(policy) == missing
    if missing:
        with pytest.raises(PolicyError, match=f"mine.*{', '.join(missing)}.*vllm"):
            check_engine_policy(policy)
    rule = load_policy("fixed:2")
    rule.features = ("noisy_score",)
    assert missing_in_engines(rule) == ["noisy_score"], "whatever the temperature"


@pytest.mark.parametrize(
    ("raw", "noun"),
    [
        (None, "object"), ({"specstop": {"drafter": "suffix+model"}}, "draft"), ({"specstop": {"polcy": "x"}}, "policy"),
        ({"specstop": {"draft": 3}}, "draft"), ({"specstop": {"draft": "d", "temperature": -1.0}}, "temperature"),
        ({"specstop": {"draft": "d", "rows": 0}}, "rows"), ({"specstop": {"draft": "d", "rows": True}}, "rows"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_by_name(raw, noun):
    with pytest.raises(InputError, match=noun):
        read_settings(raw)
    settings = read_settings({"other": 1, "specstop": {"draft": "d", "policy": "fixed:2", "temperature": 1, "rows": 8}})
    assert settings == EngineSettings(draft="d", policy="fixed:2", temperature=1.0, rows=8)


# Coefficients for vLLM's adaptive verification

MODULE = "vllm.v1.worker.gpu.spec_decode.acceptance_estimator"


def test_the_plugin_sets_the_coefficients_of_the_file_in_its_environment_variable(tmp_path, monkeypatch):
    class Estimator:
        """The constructor of vLLM's class in 0.32 and 0.33."""

        def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: Any) -> None:
            self.slope, self.intercepts = torch.full((1,), 0.5), torch.full((num_speculative_steps,), -0.2)

    path, module = tmp_path / "acceptance.json", ModuleType(MODULE)
    module.OnlineAcceptanceEstimator = Estimator
    for parts in range(1, 7):
        name = ".".join(MODULE.split(".")[:parts])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.delenv(SWITCH, raising=False)
    register()
    assert Estimator(1, 2, None).slope.tolist() == [0.5]
    monkeypatch.setenv(SWITCH, str(path))
    for slope in (0.1, 0.7):  # the last one applies
        path.write_text(json.dumps({"slope": slope, "intercepts": [0.3, -0.4], "rows": 9}))
        register()
    instance = Estimator(8, 4, device=torch.device("cpu"))
    assert instance.slope.tolist() == pytest.approx([0.7])
    assert instance.intercepts.tolist() == pytest.approx([0.3, -0.4, -0.4, -0.4])
    monkeypatch.setitem(sys.modules, MODULE, None)  # another version of vLLM
    with pytest.warns(SpecstopWarning, match="adaptive verification"):
        register()


@pytest.mark.parametrize(
    "text", ["", '{"slope": 1}', '{"slope": 1, "intercepts": []}', '{"slope": NaN, "intercepts": [1]}']
)
def test_an_invalid_file_of_coefficients_is_refused(text, tmp_path):
    (tmp_path / "acceptance.json").write_text(text)
    with pytest.raises(InputError, match=SWITCH):
        read_coefficients(tmp_path / "acceptance.json")


# SGLang

CANDIDATES = {1: [1, 2, 4], 8: [0, 1, 2]}


def rule(acceptance: float = 0.8, row: float = 0.1) -> dict[str, Any]:
    """Return a rule with a cost of k steps of 1 + row x k x batch."""
    return rule_entry([acceptance] * 4, {size: [1 + row * k * size for k in range(5)] for size in (1, 8)}, 1.0)


@pytest.mark.parametrize("acceptance", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("row", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("size", [1, 4, 64])
def test_the_steps_are_those_with_the_most_tokens_per_second(acceptance, row, size):
    """Beyond the last size of the table its seconds apply."""

    def rate(steps: int) -> float:
        return sum(acceptance**k for k in range(steps + 1)) / (1 + row * steps * min(size, 8))

    policy = CostedSteps(CANDIDATES, rule(acceptance, row))
    assert policy.get_steps_for_batch(size) == max(CANDIDATES[8 if size >= 8 else 1], key=rate)
    assert policy.candidate_steps == [0, 1, 2, 4] and policy.cuda_graph_bs_for_step(4) is None
    policy.set_cuda_graph_bs([8, 1, 4])
    assert policy.cuda_graph_bs_for_step(4) == [1, 4] and policy.cuda_graph_bs_for_step(0) == [8]
    assert policy.get_steps_for_batch(5) in CANDIDATES[8], "padded to a recorded size"


def test_the_steps_follow_the_observed_acceptance():
    policy = CostedSteps(CANDIDATES, rule(0.9, 0.1))
    assert policy.get_steps_for_batch(1) == 4
    assert 1 in [policy.on_verify_complete([0], 1) for _ in range(20)] and policy.get_steps_for_batch(1) == 1
    assert policy._tried[0] == pytest.approx(sum(MEMORY**n for n in range(20))) and policy._passed[0] == 0.0
    assert any(step is not None and step > 1 for step in (policy.on_verify_complete([1], 1) for _ in range(200)))


@pytest.mark.parametrize("wrong", [{"acceptance": [0.5]}, {"seconds": {"1": [1.0, 1.1]}}, {"seconds": {}}])
def test_a_rule_without_all_steps_is_refused(wrong):
    with pytest.raises(ValueError, match="steps"):
        CostedSteps(CANDIDATES, rule() | wrong)


def test_without_our_entry_the_rule_of_sglang_applies(tmp_path):
    factory = costed_steps_factory(lambda steps, path: ("theirs", steps, path))
    plain, ours = tmp_path / "plain.json", tmp_path / "ours.json"
    entries = {str(size): {"candidate_steps": steps} for size, steps in CANDIDATES.items()}
    plain.write_text(json.dumps(entries))
    ours.write_text(json.dumps({**entries, "specstop": rule()}))
    assert factory(3) == ("theirs", 3, None)
    assert factory(initial_steps=3, cfg_path=str(plain)) == ("theirs", 3, str(plain))
    assert isinstance(factory(3, str(ours)), CostedSteps)
