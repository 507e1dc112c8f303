"""Drafters side by side: a draft model, lookup, suffix, and heads on the target's hidden states, trained here.

    python benchmarks/drafters.py --check
    python benchmarks/drafters.py --work drafters --part replay --drafter medusa hydra --temperature 0
    python benchmarks/drafters.py --pair pairs/a --out drafters.json

Parts: `train` fits the head drafters on the pair's training prompts, or finds them in `--work`. `order` counts tokens a
target call of chains and of the published tree of 63 nodes, for which the machine need not be quiet. `replay` chooses for
each drafter on training prompts, and replays on test prompts: the best fixed length and a learned one, the published tree,
its best static part and the nodes that a learned policy verifies, and the bound of someone who knows every accepted length.
`live` decodes all of these in alternation with plain decoding, and Medusa's tree under typical acceptance, which is LOSSY:
texts, rounds and speeds against what replay says. `together` is suffix and draft model at once. `released` counts what CTC's
candidates bring as its released code makes them, and what heads know after candidates that are not their first. The last
line is one JSON object.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from drafting.chosen import CHAIN, FIXED, NODES, STATIC, WHOLE, Chosen, choose, told
from drafting.ground import Ground
from drafting.live import Live, beside, decode, per_call
from drafting.released import second_proposals, tokens_a_call
from drafting.together import together
from pairs import effort, pair_folder
from specstop.cli.console.output import progress_bars
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.collect.run import reading_room
from specstop.decode import Pair, load_drafter, load_pair
from specstop.decode.drafters.heads.layer_network import CTCNetwork
from specstop.decode.topology import parse_tree
from specstop.policies.progress import Progress
from specstop.train import FitOptions, train_drafter
from specstop.train.drafters.run import KEPT_STATES
from specstop.train.drafters.texts import record_texts
from specstop.train.report.records import Ratio

DEPTH, TREE = 4, "medusa-63"
SIZES = (63, 24, 8)
"""Nodes of the trees that a learned choice may draft."""

TRAINED = ("medusa", "hydra", "ctc", "layer")
BOTH = "suffix+model"
DRAFTERS = ("model", "lookup", "suffix", *TRAINED, BOTH)
QUICK = ("medusa", BOTH)
"""Of which a quick run makes the choices."""

PARTS = ("train", "order", "replay", "live", "together", "released")
MINUTES, BETTER, NEAR, MISS, ROUNDS = 10.0, 1.05, 0.99, 0.07, 10_000
SETTINGS = (FIXED, CHAIN, WHOLE, STATIC, NODES)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, help="folder where drafters are kept, and found again")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to run; a check needs all")
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=DRAFTERS, help="drafters; a check needs all")
    parser.add_argument("--temperature", nargs="+", type=float, help="temperatures; a check needs 0 and 0.7")
    parser.add_argument("--prompts", type=int, default=40, help="test prompts; a check needs 40")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of a text")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.temperature = 4, 24, options.temperature or [0.7]
    temperatures = options.temperature or [0.0, 0.7]
    bars = Bars()
    with progress_bars() as progress, tempfile.TemporaryDirectory() as other:
        folder, room = pair_folder(options, progress), options.work or Path(other)
        fit = read_prompts(folder / "prompts-train.jsonl", 24 if options.quick else None)
        test = read_prompts(folder / "prompts-test.jsonl", options.prompts)
        plain = load_pair(folder / "target", engine="plain")
        kinds = [kind for kind in TRAINED if kind in options.drafter]
        specs = trained(bars, plain, fit, room, kinds, options.quick, progress)
        if "released" in options.part:
            on_texts(bars, plain, test, Path(other) / "texts", specs, options.tokens, progress)
        pair = load_pair(folder / "target", folder / "draft")
        few = fit[: (2 if options.quick else 4) * len(test)]
        for temperature in temperatures:
            with tempfile.TemporaryDirectory(dir=other) as traces:
                ground = Ground(
                    pair, few, test, options.tokens, DEPTH, TREE, temperature, effort(options),
                    SIZES[1:2] if options.quick else SIZES, Path(traces), progress,
                )  # fmt: skip
                compare(bars, ground, specs, options.drafter, options.part, options.quick)
    whole = len(test) >= 40 and not set(PARTS) - set(options.part) and not set(DRAFTERS) - set(options.drafter)
    compared = f"{len(test)} prompts of {options.tokens} tokens, {len(options.drafter)} drafters, on {folder.name}"
    return bars.finish(options, compared, whole=whole and {0.0, 0.7} <= set(temperatures))


def trained(
    bars: Bars, pair: Pair, prompts: list[Prompt], room: Path, kinds: list[str], quick: bool, progress: Progress
) -> dict[str, str]:
    """Return the spec of each head drafter, trained here unless it is there already; a run that was cut off goes on."""
    fitted: dict[str, float] = {}
    for kind in kinds:
        began = time.process_time()
        if (room / kind).is_dir():
            made = load_drafter(room / kind)
        else:
            work = room / f"work-{kind}"
            texts = next(room.glob(f"work-*/{KEPT_STATES}"), None)
            if not work.exists() and texts is not None:
                shutil.copytree(texts, work / KEPT_STATES)  # the same texts for all
            made = train_drafter(
                pair, prompts, room / kind, kind, depth=DEPTH, max_new_tokens=24 if quick else 128, progress=progress,
                fit_options=FitOptions(epochs=1 if quick else None, checkpoints=work, resume=work.exists()),
            )  # fmt: skip
            fitted[kind] = time.process_time() - began
        took = f"in {fitted[kind]:.0f} s of CPU" if kind in fitted else "before"
        print(f"{kind:<8} trained {took}; held-out acceptance", *(f"{s:.3f}" for s in made.metrics["acceptance"]))
    bars.figures["CPU seconds to train"] = {kind: round(seconds, 1) for kind, seconds in fitted.items()}
    slowest = max(fitted.values(), default=0.0)
    if fitted:
        text = f"slowest {slowest:.0f} s of CPU, at most {MINUTES:g} min on two cores"
        bars.add("training", round(slowest, 1), slowest <= 2 * 60 * MINUTES, text)
    return {kind: f"{kind}:{room / kind}" for kind in kinds}


def on_texts(
    bars: Bars, pair: Pair, prompts: list[Prompt], folder: Path, specs: dict[str, str], tokens: int, progress: Progress
) -> None:
    """Print what heads know after candidates that are not their first, and what CTC's released candidates bring."""
    ids = encode(prompts, pair.tokenizer, reading_room(pair, tokens))
    texts = record_texts(
        pair, list(zip(prompts, ids, strict=True)), folder, max_new_tokens=tokens, temperature=0.0, progress=progress
    )
    ends = pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    seconds = bars.figures["second proposals"] = {}
    for kind, spec in specs.items():
        network = load_drafter(spec.partition(":")[2]).network
        seconds[kind] = first, others = second_proposals(network, texts, *ends)
        print(
            f"{kind}, greedy: second proposals right {first:.1%} after the first candidate, {others:.1%} after others"
        )
        if isinstance(network, CTCNetwork):
            released, forward = tokens_a_call(network, texts, parse_tree(TREE), *ends)
            bars.figures["ctc candidates"] = {"released": released, "forward": forward}
            print(
                f"ctc in {TREE}, greedy: {released:.2f} tokens a call with the released candidates, {forward:.2f} with ours"
            )


def compare(bars: Bars, ground: Ground, specs: dict[str, str], names: list[str], parts: list[str], quick: bool) -> None:
    """Run the parts of one temperature."""
    at = f"T={ground.temperature:g}"
    figures: dict[str, Any] = bars.figures.setdefault(at, {})
    if "order" in parts:
        order(bars, ground, {name: specs.get(name, name) for name in names}, at)
    if quick:
        names = [name for name in names if name in QUICK]
    if BOTH in names and {"together", "replay", "live"} & set(parts):
        found = together(ground)
        specs = {**specs, BOTH: found.spec}
        better = max(found.alone.values())
        alone = ", ".join(f"{name} {rate:.0f}" for name, rate in found.alone.items())
        text = f"{found.spec}, length {found.length}: {found.rate:.0f} tokens/s, alone {alone}; {NEAR:g} of the better wanted"
        bars.add(f"{at} {BOTH}", [found.spec, found.length, found.rate, found.alone], found.rate >= NEAR * better, text)
    if not {"replay", "live"} & set(parts):
        return
    chosen: dict[str, Chosen] = {}
    for name in names:
        chosen[name] = choose(ground, specs.get(name, name))
        figures[name] = replayed(name, chosen[name])
        if name in ("medusa", "hydra"):
            node_bar(bars, f"{at} {name} nodes", chosen[name], told(ground, specs[name], chosen[name]))
    if "live" in parts:
        lived = {name: decode(ground, specs.get(name, name), one) for name, one in chosen.items()}
        live_bars(bars, at, lived, figures)
        heads(bars, ground, {name: specs.get(name, name) for name in names}, chosen, lived, at)


def order(bars: Bars, ground: Ground, drafters: dict[str, str], at: str) -> None:
    """Print tokens a target call of every drafter, and note whether they come in the order of the CTC-drafter's paper."""
    found = per_call(ground, drafters)
    print(f"{at}: tokens a target call in chains of {ground.depth} and in {ground.tree}")
    for name, (chain, tree, _) in found.items():
        print(f"  {name:<14}{chain:6.2f}{tree:7.2f}", flush=True)
    bars.figures[f"{at} tokens a call"] = found
    same, texts = sum(same for *_, same in found.values()), 2 * len(found) * len(ground.test)
    bars.add(f"{at} order, texts", same, same == texts, f"{same} of {texts} texts equal plain decoding, all wanted")
    names = [name for name in ("medusa", "hydra", "ctc") if name in found]
    trees = [found[name][1] for name in names]
    text = " < ".join(f"{name} {tree:.2f}" for name, tree in zip(names, trees, strict=True))
    if len(names) > 1:
        bars.add(f"{at} order", trees, trees == sorted(trees), f"tokens a call in {ground.tree}: {text} wanted")


def replayed(name: str, chosen: Chosen) -> dict[str, Any]:
    """Print and return what replay says of a drafter's settings."""
    bound = chosen.bound / chosen.plain
    print(f"{name}: tokens a target call, speed over plain decoding, replayed; no one has more than {bound:.2f}")
    low = chosen.profile.low
    first, later, plain, one = steps = [1e3 * s for s in (low.draft_s[0], low.later_s, *low.verify_s[:2])]
    print(f"  draft steps {first:.2f} and {later:.2f} ms, verifications of no token {plain:.2f}, of one {one:.2f} ms")
    out: dict[str, Any] = {"bound": bound, "ms": steps}
    for setting in SETTINGS:
        played = chosen.played[setting]
        speed, sent = played.rate / chosen.plain, float(played.verified.sum() / played.rounds.sum())
        print(
            f"  {setting:<20}{played.block_efficiency:6.2f}{speed:7.2f}   {sent:.1f} verified, {played.name}",
            flush=True,
        )
        out[setting] = {"per call": played.block_efficiency, "speed": speed, "verified": sent, "policy": played.name}
    return out


def node_bar(bars: Bars, name: str, chosen: Chosen, told: tuple[float, float]) -> None:
    """Note whether learned nodes are ahead of the best static tree, or by `told` cannot be."""
    ratio = chosen.over(NODES, STATIC)
    free, priced = (rate / chosen.played[STATIC].rate for rate in told)
    text = (
        f"learned {ratio.value:.3f} [{ratio.low or 0:.3f}, {ratio.high or 0:.3f}] x the best static tree, {BETTER:g} wanted; "
        f"learned on the test prompts themselves {priced:.3f}, decisions free {free:.3f}"
    )
    met = ratio.value >= BETTER or free < BETTER
    bars.add(name, [ratio.value, ratio.low, ratio.high, priced, free], met, text)


def live_bars(bars: Bars, at: str, lived: dict[str, Live], figures: dict[str, Any]) -> None:
    """Print what was decoded, and note its bars."""
    for name, live in lived.items():
        print(f"{at} {name}, live: tokens a target call, speed over plain decoding, predicted less measured")
        for setting, (tokens, speed) in live.tallies.items():
            miss = f"{live.miss[setting]:+.1%}" if setting in live.miss else ""
            print(f"  {setting:<40}{tokens:6.2f}{speed:7.2f} {miss}", flush=True)
        figures.setdefault(name, {})["live"] = live.tallies
        worst = max(map(abs, live.miss.values()))
        bars.add(f"{at} {name} predicted", live.miss, worst <= MISS, f"worst {worst:.1%}, within {MISS:.0%} wanted")
        text = f"{live.rounds} rounds, {live.ties} ties, {live.wrong} wrong; {ROUNDS} wanted, none wrong"
        bars.add(f"{at} {name} replay", live.rounds, not live.wrong and live.rounds >= ROUNDS, text)
    same, texts = sum(live.same for live in lived.values()), sum(live.texts for live in lived.values())
    bars.add(
        f"{at} texts",
        [same, texts],
        same == texts,
        f"{same} of {texts} lossless texts equal plain decoding, all wanted",
    )


def heads(
    bars: Bars, ground: Ground, specs: dict[str, str], chosen: dict[str, Chosen], lived: dict[str, Live], at: str
) -> None:
    """Decode with every head and the draft model in turns, each in its fastest setting, and note the best head."""
    names = [name for name in ("model", *TRAINED) if name in lived]
    if len(names) < 2 or names[0] != "model":
        return
    best = {name: max(SETTINGS, key=lambda setting: lived[name].tallies[setting][1]) for name in names}
    found = beside(ground, {name: (specs[name], best[name], chosen[name]) for name in names}, "model")
    for name, (speed, ratio) in found.items():
        print(
            f"{at} {name} in turns with the others, {best[name]}: {speed:.2f} of plain, {ratio.text()} of the draft model"
        )
    head = max(names[1:], key=lambda name: found[name][1].value)
    ratio = found[head][1]
    bars.figures[f"{at} in turns"] = {name: [speed, *_numbers(ratio)] for name, (speed, ratio) in found.items()}
    bars.add(
        f"{at} heads",
        _numbers(ratio),
        ratio.value > 1.0,
        f"{head} has {ratio.text()} x the draft model's tokens/s, more wanted",
    )


def _numbers(ratio: Ratio) -> list[float | None]:
    return [ratio.value, ratio.low, ratio.high]


if __name__ == "__main__":
    sys.exit(main())
