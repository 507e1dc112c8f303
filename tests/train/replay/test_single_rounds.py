"""Single rounds of a live trace: expectations or outcomes of the recorded rounds, and what they cannot show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair
from specstop.policies.errors import TraceError
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import TraceArrays, trace_arrays
from specstop.train.replay.run import replay
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds

SENT = 2


@pytest.fixture(scope="module")
def rejected(
    pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory
) -> dict[str | None, TraceArrays]:
    options = {"temperature": 0.7, "max_new_tokens": NEW, "collector": "live", "verification": "rejection"}
    made: dict[str | None, TraceArrays] = {}
    for tree in (None, "2,2,1"):
        folder: Path = tmp_path_factory.mktemp("rejected")
        made[tree] = trace_arrays(collect(pair, prompts, folder, depth=4, tree=tree, **options), extra=ROUND_COLUMNS)
    return made


def test_single_rounds_are_expectations_over_the_stored_probabilities(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected[None]
    rows = [i for i in range(len(arrays.cut)) if not arrays.cut[i]]
    for k in (0, 1, 3):
        found = evaluate_rounds(arrays, FixedLength(k), profile)
        expected = []
        for i in rows:
            p, q = arrays.extra["target_prob"][i], arrays.extra["draft_prob"][i]
            chances = (p / q).clamp(max=1.0).tolist()
            expected.append(
                1 + sum(float(torch.tensor(chances[:j], dtype=torch.float64).prod()) for j in range(1, k + 1))
            )
        assert sorted(found.committed.tolist()) == pytest.approx(sorted(expected), rel=1e-5)
        assert (found.drafted == k).all()
        assert len(found.committed) == len(rows) > 30
    whole = evaluate_rounds(arrays, FixedLength(4), profile)
    drawn = (arrays.accepted[~arrays.cut].double() + 1).mean()
    assert float(whole.committed.mean()) == pytest.approx(float(drawn), rel=0.15)
    assert any("other anchors" in text for text in whole.caveats)
    assert any("expectation" in text for text in whole.caveats)


def test_single_rounds_of_trees_are_as_they_were_drawn(
    rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    arrays = rejected["2,2,1"]
    found = evaluate_rounds(arrays, FixedLength(3), profile)
    assert float(found.committed.sum()) == float((arrays.accepted[~arrays.cut] + 1).sum())
    assert any("as it was drawn" in text for text in found.caveats)
    early = evaluate_rounds(arrays, Confidence(0.5, 3), profile)
    assert early.committed.sum() < found.committed.sum()
    assert early.seconds.sum() < found.seconds.sum()


def test_a_rejection_trace_is_not_replayed_and_a_dense_one_has_no_single_rounds(
    traces: dict[float, Trace], rejected: dict[str | None, TraceArrays], profile: Profile
) -> None:
    with pytest.raises(TraceError, match="depends on the policy"):
        replay(rejected[None], FixedLength(2), profile)
    with pytest.raises(TraceError, match="live traces"):
        evaluate_rounds(trace_arrays(traces[0.7]), FixedLength(2), profile)


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_tokens_that_were_drafted_and_not_sent_are_no_rejections(
    pair: Pair, prompts: list[Prompt], profile: Profile, tmp_path: Path, verification: str
) -> None:
    settings = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "verification": verification}
    trace = collect(pair, prompts, tmp_path / "live", collector="live", policy=FixedLength(DEPTH), **settings)
    whole = trace_arrays(trace, extra=ROUND_COLUMNS)
    assert whole.drawn is not None and int(whole.accepted.max()) > SENT
    # As if the policy had trimmed every draft to two tokens before it was sent.
    extra = {name: values.clone() for name, values in whole.extra.items()}
    for name in ("sent", "observed", "target_prob"):
        extra[name][:, SENT:] = 0
    path = whole.accepted_nodes().clone()
    path[:, SENT:] = False
    trimmed = dataclasses.replace(whole, extra=extra, path=path, accepted=path.sum(1))
    for k in range(SENT + 1):
        values = [evaluate_rounds(arrays, FixedLength(k), profile) for arrays in (whole, trimmed)]
        assert values[0].committed.tolist() == values[1].committed.tolist()
    with pytest.raises(
        TraceError, match=f"fixed:{SENT + 1} verifies tokens that fixed:{DEPTH} drafted and did not send"
    ):
        evaluate_rounds(trimmed, FixedLength(SENT + 1), profile)
