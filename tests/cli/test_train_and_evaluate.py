"""`specstop evaluate` and `profile`; `train`, `deploy` and `train-drafter`."""

from __future__ import annotations

import dataclasses
import json

import pytest
import yaml
from commands import COMPACT, cli, files, model_options, parsed, refused, write_prompts
from conftest import make_prompts
from contract_policies import DEPTH
from specstop.collect.store import load_trace
from specstop.policies.files import MANIFEST
from specstop.policies.fixed import Confidence
from specstop.policies.measurements import DECISIONS
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder, save_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.rounds import scale_costs
from timed import timed_profile

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def place(tmp_path_factory, sides, full_profile, learned, few_draws):
    folder = tmp_path_factory.mktemp("reports")
    (folder / "fit").symlink_to(sides[0].folder)
    (folder / "held").symlink_to(sides[1].folder)
    full_profile.save(folder / "profile.json")
    scale_costs(full_profile, draft=2.0).save(folder / "slow.json")
    save_policy(learned, folder / "policy")
    evaluate(sides[1], full_profile, [Confidence(0.6, DEPTH)], out=folder / "report")
    evaluate(sides[1], full_profile, [Confidence(0.3, DEPTH)], out=folder / "other", seed=1)
    return folder


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


HELD = ("evaluate", "--traces", "held", "--profile", "profile.json")
TRAIN = ("train", "--traces", "fit", "--profile", "profile.json", "--out")


def test_every_trace_is_evaluated_with_every_profile(tmp_path):
    run = [*HELD, "--traces", "fit", "--profile", "slow.json", "--policy", "policy", "--policy", "fixed:2"]
    assert "--allow-overlap" in refused(*run, "--out", tmp_path / "t", "--quiet") and not (tmp_path / "t").exists()
    answer = cli(*run, "--out", tmp_path / "t", "--json", "--allow-overlap")
    assert answer.code == 0 and "not held-out" in answer.err
    report = json.loads(answer.out)
    written = json.loads((tmp_path / "t" / "report.json").read_text())
    assert report == {name: value for name, value in written.items() if name not in ("run", "prompt_texts")}
    assert [*report["places"]] == [
        f"{trace}, {profile}" for trace in ("held", "fit") for profile in ("profile.json", "slow.json")
    ]
    reports = {f"report.{kind}" for kind in ("csv", "html", "json", "md")}
    assert {p.name for p in (tmp_path / "t").iterdir()} == {*reports, "run.yaml", MANIFEST}
    answer = cli(*run, "--quiet", "--allow-overlap")
    words = " ".join(answer.out.split())
    assert all(" ".join(text.split()) in words for text in ("vs best fixed", *report["summary"]))
    saved = yaml.safe_load((tmp_path / "t" / "run.yaml").read_text())
    assert (saved["command"], len(saved["traces"]), len(saved["policy"])) == ("evaluate", 2, 2)


def test_a_saved_configuration_gives_the_same_result(pair_folder, tmp_path):
    """The command line takes precedence over the file."""
    write_prompts(tmp_path / "p.jsonl", make_prompts(3, "p", 5))
    sampled = ("--temperature", 0.7, "--depth", 3, "--max-new-tokens", 9, "--prompts", tmp_path / "p.jsonl")
    for command, options in (
        ("collect", (*model_options(pair_folder, *COMPACT), *sampled)),
        ("train", TRAIN[1:-1]),
        ("evaluate", (*HELD[1:], "--policy", "policy")),
    ):
        again = ("--config", tmp_path / "first" / command / "run.yaml")
        for folder, used in (("first", options), ("second", again)):
            answer = cli(command, *used, "--out", tmp_path / folder / command, "--quiet")
            assert answer.code == 0, answer.err
    folders = tmp_path / "first", tmp_path / "second"
    tables = [load_trace(folder / "collect").table() for folder in folders]
    assert tables[0].equals(tables[1])
    first, second = (files(folder / "train") for folder in folders)
    del first["run.yaml"], second["run.yaml"]
    assert first == second
    reports = [json.loads((folder / "evaluate" / "report.json").read_text()) for folder in folders]
    assert all(report.pop("run")["command"].startswith("specstop evaluate --") for report in reports)
    assert reports[0] == reports[1]
    saved = tmp_path / "first" / "collect" / "run.yaml"
    assert cli("collect", "--config", saved, "--limit", 1, "--depth", 2, "--out", tmp_path / "third").code == 0
    header = load_trace(tmp_path / "third").header
    assert (header.depth, header.prompts, header.max_new_tokens, header.temperature) == (2, 1, 9, 0.7)


# Profiles


@pytest.fixture
def bare(full_profile):
    """A noisy profile without decision costs."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


@pytest.fixture
def profile_command(pair_folder, tmp_path):
    (tmp_path / "p.txt").write_text("w7 w6 w9\nw7 w7 w9\nw7 w8 w9\n")
    return ["profile", *model_options(pair_folder, *COMPACT), "--prompts", tmp_path / "p.txt", "--quiet"]


def test_decision_costs_are_added_to_a_profile(bare, sides, profile_command, tmp_path):
    file = tmp_path / "p.json"
    bare.save(file)
    command = [*profile_command, "--repeats", 2, "--profile", file]
    assert "fixed:2 decided nothing" in refused(*command, "--policy", "fixed:2")
    assert cli(*command, "--policy", "confidence:0.4", "--out", tmp_path / "other.json").code == 0
    assert Profile.load(file) == bare, "another file was named"
    assert cli(*command, "--policy", "confidence:0.4").code == 0
    priced = Profile.load(file)
    assert priced.decision("confidence") > 0 and priced.same_costs(bare.to_dict())
    assert priced.measurements.where(lambda key: key.what != DECISIONS) == bare.measurements
    assert not any("does not price" in text for text in evaluate(sides[1], priced).findings)


# Training


def test_the_folder_of_a_policy_and_the_warning_of_a_slow_one(tmp_path):
    options = ("--rule", "survival", "--threshold", 0.99, "--param", "C=0.5", "--quiet")
    answer = cli(*TRAIN, tmp_path / "p", *options)
    assert answer.code == 0 and "slower than the best fixed length" in answer.err
    assert "held_out_ratio_to_best_fixed" in answer.out and "accept_auc" not in answer.out
    assert load_policy_folder(tmp_path / "p").rule.kind == "survival"
    assert set(files(tmp_path / "p")) == {"policy.json", "weights.safetensors", "README.md", "run.yaml", MANIFEST}


# Other runtimes


def test_an_export_prints_its_figures_and_is_reproduced_from_its_run_file(tmp_path):
    export = ("deploy", "--to", "vllm", "--traces", "fit", "--profile", "profile.json", "--held-out", "held")
    assert parsed(*export, "--out", tmp_path / "v") == json.loads((tmp_path / "v" / "figures.json").read_text())
    assert cli("deploy", "--config", tmp_path / "v/run.yaml", "--out", tmp_path / "w", "--quiet").code == 0
    before, after = files(tmp_path / "v"), files(tmp_path / "w")
    del before["run.yaml"], after["run.yaml"]
    assert before == after


# Drafters


def test_a_drafter_is_trained_and_used_by_every_command(pair_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for side, count, seed in (("train", 16, 21), ("test", 6, 22)):
        write_prompts(tmp_path / f"{side}.jsonl", make_prompts(count, side, seed))

    def succeed(command: str, *options: object) -> str:
        answer = cli(command, *options, "--quiet")
        assert answer.code == 0, answer.err
        return answer.out

    target, few = ("--target", pair_folder / "target"), ("--max-new-tokens", 12)
    fit = ("--prompts", "train.jsonl", "--depth", 3, "--epochs", 2, "--out", "medusa", "--checkpoints", "work")
    out = succeed("train-drafter", "--kind", "medusa", *target, *few, *fit)
    assert f"Next: specstop decode PROMPT --target {pair_folder / 'target'} --drafter medusa:medusa" in out
    facts = parsed("info", "medusa")
    assert (facts["kind"], facts["network"], facts["depth"], len(facts["target"])) == ("drafter", "medusa", 3, 16)
    assert all(0.0 <= facts[f"acceptance, depth {depth}"] <= 1.0 for depth in (1, 2, 3)) and facts["hash"]
    spec = (*target, "--drafter", "medusa:medusa")
    texts = parsed("decode", "w7 w8 w9", *few, *spec)
    assert texts["texts"] == parsed("decode", "w7 w8 w9", *target, *few, "--drafter", "suffix")["texts"]
    assert texts["drafted"] > 0
    bench = ("--prompts", "test.jsonl", "--policy", "fixed:2", "--tree", "2,2", "--temperature", 0.7)
    lines = json.loads(cli("bench", *few, *spec, *bench, "--json").out)["lines"]
    assert [line["same_text"] for line in lines][:2] == [6, 6], "match"
    assert not any("assist" in line["name"] for line in lines)
    for side in ("train", "test"):
        succeed("collect", *few, *spec, "--prompts", f"{side}.jsonl", "--out", f"traces-{side}", "--depth", 3)
    measured = ("--prompts", "train.jsonl", "--depth", 3, "--repeats", 1, "--policy", "confidence:0.4")
    succeed("profile", *spec, *measured, "--out", "costs.json")
    succeed("train", "--traces", "traces-train", "--profile", "costs.json", "--out", "learned")
    succeed("evaluate", "--traces", "traces-test", "--policy", "learned", "--profile", "costs.json")
    assert parsed("decode", "w7 w8 w9", *few, *spec, "--policy", "learned")["texts"] == texts["texts"]
