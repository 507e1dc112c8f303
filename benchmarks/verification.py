"""Verification modes side by side: coupled candidates, recursive rejection, block verification.

    python benchmarks/verification.py --check
    python benchmarks/verification.py --pair pairs/a pairs/b --out verification.json

Without `--pair` the shipped pair is used; `--check` wants two pairs. For each width (branches of a fork of depth 4), at
temperature 0.7 and 1: block efficiency and tokens/s as ratios to `match`, with 95% intervals over prompts. The last line is
one JSON object, with the better mode of each width.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from bars import Bars, arguments
from specstop.cli.output import progress_bars
from specstop.collect.prompts.read import encode, read_prompts
from specstop.decode import Generation, Pair, Settings, Speculator, load_pair
from specstop.decode.benchmark import run_alternating
from specstop.policies import FixedLength
from specstop.train.demo.pair import shipped_pair

DEPTH = 4
WIDTHS = (1, 2, 4, 8)
TEMPERATURES = (0.7, 1.0)
LOSSLESS = ("match", "rejection", "rejection_replace", "block")
REPLICATES = 2000
Prompts = list[tuple[str, list[int]]]


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__, pairs=True).parse_args()
    count, tokens = (4, 32) if options.quick else (40, 128)
    bars = Bars()
    results = bars.figures["pairs"] = {}
    with progress_bars() as progress:
        folders = options.pair or [shipped_pair()]
        for folder in folders:
            pair = load_pair(folder / "target", folder / "draft")
            read = read_prompts(folder / "prompts-test.jsonl", count)
            room = pair.readable - tokens - DEPTH - 1
            prompts = list(zip([p.id for p in read], encode(read, pair.tokenizer, room), strict=True))
            results[folder.name] = measure(pair, prompts, tokens, progress)
    compared = f"{len(prompts)} prompts of {tokens} tokens on {', '.join(results)}"
    return bars.finish(options, compared, whole=len(prompts) >= 40 and len(folders) > 1)


def measure(pair: Pair, prompts: Prompts, tokens: int, progress: Any) -> dict[str, Any]:
    """Return the figures of one pair, and print its tables."""
    figures: dict[str, Any] = {}
    for temperature in TEMPERATURES:
        print(f"\nT = {temperature:g}   width, mode: block efficiency, ratio to match; tokens/s ratio to match")
        for width in WIDTHS:
            figures[f"T={temperature:g}, width {width}"] = one_width(
                pair, prompts, tokens, temperature, width, progress
            )
    best = {}
    for width in WIDTHS:
        rows = [figures[f"T={t:g}, width {width}"] for t in TEMPERATURES]
        modes = [mode for mode in rows[0] if mode in LOSSLESS]
        best[width] = max(modes, key=lambda mode: min(row[mode]["speed"][0] for row in rows))
    figures["fastest lossless mode by width"] = best
    print("fastest lossless mode by width:", best)
    return figures


def one_width(
    pair: Pair, prompts: Prompts, tokens: int, temperature: float, width: int, progress: Any
) -> dict[str, dict[str, Any]]:
    """Decode with every mode in alternation; return figures by mode."""
    modes = ["match", "rejection", *(["block"] if width == 1 else ["rejection_replace"])]
    runs = []
    for mode in modes:
        settings = Settings(temperature, tokens, DEPTH, verification=mode, tree=f"fork:{width}x{DEPTH}")
        runs.append(Speculator(pair, FixedLength(DEPTH), settings))
    found = dict(zip(modes, run_alternating(runs, prompts, progress=progress), strict=True))
    rows = {}
    for mode, texts in found.items():
        per_call = ratio(texts, found["match"], committed)
        speed = ratio(texts, found["match"], lambda g: (len(g.tokens), g.seconds))
        efficiency = sum(committed(g)[0] for g in texts) / sum(committed(g)[1] for g in texts)
        rows[mode] = {"block_efficiency": efficiency, "efficiency": per_call, "speed": speed}
        print(
            f"  {width}  {mode:<18}{efficiency:6.2f}  {per_call[0]:.3f} [{per_call[1]:.3f}, {per_call[2]:.3f}]   "
            f"{speed[0]:.3f} [{speed[1]:.3f}, {speed[2]:.3f}]"
        )
    return rows


def committed(text: Generation) -> tuple[int, int]:
    """Return the tokens that rounds committed, and the rounds."""
    return sum(r.committed for r in text.rounds), len(text.rounds)


def ratio(texts: list[Generation], base: list[Generation], of: Any) -> tuple[float, float, float]:
    """Return the ratio of two ratios of sums, `of` one text, with its 95% interval over prompts."""
    a, b = (np.array([of(g) for g in side], dtype=np.float64) for side in (texts, base))
    return interval(len(a), lambda at: a[at, 0].sum() / a[at, 1].sum() / (b[at, 0].sum() / b[at, 1].sum()))


def interval(count: int, of: Any) -> tuple[float, float, float]:
    """Return the value on all prompts and its bootstrap interval."""
    generator = np.random.default_rng(0)
    draws = [of(generator.integers(0, count, count)) for _ in range(REPLICATES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(of(np.arange(count))), float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
