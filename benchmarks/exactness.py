"""Whether the round loop is exact: every choice enumerated, noise from tables, and a real pair against plain sampling.

    python benchmarks/exactness.py --check
    python benchmarks/exactness.py --quick

The first two parts drive the shipped loop on models that are tables of the whole prefix, with the helpers of the tests, so
this runs from the repository root. Without `--pair` the shipped pair is used. The last line printed is one JSON object;
with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from pairs import pair_folder
from scipy import stats
from specstop.collect.prompts import encode, read_prompts
from specstop.decode import Settings, plain_texts, stream_key
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, load_pair
from specstop.policies import Confidence

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "decode")]

from cases import CHAINS, TREES, Case, all_cases, other_cases  # noqa: E402
from conditionals import pit  # noqa: E402
from enumeration import EXACT, prove, prove_within  # noqa: E402
from noise_tables import NOISE_POLICIES, noise_case, plain_on_noise, speculate_on_noise  # noqa: E402

LOSSY = 0.05
FALSE_ALARM = 1e-3
TOKENS = 6
REAL = (
    ("match", "chain:4"),
    ("match", "2,2,1"),
    ("rejection", "chain:4"),
    ("rejection", "2,2,1"),
    ("rejection_replace", "2,2,1"),
    ("block", "chain:4"),
)


@dataclass(frozen=True)
class Sizes:
    """How much is run: every so many-th case, noise tables, tables of lossy modes, texts for each mode of the real pair."""

    stride: int
    tables: int
    lossy: int
    texts: int
    leaves: int = 1500


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    sizes = Sizes(60, 200, 3, 40, 500) if options.quick else Sizes(1, 10_000, 40, 240)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # policies that fail on purpose say so
    bars = Bars()
    for part in (enumerated, lossy, noise_tables):
        part(sizes, bars)
    real_pair(pair_folder(options), sizes, bars)
    cases = bars.figures["enumeration"]["cases"]
    return bars.finish(options, f"{cases} cases, {sizes.tables} noise tables, {sizes.texts} texts a mode")


def enumerated(sizes: Sizes, bars: Bars) -> None:
    """Go through every sequence of choices of the rejection family and compare with the target's own distribution."""
    begin = time.perf_counter()
    cases = [*all_cases(), *other_cases()][:: sizes.stride]
    worst, leaves, later, dropped, smaller, wrong = 0.0, 0, 0, 0, 0, []
    for number, case in enumerate(cases):
        proved, proof = prove_within(case, sizes.leaves)
        smaller += proved != case
        worst, leaves = max(worst, proof.distance), leaves + proof.leaves
        later, dropped = later + (proof.later > 0), dropped + (proof.dropped > 0)
        if proof.distance > EXACT or proof.reused:
            wrong.append(str(proved))
            print(f"WRONG {proved}: {proof.distance:.1e}, {proof.reused} numbers used twice", flush=True)
        if number % 250 == 249:
            print(f"{number + 1} of {len(cases)} cases, {time.perf_counter() - begin:.0f} s", flush=True)
    modes = Counter(case.mode for case in cases)
    bars.add(
        "enumeration",
        {
            "cases": len(cases),
            "by_mode": dict(modes),
            "leaves": leaves,
            "with_later_acceptance": later,
            "with_tokens_left_out": dropped,
            "made_smaller": smaller,
            "worst": worst,
            "wrong": wrong,
            "seconds": time.perf_counter() - begin,
        },
        not wrong and len(cases) > 0 and later > 0 and dropped > 0,
        f"{len(cases)} cases, {leaves} sequences of choices; largest distance {worst:.1e}, at most {EXACT:g}",
    )


def lossy(sizes: Sizes, bars: Bars) -> None:
    """Measure how far the lossy mode is from the target."""
    far = [prove(Case("typical", "2,1", kind="dense", seed=seed, new=3)).distance for seed in range(sizes.lossy)]
    mean = sum(far) / len(far)
    bars.add("typical is lossy", mean, mean > LOSSY, f"mean distance {mean:.3f}; more than {LOSSY}")


def noise_tables(sizes: Sizes, bars: Bars) -> None:
    """Compare texts of `match` with plain sampling by the same noise."""
    begin = time.perf_counter()
    chance = random.Random(5)
    trees, policies = [*CHAINS, *TREES, "3,2,1"], list(NOISE_POLICIES)
    wrong, accepted = 0, 0
    for number in range(sizes.tables):
        drafter = "lookup" if chance.random() < 0.25 else "model"
        case = noise_case(chance.choice(trees), drafter, policies[number % len(policies)], chance)
        generation = speculate_on_noise(case)
        accepted += sum(r.accepted for r in generation.rounds)
        if list(generation.tokens) != plain_on_noise(case):
            wrong += 1
            print("WRONG", case, flush=True)
    bars.add(
        "match on tables of noise",
        {"tables": sizes.tables, "wrong": wrong, "accepted": accepted, "seconds": time.perf_counter() - begin},
        not wrong and accepted > sizes.tables,
        f"{sizes.tables - wrong} of {sizes.tables} texts equal to plain sampling, {accepted} tokens accepted",
    )


def real_pair(folder: Path, sizes: Sizes, bars: Bars) -> None:
    """Test every lossless mode against the target's conditionals and against plain sampling; a lossy one must fail."""
    pair = load_pair(str(folder / "target"), str(folder / "draft"))
    prompts = list(encode(read_prompts(folder / "prompts-test.jsonl", 4), pair.tokenizer, 512))
    alarm = FALSE_ALARM / (2 * 2 * len(REAL))
    for temperature in (0.7, 1.0):
        plain = [
            plain_texts(
                pair, [prompt] * (sizes.texts // 4), _keys("plain", at, sizes), TOKENS, temperature, True
            ).tokens
            for at, prompt in enumerate(prompts)
        ]
        for mode, tree in (*REAL, ("typical", "chain:4")):
            begin = time.perf_counter()
            texts, accepted = sampled(pair, prompts, mode, tree, temperature, sizes)
            shares = [
                pit(pair, prompt, made, temperature, stream_key(23, f"{mode} {tree} {temperature}", at) % 2**32)
                for at, (prompt, made) in enumerate(zip(prompts, texts, strict=True))
            ]
            fit = float(stats.kstest(np.concatenate(shares), "uniform").pvalue)
            same = float(min(two_samples(texts, plain, place) for place in (1, 2)) * 2)
            lossless = mode != "typical"
            bars.add(
                f"{mode} {tree} on the pair, T={temperature:g}",
                {"fit": fit, "same": min(same, 1.0), "accepted": accepted, "seconds": time.perf_counter() - begin},
                (min(fit, same) >= alarm and accepted > 0) if lossless else min(fit, same) < alarm,
                f"p {fit:.2g} (conditionals), {min(same, 1.0):.2g} (plain sampling), {accepted} accepted; "
                + (f"at least {alarm:.1g}" if lossless else f"lossy: below {alarm:.1g}"),
            )


def sampled(
    pair: Pair, prompts: Sequence[Sequence[int]], mode: str, tree: str, temperature: float, sizes: Sizes
) -> tuple[list[list[list[int]]], int]:
    """Return texts by prompt, and how many drafted tokens were accepted."""
    settings = Settings(temperature, TOKENS, ignore_eos=True, verification=mode, tree=tree)
    speculator = Speculator(pair, Confidence(0.2, 4), settings)
    texts, accepted = [], 0
    for at, prompt in enumerate(prompts):
        made = [speculator.generate(prompt, key) for key in _keys(f"{mode} {tree}", at, sizes)]
        texts.append([list(generation.tokens) for generation in made])
        accepted += sum(r.accepted for generation in made for r in generation.rounds)
    return texts, accepted


def two_samples(one: Sequence[Any], other: Sequence[Any], place: int) -> float:
    """Return the p-value of a chi-square test that tokens at `place` come as often in both, rare ones taken together."""
    counts = [
        Counter((at, text[place]) for at, texts in enumerate(sample) for text in texts) for sample in (one, other)
    ]
    often = {key for key in {*counts[0], *counts[1]} if counts[0][key] + counts[1][key] >= 10}
    table = [[c[key] for key in sorted(often)] + [sum(n for k, n in c.items() if k not in often)] for c in counts]
    kept = np.array(table)[:, np.array(table).sum(0) > 0]
    return float(stats.chi2_contingency(kept).pvalue) if kept.shape[1] > 1 else 1.0


def _keys(name: str, prompt: int, sizes: Sizes) -> list[int]:
    return [stream_key(17, f"{name} {prompt}", i) for i in range(sizes.texts // 4)]


if __name__ == "__main__":
    sys.exit(main())
