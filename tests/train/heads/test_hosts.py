"""`train --for`: a policy of an engine reads what that engine hands over, and learns from what acceptance is there."""

from __future__ import annotations

import dataclasses

import pytest
from specstop.collect.store import Trace
from specstop.decode.engines.settings import check_engine_policy
from specstop.policies.errors import InputError, TraceError
from specstop.policies.profile import Profile
from specstop.train import train


def labelled(trace: Trace, label: str) -> Trace:
    """Return the trace as if its labels were of another kind."""
    return Trace(trace.folder, dataclasses.replace(trace.header, label=label), trace.rows)


def test_a_policy_for_vllm_reads_what_vllm_knows(traces: dict[float, Trace], profile: Profile) -> None:
    """Of greedy traces the usual features; where the traces were sampled the draft's own rows stand in for noise."""
    greedy = train(traces[0.0], profile, host="vllm", folds=2, cross_fit=False).policy
    assert greedy.features == train(traces[0.0], profile, folds=2, cross_fit=False).policy.features
    sampled = train(labelled(traces[0.7], "point"), profile, host="vllm", folds=2, cross_fit=False).policy
    assert "noisy_margin" not in sampled.features and {"margin", "entropy", "top1"} <= set(sampled.features)
    for policy in (greedy, sampled):
        assert check_engine_policy(policy) is policy and policy.hidden == ()


@pytest.mark.parametrize(
    ("temperature", "options", "error", "message"),
    [
        (0.0, {"host": "vlm"}, InputError, "host: expected vllm, not 'vlm' .did you mean 'vllm'"),
        (0.0, {"features": ["top1", "anchor_entropy"]}, InputError, "host vllm: anchor_entropy cannot be read there"),
        (0.0, {"hidden": ["draft_hidden"]}, InputError, "host vllm: draft_hidden cannot be read there"),
        (0.0, {"head": "specdec"}, InputError, "host vllm: draft_hidden cannot be read there"),
        (0.0, {"rule": "gain"}, InputError, "rule gain: expected one trace of trees; leave out .*`host`"),
        (0.7, {}, TraceError, "has labels 'match' at temperature 0.7"),
    ],
)
def test_what_it_could_not_do_there_is_refused(
    traces: dict[float, Trace], profile: Profile, temperature: float, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        train(traces[temperature], profile, **{"host": "vllm", **options})


def test_noise_that_was_asked_for_is_refused_at_temperatures_above_0(
    traces: dict[float, Trace], profile: Profile
) -> None:
    with pytest.raises(InputError, match="noisy_margin cannot be read there"):
        train(labelled(traces[0.7], "point"), profile, host="vllm", features=["top1", "noisy_margin"])
