"""The part of `vllm.py` about speeds: who is fastest by how many requests are served side by side.

A short first pass finds the best lengths of each drafter at each size. Then these, plain vLLM and what was trained take
turns, some prompts at a time. The seconds of a step are shared out among the requests in it, so that intervals are over
prompts at any size. What is measured is kept: a run that was cut off goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from specstop.train.report.intervals import Resamples
from specstop.train.report.records import Ratio
from vllm_bench import SIZES, TOKENS, Bench
from vllm_engine import Engine, engines, ours, theirs
from vllm_traces import achievable

LENGTHS = (1, 2, 3, 4, 5)
AT_FIRST = 16
"""Prompts of the first pass. Whole texts: drafts are accepted more often later in them, so short ones favour short drafts."""

PROMPTS = 24
"""Of a round."""

BOTH = "suffix?sure=0.8+model"
"""Our other drafter: what came before in the text where that is sure, the draft model elsewhere."""

KEPT = {"draft_model": 2, "ngram": 1, "ours fixed": 2, "ours both fixed": 2}
"""Lengths that take turns, of each drafter: a first pass may miss the best ones by a little."""

AGAIN = "the same again"
"""The first of our lengths in another process: what differs there is no drafter's doing."""

Times = Mapping[str, Sequence[tuple[int, float]]]
"""By engine, tokens and seconds of each prompt."""


def speeds(bench: Bench) -> None:
    """Tokens/s by requests side by side, the best of each kind in turns."""
    kinds = drafters(bench.folder)
    mine = {
        f"ours {both}{name}": ours(bench.folder, bench.policy(rule, drafter), drafter=drafter)
        for both, drafter in (("", "model"), ("both ", BOTH))
        for name, rule in (("learned", ""), ("joint", "batch"))
    }
    every = {name: told for kind in kinds.values() for name, told in kind.items()}
    rates = first_pass(bench, every)
    for size in SIZES:
        best = {
            kind: sorted(names, key=lambda name: -rates[name][str(size)])[: KEPT[kind]] for kind, names in kinds.items()
        }
        chosen = {name: every[name] for names in best.values() for name in names}
        chosen[AGAIN] = every[best["ours fixed"][0]]
        # All of them new at each size: a process that has served before may be slower for it.
        with engines(bench.folder, {"plain": {}, **mine, **chosen}) as running:
            times = in_turns(bench, size, running)
        compare(bench, size, times, list(mine), best)
    achievable(bench)


def drafters(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the options of vLLM's drafters and of ours, by kind and name."""
    return {
        "draft_model": {f"draft_model:{k}": theirs(folder, "draft_model", k) for k in LENGTHS},
        "ngram": {f"ngram:{k}": theirs(folder, "ngram", k) for k in LENGTHS},
        "ours fixed": {f"ours fixed:{k}": ours(folder, f"fixed:{k}") for k in LENGTHS},
        "ours both fixed": {f"ours both fixed:{k}": ours(folder, f"fixed:{k}", drafter=BOTH) for k in LENGTHS},
    }


def first_pass(bench: Bench, told: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return tokens/s by engine and size, one engine after the other."""
    rates = {}
    for name, options in told.items():
        with engines(bench.folder, {name: options}) as (engine,):
            rates[name] = bench.kept(f"speeds, first pass, {name}", partial(by_size, engine, bench.prompts(AT_FIRST)))
        print(
            f"      first pass, {name}: {', '.join(f'{rate:.0f} at {n}' for n, rate in rates[name].items())} tokens/s"
        )
    return rates


def by_size(engine: Engine, prompts: list[str]) -> dict[str, float]:
    """Return an engine's tokens/s by size."""
    engine.ask("serve", prompts=prompts, tokens=8, size=SIZES[-1])
    answers = {n: engine.ask("serve", prompts=prompts, tokens=TOKENS, size=n) for n in SIZES}
    return {str(n): answer["tokens"] / answer["seconds"] for n, answer in answers.items()}


def in_turns(bench: Bench, size: int, running: Sequence[Engine]) -> Times:
    """Return the times of all prompts, some at a time under each engine, forwards and backwards.

    More prompts at a time where more requests run side by side, so that few steps run half empty.
    """
    prompts, some = bench.prompts(PROMPTS * bench.rounds), max(PROMPTS, 4 * size)
    times: dict[str, list[tuple[int, float]]] = {engine.name: [] for engine in running}
    for turn, start in enumerate(range(0, len(prompts), some)):
        for engine in running if turn % 2 == 0 else running[::-1]:
            name = f"speeds, {size} requests, {engine.name}, {start} of {len(prompts)}"
            times[engine.name] += bench.kept(name, partial(served, engine, prompts[start : start + some], size))
    return times


def served(engine: Engine, prompts: list[str], size: int) -> list[tuple[int, float]]:
    """Return tokens and seconds of each prompt; an engine that has done nothing yet first warms up."""
    if not engine.started:
        engine.ask("serve", prompts=prompts[:PROMPTS], tokens=8, size=size)
    answer = engine.ask("serve", prompts=prompts, tokens=TOKENS, size=size)
    return list(zip(map(len, answer["texts"]), answer["shares"], strict=True))


def compare(bench: Bench, size: int, times: Times, mine: Sequence[str], lengths: Mapping[str, Sequence[str]]) -> None:
    """Print speeds and hold what was trained against the best fixed length of its drafter and the best of vLLM's own."""
    resamples = Resamples(range(len(times["plain"])))
    rates = {name: np.divide(*resamples.total(np.array(found)).T) for name, found in times.items()}
    for name, rate in rates.items():
        bench.bars.figures[f"{name} at {size}, tokens/s"] = round(float(rate[0]), 1)
        print(f"      {name} at {size}: {rate[0]:.1f} tokens/s")
    once = lengths["ours fixed"][0]
    twice = resamples.interval(rates[AGAIN] / rates[once])
    bench.bars.figures[f"{once} to itself at {size}"] = asdict(twice)
    print(
        f"      {once} to itself in another process at {size}: {text(twice)}; what is nearer to 1 than that tells nothing"
    )

    def fastest(names: Sequence[str]) -> str:
        return max(names, key=lambda name: float(rates[name][0]))

    rival = fastest(["plain", *lengths["draft_model"], *lengths["ngram"]])
    for name in mine:
        best = fastest(lengths["ours both fixed" if name.startswith("ours both") else "ours fixed"])
        to_best, to_rival = (resamples.interval(rates[name] / rates[against]) for against in (best, rival))
        met = to_best.is_above if size <= 4 else to_best.high is None or to_best.high >= 0.99
        bench.bars.add(f"{name} to {best} at {size}", asdict(to_best), met, text(to_best))
        bench.bars.add(
            f"{name} to vLLM's best ({rival}) at {size}", asdict(to_rival), to_rival.is_above, text(to_rival)
        )


def text(ratio: Ratio) -> str:
    """Return value and interval as text."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
