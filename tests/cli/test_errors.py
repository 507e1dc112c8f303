"""Errors of users: every command exits with code 2, writes one line on standard error and changes no file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import cli, files, model_options, refused, write_prompts
from conftest import build_model, make_prompts
from safetensors.torch import load_file, save_file
from specstop.collect.store import Trace
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate
from transformers import PreTrainedTokenizerFast


def edit(path: Path, **entries: object) -> None:
    """Change entries of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def spoil_weights(folder: Path, value: float | None) -> None:
    """Write a value into the weights of a model, or leave a tensor out."""
    tensors = load_file(folder / "model.safetensors")
    tensor = tensors.pop("model.norm.weight")
    if value is not None:
        tensors["model.norm.weight"] = tensor.index_fill(0, torch.tensor([3]), value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def pickle_weights(folder: Path) -> None:
    """Replace the weights of a model by a pickle that would print."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cbuiltins\nprint\n(S'ran'\ntR.")


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, pair_folder: Path, sides: tuple[Trace, Trace], full_profile: Profile,
    tokenizer: PreTrainedTokenizerFast, learned: LearnedPolicy,
) -> Path:  # fmt: skip
    """A folder of valid inputs, and of copies with one fault each."""
    here = tmp_path_factory.mktemp("place")
    write_prompts(here / "prompts.jsonl", make_prompts(5, "e", 30))
    for name, trace in zip(("fit", "held"), sides, strict=True):
        shutil.copytree(trace.folder, here / name)
    for name in ("target", "draft"):
        shutil.copytree(pair_folder / name, here / name)
    full_profile.save(here / "profile.json")
    save_policy(learned, here / "policy")
    evaluate(sides[1], full_profile, [], out=here / "report")
    build_model().save_pretrained(here / "words")
    tokenizer.save_pretrained(here / "words")
    vocabulary = here / "words" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"w7"', '"v7"'))
    for name, text in {
        "broken.jsonl": '{"prompt": "w7"}\n\n{"prompt": "w8"\n',
        "typo.yaml": "dpeth: 3\n", "twice.yaml": "max-new-tokens: 4\nmax_new_tokens: 8\n",
        "list.yaml": "- 3\n", "noyaml.yaml": "a: [1\n", "other.yaml": "command: decode\n",
        "profile.txt": "{}", "full/mine.txt": "mine\n", "few.json": "[1, 2]", "damaged/report.json": '{"kind": "report"}',
    }.items():  # fmt: skip
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    faults: dict[str, tuple[str, Callable[[Path], None]]] = {
        "no-tensor": ("target", lambda folder: spoil_weights(folder, None)),
        "nan": ("target", lambda folder: spoil_weights(folder, float("nan"))),
        "computes-nan": ("target", lambda folder: edit(folder / "config.json", rms_norm_eps=-1e9)),
        "pickle": ("target", pickle_weights),
        "changed": ("policy", lambda folder: edit(folder / "policy.json", name="other")),
        "schema": ("held", lambda folder: edit(folder / "header.json", schema=6)),
        "shards": ("held", lambda folder: edit(folder / "header.json", shards=99_999)),
        "infinite.json": ("profile.json", lambda path: edit(path, round_s=float("inf"))),
    }
    for name, (original, fault) in faults.items():
        copy = shutil.copytree if (here / original).is_dir() else shutil.copy
        copy(here / original, here / name)
        fault(here / name)
    return here


PAIR = "--target {target} --draft {draft}"
COMMANDS = {
    "collect": f"{PAIR} --prompts {{prompts.jsonl}} --depth 2 --max-new-tokens 4 --out {{new}}",
    "profile": f"{PAIR} --prompts {{prompts.jsonl}} --depth 2 --repeats 1 --out {{new}}",
    "train": "--traces {fit} --profile {profile.json} --out {new}",
    "evaluate": "--traces {held} --profile {profile.json} --out {new}",
    "decode": f"w7 {PAIR} --max-new-tokens 4",
    "bench": f"{PAIR} --prompts {{prompts.jsonl}}",
    "train-drafter": "--target {target} --prompts {prompts.jsonl} --out {new} --max-new-tokens 12",
    "deploy": "--out {new}",
    "demo": "--quick --out {new}",
}
"""Options with which a command succeeds; a case appends options, which take precedence."""

CASES: tuple[tuple[str, str, str], ...] = (
    # models
    ("collect", "--target {nowhere}", "nowhere does not exist"), ("decode", "--draft {words}", "tokenizer"),
    ("decode", "--target {no-tensor}", "model.norm.weight"), ("collect", "--target {nan}", "NaN"),
    ("decode", "--target {computes-nan}", "not finite"), ("decode", "--target {pickle}", "pickle"),
    ("decode", "--dtype float31", "float31"), ("decode", "--drafter modle", "did you mean 'model'"),
    ("= decode w7 --target {target}", "", "both --target and --draft"),
    ("= decode w7 --target {target} --drafter medusa:none", "", "none: expected the folder of a drafter"),
    # prompts
    ("collect", "--prompts {none.jsonl}", "none.jsonl does not exist"), ("collect", "--column turn", '"turn"'),
    ("collect", "--prompts {broken.jsonl}", "line 3: invalid JSON"),
    ("collect", "--chat", "--chat: the tokenizer has no chat template"),
    ("= collect --target {target} --draft {draft} --out {new}", "", "--prompts: expected"),
    ("decode", "--prompts {prompts.jsonl}", "not both"), ("collect", "--max-new-tokens 126", "no room for a prompt"),
    # numbers
    ("collect", "--depth 0", "--depth: expected"), ("collect", f"--depth {'9' * 5000}", "'--depth'"),
    ("collect", "--temperature warm", "'--temperature'"), ("decode", "--batch 0", "--batch: expected"),
    ("profile", "--temperature 1e-45", "--temperature: expected 0 or more"),
    ("profile", "--budget inf", "--budget: expected"), ("profile", "--batch 4;2", "--batch: expected"),
    # rounds and sampling
    ("decode", "--policy confidense:0.4", "did you mean 'confidence'?"),
    ("decode", "--policy fixed:x", "expected a number after the colon"),
    ("decode", "--tree 4;2", "--tree: expected widths"), ("decode", "--sampling top_k=-1", "--sampling top_k: expected"),
    ("decode", "--verification block --tree 2,2 --temperature 1", "block: expected a chain"),
    ("decode", "--sampling top_k=1 --sampling top_k=2", "each key once"),
    ("decode", "--sampling topp=1", "did you mean 'top_p'?"),
    ("decode", "--sampling json_schema={few.json} --sampling grammar={few.json}", "not both"),
    ("decode", "--stop=", "--stop: expected"), ("collect", "--collector life", "--collector: expected one of dense"),
    ("collect", "--extra shards=100000", "--extra shards: expected"), ("collect", "--extra explore=0.2", "--collector live"),
    ("collect", "--extra hidden=both", "--extra hidden: expected"), ("collect", "--extra colour=1", "--extra: expected"),
    # training
    ("train", "--profile {infinite.json}", "not finite"), ("train", "--traces {policy}", "header.json"),
    ("train", "--head xgbost", "did you mean 'xgboost'?"), ("train", "--head mlp,logistic", "--tune"),
    ("train", "--tune 2 --threshold 0.4", "--threshold"), ("train", "--tune 2 --storage {new}/trials.log", "--storage"),
    ("train", "--nodes 4,x", "--nodes: expected numbers"), ("train", "--head mlp --param widht=8", "did you mean 'width'?"),
    ("train", "--head xgboost --param device=warp", "XGBoost"),
    ("train", "--head mlp --trainer accelerator=gpuu", "--trainer: "),
    ("train-drafter", "--kind eagle", "--kind: expected one of medusa, hydra, ctc, layer"),
    ("train-drafter", "--kind ctc --max-new-tokens 90 --depth 63", "--depth: expected at most 62"),
    # evaluation and export
    ("evaluate", "--policy {changed}", "checksum differs"), ("evaluate", "--seed -1", "--seed: expected"),
    ("evaluate", "--policy fixed:2 --policy fixed:2", "two policies are called"),
    ("evaluate", "--train-traces {held}", "--train-traces"), ("evaluate", "--primary fixed:9", "--primary"),
    ("evaluate", "--profile {profile.txt}", "--profile: expected a latency profile"),
    ("evaluate", "--arrivals 3", "--batch"), ("evaluate", "--batch 8", "--batch"),
    ("evaluate", "--traces {held} --policy fixed:1", "each trace and each profile once"),
    ("= evaluate --traces {schema} --profile {profile.json} --out {new}", "", "schema 6"),
    ("= evaluate --profile {profile.json}", "", "--traces: expected"),
    ("= evaluate --compare {damaged} --compare {report}", "", "damaged"),
    ("deploy", "--to vlm", "did you mean 'vllm'?"), ("deploy", "--to vllm", "--traces and --profile: expected"),
    ("deploy", "--to vllm --traces {fit} --profile {profile.json} --held-out {fit}", "--traces"),
    ("demo", "--pair {nowhere}", "nowhere"),
    # results
    ("collect", "--out {full}", "--overwrite"), ("evaluate", "--out {full}", "not empty"),
    ("collect", "--out {full} --resume", "header.json"), ("collect", "--out {prompts.jsonl}", "--out"),
    ("collect", "--out {target} --overwrite", "--out"), ("profile", "--out {profile.json}", "exists"),
    ("= profile --target {target} --draft {draft}", "", "--out: expected"),
    ("collect", "--config {none.yaml}", "none.yaml does not exist"),
    ("collect", "--config {typo.yaml}", "did you mean 'depth'?"), ("collect", "--config {twice.yaml}", "twice"),
    ("collect", "--config {list.yaml}", "expected a mapping"), ("collect", "--config {noyaml.yaml}", "not YAML"),
    ("collect", "--config {other.yaml}", "`specstop decode`"), ("= info {nowhere}", "", "none of them"),
    ("= info {prompts.jsonl}", "", "prompts.jsonl"), ("= info {shards}", "", "shards"),
    ("= import {nowhere} --out {new}", "", "nowhere"),
    # the parser
    ("= collect", "", "--out"), ("= decode --depht 3", "", "--depht"), ("= polices", "", "polices"),
)  # fmt: skip


@pytest.mark.parametrize(("command", "options", "noun"), CASES, ids=[f"{c} {o}"[:60] for c, o, _ in CASES])
def test_a_fault_is_one_line_and_nothing_is_written(
    place: Path, command: str, options: str, noun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words = command.removeprefix("= ") if command.startswith("= ") else f"{command} {COMMANDS[command]} {options}"
    arguments = [re.sub(r"\{([^}]*)\}", lambda match: str(place / match[1]), word) for word in words.split()]
    before = files(place)
    assert noun in refused(*arguments)
    assert files(place) == before


def test_overwrite_replaces_results_only(place: Path, tmp_path: Path) -> None:
    out, file, pair = tmp_path / "out", tmp_path / "old.json", model_options(place)
    measured = [*pair, "--prompts", place / "prompts.jsonl", "--depth", 2]
    profile = ["--profile", place / "profile.json"]
    for arguments in (
        ["collect", *measured, "--max-new-tokens", 4],
        ["train", "--traces", place / "fit", *profile],
        ["evaluate", "--traces", place / "held", *profile],
    ):
        command = [*arguments, "--out", out, "--quiet", "--overwrite"]
        answer = cli(*command)
        assert answer.code == 0, answer.err
        (out / "mine.txt").write_text("mine")
        before = files(out)
        assert "mine.txt" in refused(*command)
        assert files(out) == before
        (out / "mine.txt").unlink()
    file.write_text("old")
    command = ["profile", *measured, "--repeats", 1, "--out", file, "--overwrite", "--quiet"]
    assert "old.json" in refused(*command)
    file.unlink()
    for _ in range(2):
        assert cli(*command).code == 0
    assert Profile.load(file).max_depth == 2
