"""What one decision costs: one stream, one branch, features included, on one core; and that it is the library's own answer.

    python benchmarks/decision.py --check

For logistic regression, boosted trees (XGBoost, 100 trees of depth 4 for each of two outputs) and networks of one and two
hidden layers of 64, and for the confidence rule, at 3,072 and 32,000 logits, greedy and at temperature 0.7: microseconds of a
decision as the loop asks for it, with the features of `train` and with all that read a whole row; warm (as timing loops
measure), cold (a matrix product of 9 MB between decisions, like a small draft's step), colder (45 MB, like a target's call);
the library's own call for the same head beside it, without features. A million random rows, missing values among them: the
head's scores against the library's. Then every built-in rule, what it takes to decide once and to hear of a round, features
given, warm. The last line is one JSON object. The bars: greedy and warm, with the features of `train`, 18 us at 3,072 logits
and 60 at 32,000; the confidence rule 12 us at 3,072; deciding and hearing of a round 15 us.
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xgboost as xgb
from bars import NO_PAIR, Bars, arguments
from sklearn.linear_model import LogisticRegression
from specstop.decode.feature_reader import FeatureReader
from specstop.decode.round_state import DraftScores, RoundState
from specstop.decode.texts import Anchor
from specstop.decode.topology import chain
from specstop.policies.contract import DraftStep, RoundOutcome, StopPolicy
from specstop.policies.features import History, feature
from specstop.policies.fixed import Confidence
from specstop.policies.heads import build_head
from specstop.policies.host import PolicyHost
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.registry import BUILTINS, load_policy
from specstop.policies.rules import Derived
from specstop.train.fit.plan import FEATURES
from specstop.train.heads.boosted import flatten

WIDE = (
    "mean_accepted", "mean_full", "top1", "top2", "margin", "entropy", "drawn_prob", "path_logprob", "noisy_margin", "depth",
)  # fmt: skip
SIZES = (3072, 32000)
BARS_US, RULE_US, ROUND_US = {3072: 18.0, 32000: 60.0}, 12.0, 15.0
ROWS, NEAR = 1_000_000, 2e-5
TEMPERATURES = (0.0, 0.7)
TREES, DEPTH, HIDDEN = 100, 4, 64
MEGABYTES = {"warm": 0, "cold": 9, "colder": 45}
Made = tuple[Any, Callable[[], object], Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]


def make_logistic(names: Sequence[str], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Made:
    """Return the head, the library's call for one row, and its logits for many."""
    known = [LogisticRegression(max_iter=300).fit(columns(names, x), label) for label in y]
    weight = np.concatenate([m.coef_ for m in (*known, known[1])])
    bias = np.concatenate([m.intercept_ for m in (*known, known[1])])
    tensors = {**neutral(names), "weight": weight.astype(np.float32), "bias": bias.astype(np.float32)}
    row = columns(names, x[:1])
    return (
        build_head("logistic", names, tensors),
        lambda: known[0].predict_proba(row),
        lambda many: np.stack([m.decision_function(columns(names, many)) for m in known], -1),
    )


def make_network(names: Sequence[str], layers: int) -> Made:
    """As `make_logistic`, of a torch module."""
    torch.manual_seed(0)
    inner: list[torch.nn.Module] = [torch.nn.Linear(len(neutral(names)["mean"]) + 1, HIDDEN)]
    for _ in range(layers - 1):
        inner += [torch.nn.SiLU(), torch.nn.Linear(HIDDEN, HIDDEN)]
    model = torch.nn.Sequential(*inner, torch.nn.SiLU(), torch.nn.Linear(HIDDEN, 2)).requires_grad_(False)
    linear = [m for m in model if isinstance(m, torch.nn.Linear)]
    tensors = {f"weight.{i}": m.weight.numpy() for i, m in enumerate(linear)}
    tensors |= {f"bias.{i}": m.bias.numpy() for i, m in enumerate(linear)}

    def put_in(many: np.ndarray[Any, Any]) -> torch.Tensor:
        expanded = columns(names, many)
        return torch.tensor(np.concatenate([expanded, np.zeros_like(expanded[:, :1])], 1)).float()

    row = put_in(np.full((1, len(names)), 0.5, dtype=np.float32))
    return (
        build_head("mlp", names, {**neutral(names), **tensors}),
        lambda: model(row),
        lambda many: model(put_in(many)).numpy(),
    )


def make_trees(names: Sequence[str], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Made:
    """As `make_logistic`, of two boosters."""
    options = {"objective": "binary:logistic", "max_depth": DEPTH, "eta": 0.1, "nthread": 1, "base_score": 0.5}
    boosters = [xgb.train(options, xgb.DMatrix(x, label), TREES) for label in y]
    arrays = [flatten(b, DEPTH) for b in boosters]
    tensors = {name: np.stack([np.asarray(a[name]) for a in arrays]) for name in arrays[0]}
    row = x[:1].copy()
    return (
        build_head("xgboost", names, tensors),
        lambda: boosters[0].inplace_predict(row),
        lambda many: np.stack([b.predict(xgb.DMatrix(many), output_margin=True) for b in boosters], -1),
    )


def neutral(names: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the mean and scale that change nothing."""
    width = len(names) + sum(feature(n).is_probability for n in names)
    return {"mean": np.zeros(width, dtype=np.float32), "scale": np.ones(width, dtype=np.float32)}


def columns(names: Sequence[str], x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return features and log-odds, as a user of the libraries would write it."""
    odds = [i for i, name in enumerate(names) if feature(name).is_probability]
    p = x[:, odds].astype(np.float64).clip(float(np.float32(1e-6)), float(np.float32(1) - np.float32(1e-6)))
    return np.concatenate([x, np.log(p / (1 - p))], 1)


def draw_rows(names: Sequence[str], count: int, missing: float) -> np.ndarray[Any, Any]:
    """Return random rows within the features' ranges."""
    chance = np.random.default_rng(3)
    x = chance.random((count, len(names)), dtype=np.float32)
    for i, name in enumerate(names):
        if not feature(name).is_probability:
            x[:, i] = np.round(x[:, i] * 10) if name in ("depth", "last_accepted") else x[:, i] * 6 - 1
    x[chance.random(x.shape) < missing] = np.nan
    return x


@torch.inference_mode()
def decision_us(policy: StopPolicy, vocabulary: int, megabytes: int, count: int, temperature: float = 0.0) -> float:
    """Return the median microseconds of one decision at depth 1, as the loop asks for it."""
    generator = torch.Generator().manual_seed(0)
    tree, host = chain(2), PolicyHost(policy)
    reader = FeatureReader(policy, tree, temperature)
    accepted, drafted, true = np.array([2]), np.array([3]), np.array([True])
    history = History.start(1).after(RoundOutcome(true, drafted, drafted, accepted, ~true, np.zeros(1)))
    host.state, one, text = np.full((1, 1), 0.9), np.ones((1, 1), dtype=bool), SimpleNamespace(tokens=[0, 0])
    noise = -torch.rand(1, vocabulary, generator=generator).log_().neg_().log_()
    rows = [3 * torch.randn(1, vocabulary, generator=generator) for _ in range(8)]
    scratch = torch.ones(512 * megabytes, 512) if megabytes else None
    seconds = []
    for i in range(count):
        round = RoundState(tree, one[0], np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int64))
        row = rows[i % 8]
        round.texts, round.anchors = [text], [Anchor(row, 0, None)]
        reader.begin(round)
        reader.step(0, one, history)  # the ANCHOR and HISTORY columns
        if scratch is not None:
            scratch @ scratch[:8].T
        scores = torch.log_softmax(row / temperature, -1) + noise if temperature else row
        round.tokens[0, :2] = 0, int(scores.argmax(-1))  # the loop draws right before it asks
        begin = time.perf_counter()
        reader.drawn(1, DraftScores([(0, [0])], [1], row, scores=scores))
        host.keep(reader.step(1, one, history))
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def call_us(call: Callable[[], object], count: int = 300) -> float:
    """Return the median microseconds of a call, warm."""
    seconds = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def difference(name: str, made: Made, names: Sequence[str], count: int) -> float:
    """Return the largest difference of the head's scores from the library's, relative above 1."""
    head, _, library = made
    x = draw_rows(names, count, 0.2 if name == "xgboost" else 0.0)
    expected = library(x)
    return float((np.abs(head.scores(x, 1) - expected) / np.maximum(np.abs(expected), 1.0)).max())


def measure(count: int, rows: int, bars: Bars) -> dict[str, Any]:
    """Return the figures by head and print a table; what falls short goes to `bars`."""
    results: dict[str, Any] = {}
    knots = np.stack([np.linspace(-4, 4, 40), np.linspace(0.02, 0.98, 40)]).astype(np.float32)
    maps = Calibrator("isotonic", knots=knots), Calibrator("temperature", 1.2)
    print(f"{'us of a decision':<30}{'logits':>7}{'T':>6}{'warm':>9}{'cold':>9}{'colder':>9}")
    for kind, names in (("of train", FEATURES), ("wide", WIDE)):
        x = draw_rows(names, 20_000, 0.0)
        noise = np.random.default_rng(4).random((2, len(x)))
        y = [(noise[i] < 1 / (1 + np.exp(-(x[:, i] + x[:, 3] - 1)))).astype(int) for i in (0, 1)]
        heads = {
            "logistic": make_logistic(names, x, np.stack(y)),
            "xgboost": make_trees(names, x, np.stack(y)),
            "mlp 64": make_network(names, 1),
            "mlp 64, 64": make_network(names, 2),
        }
        for name, made in heads.items():
            policy = LearnedPolicy(name, names, made[0], *maps, Derived([0.1] * 10), 10)
            title = f"{name}, features {kind}"
            figures = results[title] = {"library": call_us(made[1]), **timed(title, policy, count)}
            if kind == "of train":
                for size, bar in BARS_US.items():
                    check(bars, f"{title}, {size} logits", figures[str(size)]["warm"], bar)
                figures["apart"] = apart = difference(name, made, names, rows)
                print(f"    largest difference from the library over {rows} rows: {apart:.1e}", flush=True)
                bars.missed += [f"{name}: differs by {apart:.1e}, bar {NEAR:g}"] * (apart > NEAR)
    results["confidence"] = timed("confidence", Confidence(), count)
    check(bars, "confidence, 3072 logits", results["confidence"]["3072"]["warm"], RULE_US)
    return results


def measure_rules(count: int, bars: Bars) -> dict[str, float]:
    """Return the microseconds by built-in rule of one `keep` and one `observe`, and print them."""
    found = {}
    for name in (*BUILTINS, "bandit?kind=thompson"):
        found[name] = round_us(load_policy(name), count)
        print(f"{name:<30}{'keep, observe':>22}{found[name]:>9.1f}", flush=True)
        check(bars, f"{name}, keep and observe", found[name], ROUND_US)
    return found


def round_us(policy: StopPolicy, count: int) -> float:
    """Return the median microseconds of a decision about one branch and of hearing of a round, features given."""
    shown = np.full((1, 1, len(policy.features)), 0.5, dtype=np.float32)
    alive, parent, one = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    step = DraftStep(max(policy.first, 1), alive, parent, shown, {}, np.zeros(1, dtype=np.int64))
    told = RoundOutcome(np.ones(1, dtype=bool), 2 * one, 2 * one, one, np.zeros(1, dtype=bool), np.full(1, 0.01))
    state, seconds = policy.start(1, np.zeros(1, dtype=np.int64)), []
    for _ in range(count):
        begin = time.perf_counter()
        _, state = policy.keep(step, state)
        state = policy.observe(told, state)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def timed(title: str, policy: StopPolicy, count: int) -> dict[str, Any]:
    """Return the microseconds by vocabulary, greedy under its size, and print them."""
    figures: dict[str, Any] = {}
    for size in SIZES:
        for temperature in TEMPERATURES:
            times = {how: decision_us(policy, size, mb, count, temperature) for how, mb in MEGABYTES.items()}
            figures[f"{size}, T = {temperature:g}" if temperature else str(size)] = times
            print(f"{title:<30}{size:>7}{temperature:>6}" + "".join(f"{t:>9.1f}" for t in times.values()), flush=True)
    return figures


def check(bars: Bars, what: str, found_us: float, bar_us: float) -> None:
    """Note a decision that takes too long."""
    if found_us > bar_us:
        bars.missed.append(f"{what}: {found_us:.1f} us, bar {bar_us:g}")


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__, NO_PAIR).parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="X does not have valid feature names")
    bars = Bars()
    results = measure(*((10, 1000) if options.quick else (400, ROWS)), bars)
    rules = measure_rules(30 if options.quick else 2000, bars)
    bars.figures |= {"figures": results, "keep and observe": rules}
    warm = [f[str(SIZES[0])]["warm"] for f in results.values()]
    compared = f"{len(results)} policies, {max(warm):.1f} us at most, greedy, warm, {SIZES[0]} logits"
    return bars.finish(options, compared)


if __name__ == "__main__":
    sys.exit(main())
