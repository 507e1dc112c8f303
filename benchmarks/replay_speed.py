"""Replay on made-up traces: as fast and as small as it has to be.

    python benchmarks/replay_speed.py --check

The last line is one JSON object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import NO_PAIR, Bars, arguments
from specstop.collect.schema import Header, arrow_schema, parents
from specstop.collect.store import load_trace, open_for_writing, write_shard
from specstop.decode.topology import chain
from specstop.policies.costs import CostTable
from specstop.policies.heads.base import Head
from specstop.policies.heads.layers import LinearHead
from specstop.policies.heads.tables import TreesHead
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.profile import Profile
from specstop.policies.rules import Threshold
from specstop.train.replay.run import replay, replay_many
from specstop.train.replay.traces.arrays import trace_arrays

TREES, TREE_DEPTH = 150, 4
"""Of a boosted policy, as `train` fits them."""

NAMES = ("mean_accepted", "mean_full", "last_accepted", "top1", "noisy_margin", "depth")

CHILD = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from replay_speed import learned, synthetic_profile, peak_kib
from specstop.collect.store import load_trace
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.replay.run import replay
policy = learned(0.4)
arrays = trace_arrays(load_trace(sys.argv[1]), policy.features)
played = replay(arrays, policy, synthetic_profile())
print(len(played.log), peak_kib())
"""


def peak_kib() -> int:
    """Return this process's peak memory; `getrusage` begins a child with the peak of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__, NO_PAIR).parse_args()
    bars = Bars()
    with tempfile.TemporaryDirectory() as out:
        speed(Path(out), options.quick, bars)
    return bars.finish(options, "replay of one policy, of many thresholds, and of a large trace")


def learned(threshold: float) -> LearnedPolicy:
    """Return a logistic policy with made-up weights that draws about as many tokens as a trained one."""
    return _logistic().with_rule(Threshold("survival", threshold))


@cache
def _logistic() -> LearnedPolicy:
    """Return the one policy: others differ from it in their thresholds alone."""
    generator = torch.Generator().manual_seed(1)
    width = len(NAMES) + 2
    weight = 0.4 * torch.randn(3, width, generator=generator).numpy()
    bias = np.ones(3, dtype=np.float32)
    mean, scale = np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32)
    return _policy(LinearHead(NAMES, {"mean": mean, "scale": scale, "weight": weight, "bias": bias}))


def boosted() -> LearnedPolicy:
    """Return a policy of two ensembles of made-up trees, as many as a trained one has."""
    chance, inner = np.random.default_rng(1), (2, TREES, 2**TREE_DEPTH - 1)
    tensors = {
        "feature": chance.integers(0, len(NAMES), inner),
        "threshold": chance.random(inner, dtype=np.float32),
        "missing_left": np.ones(inner, dtype=bool),
        "leaf": 0.1 * chance.standard_normal((2, TREES, 2**TREE_DEPTH), dtype=np.float32),
        "base": np.ones(2, dtype=np.float32),
    }
    return _policy(TreesHead(NAMES, tensors)).with_rule(Threshold("survival", 0.4))


def _policy(head: Head) -> LearnedPolicy:
    calibrator = Calibrator("temperature", 1.3)
    return LearnedPolicy(head.kind, NAMES, head, calibrator, calibrator, Threshold("survival", 0.5), 12)


def synthetic_profile() -> Profile:
    """Return costs of no machine, to depth 12."""
    table = CostTable(8.0, (1e-3, 1.1e-3), 2e-5, tuple(4e-3 + 1e-4 * n for n in range(13)))
    return Profile(
        table,
        CostTable(400.0, (2e-3, 2.1e-3), 2e-5, tuple(6e-3 + 1e-4 * n for n in range(13))),
        3e-5,
        2e-4,
        (5e-3, 1e-4),
    )


def write_trace(folder: Path, texts: int, length: int) -> Path:
    """Write a trace of `texts` texts of `length` anchors at depth 12, made up."""
    features = ("top1", "noisy_margin", "drawn_prob", "entropy", "depth")
    header = Header(
        "", "", {}, 99, (5,), 0.7, parents(chain(12)), features, ("anchor_top1",), length + 1, 0, 4, texts, ""
    )  # fmt: skip
    open_for_writing(folder, header)
    chance = np.random.default_rng(0)
    columns = arrow_schema(header)
    for shard in range(4):
        chunks = []
        for text in range(shard, texts, 4):
            anchor = np.arange(1, length + 1)
            accepted = np.minimum(np.minimum(chance.geometric(0.3, length) - 1, 12), length + 1 - anchor)
            values: dict[str, Any] = {
                "prompt_id": [f"p{text}"] * length,
                **dict.fromkeys(("sample", "text_hash", "group"), [""] * length),
            }
            node = np.arange(12)
            known = {
                "sequence": np.full(length, text), "prompt_tokens": np.full(length, 60),
                "text_tokens": np.full(length, length + 1), "anchor": anchor, "accepted_length": accepted,
                "cut": anchor + 12 > length + 1, "accepted": node < accepted[:, None],
                "observed": node <= accepted[:, None], "tokens": chance.integers(6, 99, (length, 12)),
            }  # fmt: skip
            values |= known
            for name in columns.names:
                if name not in values:
                    wide = name != "anchor_top1"
                    values[name] = chance.random((length, 12) if wide else length, dtype=np.float32)
            chunks.append(values)
        write_shard(folder, header, shard, chunks)
    return folder


def speed(out: Path, quick: bool, bars: Bars) -> None:
    """Measure rounds a second, a sweep of thresholds, and the memory of a large trace."""
    torch.set_num_threads(1)  # one core does: more threads cost small tensors more than they bring
    small = write_trace(out / "small", 200, 127)
    arrays = trace_arrays(load_trace(small), NAMES)
    profile = synthetic_profile()
    for policy in (learned(0.4), boosted()):
        replay(arrays, policy, profile)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            rounds = len(replay(arrays, policy, profile).log)
            times.append(time.perf_counter() - begin)
        alone = rounds / float(np.median(times))
        name = f"rounds a second, one {policy.name} policy on 200 prompts"
        bars.figures[name] = alone
        print(f"      {name}: {alone:,.0f}")
    count = 50 if quick else 1000
    begin = time.perf_counter()
    many = replay_many(arrays, [learned(at / count) for at in range(count)], profile)
    spent = time.perf_counter() - begin
    bars.add("seconds for 1,000 thresholds on 200 prompts", spent, spent <= 60, f"{spent:.1f} for {count}; at most 60")
    total = sum(len(played.log) for played in many)
    bars.add(
        "rounds a second, logistic policies on chains",
        total / spent,
        total / spent >= 1e5,
        f"{total / spent:,.0f}; at least 100,000",
    )
    rows = 20_000 if quick else 1_000_000
    large = write_trace(out / "large", rows // 125, 125)
    command = [sys.executable, "-c", CHILD, str(large), str(Path(__file__).parent)]
    done = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    peak = int(done[1]) / 1024
    bars.add(
        f"peak memory of replaying {rows:,} rows, MiB",
        peak,
        peak <= 768,
        f"{peak:.0f}, {done[0]} rounds; at most 768",
    )


if __name__ == "__main__":
    sys.exit(main())
