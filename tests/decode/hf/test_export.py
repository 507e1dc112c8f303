"""An exported folder in `generate(custom_generate=folder)`: the text is plain decoding's, the rounds are the policy's."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import specstop.train.export.deploy as deploy_module
import torch
from learned_policies import learned
from small_drafters import small_network
from specstop.decode.drafters import TrainedDrafter, save_drafter
from specstop.decode.drafters.folder import load_drafter
from specstop.decode.hf import exported
from specstop.decode.hf.exported import generate_exported
from specstop.decode.hf.generate import specstop_generate
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, PolicyError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.policies.rules import Threshold
from specstop.policies.storage import save_policy
from specstop.train.export.deploy import deploy
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
    deploy("hf", tmp_path / "out", policy_folder)
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


def test_a_rule_without_a_head_is_exported_by_name(pair: Pair, prompt_ids: list[list[int]], tmp_path: Path) -> None:
    deploy("hf", tmp_path / "out", "confidence:0.3")
    ids = torch.tensor([prompt_ids[3]])
    assert torch.equal(
        generate(pair, ids, tmp_path / "out", draft_model=pair.draft), pair.target.generate(ids, **OPTIONS)
    )
    assert not (tmp_path / "out" / "policy").exists()
    assert "policy/" not in (tmp_path / "out" / "README.md").read_text()


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
    monkeypatch.setattr(exported, "StopStringCriteria", LastWord)
    deploy("hf", tmp_path / "out", "fixed:3")
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


@pytest.fixture
def hydra(pair: Pair, tmp_path: Path) -> Path:
    """The folder of heads for the tiny target."""
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network("hydra", output.shape[1], pair.vocabulary, output)
    return save_drafter(TrainedDrafter("hydra", network, pair.fingerprint["target"]), tmp_path / "heads")


def remembering(drafter: str, folder: Path, **pair: str) -> Path:
    """Return the folder of a policy that was trained on traces of a drafter."""
    policy = learned("mlp", RULE)
    policy.metadata = replace(policy.metadata, provenance={"drafter": drafter}, pair=pair)
    return save_policy(policy, folder)


@pytest.mark.parametrize("before", ["", "suffix?confidence=0.6+"])
def test_a_head_drafter_goes_with_the_policy_that_was_trained_on_its_drafts(
    before: str, pair: Pair, prompt_ids: list[list[int]], hydra: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    spec = f"{before}hydra:{hydra}"
    policy = remembering(spec, tmp_path / "policy", draft=load_drafter(hydra).identity)
    figures = deploy("hf", tmp_path / "out", policy)
    assert figures["drafter"] == f"{before}hydra:drafter"
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"`{before}hydra:drafter`" in card and "draft_model=draft" not in card and str(tmp_path) not in card
    assert load_drafter(tmp_path / "out" / "drafter").identity == load_drafter(hydra).identity
    used: list[list[int]] = []
    inner = Speculator.run

    def spied(self: Speculator, *args: Any, **kwargs: Any) -> Any:
        (made,) = inner(self, *args, **kwargs)
        used.append([r.drafted for r in made.rounds])
        return [made]

    monkeypatch.setattr(Speculator, "run", spied)
    ids = torch.tensor([prompt_ids[3]])
    direct = pair.target.generate(ids, custom_generate=specstop_generate, drafter=spec, policy=str(policy), **OPTIONS)
    shutil.rmtree(hydra)  # the export stands alone
    assert torch.equal(generate(pair, ids, tmp_path / "out"), direct)
    for name in ("draft_model", "assistant_model"):
        with pytest.raises(InputError, match=re.escape(f"the drafter {before}hydra:drafter takes no draft model")):
            generate(pair, ids, tmp_path / "out", **{name: pair.draft})
    assert torch.equal(direct, pair.target.generate(ids, **OPTIONS))
    assert used[0] == used[1] and sum(used[0]) > 0


def test_a_drafter_without_a_folder_is_named_and_another_can_be(
    pair: Pair, prompt_ids: list[list[int]], hydra: Path, tmp_path: Path
) -> None:
    policy = remembering("suffix", tmp_path / "policy", draft="suffix")
    ids = torch.tensor([prompt_ids[3]])
    plain = pair.target.generate(ids, **OPTIONS)
    assert deploy("hf", tmp_path / "out", policy)["drafter"] == "suffix"
    assert torch.equal(generate(pair, ids, tmp_path / "out"), plain)
    assert torch.equal(generate(pair, ids, tmp_path / "out", drafter="model", draft_model=pair.draft), plain)
    deploy("hf", tmp_path / "two", policy, drafter="lookup+model")
    assert "`lookup+model` and a draft model" in (tmp_path / "two" / "README.md").read_text()
    with pytest.raises(InputError, match="expected draft_model= or assistant_model=") as caught:
        generate(pair, ids, tmp_path / "two")
    assert "does not reach" not in str(caught.value)
    with pytest.raises(InputError, match="both draft_model= and assistant_model="):
        generate(pair, ids, tmp_path / "two", draft_model=pair.draft, assistant_model=pair.target)
    generate(pair, ids, tmp_path / "two", draft_model=pair.draft, assistant_model=pair.draft)
    with pytest.warns(SpecstopWarning, match=r"was trained with another drafter \(suffix\) than"):
        deploy("hf", tmp_path / "three", policy, drafter=f"hydra:{hydra}")


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("hydra:nowhere", "drafter: nowhere: expected the folder of a drafter"),
        ("suffix:words.txt", "drafter: suffix:words.txt reads the file words.txt"),
        ("suffix?path=words.txt", "reads the file words.txt"),
        ("suffix+hydrra:heads", "drafter: expected one of model, lookup"),
        ("hydra", "drafter: expected one of model, lookup"),
        ("hydra:heads?deep=1", "drafter: expected one of model, lookup"),
    ],
)
def test_a_drafter_that_cannot_be_exported_is_refused(drafter: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        deploy("hf", tmp_path / "out", "fixed:3", drafter=drafter)
    assert not (tmp_path / "out").exists()


def test_a_repository_of_the_hub_is_downloaded(
    pair: Pair, prompt_ids: list[list[int]], policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a model that was loaded from the repository: no `generate` names it, and the model's config does."""
    deploy("hf", tmp_path / "out", policy_folder)
    calls: list[tuple[Any, ...]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options["revision"], options["token"]))
        return str(tmp_path / "out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(pair.target.config, "_name_or_path", "owner/name", raising=False)
    ids = torch.tensor([prompt_ids[3]])
    options = {"inputs": ids, "draft_model": pair.draft, "revision": "v1", "token": "t", **OPTIONS}
    assert torch.equal(generate_exported(pair.target, options), pair.target.generate(ids, **OPTIONS))
    assert calls == [("owner/name", "v1", "t")]

    def fail(name: str, **options: Any) -> str:
        raise OSError("the hub\ncannot be reached")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(InputError, match="owner/name cannot be downloaded: the hub cannot be reached"):
        generate_exported(pair.target, options)


@pytest.mark.parametrize("content", ["[]", "{}", '{"kind": "policy"}'])
def test_a_folder_that_is_not_an_export_is_refused(content: str, pair: Pair, tmp_path: Path) -> None:
    deploy("hf", tmp_path / "out", "fixed:3")
    (tmp_path / "out" / "figures.json").write_text(content)
    with pytest.raises(InputError, match="expected an export"):
        generate(pair, torch.tensor([[5, 6]]), tmp_path / "out", draft_model=pair.draft)


@pytest.mark.parametrize("name", ["policy/policy.json", "drafter/drafter.json", "figures.json"])
def test_a_damaged_export_is_refused(name: str, pair: Pair, policy_folder: Path, hydra: Path, tmp_path: Path) -> None:
    deploy("hf", tmp_path / "out", policy_folder, drafter=f"hydra:{hydra}")
    (tmp_path / "out" / name).write_text('{"schema": 1')
    with pytest.raises((InputError, PolicyError)):
        generate(pair, torch.tensor([[5, 6]]), tmp_path / "out")


def test_an_export_that_is_replaced_is_loaded_again(pair: Pair, policy_folder: Path, tmp_path: Path) -> None:
    ids, spec = torch.tensor([[5, 6, 7]]), tmp_path / "out" / "figures.json"
    deploy("hf", tmp_path / "out", policy_folder)
    generate(pair, ids, tmp_path / "out", draft_model=pair.draft)
    deploy("hf", tmp_path / "out", "fixed:2", overwrite=True)
    assert json.loads(spec.read_text())["spec"] == "fixed:2"
    plain = pair.target.generate(ids, **OPTIONS)
    assert torch.equal(generate(pair, ids, tmp_path / "out", draft_model=pair.draft), plain)


def test_without_trust_nothing_runs_and_without_a_draft_it_is_said(pair: Pair, tmp_path: Path) -> None:
    deploy("hf", tmp_path / "out", "fixed:3")
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(ValueError, match="trust_remote_code"):
        pair.target.generate(ids, custom_generate=str(tmp_path / "out"), trust_remote_code=False, **OPTIONS)
    with pytest.raises(InputError, match="draft_model="):
        generate(pair, ids, tmp_path / "out")


def test_the_folder_is_whole_and_names_what_it_needs(policy_folder: Path, tmp_path: Path) -> None:
    figures = deploy("hf", tmp_path / "out", policy_folder)
    names = sorted(str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("[!.]*") if p.is_file())
    assert names == [
        "README.md", "custom_generate/generate.py", "custom_generate/requirements.txt", "figures.json",
        "policy/README.md", "policy/policy.json", "policy/weights.safetensors",
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "figures.json").read_text()) == figures
    assert (tmp_path / "out" / "custom_generate" / "requirements.txt").read_text().startswith("specstop>=")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "trust_remote_code=True" in card and "hf upload" in card and "## What is lost" in card
    with pytest.raises(InputError, match="not empty"):
        deploy("hf", tmp_path / "out", policy_folder)
    deploy("hf", tmp_path / "out", "fixed:2", overwrite=True)
    assert not (tmp_path / "out" / "policy").exists()


def test_a_plugin_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy_module, "as_policy", lambda _: FixedLength(2))
    with pytest.raises(PolicyError, match="is a plugin"):
        deploy("hf", tmp_path / "out", "somebody?key=1")
    assert not (tmp_path / "out").exists()
