"""Drafters side by side: a draft model, lookup, suffix, and heads on the target's hidden states, trained here.

    python benchmarks/drafters.py --check
    python benchmarks/drafters.py --pair pairs/a --out drafters.json

On the embedded pair: each head drafter is trained on the pair's training prompts (or found in `--work`). By replay, greedy:
for Medusa and Hydra the nodes of the published tree of 63 that a learned policy verifies, beside the whole tree and its best
static part; suffix and draft model together, from the chance on that training prompts name. CTC's candidates as its released
code makes them, beside ours. Then, greedy and at T = 0.7, every drafter decodes the test prompts with chains of each length,
with confidence rules and with the tree of 63 nodes (exact acceptance, and Medusa's typical one, which is LOSSY), all in
alternation with plain decoding. For each: tokens a target call and speed over plain decoding, of its fastest setting and of
the tree. The last line is one JSON object.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from drafting.chosen import Ground, chosen_drafter, chosen_nodes
from drafting.released import tokens_a_call
from pairs import effort, pair_folder
from specstop.cli.console.output import progress_bars
from specstop.collect.prompts.read import Prompt, encode, read_prompts
from specstop.collect.run import reading_room
from specstop.decode import Generation, Pair, Settings, Speculator, Tally, load_drafter, load_pair, with_drafter
from specstop.decode.compare.alternate import run_alternating
from specstop.decode.drafters.heads.layer_network import CTCNetwork
from specstop.decode.topology import parse_tree
from specstop.policies import Confidence, FixedLength, StopPolicy
from specstop.policies.progress import Progress
from specstop.train import FitOptions, train_drafter
from specstop.train.drafters.run import KEPT_STATES
from specstop.train.drafters.texts import record_texts

DEPTH = 4
TRAINED = ("medusa", "hydra", "ctc", "layer")
OTHERS = ("model", "lookup", "suffix")
TEMPERATURES = (0.0, 0.7)
TREE = "medusa-63"
MINUTES, NODES = 10.0, 1.05
Prompts = list[tuple[str, list[int]]]


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--work", type=Path, help="folder where drafters and traces are kept, and drafters found again")
    parser.add_argument("--prompts", type=int, default=40, help="test prompts")
    options = parser.parse_args()
    count, tokens, epochs = (3, 24, 1) if options.quick else (options.prompts, 128, None)
    bars = Bars()
    with progress_bars() as progress, tempfile.TemporaryDirectory() as other:
        folder, room = pair_folder(options, progress), options.work or Path(other)
        train = read_prompts(folder / "prompts-train.jsonl", 24 if options.quick else None)
        test = read_prompts(folder / "prompts-test.jsonl", count)
        plain = load_pair(folder / "target", engine="plain")
        specs = trained(bars, plain, train, room, tokens, epochs, progress)
        pair = load_pair(folder / "target", folder / "draft")
        with tempfile.TemporaryDirectory(dir=room) as traces:
            few = train[: 24 if options.quick else 4 * count]
            ground = Ground(pair, few, test, tokens, DEPTH, effort(options), Path(traces), progress)
            both = choices(bars, ground, specs)
            as_released(bars, plain, test, Path(traces) / "texts", specs["ctc"], tokens, progress)
        names = {name: name for name in OTHERS} | {"suffix+model": both} | specs
        drafters = {name: with_drafter(pair, spec) for name, spec in names.items()}
        ids = encode(test, pair.tokenizer, reading_room(pair, tokens + 64))
        prompts = list(zip([p.id for p in test], ids, strict=True))
        for temperature in TEMPERATURES:
            measure(bars, drafters, prompts, temperature, tokens, progress)
    compared = f"{len(prompts)} prompts of {tokens} tokens, {len(drafters)} drafters, on {folder.name}"
    return bars.finish(options, compared, whole=len(prompts) >= 40)


def trained(
    bars: Bars, pair: Pair, prompts: list[Prompt], room: Path, tokens: int, epochs: int | None, progress: Progress
) -> dict[str, str]:
    """Return the spec of each head drafter, trained here unless it is there already."""
    fitted: dict[str, float] = {}
    for kind in TRAINED:
        began, texts = time.monotonic(), room / "work-medusa" / KEPT_STATES
        if (room / kind).is_dir():
            made = load_drafter(room / kind)
        else:
            work = room / f"work-{kind}"
            if kind != "medusa" and not work.exists() and texts.exists():
                shutil.copytree(texts, work / KEPT_STATES)  # the same texts for all
            made = train_drafter(
                pair, prompts, room / kind, kind, depth=DEPTH, max_new_tokens=tokens,
                fit_options=FitOptions(epochs=epochs, checkpoints=work), progress=progress,
            )  # fmt: skip
            fitted[kind] = time.monotonic() - began
        took = f"in {fitted[kind]:.0f} s" if kind in fitted else "before"
        print(f"{kind:<8} trained {took}; held-out acceptance", *(f"{s:.3f}" for s in made.metrics["acceptance"]))
    bars.figures["seconds to train"] = {kind: round(seconds, 1) for kind, seconds in fitted.items()}
    slowest = max(fitted.values(), default=0.0)
    if fitted:
        text = f"slowest {slowest:.0f} s, at most {MINUTES:g} min"
        bars.add("training", round(slowest, 1), slowest <= 60 * MINUTES, text)
    return {kind: f"{kind}:{room / kind}" for kind in TRAINED}


def choices(bars: Bars, ground: Ground, specs: dict[str, str]) -> str:
    """Print what is chosen by replay, and return the spec of suffix and model together."""
    for kind in ("medusa", "hydra"):
        found = chosen_nodes(ground, specs[kind], kind, TREE)
        shown = ", ".join(f"{name} {value:.4g}" for name, value in found.items())
        text = f"learned nodes {found['ratio']:.3f} x the best static tree, {NODES:g} wanted (replayed; {shown})"
        bars.add(f"{kind} nodes", found, found["ratio"] >= NODES, text)
    found, held = chosen_drafter(ground)
    better = max(held.first, held.other)
    text = f"{held.rate:.0f} tokens/s on test prompts, the better of the two {better:.0f} (replayed), 0.99 of it wanted"
    bars.add("suffix+model", [found.sure, held.rate, held.first, held.other], held.rate >= 0.99 * better, text)
    sure = 1.0 if found.sure is None else found.sure
    return f"suffix?sure={sure:g}+model"


def as_released(
    bars: Bars, pair: Pair, prompts: list[Prompt], folder: Path, spec: str, tokens: int, progress: Progress
) -> None:
    """Print tokens a target call of the CTC-drafter with its released candidates, and with ours."""
    network = load_drafter(spec.partition(":")[2]).network
    assert isinstance(network, CTCNetwork)
    ids = encode(prompts, pair.tokenizer, reading_room(pair, tokens))
    texts = record_texts(
        pair, list(zip(prompts, ids, strict=True)), folder, max_new_tokens=tokens, temperature=0.0, progress=progress
    )
    ends = pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    released, forward = tokens_a_call(network, texts, parse_tree(TREE), *ends)
    bars.figures["ctc candidates"] = {"released": released, "forward": forward}
    print(f"ctc in {TREE}, greedy: {released:.2f} tokens a call with the released candidates, {forward:.2f} with ours")


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
