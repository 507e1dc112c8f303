"""Texts decoded side by side: the same as alone, replayed as they ran, policies by load, speed, memory that does not grow.

    python benchmarks/batch.py --check
    python benchmarks/batch.py --pair pairs/a --out batch.json

Of the parts `loads` replays policies by batch size and decodes some live, and `plain` decodes ours beside plain decoding: on
weights of 100M each takes an hour and more, half of it the profile. Without `--pair` the shipped pair is used. Speeds are
compared on it and on a pair of 100M and 18M untrained weights. The last line is one JSON object; with `--check` the exit code
is 1 where a bar falls short.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from joint_rounds import joint_rounds
from loads.live import beside_plain, live
from loads.replayed import CLEAR, compare, fixed_and, gpu_like, settled
from pairs import pair_folder
from replay import equality
from shapes import scripted_pair
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.collect.run import collect
from specstop.decode import Generation, Pair, Settings, Speculator, load_pair, stream_key
from specstop.decode.benchmark import run_alternating
from specstop.decode.hf.baseline import PLAIN, Assisted
from specstop.decode.loop import Request
from specstop.decode.models.cuda import open_cache
from specstop.decode.models.pair import with_engine
from specstop.decode.profile import add_decisions, loop_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength, StopPolicy
from specstop.policies.profile import Profile
from specstop.policies.registry import load_policy
from specstop.train.fit.run import train
from specstop.train.replay.traces.arrays import trace_arrays

TREE, DEPTH, TIE = "3,2,1,1", 6, 1e-4
MODES = [("match", None), ("match", TREE), ("rejection", None), ("rejection", "2,2,1"), ("block", None)]
SPECS = ("fixed:3", "confidence:0.3", "product:0.2", "adaedl:0.3")
SIZES, LENGTHS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 6)
FEATURES = 3e-5
PARTS = ("texts", "rounds", "joint", "loads", "plain", "rows", "speeds", "memory")
LOADS = (1, 2, 4, 8, 16, 32)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=list(PARTS), help="what to compare; a check takes all"
    )
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=list(LOADS),
        help="batch sizes of the parts `loads` and `plain`; a check takes all",
    )
    options = parser.parse_args()
    bars = Bars()
    folder = pair_folder(options)
    pair = load_pair(folder / "target", folder / "draft")
    count, tokens = (6, 16) if options.quick else (40, 128)
    prompts = read_prompts(folder / "prompts-test.jsonl", count)
    ids = encode(prompts, pair.tokenizer, pair.readable - tokens - DEPTH)
    if "texts" in options.part:
        same_texts(pair, prompts, ids, tokens, options, bars)
    with tempfile.TemporaryDirectory() as out:
        if "rounds" in options.part:
            other = read_prompts(folder / "prompts-train.jsonl", count)
            replayed(pair, prompts, ids, other, tokens, Path(out), options, bars)
        if {"loads", "plain"} & set(options.part):
            # Of only as many as are tested on, another fixed length is the best one.
            other = read_prompts(folder / "prompts-train.jsonl", 4 * count)
            loads(pair, prompts, ids, other, tokens, Path(out), options, bars)
        if "joint" in options.part:
            many = read_prompts(folder / "prompts-train.jsonl", 4 if options.quick else 320)
            joint_rounds(pair, many, tokens, Path(out), options, bars)
        if "rows" in options.part:
            collected(pair, prompts, tokens // 2, Path(out), options, bars)
    if "speeds" in options.part:
        stock = load_pair(folder / "target", folder / "draft", engine="plain")
        speeds("shipped" if options.pair is None else options.pair.name, pair, ids, tokens // 2, options, bars, stock)
        if not options.quick:
            large, _ = scripted_pair(("100M", "18M"), "cpu", torch.float32, 512, 0.7)
            texts = [[7 + at, 5, 3] * 12 for at in range(32)]
            speeds("100M", with_engine(large), texts, 24, options, bars, large, least=0.0)
    if "memory" in options.part:
        memory(options, bars)
    whole = len(prompts) >= 40 and set(options.part) == set(PARTS) and set(options.sizes) >= set(LOADS)
    return bars.finish(options, f"{len(prompts)} prompts of {tokens} tokens: {', '.join(options.part)}", whole)


def requests(prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> list[Request]:
    """Return the prompts, each with the key of its noise."""
    return [Request(tokens, stream_key(0, prompt.id)) for prompt, tokens in zip(prompts, ids, strict=True)]


def same_texts(
    pair: Pair,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    tokens: int,
    options: argparse.Namespace,
    bars: Bars,
) -> None:
    """Compare each text of a batch with its own alone, rejection under shared keys."""
    compared, other, ties = 0, 0, []
    for mode, tree in MODES[: 2 if options.quick else None]:
        for temperature in (0.7,) if mode != "match" or options.quick else (0.0, 0.7):
            settings = Settings(temperature, tokens, verification=mode, tree=tree)
            asked = requests(prompts, ids)
            texts = [Speculator(pair, FixedLength(4), settings, batch=batch).run(asked) for batch in (1, 3, 8)]
            for made in texts[1:]:
                for at, (own, alone) in enumerate(zip(made, texts[0], strict=True)):
                    compared += 1
                    if own.tokens == alone.tokens:
                        continue
                    other += 1
                    ties.append(
                        f"{mode} {tree or 'chain'} T={temperature:g} {prompts[at].id}: {tie(pair, ids[at], own, alone)}"
                    )
    for line in ties:
        print(f"      differs: {line}")
    bars.add(
        "texts that differ from their own alone",
        other,
        other <= compared / 200 and compared > 0,
        f"{other} of {compared}; 1 in 200",
    )


@torch.inference_mode()
def tie(pair: Pair, prompt: list[int], own: Generation, alone: Generation) -> str:
    """Return where two texts part, and how far apart the target's two best logits are there."""
    at = next(i for i, (a, b) in enumerate(zip(own.tokens, alone.tokens, strict=False)) if a != b)
    text = [*prompt, *own.tokens[:at]]
    row = open_cache(pair.target, len(text), pair.vocabulary).read(torch.tensor([text], device=pair.device), 1)[0, 0]
    best = row.topk(2).values.tolist()
    return f"token {at}, best logits {best[0]:.5f} and {best[1]:.5f}"


def replayed(
    pair: Pair, prompts: Sequence[Prompt], ids: Sequence[list[int]], other: Sequence[Prompt], tokens: int, out: Path,
    options: argparse.Namespace, bars: Bars,
) -> None:  # fmt: skip
    """Compare the rounds of batches with those that replay plays."""
    total = ties = wrong = 0
    for temperature in (0.7,) if options.quick else (0.0, 0.7):
        for tree in (None, TREE):
            told = {"temperature": temperature, "max_new_tokens": tokens, "depth": DEPTH, "tree": tree}
            told["verification"] = "match"
            held, seen = (
                collect(pair, side, out / f"{temperature}{tree}{at}", **told)
                for at, side in enumerate((prompts, other))
            )
            known = encode(other, pair.tokenizer, pair.readable - tokens)
            costs = {"temperature": temperature, "verification": "match", "tree": tree}
            profile = measure_profile(pair, known[:4], depth=DEPTH, new_tokens=16, **costs)
            arrays = trace_arrays(held)
            policies = [load_policy(spec).limited(arrays.depth) for spec in SPECS]
            policies += [
                train(seen, profile, rule="gain").policy if tree else train(seen, profile, head="logistic").policy
            ]
            for policy in policies:
                for batch in (4, 8):
                    run = Speculator(
                        pair,
                        policy,
                        Settings(temperature, tokens, tree=tree, verification="match"),
                        profile,
                        batch=batch,
                    )
                    sums = equality(arrays, policy, profile, run.run(requests(prompts, ids)))
                    total, ties, wrong = total + sums[0], ties + sums[1], wrong + sums[2]
    enough = total >= 20_000 or options.quick
    bars.add(
        "rounds of batches replayed as live", total, wrong == 0 and ties <= max(1, total / 2000) and enough,
        f"{total} rounds, {ties} ties, {wrong} wrong; 20,000, none wrong",
    )  # fmt: skip


def loads(
    pair: Pair, prompts: Sequence[Prompt], ids: Sequence[list[int]], other: Sequence[Prompt], tokens: int, out: Path,
    options: argparse.Namespace, bars: Bars,
) -> None:  # fmt: skip
    """Compare policies by batch size in replay, by costs measured here and by those of a machine like a GPU; some live."""
    sizes = LOADS[:2] if options.quick else tuple(sorted(set(options.sizes)))
    told = {"temperature": 0.7, "max_new_tokens": tokens, "depth": DEPTH, "verification": "match"}
    held, seen = (collect(pair, side, out / f"loads{at}", **told) for at, side in enumerate((prompts, other)))
    known = encode(other, pair.tokenizer, pair.readable - tokens)
    effort, new = (Effort(repetitions=2), 24) if options.quick else (Effort(budget_s=240.0), 48)
    measured = measure_profile(
        pair, known, depth=DEPTH, temperature=0.7, batch=sizes, new_tokens=new, effort=effort, verification="match"
    )
    arrays, fit = trace_arrays(held), trace_arrays(seen)
    settings, turns = Settings(0.7, new, verification="match"), Effort(repetitions=1 if options.quick else 3)

    def in_the_loop(profile: Profile, policies: Sequence[StopPolicy]) -> Profile:
        return profile.with_measured_decisions(loop_decisions(pair, policies, known, settings, profile, turns))

    def alone(profile: Profile, policies: Sequence[StopPolicy]) -> Profile:
        return add_decisions(profile, policies, arrays.header.vocabulary)

    name = "shipped" if options.pair is None else options.pair.name
    asked = [(prompt.id, tokens) for prompt, tokens in zip(prompts, ids, strict=True)]
    if "loads" in options.part:
        replays = {}
        for where, profile in {"this machine": measured, "like a GPU": gpu_like(sizes, DEPTH)}.items():
            learned = train(seen, profile, head="logistic").policy
            # Where the models are at hand decisions are timed between their calls.
            prices = in_the_loop if profile is measured else alone
            replays[where] = compare(where, arrays, fit, learned, profile, sizes, prices, options, bars)
            bars.figures[f"by batch size, {where}"] = replays[where][0]
        found, named, priced = replays["this machine"]
        ours = dict(named)["ours"]
        for size in [n for n in sizes if n in CLEAR] or sizes[-1:]:
            live(name, pair, asked, known, arrays, fixed_and(found, size, named), priced, size, options, bars)
    else:
        ours = settled(train(seen, measured, head="logistic").policy, fit, measured, in_the_loop)
        priced = ours.profile
    for size in sizes if "plain" in options.part else ():
        beside_plain(name, pair, asked, arrays, ours, priced, size, options, bars)


def collected(
    pair: Pair, prompts: Sequence[Prompt], tokens: int, out: Path, options: argparse.Namespace, bars: Bars
) -> None:
    """Compare the rows that live collection writes by batch, and its speed, with those of batch 1."""
    worst, seconds = 0.0, {}
    base: Any = None
    for batch in (1, 2) if options.quick else (1, 2, 4, 8):
        begin = time.perf_counter()
        trace = collect(
            pair,
            prompts,
            out / f"live-{batch}",
            collector="live",
            depth=4,
            temperature=0.7,
            verification="match",
            max_new_tokens=tokens,
            batch=batch,
        )
        seconds[batch] = time.perf_counter() - begin
        arrays = trace_arrays(trace)
        if base is None:
            base = arrays
        same = arrays.tokens.shape == base.tokens.shape and bool((arrays.tokens == base.tokens).all())
        worst = (
            max(worst, *(_apart(arrays.column(name), base.column(name)) for name in arrays.header.features))
            if same
            else np.inf
        )
    bars.add("features of rows collected by batch", worst, worst <= FEATURES, f"{worst:.1e} apart; {FEATURES:.0e}")
    least = min(seconds[1] / spent for spent in seconds.values())
    text = ", ".join(f"batch {batch} {seconds[1] / spent:.2f}" for batch, spent in seconds.items())
    bars.add("live collection by batch over batch 1", least, least >= 0.98 or options.quick, f"{text}; at least 1")


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).abs() / other.abs().clamp_min(1.0)).max())


def speeds(
    name: str,
    pair: Pair,
    ids: Sequence[list[int]],
    tokens: int,
    options: argparse.Namespace,
    bars: Bars,
    stock: Pair | None = None,
    least: float = 2.5,
) -> None:
    """Measure the best fixed length of each batch size over that of batch 1, beside plain decoding and the library's own."""
    sizes, lengths = (SIZES[:3], LENGTHS[:2]) if options.quick else (SIZES, LENGTHS)
    settings = Settings(0.0, tokens, ignore_eos=True)
    named = [(f"p{at}", own) for at, own in enumerate(ids[:32])]
    runs = {(b, k): Speculator(pair, FixedLength(k), settings, batch=b) for b in sizes for k in (0, *lengths)}
    found = run_alternating(list(runs.values()), named, batch=16)
    rate = {
        key: sum(len(g.tokens) for g in texts) / sum(g.seconds for g in texts)
        for key, texts in zip(runs, found, strict=True)
    }
    library = {}
    for batch in sizes if stock is not None else ():
        texts = run_alternating(
            [Assisted(stock, PLAIN, Settings(0.0, tokens, ignore_eos=True), batch)], named, batch=batch
        )[0]
        library[batch] = sum(len(g.tokens) for g in texts) / sum(g.seconds for g in texts)
    best = {b: max(lengths, key=lambda k: rate[b, k]) for b in sizes}
    one = rate[1, best[1]]
    for b in sizes:
        theirs = f", library's plain {library[b] / one:.2f}" if library else ""
        print(
            f"      {name}, batch {b:>2}: fixed:{best[b]} {rate[b, best[b]]:.0f} tokens/s, {rate[b, best[b]] / one:.2f} of "
            f"batch 1 (fixed:{best[1]}); plain {rate[b, 0] / one:.2f}{theirs}"
        )
    figures = {b: round(rate[b, best[b]] / one, 2) for b in sizes}
    at = 8 if 8 in sizes else sizes[-1]
    bars.add(
        f"tokens/s by batch over batch 1, {name}", figures, figures[at] >= least or options.quick,
        f"{figures[at]:.2f} at {at}; at least {least:g}",
    )  # fmt: skip


def memory(options: argparse.Namespace, bars: Bars) -> None:
    """Decode 16 streams of 1,024 tokens for hundreds of rounds, and look at the memory in use after 50 and at the end."""
    pair, _ = scripted_pair(("tiny target", "tiny draft"), "cpu", torch.float32, 1200, 0.6)
    rounds, tokens = (60, 128) if options.quick else (500, 1024)
    used: list[int] = []
    loop = Speculator(pair, FixedLength(2), Settings(0.0, tokens), batch=16)

    def note(number: int, new: list[int]) -> None:
        if number == 0:
            used.append(_resident())

    loop.run([Request([5 + at, 7]) for at in range(16)] * 2, note)
    early, late = np.median(used[40:60]), np.median(used[-20:])
    grown = float(late - early) / 2**20
    bars.add("memory of 16 streams", grown, grown <= 32.0, f"{grown:+.1f} MiB from round 50 to {rounds}; within 32")


def _resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    sys.exit(main())
