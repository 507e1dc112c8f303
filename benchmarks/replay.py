"""Replay beside the live loop, for policies of every shipped kind: the same rounds, and the speeds that it predicts.

    python benchmarks/replay.py --check
    python benchmarks/replay.py --pair pairs/a --out replay.json
    python benchmarks/replay.py --ablation

Without `--pair` the shipped pair is used. The last line is one JSON object; with `--check` the exit code is 1 where a bar
falls short.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from ablation import ablation
from bars import Bars, arguments
from pairs import pair_folder
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.collect.run import collect
from specstop.collect.store.folder import Trace
from specstop.decode import Generation, Pair, Settings, Speculator, load_pair
from specstop.decode.benchmark import run_alternating
from specstop.decode.profile import CalibrationRun, loop_decisions
from specstop.policies import FixedLength, StopPolicy
from specstop.policies.features import TOKEN_FEATURES
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.fit.run import train
from specstop.train.replay.bounds.static_tree import best_static_tree
from specstop.train.replay.log import play
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays

TREE, DEPTH = "3,2,1,1", 8
TIE, NOISY = 1e-4, 20
EXACT = (*TOKEN_FEATURES, "depth", "branch_rank", "temperature")
SPECS = (
    "confidence:0.2", "confidence:0.5", "heuristic:3", "heuristic-transient:3", "roc:0.3", "entropy:1.5", "adaedl:0.3",
    "maxprob:0.4", "product:0.2", "online:0.4", "bandit?arms=fixed:2,fixed:4,confidence:0.4",
    "bandit?kind=thompson&arms=fixed:1,fixed:3,product:0.2",
)  # fmt: skip
SPECS_TREES = ("ddd:-1.3?begin=1&every=1", "eagle:8", "opt:0.2?nodes=8", "c2t:3", "gain")


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--temperature", type=float, nargs="+", help="temperatures to run at; a check needs two")
    parser.add_argument("--shape", nargs="+", default=["chain", TREE], help="chain, or trees; a check needs both")
    parser.add_argument("--ablation", action="store_true", help="price the rounds without each refinement of the costs")
    options = parser.parse_args()
    temperatures = options.temperature or ([0.7] if options.quick else [0.0, 0.7])
    bars = Bars()
    with tempfile.TemporaryDirectory() as out:
        folder = pair_folder(options)
        pair = load_pair(folder / "target", folder / "draft")
        count, tokens = (4, 32) if options.quick else (40, 128)
        prompts = read_prompts(folder / "prompts-test.jsonl", count)
        other = read_prompts(folder / "prompts-train.jsonl", 12 if options.quick else 64)
        for temperature in temperatures:
            for shape in options.shape:
                tree = None if shape == "chain" else shape
                live(pair, prompts, other, tokens, temperature, tree, Path(out), bars, options.ablation)
    whole = len(temperatures) > 1 and len(options.shape) > 1 and len(prompts) >= 40
    return bars.finish(options, f"{len(prompts)} prompts of {tokens} tokens", whole)


def live(
    pair: Pair, prompts: Sequence[Prompt], other: Sequence[Prompt], tokens: int, temperature: float, tree: str | None,
    out: Path, bars: Bars, ablate: bool = False,
) -> None:  # fmt: skip
    """Compare replay with the live loop: rounds, and tokens/s as ratios to plain decoding.

    Costs are measured on other prompts: decisions before the comparison, the rest by a calibration run in between its texts.
    """
    at = f"{tree or 'chain'}, T={temperature:g}"
    options = {"temperature": temperature, "max_new_tokens": tokens, "depth": DEPTH, "tree": tree}
    options["verification"] = "match"
    settings = Settings(temperature, tokens, tree=tree, verification="match")
    held, seen = (
        collect(pair, side, out / f"{at}-{len(side)}".replace(",", "-"), **options) for side in (prompts, other)
    )
    arrays = trace_arrays(held)
    ids, known = (encode(side, pair.tokenizer, pair.readable - tokens) for side in (prompts, other))
    calibration = CalibrationRun(
        pair, known, depth=DEPTH, temperature=temperature, new_tokens=96, tree=tree, verification="match"
    )
    for number in range(4):
        calibration.play(number)
    before = calibration.profile()
    policies = shipped(arrays, seen, before, tree)
    decisions = loop_decisions(pair, policies, known, settings, before)
    before = before.with_measured_decisions(decisions)
    runs = [Speculator(pair, policy, settings, before) for policy in policies]
    found = run_alternating(
        runs, list(zip([p.id for p in prompts], ids, strict=True)), calibration=calibration, calibrate_every=1
    )
    profile = calibration.profile().with_measured_decisions(decisions)
    rates = [sum(len(g.tokens) for g in texts) / sum(g.seconds for g in texts) for texts in found]
    played = [play(arrays, policy, profile) for policy in policies]
    predicted = [one.result.rate for one in played]
    worst, total, ties, wrong = 0.0, 0, 0, 0
    for policy, rate, texts, guess in zip(policies, rates, found, predicted, strict=True):
        miss = (rate / rates[0]) / (guess / predicted[0]) - 1
        worst = max(worst, abs(miss))
        sums = equality(arrays, policy, before, texts)  # with the costs that the policy was told of
        total, ties, wrong = total + sums[0], ties + sums[1], wrong + sums[2]
        strange = f", {sums[1]} ties, {sums[2]} wrong" if sums[1] or sums[2] else ""
        print(
            f"      {policy.name:<44} {rate / rates[0]:.3f} of plain, predicted {guess / predicted[0]:.3f}, {miss:+.1%}"
            f"{strange}"
        )
    bars.add(
        f"predicted over measured, worst, {at}",
        worst,
        worst <= 0.05,
        f"{worst:.1%} of {len(policies)} policies; within 5%",
    )
    if ablate:
        rounds = [one.rounds for one in played]
        bars.figures[f"ablation, {at}"] = ablation(profile, rounds, arrays.prompt_tokens, rates)
    bars.add(
        f"rounds replayed as live, {at}",
        total,
        wrong == 0 and total > 0 and ties <= max(1, total / 2000),
        f"{total} rounds, {ties} ties, {wrong} wrong",
    )


def shipped(arrays: TraceArrays, seen: Trace, profile: Profile, tree: str | None) -> list[StopPolicy]:
    """Return plain decoding and policies of every shipped kind; learned ones are fitted on the trace `seen`."""
    deepest = arrays.depth
    made: list[StopPolicy] = [FixedLength(k) for k in (0, 2, deepest)]
    made += [load_policy(spec).limited(deepest) for spec in SPECS + (SPECS_TREES if tree else ())]
    if tree:
        made += [
            best_static_tree(arrays, profile)[0],
            train(seen, profile, rule="gain", name="gain, learned").policy,
        ]
    else:
        made += [train(seen, profile, head=head).policy for head in ("logistic", "mlp", "xgboost", "resnet")]
        made.append(train(seen, profile, head="tokens", features=("top1", "depth", *TOKEN_FEATURES)).policy)
    return made


def equality(
    arrays: TraceArrays, policy: StopPolicy, profile: Profile, texts: Sequence[Generation]
) -> tuple[int, int, int]:
    """Return rounds compared, ties and wrong ones; comparison goes on from anchors that both visit.

    A tie is a round in which the draft's best scores are as near as float noise, or which replay plays as the live loop did
    once such noise is put upon the features.
    """
    log = replay(arrays, policy, profile).log
    mine = {(int(line[0]), int(line[1])): line[2:].tolist() for line in log}
    met = [(s, r.anchor, [r.drafted, r.verified, r.accepted]) for s, text in enumerate(texts) for r in text.rounds]
    met = [(s, anchor, played) for s, anchor, played in met if (s, anchor) in mine]
    other = [(s, anchor, played) for s, anchor, played in met if mine[s, anchor] != played]
    others = set()
    for seed in range(NOISY if other else 0):
        others |= {tuple(line) for line in replay(noisy(arrays, seed), policy, profile).log.tolist()}
    ties = 0
    for s, anchor, played in other:
        row = int(arrays.find(np.array([s]), np.array([anchor]))[0])
        near = float(arrays.column("noisy_margin")[row].abs().min()) < TIE
        ties += near or (s, anchor, *played) in others
    return len(met), ties, len(other) - ties


def noisy(arrays: TraceArrays, seed: int) -> TraceArrays:
    """Return the trace with features that differ by float noise."""
    generator = torch.Generator().manual_seed(seed)
    columns = {
        name: values
        if name in EXACT
        else values + TIE * (2 * torch.rand(values.shape, generator=generator) - 1) * values.abs().clamp_min(1.0)
        for name, values in arrays.columns.items()
    }
    return replace(arrays, columns=columns)


if __name__ == "__main__":
    sys.exit(main())
