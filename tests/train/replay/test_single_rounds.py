"""Single rounds of a live trace: what was drafted and not verified has no outcome."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import NEW
from contract_policies import DEPTH
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import Pair
from specstop.policies.errors import TraceError
from specstop.policies.fixed import FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.single_rounds import ROUND_COLUMNS, evaluate_rounds
from specstop.train.replay.arrays import trace_arrays

SENT = 2


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
