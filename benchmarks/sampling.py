"""Learned policies where chains sample: under the fastest lossless verification, beside the same head under `match`.

    python benchmarks/sampling.py --check --pair path/to/one path/to/other

For each pair and temperature: traces and a profile under block verification and under `match`, a head of the same kind
trained for each, the best fixed length of each on the training prompts; then all of them live, in turns. What is compared is
tokens a second, its ratio with an interval over prompts, whose texts differ between runs. Without `--pair` the shipped pair
is used; `--check` wants two. Beside them, by replay with decisions that cost nothing: the learned policy, and the
achievable estimate, what a policy cross-fitted on the test prompts gains. The last line printed is one JSON object.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from pairs import effort
from specstop.cli.output import progress_bars
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.collect.run import collect
from specstop.decode import Generation, Pair, Settings, Speculator, load_pair
from specstop.decode.benchmark import run_alternating
from specstop.decode.profile import loop_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength, Profile, StopPolicy
from specstop.policies.display import Progress
from specstop.policies.storage import load_policy_folder
from specstop.train.demo.pair import shipped_pair
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.achievable_batch import NAME as ESTIMATE
from specstop.train.fit.run import train
from specstop.train.fit.tuning.rates import best_of, fixed_grid
from specstop.train.fit.tuning.settled import settle
from specstop.train.replay.traces.arrays import trace_arrays

MODES = ("block", "match")
DRAWS = 4
"""Of each test text, in what is replayed."""

ENOUGH = 40
"""Test prompts from which on the achievable estimate is worth its minutes."""

TEMPERATURES, DEPTH, HEAD, REPLICATES = (0.7, 1.0), 10, "logistic", 2000


@dataclass(frozen=True)
class Run:
    """What is done with a pair.

    Attributes:
        pair, train, test: the pair and its prompts.
        tokens: of each text.
        repeats: live runs of each prompt.
        effort: how long a profile is measured.
        room: folder for what is made.
    """

    pair: Pair
    train: Sequence[Prompt]
    test: Sequence[Prompt]
    tokens: int
    repeats: int
    effort: Effort
    room: Path
    progress: Progress

    def ids(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of prompts."""
        return encode(prompts, self.pair.tokenizer, self.pair.readable - self.tokens - DEPTH)

    def trained(self, temperature: float, mode: str) -> tuple[list[StopPolicy], Settings, Profile]:
        """Return the learned policy of a verification and its best fixed length, on training prompts; how they run; costs."""
        room, ids = self.room / f"{mode}-{temperature:g}", self.ids(self.train)
        settings = Settings(temperature, self.tokens, DEPTH, verification=mode)
        traces = collect(
            self.pair, self.train, room / "traces", depth=DEPTH, temperature=temperature, verification=mode,
            max_new_tokens=self.tokens, progress=self.progress,
        )  # fmt: skip
        profile = measure_profile(
            self.pair, ids[:16], depth=DEPTH, temperature=temperature, verification=mode, effort=self.effort,
            progress=self.progress,
        )  # fmt: skip
        train(traces, profile, head=HEAD, out=room / "policy", progress=self.progress)
        policy = load_policy_folder(room / "policy")
        profile = profile.with_measured_decisions(loop_decisions(self.pair, [policy], ids, settings))
        learned = settle(room / "policy", traces, profile)
        best = best_of(fixed_grid(trace_arrays(traces), profile))
        return [learned, FixedLength(int(best.name.partition(":")[2]))], settings, profile

    def known(self, temperature: float, mode: str, policy: StopPolicy, profile: Profile) -> str:
        """Return what a policy and the achievable estimate are of the best fixed length on test prompts, decisions free."""
        held = collect(
            self.pair, self.test, self.room / f"{mode}-{temperature:g}" / "held", depth=DEPTH, temperature=temperature,
            verification=mode, max_new_tokens=self.tokens, draws=DRAWS if mode == "block" else 1, progress=self.progress,
        )  # fmt: skip
        free = profile.with_decisions({policy.cost_name: 0.0})
        report = evaluate(held, free, [policy], achievable=True, progress=self.progress)
        lines = {line.name: line.to_best_fixed.text() for line in report.lines}
        return f"replayed, decisions free: {lines[policy.shown_name]} of the best fixed length, achievable {lines[ESTIMATE]}"

    def live(self, runs: Sequence[Speculator]) -> list[list[Generation]]:
        """Return texts by run: every prompt as often as it is repeated, one after the other."""
        prompts = [(p.id, tokens) for p, tokens in zip(self.test, self.ids(self.test), strict=True)]
        made: list[list[Generation]] = [[] for _ in runs]
        for seed in range(self.repeats):
            for own, texts in zip(made, run_alternating(runs, prompts, seed=seed, progress=self.progress), strict=True):
                own += texts
        return made


def ratio(one: Sequence[Generation], other: Sequence[Generation], prompts: int) -> tuple[float, float, float]:
    """Return tokens a second of `one` to those of `other`, with a 95% interval over prompts, whose repeats stay together."""
    told = np.array([[(len(g.tokens), g.seconds) for g in side] for side in (one, other)])
    sums = told.reshape(2, -1, prompts, 2).sum(1)  # [2, prompts, 2]
    at = np.random.default_rng(0).integers(prompts, size=(REPLICATES, prompts))
    drawn = sums[:, np.concatenate([np.arange(prompts)[None], at])].sum(2)
    rate = drawn[..., 0] / drawn[..., 1]
    found = rate[0] / rate[1]
    return float(found[0]), *(float(q) for q in np.quantile(found[1:], [0.025, 0.975]))


def measured(name: str, run: Run, temperature: float, bars: Bars) -> dict[str, Any]:
    """Train for both verifications, decode in turns, and return what came out."""
    policies: dict[str, Speculator] = {}
    profiles: dict[str, Profile] = {}
    for mode in MODES:
        made, settings, profiles[mode] = run.trained(temperature, mode)
        for policy, what in zip(made, ("learned", "best fixed"), strict=True):
            policies[f"{what}, {mode}"] = Speculator(run.pair, policy, settings)
    texts = dict(zip(policies, run.live(list(policies.values())), strict=True))
    figures: dict[str, Any] = {}
    for what, own in texts.items():
        rounds = [made for text in own for made in text.rounds]
        rate = sum(len(text.tokens) for text in own) / sum(text.seconds for text in own)
        a_call = sum(made.committed for made in rounds) / len(rounds)
        policy = policies[what].policy.name
        figures[what] = {"policy": policy, "tokens_per_s": rate, "tokens_per_call": a_call}
        print(f"      {name}, T = {temperature:g}, {what} ({policy}): {rate:.1f} tokens/s, {a_call:.3f} a call")
    for other in ("learned, match", "best fixed, block"):
        found = ratio(texts["learned, block"], texts[other], len(run.test))
        told = f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}] of {other}; clear of 1"
        bars.add(f"{name}, T = {temperature:g}, learned, block, to {other}", found, found[1] > 1.0, told)
    for mode in MODES if len(run.test) >= ENOUGH else ():
        figures[f"known, {mode}"] = told = run.known(
            temperature, mode, policies[f"learned, {mode}"].policy, profiles[mode]
        )
        print(f"      {name}, T = {temperature:g}, {mode}, {told}")
    return figures


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, pairs=True)
    parser.add_argument("--prompts", type=int, default=80, help="test prompts; a check needs 40")
    parser.add_argument("--train-prompts", type=int, default=160, help="training prompts")
    parser.add_argument("--repeats", type=int, default=3, help="live runs of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each text; a check needs 128")
    options = parser.parse_args()
    known, tests, tokens, repeats = (24, 6, 32, 1) if options.quick else (
        options.train_prompts, options.prompts, options.tokens, options.repeats
    )  # fmt: skip
    torch.set_num_threads(1)
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="specstop-sampling-") as room, progress_bars() as progress:
        folders = options.pair or [shipped_pair()]
        for folder in folders:
            pair = load_pair(folder / "target", folder / "draft")
            sides = (read_prompts(folder / f"prompts-{s}.jsonl", n) for s, n in (("train", known), ("test", tests)))
            run = Run(pair, *sides, tokens, repeats, effort(options), Path(room) / folder.name, progress)
            for temperature in TEMPERATURES[: 1 if options.quick else 2]:
                bars.figures[f"{folder.name}, T={temperature:g}"] = measured(folder.name, run, temperature, bars)
    whole = tests >= 40 and tokens >= 128 and len(folders) > 1
    return bars.finish(options, f"{tests} prompts x {repeats} of {tokens} tokens on {len(folders)} pairs", whole)


if __name__ == "__main__":
    sys.exit(main())
