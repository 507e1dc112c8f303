"""Commands with several drafters: --drafter, profiles, routing policies, and imported tables."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import cli, model_options, parsed, refused, write_prompts
from conftest import make_prompts
from specstop.collect.store import load_trace
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.measurements import VERIFY
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.policies.testing import PolicyTests
from specstop.train.fit.adapt import adapt_to_profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay

DRAFTERS = ("--drafter", "suffix", "--drafter", "model")
ROUTE = "agreement?lengths=3+2"


@pytest.fixture(scope="module")
def place(tmp_path_factory, pair_folder):
    """A folder with prompts, a trace and a profile of two drafters."""
    here = tmp_path_factory.mktemp("place")
    write_prompts(here / "prompts.jsonl", make_prompts(8, "r", 5))
    common = (*model_options(pair_folder), *DRAFTERS, "--prompts", here / "prompts.jsonl", "--depth", 3, "--quiet")
    answer = cli("collect", *common, "--out", here / "traces", "--max-new-tokens", 16)
    assert answer.code == 0 and "--drafter suffix --drafter model" in answer.out, answer.err
    answer = cli("profile", *common, "--out", here / "profile.json", "--repeats", 1, "--policy", ROUTE)
    assert answer.code == 0 and "model: draft step" in " ".join(answer.out.split()), answer.err
    return here


def test_repeated_options_are_one_spec(place, pair_folder, tmp_path):
    header = load_trace(place / "traces").header
    assert (header.facts["drafter"], header.tree.drafters) == ("suffix+model", 2)
    (tmp_path / "one.yaml").write_text("drafter: suffix+model\n")
    common = ("decode", *model_options(pair_folder), "--policy", ROUTE, "--max-new-tokens", 12, "w7 w8 w7 w8")
    answers = [parsed(*common, *options) for options in (DRAFTERS, ("--config", tmp_path / "one.yaml"))]
    assert answers[0]["texts"] == answers[1]["texts"]
    assert [one["rounds_by_drafter"] for one in answers] == [answers[0]["rounds_by_drafter"]] * 2


def test_a_profile_has_the_costs_of_each_drafter(place, tmp_path):
    profile = Profile.load(place / "profile.json")
    (other,) = profile.others
    assert other.facts["drafter"] == "model" and profile.facts["drafter"] == "suffix+model"
    assert other.low.draft_s[0] > profile.low.draft_s[0] > 0
    for one in (profile, other):
        assert one.noise is None or one.noise.repetitions
    shared = [{k: v for k, v in p.measurements.series.items() if k.what == VERIFY} for p in (profile, other)]
    assert shared[0] == shared[1] and profile.low.verify_s == other.low.verify_s
    # Decisions were timed with all drafters.
    policy = load_policy("fixed:2@model")
    assert profile.of_policy(policy, ("suffix", "model")).decision_s == profile.decision_s != {}
    profile.save(tmp_path / "copy.json")
    assert dataclasses.replace(Profile.load(tmp_path / "copy.json"), source=profile.source) == profile


def test_decode_and_bench_count_the_rounds_of_each_drafter(place, pair_folder):
    common = (*model_options(pair_folder), *DRAFTERS, "--max-new-tokens", 12, "--profile", place / "profile.json")
    result = parsed("decode", *common, "--policy", ROUTE, "w7 w8 w7 w8 w7")
    counts = result["rounds_by_drafter"]
    assert list(counts) == ["suffix", "model", "several", "none"] and sum(counts.values()) == result["target_calls"]
    shown = cli("decode", *common, "--policy", ROUTE, "w7 w8 w7 w8 w7").out
    assert "rounds by drafter" in shown and f"model {counts['model']}" in shown
    policies = ("--policy", ROUTE, "--policy", "fixed:2@model", "--no-library")
    answer = cli("bench", *common, *policies, "--prompts", place / "prompts.jsonl", "--json", "--quiet")
    lines = {line["name"]: line for line in json.loads(answer.out)["lines"]}
    assert answer.code == 0 and all(line["wrong"] == 0 for line in lines.values())
    assert sum(lines[ROUTE]["drafters"].values()) > 0 and lines["fixed:2@model"]["drafters"] == {}


def test_evaluate_refuses_what_several_drafters_do_not_have(place):
    common = ("evaluate", "--traces", place / "traces", "--profile", place / "profile.json", "--policy", ROUTE)
    assert "--batch" in refused(*common, "--batch", "1,2")
    assert "--report-prompts" in refused(*common, "--report-prompts")  # no policy was trained on these prompts


def test_a_profile_of_fewer_drafters_is_refused(place, pair_folder, profile, tmp_path):
    profile.save(tmp_path / "one.json")
    common = ("decode", *model_options(pair_folder), *DRAFTERS, "--max-new-tokens", 9, "w7")
    assert "--profile" in refused(*common, "--profile", tmp_path / "one.json", "--policy", ROUTE)
    assert "--profile" in refused(*common, "--profile", tmp_path / "one.json", "--policy", "fixed:2@model")
    assert "layer" in refused(*common, "--policy", "fixed:2@layer")


def test_when_one_of_several_drafters_stops_is_learned(place, tmp_path):
    traces, file = place / "traces", place / "profile.json"
    common = ("train", "--traces", traces, "--profile", file, "--report-share", 0, "--quiet")
    answer = cli(*common, "--decide", "stop@model", "--out", tmp_path / "stop")
    assert answer.code == 0 and f"--policy {tmp_path / 'stop'}@model" in " ".join(answer.out.split()), answer.err
    assert "--decide" in refused(*common, "--decide", "stop@lookup", "--out", tmp_path / "other")
    policy, arrays = load_policy(f"{tmp_path / 'stop'}@model"), trace_arrays(load_trace(traces))
    profile = Profile.load(file)
    assert adapt_to_profile(policy, arrays, profile) == (policy, "")
    low = dataclasses.replace(profile.others[0].low, draft_s=(1e-9, 1e-9), verify_s=(1.0, 1.0, 1.0, 1.0))
    others = (dataclasses.replace(profile.others[0], low=low, high=low),)
    free = dataclasses.replace(profile, others=others, decision_s={})
    adapted, note = adapt_to_profile(policy, arrays, free)
    assert note and adapted.drafter == "model"
    own, costs = arrays.of_policy(policy), free.of_policy(policy, arrays.drafters)
    assert replay(own, adapted, costs).rate > 1.5 * replay(own, load_policy("fixed:0"), costs).rate


def test_the_example_of_the_page_routes_and_passes_the_conformance_tests(pair):
    page = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    (code,) = re.findall(r"^`specstop_long_match.py`:\n\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(code.splitlines()) <= 15 + 2  # with blank lines between imports and class
    names: dict[str, Any] = {}
    exec(compile(code, "plugins.md", "exec"), names)
    tests = type("TestLongMatch", (PolicyTests,), {"make": lambda self: names["LongMatch"](1.0)})()
    for name in dir(tests):
        if name.startswith("test_"):
            getattr(tests, name)()
    prompt, settings, drafters = "w7 w8 w7 w8 w7", Settings(0.0, 24), ["suffix", "model"]
    text = decode(pair, prompt, names["LongMatch"](1.0), drafter=drafters, settings=settings)
    plain = decode(pair, prompt, "fixed:0", settings=settings)
    assert text.tokens == plain.tokens and {one.drafter for one in text.rounds} & {0, 1} and text.failure is None


def test_a_table_is_imported(tmp_path):
    draw = np.random.default_rng(0)
    lengths = [{name: draw.integers(1, 4, 9).tolist() for name in ("1e5", "b")} for _ in range(3)]
    rows = [{"id": f"r{at}", "prompt_tokens": 4, "tokens": [5] * 9, **row} for at, row in enumerate(lengths)]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--lengths", "ngram=1e5", "--lengths", "eagle=b")  # names of columns are texts, not numbers
    facts = parsed("import", table, "--out", tmp_path / "out", *columns, "--free", "ngram", "--bonus")
    assert (facts["kind"], facts["draft"], facts["depth"], facts["positions"]) == ("trace", "ngram+eagle", 2, 24)
    for options, noun in (
        (("--lengths", "ngram"), "--lengths"), (("--bonus",), "--lengths"), ((*columns, "--free", "x"), "--free"),
        ((*columns, "--draft", "d"), "--draft"), ((*columns, "--column", "id"), "--column"),
        ((*columns, "--column", "key=id"), "--column"), ((*columns, "--threshold", "0.2"), "--threshold"),
    ):  # fmt: skip
        assert noun in refused("import", table, "--out", tmp_path / "other", *options)
        assert not (tmp_path / "other").exists()
