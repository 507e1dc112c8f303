"""vLLM's side of the proposer, with a configuration and a model runner such as vLLM 0.32 has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from specstop.decode.engines.settings import EngineSettings, check_engine_policy, missing_in_engines, read_settings
from specstop.decode.engines.vllm import Proposer, request_names
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, PairError, PolicyError
from specstop.policies.learned import LearnedPolicy, TrainingMetadata
from specstop.policies.registry import load_policy


def vllm_config(pair_folder: Path, vocabulary: int = 48, **settings: Any) -> SimpleNamespace:
    model = SimpleNamespace(
        model=str(pair_folder / "target"),
        dtype=torch.float64,
        max_model_len=128,
        hf_text_config=SimpleNamespace(eos_token_id=2),
        get_vocab_size=lambda: vocabulary,
        try_get_generation_config=lambda: {"eos_token_id": 16},
    )
    return SimpleNamespace(
        additional_config={"specstop": {"draft": str(pair_folder / "draft"), **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=5),
        model_config=model,
        device_config=SimpleNamespace(device=torch.device("cpu")),
        scheduler_config=SimpleNamespace(max_num_seqs=3),
    )


def test_requests_that_commit_nothing_get_no_draft_and_the_others_their_own(
    pair_folder: Path, plain_pair: Pair
) -> None:
    proposer = Proposer(vllm_config(pair_folder, policy="fixed:3"))
    proposer.load_model(None)
    tokens = np.zeros((3, 64), dtype=np.int32)
    tokens[:, :4] = [[20, 21, 22, 23], [30, 31, 32, 33], [20, 21, 25, 26]]
    made = proposer.propose([[23], [], [26]], np.array([4, 4, 4]), tokens, slot_mappings=None)
    assert made[1] == []
    with torch.inference_mode():
        for place in (0, 2):
            text = tokens[place, :4].tolist()
            for token in made[place]:
                assert int(plain_pair.draft_model(input_ids=torch.tensor([text])).logits[0, -1].argmax()) == token
                text.append(token)
            assert len(made[place]) == 3 or made[place][-1] == 16


class ModelRunner:
    """As much of vLLM's as its proposer is called from."""

    def __init__(self, names: Any) -> None:
        self.input_batch = SimpleNamespace(token_ids_cpu=np.zeros((2, 8), dtype=np.int32), req_ids=names)

    def ask(self, count: int) -> Any:
        return request_names(self.input_batch.token_ids_cpu, count)


@pytest.mark.parametrize(
    ("names", "count", "expected"),
    [
        (["a", "b"], 2, ["a", "b"]),
        (["a", "b", "c"], 2, ["a", "b"]),
        (["a"], 2, None),
        (["a", 3], 2, None),
        (None, 1, None),
        (("a", "b"), 2, None),
    ],
)
def test_names_come_from_the_caller_that_handed_over_the_texts(names: Any, count: int, expected: Any) -> None:
    assert ModelRunner(names).ask(count) == expected


def test_there_are_no_names_where_no_caller_is_a_model_runner() -> None:
    assert request_names(np.zeros((1, 4), dtype=np.int32), 1) is None


def learned(features: tuple[str, ...], temperature: float, hidden: tuple[str, ...] = ()) -> LearnedPolicy:
    policy = LearnedPolicy.__new__(LearnedPolicy)
    policy.name, policy.features, policy.hidden, policy.metadata = (
        "mine",
        features,
        hidden,
        TrainingMetadata(temperature=temperature),
    )
    return policy


@pytest.mark.parametrize(
    ("features", "temperature", "hidden", "missing"),
    [
        (("top1", "entropy", "mean_full", "depth", "drawn_token"), 0.7, (), []),
        (("top1", "anchor_entropy"), 0.0, (), ["anchor_entropy"]),
        (("anchor_prob", "anchor_token", "before_token", "temperature"), 0.7, (), ["anchor_prob"]),
        (("noisy_margin", "top1", "noisy_lead"), 0.7, (), ["noisy_margin", "noisy_lead"]),
        (("noisy_margin", "top1"), 0.0, (), []),  # without noise it is a margin of the draft's own logits
        (("top1",), 0.0, ("draft_hidden", "target_hidden"), ["draft_hidden", "target_hidden"]),
    ],
)
def test_what_an_engine_does_not_hand_over_is_named(
    features: tuple[str, ...], temperature: float, hidden: tuple[str, ...], missing: list[str]
) -> None:
    policy = learned(features, temperature, hidden)
    assert missing_in_engines(policy) == missing
    if missing:
        with pytest.raises(PolicyError, match=f"mine: reads {', '.join(missing)}, which vllm .*--for vllm"):
            check_engine_policy(policy)
    else:
        assert check_engine_policy(policy) is policy


def test_a_rule_that_reads_noise_is_refused_whatever_the_temperature() -> None:
    policy = load_policy("fixed:2")
    policy.features = ("noisy_score",)
    assert missing_in_engines(policy) == ["noisy_score"]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "expected an object such as"),
        ({}, "expected an object such as .*not None"),
        ({"specstop": []}, "expected an object such as"),
        ({"specstop": {}}, "draft: expected the folder"),
        ({"specstop": {"drafter": "suffix+model"}}, "draft: expected the folder"),
        ({"specstop": {"draft": "d", "polcy": "x"}}, "polcy: .*did you mean 'policy'"),
        ({"specstop": {"draft": 3}}, "draft: .*not 3"),
        ({"specstop": {"draft": "d", "temperature": "warm"}}, "temperature: .*not 'warm'"),
        ({"specstop": {"draft": "d", "temperature": -1.0}}, "temperature: expected"),
        ({"specstop": {"draft": "d", "rows": True}}, "rows: .*not True"),
        ({"specstop": {"draft": "d", "rows": 0}}, "rows: .*not 0"),
        ({"specstop": {"draft": "d", "fallback": -1}}, "fallback: .*not -1"),
    ],
)
def test_settings_that_are_wrong_are_named(raw: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_settings(raw)


def test_settings_are_read() -> None:
    found = read_settings({"other": 1, "specstop": {"draft": "d", "policy": "fixed:2", "temperature": 1, "rows": 8}})
    assert found == EngineSettings(draft="d", policy="fixed:2", temperature=1.0, rows=8)


def test_a_draft_of_another_vocabulary_is_refused(pair_folder: Path) -> None:
    proposer = Proposer(vllm_config(pair_folder, vocabulary=4000))
    with pytest.raises(PairError, match="scores 48 tokens, but the target 4000"):
        proposer.load_model(None)
