"""Replay compared with the live loop: the same rounds, predicted speeds, and the speed of replay itself.

    python benchmarks/replay.py --check
    python benchmarks/replay.py --part rounds --pair DIR --temperatures 0

- `rounds`: policies of every kind decode test prompts live, in alternation with measurements of the costs. Replay of
  a dense trace has the same rounds, except for ties (at most 1 round in 2,000), and predicts the speed relative to
  plain decoding within 5%, the reading of prompts aside.
- `rate`: rounds per second, a sweep of 1,000 thresholds, and peak memory of a million rows, on simulated traces.
"""

from __future__ import annotations

import numpy as np
from harness import MAX_TIES, Run, alternate, compare_rounds, peak_mib, spread
from simulated_worlds import DEPTH as WORLD_DEPTH, draw_world, sample_dense
from specstop.decode import Tally
from specstop.decode.benchmark import run_alternating
from specstop.decode.profile import CalibrationRun
from specstop.policies.features import TOKEN_FEATURES
from specstop.policies.rules import Threshold
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay_many

import specstop as ss

DEPTH, TREE = 8, "3,2,1,1"
SPECS = (
    "fixed:0", "fixed:2", "fixed:8", "confidence:0.2", "confidence:0.5", "heuristic:3", "heuristic-transient:3", "roc:0.3",
    "entropy:1.5", "adaedl:0.3", "maxprob:0.4", "product:0.2", "online:0.4", "bandit?arms=fixed:2,fixed:4,confidence:0.4",
    "bandit?kind=thompson&arms=fixed:1,fixed:3,product:0.2",
)  # fmt: skip
TREE_SPECS = ("ddd:-1.3?begin=1&every=1", "eagle:8", "opt:0.2?nodes=8", "c2t:3")
HEADS = ("logistic", "mlp", "xgboost", "resnet", "tokens")
ERROR, ROUNDS_PER_S, SWEEP_S, GIB = 0.05, 100_000, 60.0, 1.0


def rounds(run: Run) -> None:
    """Compare rounds and speeds, by temperature and shape."""
    for temperature in run.temperatures:
        for tree in (None, TREE):
            _live(run, temperature, tree)


def _live(run: Run, temperature: float, tree: str | None) -> None:
    where, new = f"{tree or 'chain'}, T={temperature:g}", run.choose(128, 8)
    counts = run.choose({"test": 16, "train": 64}, {"test": 2, "train": 5})
    traces = run.traces(where, counts, temperature=temperature, max_new_tokens=new, depth=DEPTH, tree=tree)
    calibration = CalibrationRun(
        run.pair, run.ids("train", counts["train"]), depth=DEPTH, temperature=temperature, new_tokens=run.choose(96, 8),
        tree=tree, verification="match",
    )  # fmt: skip
    for number in run.choose(range(4), (1,)):
        calibration.play(number)
    policies = _policies(run, traces["train"], calibration.profile(), tree)
    settings = ss.Settings(temperature, new, tree=tree, verification="match")
    costs = run.with_decisions(calibration.profile(), policies, settings)
    methods = [ss.Speculator(run.pair, policy, settings, costs) for policy in policies]
    texts = run_alternating(methods, run.encoded("test", counts["test"]), calibration=calibration)
    profile, held_out = calibration.profile().with_decisions(costs.decision_s), traces["test"]
    measured = [tally.tokens / (tally.seconds - tally.prefill_s) for tally in map(Tally, texts)]
    predicted = [ss.replay(held_out, policy, profile).rate for policy in policies]
    total = different = 0
    errors = []
    for policy, row, rate, guess in zip(policies, texts, measured, predicted, strict=True):
        compared, wrong = compare_rounds(held_out, policy, costs, row)
        total, different = total + compared, different + wrong
        errors.append((guess / predicted[0]) / (rate / measured[0]) - 1)
        run.row(
            f"{where}, {policy.name}: of plain decoding", rate / measured[0],
            f"predicted {guess / predicted[0]:.3f}, {errors[-1]:+.1%}, {wrong} of {compared} rounds differ",
        )  # fmt: skip
    run.bar(f"{where}: largest error of a prediction", max(map(abs, errors)), at_most=ERROR)
    run.bar(
        f"{where}: rounds that differ", different, at_most=max(1, total * MAX_TIES), always=True, note=f"of {total}"
    )


def _policies(run: Run, traces: ss.Trace, profile: ss.Profile, tree: str | None) -> list[ss.StopPolicy]:
    """Return plain decoding and policies of every kind; learned ones are trained on the traces."""
    specs = (*run.choose(SPECS, SPECS[:2]), *TREE_SPECS) if tree else SPECS
    policies = [ss.load_policy(spec).limited(DEPTH if tree is None else 4) for spec in specs]
    if tree:
        return [*policies, ss.train(traces, profile, rule="gain", name="gain, learned").policy]
    for head in run.choose(HEADS, ("logistic", "tokens")):
        features = ("top1", "depth", *TOKEN_FEATURES) if head == "tokens" else None
        policies.append(ss.train(traces, profile, head=head, features=features).policy)
    return policies


def rate(run: Run) -> None:
    """Time replay on traces of a simulated world."""
    chance = np.random.default_rng(0)
    world = draw_world(chance)
    trace = sample_dense(world, run.choose(2000, 30), chance)
    policies = {"confidence": ss.load_policy("confidence:0.4").limited(WORLD_DEPTH)}
    for head in run.choose(("logistic", "xgboost"), ("logistic",)):
        policies[head] = ss.train(trace, world.profile, head=head, features=["drawn_prob"]).policy
    for name, policy in policies.items():
        count = len(ss.replay(trace, policy, world.profile))
        seconds = alternate({"replay": lambda policy=policy: ss.replay(trace, policy, world.profile)}, run.choose(7, 2))
        speed = spread([count / s for s in seconds["replay"]])
        run.bar(f"replay, {name}: rounds per second", speed, at_least=ROUNDS_PER_S)
    policy = policies["logistic"]
    sweep = [policy.with_rule(Threshold("survival", t)) for t in np.linspace(0.01, 0.99, run.choose(1000, 20))]
    arrays = trace_arrays(trace)
    seconds = alternate({"sweep": lambda: replay_many(arrays, sweep, world.profile)}, 1, warm_up=0)
    run.bar(f"sweep of {len(sweep)} thresholds, seconds", seconds["sweep"][0], at_most=SWEEP_S)
    count, mib = run.apart(_peak, run.choose(25_000, 30))
    run.bar("peak memory of replay, GiB", mib / 1024, at_most=GIB, note=f"{count} rows")


def _peak(prompts: int) -> tuple[int, float]:
    """Return the rows of a trace of a simulated world, and the peak memory of this process while it is replayed, in MiB."""
    chance = np.random.default_rng(0)
    world = draw_world(chance)
    trace = sample_dense(world, prompts, chance)
    return trace.row_count, peak_mib(lambda: ss.replay(trace, f"confidence:0.4?max_depth={WORLD_DEPTH}", world.profile))


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [rounds, rate]).execute())
