"""Drafters side by side: a draft model, lookup, suffix, and heads on the target's hidden states, trained here.

    python benchmarks/drafters.py --check
    python benchmarks/drafters.py --pair pairs/a --out drafters.json

On the embedded pair, greedy and at T = 0.7: each head drafter is trained on the pair's training prompts, then every drafter
decodes the test prompts with chains of each length, with confidence rules, and with Medusa's published tree of 63 nodes
(exact acceptance, and Medusa's typical one, which is LOSSY), all in alternation with plain decoding. For each: tokens a
target call and speed over plain decoding, of its fastest setting and of the tree. The last line is one JSON object.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from pairs import pair_folder
from specstop.cli.console.output import progress_bars
from specstop.collect.prompts.read import encode, read_prompts
from specstop.collect.run import reading_room
from specstop.decode import Generation, Pair, Settings, Speculator, Tally, load_pair, with_drafter
from specstop.decode.compare.alternate import run_alternating
from specstop.policies import Confidence, FixedLength, StopPolicy
from specstop.train import FitOptions, train_drafter

DEPTH = 4
TRAINED = ("medusa", "hydra", "ctc", "layer")
OTHERS = ("model", "lookup", "suffix")
TEMPERATURES = (0.0, 0.7)
TREE = "medusa-63"
MINUTES = 10.0
Prompts = list[tuple[str, list[int]]]


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    count, tokens, epochs = (3, 24, 1) if options.quick else (40, 128, None)
    bars = Bars()
    with progress_bars() as progress, tempfile.TemporaryDirectory() as room:
        folder = pair_folder(options, progress)
        train = read_prompts(folder / "prompts-train.jsonl", 24 if options.quick else None)
        plain = load_pair(folder / "target", engine="plain")
        fitted: dict[str, float] = {}
        for kind in TRAINED:
            began = time.monotonic()
            work = FitOptions(epochs=epochs, checkpoints=Path(room) / f"work-{kind}")
            made = train_drafter(
                plain,
                train,
                Path(room) / kind,
                kind,
                depth=DEPTH,
                max_new_tokens=tokens,
                fit_options=work,
                progress=progress,
            )
            fitted[kind] = time.monotonic() - began
            shares = made.metrics["acceptance"]
            print(f"{kind:<8} trained in {fitted[kind]:.0f} s; held-out acceptance", *(f"{s:.3f}" for s in shares))
        bars.figures["seconds to train"] = {kind: round(seconds, 1) for kind, seconds in fitted.items()}
        slowest = max(fitted.values())
        bars.add(
            "training", round(slowest, 1), slowest <= 60 * MINUTES, f"slowest {slowest:.0f} s, at most {MINUTES:g} min"
        )
        pair = load_pair(folder / "target", folder / "draft")
        specs = {name: name for name in OTHERS} | {kind: f"{kind}:{Path(room) / kind}" for kind in TRAINED}
        drafters = {name: with_drafter(pair, spec) for name, spec in specs.items()}
        read = read_prompts(folder / "prompts-test.jsonl", count)
        ids = encode(read, pair.tokenizer, reading_room(pair, tokens + 64))
        prompts = list(zip([p.id for p in read], ids, strict=True))
        for temperature in TEMPERATURES:
            measure(bars, drafters, prompts, temperature, tokens, progress)
    compared = f"{len(prompts)} prompts of {tokens} tokens, {len(drafters)} drafters, on {folder.name}"
    return bars.finish(options, compared, whole=len(prompts) >= 40)


def measure(
    bars: Bars, drafters: dict[str, Pair], prompts: Prompts, temperature: float, tokens: int, progress: Any
) -> None:
    """Decode with every drafter and setting in alternation, and note figures and bars of one temperature."""
    policies: list[StopPolicy] = [*(FixedLength(k) for k in range(1, DEPTH + 1)), Confidence(0.3), Confidence(0.5)]
    runs, names = [Speculator(drafters["model"], FixedLength(0), Settings(temperature, tokens))], [("plain", "", False)]
    for name, pair in drafters.items():
        for policy in policies:
            runs.append(Speculator(pair, policy, Settings(temperature, tokens, DEPTH)))
            names.append((name, policy.name, True))
        for mode in ("match", *(["typical"] if temperature > 0 and name == "medusa" else [])):
            settings = Settings(temperature, tokens, DEPTH, verification=mode, tree=TREE)
            runs.append(Speculator(pair, FixedLength(DEPTH), settings))
            names.append((name, f"{TREE}, {mode}{' (LOSSY)' if mode == 'typical' else ''}", mode == "match"))
    texts = run_alternating(runs, prompts, progress=progress)
    base = Tally.of(texts[0]).tokens_per_s
    print(f"\nT = {temperature:g}: tokens a target call, speed over plain decoding ({base:.0f} tokens/s)")
    best: dict[str, tuple[float, float, str]] = {}
    trees: dict[str, float] = {}
    for (name, setting, lossless), made in zip(names, texts, strict=True):
        tally = Tally.of(made)
        speed, per_call = tally.tokens_per_s / base, tally.block_efficiency
        print(f"  {name:<8}{setting:<28}{per_call:6.2f}{speed:7.2f}")
        if name != "plain" and lossless:
            best[name] = max(best.get(name, (0.0, 0.0, "")), (speed, per_call, setting))
            if setting.startswith(TREE):
                trees[name] = per_call
    key = f"T={temperature:g}"
    bars.figures[key] = {name: {"speed": s, "per_call": c, "setting": how} for name, (s, c, how) in best.items()}
    same = same_texts(texts, names)
    bars.add(f"{key} texts", same, same == 1.0, f"{same:.1%} of lossless texts equal plain decoding, all wanted")
    heads = max((best[kind][0], kind) for kind in TRAINED)
    model = best["model"][0]
    ratio = heads[0] / model
    bars.add(
        f"{key} heads", ratio, ratio > 1.0, f"{heads[1]} has {ratio:.2f} x the draft model's tokens/s, more wanted"
    )
    order = " < ".join(f"{kind} {trees[kind]:.2f}" for kind in ("medusa", "hydra", "ctc"))
    ordered = trees["medusa"] < trees["hydra"] < trees["ctc"]
    bars.add(f"{key} order", {k: trees[k] for k in trees}, ordered, f"tokens a call in {TREE}: {order} wanted")


def same_texts(texts: list[list[Generation]], names: list[tuple[str, str, bool]]) -> float:
    """Return the share of texts of lossless settings that equal the first setting's."""
    pairs = [
        a.tokens == b.tokens
        for made, (_, _, lossless) in zip(texts, names, strict=True) if lossless
        for a, b in zip(made, texts[0], strict=True)
    ]  # fmt: skip
    return sum(pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
