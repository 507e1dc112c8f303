"""The report as a page, Markdown and CSV: figures of the JSON, nothing fetched, names escaped, accessible."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import TOO_FEW, Report
from specstop.train.evaluate.report import run_facts, to_html, to_markdown
from specstop.train.fit.achievable import achievable_estimate
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = '"><script>alert(1)</script><img src="http://evil.example/x">|`*{x}$y$ '


class Page(HTMLParser):
    """Elements with their attributes, texts, and tables by id as rows of (text, sort value); fails if tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self._rows: list[list[tuple[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.elements.append((tag, attributes))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = self.tables[attributes["id"] or ""] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append(("", attributes.get("data-value")))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if {"td", "th"} & set(self.open):
            text, value = self._rows[-1][-1]
            self._rows[-1][-1] = (text + data, value)

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements with these tags."""
        return [attributes for tag, attributes in self.elements if tag in tags]


def values(report: Report) -> dict[str, Any]:
    """Return the report as JSON values."""
    data: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "out"


@pytest.fixture(scope="module")
def report(sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, written: Path) -> Report:
    """A learned policy and a rule."""
    return evaluate(sides[1], full_profile, [learned, Confidence(0.7, DEPTH)], out=written)


@pytest.fixture(scope="module")
def data(report: Report, written: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((written / "report.json").read_text(), parse_constant=pytest.fail)
    assert {key: value for key, value in data.items() if key not in ("run", "prompt_texts")} == values(report)
    return data


@pytest.fixture(scope="module")
def page(report: Report, written: Path) -> Page:
    return Page((written / "report.html").read_text())


# The page


def test_the_figures_of_page_csv_and_json_are_the_same(page: Page, data: dict[str, Any], written: Path) -> None:
    table = page.tables["table-policies"]
    columns = [text for text, _ in table[0]]
    rows = list(csv.DictReader(io.StringIO((written / "report.csv").read_text())))
    assert len(table) - 1 == len(rows) == len(data["lines"])
    names = {"tokens/s": "tokens_per_s", "vs best fixed": "to_best_fixed", "vs plain": "to_plain"}
    for row, exact, line in zip(table[1:], rows, data["lines"], strict=True):
        assert row[0][0] == line["name"] + line["note"]
        assert (exact["policy"], exact["kind"], exact["note"]) == (line["name"], line["kind"], line["note"])
        for title, name in names.items():
            text, value = row[columns.index(title)]
            ratio = line[name] if isinstance(line[name], dict) else {"value": line[name]}
            expected = [ratio[part] for part in ("value", "low", "high") if part in ratio]
            assert value is not None and float(value) == expected[0] == float(exact[name])
            shown = [float(number) for number in re.findall(r"-?[\d.]+", text)]
            assert shown == pytest.approx(expected, abs=0.0501 if title == "tokens/s" else 0.000501)
        for name in ("to_plain", "to_best_fixed", "oracle_share"):
            ends = [float(exact[f"{name}{part}"]) for part in ("", "_low", "_high")]
            assert ends == [line[name][key] for key in ("value", "low", "high")]


def test_nothing_is_fetched_and_only_the_page_s_script_runs(page: Page) -> None:
    assert not {tag for tag, _ in page.elements} & {"iframe", "object", "embed", "img", "base", "form"}
    assert page.all("script") == [{}]
    policy = next(a["content"] or "" for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "connect-src" not in policy
    for _, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                assert (value or "").startswith("#") or value in ("data:,", "report.json", "report.csv", "report.md")
    assert not re.search(r"@import|url\((?!#)|https?://|javascript:", page.text)


def test_the_page_begins_with_the_answer_and_the_run(
    page: Page, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(page.words)
    assert words.index(data["answer"]["headline"]) < words.index("Length 0 is plain decoding")
    assert data["answer"]["interval"] in words
    assert all(sentence in words for sentence in data["answer"]["why"])
    run, facts = data["run"], data["facts"]
    for text in (run["specstop"], run["created"], facts["traces"], facts["models"]["target"], facts["models"]["draft"]):
        assert text in words
    monkeypatch.setattr(sys, "argv", ["/bin/specstop", "evaluate", "--out", "a b"])
    assert "<code>specstop evaluate --out &#39;a b&#39;</code>" in to_html({**data, "run": run_facts()})


def test_names_are_escaped(data: dict[str, Any]) -> None:
    hostile = copy.deepcopy(data)
    text = json.dumps(hostile)
    for name in ("logistic", "confidence:0.7", hostile["details"]["prompts"][0]["prompt"]):
        text = text.replace(json.dumps(name)[1:-1], json.dumps(HOSTILE + name[:1])[1:-1])
    hostile = json.loads(text)
    hostile["findings"] = hostile["caveats"] = ["<b>" + HOSTILE]
    hostile["failed"] = [{"policy": HOSTILE, "error": HOSTILE}]
    page = Page(to_html(hostile))
    assert len(page.all("script")) == 1 and not page.all("img", "b")
    assert sum(HOSTILE in word for word in page.words) > 5


def test_one_prompt_gives_no_verdict_and_no_interval(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trace = sides[1]
    one = trace.rows["prompt_id"][0]
    alone = Trace(trace.folder, trace.header, trace.rows.filter(lambda name: name == one, input_columns="prompt_id"))
    report = evaluate(alone, full_profile, [Confidence(0.7, DEPTH)], out=tmp_path / "a")
    assert report.facts["prompts"] == 1
    for line in report.lines:
        assert {ratio.low for ratio in (line.to_plain, line.to_best_fixed, line.oracle_share)} == {None}
        assert line.verdict in ("", TOO_FEW)
    assert report.answer is not None and not report.answer.deploy
    assert report.answer.verdict == TOO_FEW
    assert report.answer.headline.startswith("Too few prompts: a single prompt")
    text = (tmp_path / "a" / "report.html").read_text()
    assert report.answer.headline in "".join(Page(text).words)
    assert not re.search(r"\d \[[\d.]+, [\d.]+\]", text + to_markdown(values(report)))
    with (tmp_path / "a" / "report.csv").open() as file:
        assert {row["to_plain_low"] for row in csv.DictReader(file)} == {""}
    again = evaluate(alone, full_profile, [Confidence(0.7, DEPTH)], compare=tmp_path / "a")
    assert again.details["comparison"]["rows"][1] == ("best fixed", "-", {"value": 1.0, "low": None, "high": None})


# Markdown, CSV


# The achievable estimate


def test_an_achievable_estimate_is_a_line_of_the_report(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    report = evaluate(sides[1], full_profile, [FixedLength(2)], achievable=True, batch=[1])
    names = [line["name"] for line in report.details["batch"]["lines"]]
    assert names[-2:] == ["achievable estimate", "oracle bound of the batch"]
    line = report["achievable estimate"]
    expected = achievable_estimate(trace_arrays(sides[1]), full_profile)
    assert line.kind == "achievable" and line.tokens_per_s == pytest.approx(expected.rate)
    assert line.tokens_per_s <= report["oracle bound"].tokens_per_s
    Page(to_html(values(report)))


# Live traces, round by round


@pytest.fixture(scope="module")
def live(pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("live")
    return collect(
        pair, prompts, folder, depth=DEPTH, temperature=0.7, max_new_tokens=16, verification="rejection", collector="live",
        policy=FixedLength(DEPTH),
    )  # fmt: skip


def test_a_live_trace_is_answered_round_by_round_with_its_caveats(
    live: Trace, profile: Profile, tmp_path: Path
) -> None:
    report = evaluate(live, profile, [Confidence(0.7, DEPTH)], out=tmp_path / "out")
    arrays = trace_arrays(live, extra=ROUND_COLUMNS)
    rounds = evaluate_rounds(arrays, Confidence(0.7, DEPTH), profile)
    assert len(rounds.sequence) == len(rounds.committed) == report.facts["rounds"]
    found = report["confidence:0.7"]
    assert found.tokens_per_s == pytest.approx(rounds.rate)
    assert found.block_efficiency == pytest.approx(float(rounds.committed.mean()))
    assert report.caveats == rounds.caveats
    bound = report["oracle bound"]
    assert bound.tokens_per_s >= max(x.tokens_per_s for x in report.lines)
    page = Page((tmp_path / "out" / "report.html").read_text())
    words = "".join(page.words)
    assert all(caveat in words for caveat in rounds.caveats)
    assert all(caveat in (tmp_path / "out" / "report.md").read_text() for caveat in rounds.caveats)
    assert "rejection verification (lossless)" in words
