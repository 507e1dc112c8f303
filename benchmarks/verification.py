"""Verification modes side by side: coupled candidates, recursive rejection, block verification, DynaSD's target roots.

    python benchmarks/verification.py --check
    python benchmarks/verification.py --pair pairs/a pairs/b --out verification.json

Without `--pair` the shipped pair is used; `--check` wants two pairs. For each width (branches of a fork of depth 4), at
temperature 0.7 and 1: block efficiency and tokens/s as ratios to `match`, with 95% intervals over prompts; what
`target_init` costs (negative log-likelihood a token under the target, greedy texts that stay equal). The last line is one
JSON object, with the better lossless mode of each width.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from specstop.cli.console.output import progress_bars
from specstop.collect.prompts.read import encode, read_prompts
from specstop.decode import Generation, Pair, Settings, Speculator, load_pair
from specstop.decode.benchmark import run_alternating
from specstop.decode.models.cache import CachedModel
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
    figures["greedy texts equal to plain decoding"] = greedy(pair, prompts, tokens, progress)
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
    modes = ["match", "rejection", *(["block"] if width == 1 else ["rejection_replace"]), "target_init"]
    runs = []
    for mode in modes:
        depth = DEPTH + 1 if mode == "target_init" else DEPTH  # its first level is not drafted
        settings = Settings(temperature, tokens, depth, verification=mode, tree=f"fork:{width}x{depth}")
        runs.append(Speculator(pair, FixedLength(depth), settings))
    found = dict(zip(modes, run_alternating(runs, prompts, progress=progress), strict=True))
    surprise = {mode: surprises(pair, prompts, found[mode], temperature) for mode in ("match", "target_init")}
    rows = {}
    for mode, texts in found.items():
        per_call = ratio(texts, found["match"], committed)
        speed = ratio(texts, found["match"], lambda g: (len(g.tokens), g.seconds))
        efficiency = sum(committed(g)[0] for g in texts) / sum(committed(g)[1] for g in texts)
        rows[mode] = {"block_efficiency": efficiency, "efficiency": per_call, "speed": speed}
        note = ""
        if mode == "target_init":
            rows[mode]["nats_per_token"] = more = difference(surprise[mode], surprise["match"])
            note = f"   LOSSY: {more[0]:+.3f} [{more[1]:+.3f}, {more[2]:+.3f}] nats a token under the target"
        print(
            f"  {width}  {mode:<18}{efficiency:6.2f}  {per_call[0]:.3f} [{per_call[1]:.3f}, {per_call[2]:.3f}]   "
            f"{speed[0]:.3f} [{speed[1]:.3f}, {speed[2]:.3f}]{note}"
        )
    return rows


def committed(text: Generation) -> tuple[int, int]:
    """Return the tokens that rounds committed, and the rounds."""
    return sum(r.committed for r in text.rounds), len(text.rounds)


def greedy(pair: Pair, prompts: Prompts, tokens: int, progress: Any) -> dict[str, float]:
    """Return by mode and width the share of greedy texts that equal plain decoding."""
    runs, names = [Speculator(pair, FixedLength(0), Settings(0.0, tokens))], []
    for width in WIDTHS:
        for mode, depth in (("match", DEPTH), ("target_init", DEPTH + 1)):
            settings = Settings(0.0, tokens, depth, verification=mode, tree=f"fork:{width}x{depth}")
            runs.append(Speculator(pair, FixedLength(depth), settings))
            names.append(f"{mode}, width {width}")
    plain, *others = run_alternating(runs, prompts, progress=progress)
    shares = {
        name: sum(a.tokens == b.tokens for a, b in zip(texts, plain, strict=True)) / len(plain)
        for name, texts in zip(names, others, strict=True)
    }
    print(
        "\ngreedy texts equal to plain decoding: " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    )
    return shares


@torch.inference_mode()
def surprises(pair: Pair, prompts: Prompts, texts: list[Generation], temperature: float) -> np.ndarray[Any, Any]:
    """Return [prompts, 2]: the sum of -log p over each text under the target, and its length."""
    rows = []
    for (_, prompt), text in zip(prompts, texts, strict=True):
        ids = torch.tensor([[*prompt, *text.tokens]], device=pair.device)
        logits = CachedModel(pair.target, ids.shape[1], pair.vocabulary).read(ids)[0, len(prompt) - 1 : -1]
        logprob = torch.log_softmax(logits / temperature, -1)
        rows.append((-float(logprob.gather(-1, ids[0, len(prompt) :, None]).sum()), len(text.tokens)))
    return np.array(rows)


def ratio(texts: list[Generation], base: list[Generation], of: Any) -> tuple[float, float, float]:
    """Return the ratio of two ratios of sums, `of` one text, with its 95% interval over prompts."""
    a, b = (np.array([of(g) for g in side], dtype=np.float64) for side in (texts, base))
    return interval(len(a), lambda at: a[at, 0].sum() / a[at, 1].sum() / (b[at, 0].sum() / b[at, 1].sum()))


def difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[float, float, float]:
    """Return the difference of two ratios of sums with its 95% interval over prompts."""
    return interval(len(a), lambda at: a[at, 0].sum() / a[at, 1].sum() - b[at, 0].sum() / b[at, 1].sum())


def interval(count: int, of: Any) -> tuple[float, float, float]:
    """Return the value on all prompts and its bootstrap interval."""
    generator = np.random.default_rng(0)
    draws = [of(generator.integers(0, count, count)) for _ in range(REPLICATES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(of(np.arange(count))), float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
