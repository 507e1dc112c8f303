"""The bars of the whole pipeline, measured in one run: equality, replay against live, prediction, gain, cost of collecting.

    python benchmarks/slice.py --check
    python benchmarks/slice.py --quick

Without `--pair` the shipped pair is used. The last line printed is one JSON object; with `--check` the exit code is 1
where a bar falls short.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from pairs import effort, pair_folder
from specstop.cli.output import progress_bars
from specstop.collect.dense.collector import Unroller, dense_rows
from specstop.collect.work import Work
from specstop.decode import Generation, Settings, load_pair, plain_texts, stream_key
from specstop.decode.benchmark import run_alternating
from specstop.decode.loop import Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.profile.measuring import Effort
from specstop.decode.verify.noise import gumbel, match_scores
from specstop.policies import Confidence, DraftStep, FixedLength, StopPolicy
from specstop.policies.files import prepare_output_dir, staged_folder
from specstop.train.demo.demo import Offline, run_offline
from specstop.train.demo.live import compare_live
from specstop.train.demo.resume import Sizes
from specstop.train.fit.tuning.rates import fixed_grid
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.traces.arrays import seen_features

TEMPERATURES = (0.0, 0.7)
TIE = 1e-4
SEED = 0
DEPTH = 10


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(
        __doc__, out="folder for traces, policies, reports and figures; default: a temporary one"
    ).parse_args()
    sizes = (
        Sizes(16, 8, 4, 32, DEPTH, effort=effort(options))
        if options.quick
        else Sizes(192, 120, 40, 128, DEPTH, effort=Effort())
    )
    folder = options.out or Path(tempfile.mkdtemp(prefix="specstop-slice-"))
    bars, pair = Bars(), pair_folder(options)
    models = load_pair(pair / "target", pair / "draft")
    temperatures = TEMPERATURES[-1:] if options.quick else TEMPERATURES
    for temperature in temperatures:
        with progress_bars() as progress:
            results = prepare_output_dir(folder / f"temperature-{temperature:g}", overwrite=True, inputs=[pair])
            with staged_folder(results) as stage:
                # Under match texts and rounds are compared one by one.
                offline = run_offline(stage, results, pair, models, temperature, "match", sizes, SEED, progress)
            live(offline, temperature, sizes, bars, progress)
        gains(offline, temperature, bars)
        collecting(offline, temperature, sizes, bars)
    help_time(bars)
    if options.out is None:
        shutil.rmtree(folder)
    return bars.finish(options, f"{sizes.live} prompts of {sizes.tokens} tokens at temperatures {temperatures}")


def live(offline: Offline, temperature: float, sizes: Sizes, bars: Bars, progress: Any) -> None:
    """Decode live with every policy; compare texts, rounds and speed with what was predicted."""
    rules = [FixedLength(k) for k in (0, 1, 4, 8)] + [Confidence(0.4, DEPTH)]
    if offline.best_fixed.name not in [rule.name for rule in rules]:
        rules.append(offline.best_fixed)
    policies: list[StopPolicy] = [*rules, *offline.learned]
    arrays = offline.arrays.subset(range(min(sizes.live, offline.arrays.sequences)))
    prompts = [(name, offline.prompts[name]) for name in arrays.prompt_ids]
    settings = Settings(temperature, sizes.tokens, DEPTH, verification="match")
    calibration = offline.calibration()
    methods = [Speculator(offline.models, policy, settings, offline.profile) for policy in policies]
    runs = run_alternating(methods, prompts, calibration=calibration, seed=SEED, progress=progress)
    tag = f"T={temperature:g}"
    texts(offline, temperature, sizes, prompts, policies, runs, bars)
    replays = [replay(arrays, policy, offline.profile) for policy in policies]
    rounds(offline, temperature, policies, runs, replays, bars)
    lines = compare_live(runs, policies, arrays, calibration.profile().with_decisions(offline.profile.decision_s))
    print(f"{'policy':<16}{'tokens/s':>9}{'predicted':>11}{'measured':>10}{'miss':>8}   quartiles over prompts")
    for line in lines:
        print(
            f"{line.name:<16}{line.tally.tokens_per_s:>9.1f}{line.predicted:>11.3f}{line.measured:>10.3f}"
            f"{100 * line.miss:>+7.1f}%   {line.spread[0]:.2f} to {line.spread[1]:.2f}"
        )
    worst = max(lines, key=lambda line: abs(line.miss))
    bars.add(
        f"predicted against measured, {tag}",
        {line.name: line.miss for line in lines},
        abs(worst.miss) <= 0.10,
        f"worst {100 * worst.miss:+.1f}% ({worst.name}); at most 10%",
    )


def texts(
    offline: Offline,
    temperature: float,
    sizes: Sizes,
    prompts: list[tuple[str, list[int]]],
    policies: list[StopPolicy],
    runs: list[list[Generation]],
    bars: Bars,
) -> None:
    """Compare every text with plain decoding: `generate` at temperature 0, our plain sampling above it."""
    pair = offline.models
    target = load_pair(offline.pair / "target", offline.pair / "draft", engine="plain").target
    ties, wrong, total = [], [], 0
    for number, (name, prompt) in enumerate(prompts):
        if temperature == 0.0:
            ids = torch.tensor([prompt], device=pair.device)
            out = target.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=sizes.tokens
            )
            reference = out[0, len(prompt) :].tolist()
        else:
            key = stream_key(SEED, name)
            reference = plain_texts(pair, [prompt], [key], sizes.tokens, temperature).tokens[0]
        for policy, run in zip(policies, runs, strict=True):
            total += 1
            text = list(run[number].tokens)
            if text != reference:
                at = next(i for i, (a, b) in enumerate(zip(text, reference, strict=False)) if a != b)
                gap = target_gap(offline, name, prompt + reference[:at], temperature)
                (ties if gap < TIE else wrong).append(f"{policy.name} on {name} at {at}: gap {gap:.1e}")
    for line in ties:
        print("tie in a text:", line)
    against = "generate" if temperature == 0.0 else "plain sampling"
    bars.add(
        f"texts equal to plain decoding, T={temperature:g}",
        {"texts": total, "ties": len(ties), "wrong": len(wrong)},
        not wrong and len(ties) <= total / 200 and total > 0,
        f"{total - len(ties) - len(wrong)} of {total} equal to {against}, {len(ties)} ties, {len(wrong)} wrong",
    )


@torch.inference_mode()
def target_gap(offline: Offline, name: str, tokens: list[int], temperature: float) -> float:
    """Return the target's best minus second score after `tokens`."""
    pair = offline.models
    ids = torch.tensor([tokens], device=pair.device)
    logits = CachedModel(pair.target, len(tokens), pair.vocabulary).read(ids, rows=1)[0]
    noise = gumbel(stream_key(SEED, name), torch.tensor([len(tokens)]), pair.vocabulary) if temperature else None
    best = match_scores(logits / (temperature or 1.0), noise).topk(2).values[0]
    return float(best[0] - best[1])


def rounds(
    offline: Offline,
    temperature: float,
    policies: list[StopPolicy],
    runs: list[list[Generation]],
    replays: list[Replayed],
    bars: Bars,
) -> None:
    """Compare replayed with live rounds: anchor, drafted, verified, accepted."""
    ties, wrong, total = [], [], 0
    for policy, run, played in zip(policies, runs, replays, strict=True):
        for sequence, generation in enumerate(run):
            log = played.log[played.log[:, 0] == sequence]
            predicted = {int(row[1]): (number, tuple(row[2:].tolist())) for number, row in enumerate(log)}
            history = played.history[played.log[:, 0] == sequence]
            for r in generation.rounds:
                total += 1
                number, expected = predicted.get(r.anchor, (-1, None))
                if expected == (r.drafted, r.verified, r.accepted):
                    continue
                # One difference moves all later anchors of the text, and its history: the first one decides.
                where = f"{policy.name}, text {sequence}, anchor {r.anchor}: live {(r.drafted, r.accepted)} replay {expected}"
                tie = number >= 0 and is_tie(offline, policy, sequence, r.anchor, history[number], r.drafted)
                (ties if tie else wrong).append(where)
                break
    for line in [*ties, *wrong]:
        print("tie in a round:" if line in ties else "WRONG round:", line)
    bars.add(
        f"replayed rounds equal to live, T={temperature:g}",
        {"rounds": total, "ties": len(ties), "wrong": len(wrong)},
        not wrong and len(ties) <= max(1, total / 2000),
        f"{total} rounds, {len(ties)} ties, {len(wrong)} wrong",
    )


def is_tie(
    offline: Offline, policy: StopPolicy, sequence: int, anchor: int, history: torch.Tensor, drafted: int
) -> bool:
    """Whether the draft's two best scores, or the policy's score and its threshold, are as near as float noise."""
    arrays = offline.arrays
    row = arrays.offset[sequence] + anchor - arrays.first_anchor[sequence]
    margins = arrays.column("noisy_margin")[row, : drafted + 1]
    if bool((margins < TIE).any()):
        return True
    seen = seen_features(arrays, policy.features, row[None], history[None])
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for _ in range(200):
        noisy = seen + TIE * (2 * torch.rand(seen.shape, generator=generator) - 1) * seen.abs().clamp_min(1.0)
        lengths.add(_length(policy, noisy, arrays.depth))
    return drafted in lengths and len(lengths) > 1


def _length(policy: StopPolicy, seen: torch.Tensor, depth: int) -> int:
    """Return how many tokens the policy drafts when it sees [1, K + 1, F]."""
    state, shown, zeros = policy.start(1, np.zeros(1, dtype=np.int64)), seen.float().numpy(), np.zeros((1, 1), np.int64)
    for j in range(min(depth, policy.max_depth)):
        if j >= policy.first:
            features = np.ascontiguousarray(shown[:, j, None])
            step = DraftStep(j, np.ones((1, 1), dtype=bool), zeros, features, {}, zeros[0])
            keep, state = policy.keep(step, state)
            if not keep.any():
                return j
    return min(depth, policy.max_depth)


def gains(offline: Offline, temperature: float, bars: Bars) -> None:
    """Print what replay says of the learned policies, and the pair's acceptance by depth."""
    report = offline.report
    print(f"P(A >= k), T={temperature:g}: " + " ".join(f"{k}: {p:.3f}" for k, p in enumerate(report.acceptance, 1)))
    for line in report.lines:
        ratio = line.to_best_fixed
        print(
            f"  {line.name:<22}{line.tokens_per_s:>8.1f} tokens/s  {line.to_plain.value:.3f} of plain  "
            f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of best fixed  gap {line.oracle_share.value:.2f}"
        )
    if temperature == 0.0:
        first = report.acceptance[0]
        bars.add("P(A >= 1), greedy", first, 0.5 <= first <= 0.85, f"{first:.3f}; between 0.5 and 0.85")
    free = free_decisions(offline)
    bars.figures[f"learned policies with free decisions, T={temperature:g}"] = free
    print("  with decisions for nothing: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in free.items()))
    learned = [line for line in report.lines if line.kind == "learned"]
    clear = [line.name for line in learned if line.to_best_fixed.low > 1.0]
    bars.add(
        f"learned policies against best fixed, T={temperature:g}",
        {line.name: [line.to_best_fixed.value, line.to_best_fixed.low, line.to_best_fixed.high] for line in learned},
        len(clear) == len(learned),
        f"interval clear of 1: {', '.join(clear) or 'none'} of {len(learned)}",
    )


def free_decisions(offline: Offline) -> dict[str, float]:
    """Return the learned policies' ratio to best fixed if a decision took no time: what deciding costs, and no more."""
    free = offline.profile.with_decisions({policy.cost_name: 0.0 for policy in offline.learned})
    fixed = max(played.rate for played in fixed_grid(offline.arrays, free))
    return {policy.name: replay(offline.arrays, policy, free).rate / fixed for policy in offline.learned}


def collecting(offline: Offline, temperature: float, sizes: Sizes, bars: Bars) -> None:
    """Measure (text generation + dense unrolling) / text generation on the same prompts, alternating."""
    pair = offline.models
    batch = [
        Work(i, name, "", prompt, stream_key(SEED, name))
        for i, (name, prompt) in enumerate(list(offline.prompts.items())[:16])
    ]
    unroller = Unroller(pair, DEPTH, temperature)
    ratios = []
    for repeat in range(4):
        begin = time.perf_counter()
        plain_texts(pair, [b.tokens for b in batch], [b.key for b in batch], sizes.tokens + DEPTH, temperature)
        middle = time.perf_counter()
        dense_rows(pair, unroller, batch, sizes.tokens)
        if repeat:
            ratios.append((time.perf_counter() - middle) / (middle - begin))
    ratio = statistics.median(ratios)
    bars.add(
        f"(generation + unrolling) / generation, T={temperature:g}",
        ratio,
        ratio <= 1.5,
        f"{ratio:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}; at most 1.5",
    )


def help_time(bars: Bars) -> None:
    """Measure `specstop --help`."""
    command = [str(Path(sys.executable).with_name("specstop")), "--help"]
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    middle = statistics.median(times[1:])
    bars.add("specstop --help", middle, middle <= 0.5, f"{middle:.2f} s; at most 0.5")


if __name__ == "__main__":
    sys.exit(main())
