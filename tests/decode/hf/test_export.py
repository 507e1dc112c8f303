"""An exported folder in `generate(custom_generate=folder)`: the text is plain decoding's, the rounds are the policy's."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learned_policies import learned
from specstop.decode.hf import export
from specstop.decode.hf.export import carried_policy, deploy_hf, generate_carried
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.learned.policy import LearnedPolicy
from specstop.policies.rules.chains import Threshold
from specstop.policies.storage.folder import load_policy_folder, save_policy
from transformers import PreTrainedTokenizerFast, StoppingCriteria, TextStreamer

pytestmark = pytest.mark.usefixtures("module_cache")
RULE = Threshold("step", 0.5)
OPTIONS = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture
def policy_folder(tmp_path: Path) -> Path:
    return save_policy(learned("mlp", RULE), tmp_path / "policy")


def generate(pair: Pair, ids: torch.Tensor, folder: Path, **options: Any) -> torch.Tensor:
    """Decode with the folder's code."""
    return pair.target.generate(ids, custom_generate=str(folder), trust_remote_code=True, **{**OPTIONS, **options})


def test_the_text_is_that_of_plain_decoding_and_the_rounds_are_the_policys(
    pair: Pair, prompt_ids: list[list[int]], policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy_hf(policy_folder, tmp_path / "out")
    rounds: list[Any] = []
    inner = Speculator.run

    def spied(self: Speculator, *args: Any, **kwargs: Any) -> Any:
        (made,) = inner(self, *args, **kwargs)
        rounds.append((self.policy.name, [(r.drafted, r.accepted) for r in made.rounds]))
        return [made]

    monkeypatch.setattr(Speculator, "run", spied)
    for ids in map(torch.tensor, ([p] for p in prompt_ids[:4])):
        plain = pair.target.generate(ids, **OPTIONS)
        ours = generate(pair, ids, tmp_path / "out", draft_model=pair.draft)
        stock_name = generate(pair, ids, tmp_path / "out", assistant_model=pair.draft)
        direct = pair.target.generate(
            ids, custom_generate=specstop_generate, draft_model=pair.draft, policy=str(policy_folder), **OPTIONS
        )
        assert torch.equal(ours, plain) and torch.equal(stock_name, plain) and torch.equal(direct, plain)
    assert len(rounds) == 12
    for ours, other, direct in zip(rounds[::3], rounds[1::3], rounds[2::3], strict=True):
        assert ours == other == direct
    assert {name for name, _ in rounds} == {"mine"}
    assert len({drafted for _, made in rounds for drafted, _ in made}) > 1, "the policy should stop at several depths"


def test_the_carried_policy_is_the_one_in_the_folder(policy_folder: Path, tmp_path: Path) -> None:
    deploy_hf(policy_folder, tmp_path / "out")
    space: dict[str, Any] = {}
    exec((tmp_path / "out" / "custom_generate" / "carried.py").read_text(), space)
    carried = carried_policy(tuple(space["FILES"].items()), space["SPEC"])
    beside = load_policy_folder(tmp_path / "out" / "policy")
    assert isinstance(carried, LearnedPolicy)
    x = np.random.default_rng(0).random((50, len(carried.features)), dtype=np.float32)
    for ours, theirs in zip(carried.probabilities(x, 1), beside.probabilities(x, 1), strict=True):
        assert np.array_equal(ours, theirs)
    assert carried.rule.to_dict() == RULE.to_dict()


def test_a_rule_without_a_head_is_carried_by_its_name(pair: Pair, prompt_ids: list[list[int]], tmp_path: Path) -> None:
    deploy_hf("confidence:0.3", tmp_path / "out")
    ids = torch.tensor([prompt_ids[3]])
    assert torch.equal(
        generate(pair, ids, tmp_path / "out", draft_model=pair.draft), pair.target.generate(ids, **OPTIONS)
    )
    assert not (tmp_path / "out" / "policy").exists()


class LastWord(StoppingCriteria):
    """In the place of transformers' own criterion, which cannot read a tokenizer of whole words."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, words: list[str]) -> None:
        self.tokenizer, self.words = tokenizer, words

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.tensor([self.tokenizer.decode(int(row[-1])) in self.words for row in input_ids])


def test_stop_strings_streamer_and_sampling_arrive(
    pair: Pair, prompt_ids: list[list[int]], tokenizer: PreTrainedTokenizerFast, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(export, "StopStringCriteria", LastWord)
    deploy_hf("fixed:3", tmp_path / "out")
    ids = torch.tensor([prompt_ids[5]])
    plain = pair.target.generate(ids, **OPTIONS)[0].tolist()
    word = tokenizer.decode(plain[ids.shape[1] + 4])
    stopped = generate(
        pair, ids, tmp_path / "out", draft_model=pair.draft, tokenizer=tokenizer, stop_strings=[word],
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )[0].tolist()  # fmt: skip
    at = next(i for i in range(ids.shape[1], len(plain)) if tokenizer.decode(plain[i]) == word)
    assert stopped == plain[: at + 1] and len(stopped) < len(plain)
    assert capsys.readouterr().out.split() == tokenizer.decode(stopped[ids.shape[1] :]).split()
    sampled = [
        generate(
            pair, ids, tmp_path / "out", draft_model=pair.draft, do_sample=True, temperature=0.9, seed=seed
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_without_trust_nothing_runs_and_without_a_draft_it_is_said(pair: Pair, tmp_path: Path) -> None:
    deploy_hf("fixed:3", tmp_path / "out")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="trust_remote_code"):
        pair.target.generate(ids, custom_generate=str(tmp_path / "out"), trust_remote_code=False, **OPTIONS)
    with pytest.raises(InputError, match="draft_model="):
        generate(pair, ids, tmp_path / "out")


def test_the_folder_is_whole_and_names_what_it_needs(policy_folder: Path, tmp_path: Path) -> None:
    figures = deploy_hf(policy_folder, tmp_path / "out")
    names = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("[!.]*") if p.is_file())
    assert names == [
        "README.md", "custom_generate/carried.py", "custom_generate/generate.py", "custom_generate/requirements.txt",
        "figures.json", "policy/README.md", "policy/policy.json", "policy/weights.safetensors",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "figures.json").read_text()) == figures
    assert (tmp_path / "out" / "custom_generate" / "requirements.txt").read_text().startswith("specstop>=")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code=True" in card and "hf upload" in card and "## What is lost" in card
    with pytest.raises(InputError, match="not empty"):
        deploy_hf(policy_folder, tmp_path / "out")
    deploy_hf("fixed:2", tmp_path / "out", overwrite=True)
    assert not (tmp_path / "out" / "policy").exists()


def test_a_damaged_policy_is_refused(pair: Pair, policy_folder: Path) -> None:
    files = {p.name: base64.b64encode(p.read_bytes()).decode() for p in policy_folder.iterdir() if p.suffix != ".md"}
    damaged = {**files, "policy.json": base64.b64encode(b'{"schema": 1}').decode()}
    outside = {**files, "../policy.json": files["policy.json"]}
    for wrong in (damaged, outside):
        with pytest.raises(PolicyError):
            generate_carried(pair.target, {"draft_model": pair.draft}, wrong, None)
    assert carried_policy(tuple(files.items()), None) is carried_policy(tuple(files.items()), None)


def test_a_plugin_is_not_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "load_policy", lambda _: export.load_policy_folder)
    with pytest.raises(PolicyError, match="is a plugin"):
        deploy_hf("somebody?key=1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
