"""The part of `vllm.py` about speeds: who is fastest by how many requests are served side by side.

A short first pass finds the best lengths of each drafter at each size. Then these, plain vLLM and what was trained take
turns, some prompts at a time. Our policies of one drafter take turns in one process: two processes of the same behaviour
differ by 3% in the mean, up to 12, for as long as they live. Against vLLM's own drafters that difference remains, and a
second process of ours tells how large it may be. The seconds of a step are shared out among the requests in it, so that
intervals are over prompts at any size. What is measured is kept: a run that was cut off goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from specstop.decode.benchmark import Ratio
from specstop.train.evaluate.statistics import Resamples
from vllm_bench import SIZES, TOKENS, Bench
from vllm_engine import Engine, engines, ours, theirs
from vllm_traces import achievable

LENGTHS = (1, 2, 3, 4, 5)
AT_FIRST = 16
"""Prompts of the first pass. Whole texts: drafts are accepted more often later in them, so short ones favour short drafts."""

PROMPTS, SOME = 24, 8
"""Of a round, and at least of a turn: machines change their pace within minutes, so turns are short."""

BOTH = "suffix?confidence=0.8+model"
"""Our other drafter: what came before in the text where that is sure, the draft model elsewhere."""

KEPT = {"draft_model": 2, "ngram": 1, "ours fixed": 2, "ours both fixed": 2}
"""Lengths that take turns, of each drafter: a first pass may miss the best ones by a little."""

AGAIN = "the same again"
"""The first of our lengths in another process: what differs there is no drafter's doing."""

OURS, OURS_BOTH = "ours", "ours both"
"""Our processes, one of each drafter."""

Times = Mapping[str, Sequence[tuple[int, float]]]
"""By engine, tokens and seconds of each prompt."""


@dataclass(frozen=True)
class Contender:
    """Who takes part: an engine, and which of our policies it is to ask; "" = as it was started."""

    engine: str
    policy: str = ""


def speeds(bench: Bench) -> None:
    """Tokens/s by requests side by side, the best of each kind in turns."""
    options, kinds = contenders(bench.folder)
    mine = {
        f"{name} {rule}": Contender(name, bench.policy("" if rule == "learned" else "batch", drafter))
        for name, drafter in ((OURS, "model"), (OURS_BOTH, BOTH))
        for rule in ("learned", "joint")
    }
    rates = first_pass(bench, options, kinds)
    for size in SIZES:
        best = {
            kind: sorted(names, key=lambda name: -rates[name][str(size)])[: KEPT[kind]] for kind, names in kinds.items()
        }
        chosen = {name: kinds[kind][name] for kind, names in best.items() for name in names}
        again = Contender(AGAIN, kinds[f"{OURS} fixed"][best[f"{OURS} fixed"][0]].policy)
        every = {"plain": Contender("plain"), **mine, **chosen, AGAIN: again}
        # All engines are new at each size: one that has served before may be slower for it.
        needed = dict.fromkeys(one.engine for one in every.values())
        with engines(bench.folder, {name: options[name] for name in needed}) as running:
            times = in_turns(bench, size, every, {engine.name: engine for engine in running})
        compare(bench, size, times, list(mine), best)
    achievable(bench)


def contenders(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Contender]]]:
    """Return the options of all engines, and the lengths of every drafter by kind and name."""
    theirs_of = {f"{kind}:{k}": theirs(folder, kind, k) for kind in ("draft_model", "ngram") for k in LENGTHS}
    # No prompt is known from another's turn.
    alone = {"enable_prefix_caching": False}
    alike, both = (ours(folder, "fixed:1", drafter=drafter) for drafter in ("model", BOTH))
    options = {"plain": {}, **theirs_of, OURS: alike, OURS_BOTH: both, AGAIN: alike}
    kinds = {kind: {f"{kind}:{k}": Contender(f"{kind}:{k}") for k in LENGTHS} for kind in ("draft_model", "ngram")} | {
        f"{name} fixed": {f"{name} fixed:{k}": Contender(name, f"fixed:{k}") for k in LENGTHS}
        for name in (OURS, OURS_BOTH)
    }
    return {name: {**told, **alone} for name, told in options.items()}, kinds


def first_pass(
    bench: Bench, options: Mapping[str, Any], kinds: Mapping[str, Mapping[str, Contender]]
) -> dict[str, dict[str, float]]:
    """Return tokens/s by contender and size, one after the other."""
    rates, every = {}, {name: one for names in kinds.values() for name, one in names.items()}
    for engine in dict.fromkeys(one.engine for one in every.values()):
        with engines(bench.folder, {engine: options[engine]}) as (running,):
            for name in [name for name, one in every.items() if one.engine == engine]:
                make = partial(by_size, running, every[name].policy, bench.prompts(AT_FIRST))
                rates[name] = bench.kept(f"speeds, first pass, {name}", make)
                told = ", ".join(f"{rate:.0f} at {n}" for n, rate in rates[name].items())
                print(f"      first pass, {name}: {told} tokens/s")
    return rates


def by_size(engine: Engine, policy: str, prompts: list[str]) -> dict[str, float]:
    """Return an engine's tokens/s by size under a policy."""
    engine.ask("serve", prompts=prompts, tokens=8, size=SIZES[-1], policy=policy)
    answers = {n: engine.ask("serve", prompts=prompts, tokens=TOKENS, size=n, policy=policy) for n in SIZES}
    return {str(n): answer["tokens"] / answer["seconds"] for n, answer in answers.items()}


def in_turns(bench: Bench, size: int, every: Mapping[str, Contender], running: Mapping[str, Engine]) -> Times:
    """Return the times of all prompts, some at a time under each contender, forwards and backwards.

    More prompts at a time where more requests run side by side, so that few steps run half empty.
    """
    prompts, some = bench.prompts(PROMPTS * bench.rounds), max(SOME, 3 * size)
    times: dict[str, list[tuple[int, float]]] = {name: [] for name in every}
    for turn, start in enumerate(range(0, len(prompts), some)):
        for name in list(every) if turn % 2 == 0 else list(every)[::-1]:
            make = partial(served, running[every[name].engine], every[name].policy, prompts[start : start + some], size)
            times[name] += bench.kept(f"speeds, {size} requests, {name}, {start} of {len(prompts)}", make)
    return times


def served(engine: Engine, policy: str, prompts: list[str], size: int) -> list[tuple[int, float]]:
    """Return tokens and seconds of each prompt; an engine that has done nothing yet first warms up."""
    if not engine.started:
        engine.ask("serve", prompts=prompts[:PROMPTS], tokens=8, size=size, policy=policy)
    answer = engine.ask("serve", prompts=prompts, tokens=TOKENS, size=size, policy=policy)
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
        f"      {once} to itself in another process at {size}: {text(twice)}; of other processes nothing nearer to 1 tells"
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
