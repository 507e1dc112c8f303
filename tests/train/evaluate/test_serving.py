"""Settings of a server: lengths by batch and context against closed forms, and from which load drafting is off."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from specstop.collect.engines.records import import_records
from specstop.collect.store import Trace
from specstop.policies.profile import Profile
from specstop.policies.profile_table import profile_from_table
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.serving import Setting, off_from, round_seconds

SIZES, CONTEXTS, DEPTH = (1, 4, 16, 64), (256, 4096), 3


def call_ms(requests: int, tokens: int, context: float) -> float:
    """Flat up to 32 tokens, then linear; caches cost by their tokens."""
    return 10.0 + 0.2 * max(0, tokens - 32) + 2e-5 * requests * context


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    rows = ["part,requests,tokens,context,ms", *(f"draft,{size},,,{1 + size / 64}" for size in SIZES)]
    for size, context in itertools.product(SIZES, CONTEXTS):
        counts = sorted({size * k for k in range(1, DEPTH + 2)} | ({32} if size <= 32 < size * (DEPTH + 1) else set()))
        rows += [f"target,{size},{n},{context},{call_ms(size, n, context)}" for n in counts]
    path = tmp_path_factory.mktemp("table") / "calls.csv"
    path.write_text("\n".join(rows) + "\n")
    return profile_from_table(path, depth=DEPTH)


@pytest.fixture(scope="module")
def accepted() -> np.ndarray:
    chance = np.random.default_rng(0).beta(4.0, 2.0, (40, 1, 1))
    return (np.random.default_rng(1).random((40, 30, DEPTH)) < chance).cumprod(2).sum(2)  # [requests, steps]


@pytest.fixture(scope="module")
def records(accepted: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    folder = tmp_path_factory.mktemp("records")
    steps = {f"r{at}": [*of_text.tolist(), 0] for at, of_text in enumerate(accepted)}
    rows = [{"id": name, "num_spec_tokens": DEPTH, "per_step_accepted": counts} for name, counts in steps.items()]
    (folder / "r.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return import_records(folder / "r.jsonl", folder / "trace")


@pytest.mark.usefixtures("few_draws")
def test_lengths_and_gains_are_those_of_the_closed_form(
    records: Trace, accepted: np.ndarray, profile: Profile, tmp_path: Path
) -> None:
    report = evaluate(records, profile, ["fixed:2"], out=tmp_path / "report")
    rows = report.details["serving"]["rows"]
    assert [(size, context) for size, context, *_ in rows] == [(n, c) for c in CONTEXTS for n in SIZES]
    tokens = np.array([1.0 + np.minimum(accepted, k).mean() for k in range(DEPTH + 1)])
    for size, context, length, ratio, headroom in rows:
        ms = [call_ms(size, size * (k + 1), context) + k * (1 + size / 64) for k in range(DEPTH + 1)]
        assert round_seconds(profile, size, context, DEPTH) * 1e3 == pytest.approx(ms, rel=1e-5)
        speeds = tokens * ms[0] / ms
        assert length == speeds.argmax()
        assert (
            ratio["value"] == pytest.approx(max(speeds), rel=1e-5) and ratio["low"] <= ratio["value"] <= ratio["high"]
        )
        assert headroom >= 1.0
    best = {context: [row[2] for row in rows if row[1] == context] for context in CONTEXTS}
    assert best[256][0] > best[256][-1] == 0 and best[4096][-1] >= best[256][-1]
    assert "drafting pays below a batch of 64" in report.details["serving"]["text"]
    assert "Settings of a server" in (tmp_path / "report" / "report.md").read_text()


def row(batch: int, length: int, low: float) -> Setting:
    to_plain = {"value": low + 0.1, "low": low, "high": low + 0.2}
    return Setting(batch=batch, context=0, length=length, to_plain=to_plain, headroom=1.0)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(1, 3, 1.2), row(8, 1, 1.01)], None),
        ([row(1, 3, 1.2), row(8, 1, 0.99)], 8),
        ([row(1, 3, 1.2), row(8, 0, 1.0), row(16, 0, 1.0)], 8),
        ([row(1, 3, 1.2), row(8, 0, 1.0), row(16, 1, 1.1)], None),
        ([row(1, 0, 1.0), row(8, 0, 1.0)], 1),
    ],
)  # fmt: skip
def test_drafting_is_off_from_the_batch_at_which_it_no_longer_gains(rows: list[Setting], expected: int | None) -> None:
    assert off_from(rows) == {0: expected}
