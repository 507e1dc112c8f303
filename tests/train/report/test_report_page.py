"""The report as a page, Markdown and CSV: the JSON's figures, nothing fetched, nothing taken for markup; and the answer."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from contract_policies import DEPTH
from specstop.collect.prompts.read import Prompt
from specstop.collect.run import collect
from specstop.collect.store.folder import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import TOO_FEW, Report
from specstop.train.fit.achievable import achievable_estimate
from specstop.train.replay.rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.report.writing.files import plain, to_csv, to_markdown, write_report
from specstop.train.report.writing.page import to_html
from specstop.train.report.writing.sections import sections

VOID = {"meta", "link", "br", "img", "hr", "input"}
HOSTILE = '"><script>alert(1)</script><img src="http://evil.example/x">|`*{x}'


class Page(HTMLParser):
    """Elements, their attributes and texts; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[tuple[str, str, str]] = []  # place, value, text
        self.words: list[str] = []
        self._figure: list[Any] | None = None
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "data":
            found = dict(attrs)
            self._figure = [found["data-path"], found["value"], ""]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "data" and self._figure is not None:
            self.figures.append(tuple(self._figure))  # type: ignore[arg-type]
            self._figure = None

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._figure is not None:
            self._figure[2] += data


def at(data: Any, pointer: str) -> Any:
    """Return what a JSON pointer says."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        data = data[int(name)] if isinstance(data, list) else data[name]
    return data


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page") / "out"


@pytest.fixture(scope="module")
def report(sides: tuple[Trace, Trace], full_profile: Profile, learned: LearnedPolicy, written: Path) -> Report:
    """A learned policy, a rule, a sweep, groups."""
    return evaluate(sides[1], full_profile, [learned, Confidence(0.7, DEPTH)], out=written, sweep=True)


@pytest.fixture(scope="module")
def data(report: Report, written: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((written / "report.json").read_text(), parse_constant=pytest.fail)
    assert found == plain(report)
    return found


@pytest.fixture(scope="module")
def page(report: Report, written: Path) -> Page:
    return Page((written / "report.html").read_text())


# The page


def test_every_figure_of_the_page_is_that_of_the_json(page: Page, data: dict[str, Any]) -> None:
    assert len(page.figures) > 300
    for place, value, text in page.figures:
        there = at(data, place)
        assert float(value) == there
        shown = float(text.replace(",", ""))
        digits = len(text.partition(".")[2])
        assert shown == pytest.approx(there, abs=0.501 * 10.0**-digits), place
    for name in ("lines/0/tokens_per_s", "details/sweep/lines/0/to_best_fixed/0/value"):
        assert f"/{name}" in {place for place, *_ in page.figures}


def test_nothing_is_fetched_and_nothing_runs(page: Page, written: Path) -> None:
    text = (written / "report.html").read_text()
    assert not {tag for tag, _ in page.elements} & {"script", "iframe", "object", "embed", "img", "base", "form"}
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in ("src", "href", "xlink:href", "action", "data", "srcset", "poster"):
                assert (value or "").startswith("#") or (tag, value) == ("link", "data:,")
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/)|javascript:", text)


def test_the_page_opens_with_the_answer_and_can_be_read_aloud(page: Page, data: dict[str, Any]) -> None:
    words = " ".join(page.words)
    assert words.index(data["answer"]["headline"]) < words.index("Acceptance by depth")
    assert data["answer"]["interval"] in words
    assert all(sentence in words for sentence in data["answer"]["why"])
    drawings = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len(drawings) >= 9
    assert all(a["role"] == "img" and a["aria-label"] for a in drawings)
    assert sum(tag == "figcaption" for tag, _ in page.elements) == len(drawings)
    assert ("html", {"lang": "en"}) in page.elements
    names = [a.get("name") for tag, a in page.elements if tag == "meta"]
    assert {"viewport", "color-scheme"} <= set(names)
    style = (Path(__file__).parents[3] / "train" / "report" / "writing" / "page.css").read_text()
    assert "prefers-color-scheme: dark" in style and "@media print" in style and "max-width: 480px" in style


def test_every_section_is_there(data: dict[str, Any], page: Page) -> None:
    ids = [section.id for section in sections(data)]
    by_policy = ["lengths", "reliability", "time", "stops", "prompts", "sensitivity", "sweep", "losses"]
    assert ids == ["speed", "acceptance", *by_policy]
    assert set(ids) <= {attributes.get("id") for _, attributes in page.elements}
    for section in sections(data):
        for table in section.tables:
            assert all(len(row) == len(table.columns) for row in table.rows), table.caption
            assert len(table.texts(data)[0]) == len(table.heads)


def test_hostile_names_stay_words(data: dict[str, Any]) -> None:
    hostile = copy.deepcopy(data)
    text = json.dumps(hostile)
    for name in ("logistic", "confidence:0.7", hostile["details"]["losses"][0]["prompt"]):
        text = text.replace(json.dumps(name)[1:-1], json.dumps(HOSTILE + name[:1])[1:-1])
    hostile = json.loads(text)
    hostile["details"]["losses"][0]["rounds"][0]["pieces"][0]["text"] = HOSTILE
    hostile["details"]["losses"][0]["rounds"][0]["context"] = ["</p><script>", "x"]
    hostile["findings"] = hostile["caveats"] = ["<b>" + HOSTILE]
    found = Page(to_html(hostile))
    assert not {tag for tag, _ in found.elements} & {"script", "img", "b"}
    assert sum(HOSTILE in word for word in found.words) > 5
    assert "</p><script>x" in "".join(found.words)
    Page(to_html(hostile))


def test_a_comparison_and_groups_find_their_place(data: dict[str, Any]) -> None:
    more = copy.deepcopy(data)
    ratio = {"value": 0.97, "low": 0.95, "high": 0.99}
    names = list(more["details"]["sensitivity"][0]["ratios"])
    more["details"]["groups"] = [
        {"name": n, "prompts": count, "tokens": 70, "best_fixed": "fixed:1", "ratios": dict.fromkeys(names, ratio)}
        for n, count in (("a", 3), ("b", 20))
    ]
    more["details"]["comparison"] = {"title": "Change", "text": "", "columns": ["x", "y"], "rows": [["z", ratio]]}
    found = Page(to_html(more))
    words = "".join(found.words)
    assert words.count("0.970 [0.950, 0.990] below") == len(names), "a group of 3 prompts has no verdict"
    assert {"groups", "comparison"} <= {attributes.get("id") for _, attributes in found.elements}


def test_a_report_without_details_is_a_page_too(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    bare = evaluate(sides[1], full_profile)
    assert bare.details == {}
    write_report(bare, tmp_path / "out")
    found = Page((tmp_path / "out" / "report.html").read_text())
    assert sum(tag == "svg" for tag, _ in found.elements) == 3


def test_one_prompt_gives_no_verdict_and_no_interval(
    sides: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path
) -> None:
    trace = sides[1]
    one = trace.rows["prompt_id"][0]
    alone = Trace(trace.folder, trace.header, trace.rows.filter(lambda name: name == one, input_columns="prompt_id"))
    report = evaluate(alone, full_profile, [Confidence(0.7, DEPTH)], out=tmp_path / "a", sweep=True)
    assert report.facts["prompts"] == 1
    for line in report.lines:
        assert {ratio.low for ratio in (line.to_plain, line.to_best_fixed, line.oracle_share)} == {None}
        assert line.verdict in ("", TOO_FEW)
    assert report.answer is not None and not report.answer.deploy
    assert report.answer.verdict == TOO_FEW
    assert report.answer.headline.startswith("Too few prompts: a single prompt")
    text = (tmp_path / "a" / "report.html").read_text()
    found = Page(text)
    assert report.answer.headline in "".join(found.words)
    assert not re.search(r"\d \[[\d.]+, [\d.]+\]", text + to_markdown(report))
    with (tmp_path / "a" / "report.csv").open() as file:
        assert {row["to_plain_low"] for row in csv.DictReader(file)} == {""}
    again = evaluate(alone, full_profile, [Confidence(0.7, DEPTH)], compare=tmp_path / "a")
    assert again.details["comparison"]["rows"][1] == ("best fixed", "-", {"value": 1.0, "low": None, "high": None})


# Markdown, CSV


def test_markdown_and_csv_say_the_same(report: Report, data: dict[str, Any], written: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((written / "report.csv").read_text())))
    assert (written / "report.csv").read_text() == to_csv(report)
    for row, line in zip(rows, data["lines"], strict=True):
        assert (row["policy"], row["kind"], row["note"]) == (line["name"], line["kind"], line["note"])
        assert float(row["tokens_per_s"]) == line["tokens_per_s"]
        for name in ("to_plain", "to_best_fixed", "oracle_share"):
            found = [float(row[f"{name}{part}"]) for part in ("", "_low", "_high")]
            assert found == [line[name][key] for key in ("value", "low", "high")]
    text = to_markdown(report)
    for section in sections(data):
        assert f"## {section.title}" in text
        for table in section.tables:
            assert text.count(table.caption) >= 1
    assert report.answer is not None
    assert report.answer.headline in text


def test_markdown_keeps_bars_and_markup_within_cells(report: Report) -> None:
    import dataclasses

    lines = tuple(dataclasses.replace(line, note=HOSTILE) for line in report.lines)
    text = to_markdown(dataclasses.replace(report, lines=lines))
    rows = [row for row in text.splitlines() if "alert" in row]
    assert len(rows) == len(lines)
    assert all("\\<script>" in row and "\\|\\`\\*" in row for row in rows)


# The achievable estimate


def test_an_achievable_estimate_is_a_line_of_the_report(sides: tuple[Trace, Trace], full_profile: Profile) -> None:
    report = evaluate(sides[1], full_profile, [FixedLength(2)], achievable=True, batch=[1])
    names = [line["name"] for line in report.details["batch"]["lines"]]
    assert names[-2:] == ["achievable estimate", "oracle bound of the batch"]
    line = report["achievable estimate"]
    expected = achievable_estimate(trace_arrays(sides[1]), full_profile)
    assert line.kind == "achievable" and line.tokens_per_s == pytest.approx(expected.rate)
    assert line.tokens_per_s <= report["oracle bound"].tokens_per_s
    Page(to_html(plain(report)))


def test_a_policy_above_the_achievable_estimate_is_a_finding(
    sides: tuple[Trace, Trace], full_profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = replay(trace_arrays(sides[1]), FixedLength(0), full_profile)
    monkeypatch.setattr("specstop.train.fit.achievable.achievable_estimate", lambda *_, **__: poor)
    report = evaluate(sides[1], full_profile, [FixedLength(2)], achievable=True)
    to_plain = report["achievable estimate"].to_plain
    assert (to_plain.value, to_plain.low, to_plain.high) == pytest.approx((1.0, 1.0, 1.0))
    assert any(text.startswith("fixed:2 is above the achievable estimate") for text in report.findings)
    Page(to_html(plain(report)))


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
    values = evaluate_rounds(arrays, Confidence(0.7, DEPTH), profile)
    assert len(values.taken.sequence) == len(values.committed) == report.facts["rounds"]
    found = report["confidence:0.7"]
    assert found.tokens_per_s == pytest.approx(values.rate)
    assert found.block_efficiency == pytest.approx(float(values.committed.mean()))
    assert report.caveats == values.caveats
    bound = report["oracle bound"]
    assert bound.tokens_per_s >= max(x.tokens_per_s for x in report.lines)
    page = Page((tmp_path / "out" / "report.html").read_text())
    words = "".join(page.words)
    assert all(caveat in words for caveat in values.caveats)
    assert all(caveat in (tmp_path / "out" / "report.md").read_text() for caveat in values.caveats)
    assert "rejection verification (lossless)" in words
