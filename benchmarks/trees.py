"""The learned tree policy beside the best static tree and the best chain policy, replayed on held-out prompts.

    python benchmarks/trees.py --check
    python benchmarks/trees.py --quick --pair path/to/pair

Without `--pair` the shipped pair is used. Traces of a large tree and of chains are collected at temperatures 0 and 0.7.
There are two profiles: of this machine, trees included, and of a GPU, where a verification takes 20 ms whatever it reads up
to 32 tokens and half as much again beyond, and a draft step 3% of that. On training prompts are found, for each: the best
static tree inside the large one; learned chain policies (derived rule) and the learned tree policy, whose heads, features
and tree are chosen on prompts held out from their training. Decisions are priced as the live loop measures them here, under
both profiles. Then all are replayed on test prompts: ratios with 95% intervals over prompts, paired. The best chain policy
is the fastest on these very prompts of the learned ones and all fixed lengths, picked again in each resample; the learned
chain is the one named by held-out prompts. Under the profile of this machine tree and chain also decode live, in
alternation. The last line printed is one JSON object; with `--check` the exit code is 1 where the tree policy is not above
both with the interval clear of 1, by replay.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bars, arguments
from drafting.chosen import TREE
from drafting.likely_tree import likely_tree
from pairs import effort, pair_folder, prompts_of
from specstop.cli.output import progress_bars
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.collect.run import collect, environment_facts
from specstop.collect.store import Trace
from specstop.decode import Pair, Settings, load_pair
from specstop.decode.benchmark import Ratio, run_alternating
from specstop.decode.loop import Speculator
from specstop.decode.profile import loop_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies.costs import CostTable
from specstop.policies.errors import SpecstopError
from specstop.policies.learned import LearnedPolicy
from specstop.policies.measurements import Measurements, decision_prices
from specstop.policies.profile import Profile
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.plan import REPORT_SHARE, split_report, tree_features
from specstop.train.fit.rules import fixed_grid
from specstop.train.fit.run import train
from specstop.train.fit.settle import solve_rate
from specstop.train.fit.tree_rules import TreeChoice, choose_tree, fit_tree, solve_tree
from specstop.train.heads import make_head
from specstop.train.heads.crossfit import FOLDS, prompt_folds
from specstop.train.replay.bounds.static_tree import best_static_tree, drafted_alone, likeliest_nodes
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from specstop.train.replay.traces.subtrees import on_subtree, subtree

TEMPERATURES, MACHINES = (0.0, 0.7), ("cpu", "gpu")
DEPTH = 10
SEED = 0
VERIFY_S, DRAFT_SHARE, FLAT = 20e-3, 0.03, 32
PLANS = (
    TREE,
    replace(TREE, head=make_head("tokens"), features=tree_features(make_head("tokens")), name="tree-tokens"),
)
"""What the tree policy reads; the one that is fastest on prompts held out is taken."""

REPEATS = 5
"""Runs that a decision is timed in: on a shared machine one of fourteen came out longer by a third."""

LIVE = 200
"""Test prompts that are decoded live; the interval is then some 2% to either side."""

CHAINS = ("logistic", "tokens")
"""Heads of the learned chain policy; likewise."""


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, out="folder for traces, profiles and figures; default: a temporary one")
    parser.add_argument("--reuse", action="store_true", help="take the traces and profiles that --out has already")
    parser.add_argument("--temperature", type=float, action="append", help="only this one; may be repeated")
    parser.add_argument("--machine", choices=MACHINES, action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    counts = {"train": 16, "test": 8} if options.quick else {"train": 160, "test": 240}
    tokens, nodes = (32, 24) if options.quick else (128, 160)
    temperatures = options.temperature or (TEMPERATURES[-1:] if options.quick else TEMPERATURES)
    try:
        where = pair_folder(options)
        pair = load_pair(where / "target", where / "draft")
        prompts = dict(zip(counts, prompts_of(where, *counts.values()), strict=True))
    except SpecstopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = options.out or Path(tempfile.mkdtemp(prefix="specstop-trees-"))
    bars = Bars()
    for temperature in temperatures:
        run = Run(pair, where, folder / f"T={temperature:g}", temperature, prompts, tokens, nodes, options.reuse)
        profile = run.profile(effort(options))
        for kind in options.machine or MACHINES:
            costs = gpu_profile(profile) if kind == "gpu" else profile
            name = f"T={temperature:g}, {kind}"
            bars.figures[name] = run.compare(name, costs, bars.missed, LIVE if kind == "cpu" else 0)
    if options.out is None:
        shutil.rmtree(folder)
    whole = options.temperature is None and options.machine is None
    return bars.finish(options, f"{counts['test']} prompts of {tokens} tokens", whole)


def gpu_profile(profile: Profile) -> Profile:
    """Return the costs of a GPU; decisions, and what the loop does outside the models, as on this machine's processor."""
    verify = tuple([VERIFY_S] * (DEPTH + 1))
    draft = DRAFT_SHARE * VERIFY_S
    nodes = ((0, VERIFY_S), (FLAT, VERIFY_S), (FLAT + 1, 1.5 * VERIFY_S), (2 * FLAT, 2.0 * VERIFY_S))
    sides = [CostTable(side.context, (draft, draft), 0.0, verify, draft, nodes) for side in (profile.low, profile.high)]
    return replace(profile, low=sides[0], high=sides[1], prefill_s=(VERIFY_S, 0.0))


class Run:
    """One pair at one temperature.

    Args:
        pair, where: the pair and its folder.
        folder: for traces and the profile.
        temperature: of the sampling.
        prompts: by side.
        tokens: new ones of each text.
        nodes: of the large tree.
        reuse: what the folder has already.
    """

    def __init__(
        self,
        pair: Pair,
        where: Path,
        folder: Path,
        temperature: float,
        prompts: dict[str, list[Prompt]],
        tokens: int,
        nodes: int,
        reuse: bool,
    ) -> None:
        self.pair, self.where, self.folder, self.temperature, self.tokens = pair, where, folder, temperature, tokens
        self.asked = prompts["test"]
        self.tree, self.reuse = likely_tree(nodes, DEPTH), reuse
        self.chains, self.trees = (
            {s: self._traces(s, some, tree) for s, some in prompts.items()} for tree in (None, self.tree)
        )
        self.ids = encode(read_prompts(where / "prompts-train.jsonl", 16), pair.tokenizer, pair.readable - tokens)

    def _traces(self, side: str, asked: list[Prompt], tree: str | None) -> Trace:
        with progress_bars() as progress:
            return collect(
                self.pair,
                asked,
                self.folder / f"{side}-{'tree' if tree else 'chain'}",
                target=str(self.where / "target"),
                draft=str(self.where / "draft"),
                depth=DEPTH,
                tree=tree,
                temperature=self.temperature,
                max_new_tokens=self.tokens,
                seed=SEED,
                resume=self.reuse,
                overwrite=not self.reuse,
                progress=progress,
            )

    def profile(self, effort: Effort) -> Profile:
        """Return the latency of this machine on training prompts."""
        path = self.folder / "profile.json"
        if self.reuse and path.exists():
            return Profile.load(path)
        with progress_bars() as progress:
            profile = measure_profile(
                self.pair,
                self.ids,
                depth=DEPTH,
                temperature=self.temperature,
                effort=effort,
                facts=environment_facts(self.pair),
                progress=progress,
                tree=self.tree,
            )
        profile.save(path)
        return profile

    def decision(self, policy: LearnedPolicy, tree: str | None) -> Measurements:
        """Return the timings of decisions in the loop: the median of several runs."""
        settings = Settings(self.temperature, self.tokens, DEPTH, tree=tree, verification="match")
        runs = [loop_decisions(self.pair, [policy], self.ids, settings) for _ in range(REPEATS)]
        # One that is never asked, as in a tree of a single node, has no price.
        return sorted(runs, key=lambda run: decision_prices(run.pooled).get(policy.cost_name, 0.0))[REPEATS // 2]

    def chain(self, profile: Profile) -> tuple[list[LearnedPolicy], Profile]:
        """Return the learned chain policies, settled for what decisions cost in the loop; the fastest held out is first."""
        found = []
        for head in CHAINS:
            name = f"chain-{head}"
            policy = train(self.chains["train"], profile, head=head, name=name, passes=2).policy
            profile = profile.with_measured_decisions(self.decision(policy, None))
            arrays = trace_arrays(self.chains["train"], policy.features)
            _, left_out = split_report(arrays, REPORT_SHARE, 0)  # that `train` holds out
            select = [at for at, name in enumerate(arrays.clusters) if name in set(policy.metadata.prompts["select"])]
            assert left_out is not None
            policy = solve_rate(
                policy, arrays.subset(select), profile, policy.metadata.acceptance, (policy.rule.first,)
            )[0]  # fmt: skip
            found.append((replay(left_out, policy, profile).rate, policy))
        return [policy for _, policy in sorted(found, key=lambda one: -one[0])], profile

    def learned_tree(self, arrays: TraceArrays, profile: Profile) -> tuple[TreeChoice, Profile]:
        """Return the learned tree policy, likewise."""
        sizes = sorted({min(n, arrays.tree.nodes) for n in (DEPTH // 2, 12, 28, 72, 160)})
        arrays, report = split_report(arrays, REPORT_SHARE, SEED)
        folds = prompt_folds(arrays, FOLDS, SEED)
        best: TreeChoice | None = None
        for plan in PLANS:
            nodes = likeliest_nodes(arrays, min(28, arrays.tree.nodes), DEPTH)
            quick, *_ = fit_tree(
                replace(plan, passes=1), on_subtree(arrays, nodes), folds, profile.with_decisions({plan.name: 0.0})
            )
            profile = profile.with_measured_decisions(self.decision(quick, subtree(arrays.tree, nodes).name))
            choice = choose_tree(plan, arrays, folds, profile, sizes, report=report)
            if best is None or choice.policy.metadata.rho > best.policy.metadata.rho:
                best = choice
        assert best is not None
        profile = profile.with_measured_decisions(self.decision(best.policy, subtree(arrays.tree, best.nodes).name))
        settled, _ = solve_tree(best.policy, best.arrays, profile)
        return replace(best, policy=settled), profile

    def live(self, tree: LearnedPolicy, shape: str, chain: LearnedPolicy, count: int) -> Ratio:
        """Return how much faster the tree policy decodes the first `count` test prompts than the chain policy."""
        some = self.asked[:count]
        ids = encode(some, self.pair.tokenizer, self.pair.readable - self.tokens)
        runs = [
            Speculator(
                self.pair, policy, Settings(self.temperature, self.tokens, DEPTH, tree=drawn, verification="match")
            )
            for policy, drawn in ((tree, shape), (chain, None))
        ]
        with progress_bars() as progress:
            played = run_alternating(
                runs, [(p.id, tokens) for p, tokens in zip(some, ids, strict=True)], seed=SEED, progress=progress
            )
        samples = Resamples([p.id for p in some], SEED)
        mine, theirs = (samples.total(np.array([g.seconds for g in side])) for side in played)
        return samples.interval(theirs / mine)

    def compare(self, name: str, profile: Profile, missed: list[str], live: int) -> dict[str, Any]:
        """Print and return what the policies make of the test prompts, `live` of them decoded as well."""
        chains, profile = self.chain(profile)
        chain = chains[0]
        arrays, test, lines = (trace_arrays(t) for t in (self.trees["train"], self.trees["test"], self.chains["test"]))
        static, _ = best_static_tree(arrays, profile)
        choice, profile = self.learned_tree(arrays, profile)
        part = on_subtree(test, choice.nodes)
        played = {
            "tree": replay(part, choice.policy, profile),
            "static": replay(*drafted_alone(test, static.nodes), profile),
            "chain": replay(lines, chain, profile),
        }
        others = [*(replay(lines, one, profile) for one in chains[1:]), *fixed_grid(lines, profile)]
        free = replay(part, choice.policy, profile.with_decisions({choice.policy.cost_name: 0.0}))
        samples = Resamples(test.clusters, SEED)
        tokens = samples.total(test.text_tokens.double().numpy())
        rates = {key: tokens / samples.total(r.seconds.numpy()) for key, r in {**played, "free": free}.items()}
        best_other = np.stack([tokens / samples.total(r.seconds.numpy()) for r in others], 1).max(1)
        ratios = {
            "static tree": samples.interval(rates["tree"] / rates["static"]),
            "learned chain": samples.interval(rates["tree"] / rates["chain"]),
            "best chain": samples.interval(rates["tree"] / np.maximum(rates["chain"], best_other)),
            "static tree, decisions free": samples.interval(rates["free"] / rates["static"]),
        }
        shape = subtree(arrays.tree, choice.nodes)
        if live:
            ratios["learned chain, live"] = self.live(choice.policy, shape.name, chain, live)
        decision_us = 1e6 * profile.decision(choice.policy.cost_name)
        print(f"{name}: {chain.name}, a decision {1e6 * profile.decision(chain.cost_name):.0f} us")
        which = f"{choice.policy.name} of {len(choice.nodes)} nodes, asked from depth {choice.policy.first}"
        print(f"{name}: {which}, a decision {decision_us:.0f} us")
        for key, r in played.items():
            print(f"  {key:<8}{r.rate:8.1f} tokens/s  {_shape(r)}")
        for key, ratio in ratios.items():
            print(f"  tree to {key:<28}{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]", flush=True)
        missed += [
            f"{name}: {key} {ratios[key].low:.3f}" for key in ("static tree", "best chain") if ratios[key].low <= 1.0
        ]
        return {
            "ratios": {key: _numbers(ratio) for key, ratio in ratios.items()},
            "tree": shape.name,
            "static": static.shape.name,
            "decision_us": decision_us,
            "chain": chain.name,
            "rate": {key: r.rate for key, r in played.items()},
            "reliability": choice.metrics["reliability"],
        }


def _shape(played: Replayed) -> str:
    rounds = float(played.rounds.sum())
    drafted, verified = (float(count.sum()) / rounds for count in (played.drafted, played.verified))
    return f"block efficiency {played.block_efficiency:.2f}, drafted {drafted:.1f}, verified {verified:.1f}"


def _numbers(ratio: Ratio) -> list[float]:
    return [ratio.value, ratio.low, ratio.high]


if __name__ == "__main__":
    sys.exit(main())
