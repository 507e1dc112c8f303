"""The latency profile: what a round costs, and the file it is kept in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specstop.policies.costs import PADDING_GAIN
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence
from specstop.policies.profile import Profile

EXACT = 1e-13  # float64


def seconds(profile: Profile, context: float, *counts: int, decision_s: float = 6e-5) -> float:
    """Return the seconds of one round: context, then drafted, verified, backlog, decisions."""
    row = [np.array([n]) for n in counts]
    out = profile.round_seconds(np.array([context]), *row, decision_s)
    assert out.dtype == np.float64
    return float(out.item())


def slow_padded(p: Profile, verified: int) -> int:
    """Return the size that verifies at least this many tokens cheapest, both contexts taken together, if it is clearly so."""
    best = verified
    if not verified:
        return 0  # plain decoding
    for size in range(verified, len(p.low.verify_s)):
        if p.low.verify_s[size] + p.high.verify_s[size] < p.low.verify_s[best] + p.high.verify_s[best]:
            best = size
    pays = all(side.verify_s[best] < (1.0 - PADDING_GAIN) * side.verify_s[verified] for side in (p.low, p.high))
    return best if pays else verified


def slow_seconds(p: Profile, context: float, drafted: int, verified: int, backlog: int, decisions: int) -> float:
    calls = []
    for table in (p.low, p.high):
        total = table.verify_s[slow_padded(p, verified)]
        if drafted:
            total += table.draft_s[1 if backlog > 1 else 0] + max(0, backlog - 2) * table.draft_token_s
            total += (drafted - 1) * table.draft_s[0]
        calls.append(total)
    weight = (context - p.low.context) / (p.high.context - p.low.context)
    both = max(calls[0] + (calls[1] - calls[0]) * weight, 0.25 * min(calls))
    return both + p.round_s + drafted * p.step_s + decisions * 6e-5


@pytest.mark.parametrize("context", [0.0, 8.0, 21.5, 40.0, 90.0])
@pytest.mark.parametrize(
    "counts",
    [(0, 0, 1, 0), (0, 0, 9, 1), (1, 1, 1, 1), (1, 0, 2, 1), (4, 4, 1, 4), (5, 2, 2, 5), (6, 6, 31, 6)],
)
def test_a_round_costs_the_sum_of_its_parts(profile: Profile, context: float, counts: tuple[int, ...]) -> None:
    assert seconds(profile, context, *counts) == pytest.approx(slow_seconds(profile, context, *counts), rel=EXACT)


def test_a_verification_is_filled_up_to_a_cheaper_size(profile: Profile) -> None:
    assert profile.padded() == (0, 1, 2, 3, 5, 5, 6)
    assert profile.padded() == tuple(slow_padded(profile, n) for n in range(7))
    assert seconds(profile, 20, 5, 4, 1, 0) == seconds(profile, 20, 5, 5, 1, 0) < seconds(profile, 20, 5, 6, 1, 0)
    flat = dataclasses.replace(profile.low, verify_s=(5.0, 5.0, 5.0))
    assert dataclasses.replace(profile, low=flat, high=flat).padded() == (0, 1, 2), "nothing is filled up for nothing"
    one = dataclasses.replace(profile.low, verify_s=(5.0, 5.0, 4.0))
    assert dataclasses.replace(profile, low=one, high=flat).padded() == (0, 1, 2), "at one context alone"
    near = dataclasses.replace(profile.low, verify_s=(5.0, 4.9, 4.8))
    assert dataclasses.replace(profile, low=near, high=near).padded() == (0, 1, 2), "as much as measurements differ"
    steep = dataclasses.replace(profile.low, verify_s=(5.0, 4.0, 3.0))
    assert dataclasses.replace(profile, low=steep, high=steep).padded() == (0, 2, 2), (
        "plain decoding, timed on its own, stays"
    )


def test_rounds_of_many_streams_are_those_of_each(profile: Profile) -> None:
    rows = np.array([[10, 4, 3, 2, 4], [33, 0, 0, 1, 1], [70, 6, 6, 12, 5]])
    together = profile.round_seconds(*rows.T, 6e-5)
    assert together.tolist() == [seconds(profile, *row) for row in rows.tolist()]


def test_costs_are_linear_in_the_context(profile: Profile) -> None:
    points = [seconds(profile, c, 3, 3, 1, 3) for c in (10, 20, 30, 100)]
    assert points[1] - points[0] == pytest.approx(points[2] - points[1], rel=1e-9)
    assert points[3] - points[0] == pytest.approx(9 * (points[1] - points[0]), rel=1e-9)


def test_one_context_length_serves_all(profile: Profile) -> None:
    flat = dataclasses.replace(profile, high=profile.low)
    assert seconds(flat, 5, 2, 2, 1, 2) == seconds(flat, 500, 2, 2, 1, 2) > 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("depth", [None, 1, 4])
def test_chain_costs_are_round_seconds_of_each_length(profile: Profile, first: int, depth: int | None) -> None:
    costs = profile.chain_costs(27.5, 6e-5, first, depth)
    deepest = profile.max_depth if depth is None else depth
    expected = []
    for k in range(deepest + 1):
        asked = len([j for j in range(first, deepest) if j <= k]) if k >= first else 0
        expected.append(seconds(profile, 27.5, k, k, 1, asked))
    assert costs.tolist() == pytest.approx(expected, rel=1e-9)


def test_prefill_is_a_constant_and_a_token_price(profile: Profile) -> None:
    assert profile.prefill_seconds(np.array([0, 7])).tolist() == pytest.approx([5e-3, 5.7e-3], rel=EXACT)


def test_a_decision_costs_what_was_measured_under_the_policys_cost_name(profile: Profile) -> None:
    assert profile.decision(Confidence(0.25).cost_name) == 6e-5
    assert profile.decision("never measured") == 0.0
    more = profile.with_decisions({"mine": 1e-3})
    assert (more.decision("mine"), more.decision("confidence")) == (1e-3, 6e-5)
    assert "mine" not in profile.decision_s


def test_same_costs_looks_at_all_but_decisions(profile: Profile) -> None:
    record = profile.with_decisions({"mine": 1.0}).to_dict()
    assert profile.same_costs(json.loads(json.dumps(record)))
    assert not profile.same_costs({**record, "round_s": 1.0})
    assert not profile.same_costs({})


def test_a_profile_comes_back_from_its_file_exactly(profile: Profile, tmp_path: Path) -> None:
    odd = dataclasses.replace(profile, step_s=0.1 + 0.2, round_s=1 / 3).with_decisions({"mine": 1 / 3})
    odd.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == odd
    first = (tmp_path / "p.json").read_bytes()
    Profile.load(tmp_path / "p.json").save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == first


def _drop(*keys: str) -> Callable[[dict[str, Any]], Any]:
    def damage(raw: dict[str, Any]) -> dict[str, Any]:
        inner = raw
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return raw

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: [raw], "is none"),
        (lambda raw: {**raw, "schema": 2}, "of schema 1, but .* is none"),
        (lambda raw: {**raw, "kind": "policy"}, "is none"),
        (_drop("low"), "lacks or mangles low"),
        (_drop("high", "verify_s"), "lacks or mangles high.verify_s"),
        (lambda raw: {**raw, "step_s": "quick"}, "lacks or mangles"),
        (lambda raw: {**raw, "prefill_s": [1.0]}, "lacks or mangles"),
        (lambda raw: {**raw, "decision_s": [1.0]}, "lacks or mangles"),
        (lambda raw: {**raw, "low": 3}, "lacks or mangles"),
        (
            lambda raw: {**raw, "low": {**raw["low"], "verify_s": raw["low"]["verify_s"][:3]}},
            "lacks or mangles",
        ),
    ],
)
def test_a_mangled_profile_is_refused(
    profile: Profile, tmp_path: Path, damage: Callable[[Any], Any], message: str
) -> None:
    profile.save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps(damage(json.loads((tmp_path / "p.json").read_text()))))
    with pytest.raises(InputError, match=f"profile: .*{message}"):
        Profile.load(tmp_path / "p.json")


def _put(value: Any, *keys: str | int) -> Callable[[dict[str, Any]], Any]:
    """Return a damage that writes `value` at the place that `keys` lead to."""

    def damage(raw: Any) -> Any:
        inner = raw
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return raw

    return damage


def _zero(raw: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps(raw)
    zeros: dict[str, Any] = json.loads(text, parse_float=lambda number: 0.0)
    return zeros


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_put(-8.5e-3, "low", "verify_s", 2), "low: verify_s"),
        (_put(-1e-6, "step_s"), "step_s"),
        (_put(-1e-4, "prefill_s", 0), ".*prefill_s"),
        (_put(float("nan"), "round_s"), "a number is not finite"),
        (_put(float("inf"), "high", "draft_s", 1), "a number is not finite"),
        (_put(1e308, "high", "draft_s", 1), "high: draft_s"),
        (_put(10**400, "step_s"), "step_s"),
        (_zero, "low: verify_s"),
        (_put("0.004", "step_s"), "step_s"),
        (_put(True, "step_s"), "step_s"),
        (_put(None, "low", "draft_token_s"), "low.draft_token_s"),
        (_put([], "low", "verify_s"), "low: verify_s"),
        (_put([4e-3] * 2000, "low", "verify_s"), "low: verify_s"),
        (_put("4567", "low", "verify_s"), "low.verify_s"),
        (_put(-1.0, "low", "context"), "context"),
        (_put(8.0 + 1e-9, "high", "context"), "high.context: expected that of low, or at least one token more"),
        (_put(7.0, "high", "context"), "high.context: expected that of low, or at least one token more"),
        (_put([[0.5, 1e-3]], "low", "tree_verify_s"), "low.tree_verify_s"),
        (_put([[3, 1e-3], [2, 1e-3]], "low", "tree_verify_s"), "low: tree_verify_s"),
        (_put([[3]], "low", "tree_verify_s"), "low.tree_verify_s"),
        (_put([1e-3, 1e-3, -1e-3], "tree_outside_s"), ".*outside"),
        (_put(-0.5, "temperature"), "temperature"),
        (_put([["made", "up"]], "facts"), "facts"),
        (_put(1e-3, "decision_s", "\ud800"), "a text contains control characters"),
        (_put("\udcff", "facts", "device"), "a text contains control characters"),
        (_put("\x1b[2J", "facts", "device"), "a text contains control characters"),
        (_put(json.loads("[" * 100 + "]" * 100), "facts", "deep"), "it is nested too deeply"),
    ],
)  # fmt: skip
def test_a_profile_of_impossible_times_is_refused(
    profile: Profile, tmp_path: Path, damage: Callable[[Any], Any], message: str
) -> None:
    profile.save(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps(damage(json.loads((tmp_path / "p.json").read_text()))))
    with pytest.raises(InputError, match=f"profile: .*p.json lacks or mangles {message}") as caught:
        Profile.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < len(str(tmp_path)) + 200


def test_nesting_without_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[" * 200_000)
    with pytest.raises(InputError, match=r"profile: expected JSON in .*p\.json"):
        Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize("text", ["{", "", "\0"])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(InputError, match="profile: expected JSON in"):
        Profile.load(tmp_path / "p.json")
    with pytest.raises(InputError, match="which does not exist"):
        Profile.load(tmp_path / "nowhere.json")
