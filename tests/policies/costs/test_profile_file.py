"""The file of a profile: it round-trips exactly, and a damaged one is refused in one line or has possible prices."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from specstop.policies.costs import BatchCosts, BatchTable
from specstop.policies.errors import InputError
from specstop.policies.measurements import Measurements
from specstop.policies.profile import Profile
from steps import json_places
from timed import timed_profile


def batch_profile(profile: Profile) -> Profile:
    """Return the profile with costs of trees and of batches."""
    points = (0, 4e-3), (1, 4.1e-3), (8, 6e-3), (14, 6.2e-3)
    low, high = (dataclasses.replace(t, later_draft_s=1e-3, tree_verify_s=points) for t in (profile.low, profile.high))
    verify = {1: ((1, 4e-3), (5, 5e-3)), 4: ((4, 5e-3), (16, 5e-3), (17, 7e-3), (20, 7e-3))}
    sides = (BatchTable(context, ((1, 1e-3), (4, 1.5e-3)), verify) for context in (8.0, 40.0))
    tree = (1e-4, 2e-5, 1e-6)
    return dataclasses.replace(profile, low=low, high=high, tree_outside_s=tree, batch=BatchCosts(*sides))


KINDS: dict[str, Callable[[Profile], Profile]] = {
    "chain": lambda p: dataclasses.replace(p, step_s=0.1 + 0.2, round_s=1 / 3).with_decisions({"mine": 1 / 3}),
    "batch": batch_profile,
    "measured": lambda p: timed_profile(p, ["confidence"], jitter=0.1, repetitions=6),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_profile_round_trips_through_its_file(profile: Profile, tmp_path: Path, kind: str) -> None:
    original = KINDS[kind](profile)
    original.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == original
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "p.json").read_bytes()
    assert again.resampled(np.random.default_rng(5)) == original.resampled(np.random.default_rng(5))
    assert original.same_costs(again.with_decisions({"other": 1.0}).to_dict()), "costs without decisions"
    assert not original.same_costs({**again.to_dict(), "round_s": 1.0}) and not original.same_costs({})
    bare = original.to_dict()
    assert "measurements" not in bare, "policies store the costs of their profile, not its timings"
    (tmp_path / "p.json").write_text(json.dumps(bare))
    assert Profile.load(tmp_path / "p.json") == dataclasses.replace(original, measurements=Measurements())


NAN, INF = float("nan"), float("inf")
SERIES = {"what": "verify", "of": "short", "counts": [1], "ns": [[1]]}
DAMAGES: list[tuple[str, Any, str]] = [  # keys from the outside in, value, noun of the message
    ("schema", 2, "schema"), ("kind", "policy", "schema"), ("low", 3, "low"), ("high.verify_s", None, "high.verify_s"),
    ("low.verify_s", [1e-3] * 3, "verify_s"), ("low.verify_s", [], "verify_s"), ("low.verify_s", [4e-3] * 2000, "verify_s"),
    ("low.verify_s", [0.0] * 7, "verify_s"), ("low.verify_s", [4e-3, -8.5e-3] * 3, "verify_s"),
    ("high.draft_s", [1e-3, 1e308], "draft_s"), ("step_s", "0.004", "step_s"), ("step_s", True, "step_s"),
    ("step_s", -1e-6, "step_s"), ("step_s", 10**400, "step_s"), ("round_s", NAN, "finite"), ("prefill_s", [1.0], "prefill_s"),
    ("decision_s", [1.0], "decision_s"), ("decision_s", {"\ud800": 1e-3}, "control characters"),
    ("low.context", -1.0, "context"), ("high.context", 8.0 + 1e-9, "context"), ("high.context", 7.0, "context"),
    ("low.tree_verify_s", [[0.5, 1e-3]], "tree_verify_s"), ("low.tree_verify_s", [[3, 1e-3], [2, 1e-3]], "tree_verify_s"),
    ("tree_outside_s", [1e-3, 1e-3, -1e-3], "outside"), ("temperature", -0.5, "temperature"),
    ("verification", "x" * 201, "verification"), ("facts", [["made", "up"]], "facts"),
    ("facts", {"device": "\x1b[2J"}, "control characters"), ("facts", json.loads("[" * 100 + "]" * 100), "nested"),
    ("measurements", 3, "p.json"), ("measurements", [3], "p.json"), ("measurements", [{"what": "verify"}], "p.json"),
    ("measurements", [SERIES] * 2, "p.json"),
    *(("measurements", [{**SERIES, **change}], "p.json") for change in (
        {"ns": [[1.5]]}, {"ns": [[-1]]}, {"ns": [[True]]}, {"ns": [[], []]}, {"counts": ["1"]}, {"counts": [1, 2]},
        {"what": 7}, {"what": "wait"}, {"of": "middle"}, {"what": "decisions", "of": "confidence", "counts": [0]})),
]  # fmt: skip


@pytest.mark.parametrize(("place", "value", "noun"), DAMAGES)
def test_an_impossible_profile_is_refused_in_one_line(
    profile: Profile, tmp_path: Path, place: str, value: Any, noun: str
) -> None:
    *keys, last = place.split(".")
    raw = profile.to_dict()
    functools.reduce(operator.getitem, keys, raw)[last] = value
    (tmp_path / "p.json").write_text(json.dumps(raw))
    with pytest.raises(InputError, match=noun) as error:
        Profile.load(tmp_path / "p.json")
    assert "p.json" in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(tmp_path)) + 200


ODD_VALUES = (
    None, True, -1, 0, 10**400, 1e308, 5e-324, -0.0, NAN, INF, 1e7, "", "0.004", "\ud800", [], {}, [1e-3] * 3000,
    [[0, 1e-3], [0, 1e-3]], [[2**40, 1e-3]], {"each": -1, "opening": 0}, [1e-3, NAN],
)  # fmt: skip


def damaged(text: str, rng: random.Random) -> str:
    """Return the text with an odd value, a lost entry, other times, or cut or inserted characters."""
    kind, at, raw = rng.randrange(5), rng.randrange(len(text)), json.loads(text)
    holder, key = rng.choice(json_places(raw))
    if kind == 0:
        return text[:at] + "".join(rng.choices('0123456789eE-+.,:"[]{}nN', k=rng.randint(0, 4))) + text[at + 1 :]
    if kind == 1:
        del holder[key]
    elif kind == 2:
        holder[key] = rng.choice(ODD_VALUES)
    elif kind == 3:  # possible but unlikely: each of another order of magnitude
        raw = json.loads(text, parse_float=lambda number: 10.0 ** rng.uniform(-9.0, 6.0))
    else:
        factor = rng.choice([-1.0, 0.0, 1e-300, 1e-3, 1e9, 1e300])
        raw = json.loads(text, parse_float=lambda number: float(number) * factor)
    return json.dumps(raw)


def prices(profile: Profile) -> list[Any]:
    """Return the seconds of all kinds of rounds."""
    k, streams = np.arange(profile.max_depth + 1), np.arange(40)
    seconds: list[Any] = [profile.prefill_seconds(np.array([1, 100]))]
    seconds += [profile.low.tree_draft(20), profile.high.tree_verify(20)]
    for context in (1.0, 20.0, 4096.0):
        fed = np.stack([k > 0, 2 * k, 0 * k], 1)
        for name in (*profile.decision_s, "other"):
            price = profile.decision(name)
            seconds.append(profile.chain_costs(context, price))
            seconds.append(profile.round_seconds(0 * k + context, k, k[::-1], 1 + 9 * k, k, price, fed))
        seconds += [profile.first_draft_s(streams, context), profile.draft_s(streams, context)]
        seconds += [profile.verify_s(streams, tokens * streams, context) for tokens in (1, 3, 9)]
    return seconds


@settings(max_examples=120, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(KINDS)), seed=st.integers(0, 2**32))
def test_a_damaged_profile_is_refused_or_has_possible_prices(
    profile: Profile, tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "p.json"
    KINDS[kind](profile).save(path)
    path.write_text(damaged(path.read_text(), random.Random(seed)))
    try:
        loaded = Profile.load(path)
    except InputError as error:
        assert str(error).isprintable() and len(str(error)) < len(str(path)) + 250
        return
    loaded.save(path)
    assert Profile.load(path) == loaded
    for draw in (loaded, loaded.resampled(np.random.default_rng(0))):
        assert all((np.isfinite(s) & (np.asarray(s) >= 0)).all() for s in prices(draw))
