"""Batches: rounds of joint policies, policies by batch size, live speed and memory.

    python benchmarks/batch.py --check
    python benchmarks/batch.py --part sizes live

Texts of a batch are compared with the same texts alone in `exactness.py --part texts`.

- `rounds`: policies that decide about the streams of a batch together decode live in batches of 4 and 8. Replay of
  the batch has the same rounds, except for ties (at most 1 round in 2,000).
- `sizes`: the policy of rule `batch`, one stream's rule and published policies replayed at each batch size, with the
  costs of this machine and of a machine like a GPU. The policy of rule `batch` has at least 0.99 of the best fixed
  length of each size, and at least 0.99 of plain decoding.
- `live`: the same policy decodes in alternation with the best fixed length and with plain decoding. It is not slower
  than plain decoding at any size, and the best fixed length of batch 8 has at least 2.5 times the tokens/s of that of
  batch 1.
- `memory`: 16 streams of 1,024 tokens take at most 32 MiB more at the end than after 50 rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from gpu import scripted_pair
from harness import MAX_TIES, Run
from specstop.decode import Generation, Tally, stream_key
from specstop.decode.benchmark import run_alternating, speed_ratio, texts_per_turn
from specstop.decode.loop import Request
from specstop.decode.profile.measuring import Effort
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.batch import arrive_at_once, replay_batch

import specstop as ss

DEPTH, SIZES = 6, (1, 4, 8, 32)
JOINT = ("tetris:2?extra=2", "adaptive-verification:4", "smartspec", "load?table=1:6,4:4,8:2")
CUDA_GRAPH = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 4097, 32))
"""Tokens of the verifications that a GPU has recorded; others are padded to the next of them."""

FLAT, STEP_S, DRAFT, OUTSIDE_S = 64, 0.010, 0.12, (3e-4, 5e-6, 2e-6)
"""Tokens up to which a verification costs the same, its seconds, the share of a draft step, seconds outside of models."""

LEAST, FASTER, MIB = 0.99, 2.5, 32.0


def gpu_profile(sizes: Sequence[int]) -> ss.Profile:
    """Return the costs of a machine with calls that are flat up to 64 tokens and then linear, in steps of recorded sizes."""

    def call(tokens: int) -> float:
        return STEP_S * max(1.0, next(size for size in CUDA_GRAPH if size >= tokens) / FLAT)

    def points(least: int, most: int) -> tuple[tuple[int, float], ...]:
        edges = {least, most, *(n for size in CUDA_GRAPH for n in (size, size + 1) if least <= n <= most)}
        return tuple((n, call(n)) for n in sorted(edges))

    drafts = tuple((n, DRAFT * seconds) for n, seconds in points(1, max(sizes)))
    low = BatchTable(1.0, drafts, {size: points(size, size * (DEPTH + 1)) for size in sizes})
    alone = CostTable(1.0, (DRAFT * STEP_S,) * 2, 0.0, tuple(call(n + 1) for n in range(DEPTH + 1)))
    return ss.Profile(
        alone, dataclasses.replace(alone, context=1000.0), OUTSIDE_S[2], OUTSIDE_S[0] + OUTSIDE_S[1], (5e-3, 1e-5),
        facts={"device": "like a GPU"}, batch=BatchCosts(low, dataclasses.replace(low, context=1000.0)),
    )  # fmt: skip


class Setup:
    """Traces, costs and the policy of rule `batch`."""

    def __init__(self, run: Run) -> None:
        self.sizes, counts = run.choose(SIZES, (1, 2)), run.choose({"train": 160, "test": 40}, {"train": 5, "test": 4})
        self.settings = ss.Settings(0.7, run.choose(128, 8), DEPTH, verification="match")
        self.prompts = run.encoded("test", counts["test"])
        options = {"temperature": 0.7, "max_new_tokens": self.settings.max_new_tokens, "depth": DEPTH}
        self.traces = run.traces("traces", counts, **options)
        self.profile = run.profile(
            prompts=counts["train"], depth=DEPTH, temperature=0.7, batch=self.sizes,
            effort=run.choose(Effort(budget_s=240.0), run.effort),
        )  # fmt: skip
        for _ in range(run.choose(2, 1)):  # the second fit knows the price of the decisions of the first one
            self.policy = self.train(self.profile)
            self.profile = run.with_decisions(self.profile, [self.policy], self.settings)

    def train(self, profile: ss.Profile) -> ss.StopPolicy:
        """Return the policy of rule `batch` for other costs."""
        return ss.train(self.traces["train"], profile, head="logistic", rule="batch", name="batch").policy


@functools.cache
def prepare(run: Run) -> Setup:
    """Return the setup of a run, which its parts share."""
    return Setup(run)


def rounds(run: Run) -> None:
    """Compare live batches with their replay."""
    setup = prepare(run)
    arrays = trace_arrays(setup.traces["test"])
    requests = [Request(ids, stream_key(0, name)) for name, ids in setup.prompts]
    for policy in (*(ss.load_policy(spec).limited(DEPTH).with_costs(setup.profile) for spec in JOINT), setup.policy):
        for size in {4, 8} & set(setup.sizes) or {setup.sizes[-1]}:
            texts = ss.Speculator(run.pair, policy, setup.settings, setup.profile, batch=size).run(requests)
            replayed = replay_batch(arrays, policy, setup.profile, size, arrive_at_once(len(requests)))
            names = ("sequence", "anchor", "drafted", "verified", "accepted")
            predicted = set(zip(*(getattr(replayed, name).tolist() for name in names), strict=True))
            live = {
                (at, r.anchor, r.drafted, r.verified, r.accepted) for at, text in enumerate(texts) for r in text.rounds
            }
            name = f"{policy.name}, batch {size}: rounds that differ"
            run.bar(
                name, len(live - predicted), at_most=max(1, MAX_TIES * len(live)), always=True, note=f"of {len(live)}"
            )


def sizes(run: Run) -> None:
    """Replay policies at each batch size."""
    setup = prepare(run)
    profiles = {"this machine": setup.profile, "like a GPU": gpu_profile(setup.sizes)}
    for machine in run.choose(profiles, ["like a GPU"]):
        profile = profiles[machine]
        joint = setup.policy if profile is setup.profile else setup.train(profile)
        single = ss.train(setup.traces["train"], profile, head="logistic", name="one-stream").policy
        specs = run.choose(JOINT, JOINT[:1])
        policies = [joint, single, *(ss.load_policy(spec).limited(DEPTH).with_costs(profile) for spec in specs)]
        report = ss.evaluate(setup.traces["test"], profile, policies, batch=setup.sizes, achievable=not run.smoke)
        by_size = report.details["batch"]
        for line in by_size["lines"]:
            for size, ratio in zip(by_size["sizes"], line["to_best_fixed"], strict=True):
                interval = "" if ratio["low"] is None else f"[{ratio['low']:.3f}, {ratio['high']:.3f}]"
                run.row(f"{machine}, batch {size}, {line['name']}: of best fixed", float(ratio["value"]), interval)
            if line["name"] == joint.shown_name:
                least = min(ratio["value"] for ratio in line["to_best_fixed"])
                plain = min(rate / base for rate, base in zip(line["tokens_per_s"], by_size["plain"], strict=True))
                run.bar(f"{machine}: rule batch over best fixed, least", least, at_least=LEAST)
                run.bar(f"{machine}: rule batch over plain decoding, least", plain, at_least=LEAST)


def live(run: Run) -> None:
    """Decode batches in alternation."""
    setup = prepare(run)
    rates = {}
    for size in run.choose(setup.sizes, setup.sizes[-1:]):
        turn = texts_per_turn(size)
        count = run.choose(max(turn * (8 if size <= 8 else 4), 16), turn)  # with 8 turns there is an interval
        prompts = (setup.prompts * -(-count // len(setup.prompts)))[:count]
        fixed = [ss.load_policy(f"fixed:{k}") for k in run.choose((0, 1, 2, 4), (0, 2))]
        methods = [
            ss.Speculator(run.pair, policy, setup.settings, setup.profile, batch=size)
            for policy in (*fixed, setup.policy)
        ]
        texts = run_alternating(methods, prompts, batch=size)
        best = max(range(1, len(fixed)), key=lambda at: _rate(texts[at]))
        rates[size] = _rate(texts[best])
        plain = speed_ratio(texts[-1], texts[0], turn)
        note = f"{_rate(texts[-1]):.1f} tokens/s"
        run.row(f"batch {size}: rule batch over {fixed[best].name}", speed_ratio(texts[-1], texts[best], turn), note)
        high = plain.value if plain.high is None else plain.high
        run.bar(f"batch {size}: end of the interval of rule batch over plain", high, at_least=1.0, note=plain.text())
    if 8 in rates and 1 in rates:
        run.bar("best fixed length, batch 8 over batch 1", rates[8] / rates[1], at_least=FASTER)


def _rate(texts: Sequence[Generation]) -> float:
    return Tally(texts).tokens_per_s


def memory(run: Run) -> None:
    """Decode 16 long streams and compare the memory early and late."""
    pair, _ = scripted_pair(("tiny target", "tiny draft"), "cpu", torch.float32, 1200, 0.6)
    used: list[int] = []
    speculator = ss.Speculator(pair, ss.load_policy("fixed:2"), ss.Settings(0.0, run.choose(1024, 64)), batch=16)

    def record(stream: int, new: list[int]) -> None:
        if stream == 0:
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    speculator.run([Request([5 + at, 7]) for at in range(16)] * 2, record)
    grown = float(np.median(used[-20:]) - np.median(used[40:60])) / 2**20
    run.bar("memory of 16 streams, late over early, MiB", grown, at_most=MIB)


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [rounds, sizes, live, memory]).execute())
