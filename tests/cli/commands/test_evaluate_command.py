"""`specstop evaluate` and what it says of a profile; `specstop profile --policy`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from commands import COMPACT, cli, files, model_options
from specstop.collect.engines import vllm_profile
from specstop.collect.store import Trace
from specstop.decode import profile as decode_profile
from specstop.decode.settings import Settings
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.errors import InputError
from specstop.policies.learned import LearnedPolicy
from specstop.policies.measurements import DECISIONS
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate import evaluate as report_of
from specstop.train.evaluate.evaluate import evaluate
from timed import timed_profile

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture
def bare(full_profile: Profile) -> Profile:
    """A noisy profile without any decision."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


def test_the_command_line_says_what_the_profile_lacks(
    bare: Profile, sides: tuple[Trace, Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specstop.train.evaluate.report.run_facts", dict)  # the time differs
    bare.save(tmp_path / "profile.json")
    said = []
    for at in range(2):
        arguments = ("--traces", sides[1].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / f"r{at}")
        answer = cli("evaluate", *arguments, "--policy", "confidence:0.7", "--quiet")
        assert answer.code == 0, answer.err
        said.append(" ".join(answer.out.split()))
    assert said[0].replace("r0", "r1") == said[1]
    assert "does not price the decisions of confidence (timed once on this machine and kept:" in said[0]
    reports = [files(tmp_path / f"r{at}") for at in range(2)]
    # These traces do not say where their models lie.
    pair = "--target TARGET --draft DRAFT --dtype float64 --prompts PROMPTS"
    command = f"specstop profile --policy confidence:0.7 --profile {tmp_path / 'profile.json'} {pair}"
    assert f"`{command}`" in reports[0]["report.md"].decode()
    assert f"<code>{command}</code>" in reports[0]["report.html"].decode()
    assert {name for name in reports[0] if reports[0][name] != reports[1][name]} == {"run.yaml"}


def test_decisions_are_added_to_a_profile_and_then_known(
    bare: Profile, sides: tuple[Trace, Trace], pair_folder: Path, tmp_path: Path
) -> None:
    bare.save(tmp_path / "profile.json")
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"id": "{at}", "prompt": "w7 w{at} w9"}}\n' for at in range(6, 9))
    )
    models = model_options(pair_folder, *COMPACT)
    few = ["--prompts", tmp_path / "prompts.jsonl", "--repeats", 2, "--quiet"]
    command = ["profile", "--policy", "confidence:0.4", *models, *few]
    refused = cli(*command)
    assert refused.code == 2 and "--out: expected a JSON file for the profile" in refused.err
    refused = cli("profile", "--policy", "fixed:2", *command[3:], "--profile", tmp_path / "profile.json")
    assert refused.code == 2 and "fixed:2 decided nothing" in refused.err
    refused = cli("profile", "--policy", "confidense:0.4", *command[3:], "--profile", tmp_path / "profile.json")
    assert refused.code == 2 and "--policy: unknown policy" in refused.err
    assert Profile.load(tmp_path / "profile.json") == bare
    answer = cli(*command, "--profile", tmp_path / "profile.json", "--out", tmp_path / "other.json")
    assert answer.code == 0, answer.err
    assert Profile.load(tmp_path / "profile.json") == bare, "another file was named"
    assert cli(*command, "--profile", tmp_path / "profile.json").code == 0
    known = Profile.load(tmp_path / "profile.json")
    assert known.decision("confidence") > 0 and known.same_costs(bare.to_dict())
    assert {key.of for key in known.measurements.where(lambda key: key.what == DECISIONS).series} == {"confidence"}
    assert known.measurements.where(lambda key: key.what != DECISIONS) == bare.measurements
    report = evaluate(sides[1], known)
    assert not any("does not price" in text for text in report.findings)


def test_a_batch_s_price_survives_and_the_profile_s_own_verification_is_timed(
    bare: Profile, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(f'{{"id": "{at}", "prompt": "w7 w{at} w9"}}\n' for at in range(6, 9))
    )
    side = BatchTable(10.0, ((1, 1e-3), (2, 1.5e-3)), {2: ((2, 5e-3), (12, 6e-3))})
    wide = dataclasses.replace(bare, batch=BatchCosts(side, side), facts={"device": "cpu", "drafter": "lookup"})
    priced = wide.with_decisions({"confidence": 1e-5})
    command = ["profile", "--profile", tmp_path / "profile.json", "--prompts", tmp_path / "prompts.jsonl", "--quiet"]
    command += model_options(pair_folder, *COMPACT)
    priced.save(tmp_path / "profile.json")
    answer = cli(*command, "--policy", "load?table=1:1,2:2")
    assert answer.code == 2 and "load:1:1,2:2 decided nothing" in answer.err, "a size alone settles its length"
    assert "warning: the profile timed rounds of the drafter lookup, this pair plays those of model" in answer.err
    answer = cli(*command, "--policy", "confidence:0.4", "--policy", "load?table=1:1,2:2")
    assert answer.code == 0 and "warning: --policy: load:1:1,2:2 decided nothing" in answer.err, answer.err
    timed = Profile.load(tmp_path / "profile.json").measurements.where(lambda key: key.what == DECISIONS).series
    assert {key.of for key in timed} == {"confidence"}

    seen = []

    def told(pair: object, rules: object, tokens: object, settings: Settings, costs: Profile) -> None:
        seen.append((settings.verification, costs))
        raise InputError("enough")

    monkeypatch.setattr(decode_profile, "loop_decisions", told)
    for mode, policy, expected in (
        ("rejection", "confidence:0.4", "rejection"),
        ("", "confidence:0.4", "auto"),
        ("rejection", "tetris:2", "auto"),  # it reads drawn tokens and leaves some out
    ):
        dataclasses.replace(wide, temperature=0.7, verification=mode).save(tmp_path / "profile.json")
        assert cli(*command, "--policy", policy).code == 2
        assert seen[-1] == (expected, Profile.load(tmp_path / "profile.json"))


def test_decisions_of_an_engine_s_profile_are_timed_inside_it(
    bare: Profile, pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inside(target: str, draft: str, *args: object, depth: int, **more: object) -> None:
        raise InputError(f"inside {Path(target).name}, {Path(draft).name}, {depth}")

    monkeypatch.setattr(vllm_profile, "measure_vllm_decisions", inside)
    dataclasses.replace(bare, facts={"engine": "vllm 0.32.0"}).save(tmp_path / "profile.json")
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "prompt": "w7 w8 w9"}\n')
    models = model_options(pair_folder, "--prompts", str(tmp_path / "prompts.jsonl"))
    answer = cli("profile", "--policy", "confidence:0.4", "--profile", tmp_path / "profile.json", *models, "--quiet")
    assert answer.code == 2 and f"inside target, draft, {bare.max_depth}" in answer.err


def test_without_a_place_to_go_a_profile_is_refused(pair_folder: Path) -> None:
    answer = cli("profile", "--target", pair_folder / "target", "--draft", pair_folder / "draft")
    assert answer.code == 2 and "--out: expected a JSON file for the profile" in answer.err


def test_policies_are_named_by_what_they_are(
    sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, tmp_path: Path
) -> None:
    """Two folders of one head, whose own names are the same, and a rule."""
    for name in ("one", "two"):
        save_policy(learned, tmp_path / name)
    full_profile.save(tmp_path / "profile.json")
    typed = [str(tmp_path / "one"), str(tmp_path / "two"), "confidence:0.7"]
    options = [word for spec in typed for word in ("--policy", spec)]
    read = ["evaluate", "--traces", sides[1].folder, "--profile", tmp_path / "profile.json", "--out", tmp_path / "r"]
    answer = cli(*read, *options, "--json")
    assert answer.code == 0, answer.err
    names = [line["name"] for line in json.loads(answer.out)["lines"]]
    assert {"confidence:0.7", *(f"logistic ({folder})" for folder in typed[:2])} <= set(names)
    twice = cli(*read, *options[:2] * 2, "--overwrite")
    assert twice.code == 2 and f"two policies are called 'logistic ({typed[0]})'" in twice.err


def test_policies_are_compared_by_batch_size(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("work was begun")

    verify = {n: ((n, 5e-3), (4 * n, 5e-3), (6 * n, 5e-3 + 1e-3 * n)) for n in (2, 4)}
    side = BatchTable(10.0, ((1, 1e-3), (4, 1.5e-3)), verify)
    dataclasses.replace(full_profile, batch=BatchCosts(side, side)).save(tmp_path / "profile.json")
    read = [
        "evaluate",
        "--traces",
        sides[1].folder,
        "--profile",
        tmp_path / "profile.json",
        "--policy",
        "confidence:0.5",
    ]
    answer = cli(*read, "--out", tmp_path / "r", "--batch", "1,4")
    assert answer.code == 0, answer.err
    said = " ".join(answer.out.split())
    assert "Batch sizes" in said and "By batch size: " in said
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    found = report["details"]["batch"]
    texts = report["facts"]["prompts"]
    assert found["sizes"] == [1, 4] and found["requests"] == [texts, 2 * texts], "four batches of four or more"
    best, *policies, bound = found["lines"]
    assert [line["name"] for line in policies] == ["Hugging Face default", "confidence:0.5"]
    alone = next(line for line in report["lines"] if line["name"] == "confidence:0.5")
    assert policies[1]["tokens_per_s"][0] == pytest.approx(alone["tokens_per_s"]), "one stream is what the report is of"
    assert policies[1]["to_best_fixed"][0]["value"] == pytest.approx(alone["to_best_fixed"]["value"])
    assert bound["to_best_fixed"][0]["value"] >= policies[1]["to_best_fixed"][0]["value"]
    for line in (best, *policies):
        for mean, tail in zip(line["latency_s"], line["latency_p95_s"], strict=True):
            assert 0 < mean["low"] < mean["value"] < tail["value"]
    for name in ("report.md", "report.html"):
        page = (tmp_path / "r" / name).read_text()
        assert "Batch sizes" in page and found["words"] in page
    late = cli(*read, "--out", tmp_path / "late", "--batch", "4", "--arrivals", "0.5", "--json")
    assert late.code == 0, late.err
    spaced = json.loads(late.out)["details"]["batch"]["lines"][1]
    assert spaced["latency_s"][0]["value"] < policies[0]["latency_s"][1]["value"], "who comes later waits less"
    (tmp_path / "few.json").write_text(json.dumps(list(range(9))))
    monkeypatch.setattr(report_of, "with_prices", refused)  # all of this is known before any work
    for options, message in (
        (["--batch", "8"], "got 8"),
        (["--batch", "2,4", "--arrivals", tmp_path / "few.json"], f"expected {2 * texts} times"),
        (["--arrivals", "3"], "give --batch too"),
        (["--batch", "2", "--arrivals", "-1"], "expected a rate above 0"),
        (["--batch", "2", "--arrivals", tmp_path / "none.json"], "none.json"),
    ):
        answer = cli(*read, "--out", tmp_path / "refused", *options)
        assert answer.code == 2 and message in answer.err, answer.err
        assert not (tmp_path / "refused").exists()
