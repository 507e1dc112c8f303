"""Drafters side by side: a draft model, lookup, suffix, and heads on the target's hidden states, trained here.

    python benchmarks/drafters.py --check
    python benchmarks/drafters.py --work drafters --part replay --drafter medusa hydra --temperature 0
    python benchmarks/drafters.py --pair pairs/a --out drafters.json

Parts: `train` fits the head drafters on the pair's training prompts, or finds them in `--work`. `order` counts tokens a
target call of chains and of the published tree of 63 nodes, for which the machine need not be quiet. `replay` chooses for
each drafter on training prompts, and replays on test prompts: the best fixed length and a learned one, the published tree,
its best static part and the nodes that a learned policy verifies, and the bound of someone who knows every accepted length.
`live` decodes all of these in alternation with plain decoding, and Medusa's tree under typical acceptance, which is LOSSY:
texts, rounds and speeds against what replay says. `together` is suffix and draft model at once. `released` decodes with CTC's
candidates as its released code makes them beside ours, and counts what heads know after candidates that are not their first.
The last line is one JSON object.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from drafting.chosen import Chosen, choose, told
from drafting.ground import Ground
from drafting.live import decode, per_call
from drafting.released import as_released, positions_drawn, second_proposals
from drafting.reported import TRAINED, heads, live_bars, node_bar, replayed
from drafting.together import together
from pairs import effort, pair_folder
from specstop.cli.output import progress_bars
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.decode import Pair, load_drafter, load_pair
from specstop.decode.drafters.networks import output_layer
from specstop.policies.display import Progress
from specstop.train import FitOptions, train_drafter
from specstop.train.drafters.run import KEPT_STATES
from specstop.train.drafters.texts import record_texts

DEPTH, TREE = 4, "medusa-63"
SIZES = (63, 24, 8)
"""Nodes of the trees that a learned choice may draft."""

BOTH = "suffix+model"
DRAFTERS = ("model", "lookup", "suffix", *TRAINED, BOTH)
QUICK = ("model", "medusa", BOTH)
"""Of which a quick run makes the choices."""

PARTS = ("train", "order", "replay", "live", "together", "released")
MINUTES, NEAR = 10.0, 0.99


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
        folder, room = pair_folder(options), options.work or Path(other)
        fit = read_prompts(folder / "prompts-train.jsonl", 24 if options.quick else None)
        test = read_prompts(folder / "prompts-test.jsonl", options.prompts)
        plain = load_pair(folder / "target", engine="plain")
        kinds = [kind for kind in TRAINED if kind in options.drafter]
        specs = trained(bars, plain, fit, room, kinds, options.quick, progress)
        pair = load_pair(folder / "target", folder / "draft")
        if "released" in options.part:
            on_texts(bars, plain, test, Path(other) / "texts", specs, options.tokens, progress)
            released(bars, pair, test, specs, options.tokens)
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
    """Print what heads know after candidates that are not their first."""
    ids = encode(prompts, pair.tokenizer, pair.readable - tokens)
    texts = record_texts(
        pair, list(zip(prompts, ids, strict=True)), folder, max_new_tokens=tokens, temperature=0.0, progress=progress
    )
    ends = pair.target.get_input_embeddings(), output_layer(pair.target)
    seconds = bars.figures["second proposals"] = {}
    for kind, spec in specs.items():
        network = load_drafter(spec.partition(":")[2]).network
        seconds[kind] = first, others = second_proposals(network, texts, *ends)
        print(
            f"{kind}, greedy: second proposals right {first:.1%} after the first candidate, {others:.1%} after others"
        )
        if kind == "ctc":
            drawn = bars.figures["ctc positions"] = positions_drawn(network, texts, *ends)
            print(f"ctc, greedy: positions drawn for so many tokens {' '.join(f'{count:.2f}' for count in drawn)}")


def released(bars: Bars, pair: Pair, prompts: list[Prompt], specs: dict[str, str], tokens: int) -> None:
    """Print what the CTC-drafter's candidates bring as its released code makes them, beside ours."""
    if "ctc" not in specs:
        return
    ids = encode(prompts, pair.tokenizer, pair.readable - tokens)
    named = [(prompt.id, own) for prompt, own in zip(prompts, ids, strict=True)]
    theirs, ours, speed, same = as_released(pair, specs["ctc"].partition(":")[2], named, tokens)
    bars.figures["ctc candidates"] = {"released": theirs, "forward": ours, "speed": speed.value}
    print(
        f"ctc in {TREE}, greedy: {theirs:.2f} tokens a call with the released candidates, {ours:.2f} with ours; "
        f"tokens/s {speed.text()} of ours"
    )
    bars.add("released candidates, texts", same, same == len(prompts), f"{same} of {len(prompts)} equal plain decoding")


def compare(bars: Bars, ground: Ground, specs: dict[str, str], names: list[str], parts: list[str], quick: bool) -> None:
    """Run the parts of one temperature."""
    at = f"T={ground.temperature:g}"
    figures: dict[str, Any] = bars.figures.setdefault(at, {})
    if "order" in parts:
        order(bars, ground, {name: specs.get(name, name) for name in names}, at)
    if quick:
        names = [name for name in names if name in QUICK]
    if BOTH in names and {"together", "replay", "live"} & set(parts):
        spec, found = together(ground)
        specs = {**specs, BOTH: spec}
        rate, over = max(found.rate, found.first), max(found.rate, found.first) / max(found.first, found.other)
        text = f"{spec}: {rate:.0f}, alone suffix {found.first:.0f}, model {found.other:.0f}; {over:.3f} of the better"
        figures[BOTH] = [spec, rate, found.first, found.other]
        bars.add(f"{at} {BOTH}", over, over >= NEAR, f"{text}; {NEAR:g} wanted")
        bars.add(f"{at} {BOTH} on code", over, over > 1.0, f"{over:.3f}; above 1 wanted, as all prompts are code")
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


if __name__ == "__main__":
    sys.exit(main())
