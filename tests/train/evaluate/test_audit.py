"""Six ways in which evaluations of draft lengths go wrong, and how each is noticed.

The list is that of Jella et al., "Following the Speedup: An Audit of Adaptive Draft Length in Speculative Decoding"
(pramodjella/speculative-decoding-draft-length-audit, docs/CANONICAL.md and paper/paper.tex, table of failure modes).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from specstop.collect.engines.records import import_records
from specstop.collect.schema import Header
from specstop.collect.store import Trace
from specstop.decode.benchmark import run_alternating
from specstop.policies.errors import SpecstopWarning, TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.measurements import measure_noise
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.pricing import ProfileBootstrap
from specstop.train.export.basis import Basis
from specstop.train.heads.rows import split_prompts
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.checks import warn_other_rounds
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from timed import timed_profile

DEPTH = 5


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Records of 24 requests in four categories, one after the other."""
    folder, generator = tmp_path_factory.mktemp("records"), np.random.default_rng(0)
    rows = []
    for at in range(24):
        steps = (generator.random((40, DEPTH)) < 0.5 + 0.1 * (at // 6)).cumprod(1).sum(1).tolist()
        rows.append({"id": f"category {at // 6}, request {at}", "num_spec_tokens": DEPTH, "per_step_accepted": steps})
    (folder / "r.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return import_records(folder / "r.jsonl", folder / "trace")


def header(**changes: Any) -> Header:
    values: dict[str, Any] = {"verification": "rejection", "temperature": 0.7, "topology": (-1, 0), **changes}
    values |= {"target": "", "draft": "", "pair": {}, "vocabulary": 8, "eos": (), "prompts_hash": ""}
    return Header(features=(), anchor_features=(), max_new_tokens=9, seed=0, shards=1, prompts=1, **values)


def test_1_a_simulation_of_another_mechanism_is_refused(profile: Profile) -> None:
    """A chain model must not judge an engine of trees, nor costs of one verification the rounds of another."""
    tree = SimpleNamespace(header=header(topology=(-1, -1, 0)), folder=Path())
    with pytest.warns(SpecstopWarning, match="rounds of the verification match"):
        warn_other_rounds(dataclasses.replace(profile, verification="match"), header())
    with pytest.MonkeyPatch.context() as patch:
        arrays = SimpleNamespace(tree=tree.header.tree, header=tree.header)
        patch.setattr("specstop.train.export.basis.trace_arrays", lambda trace, extra: arrays)
        with pytest.raises(TraceError, match="engines draft chains"):
            Basis(cast(Trace, tree), profile)


def test_2_a_split_does_not_follow_the_order_of_the_prompts(records: Trace) -> None:
    """A contiguous split of a suite that is sorted by category has other categories on each side."""
    arrays = trace_arrays(records)
    rest, held = split_prompts(arrays, 0.5, 0)
    categories = [{arrays.clusters[at].partition(",")[0] for at in side} for side in (rest, held)]
    assert len(rest) == len(held) == 12 and min(map(len, categories)) >= 3


class _Machine:
    """A machine that becomes slower with each text that it decodes."""

    def __init__(self) -> None:
        self.pace = 1.0

    def method(self, seconds: float) -> Any:
        def run(requests: Sequence[Any]) -> list[Any]:
            texts = []
            for _ in requests:
                self.pace *= 1.01
                texts.append(SimpleNamespace(seconds=seconds * self.pace))
            return texts

        return SimpleNamespace(run=run)


def test_3_methods_are_timed_in_alternation() -> None:
    """Timed one after the other, a method that is 5% faster seems slower on a machine that drifts; in turns it does not."""
    prompts = [(str(at), [1]) for at in range(40)]
    machine, blocks = _Machine(), []
    for seconds in (1.0, 0.95):
        blocks.append(sum(text.seconds for text in machine.method(seconds).run(prompts)))
    assert blocks[1] > blocks[0]
    machine = _Machine()
    texts = run_alternating([machine.method(1.0), machine.method(0.95)], prompts)
    first, second = (sum(cast(Any, text).seconds for text in one) for one in texts)
    assert second / first == pytest.approx(0.95, abs=0.005)


@pytest.mark.usefixtures("few_draws")
def test_4_a_change_of_pace_within_a_measurement_is_reported(records: Trace, profile: Profile) -> None:
    """A step of 16% widens the intervals, and the report warns of it."""
    quiet, step = (timed_profile(profile, paces=[1.0] * 6 + [after] * 6) for after in (1.0, 1.16))
    assert not quiet.noise.is_noisy and step.noise.is_noisy  # type: ignore[union-attr]
    assert any("the slowest repetition" in text for text in step.noise.reasons)  # type: ignore[union-attr]
    assert measure_noise(step.measurements).block > 1  # type: ignore[union-attr]
    spread = [np.std([one.low.verify_s[0] for one in ProfileBootstrap(p, count=50).profiles]) for p in (quiet, step)]
    assert spread[1] > 10 * spread[0] + 1e-5
    assert any("this machine was busy" in text for text in evaluate(records, step, ["fixed:2"]).findings)


def test_5_every_line_of_a_report_says_what_was_drafted(records: Trace, profile: Profile) -> None:
    """A setting without an effect shows in the counts: they are those of the rounds, not of the settings."""
    arrays = trace_arrays(records, extra=ROUND_COLUMNS)
    rounds = [evaluate_rounds(arrays, FixedLength(k), profile) for k in range(DEPTH + 1)]
    for k, one in enumerate(rounds):
        assert set(one.drafted.tolist()) == set(one.verified.tolist()) == {k}
    tokens = [float(one.committed.mean()) for one in rounds]
    assert tokens == sorted(set(tokens)), "lengths that draft differently commit differently"


def test_6_a_shorter_draft_is_not_charged_for_a_padded_one(profile: Profile) -> None:
    """A fixed length costs a verification of its tokens; it is padded only to a size that is cheaper."""
    one = np.ones(1, dtype=np.int64)
    for k, verified in ((1, 1), (2, 2), (3, 3), (4, 5)):  # five tokens are cheaper than four
        expected = profile.low.verify_s[verified] + profile.low.draft_s[0] * k + profile.step_s * k + profile.round_s
        seconds = profile.round_seconds(one * profile.low.context, one * k, one * k, one, 0 * one, 0.0)
        assert seconds[0] == pytest.approx(expected)
