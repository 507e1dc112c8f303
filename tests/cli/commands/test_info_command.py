"""`specstop info` on traces in which not every depth was observed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engine_records
import numpy as np
import pytest
from commands import cli
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.engines.vllm_records import import_vllm
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.contract import StopPolicy
from specstop.policies.fixed import Confidence, FixedLength
from specstop.train.evaluate.analysis import acceptance_bands
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.rounds import ROUND_COLUMNS
from specstop.train.replay.traces.arrays import trace_arrays

SETTINGS = {"depth": DEPTH, "temperature": 0.7, "verification": "match", "max_new_tokens": NEW}


def described(trace: Trace) -> dict[str, Any]:
    """Return what `info --json` says; the table must say the same."""
    answer = cli("info", trace.folder, "--json")
    assert answer.code == 0, answer.err
    facts: dict[str, Any] = json.loads(answer.out)
    cells = [[cell.strip() for cell in line.split("│")] for line in cli("info", trace.folder).out.splitlines()]
    for row in facts["acceptance"]:
        share = "-" if row["probability"] is None else f"{row['probability']:.3f}"
        assert ["", str(row["depth"]), share, str(row["positions"]), ""] in cells
    return facts


def live(pair: Pair, prompts: list[Prompt], folder: Path, policy: StopPolicy, explore: float) -> Trace:
    return collect(pair, prompts, folder, collector="live", policy=policy, explore=explore, **SETTINGS)


def test_a_run_that_explored_shows_the_acceptance_of_dense_traces(
    pair: Pair, prompts: list[Prompt], tmp_path: Path
) -> None:
    """At the anchors where it explored, as deep as nobody but them drafted."""
    trace = live(pair, prompts, tmp_path / "live", Confidence(0.6, DEPTH), 0.4)
    arrays, dense = (
        trace_arrays(trace, extra=ROUND_COLUMNS),
        trace_arrays(collect(pair, prompts, tmp_path / "dense", **SETTINGS)),
    )
    rows = (arrays.extra["explored"] & ~arrays.cut).numpy()
    of = dense.find(arrays.owner.numpy()[rows], arrays.every_anchor.numpy()[rows])
    expected = [float((dense.accepted.numpy()[of] >= k).mean()) for k in range(1, DEPTH + 1)]
    facts = described(trace)
    assert [row["probability"] for row in facts["acceptance"]] == pytest.approx(expected, abs=1e-3)
    assert facts["accepted length, mean"] == pytest.approx(sum(expected))
    assert "explored" in facts["note on acceptance"]
    bands = acceptance_bands(arrays, Resamples(arrays.clusters, 0))
    assert [band.value for band in bands] == pytest.approx(expected)
    assert all(band.low is not None and band.low <= band.value <= band.high for band in bands)


def test_depths_that_a_run_never_drafted_have_no_value(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    trace = live(pair, prompts, tmp_path / "live", FixedLength(2), 0.0)
    facts = described(trace)
    assert [row["probability"] is not None for row in facts["acceptance"]] == [k <= 2 for k in range(1, DEPTH + 1)]
    assert [row["positions"] for row in facts["acceptance"][2:]] == [0] * (DEPTH - 2)
    assert facts["accepted length, mean"] is None
    bands = acceptance_bands(trace_arrays(trace, extra=ROUND_COLUMNS), Resamples(trace_arrays(trace).clusters, 0))
    assert len(bands) == 2


@pytest.mark.parametrize(
    ("choose", "lengths", "known"),
    [
        (engine_records.fixed, "fixed", 6),
        (engine_records.by_confidence, "varied", 1),
    ],
)
@pytest.mark.filterwarnings("ignore:path. draft lengths")
def test_records_of_an_engine(tmp_path: Path, choose: Callable[..., Any], lengths: str, known: int) -> None:
    records, length = engine_records.simulated(choose, requests=100, rounds=60)
    trace = import_vllm(engine_records.write(tmp_path / "r.jsonl", records), tmp_path / "trace")
    facts = described(trace)
    assert (facts["temperature"], facts["draft lengths"]) == ("unknown", lengths)
    truth = [float((np.concatenate(length) >= k).mean()) for k in range(1, engine_records.DEPTH + 1)]
    for row, share in zip(facts["acceptance"], truth, strict=True):
        assert row["probability"] == (pytest.approx(share, rel=0.08) if row["depth"] <= known else None)
    assert (facts["accepted length, mean"] is None) == (lengths == "varied")
