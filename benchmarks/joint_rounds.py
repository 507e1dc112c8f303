"""Live batches of policies that weigh their streams against each other, replayed round by round."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bars
from specstop.collect.prompts import Prompt, encode
from specstop.collect.run import collect
from specstop.decode import Pair
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import StopPolicy
from specstop.policies.profile import Profile
from specstop.policies.published.adaptive_verification import AdaptiveVerification
from specstop.policies.published.load import LoadLength
from specstop.policies.published.smartspec import SmartSpec
from specstop.policies.published.tetris import Tetris
from specstop.train.fit.run import train
from specstop.train.replay.arrivals import at_once
from specstop.train.replay.batch import COLUMNS, replay_batch
from specstop.train.replay.traces.arrays import trace_arrays

DEPTH = 6


def joint_rounds(
    pair: Pair, prompts: Sequence[Prompt], tokens: int, out: Path, options: argparse.Namespace, bars: Bars
) -> None:
    """Replay live traces of policies that weigh the streams of a batch against each other: each round as it was decoded."""
    ids = encode(prompts, pair.tokenizer, pair.readable - tokens)
    told: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": tokens, "depth": DEPTH}
    rough = Effort(repetitions=2)  # rounds are compared, not seconds
    profile = measure_profile(pair, ids[:4], depth=DEPTH, temperature=0.7, new_tokens=16, batch=(1, 4, 8), effort=rough)
    seen = collect(pair, prompts[:40], out / "seen", **told)
    policies: list[StopPolicy] = [
        LoadLength("1:6,4:4,8:2"), SmartSpec(profile=profile, max_depth=DEPTH), Tetris(2, 2),
        AdaptiveVerification(4, profile=profile), train(seen, profile, rule="batch").policy,
    ]  # fmt: skip
    least = 0 if options.quick else 10_000
    for policy in policies:
        for batch in (4, 8):
            total = wrong = 0
            for first in range(0, len(prompts), 2 * batch):  # so many are one run of the live collector
                folder = out / f"{policy.cost_name}-{batch}-{first}"
                some = compared(pair, prompts[first : first + 2 * batch], policy, profile, batch, told, folder)
                total, wrong = total + some[0], wrong + some[1]
            bars.add(
                f"rounds of {policy.name}, batch {batch}, replayed as live", total, wrong == 0 and total >= least,
                f"{total} rounds, {wrong} wrong; {least}, none wrong",
            )  # fmt: skip


def compared(
    pair: Pair, prompts: Sequence[Prompt], policy: StopPolicy, profile: Profile, batch: int, told: dict[str, Any], out: Path
) -> tuple[int, int]:  # fmt: skip
    """Return the rounds of a live batch, and how many of them and of its replay the other has not."""
    trace = collect(
        pair, prompts, out, collector="live", policy=policy, batch=batch, verification="match", shards=1, **told
    )  # fmt: skip
    arrays = trace_arrays(trace, extra=("sent",))
    assert arrays.drawn is not None
    made = replay_batch(arrays, policy, profile, batch, at_once(arrays.sequences))
    line = made.log[:, [COLUMNS.index(name) for name in ("request", "anchor", "drafted", "verified", "accepted")]]
    verified = arrays.extra["sent"].sum(1)
    counts = arrays.drawn.sum(1), verified, arrays.accepted.minimum(verified)
    live = np.stack([column.numpy() for column in (arrays.owner, arrays.every_anchor, *counts)], 1)
    return len(live), len(set(map(tuple, live.tolist())) ^ set(map(tuple, line.tolist())))
