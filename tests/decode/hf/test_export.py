"""An exported folder in `generate(custom_generate=folder)`: the text of plain decoding, with the rounds of the policy."""

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
from specstop.decode import Pair, Speculator, save_drafter, specstop_generate
from specstop.decode.drafters import TrainedDrafter
from specstop.decode.drafters.folder import load_drafter
from specstop.decode.hf import exported
from specstop.decode.hf.exported import generate_exported
from specstop.policies import FixedLength, InputError, PolicyError, save_policy
from specstop.policies.rules import Threshold
from specstop.train.export.deploy import deploy
from transformers import PreTrainedTokenizerFast, StoppingCriteria, TextStreamer

Prompts = list[list[int]]
Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.usefixtures("module_cache")
RULE = Threshold("step", 0.5)
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture
def policy_folder(tmp_path: Path) -> Path:
    return save_policy(learned("mlp", RULE), tmp_path / "policy")


@pytest.fixture
def ids(prompt_ids: Prompts) -> torch.Tensor:
    return torch.tensor([prompt_ids[3]])


@pytest.fixture
def rounds(monkeypatch: Patch) -> list[tuple[str, list[tuple[int, int]]]]:
    """The policy and (drafted, accepted) of the rounds of each text."""
    recorded: list[tuple[str, list[tuple[int, int]]]] = []
    run = Speculator.run

    def recording(self: Speculator, *args: Any, **kwargs: Any) -> Any:
        (text,) = run(self, *args, **kwargs)
        recorded.append((self.policy.name, [(r.drafted, r.accepted) for r in text.rounds]))
        return [text]

    monkeypatch.setattr(Speculator, "run", recording)
    return recorded


def generate(pair: Pair, ids: torch.Tensor, folder: Path, **options: Any) -> torch.Tensor:
    """Decode with the folder's code."""
    return pair.target.generate(ids, custom_generate=str(folder), trust_remote_code=True, **{**OPTIONS, **options})


def direct(pair: Pair, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Decode with the library's function."""
    return pair.target.generate(ids, custom_generate=specstop_generate, **OPTIONS, **options)


def test_the_text_is_that_of_plain_decoding_with_the_rounds_of_the_policy(
    pair: Pair, prompt_ids: Prompts, policy_folder: Path, tmp_path: Path, rounds: list[Any]
) -> None:
    out = tmp_path / "out"
    figures = deploy("hf", out, policy_folder)
    assert json.loads((out / "figures.json").read_text()) == figures
    for ids in map(torch.tensor, ([prompt] for prompt in prompt_ids[2:4])):
        plain = pair.target.generate(ids, **OPTIONS)
        for name in ("draft_model", "assistant_model"):
            assert torch.equal(generate(pair, ids, out, **{name: pair.draft}), plain)
        assert torch.equal(direct(pair, ids, draft_model=pair.draft, policy=str(policy_folder)), plain)
    assert rounds[:3] == rounds[:1] * 3 and rounds[3:] == rounds[3:4] * 3
    assert {name for name, _ in rounds} == {"mine"}
    assert len({drafted for _, text in rounds for drafted, _ in text}) > 1, "the policy stops at several depths"
    with pytest.raises(InputError, match="not empty"):
        deploy("hf", out, policy_folder)
    deploy("hf", out, "confidence:0.3", overwrite=True)
    assert not (out / "policy").exists()
    assert torch.equal(generate(pair, ids, out, draft_model=pair.draft), plain) and rounds[-1][0].startswith(
        "confidence"
    )
    with pytest.raises(ValueError, match="trust_remote_code"):
        pair.target.generate(ids, custom_generate=str(out), trust_remote_code=False, **OPTIONS)


class LastWord(StoppingCriteria):
    """Replaces the criterion of transformers, which cannot read a tokenizer of whole words."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, words: list[str]) -> None:
        self.tokens = torch.tensor(tokenizer.convert_tokens_to_ids(words))

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.isin(input_ids[:, -1], self.tokens)


def test_stop_strings_streamer_and_sampling_are_passed_on(
    pair: Pair, prompt_ids: Prompts, tokenizer: PreTrainedTokenizerFast, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch,
) -> None:  # fmt: skip
    monkeypatch.setattr(exported, "StopStringCriteria", LastWord)
    deploy("hf", tmp_path / "out", "fixed:3")
    ids = torch.tensor([prompt_ids[5]])
    start, plain = ids.shape[1], pair.target.generate(ids, **OPTIONS)[0].tolist()
    word = tokenizer.decode(plain[start + 4])
    text = generate(
        pair, ids, tmp_path / "out", draft_model=pair.draft, tokenizer=tokenizer, stop_strings=[word],
        streamer=TextStreamer(tokenizer, skip_prompt=True),
    )[0].tolist()  # fmt: skip
    end = next(i for i in range(start, len(plain)) if tokenizer.decode(plain[i]) == word)
    assert text == plain[: end + 1] and len(text) < len(plain)
    assert capsys.readouterr().out.split() == tokenizer.decode(text[start:]).split()
    sampling = {"draft_model": pair.draft, "do_sample": True, "temperature": 0.9}
    texts = [generate(pair, ids, tmp_path / "out", **sampling, seed=seed).tolist() for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.fixture
def hydra(pair: Pair, tmp_path: Path) -> Path:
    """The folder of heads for the tiny target."""
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network("hydra", output.shape[1], pair.vocabulary, output)
    return save_drafter(TrainedDrafter("hydra", network, pair.fingerprint["target"]), tmp_path / "heads")


def trained_with(drafter: str, folder: Path, **pair: str) -> Path:
    """Return the folder of a policy that was trained on traces of a drafter."""
    policy = learned("mlp", RULE)
    policy.metadata = replace(policy.metadata, provenance={"drafter": drafter}, pair=pair)
    return save_policy(policy, folder)


@pytest.mark.parametrize("prefix", ["", "suffix?confidence=0.6+"])
def test_a_head_drafter_is_exported_with_the_policy_trained_on_its_drafts(
    prefix: str, pair: Pair, ids: torch.Tensor, hydra: Path, tmp_path: Path, rounds: list[Any]
) -> None:
    spec, identity, out = f"{prefix}hydra:{hydra}", load_drafter(hydra).identity, tmp_path / "out"
    policy = trained_with(spec, tmp_path / "policy", draft=identity)
    assert deploy("hf", out, policy)["drafter"] == f"{prefix}hydra:drafter"
    assert str(tmp_path) not in (out / "README.md").read_text()
    assert load_drafter(out / "drafter").identity == identity
    text = direct(pair, ids, drafter=spec, policy=str(policy))
    shutil.rmtree(hydra)  # the export does not need it
    assert torch.equal(generate(pair, ids, out), text)
    assert torch.equal(text, pair.target.generate(ids, **OPTIONS))
    assert rounds[0] == rounds[1] and sum(drafted for drafted, _ in rounds[0][1]) > 0
    for name in ("draft_model", "assistant_model"):
        with pytest.raises(InputError, match="takes no draft model"):
            generate(pair, ids, out, **{name: pair.draft})


def test_a_drafter_without_a_folder_is_stored_by_name_and_can_be_replaced(
    pair: Pair, ids: torch.Tensor, tmp_path: Path
) -> None:
    policy = trained_with("suffix", tmp_path / "policy", draft="suffix")
    plain = pair.target.generate(ids, **OPTIONS)
    assert deploy("hf", tmp_path / "out", policy)["drafter"] == "suffix"
    assert torch.equal(generate(pair, ids, tmp_path / "out", drafter="model", draft_model=pair.draft), plain)
    deploy("hf", tmp_path / "two", policy, drafter="lookup+model")
    with pytest.raises(InputError, match="expected draft_model= or assistant_model="):
        generate(pair, ids, tmp_path / "two")
    with pytest.raises(InputError, match="both draft_model= and assistant_model="):
        generate(pair, ids, tmp_path / "two", draft_model=pair.draft, assistant_model=pair.target)
    generate(pair, ids, tmp_path / "two", draft_model=pair.draft, assistant_model=pair.draft)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("hydra:nowhere", "nowhere"), ("suffix?path=words.txt", "reads the file words.txt"),
        ("suffix+hydrra:heads", "expected one of model, lookup"), (None, "plugin"),
    ],
)  # fmt: skip
def test_drafters_with_files_and_policies_of_plugins_are_refused(
    drafter: str | None, message: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    if drafter is None:
        monkeypatch.setattr(deploy_module, "as_policy", lambda _: FixedLength(2))
    with pytest.raises((InputError, PolicyError), match=re.escape(message)):
        deploy("hf", tmp_path / "out", "fixed:3" if drafter else "plugin?key=1", drafter=drafter)
    assert not (tmp_path / "out").exists()


def test_a_repository_of_the_hub_is_downloaded(
    pair: Pair, ids: torch.Tensor, policy_folder: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The config of a model that was loaded from the repository names it."""
    deploy("hf", tmp_path / "out", policy_folder)
    calls: list[tuple[Any, ...]] = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options["revision"], options["token"]))
        if len(calls) > 1:
            raise OSError("the hub\ncannot be reached")
        return str(tmp_path / "out")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(pair.target.config, "_name_or_path", "owner/name", raising=False)
    options = {"inputs": ids, "draft_model": pair.draft, "revision": "v1", "token": "t", **OPTIONS}
    assert torch.equal(generate_exported(pair.target, options), pair.target.generate(ids, **OPTIONS))
    assert calls == [("owner/name", "v1", "t")]
    with pytest.raises(InputError, match=r"owner/name.*the hub cannot be reached"):
        generate_exported(pair.target, options)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("figures.json", '{"kind": "policy"}'), ("figures.json", "{"), ("policy/policy.json", '{"schema": 1'),
        ("drafter/drafter.json", '{"schema": 1'),
    ],
)  # fmt: skip
def test_a_damaged_export_is_refused(
    name: str, content: str, pair: Pair, policy_folder: Path, hydra: Path, tmp_path: Path
) -> None:
    deploy("hf", tmp_path / "out", policy_folder, drafter=f"hydra:{hydra}")
    (tmp_path / "out" / name).write_text(content)
    with pytest.raises((InputError, PolicyError)):
        generate(pair, torch.tensor([[5, 6]]), tmp_path / "out")
