"""`specstop evaluate`: places, earlier reports, exploration, batch sizes; `specstop profile` and the profile's noise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import COMPACT, cli, files, model_options, parsed, refused
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.engines import vllm_profile
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode import profile as decode_profile
from specstop.decode.models.pair import Pair
from specstop.decode.profile.measuring import BUDGET_S, Effort
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.errors import InputError
from specstop.policies.files import MANIFEST
from specstop.policies.fixed import Confidence
from specstop.policies.learned import LearnedPolicy
from specstop.policies.measurements import DECISIONS
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.replay.log import scaled
from timed import timed_profile

pytestmark = pytest.mark.usefixtures("few_draws")


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, sides: tuple[Trace, Trace], full_profile: Profile, pair: Pair,
    prompts: list[Prompt], learned: LearnedPolicy, few_draws: None,
) -> Path:  # fmt: skip
    folder = tmp_path_factory.mktemp("reports")
    (folder / "fit").symlink_to(sides[0].folder)
    (folder / "held").symlink_to(sides[1].folder)
    full_profile.save(folder / "profile.json")
    scaled(full_profile, draft=2.0).save(folder / "slow.json")
    for name in ("policy", "other-policy"):
        save_policy(learned, folder / name)
    evaluate(sides[1], full_profile, [Confidence(0.6, DEPTH)], out=folder / "report")
    evaluate(sides[1], full_profile, [Confidence(0.3, DEPTH)], out=folder / "other", seed=1)
    live = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    collect(pair, prompts, folder / "live", policy=Confidence(0.6, DEPTH), explore=0.3, **live)
    return folder


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


HELD = ("evaluate", "--traces", "held", "--profile", "profile.json")


def shown(*command: object) -> str:
    """Run a command that succeeds in silence; its tables have to fit 80 columns. Return its words."""
    answer = cli(*command, "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert all(len(line) <= 80 for line in answer.out.splitlines() if line[:1] in "┏┃┡│└")
    return " ".join(answer.out.split())


def test_every_trace_with_every_profile_is_a_place(tmp_path: Path) -> None:
    run = [*HELD, "--traces", "fit", "--profile", "slow.json", "--policy", "policy", "--policy", "fixed:2"]
    assert "--allow-overlap" in refused(*run, "--out", tmp_path / "t", "--quiet") and not (tmp_path / "t").exists()
    answer = cli(*run, "--out", tmp_path / "t", "--json", "--allow-overlap")
    assert answer.code == 0 and "not held-out" in answer.err
    raw = json.loads(answer.out)
    assert raw == json.loads((tmp_path / "t" / "places.json").read_text())
    assert [one["name"] for one in raw["places"]] == [
        f"{trace}, {profile}" for trace in ("held", "fit") for profile in ("profile.json", "slow.json")
    ]
    assert {p.name for p in (tmp_path / "t").iterdir()} == {"places.json", "places.md", "run.yaml", MANIFEST}
    answer = cli(*run, "--quiet", "--allow-overlap")
    words = " ".join(answer.out.split())
    assert all(" ".join(text.split()) in words for text in ("vs best fixed", *raw["summary"]))
    saved = yaml.safe_load((tmp_path / "t" / "run.yaml").read_text())
    assert (saved["command"], len(saved["traces"]), len(saved["policy"])) == ("evaluate", 2, 2)


def test_reports_are_compared(place: Path, tmp_path: Path) -> None:
    section = parsed("evaluate", "--compare", "report", "--compare", "other")
    assert {"plain decoding", "best fixed"} <= {row[0] for row in section["rows"]}
    answer = cli("evaluate", "--compare", "report", "--compare", place / "other" / "report.json")
    words = " ".join(answer.out.split())
    for word in ("confidence:0.6 (before)", "confidence:0.3 (now)", "common prompts", "Also different: nothing"):
        assert word in words
    text = shown(*HELD, "--policy", "confidence:0.6", "--compare", "report", "--out", tmp_path / "r")
    assert "Change from the earlier report" in text
    section = json.loads((tmp_path / "r" / "report.json").read_text())["details"]["comparison"]
    ratios = {name: (ratio["value"], ratio["low"]) for name, ratio, _ in section["rows"]}
    assert ratios["confidence:0.6"] == pytest.approx((1.0, 1.0))


def test_a_trace_with_exploration_has_estimates() -> None:
    run = ("evaluate", "--traces", "live", "--profile", "profile.json", "--policy", "fixed:4")
    assert [row[0] for row in parsed(*run)["details"]["importance"]["rows"]] == ["fixed:4"]
    text = shown(*run)
    for word in ("Estimate relative to the recorded policy", "confidence:0.6", "30%", "other anchors"):
        assert word in text


def test_wide_tables_have_all_columns() -> None:
    assert "P(A >= k)" not in shown(*HELD, "--policy", "fixed:2")
    wide = cli(*HELD, "--policy", "fixed:2", "--wide", "--quiet").out
    assert all(word in wide for word in ("oracle", "drafted", "P(A >= k)"))


def test_policies_are_named_by_what_they_are() -> None:
    """Two folders of one head, with equal names, and a rule."""
    specs = ["policy", "other-policy", "confidence:0.7"]
    options = [word for spec in specs for word in ("--policy", spec)]
    names = [line["name"] for line in parsed(*HELD, *options)["lines"]]
    assert {"confidence:0.7", "logistic (policy)", "logistic (other-policy)"} <= set(names)
    assert "'logistic (policy)'" in refused(*HELD, *options[:2] * 2, "--quiet")


def test_policies_are_compared_by_batch_size(full_profile: Profile, tmp_path: Path) -> None:
    verify = {n: ((n, 5e-3), (4 * n, 5e-3), (6 * n, 5e-3 + 1e-3 * n)) for n in (2, 4)}
    side = BatchTable(10.0, ((1, 1e-3), (4, 1.5e-3)), verify)
    dataclasses.replace(full_profile, batch=BatchCosts(side, side)).save(tmp_path / "batch.json")
    run = [*HELD[:3], "--profile", tmp_path / "batch.json", "--policy", "confidence:0.5"]
    text = shown(*run, "--out", tmp_path / "r", "--batch", "1,4")
    assert "Batch sizes" in text and "By batch size: " in text
    report = json.loads((tmp_path / "r" / "report.json").read_text())
    batch, texts = report["details"]["batch"], report["facts"]["prompts"]
    assert batch["sizes"] == [1, 4] and batch["requests"] == [texts, 2 * texts], "four batches of four or more"
    best, *policies, bound = batch["lines"]
    assert [line["name"] for line in policies] == ["Hugging Face default", "confidence:0.5"]
    alone = next(line for line in report["lines"] if line["name"] == "confidence:0.5")
    assert policies[1]["tokens_per_s"][0] == pytest.approx(alone["tokens_per_s"]), "one stream, as in the report"
    assert bound["to_best_fixed"][0]["value"] >= policies[1]["to_best_fixed"][0]["value"]
    for line in (best, *policies):
        for mean, tail in zip(line["latency_s"], line["latency_p95_s"], strict=True):
            assert 0 < mean["low"] < mean["value"] < tail["value"]
    late = parsed(*run, "--batch", "4", "--arrivals", "0.5")["details"]["batch"]["lines"][1]
    assert late["latency_s"][0]["value"] < policies[0]["latency_s"][1]["value"], "requests that arrive later wait less"
    (tmp_path / "few.json").write_text(json.dumps(list(range(9))))
    for options, noun in (
        (["--batch", "8"], "not 8"), (["--batch", "2", "--arrivals", "-1"], "a rate above 0"),
        (["--batch", "2,4", "--arrivals", tmp_path / "few.json"], f"expected {2 * texts} times"),
        (["--batch", "2", "--arrivals", tmp_path / "none.json"], "none.json"),
    ):  # fmt: skip
        assert noun in refused(*run, "--out", tmp_path / "refused", "--quiet", *options)
        assert not (tmp_path / "refused").exists()


# Profiles


@pytest.fixture
def bare(full_profile: Profile) -> Profile:
    """A noisy profile without any decision."""
    return timed_profile(dataclasses.replace(full_profile, decision_s={}), pace=0.1, jitter=0.1)


@pytest.fixture
def profile_command(pair_folder: Path, tmp_path: Path) -> list[object]:
    (tmp_path / "p.txt").write_text("w7 w6 w9\nw7 w7 w9\nw7 w8 w9\n")
    return ["profile", *model_options(pair_folder, *COMPACT), "--prompts", tmp_path / "p.txt", "--quiet"]


def test_prices_that_a_profile_lacks_are_timed_once(
    bare: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specstop.train.evaluate.report.run_facts", dict)  # the time differs
    bare.save(tmp_path / "lacks.json")
    run = (*HELD[:3], "--profile", tmp_path / "lacks.json", "--policy", "confidence:0.7")
    words = [shown(*run, "--out", tmp_path / f"r{at}").replace(f"r{at}", "r") for at in range(2)]
    assert words[0] == words[1] and "does not price the decisions of confidence" in words[0]
    reports = [files(tmp_path / f"r{at}") for at in range(2)]
    command = f"specstop profile --policy confidence:0.7 --profile {tmp_path / 'lacks.json'} --target TARGET"
    assert command in reports[0]["report.md"].decode() and command in reports[0]["report.html"].decode()
    assert {name for name in reports[0] if reports[0][name] != reports[1][name]} == {"run.yaml"}


def test_decisions_are_added_to_a_profile_and_then_known(
    bare: Profile, sides: tuple[Trace, Trace], profile_command: list[object], tmp_path: Path
) -> None:
    bare.save(tmp_path / "p.json")
    command = [*profile_command, "--repeats", 2]
    existing = ["--profile", tmp_path / "p.json"]
    assert "fixed:2 decided nothing" in refused(*command, "--policy", "fixed:2", *existing)
    assert Profile.load(tmp_path / "p.json") == bare
    added = [*command, "--policy", "confidence:0.4", *existing]
    assert cli(*added, "--out", tmp_path / "other.json").code == 0
    assert Profile.load(tmp_path / "p.json") == bare, "another file was named"
    assert cli(*added).code == 0
    priced = Profile.load(tmp_path / "p.json")
    assert priced.decision("confidence") > 0 and priced.same_costs(bare.to_dict())
    assert {key.of for key in priced.measurements.where(lambda key: key.what == DECISIONS).series} == {"confidence"}
    assert priced.measurements.where(lambda key: key.what != DECISIONS) == bare.measurements
    assert not any("does not price" in text for text in evaluate(sides[1], priced).findings)


def test_decisions_are_timed_in_the_rounds_of_the_profile(
    bare: Profile, profile_command: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = BatchTable(10.0, ((1, 1e-3), (2, 1.5e-3)), {2: ((2, 5e-3), (12, 6e-3))})
    wide = dataclasses.replace(bare, batch=BatchCosts(side, side), facts={"device": "cpu", "drafter": "lookup"})
    command = [*profile_command, "--profile", tmp_path / "p.json", "--policy", "confidence:0.4"]
    wide.with_decisions({"confidence": 1e-5}).save(tmp_path / "p.json")
    answer = cli(*command, "--policy", "load?table=1:1,2:2")
    assert answer.code == 0 and "load:1:1,2:2 decided nothing" in answer.err, "the batch size decides its length"
    assert "the drafter lookup" in answer.err
    seen = []

    def stop(*args: Any, **options: Any) -> None:
        seen.append((args, options))
        raise InputError("enough")

    monkeypatch.setattr(decode_profile, "loop_decisions", stop)
    monkeypatch.setattr(vllm_profile, "measure_vllm_decisions", stop)
    for mode, policy, expected in (
        ("rejection", "confidence:0.4", "rejection"), ("", "confidence:0.4", "auto"),
        ("rejection", "tetris:2", "auto"),  # it reads drawn tokens and leaves some out
    ):  # fmt: skip
        dataclasses.replace(wide, temperature=0.7, verification=mode).save(tmp_path / "p.json")
        assert "enough" in cli(*command[:-1], policy).err
        assert seen[-1][0][3].verification == expected and seen[-1][0][4] == Profile.load(tmp_path / "p.json")
    dataclasses.replace(bare, facts={"engine": "vllm 0.32.0"}).save(tmp_path / "p.json")
    assert "enough" in cli(*command).err
    assert Path(seen[-1][0][0]).name == "target" and seen[-1][1]["depth"] == bare.max_depth


@pytest.fixture
def requested(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments of `measure_profile`, which returns the profile under `result`."""
    arguments: dict[str, Any] = {"result": timed_profile(profile, jitter=0.01)}

    def measure_profile(*args: Any, **options: Any) -> Profile:
        arguments.update(options)
        return arguments["result"]  # type: ignore[no-any-return]

    monkeypatch.setattr("specstop.decode.profile.measure_profile", measure_profile)
    return arguments


def test_a_noisy_profile_is_written_with_a_warning(
    requested: dict[str, Any], profile_command: list[object], profile: Profile, tmp_path: Path
) -> None:
    command = [*profile_command, "--out", tmp_path / "p.json"]
    answer = cli(*command)
    assert (answer.code, answer.err) == (0, "") and requested["effort"] == Effort(BUDGET_S, repetitions=None)
    assert parsed("info", tmp_path / "p.json")["verdict"].startswith("this machine was quiet")
    requested["result"] = timed_profile(profile, jitter=0.5)
    answer = cli(*command, "--overwrite", "--budget", 30, "--repeats", 7)
    (line,) = answer.err.splitlines()
    assert answer.code == 0 and line.startswith("warning: this machine was busy")
    assert line.removeprefix("warning: ") == parsed("info", tmp_path / "p.json")["verdict"]
    assert requested["effort"] == Effort(30.0, repetitions=7)
    assert Profile.load(tmp_path / "p.json") == requested["result"]
    table = BatchTable(10.0, ((1, 1e-3), (4, 2e-3)), {4: ((4, 3e-3), (8, 5e-3))})
    requested["result"] = dataclasses.replace(profile, batch=BatchCosts(table, table))
    assert cli(*command, "--overwrite", "--batch", "4,1, 2").code == 0 and requested["batch"] == (1, 2, 4)
    facts = parsed("info", tmp_path / "p.json")
    assert facts["batch of 4, ms"] == "plain 3.00, draft step 2.00, verification of 8 tokens 5.00"
    assert "unknown noise" in facts["verdict"], "a profile without timings"


def test_a_profile_is_measured_with_the_sampling_parameters(profile_command: list[object], tmp_path: Path) -> None:
    filters = ["--sampling", "top_p=0.8", "--sampling", "repetition_penalty=1.2", "--temperature", 0.7]
    answer = cli(*profile_command, "--repeats", 1, "--depth", 2, *filters, "--out", tmp_path / "p.json")
    assert answer.code == 0, answer.err
    sampling = {"top_p": 0.8, "repetition_penalty": 1.2}
    assert Profile.load(tmp_path / "p.json").sampling == sampling
    assert cli(*profile_command, "--policy", "confidence:0.4", "--profile", tmp_path / "p.json").code == 0
    assert Profile.load(tmp_path / "p.json").sampling == sampling
    raw = json.loads((tmp_path / "p.json").read_text())
    (tmp_path / "odd.json").write_text(json.dumps(raw | {"sampling": {"colour": 1}}))
    assert "colour" in refused(*profile_command, "--policy", "confidence:0.4", "--profile", tmp_path / "odd.json")
