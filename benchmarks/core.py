"""The decision core: what it imports, what its kernels take to compile, and that a row's bits do not depend on its company.

    python benchmarks/core.py --check

- `specstop.policies` is imported without torch, within 0.5 s.
- Row summaries, columns, scores and decisions of 100,000 random rows, of 50 to 32,003 logits each, at odd alignments, with
  masked tokens and rows of a single token, are the same bits for one stream, for 7 and for 2,048 side by side, on one thread
  and on two: every head of scalars under every rule of chains. Heads with layers over hidden states use a BLAS product, whose
  rows are equal within rounding only; they are listed apart.
- Rounds of 1,000 streams, one alone, 7 and 1,000 side by side: what every built-in rule and every learned tree policy keeps
  and sends on chains and on trees of 28, 45 and 72 nodes, round after round, with what it learns from them.
- All kernels are compiled within 20 s in an empty cache folder, and loaded within 1.5 s from a full one.

The last line is one JSON object.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from bars import NO_PAIR, Bars, arguments
from random_rounds import draw_rounds, play
from specstop.decode.topology import chain, parse_tree
from specstop.policies.contract import DraftStep, StopPolicy
from specstop.policies.features import CHAIN_FEATURES, Columns, DrawnTokens, Kind, feature, summarise
from specstop.policies.heads import build_head
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.learned import Calibrator, LearnedPolicy, PathCalibrator, TreeGain
from specstop.policies.registry import BUILTINS, load_policy
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.tree_rules import TreeRule

Array = np.ndarray[Any, Any]

SIZES = (50, 333, 3072, 32003)
COUNTS = {50: 60_000, 333: 30_000, 3072: 9_000, 32003: 1_000}
TOGETHER = (1, 7, 2048)
NAMES = ("mean_accepted", "mean_full", "top1", "top2", "margin", "entropy", "drawn_prob", "noisy_margin", "depth")
STREAMS, SIDE_BY_SIDE, ROUNDS = 1000, (1, 7, 1000), 4
TREES = {28: "4,2,2", 45: "5,2,3", 72: "8,2,3"}
TOKENS = ("mean_accepted", "noisy_margin", "depth", "drawn_token", "above_token")
HIDDEN, DEPTH, VOCABULARY = 64, 6, 64
IMPORT_S, FRESH_S, CACHED_S, NEAR = 0.5, 20.0, 1.5, 1e-5
RULES: dict[str, Callable[[], Rule]] = {
    "derived": lambda: Derived([0.3, 0.2, 0.25, 0.3, 0.1, 0.2]),
    "survival": lambda: Threshold("survival", 0.3),
    "step": lambda: Threshold("step", 0.5),
    "any": lambda: Threshold("any", 0.5),
}


def rows_of(size: int, count: int, seed: int) -> tuple[Array, Array]:
    """Return [R, V] logits that begin at an odd place in memory, and [R, 6] the tokens drawn from them."""
    chance = np.random.default_rng(seed)
    memory = np.empty(count * size + 1, dtype=np.float32)
    logits = memory[1:].reshape(count, size)
    logits[...] = 4 * chance.standard_normal((count, size), dtype=np.float32)
    logits[chance.random((count, size)) < 0.05] = -np.inf
    single = chance.random(count) < 0.1
    logits[single] = -np.inf
    logits[np.arange(count), chance.integers(0, size, count)] = chance.random(count)
    ids = np.zeros((count, 6), dtype=np.int64)
    ids[:, 0], ids[:, 1], ids[:, 2] = np.arange(count), logits.argmax(1), chance.integers(0, size, count)
    ids[:, 4], ids[:, 5] = 1, 1 + np.arange(count) % (DEPTH - 1)
    return logits, ids


def read(logits: Array, ids: Array, columns: Columns) -> Array:
    """Return [R, F] of the rows, read together."""
    own = ids.copy()
    own[:, 0] = np.arange(len(ids))
    drawn = DrawnTokens(own)
    return columns(summarise(columns.needs, logits, drawn, 0.7, None, logits), drawn, 0.7)


def in_parts(count: int, size: int, call: Callable[[slice], Array], threads: int = 1) -> Array:
    """Return what a call returns for `count` rows, `size` at a time, by so many threads."""
    parts = [slice(at, at + size) for at in range(0, count, size)]
    if threads == 1:
        return np.concatenate([call(part) for part in parts])
    with ThreadPoolExecutor(threads) as pool:
        return np.concatenate(list(pool.map(call, parts)))


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal bit for bit, NaN included."""
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def check_features(bars: Bars, quick: bool) -> None:
    """Hold summaries and columns of rows read together against the same rows read alone."""
    columns = Columns(CHAIN_FEATURES)
    differing, total = 0, 0
    for seed, size in enumerate(SIZES):
        count = COUNTS[size] // (50 if quick else 1)
        logits, ids = rows_of(size, count, seed)
        found = [
            in_parts(count, together, lambda part: read(logits[part], ids[part], columns), threads)  # noqa: B023
            for together in TOGETHER
            for threads in ((1, 2) if together > 1 else (1,))
        ]
        assert np.isfinite(found[0]).all(), "a feature is not finite"
        differing += sum(not same_bits(found[0], other) for other in found[1:])
        total += count
    bars.add("rows, summaries and columns", differing, differing == 0, f"{total} rows, {differing} comparisons")


def heads() -> dict[str, tuple[tuple[str, ...], dict[str, Array]]]:
    """Return scalar features and tensors of a random head of each kind."""
    chance = np.random.default_rng(0)

    def draw(*shape: int) -> Array:
        return chance.standard_normal(shape).astype(np.float32)

    width = len(NAMES) + sum(feature(name).is_probability for name in NAMES)
    base = {"mean": draw(width), "scale": np.abs(draw(width)) + 0.2}
    network = {"weight.0": 0.3 * draw(32, width + 1), "bias.0": draw(32), "weight.1": 0.3 * draw(32, 32)}
    network |= {"bias.1": draw(32), "weight.2": draw(2, 32), "bias.2": draw(2)}
    trees = {
        "feature": chance.integers(0, len(NAMES), (2, 100, 15)),
        "threshold": 3 * chance.random((2, 100, 15)).astype(np.float32),
        "missing_left": chance.random((2, 100, 15)) < 0.5,
        "leaf": 0.2 * draw(2, 100, 16),
        "base": draw(2),
    }
    hard = {"weight.0": 0.3 * draw(44, 11), "bias.0": draw(44), "weight.1": draw(1, 44), "bias.1": draw(1)}
    soft = {"weight.0": 0.1 * draw(32, HIDDEN), "bias.0": draw(32), "weight.1": draw(1, 32), "bias.1": draw(1)}
    blocks = {"block.weight": 0.1 * draw(2, 32, 32), "block.bias": draw(2, 32)}
    resnet = {**base, **blocks, "enter.weight": 0.1 * draw(32, width + 1), "enter.bias": draw(32)}
    resnet |= {"enter.draft_hidden": 0.1 * draw(32, HIDDEN), "mean.draft_hidden": draw(HIDDEN)}
    resnet |= {"scale.draft_hidden": np.abs(draw(HIDDEN)) + 0.2, "leave.weight": draw(2, 32), "leave.bias": draw(2)}
    specdec = {"block.weight": 0.1 * draw(1, HIDDEN, HIDDEN), "block.bias": draw(1, HIDDEN)}
    specdec |= {"order": np.zeros(3, dtype=np.int64), "leave.weight": 0.1 * draw(2, HIDDEN), "leave.bias": draw(2)}
    tokens = {"mean": draw(3), "scale": np.abs(draw(3)) + 0.2, "weight": draw(3, 3), "bias": draw(2, DEPTH)}
    tokens |= {"table": draw(2, 2, VOCABULARY), "edges": np.sort(draw(1, 5)), "hashed": draw(2, 2, 101)}
    tokens |= {"strides": np.array([[0, 0, 0, 1, 7, 0], [0, 3, 0, 1, 0, 11]])}
    first = {"first": draw(1)}
    return {
        "logistic": (NAMES, {**base, "weight": draw(3, width), "bias": draw(3)}),
        "mlp": (NAMES, {**base, **network}),
        "xgboost": (NAMES, trees),
        "tokens": (TOKENS, tokens),
        "dynasd-hard": (HARD_FEATURES, {**hard, **first}),
        "dynasd-soft": ((), {**soft, **first}),
        "resnet": (NAMES, resnet),
        "specdec": ((), {**specdec, **first}),
    }


def decide(policy: LearnedPolicy, x: Array, states: Array, part: slice) -> Array:
    """Return what the policy keeps, and S_j, of chains with features [R, K, F] and states [R, K, H] at each depth."""
    x, states = x[part], states[part]
    count = len(x)
    alive, parent = np.ones((count, 1), dtype=bool), np.zeros((count, 1), dtype=np.int64)
    state, out = policy.start(count, np.zeros(count, dtype=np.int64)), []
    for depth in range(policy.first, DEPTH):
        shown = np.ascontiguousarray(x[:, depth, None])
        hidden = {name: np.ascontiguousarray(states[:, depth, None]) for name in policy.hidden}
        keep, state = policy.keep(DraftStep(depth, alive, parent, shown, hidden, np.arange(count)), state)
        out += [keep[:, 0].astype(np.float64), state[:, 0].copy()]
    return np.stack(out, 1)


def check_decisions(bars: Bars, quick: bool) -> None:
    """Hold decisions about many streams against those about each alone."""
    count = 400 if quick else 100_000 // DEPTH
    maps = Calibrator("isotonic", knots=np.stack([np.linspace(-4, 4, 40), np.linspace(0.02, 0.98, 40)]).astype("f4"))
    logits, ids = rows_of(3072, min(count, 4000), 9)
    known = {name: at for at, name in enumerate((*NAMES[2:], *HARD_FEATURES))}
    read_names = tuple(dict.fromkeys(name for name in known if feature(name).kind is not Kind.HISTORY))
    drawn = read(logits, ids, Columns(read_names))
    chance = np.random.default_rng(1)
    states = chance.standard_normal((count, DEPTH, HIDDEN)).astype(np.float32)
    exact, near = [], {}
    for kind, (names, tensors) in heads().items():
        x = chance.random((count, DEPTH, len(names)), dtype=np.float32)
        for at, name in enumerate(names):
            if name in read_names:
                x[..., at] = chance.choice(drawn[:, read_names.index(name)], (count, DEPTH))
        for rule, made in RULES.items():
            policy = LearnedPolicy(kind, names, build_head(kind, names, tensors), maps, Calibrator(), made(), DEPTH)
            alone, *others = (
                in_parts(count, together, lambda part: decide(policy, x, states, part), threads)  # noqa: B023
                for together, threads in ((1, 1), (7, 1), (2048, 1), (2048, 2))
            )
            apart = max(float(np.nanmax(np.abs(alone - other))) for other in others)
            if policy.hidden:
                near[f"{kind}, {rule}"] = apart
            else:
                exact += [f"{kind}, {rule}" for other in others if not same_bits(alone, other)]
    bars.add(
        "decisions, bit for bit", exact, not exact, f"{count * DEPTH} rows a head and rule; differing: {exact or 0}"
    )
    # A decision that rounding turns shows as a difference of 1 in what is kept; survival must stay within rounding.
    bars.figures["within rounding"] = near
    print("listed apart, largest differences:", {name: f"{apart:.1e}" for name, apart in near.items()}, flush=True)


def tree_policies(nodes: int) -> dict[str, StopPolicy]:
    """Return learned tree policies of random heads, for the tree of so many nodes."""
    tree, chance = parse_tree(TREES[nodes]), np.random.default_rng(nodes)
    children = [[len(tree.children[row]) for row in level] for level in tree.levels]
    shares = [(-1.0 - 0.3 * rank, 0.5) for rank in range(tree.width)]
    verify_s = [4e-3 + 3e-4 * n for n in range(40)]
    found: dict[str, StopPolicy] = {}
    for kind, (names, tensors) in heads().items():
        if kind not in ("logistic", "mlp", "xgboost", "tokens"):
            continue
        table = chance.normal(0.0, 0.2, (tree.deepest + 1, 6)).astype(np.float32)
        table[:, 0] += 1.0
        rule = TreeRule(120.0, 1e-3, [4e-4, 5e-4, 6e-4], verify_s, [0.7] * tree.deepest, shares, children, floor=0.05)
        maps = PathCalibrator(table), PathCalibrator(table[::-1].copy())
        found[f"{kind}, {nodes} nodes"] = TreeGain(
            kind, names, build_head(kind, names, tensors), *maps, rule, tree.deepest
        )
    return found


def check_policies(bars: Bars, quick: bool) -> None:
    """Hold what policies decide, and learn, of many streams against what they do of each alone."""
    names = [name for name in BUILTINS if name != "fixed"] + ["bandit?kind=thompson"]
    rules = {name: load_policy(name).limited(DEPTH) for name in names}
    cases = [(f"{name}, chain", policy, chain(DEPTH)) for name, policy in rules.items()]
    for nodes, text in TREES.items():
        of_trees = {**{f"{name}, {nodes} nodes": p for name, p in rules.items()}, **tree_policies(nodes)}
        cases += [(name, policy, parse_tree(text)) for name, policy in of_trees.items()]
    count = 50 if quick else STREAMS
    keys, differing, idle = np.arange(count), [], []
    for seed, (name, policy, tree) in enumerate(cases):
        rounds = draw_rounds(policy, tree, count, ROUNDS, seed)
        alone, *others = (
            in_parts(count, together, lambda part: play(policy, rounds, part, keys))  # noqa: B023
            for together in SIDE_BY_SIDE
        )
        differing += [name for other in others if not same_bits(alone, other)]
        idle += [name] * (not 0 < alone[..., 0].mean() < 1)
    bars.add("policies, bit for bit", differing, not differing, f"{len(cases)} cases; differing: {differing or 0}")
    bars.add("policies that decide something", idle, not idle, f"all but {idle or 'none'}")


def seconds_of(code: str, cache: str | None = None, runs: int = 3) -> float:
    """Return the median seconds that a fresh interpreter says it took for some code."""
    timed = f"import time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": cache} if cache else {})}
    found = []
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", timed], capture_output=True, text=True, env=environment, check=True
        )
        found.append(float(done.stdout))
    return statistics.median(found)


def check_imports(bars: Bars, runs: int) -> None:
    """Time the import of the contract, and the kernels with an empty and with a full cache."""
    bare = "import sys, specstop.policies; assert 'torch' not in sys.modules"
    rooms = ("learned", "storage", "fixed", "testing")
    every = "import sys; " + "".join(f"import specstop.policies.{room}; " for room in rooms)
    seconds_of(every + "assert 'torch' not in sys.modules", runs=1)
    took = seconds_of(bare, runs=runs)
    bars.add("import", took, took <= IMPORT_S, f"specstop.policies in {took:.2f} s (at most {IMPORT_S})")
    load = "from specstop.policies.kernels import load; load()"
    with tempfile.TemporaryDirectory(prefix="specstop-kernels-") as cache:
        fresh = seconds_of(load, cache, 1)
        bars.add("kernels, compiled", fresh, fresh <= FRESH_S, f"{fresh:.1f} s (at most {FRESH_S:.0f})")
        cached = seconds_of(load, cache, runs)
        bars.add("kernels, cached", cached, cached <= CACHED_S, f"{cached:.2f} s (at most {CACHED_S})")


def main(given: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__, NO_PAIR).parse_args(given)
    bars, began = Bars(), time.monotonic()
    check_imports(bars, 1 if options.quick else 5)
    check_features(bars, options.quick)
    check_decisions(bars, options.quick)
    check_policies(bars, options.quick)
    rows = sum(COUNTS.values()) // (50 if options.quick else 1)
    return bars.finish(
        options, f"{rows} rows, {len(heads())} heads, {len(RULES)} rules, {time.monotonic() - began:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
