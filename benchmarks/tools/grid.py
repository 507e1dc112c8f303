"""Predicted speeds by draft length and batch size against two tables measured in vLLM on real GPUs (not in the repository).

    python benchmarks/tools/grid.py TABLES --acceptance acceptance.csv --check

For each drafter, the costs of its draft steps are fitted on two cells: the largest draft length at the smallest and at the
largest batch. The costs of the target are those of `profiles.json`. All other cells are predicted by the batch costs of a
profile that `specstop profile --from` builds of them. Acceptance is that of the largest draft length: by position in
`--acceptance` (workload, drafter, tokens of prompts, texts and caches, shares s1, s2, ...), else the geometric distribution
with the measured mean. Bars: median absolute error at most 4%, and the best predicted length is within 2% of the best
measured speed in at least 90% of the groups of cells.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq, least_squares
from specstop.policies.profile import Profile
from specstop.policies.profile_table import profile_from_table

TILE, KNEE, DEPTH = 128, 160, 7
"""Matrix products on the GH200 are padded to multiples of `TILE` tokens. From `KNEE` tokens on a call takes longer."""


@dataclass(frozen=True)
class Cells:
    """Cells of one workload, drafter and batch size: measured speed over plain decoding by draft length.

    Attributes:
        survival: [7] P(A >= k).
        plain, streams: texts decoded at once without and with the drafter; caches may hold fewer than were sent.
        context: mean tokens in the cache of a text. prompt: tokens of prompts read for each token of text.
    """

    drafter: str
    name: str
    batch: int
    speeds: Mapping[int, float]
    survival: np.ndarray
    plain: int
    streams: int
    context: float
    prompt: float

    def predict(self, profile: Profile, length: int) -> float:
        """Return the predicted speed over plain decoding of a draft length."""
        rates = []
        for streams, k in ((self.plain, 0), (self.streams, length)):
            tokens, drafted = 1.0 + self.survival[:k].sum(), np.full(streams, k)
            seconds = profile.batch_seconds(np.full(streams, self.context), drafted, drafted, 0 * drafted, 0.0)
            rates.append(streams * tokens / (seconds + streams * tokens * self.prompt * profile.prefill_s[1]))
        return rates[1] / rates[0]


def h100(folder: Path) -> tuple[list[Cells], list[str]]:
    """Return the cells of the H100 and the rows of its target."""
    cells: dict[tuple[str, int], dict[int, tuple[float, float]]] = {}
    for row in csv.DictReader((folder / "llama31_8b_eagle3_h100_speed_by_k.csv").open()):
        by_length = cells.setdefault((row["workload"], int(row["batch"])), {})
        by_length[int(row["K"])] = float(row["speedup"]), float(row["tokens_per_call"])
    groups = []
    for (name, batch), by_length in cells.items():
        most, powers = max(by_length), np.arange(1, max(by_length) + 1)
        mean = by_length[most][1] - 1.0
        chance = brentq(lambda a, mean=mean, powers=powers: (a**powers).sum() - mean, 1e-6, 1.0)
        speeds = {k: speed for k, (speed, _) in by_length.items()}
        groups.append(Cells("eagle3", name, batch, speeds, chance ** np.arange(1, 8), batch, batch, 200.0, 0.0))
    costs = _target(folder, "llama-3.1-8b-eagle-h100-vllm")
    fixed, token, cached = (costs["target_ms"][name] for name in ("fixed", "per_token", "per_kv_token"))
    rows = [f"target,,{n},,{fixed + token * n}" for n in (1, 1024)]
    return groups, [*rows, f"cache,,,,{cached}", f"outside,,,,{costs['outside_ms_per_step']}"]


def gh200(folder: Path, acceptance: Path) -> tuple[list[Cells], list[str]]:
    """Return the cells of the GH200 and the rows of its target."""
    texts = {(row["workload"], row["drafter"]): row for row in csv.DictReader(acceptance.open())}
    groups, caches = [], 469_840.0  # tokens without a drafter
    for row in csv.DictReader((folder / "apertus_8b_speed_by_k.csv").open()):
        text, batch = texts[row["workload"], row["drafter"]], int(row["concurrency"])
        prompt, length, cached = (float(text[name]) for name in ("prompt_tokens", "text_tokens", "cache_tokens"))
        plain, streams = (min(batch, int(tokens / (prompt + length))) for tokens in (caches, cached))
        speeds = {int(name[1:]): float(value) for name, value in row.items() if name[1:].isdigit()}
        survival = np.array([float(text[f"s{k}"]) for k in range(1, 8)])
        groups.append(Cells(row["drafter"], row["workload"], batch, speeds, survival, plain, streams,
                            prompt + length / 2, prompt / length))  # fmt: skip
    costs = _target(folder, "apertus-8b-dspark-eagle-gh200-vllm-0.23")["target_ms_short_context"]
    fixed, token = costs["32"], costs["then_per_token_above_160"]
    rows = [f"target,,1,,{fixed}"]
    for edge in range(TILE, 2049, TILE):  # a jump is two adjacent rows
        rows += [
            f"target,,{n},,{fixed + token * max(0, at - KNEE)}" for n, at in ((edge, edge), (edge + 1, edge + TILE))
        ]
    cached = _target(folder, "llama-3.1-8b-eagle-h100-vllm")["target_ms"]["per_kv_token"]
    return groups, [*rows, f"cache,,,,{cached}", "outside,,,,0.5", f"prefill,,1000,,{1000 * token}"]


def _target(folder: Path, name: str) -> dict[str, dict[str, float]]:
    profiles = json.loads((folder / "profiles.json").read_text())["profiles"]
    costs: dict[str, dict[str, float]] = next(one for one in profiles if one["name"] == name)
    return costs


def draft_costs(target: Sequence[str], groups: Sequence[Cells], folder: Path, ms: Sequence[float]) -> Profile:
    """Return the profile of a drafter with a block of constant time (dspark), or with equal steps.

    Args:
        target: rows of the target's calls.
        groups: cells of the drafter.
        folder: for the table.
        ms: of the block or of a step, and of a step for each request.
    """
    base, slope = ms
    sizes = sorted({size for one in groups for size in (one.plain, one.streams)})
    block, step = (base, 0.05) if groups[0].drafter == "dspark" else (0.0, base)
    drafts = [
        f"{part},{n},,,{more + step + slope * n}"
        for n in sizes
        for part, more in (("draft", 0.0), ("first draft", block))
    ]
    path = folder / "calls.csv"
    path.write_text("\n".join(["part,requests,tokens,context,ms", *target, *drafts]) + "\n")
    return profile_from_table(path, depth=DEPTH, batch=sizes)


def fit(build: Callable[[Sequence[float]], Profile], ends: Sequence[tuple[Cells, int]]) -> Profile:
    """Return the profile that predicts two cells."""

    def differences(ms: Sequence[float]) -> list[float]:
        profile = build(ms)
        return [float(np.log(one.predict(profile, k) / one.speeds[k])) for one, k in ends]

    # Profiles have whole nanoseconds, so that derivatives need steps above that.
    fitted = least_squares(differences, [1.0, 0.003], bounds=([0, 0], [9, 9]), diff_step=0.01, xtol=1e-4)
    return build(fitted.x)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with profiles.json and the tables of speeds")
    parser.add_argument("--acceptance", type=Path, required=True, help="CSV of the GH200's acceptance by position")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    options = parser.parse_args()
    errors, best = [], []
    for cells, target in (h100(options.data), gh200(options.data, options.acceptance)):
        for drafter in sorted({one.drafter for one in cells}):
            groups = [one for one in cells if one.drafter == drafter]
            first = [one for one in groups if one.name in ("chat", "gsm8k")]
            ends = [(one, max(one.speeds)) for one in (first[0], first[-1])]
            with tempfile.TemporaryDirectory() as name:
                build = functools.partial(draft_costs, target, groups, Path(name))
                costs = fit(build, ends)
            of_drafter = []
            for one in groups:
                speeds = {k: one.predict(costs, k) for k in one.speeds}
                of_drafter += [abs(speeds[k] / v - 1) for k, v in one.speeds.items() if (one, k) not in ends]
                best.append(one.speeds[max(speeds, key=speeds.__getitem__)] >= 0.98 * max(one.speeds.values()))
            errors += of_drafter
            right = f"best length within 2% in {sum(best[-len(groups) :])} of {len(groups)}"
            print(f"{drafter:<8} {len(of_drafter)} cells: median error {np.median(of_drafter):.2%}, {right}")
    error, share = float(np.median(errors)), float(np.mean(best))
    print(f"median absolute error {error:.2%} (at most 4%) in {len(errors)} cells; best length within 2% in {share:.1%} "
          f"of {len(best)} (at least 90%)")  # fmt: skip
    return int(options.check and not (error <= 0.04 and share >= 0.9))


if __name__ == "__main__":
    raise SystemExit(main())
