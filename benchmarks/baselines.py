"""The rules that need no training, side by side: published defaults, and tuned on training traces, on held-out prompts.

    python benchmarks/baselines.py --check
    python benchmarks/baselines.py --quick --tree 3,2,1,1

Without `--pair` the shipped pair is used. For temperatures 0 and 0.7 each rule is replayed on held-out traces with the
latency profile of this machine, decisions included as the live loop measures them: ratio to the best fixed length, with 95%
intervals over prompts, and the share of the oracle gain. Every rule is tuned by replayed
throughput over as many settings; `free` is the tuned one if a decision took no time. With `--tree` the same on a tree, whose
fixed depths are then what is to be beaten. The last line printed is one JSON object; with `--check` the exit code is 1
where a bar falls short.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bars import Bars, arguments
from pairs import effort, pair_folder
from specstop.cli.output import progress_bars
from specstop.collect.facts import facts
from specstop.collect.prompts.read import encode, read_prompts
from specstop.collect.run import collect
from specstop.collect.store.folder import Trace
from specstop.decode import Pair, Settings, load_pair
from specstop.decode.profile import loop_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import StopPolicy
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.evaluate.records import Line
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from tuned_rules import BUDGET, rule_defaults, tuned_rules

TEMPERATURES = (0.0, 0.7)
DEPTH = 10
SEED = 0
WORSE = 0.01  # of the best fixed length: what a tuned rule may lose to its default on other prompts


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, out="folder for traces and figures; default: a temporary one")
    parser.add_argument("--tree", action="append", default=[], help="also on this tree, as 3,2,1,1; may be repeated")
    options = parser.parse_args()
    counts = {"train": 8, "test": 6} if options.quick else {"train": 80, "test": 80}
    tokens = 24 if options.quick else 128
    folder = options.out or Path(tempfile.mkdtemp(prefix="specstop-baselines-"))
    where = pair_folder(options)
    pair = load_pair(where / "target", where / "draft")
    bars = Bars()
    temperatures = TEMPERATURES[-1:] if options.quick else TEMPERATURES
    for temperature in temperatures:
        profile: Profile | None = None
        for tree in (None, *options.tree):
            name = f"T={temperature:g}, {tree or 'chain'}"
            sides = record(pair, where, folder / name.replace(" ", ""), counts, tokens, temperature, tree)
            profile = profile or measured(pair, where, temperature, tokens, effort(options))
            bars.figures[name] = compare(name, sides, profile, bars.missed)
    if options.out is None:
        shutil.rmtree(folder)
    compared = f"{counts['test']} prompts of {tokens} tokens; {BUDGET} settings of each rule and its default"
    return bars.finish(options, compared)


def record(
    pair: Pair, where: Path, folder: Path, counts: dict[str, int], tokens: int, temperature: float, tree: str | None
) -> dict[str, Trace]:
    """Return dense traces of training and test prompts."""
    sides = {}
    for side, count in counts.items():
        prompts = read_prompts(where / f"prompts-{side}.jsonl", count)
        with progress_bars() as progress:
            sides[side] = collect(
                pair,
                prompts,
                folder / side,
                target=str(where / "target"),
                draft=str(where / "draft"),
                depth=DEPTH,
                tree=tree,
                temperature=temperature,
                verification="match",
                max_new_tokens=tokens,
                seed=SEED,
                overwrite=True,
                progress=progress,
            )
    return sides


def measured(pair: Pair, where: Path, temperature: float, tokens: int, effort: Effort) -> Profile:
    """Return the latency of this machine on training prompts, with the decisions of every rule."""
    ids = encode(read_prompts(where / "prompts-train.jsonl", 16), pair.tokenizer, pair.readable - tokens)
    with progress_bars() as progress:
        profile = measure_profile(
            pair, ids, depth=DEPTH, temperature=temperature, effort=effort, facts=facts(pair), verification="match",
            progress=progress,
        )  # fmt: skip
    settings = Settings(temperature, tokens, DEPTH, verification="match")
    return profile.with_measured_decisions(
        loop_decisions(pair, list(rule_defaults(DEPTH).values()), ids, settings, profile)
    )


def compare(name: str, sides: dict[str, Trace], profile: Profile, missed: list[str]) -> dict[str, Any]:
    """Print and return what each rule makes of the test prompts, by default and tuned."""
    arrays = trace_arrays(sides["train"])
    defaults = rule_defaults(arrays.depth)
    begin = time.perf_counter()
    tuned = tuned_rules(list(defaults), arrays, profile)
    spent = time.perf_counter() - begin
    print(f"{name}: tuned in {spent:.0f} s")
    free = profile.with_decisions({policy.cost_name: 0.0 for policy in defaults.values()})
    lines = {
        "default": judged(sides["test"], profile, defaults),
        "tuned": judged(sides["test"], profile, tuned),
        "free": judged(sides["test"], free, tuned),
    }
    fixed, bound = (lines["default"][line] for line in ("best fixed", "oracle bound"))
    print(f"  best {fixed.note}: {fixed.to_plain.value:.3f} of plain; oracle {bound.to_best_fixed.value:.3f}")
    print(f"  {'rule':<20}{'as published':<23}{'gap':>6}{'us':>6}   {'tuned':<23}{'gap':>6}{'free':>7}   setting")
    table: dict[str, Any] = {}
    for rule, default in defaults.items():
        was, now, unpaid = (lines[prices][rule] for prices in ("default", "tuned", "free"))
        cost = 1e6 * profile.decision(default.cost_name)
        changed = setting(tuned[rule], default)
        print(
            f"  {rule:<20}{_interval(was):<23}{was.oracle_share.value:>6.2f}{cost:>6.0f}   "
            f"{_interval(now):<23}{now.oracle_share.value:>6.2f}{unpaid.to_best_fixed.value:>7.3f}   {changed}"
        )
        table[rule] = {prices: _numbers(lines[prices][rule]) for prices in lines} | {
            "setting": changed,
            "decision_us": cost,
        }
        lost = was.to_best_fixed.value - now.to_best_fixed.value
        if lost > WORSE:
            missed.append(f"{name}: {rule} loses {lost:.3f} by tuning")
        if replay(arrays, tuned[rule], profile).rate < replay(arrays, default, profile).rate:
            missed.append(f"{name}: {rule} tuned is slower than its default on the training prompts")
    best = max(defaults, key=lambda rule: lines["tuned"][rule].to_best_fixed.value)
    print(f"  best tuned rule on these prompts: {best} {_interval(lines['tuned'][best])}", flush=True)
    return {"rules": table, "best": best, "oracle": bound.to_best_fixed.value, "best fixed": fixed.note}


def judged(trace: Trace, profile: Profile, rules: dict[str, StopPolicy]) -> dict[str, Line]:
    """Return the report's lines by rule, and those of the best fixed length and of the bound."""
    report = evaluate(trace, profile, list(rules.values()), seed=SEED)
    lines = {line.name: line for line in report.lines}
    return {**lines, **{rule: lines[policy.shown_name] for rule, policy in rules.items()}}


def setting(policy: StopPolicy, default: StopPolicy) -> str:
    """Return the parameters in which a policy differs from its default."""
    mine, theirs = vars(policy), vars(default)
    changed = {
        name: value
        for name, value in mine.items()
        if not name.startswith("_") and name != "name" and value != theirs.get(name)
    }
    if "arms" in changed:
        changed["arms"] = ",".join(arm.name for arm in changed["arms"])
    kept = {name: value for name, value in changed.items() if not name.endswith("_prices") and name != "features"}
    return " ".join(f"{name}={_short(value)}" for name, value in kept.items()) or "as published"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _interval(line: Line) -> str:
    ratio = line.to_best_fixed
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _numbers(line: Line) -> list[float]:
    ratio = line.to_best_fixed
    return [ratio.value, ratio.low, ratio.high, line.oracle_share.value]


if __name__ == "__main__":
    sys.exit(main())
