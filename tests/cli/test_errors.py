"""What a user can mend: exit code 2 and one line on standard error, whatever the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import Answer, cli, files
from conftest import build_model, make_prompts
from safetensors.torch import load_file, save_file
from specstop.cli.main import with_keys
from specstop.collect.store import Trace, load_trace
from specstop.policies.files import digest
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy
from transformers import PreTrainedTokenizerFast


class Place:
    """Good inputs in one folder, to be spoiled one at a time."""

    def __init__(self, folder: Path, pair: Path, traces: tuple[Trace, Trace]) -> None:
        self.folder = folder
        self.pair = ["--target", pair / "target", "--draft", pair / "draft"]
        self.target, self.draft = pair / "target", pair / "draft"
        self.fit, self.held = (trace.folder for trace in traces)

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, text: str) -> Path:
        (self / name).write_text(text)
        return self / name

    def copy(self, path: Path, name: str) -> Path:
        shutil.rmtree(self / name, ignore_errors=True)
        return shutil.copytree(path, self / name)

    @property
    def collect(self) -> list[object]:
        return ["collect", *self.pair, "--prompts", self / "prompts.jsonl", "--depth", 2, "--max-new-tokens", 4,
                "--out", self / "new"]  # fmt: skip

    @property
    def train(self) -> list[object]:
        return ["train", "--traces", self.fit, "--profile", self / "profile.json", "--out", self / "new"]

    @property
    def evaluate(self) -> list[object]:
        return ["evaluate", "--traces", self.held, "--profile", self / "profile.json", "--out", self / "new"]

    @property
    def decode(self) -> list[object]:
        return ["decode", "w7 w8", *self.pair, "--max-new-tokens", 4]

    @property
    def profile(self) -> list[object]:
        return ["profile", *self.pair, "--prompts", self / "prompts.jsonl", "--depth", 2, "--repeats", 1,
                "--out", self / "new"]  # fmt: skip


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, pair_folder: Path, sides: tuple[Trace, Trace], full_profile: Profile,
    tokenizer: PreTrainedTokenizerFast, learned: LearnedPolicy,
) -> Place:  # fmt: skip
    here = Place(tmp_path_factory.mktemp("place"), pair_folder, sides)
    here.write("prompts.jsonl", "\n".join(json.dumps({"prompt": p.text}) for p in make_prompts(5, "e", 30)))
    full_profile.save(here / "profile.json")
    save_policy(learned, here / "policy")
    build_model().save_pretrained(here / "other")
    tokenizer.save_pretrained(here / "other")
    vocabulary = here / "other" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"w7"', '"v7"'))
    here.write("empty.jsonl", "\n \n")
    here.write("broken.jsonl", '{"prompt": "w7"}\n\n{"prompt": "w8"\n')
    here.write("typo.yaml", "dpeth: 3\n")
    here.write("list.yaml", "- 3\n")
    here.write("noyaml.yaml", "a: [1\n")
    here.write("other.yaml", "command: decode\ndepth: 3\n")
    here.write("profile.txt", "{}")
    (here / "full").mkdir()
    here.write("full/mine.txt", "mine")
    return here


def changed_weights(place: Place) -> Path:
    folder = place.copy(place / "policy", "changed")
    raw = bytearray((folder / "weights.safetensors").read_bytes())
    raw[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(raw)
    return folder


def other_schema(place: Place) -> Path:
    folder = place.copy(place.held, "schema")
    raw = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps({**raw, "schema": 6}))
    return folder


def other_target(place: Place, **config: object) -> Path:
    """Return a copy of the target with another config."""
    folder = place.copy(place.target, "other")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, **config}))
    return folder


def spoiled_target(place: Place, value: float | None) -> Path:
    """Return a copy of the target with a value among its weights, or without the tensor."""
    folder = place.copy(place.target, "other")
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop("model.norm.weight")
    if value is not None:
        tensors["model.norm.weight"] = tensor.index_fill(0, torch.tensor([3]), value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def pickled_target(place: Place) -> Path:
    """Return a copy of the target whose weights are a pickle that would print."""
    folder = place.copy(place.target, "other")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\nprint\n(S'ran'\ntR.")
    return folder


def odd_profile(place: Place, **entries: object) -> Path:
    """Return a copy of the profile with other entries."""
    raw = json.loads((place / "profile.json").read_text())
    return place.write("odd.json", json.dumps({**raw, **entries}))


Arguments = Callable[[Place], list[object]]

BAD: dict[str, tuple[Arguments, str]] = {
    "no target folder": (
        lambda p: ["collect", "--target", p / "nowhere", "--draft", p.draft, "--prompts", p / "prompts.jsonl",
                   "--out", p / "new"],
        "nowhere does not exist",
    ),
    "no draft folder": (
        lambda p: ["decode", "w7", "--target", p.target, "--draft", p / "nowhere"], "nowhere does not exist",
    ),
    "different vocabularies": (
        lambda p: ["decode", "w7", "--target", p.target, "--draft", p / "other"], "must share one tokenizer",
    ),
    "a target that lacks a tensor": (
        lambda p: ["decode", "w7", "--target", spoiled_target(p, None), "--draft", p.draft], "lack model.norm.weight",
    ),
    "a target with NaN in it": (
        lambda p: [*p.collect, "--target", spoiled_target(p, float("nan"))], "model.norm.weight has values that are NaN",
    ),
    "a target that computes NaN": (
        lambda p: [*p.decode, "--target", other_target(p, rms_norm_eps=-1e9)],
        "the target's logits are not finite",
    ),
    "a target of a million layers": (
        lambda p: ["bench", "--target", other_target(p, num_hidden_layers=10**6), "--draft", p.draft, "--prompts",
                   p / "prompts.jsonl"],
        "num_hidden_layers: expected a whole number from 1 to 1024, not 1000000",
    ),
    "a target of negative width": (
        lambda p: [*p.profile, "--target", other_target(p, hidden_size=-16)], "hidden_size: expected a whole number from 1",
    ),
    "a target in a pickle": (
        lambda p: ["decode", "w7", "--target", pickled_target(p), "--draft", p.draft], "a pickle of more than tensors",
    ),
    "negative seconds": (lambda p: ["info", odd_profile(p, step_s=-1e-3)], "step_s"),
    "endless seconds": (
        lambda p: [*p.train, "--profile", odd_profile(p, round_s=float("inf"))], "a number is not finite",
    ),
    "half a surrogate": (
        lambda p: [*p.evaluate, "--profile", odd_profile(p, facts={"device": "\ud800"})], "lone surrogates",
    ),
    "only a target": (lambda p: ["decode", "w7", "--target", p.target], "both --target and --draft"),
    "only a draft": (
        lambda p: ["profile", "--draft", p.draft, "--out", p / "new"], "both --target and --draft",
    ),
    "no prompt file": (lambda p: [*p.collect, "--prompts", p / "none.jsonl"], "none.jsonl does not exist"),
    "an empty prompt file": (lambda p: [*p.collect, "--prompts", p / "empty.jsonl"], "empty.jsonl is empty"),
    "a broken prompt line": (lambda p: [*p.collect, "--prompts", p / "broken.jsonl"], "broken.jsonl, line 3: invalid JSON"),
    "no prompts for a pair": (lambda p: ["collect", *p.pair, "--out", p / "new"], "--prompts: expected a JSON Lines file"),
    "prompts twice": (lambda p: [*p.decode, "--prompts", p / "prompts.jsonl"], "not both"),
    "a prompt too long": (lambda p: [*p.collect, "--max-new-tokens", 126], "no room for a prompt"),
    "no limit": (lambda p: [*p.collect, "--limit", 0], "--limit: expected a whole number"),
    "depth 0": (lambda p: [*p.collect, "--depth", 0], "--depth: expected a whole number"),
    "a temperature below 0": (lambda p: [*p.decode, "--temperature", -1], "--temperature: expected 0 or more"),
    "an unknown data type": (lambda p: [*p.decode, "--dtype", "float31"], "float31"),
    "an unknown device": (lambda p: [*p.decode, "--device", "gpu"], "gpu"),
    "no repeats": (lambda p: [*p.profile, "--repeats", 0], "--repeats: expected"),
    "no budget": (lambda p: [*p.profile, "--budget", 0], "--budget: expected"),
    "an endless budget": (lambda p: [*p.profile, "--budget", "inf"], "--budget: expected"),
    "an unknown policy": (lambda p: [*p.decode, "--policy", "confidense:0.4"], "did you mean 'confidence'?"),
    "an unknown policy to evaluate": (lambda p: [*p.evaluate, "--policy", "fixd:4"], "did you mean 'fixed'?"),
    "no policy folder": (lambda p: [*p.decode, "--policy", p / "nowhere"], "nowhere does not exist"),
    "a policy without a number": (lambda p: [*p.decode, "--policy", "fixed:x"], "expected a number after the colon"),
    "a policy with changed weights": (lambda p: [*p.evaluate, "--policy", changed_weights(p)], "checksum differs"),
    "changed weights in info": (lambda p: ["info", changed_weights(p)], "checksum differs"),
    "one policy twice": (lambda p: [*p.evaluate, "--policy", "fixed:2", "--policy", "fixed:2"], "two policies are called"),
    "a trace of another schema": (
        lambda p: ["evaluate", "--traces", other_schema(p), "--profile", p / "profile.json", "--out", p / "new"],
        "the trace has schema 6, but this specstop reads schema 7",
    ),
    "another schema in info": (lambda p: ["info", other_schema(p)], "schema 6"),
    "no trace": (
        lambda p: ["train", "--traces", p / "policy", "--profile", p / "profile.json", "--out", p / "new"], "header.json",
    ),
    "shared prompts": (lambda p: [*p.evaluate, "--train-traces", p.held], "prompts are in --train-traces too"),
    "no profile to train": (lambda p: [*p.train, "--profile", p / "none.json"], "none.json, which does not exist"),
    "no profile to evaluate": (lambda p: [*p.evaluate, "--profile", p / "none.json"], "none.json, which does not exist"),
    "no profile at all": (lambda p: [*p.evaluate, "--profile", p / "profile.txt"], "expected a latency profile"),
    "an unknown head": (lambda p: [*p.train, "--head", "xgbost"], "did you mean 'xgboost'?"),
    "an unknown rule": (lambda p: [*p.train, "--rule", "never"], "--rule: expected derived"),
    "an unknown feature": (lambda p: [*p.train, "--feature", "drawn_porb"], "did you mean 'drawn_prob'?"),
    "a full folder to collect": (lambda p: [*p.collect, "--out", p / "full"], "choose another, or pass --overwrite"),
    "a full folder to train": (lambda p: [*p.train, "--out", p / "full"], "not empty"),
    "a full folder to evaluate": (lambda p: [*p.evaluate, "--out", p / "full"], "not empty"),
    "a full folder to resume": (lambda p: [*p.collect, "--out", p / "full", "--resume"], "it has no header.json"),
    "a profile in the way": (lambda p: [*p.profile, "--out", p / "profile.json"], "exists; choose another name"),
    "a file for a folder": (lambda p: [*p.train, "--out", p / "profile.json"], "--out"),
    "no configuration": (lambda p: [*p.collect, "--config", p / "none.yaml"], "none.yaml does not exist"),
    "an unknown key in a configuration": (
        lambda p: [*p.collect, "--config", p / "typo.yaml"], "unknown option 'dpeth' (did you mean 'depth'?)",
    ),
    "a configuration that is a list": (lambda p: [*p.collect, "--config", p / "list.yaml"], "expected a mapping"),
    "a configuration that is no YAML": (lambda p: [*p.collect, "--config", p / "noyaml.yaml"], "is not YAML"),
    "a configuration of another command": (lambda p: [*p.collect, "--config", p / "other.yaml"], "`specstop decode`"),
    "a parameter without a value": (lambda p: [*p.collect, "--extra", "shards"], "--extra: expected key=value"),
    "an unknown parameter": (lambda p: [*p.decode, "--sampling", "topp=1"], "did you mean 'top_p'?"),
    "info of nothing": (lambda p: ["info", p / "nowhere"], "is none of them"),
    "info of a prompt file": (lambda p: ["info", p / "prompts.jsonl"], "prompts.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line_and_exit_code_2(place: Place, name: str) -> None:
    arguments, message = BAD[name]
    before = files(place / "full"), files(place / "policy")
    answer = cli(*arguments(place))
    assert answer.code == 2
    assert answer.err.count("\n") == 1, answer.err
    assert answer.err.startswith("specstop: ")
    assert message in answer.err
    assert answer.out == ""
    assert not [p for p in (place / "new").rglob("*") if p.is_file()], "nothing is written"
    assert (files(place / "full"), files(place / "policy")) == before
    shutil.rmtree(place / "new", ignore_errors=True)


def good(answer: Answer) -> None:
    assert answer.code == 0, answer.err


def test_overwrite_and_resume_let_a_folder_be_used_again(place: Place, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments in (place.collect, place.train, place.evaluate):
        good(cli(*arguments, "--out", out, "--overwrite", "--quiet"))
        (out / "mine.txt").write_text("mine")
        before = files(out)
        answer = cli(*arguments, "--out", out, "--overwrite", "--quiet")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert f"{out / 'mine.txt'} is not among the files that specstop wrote there" in answer.err
        assert files(out) == before
        (out / "mine.txt").unlink()
    good(cli(*place.collect, "--out", out, "--overwrite", "--quiet"))
    first = load_trace(out).rows.to_list()
    good(cli(*place.collect, "--out", out, "--resume", "--quiet"))
    assert load_trace(out).rows.to_list() == first
    other = cli(*place.collect, "--out", out, "--resume", "--seed", 4)
    assert other.code == 2
    assert "--resume" in other.err
    assert "another seed" in other.err
    file = place.write("old.json", "old")
    answer = cli(*place.profile, "--out", file, "--overwrite", "--quiet")
    assert (answer.code, answer.err.count("\n"), file.read_text()) == (2, 1, "old")
    assert "old.json was not written by specstop" in answer.err
    file.unlink()
    for _ in range(2):
        good(cli(*place.profile, "--out", file, "--overwrite", "--quiet"))
    assert Profile.load(file).max_depth == 2


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["collect"], "--out"),
        (["train", "--out", "x"], "--traces"),
        (["decode", "--depht", "3"], "--depht"),
        (["decode", "--depth", "many"], "--depth"),
        (["polices"], "polices"),
    ],
    ids=["no out", "no traces", "unknown option", "no number", "unknown command"],
)
def test_what_the_parser_refuses_has_exit_code_2_too(arguments: list[str], word: str) -> None:
    answer = cli(*arguments)
    assert answer.code == 2
    assert word in answer.err
    assert "Traceback" not in answer.err


def test_a_warning_is_one_line_on_standard_error(place: Place, tmp_path: Path) -> None:
    folder = place.copy(place / "policy", "warm")
    raw = json.loads((folder / "policy.json").read_text())
    raw["temperature"] = 0.3
    (folder / "policy.json").write_text(json.dumps({**raw, "sha256": digest(raw)}))
    assert load_policy_folder(folder).metadata.temperature == 0.3
    answer = cli(*place.evaluate, "--out", tmp_path / "r", "--policy", folder, "--quiet")
    good(answer)
    assert answer.err.startswith("warning: logistic was trained for another temperature (0.3)")
    assert answer.err.count("\n") == 1


def test_an_interruption_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("specstop.policies.registry.Registry.listed", interrupt)
    answer = cli("policies")
    assert (answer.code, answer.err.strip()) == (130, "specstop: interrupted")


def test_the_version_is_printed() -> None:
    answer = cli("--version")
    assert answer.code == 0
    assert answer.out.startswith("specstop 0.")


def test_no_command_shows_the_help() -> None:
    answer = cli()
    assert "collect" in answer.out + answer.err
    assert "evaluate" in answer.out + answer.err


def test_messages_name_options_of_the_command_line() -> None:
    message = "--shards: expected 1 with --through vllm; give --no-model-defaults or --top-p 1, not --top-pads"
    assert with_keys(message) == (
        "--extra shards: expected 1 with --collector vllm; give --sampling model_defaults=false or --sampling top_p 1, "
        "not --top-pads"
    )
