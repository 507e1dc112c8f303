"""Learned stop policies beside best fixed, every tuned rule, published heads, the achievable estimate and the oracle.

    python benchmarks/heads.py --pair path/to/one --work traces --check
    python benchmarks/heads.py --quick

The shipped pair, and the pairs of `--pair`. For temperatures 0 and 0.7 dense traces of training and test prompts are
collected and the latency of this machine is measured through the loop, decisions included. Files that exist in `--work` are
reused. On training prompts every rule is tuned over as many settings, and every head is fitted. The learned policy that is
fastest on training prompts left out of its fit is chosen before a test prompt is read. Then all are replayed on test prompts:
ratios to the best fixed length with 95% intervals over prompts, and the share of the oracle gain.
For the plain engine the named policy is solved again; for a GPU (verifying takes 20 ms whatever it reads, a draft step 3% of
that) one is named anew. The last line printed is one JSON object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from baselines import measured
from hindsight import policy_survival, settle_thresholds
from pairs import effort, prompts_of
from specstop.cli.output import progress_bars
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.collect.run import collect
from specstop.collect.store import Trace, load_trace
from specstop.decode import Pair, Settings, load_pair
from specstop.decode.profile import loop_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies.contract import StopPolicy
from specstop.policies.costs import CostTable
from specstop.policies.errors import SpecstopError
from specstop.policies.features import DRAFT_HIDDEN, TARGET_HIDDEN, TOKEN_FEATURES
from specstop.policies.learned import LearnedPolicy
from specstop.policies.profile import Profile
from specstop.train.demo.pair import shipped_pair
from specstop.train.evaluate.analysis import survival
from specstop.train.evaluate.statistics import Resamples
from specstop.train.fit.achievable import achievable_estimate
from specstop.train.fit.plan import FEATURES, REPORT_SHARE, split_report
from specstop.train.fit.rules import fixed_grid
from specstop.train.fit.run import train
from specstop.train.fit.settle import PRICED, solve_rate
from specstop.train.heads import head_class
from specstop.train.heads.calibration import survival_scores
from specstop.train.heads.rows import visits
from specstop.train.replay.bounds.oracle import oracle_seconds
from specstop.train.replay.run import Replayed, replay
from specstop.train.replay.traces.arrays import TraceArrays, trace_arrays
from tuned_rules import tuned_rules

TEMPERATURES = (0.0, 0.7)
DEPTH = 10
SEED = 0
TRAIN, TEST = 600, 800
RULES = ("confidence", "entropy", "product", "maxprob", "online")
PUBLISHED = ("dynasd-hard", "dynasd-soft", "specdec-published")
HIDDEN, BOTH, TOKENS = "resnet-hidden", "resnet-both", "tokens"
WIDE = (*FEATURES[:3], "last_verified", "anchor_entropy", "anchor_top1", "top1", "top2", "entropy", "noisy_margin",
        "noisy_score", "path_logprob", "drawn_prob", "depth")  # fmt: skip
LEAN = tuple(name for name in FEATURES if name != "top1")
CHUNK = 4096
LEAST_GAP, WORST, NEAR, MOST_ECE = 0.15, 0.99, 0.01, 0.02
VERIFY_S, DRAFT_S = 20e-3, 0.6e-3


@dataclass(frozen=True)
class Ours:
    """One of our heads: its kind, its rule, what it reads."""

    head: str
    rule: str = "derived"
    features: tuple[str, ...] = FEATURES
    hidden: tuple[str, ...] | None = None

    def fitted(self, traces: Trace, profile: Profile, name: str) -> LearnedPolicy:
        """Return the policy, trained."""
        return train(
            traces, profile, head=self.head, rule=self.rule, features=self.features, hidden=self.hidden, name=name,
            seed=SEED,
        ).policy  # fmt: skip


OURS = {
    "logistic": Ours("logistic"),
    "logistic-lean": Ours("logistic", features=LEAN),
    "mlp": Ours("mlp"),
    "xgboost": Ours("xgboost"),
    "xgboost-wide": Ours("xgboost", features=WIDE),
    TOKENS: Ours("tokens", features=(*WIDE[4:], *TOKEN_FEATURES)),
    "tokens-lean": Ours("tokens", features=head_class("tokens").default_features(FEATURES)),
    HIDDEN: Ours("resnet", features=WIDE[4:], hidden=(DRAFT_HIDDEN,)),
    BOTH: Ours("resnet", features=WIDE[4:], hidden=(DRAFT_HIDDEN, TARGET_HIDDEN)),
}


@dataclass(frozen=True)
class Place:
    """A pair at a temperature: models, prompts to measure on, traces, costs, and how long those are measured."""

    name: str
    pair: Pair
    ids: list[list[int]]
    train: Trace
    test: Trace
    profile: Profile
    settings: Settings
    effort: Effort


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, "folders of further pairs made by make_pair.py", pairs=True)
    parser.add_argument("--temperature", type=float, action="append", help="only this one; may be repeated")
    parser.add_argument("--only-pairs", action="store_true", help="leave the shipped pair out")
    parser.add_argument("--scalars", action="store_true", help="leave out what reads hidden states, most of the hour")
    parser.add_argument(
        "--work", type=Path, help="folder for traces and profiles, taken from there when they are there"
    )
    options = parser.parse_args()
    counts = (16, 8) if options.quick else (TRAIN, TEST)
    tokens = 32 if options.quick else 128
    temperatures = options.temperature or (TEMPERATURES[-1:] if options.quick else TEMPERATURES)
    bars = Bars()
    try:
        pairs = [*([] if options.only_pairs else [shipped_pair()]), *options.pair]
        cut = [(where, prompts_of(where, *counts)) for where in pairs]
    except SpecstopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    work = options.work or Path(tempfile.mkdtemp(prefix="specstop-heads-"))
    for where, prompts in cut:
        for temperature in temperatures:
            place = prepare(where, prompts, temperature, work, tokens, effort(options))
            plain = load_pair(where / "target", where / "draft", engine="plain")
            bars.figures[place.name] = compare(place, plain, bars.missed, options.scalars)
    if options.work is None:
        shutil.rmtree(work)
    whole = len(pairs) >= 2 and not options.scalars and options.temperature is None
    return bars.finish(options, f"{len(pairs)} pairs, {counts[1]} held-out prompts of {tokens} tokens each", whole)


def prepare(
    where: Path, prompts: Sequence[list[Prompt]], temperature: float, work: Path, tokens: int, effort: Effort
) -> Place:
    """Return traces of training and test prompts, and the machine's latency."""
    pair = load_pair(where / "target", where / "draft")
    name = f"{where.name} T={temperature:g}"
    folder = work / name.replace(" ", "-")
    sides = {}
    for side, asked in zip(("train", "test"), prompts, strict=True):
        at = folder / side
        with progress_bars() as progress:
            collect(
                pair, asked, at, target=str(where / "target"),
                draft=str(where / "draft"), depth=DEPTH, temperature=temperature, verification="match",
                max_new_tokens=tokens, seed=SEED,
                hidden=(DRAFT_HIDDEN, TARGET_HIDDEN), resume=(at / "header.json").exists(), progress=progress,
            )  # fmt: skip
        sides[side] = load_trace(at)
    if not (folder / "profile.json").exists():
        measured(pair, where, temperature, tokens, effort).save(folder / "profile.json")
    ids = encode(read_prompts(where / "prompts-train.jsonl", 8), pair.tokenizer, pair.readable - tokens)
    profile = Profile.load(folder / "profile.json")
    settings = Settings(temperature, tokens, DEPTH, verification="match")
    return Place(name, pair, ids, sides["train"], sides["test"], profile, settings, effort)


def selection(policy: LearnedPolicy, training: TraceArrays) -> TraceArrays:
    """Return the training prompts of selection, on which rates are solved: the head was not fitted on them."""
    names = set(policy.metadata.prompts["select"])
    return training.subset([at for at, name in enumerate(training.clusters) if name in names])


def learn(place: Place, name: str, ours: Ours, training: TraceArrays) -> tuple[LearnedPolicy, Profile]:
    """Return a head of ours, its rule settled for what decisions cost in the loop, and the profile with that cost."""
    policy = ours.fitted(place.train, place.profile, name)
    profile = place.profile.with_measured_decisions(loop_decisions(place.pair, [policy], place.ids, place.settings))
    if policy.rule.kind in PRICED:
        select = selection(policy, training)
        return solve_rate(policy, select, profile, policy.metadata.acceptance, (policy.rule.first,))[0], profile
    return ours.fitted(place.train, profile, name), profile


def compare(place: Place, plain: Pair, missed: list[str], scalars: bool) -> dict[str, Any]:
    """Name a policy on training prompts, replay everything on test prompts, and print one table."""
    training = trace_arrays(place.train)
    _, left_out = split_report(training, REPORT_SHARE, SEED)  # that `train` holds out, with the same share and seed
    assert left_out is not None
    profile, learned, validated = place.profile, {}, {}
    for name, ours in OURS.items():
        if ours.hidden is not None and scalars:
            continue
        learned[name], priced = learn(place, name, ours, training)
        profile = profile.with_decisions(priced.decision_s)
        validated[name] = replay(left_out, learned[name], profile).rate
    named = max(validated, key=validated.__getitem__)
    published = {}
    for name in PUBLISHED:
        if scalars and head_class(name).hidden:
            continue
        published[name] = train(place.train, profile, head=name, name=name, seed=SEED).policy
    profile = profile.with_measured_decisions(
        loop_decisions(place.pair, list(published.values()), place.ids, place.settings)
    )
    rules = tuned_rules(RULES, training, profile)
    print(f"{place.name}: named by validation: {named}")

    arrays = trace_arrays(place.test)
    table = Table(arrays, profile)
    policies: dict[str, tuple[str, StopPolicy]] = {
        **{f"{rule}, tuned": ("rule", policy) for rule, policy in rules.items()},
        **{name: ("published", policy) for name, policy in published.items()},
        **{name: ("ours", policy) for name, policy in learned.items()},
    }
    lines = {}
    for name, (kind, policy) in policies.items():
        played, spent = replay(arrays, policy, profile).seconds, profile.decision(policy.cost_name)
        lines[name] = table.line(
            name, played, spent, free(policy, training, arrays, profile) if kind == "ours" else None
        )
    lines["achievable estimate"] = table.line("achievable estimate", achievable_estimate(arrays, profile).seconds, 0.0)
    lines["oracle bound"] = table.line("oracle bound", table.bound, 0.0)
    mine = replay(arrays, learned[named], profile)
    _bars(place.name, lines[named], table, mine, {n: replay(arrays, p, profile) for n, p in rules.items()}, missed)
    return {
        "named": named,
        "lines": lines,
        "machines": _machines(place, plain, profile, learned, named, (training, left_out, arrays), missed),
        "tuned on test": _untuned(place.name, learned, validated, arrays, profile, missed),
        "ece": _reliable(place.name, learned, validated, arrays, profile, missed),
    }


def free(policy: LearnedPolicy, training: TraceArrays, arrays: TraceArrays, profile: Profile) -> torch.Tensor:
    """Return [S] seconds of a policy whose decisions cost nothing, its rule solved for that: what its knowledge is worth."""
    profile = profile.with_decisions({policy.cost_name: 0.0})
    if policy.rule.kind in PRICED:
        policy = solve_rate(policy, selection(policy, training), profile, policy.metadata.acceptance)[0]
    return replay(arrays, policy, profile).seconds


def in_advance(policy: LearnedPolicy, arrays: TraceArrays) -> torch.Tensor:
    """Return [N, K + 1, 1], the survival that a policy without HISTORY features sees at every anchor and depth."""
    rows = torch.arange(len(arrays.accepted))
    parts = [survival(policy, arrays, part, torch.zeros(len(part), 4)) for part in rows.split(CHUNK)]
    return torch.nn.functional.pad(torch.cat(parts).nan_to_num(1.0), (1, 0), value=1.0)[..., None]


class Table:
    """Ratios to the best fixed length, which is picked again in each resample of the prompts."""

    def __init__(self, arrays: TraceArrays, profile: Profile, machine: str = "this machine") -> None:
        self.boot = Resamples(arrays.clusters, SEED)
        grid = fixed_grid(arrays, profile)
        self.fixed = np.stack([self.boot.total(r.seconds) for r in grid], 1).min(1)
        self.bound = oracle_seconds(arrays, profile)
        self._least = self.boot.total(self.bound)
        length = int(np.argmin([float(r.seconds.sum()) for r in grid]))
        print(f"  {machine}, best fixed: {length}\n  {'':<24}{'of best fixed':<26}{'gap':>6}{'us':>7}{'gap, free':>11}")

    def line(
        self, name: str, seconds: torch.Tensor, decision_s: float, free: torch.Tensor | None = None
    ) -> dict[str, float]:
        """Print and return ratio, interval, share of the oracle gain, a decision's cost, and the share if it cost nothing."""
        mine = self.boot.total(seconds)
        ratio = self.boot.interval(self.fixed / mine)
        interval = f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        found = {"ratio": ratio.value, "low": ratio.low, "high": ratio.high, "gap": self.gap(mine)}
        found["decision_us"] = 1e6 * decision_s
        if free is not None:
            found["gap_free"] = self.gap(self.boot.total(free))
        last = f"{found['gap_free']:>11.2f}" if free is not None else ""
        print(f"  {name:<24}{interval:<26}{found['gap']:>6.2f}{found['decision_us']:>7.0f}{last}", flush=True)
        return found

    def gap(self, mine: np.ndarray[Any, Any]) -> float:
        """Return the share of the oracle gain."""
        return float((self.fixed[0] / mine[0] - 1.0) / max(self.fixed[0] / self._least[0] - 1.0, 1e-9))


def _bars(
    place: str, line: dict[str, float], table: Table, mine: Replayed, rules: dict[str, Replayed], missed: list[str]
) -> None:
    if line["low"] <= 1.0:
        missed.append(f"{place}: {line['ratio']:.3f} of best fixed, from {line['low']:.3f}")
    if line["gap"] < LEAST_GAP:
        missed.append(f"{place}: {line['gap']:.2f} of the share of the oracle gain, of {LEAST_GAP}")
    for name, played in rules.items():
        ratio = table.boot.interval(table.boot.total(played.seconds) / table.boot.total(mine.seconds))
        if ratio.low <= 1.0:
            missed.append(f"{place}: {ratio.value:.3f} of tuned {name}, from {ratio.low:.3f}")


def _machines(
    place: Place, plain: Pair, priced: Profile, learned: dict[str, LearnedPolicy], named: str,
    sides: tuple[TraceArrays, TraceArrays, TraceArrays], missed: list[str],
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Return ratio to the best fixed length and gap under other profiles, rules solved for each on training prompts.

    The plain engine is decoded with by the policy named here; on a GPU one is named anew, since what decisions cost matters
    less there. `priced` says what that is; `sides` are prompts to settle rules on, to name a policy on, and to test on.
    """
    with progress_bars() as progress:
        slow = measure_profile(
            plain, place.ids, depth=DEPTH, temperature=place.settings.temperature, effort=place.effort, facts={},
            verification="match", progress=progress,
        )  # fmt: skip
    table = CostTable(1.0, (DRAFT_S, DRAFT_S), 0.0, (VERIFY_S,) * (DEPTH + 1))
    flat = replace(
        slow,
        low=table,
        high=table,
        step_s=0.0,
        round_s=0.0,
        prefill_s=(0.0, 0.0),
        tree_outside_s=None,
    )
    training, left_out, arrays = sides
    found = {}
    for machine, profile, names in (("plain engine", slow, [named]), ("GPU-like", flat, list(learned))):
        profile = profile.with_decisions(priced.decision_s)
        best, best_rate = learned[named], 0.0
        for name in names:
            policy = _settled(place, learned[name], training, profile)
            rate = replay(left_out, policy, profile).rate
            if rate > best_rate:
                best, best_rate = policy, rate
        line = Table(arrays, profile, machine).line(
            best.name, replay(arrays, best, profile).seconds, profile.decision(best.cost_name)
        )
        found[machine] = {"named": best.name, **line}
        if line["ratio"] < WORST:
            missed.append(f"{place.name}: {line['ratio']:.3f} of best fixed on the {machine}")
    return found


def _settled(place: Place, policy: LearnedPolicy, training: TraceArrays, profile: Profile) -> LearnedPolicy:
    """Return a policy for another machine: its rule solved again, or, where the head itself knows prices, fitted again."""
    if policy.rule.kind in PRICED:
        return solve_rate(policy, selection(policy, training), profile, policy.metadata.acceptance)[0]
    return OURS[policy.name].fitted(place.train, profile, policy.name)


def _derived(learned: dict[str, LearnedPolicy], validated: dict[str, float]) -> LearnedPolicy:
    """Return the policy of scalars under the derived rule that is best by validation."""
    fit = (name for name, policy in learned.items() if policy.rule.kind == "derived" and not policy.hidden)
    return learned[max(fit, key=validated.__getitem__)]


def _untuned(
    place: str, learned: dict[str, LearnedPolicy], validated: dict[str, float], arrays: TraceArrays, profile: Profile,
    missed: list[str],
) -> float:  # fmt: skip
    """Return the derived rule's speed against the same head with its thresholds settled on the test traces themselves."""
    policy = _derived(learned, validated)
    _, rate = settle_thresholds(policy, arrays, profile)
    share = replay(arrays, policy, profile).rate / rate
    print(f"  {policy.name}, derived, against thresholds settled on the test prompts: {share:.4f}")
    if share < 1.0 - NEAR:
        missed.append(f"{place}: derived {share:.4f} of thresholds settled on the test prompts")
    return share


def _reliable(
    place: str, learned: dict[str, LearnedPolicy], validated: dict[str, float], arrays: TraceArrays, profile: Profile,
    missed: list[str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Print and return the calibration error of survival by depth, beside that of a perfectly calibrated predictor."""
    policy = _derived(learned, validated)
    rows = survival_scores(
        policy_survival(policy, arrays, visits(arrays, [replay(arrays, policy, profile)])), seed=SEED
    )
    errors = " ".join(f"{row['depth']}: {row['ece']:.3f} ({row['ece_perfect']:.3f})" for row in rows)
    print(f"  ECE of {policy.name}'s survival by depth (of a perfect one): {errors}")
    worst = max(rows, key=lambda row: row["ece"])
    if worst["ece"] > MOST_ECE:
        missed.append(f"{place}: ECE {worst['ece']:.3f} at depth {worst['depth']}, perfect {worst['ece_perfect']:.3f}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
