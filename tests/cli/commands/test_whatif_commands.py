"""`transfer`, `compare` and `estimate` on the command line: answers, files, and mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Answer, cli
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts.read import Prompt
from specstop.collect.run import collect
from specstop.collect.store.folder import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.files import MANIFEST
from specstop.policies.fixed import Confidence
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.storage import save_policy
from specstop.train.evaluate.evaluate import evaluate
from timed import timed_profile


@pytest.fixture(scope="module")
def place(
    tmp_path_factory: pytest.TempPathFactory, sides: tuple[Trace, Trace], full_profile: Profile, pair: Pair,
    prompts: list[Prompt], learned: LearnedPolicy,
) -> Path:  # fmt: skip
    folder = tmp_path_factory.mktemp("whatif")
    full_profile.save(folder / "profile.json")
    save_policy(learned, folder / "policy")
    evaluate(sides[1], full_profile, [Confidence(0.6, DEPTH)], out=folder / "report")
    evaluate(sides[1], full_profile, [Confidence(0.3, DEPTH)], out=folder / "other", seed=1)
    (folder / "mangled").mkdir()
    (folder / "mangled" / "report.json").write_text('{"kind": "report", "schema": 2, "facts": {}}')
    live = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    collect(pair, prompts, folder / "live", policy=Confidence(0.6, DEPTH), explore=0.3, **live)
    collect(pair, prompts, folder / "silent", policy=Confidence(0.6, DEPTH), **live)
    return folder


def parsed(answer: Answer) -> Any:
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.count("\n") == 1
    return json.loads(answer.out)


def arguments(place: Path, sides: tuple[Trace, Trace], out: Path) -> list[object]:
    return ["transfer", "--traces", sides[1].folder, "--traces", sides[0].folder, "--profile", place / "profile.json",
            "--policy", place / "policy", "--policy", "fixed:2", "--out", out]  # fmt: skip


def test_transfer_answers_what_it_writes(place: Path, sides: tuple[Trace, Trace], tmp_path: Path) -> None:
    refused = cli(*arguments(place, sides, tmp_path / "t"), "--json")
    assert refused.code == 2 and "--allow-overlap" in refused.err and not (tmp_path / "t").exists()
    answer = cli(*arguments(place, sides, tmp_path / "t"), "--json", "--allow-overlap")
    assert answer.code == 0 and "not held-out" in answer.err
    raw = json.loads(answer.out)
    assert raw == json.loads((tmp_path / "t" / "transfer.json").read_text())
    assert (raw["rows"], raw["columns"]) == (["logistic", "fixed:2"], [t.folder.name for t in sides[::-1]])
    assert {p.name for p in (tmp_path / "t").iterdir()} == {"transfer.json", "transfer.md", "run.yaml", MANIFEST}
    shown = cli(*arguments(place, sides, tmp_path / "t"), "--overwrite", "--quiet", "--allow-overlap")
    assert shown.code == 0, shown.err
    for word in ("trained on", "T = 0.7", *raw["columns"], raw["cells"][0][0]["verdict"]):
        assert word in shown.out
    saved = yaml.safe_load((tmp_path / "t" / "run.yaml").read_text())
    assert (saved["command"], len(saved["traces"]), len(saved["policy"])) == ("transfer", 2, 2)
    again = cli("transfer", "--config", tmp_path / "t" / "run.yaml", "--out", tmp_path / "u", "--quiet")
    assert again.code == 0, again.err
    assert (tmp_path / "u" / "transfer.json").read_bytes() == (tmp_path / "t" / "transfer.json").read_bytes()


def test_compare_shows_both_reports(place: Path) -> None:
    raw = parsed(cli("compare", place / "report", place / "other" / "report.json", "--json"))
    assert (raw["kind"], raw["profiles"]) == ("comparison", "same")
    names = [line["name"] for line in raw["lines"]]
    assert {"plain decoding", "best fixed", "confidence:0.6", "confidence:0.3"} <= set(names)
    shown = cli("compare", place / "report", place / "other")
    assert (shown.code, shown.err) == (0, "")
    for word in ("confidence:0.6", "overlap", raw["method"], "Traces, temperature, pair and profile are the same."):
        assert word in shown.out
    assert "kept no repeated timings" in shown.out, "the profile of the fixture was not measured"


def test_compare_says_what_two_profiles_do_not_tell(
    place: Path, sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    for seed in (1, 2):
        measured = timed_profile(full_profile, pace=0.05, jitter=0.1, seed=seed)
        evaluate(sides[1], measured, [Confidence(0.6, DEPTH)], out=tmp_path / str(seed), sweep=False)
    raw = parsed(cli("compare", tmp_path / "1", tmp_path / "2", "--json"))
    assert raw["profiles"] == "different" and len(raw["caveats"]) == 1
    shown = " ".join(cli("compare", tmp_path / "1", tmp_path / "2").out.split())
    for word in (
        *raw["caveats"],
        "specstop bench",
        "B / A, vs best fixed: ratio to the best fixed length of each report",
    ):
        assert word in shown
    for word in ("plain decoding", "vs best fixed, A"):
        assert word in shown


def test_estimate_shows_every_estimator_and_its_caveats(place: Path) -> None:
    args = ["estimate", "--traces", place / "live", "--profile", place / "profile.json", "--policy", "fixed:4"]
    raw = parsed(cli(*args, "--json"))
    assert [line["name"] for line in raw["lines"]] == ["ipw", "snipw", "dm", "dr"]
    assert (raw["policy"], raw["logging"], raw["explore"]) == ("fixed:4", "confidence:0.6", 0.3)
    shown = cli(*args)
    assert (shown.code, shown.err) == (0, "")
    for word in ("inverse propensity", "self-normalised", "direct method", "doubly robust", *raw["caveats"]):
        assert " ".join(word.split()) in " ".join(shown.out.split())
    priced = parsed(cli(*args, "--rho", 100, "--json"))
    assert priced["rho"] == 100
    told = parsed(cli(*args, "--logging-policy", "confidence:0.6", "--json"))
    assert told["lines"] == raw["lines"]


BAD: dict[str, tuple[list[str], str]] = {
    "no report": (["compare", "{report}", "{nowhere}"], "nowhere, which does not exist"),
    "a mangled report": (["compare", "{mangled}", "{report}"], "mangled/report.json is mangled (entry 'lines')"),
    "no report at all": (["compare", "{profile.json}", "{report}"], "profile.json is none"),
    "nothing explored": (
        ["estimate", "--traces", "{silent}", "--profile", "{profile.json}", "--policy", "fixed:4"], "--explore 0",
    ),
    "dense traces": (["estimate", "--traces", "{held}", "--profile", "{profile.json}", "--policy", "fixed:4"], "live traces"),
    "another logging policy": (
        ["estimate", "--traces", "{live}", "--profile", "{profile.json}", "--policy", "fixed:4",
         "--logging-policy", "fixed:1"],
        "--logging-policy: fixed:1 stops elsewhere",
    ),
    "one trace twice": (
        ["transfer", "--traces", "{held}", "--traces", "{held}", "--profile", "{profile.json}", "--policy", "fixed:1",
         "--out", "{new}"],
        "is there twice",
    ),
    "no policy to transfer": (
        ["transfer", "--traces", "{held}", "--profile", "{profile.json}", "--out", "{new}"], "at least one --policy",
    ),
    "a full folder": (
        ["transfer", "--traces", "{held}", "--profile", "{profile.json}", "--policy", "fixed:1", "--out", "{report}"],
        "not empty",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_exit_code_2(place: Path, sides: tuple[Trace, Trace], name: str) -> None:
    words, message = BAD[name]
    made = [str(sides[1].folder) if w == "{held}" else str(place / w[1:-1]) if w.startswith("{") else w for w in words]
    answer = cli(*made)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("specstop: ")
    assert answer.err.count("\n") == 1
    assert message in answer.err
    assert not (place / "new").exists()
