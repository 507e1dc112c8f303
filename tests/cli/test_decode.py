"""`specstop decode`: trees, modes, sampling, structured output, standard input; `bench`; policies that fail."""

from __future__ import annotations

import importlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from byte_pair import PERSON, byte_pair, is_person
from commands import cli, loading_once, model_options, parsed, refused
from specstop.collect.store import Trace, load_trace
from specstop.decode.models.pair import Pair
from specstop.decode.plain import plain_texts
from specstop.decode.verify.modes import MODES
from specstop.decode.verify.noise import stream_key
from specstop.policies.profile import Profile

PROMPTS = ["w7 w8 w9 w7", "w20 w33 w9"]
HOT = ("--temperature", 1.5, "--verification", "match")


@pytest.fixture(scope="module", autouse=True)
def loaded_once() -> Iterator[None]:
    with loading_once():
        yield


@pytest.fixture(scope="module")
def models(pair_folder: Path) -> list[str]:
    return model_options(pair_folder, "--dtype", "float64", "--max-new-tokens", "14")


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[float, list[str]]:
    """The target's texts by temperature."""
    assert pair.tokenizer is not None
    ids = [pair.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    keys = [stream_key(0, str(i)) for i in range(len(ids))]
    return {
        t: [pair.tokenizer.decode(text, skip_special_tokens=True) for text in plain_texts(pair, ids, keys, 14, t).tokens]
        for t in (0.0, 0.7)
    }  # fmt: skip


def decoded(models: list[str], *options: object, prompts: list[str] = PROMPTS) -> dict[str, Any]:
    return dict(parsed("decode", *prompts, *models, *options))


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [("4,2,2,1", 0.0), ("8", 0.7), ("fork:4x5", 0.0), ("parents:-1,-1,0,0,1,2,5", 0.7), ("chain:3", 0.0), ("chain:3", 0.7)],
)  # fmt: skip
def test_any_tree_gives_the_targets_text(
    models: list[str], expected: dict[float, list[str]], tree: str, temperature: float
) -> None:
    options = ["--verification", "match", "--policy", "confidence:0.2", "--temperature", temperature]
    result = decoded(models, "--tree", tree, *options)
    assert result["texts"] == expected[temperature]
    assert result["verification"] == "match (lossless)"
    assert (result["verified"] > result["target_calls"] * 3) == (tree != "chain:3")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_named_with_its_label(models: list[str], expected: dict[float, list[str]], mode: str) -> None:
    label = "lossless" if MODES[mode].lossless else "LOSSY"
    options = ["--verification", mode, *(["--tree", "3,2"] if mode != "block" else [])]
    result = decoded(models, *options, "--temperature", 0.7)
    assert result["verification"] == f"{mode} ({label})"
    assert decoded(models, *options, "--temperature", 0.7)["texts"] == result["texts"], "the seed decides"
    if label == "lossless":
        assert decoded(models, *options)["texts"] == expected[0.0]
    table = cli("decode", PROMPTS[0], *models, *options, "--temperature", 0.7)
    assert f"{mode} ({label})" in " ".join(table.out.split())


def test_the_mode_follows_the_tree_unless_one_is_named(models: list[str]) -> None:
    for options, mode in ((("--tree", "3,2"), "match"), ((), "block"), (("--temperature", 0), "match")):
        assert decoded(models, "--temperature", 0.7, *options)["verification"] == f"{mode} (lossless)"


@pytest.mark.parametrize(
    "item", ["top_k=2", "top_p=0.4", "min_p=0.6", "repetition_penalty=2.5", "no_repeat_ngram=1", "min_new_tokens=14"]
)
def test_a_sampling_option_changes_the_text_and_a_tree_does_not(models: list[str], item: str) -> None:
    prompts = [*PROMPTS, "w12", "w40 w41"]
    result = decoded(models, *HOT, "--sampling", item, prompts=prompts)
    tree = ("--tree", "3,2", "--policy", "confidence:0.3")
    assert decoded(models, *HOT, "--sampling", item, *tree, prompts=prompts)["texts"] == result["texts"]
    assert decoded(models, *HOT, prompts=prompts)["texts"] != result["texts"]
    if item == "min_new_tokens=14":
        assert result["tokens"] == 14 * len(prompts)


def test_the_defaults_of_the_target_are_named_applied_and_turned_off(pair_folder: Path, tmp_path: Path) -> None:
    target = shutil.copytree(pair_folder / "target", tmp_path / "target")
    raw = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(raw | {"repetition_penalty": 1.7, "top_k": 5}))
    models = ["--target", target, "--draft", pair_folder / "draft", "--dtype", "float64"]
    (tmp_path / "prompts.txt").write_text("w7 w8 w9\nw20 w8\n")
    texts, sampling = [], []
    for more in ([], ["--sampling", "model_defaults=false"], ["--sampling", "repetition_penalty=1.0"]):
        answer = cli("decode", "w7 w8 w9", "w20 w8", *models, "--max-new-tokens", 20, "--json", *more)
        assert ("repetition_penalty=1.7 (" in answer.err) == (not more), answer.err
        texts.append(json.loads(answer.out)["texts"])
        out = tmp_path / f"t{len(texts)}"
        collect = ["collect", *models, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 8, "--depth", 2]
        assert cli(*collect, "--out", out, *more).code == 0
        sampling.append(load_trace(out).header.sampling)
    assert texts[0] != texts[1] == texts[2]
    assert sampling == [{"repetition_penalty": 1.7, "top_k": 5}, {}, {"top_k": 5}]
    assert "sampling" in refused(*collect, "--out", tmp_path / "t2", "--resume", "--quiet")
    assert parsed("info", target)["sampling defaults"] == "repetition-penalty 1.7, top-k 5"


def test_structured_output(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    pair = byte_pair()
    for name, model in (("target", pair.target), ("draft", pair.draft_model)):
        model.save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)  # type: ignore[union-attr]
    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    (tmp_path / "list.ebnf").write_text('root ::= "[" [a-c]{2,4} "]"')
    (tmp_path / "prompts.txt").write_text("the name\na tag\n")
    models = model_options(tmp_path, "--dtype", "float64")
    schema, grammar = (f"json_schema={tmp_path / 'person.json'}", f"grammar={tmp_path / 'list.ebnf'}")
    for chosen in (models, [*models[:2], *models[4:], "--drafter", "lookup"]):
        command = ["decode", *chosen, "the name", "a tag", "--sampling", schema, "--json"]
        result = json.loads(cli(*command, "--temperature", 0.7, "--max-new-tokens", 90).out)
        assert all(map(is_person, result["texts"])) and result["incomplete"] == 0
    answer = cli(*command, "--max-new-tokens", 5)
    assert json.loads(answer.out)["incomplete"] == 2 and "--max-new-tokens" in answer.err
    command = [*models, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 20, "--quiet"]
    lines = parsed("bench", *command, "--sampling", grammar, "--policy", "fixed:3")["lines"]
    assert {line["same_text"] for line in lines} == {2}, "also through transformers' loops"
    assert cli("collect", *command, "--sampling", schema, "--out", tmp_path / "t", "--depth", 3).code == 0
    assert "json-schema" in parsed("info", tmp_path / "t")["filter"]
    for item, noun in (
        ("json_schema=.", "directory"), (f"json_schema={tmp_path / 'target/model.safetensors'}", "UTF-8"),
        (f"json_schema={tmp_path / 'prompts.txt'}", "JSON"), (f"grammar={tmp_path / 'prompts.txt'}", "grammar"),
    ):  # fmt: skip
        assert noun in refused("decode", *models, "a", "--sampling", item)
    for name in ("target", "draft"):
        for file in (tmp_path / name).glob("token*"):
            file.unlink()
    assert "tokenizer" in refused("decode", *models, "a", "--sampling", schema, "--device-map", "cpu")


@pytest.mark.parametrize("batch", [1, 2])
def test_several_texts_stand_apart_and_quiet_writes_them_alone(models: list[str], batch: int) -> None:
    command = ["decode", "w7 w8", "w9 w10", *models, "--policy", "fixed:2", "--max-new-tokens", "4", "--batch", batch]
    texts = json.loads(cli(*command, "--json").out)["texts"]
    quiet, plain = cli(*command, "--quiet"), cli(*command)
    alone = f"[1 of 2: 0]\nw7 w8{texts[0]}\n\n[2 of 2: 1]\nw9 w10{texts[1]}\n"
    assert (quiet.code, quiet.out.replace(" ", "")) == (0, alone.replace(" ", ""))
    assert plain.out.startswith(quiet.out) and "tokens/s" in plain.out


def test_limits_of_prompts_and_policies(models: list[str]) -> None:
    assert "prompts have more than" in refused("decode", " ".join(["w7"] * 200), *models)
    rows = decoded(models, "--policy", "fixed:24", "--max-new-tokens", 30)["acceptance"]
    assert max(row[0] for row in rows) == 24


@pytest.mark.parametrize(
    ("text", "is_terminal", "is_read"),
    [("w7 w8\nw9\n", False, True), ("w7", True, False), ("", False, False), (" \n", False, False)],
)
def test_standard_input(
    models: list[str], monkeypatch: pytest.MonkeyPatch, text: str, is_terminal: bool, is_read: bool
) -> None:
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stream)
    if is_read:
        assert parsed("decode", *models)["texts"] == decoded(models, prompts=["w7 w8\nw9"])["texts"]
    else:
        assert "standard input" in refused("decode", *models)


def test_bench_and_collect_share_the_profile_with_the_loop(
    models: list[str], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from specstop.decode import loop

    replace(profile, facts={"device": "cpu", "drafter": "suffix"}).save(tmp_path / "profile.json")
    (tmp_path / "p.txt").write_text("w7 w8\nw9\n")
    host, profiles = loop.PolicyHost, []
    monkeypatch.setattr(loop, "PolicyHost", lambda *a, **k: profiles.append(k["profile"]) or host(*a, **k))
    given = ["--policy", "bandit?arms=fixed:1,fixed:4", "--prompts", tmp_path / "p.txt", *models]
    live = [
        "--collector",
        "live",
        "--depth",
        4,
        "--extra",
        f"profile={tmp_path / 'profile.json'}",
        "--out",
        tmp_path / "t",
    ]
    costs = ["--profile", tmp_path / "profile.json", "--json"]
    for command in (["decode", *costs], ["bench", "--no-library", *costs], ["collect", *live]):
        profiles.clear()
        answer = cli(*command, *given)
        assert answer.code == 0, answer.err
        assert any(profiles) and all(one.low == profile.low for one in profiles if one)
        assert "the drafter suffix" in answer.err


# Policies that fail


MODULE = """
import numpy as np
from specstop.policies import StopPolicy

class Raiser(StopPolicy):
    name, features, max_depth = "raiser", ("top1",), 4

    def __init__(self, method="keep", after=0):
        self.method, self.left = method, after

    def act(self, method):
        if method == self.method:
            self.left -= 1
            if self.left < 0:
                raise ValueError("boom")  # here

    def start(self, streams, keys):
        self.act("start")

    def keep(self, step, state):  # keep
        self.act("keep")
        if self.method == "shape":
            return np.zeros((9, 9), dtype=bool), state
        if self.method == "print":
            print("noise")
        return step.alive, state

    def select(self, tree, state):
        self.act("select")

    def observe(self, outcome, state):
        self.act("observe")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of an installed plugin."""
    site = tmp_path / "site"
    info = site / "raiser-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: raiser\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[specstop.policies]\nraiser = raiser_plugin:Raiser\n")
    (site / "raiser_plugin.py").write_text(MODULE)
    monkeypatch.syspath_prepend(site)
    importlib.invalidate_caches()
    yield site / "raiser_plugin.py"
    sys.modules.pop("raiser_plugin", None)


def place_of(module: Path, method: str) -> tuple[str, int]:
    """Return the file and the line at which the policy fails."""
    mark = "# keep" if method == "shape" else "# here"
    return str(module), next(at for at, line in enumerate(MODULE.splitlines(), 1) if line.endswith(mark))


@pytest.mark.parametrize("method", ["start", "keep", "select", "observe", "shape"])
def test_a_policy_that_fails_is_named_with_its_place(
    models: list[str], tmp_path: Path, module: Path, method: str
) -> None:
    (tmp_path / "p.txt").write_text("w7 w8\nw9 w20 w8\n")
    policies = ["--policy", f"raiser?method={method}", "--policy", "fixed:2"]
    bench = ["bench", *models, *policies, "--prompts", tmp_path / "p.txt", "--no-library", "--quiet"]
    answer = cli(*bench, "--json")
    plain, failed, fixed = json.loads(answer.out)["lines"]
    file, line = place_of(module, method)
    assert answer.code == 2 and f"{file}:{line}" in answer.err
    assert (failed["failed"], failed["file"], failed["line"], failed["ratio"]) == (True, file, line, None)
    assert not plain["failed"] and not fixed["failed"] and fixed["ratio"] > 0
    answer = cli("decode", "w7 w8", *models, *policies[:2], "--json")
    result = json.loads(answer.out)
    assert (answer.code, result["failed"], result["line"]) == (0, True, line)
    assert result["texts"] == decoded(models, "--policy", "fixed:0", prompts=["w7 w8"])["texts"]
    if method == "keep":
        answer = cli(*bench)
        assert answer.code == 2 and "FAILED" in answer.out
        assert "FAILED" in cli("decode", "w7 w8", *models, *policies[:2]).out


@pytest.mark.usefixtures("few_draws")
@pytest.mark.parametrize("method", ["keep", "observe"])
def test_evaluate_leaves_out_a_policy_that_fails(
    traces: dict[float, Trace], profile: Profile, tmp_path: Path, module: Path, method: str
) -> None:
    profile.with_decisions({"raiser": 1e-5, "confidence": 1e-5}).save(tmp_path / "profile.json")
    command = ["evaluate", "--traces", traces[0.7].folder, "--profile", tmp_path / "profile.json",
               "--policy", f"raiser?method={method}", "--policy", "confidence:0.7", "--out"]  # fmt: skip
    answer = cli(*command, tmp_path / "report", "--json")
    report = json.loads(answer.out)
    file, line = place_of(module, method)
    assert answer.code == 2 and f"{file}:{line}" in answer.err
    assert (report["failed"][0]["file"], report["failed"][0]["line"]) == (file, line)
    names = [entry["name"] for entry in report["lines"]]
    assert "confidence:0.7" in names and not any("raiser" in name for name in names)
    assert "raiser" in (tmp_path / "report/report.md").read_text() and (tmp_path / "report/run.yaml").exists()
    assert "raiser" in refused(*command, tmp_path / "other", "--primary", f"raiser?method={method}", "--quiet")
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("module")
def test_no_trace_and_no_price_is_recorded_under_its_name(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w7 w8\nw9 w20 w8\n")
    common = [*models[:-2], "--prompts", tmp_path / "p.txt", "--depth", 4, "--quiet"]
    live = ["--collector", "live", "--policy", "raiser?after=5", "--max-new-tokens", 12, "--out", tmp_path / "live"]
    assert "raiser: " in refused("collect", *common, *live)
    assert "raiser: " in refused("profile", *common, "--policy", "raiser", "--repeats", 1, "--out", tmp_path / "x.json")
    assert not (tmp_path / "x.json").exists()


@pytest.mark.usefixtures("module")
def test_what_a_policy_prints_leaves_the_results_readable(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("w7 w8\n")
    for command in (["decode", "w7 w8"], ["bench", "--no-library", "--prompts", tmp_path / "p.txt"]):
        answer = cli(*command, *models, "--policy", "raiser?method=print", "--json")
        assert answer.code == 0 and "noise" in answer.err and json.loads(answer.out)
