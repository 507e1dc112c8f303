"""Two reports side by side: paired where they can be, honest where they cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specstop.policies.errors import InputError
from specstop.train.report.comparing.compare import PAIRED, UNPAIRED, compare
from specstop.train.report.comparing.read import per_prompt_figures, read_report

PROMPTS = [f"p{i}" for i in range(20)]
LINES = ("plain decoding", "best fixed", "mine", "oracle bound")


def line(name: str, rate: float, low: float, value: float, high: float) -> dict[str, Any]:
    ratio = {"value": value, "low": low, "high": high}
    kind = "bound" if "bound" in name else "rule"
    return {"name": name, "kind": kind, "tokens_per_s": rate, "to_best_fixed": ratio, "note": ""}


def written(folder: Path, scale: float = 1.0, details: Any = None, **facts: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line(name, 100.0 * scale + at, 0.9 * scale, 1.0 * scale, 1.1 * scale) for at, name in enumerate(LINES)]
    base = {
        "traces": "a",
        "prompts": 20,
        "temperature": 0.7,
        "pair": {"target": "1", "draft": "2"},
        "profile": {"device": "cpu"},
    }
    raw = {"schema": 1, "kind": "report", "lines": lines, "facts": {**base, **facts}, "details": details or {}}
    (folder / "report.json").write_text(json.dumps(raw))
    return folder


def figures(prompts: list[str], seed: int, speed: float = 1.0) -> dict[str, Any]:
    chance = np.random.default_rng(0)
    hard = {p: float(chance.uniform(1.0, 3.0)) for p in PROMPTS}
    noise = np.random.default_rng(seed)
    seconds = {
        name: [hard[p] / speed * float(noise.uniform(0.98, 1.02)) for p in prompts]
        for name in LINES
        if "bound" not in name
    }
    return {"per_prompt": per_prompt_figures(prompts, [60.0] * len(prompts), seconds)}


def test_a_report_beside_itself_differs_in_nothing(tmp_path: Path) -> None:
    one = written(tmp_path / "a", details=figures(PROMPTS, 1))
    found = compare(one, one / "report.json")
    assert (found.method, found.prompts, found.differs) == (PAIRED, 20, ())
    assert [x.name for x in found.lines] == list(LINES)
    for x in found.lines:
        assert x.rate_a == x.rate_b
        assert x.overlap
        if x.kind != "bound":
            assert x.gain is not None
            assert (x.gain.value, x.gain.low, x.gain.high) == (1.0, 1.0, 1.0)
    assert found.line("oracle bound").gain is None


def test_paired_over_common_prompts_is_the_ratio_of_rates_there(tmp_path: Path) -> None:
    mine, other = figures(PROMPTS[:15], 1), figures(PROMPTS[5:][::-1], 2, speed=1.1)
    found = compare(written(tmp_path / "a", details=mine), written(tmp_path / "b", details=other))
    assert (found.method, found.prompts) == (PAIRED, 10)
    gain = found.line("mine").gain
    common = PROMPTS[5:15]
    spent = [
        sum(
            s
            for p, s in zip(f["per_prompt"]["prompts"], f["per_prompt"]["seconds"]["mine"], strict=True)
            if p in common
        )
        for f in (mine, other)
    ]
    assert gain is not None
    assert gain.value == pytest.approx(spent[0] / spent[1])
    assert 1.07 < gain.low < gain.value < gain.high < 1.13
    # Prompts differ threefold, which pairing takes out.
    blind = compare(written(tmp_path / "c"), written(tmp_path / "d", 1.1)).line("mine").gain
    assert blind is not None
    assert blind.high - blind.low > 3 * (gain.high - gain.low)


def test_unpaired_says_why_and_combines_both_intervals(tmp_path: Path) -> None:
    one, two = written(tmp_path / "a"), written(tmp_path / "b", 1.5, details=figures(PROMPTS, 1))
    found = compare(one, two)
    assert (found.method, found.prompts) == (UNPAIRED, 0)
    assert found.why == f"{one / 'report.json'} holds no figures by prompt"
    mine = found.line("mine")
    assert mine.overlap is False
    assert mine.gain is not None
    low, high = np.hypot(np.log(0.9), np.log(1.1)), np.hypot(np.log(1.1), np.log(0.9))
    expected = (1.5, 1.5 * np.exp(-low), 1.5 * np.exp(high))
    assert (mine.gain.value, mine.gain.low, mine.gain.high) == pytest.approx(expected)
    apart = (
        written(tmp_path / "c", details=figures(PROMPTS[:10], 1)),
        written(tmp_path / "d", details=figures(PROMPTS[11:], 1)),
    )
    assert compare(*apart).method == UNPAIRED
    assert "0 prompts in common" in compare(*apart).why


def test_what_differs_is_named(tmp_path: Path) -> None:
    one = written(tmp_path / "a")
    two = written(tmp_path / "b", temperature=0.0, pair={"target": "1", "draft": "9"}, profile={"device": "cuda"})
    assert compare(one, two).differs == (
        ("temperature", "0.7", "0.0"),
        ("pair: draft", "2", "9"),
        ("profile: device", "cpu", "cuda"),
    )


def test_lines_of_one_report_alone_are_shown(tmp_path: Path) -> None:
    one, two = written(tmp_path / "a"), written(tmp_path / "b")
    raw = json.loads((two / "report.json").read_text())
    raw["lines"][2]["name"] = "other"
    (two / "report.json").write_text(json.dumps(raw))
    found = compare(one, two)
    assert [x.name for x in found.lines] == [*LINES, "other"]
    assert (found.line("mine").rate_b, found.line("other").rate_a) == (None, None)
    assert found.line("mine").gain is None
    json.dumps(found.to_dict(), allow_nan=False)


def spoiled(raw: dict[str, Any], change: str) -> Any:
    if change == "list":
        return []
    if change == "kind":
        raw["kind"] = "profile"
    if change == "schema":
        raw["schema"] = 9
    if change == "lines":
        del raw["lines"]
    if change == "number":
        raw["lines"][1]["tokens_per_s"] = "fast"
    if change == "ratio":
        del raw["lines"][1]["to_best_fixed"]["low"]
    if change == "by prompt":
        raw["details"] = {"per_prompt": {**figures(PROMPTS, 1)["per_prompt"], "tokens": [1.0]}}
    if change == "seconds":
        made = figures(PROMPTS, 1)["per_prompt"]
        made["seconds"]["mine"][3] = 0.0
        raw["details"] = {"per_prompt": made}
    return raw


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("list", "expected a report of `specstop evaluate`"),
        ("kind", "expected a report of `specstop evaluate`"),
        ("schema", "has schema 9, but this specstop reads schema 1"),
        ("lines", r"is mangled \(entry 'lines'\)"),
        ("number", "is mangled .'fast' in the line 'best fixed' is no number"),
        ("ratio", r"is mangled \(entry 'low'\)"),
        ("by prompt", "is mangled .figures by prompt of other lengths"),
        ("seconds", "not above 0"),
    ],
)
def test_a_mangled_report_is_one_clear_line(tmp_path: Path, change: str, message: str) -> None:
    good, bad = written(tmp_path / "a"), written(tmp_path / "b")
    raw = json.loads((bad / "report.json").read_text())
    (bad / "report.json").write_text(json.dumps(spoiled(raw, change)))
    with pytest.raises(InputError, match=message) as caught:
        compare(good, bad)
    assert "\n" not in str(caught.value)
    assert "b/report.json" in str(caught.value)


def test_a_missing_report_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere, which does not exist"):
        read_report(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty/report.json, which does not exist"):
        read_report(tmp_path / "empty")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        read_report(tmp_path / "x.json")
