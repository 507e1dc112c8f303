"""The learned tree policy compared with the best static tree and with the best chain.

    python benchmarks/trees.py --check
    python benchmarks/trees.py --temperatures 0.7

Dense traces of a large tree and of chains are collected. The tree policy (rule `gain`) chooses its sub-tree on
training prompts. On test prompts it is replayed beside the best static tree and the best chain, fixed or learned,
with the costs of this machine and with those of a machine like a GPU (verification takes 20 ms for up to 32 tokens, a
draft step 3% of that). The intervals of both ratios are above 1. With the costs of this machine tree and chain also
decode live, in alternation.
"""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import partial

from harness import Run, ratio_of_sums
from specstop.decode.benchmark import run_alternating, speed_ratio
from specstop.policies.costs import CostTable

import specstop as ss

DEPTH, NODES = 10, (5, 12, 28, 64)
RATES = (0.62, 0.15, 0.07, 0.042, 0.028, 0.02)
"""Acceptance rates of the candidates of each rank, on pairs that are neither very similar nor very different."""

VERIFY_S, DRAFT_SHARE, FLAT = 20e-3, 0.03, 32


def likely_tree(nodes: int, depth: int) -> str:
    """Return the tree of the most likely nodes under `RATES`, with a chain of best children down to `depth`."""
    front = [(-rate, (rank,)) for rank, rate in enumerate(RATES)]
    chosen: set[tuple[int, ...]] = {(0,) * d for d in range(1, depth + 1)}
    while front and len(chosen) < nodes:
        probability, path = heapq.heappop(front)
        chosen.add(path)
        if len(path) < depth:
            for rank, rate in enumerate(RATES):
                heapq.heappush(front, (probability * rate, (*path, rank)))
    ordered = sorted(chosen, key=lambda path: (len(path), path))
    index = {path: at for at, path in enumerate(ordered)}
    return "parents:" + ",".join(str(index.get(path[:-1], -1)) for path in ordered)


def gpu_profile(profile: ss.Profile) -> ss.Profile:
    """Return the costs of a machine like a GPU; decisions and the rest of the loop as measured."""
    draft = DRAFT_SHARE * VERIFY_S
    nodes = ((0, VERIFY_S), (FLAT, VERIFY_S), (FLAT + 1, 1.5 * VERIFY_S), (2 * FLAT, 2.0 * VERIFY_S))
    low, high = (
        CostTable(side.context, (draft, draft), 0.0, (VERIFY_S,) * (DEPTH + 1), draft, nodes)
        for side in (profile.low, profile.high)
    )
    return replace(profile, low=low, high=high, prefill_s=(VERIFY_S, 0.0))


def compare(run: Run) -> None:
    """Compare trees and chains."""
    new, counts = run.choose(128, 8), run.choose({"train": 100, "test": 80}, {"train": 5, "test": 2})
    sizes = run.choose(NODES, (4, 8))
    tree = likely_tree(sizes[-1], run.choose(DEPTH, 4))
    depth = ss.parse_tree(tree).deepest
    for temperature in run.temperatures:
        where = f"T={temperature:g}"
        options = {"temperature": temperature, "max_new_tokens": new, "depth": depth}
        trees, chains = (
            run.traces(f"{where}-{kind}", counts, tree=shape, **options)
            for kind, shape in (("tree", tree), ("chain", None))
        )
        settings = partial(ss.Settings, temperature, new, depth, verification="match")
        measured = run.profile(depth=depth, temperature=temperature, tree=tree)
        for machine in ("cpu", "gpu"):
            profile = gpu_profile(measured) if machine == "gpu" else measured
            at = f"{where}, {machine}"
            for _ in range(run.choose(2, 1)):  # the second fit knows the price of the decisions of the first one
                result = ss.train(trees["train"], profile, rule="gain", name="tree", nodes=sizes)
                shape = str(result.metrics["tree"])
                chain = ss.train(chains["train"], profile, head="logistic", name="chain").policy
                for policy, drawn in ((result.policy, shape), (chain, None)):
                    profile = run.with_decisions(profile, [policy], settings(tree=drawn))
            held_out = run.traces(f"{at}-held-out", {"test": counts["test"]}, tree=shape, **options)["test"]
            report = ss.evaluate(held_out, profile, [result.policy])
            for line in report.lines:
                run.row(
                    f"{at}, {line.name} ({line.kind}): of best fixed",
                    line.to_best_fixed,
                    f"{line.tokens_per_s:.1f} tokens/s",
                )
            static = report[result.policy.shown_name].speedup
            mine = ss.replay(held_out, result.policy, profile).seconds.tolist()
            others = [chain, *(ss.load_policy(f"fixed:{k}") for k in range(depth + 1))]
            best = max(others, key=lambda policy: ss.replay(chains["test"], policy, profile).rate)
            ratio = ratio_of_sums(ss.replay(chains["test"], best, profile).seconds.tolist(), mine)
            run.bar(f"{at}: tree of {ss.parse_tree(shape).nodes} nodes over the best static tree", static, above=1.0)
            run.bar(f"{at}: tree over the best chain", ratio, above=1.0, note=best.name)
            if machine == "cpu":
                methods = [
                    ss.Speculator(run.pair, policy, settings(tree=drawn))
                    for policy, drawn in ((best, None), (result.policy, shape))
                ]
                base, texts = run_alternating(methods, run.encoded("test", run.choose(60, 2)))
                run.row(f"{at}, live: tree over the best chain", speed_ratio(texts, base))


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [compare]).execute())
