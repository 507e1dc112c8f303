"""Heads and tuned rules on held-out prompts, compared with the best fixed length.

    python benchmarks/policies.py --check
    python benchmarks/policies.py --part replayed --pair DIR --temperatures 0.7

- `replayed`: dense traces of training and test prompts, costs of this machine. Each rule is tuned on the training
  prompts over the same number of settings. Every head is trained, and one is selected on training prompts that its
  fit did not use. Replay on the test prompts gives the ratio to the best fixed length with an interval over prompts,
  and the share of the oracle gain, of the achievable estimate too. The interval of the selected head is above 1, its
  share is at least 0.15, no tuned rule is faster, tuning loses at most 0.01, and the calibration error of survival is
  at most 0.02.
- `sampled`: heads trained for `block` and for `match` decode sampled texts live, in alternation with the best fixed
  length; their intervals are above 1.
- `filters`: a head that is trained with a top-p filter, and one trained without, replayed with the filter. The first
  one is not slower than the second, and at most 2% slower than the best fixed length.
"""

from __future__ import annotations

from typing import Any

from harness import Run, ratio_of_sums
from specstop.decode import SamplingParams, Tally
from specstop.decode.benchmark import run_alternating, speed_ratio
from specstop.policies.features import DRAFT_HIDDEN, TOKEN_FEATURES

import specstop as ss

DEPTH = 10
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85)
ENTROPIES = (0.1, 0.3, 0.6, 1.0, 1.4, 1.8, 2.2, 2.6, 3.0, 3.5, 4.0, 5.0)
RULES: dict[str, tuple[str, tuple[float, ...]]] = {
    "confidence": ("confidence:0.4", SHARES),
    "entropy": ("entropy", ENTROPIES),
    "adaedl": ("adaedl", SHARES),
    "maxprob": ("maxprob", SHARES),
    "product": ("product", SHARES),
    "online": ("online", SHARES),
    "heuristic": ("heuristic", tuple(range(1, 13))),
    "roc": ("roc", SHARES),
}
"""By name, the published setting and the values that are tried, all with the full depth and with half of it."""

HEADS: dict[str, dict[str, Any]] = {
    "logistic": {"head": "logistic"},
    "mlp": {"head": "mlp"},
    "xgboost": {"head": "xgboost"},
    "tokens": {"head": "tokens", "features": ("top1", "noisy_margin", "drawn_prob", "depth", *TOKEN_FEATURES)},
    "resnet": {"head": "resnet", "hidden": (DRAFT_HIDDEN,)},
    "dynasd-hard": {"head": "dynasd-hard"},
    "dynasd-soft": {"head": "dynasd-soft"},
    "specdec-published": {"head": "specdec-published"},
}
"""Arguments of `train` by name; the last three are heads of the literature as published."""

OURS = ("logistic", "mlp", "xgboost", "tokens", "resnet")
SHARE, TUNING_LOSS, CALIBRATION, FILTER_LOSS = 0.15, 0.01, 0.02, 0.98


def _traces(run: Run, name: str, train: int, test: int = 0, **options: Any) -> dict[str, ss.Trace]:
    """Return dense traces of training and test prompts; a smoke run has few of both."""
    counts = {"train": run.choose(train, 5)} | ({"test": run.choose(test, 3)} if test else {})
    return run.traces(name, counts, depth=DEPTH, max_new_tokens=run.choose(128, 8), **options)


def _settings(run: Run, temperature: float, verification: str = "match") -> ss.Settings:
    """Return the settings of live runs."""
    return ss.Settings(temperature, run.choose(128, 8), DEPTH, verification=verification)


def replayed(run: Run) -> None:
    """Compare rules and heads by replay."""
    for temperature in run.temperatures:
        where = f"T={temperature:g}"
        names = run.choose(list(HEADS), ["logistic", "dynasd-hard"])
        hidden = (DRAFT_HIDDEN,) if "resnet" in names or "dynasd-soft" in names else ()
        train, test = _traces(run, where, 160, 160, temperature=temperature, hidden=hidden).values()
        published = {name: ss.load_policy(spec).limited(DEPTH) for name, (spec, _) in RULES.items()}
        settings, profile = _settings(run, temperature), run.profile(depth=DEPTH, temperature=temperature)
        profile = run.with_decisions(profile, list(published.values()), settings)
        tuned = {name: _tuned(run, train, profile, name) for name in RULES}
        trained = {name: ss.train(train, profile, name=name, **HEADS[name]) for name in names}
        heads = {name: result.policy for name, result in trained.items()}
        profile = run.with_decisions(profile, list(heads.values()), settings)
        selected = max(
            (name for name in OURS if name in trained),
            key=lambda name: trained[name].metrics.get("held_out_ratio_to_best_fixed", 0.0),
        )
        for name, policy in tuned.items():
            policy.label = f"tuned {name}"  # `evaluate` adds a line "confidence, tuned"
        policies = [*published.values(), *tuned.values(), *heads.values()]
        report = ss.evaluate(
            test, profile, policies, train_traces=train, achievable=not run.smoke, primary=selected,
            out=run.folder("report"), overwrite=True,
        )  # fmt: skip
        for line in report.lines:
            note = (
                f"share of the oracle gain {line.oracle_share.value:.2f}, {line.block_efficiency:.2f} tokens per call"
            )
            run.row(f"{where}, {line.name} ({line.kind}): of best fixed", line.to_best_fixed, note)
        best = report[heads[selected].shown_name]
        run.bar(f"{where}: selected head {selected}", best.to_best_fixed, above=1.0)
        run.bar(f"{where}: share of the oracle gain", best.oracle_share.value, at_least=SHARE)
        seconds = {label: ss.replay(test, policy, profile).seconds.tolist() for label, policy in tuned.items()}
        mine = ss.replay(test, heads[selected], profile).seconds.tolist()
        for label, spent in seconds.items():
            ratio = ratio_of_sums(spent, mine)
            run.bar(f"{where}: {selected} over tuned {label}", ratio, at_least=1.0)
            before, after = (report[p.shown_name].to_best_fixed.value for p in (published[label], tuned[label]))
            run.bar(f"{where}: {label}, lost by tuning", before - after, at_most=TUNING_LOSS)
        for row in report.details.get("reliability", []):
            if row["name"] == heads[selected].shown_name:
                note = f"of a perfect predictor {row['ece_perfect']:.3f}"
                run.bar(f"{where}: calibration error of {selected}", row["ece"], at_most=CALIBRATION, note=note)


def _tuned(run: Run, train: ss.Trace, profile: ss.Profile, name: str) -> ss.StopPolicy:
    """Return the setting of a rule that replays fastest on training prompts, the published one included."""
    published, values = RULES[name]
    specs = [published, *(f"{name}:{value:g}" for value in run.choose(values, values[3:4]))]
    policies = [ss.load_policy(spec).limited(depth) for spec in specs for depth in (DEPTH, DEPTH // 2)]
    return max(policies, key=lambda policy: ss.replay(train, policy, profile).rate)


def sampled(run: Run) -> None:
    """Decode sampled texts live with heads trained for `block` and for `match`."""
    prompts = run.encoded("test", run.choose(60, 2))
    for mode in run.choose(("match", "block"), ("block",)):
        train = _traces(run, mode, 120, temperature=0.7, verification=mode)["train"]
        settings, profile = _settings(run, 0.7, mode), run.profile(depth=DEPTH, temperature=0.7, verification=mode)
        head = ss.train(train, profile, head="logistic", name=f"{mode}-head").policy
        profile = run.with_decisions(profile, [head], settings)
        fixed = [ss.load_policy(f"fixed:{k}") for k in range(DEPTH + 1)]
        best = max(fixed, key=lambda policy: ss.replay(train, policy, profile).rate)
        methods = [ss.Speculator(run.pair, policy, settings, profile) for policy in (best, head)]
        base, texts = run_alternating(methods, prompts)
        note = f"{Tally(texts).tokens_per_s:.1f} tokens/s"
        run.bar(f"live, {mode}: head of {best.name}", speed_ratio(texts, base), above=1.0, note=note)


def filters(run: Run) -> None:
    """Replay heads that were trained with and without a top-p filter, with the filter."""
    plain = _traces(run, "plain", 120, temperature=0.7)["train"]
    train, test = _traces(run, "filtered", 120, 120, temperature=0.7, sampling=SamplingParams(top_p=0.9)).values()
    profile = run.profile(depth=DEPTH, temperature=0.7)
    with_filter, without = (
        ss.train(traces, profile, head="logistic", name=name).policy
        for traces, name in ((train, "with-filter"), (plain, "without-filter"))
    )
    profile = run.with_decisions(profile, [with_filter, without], _settings(run, 0.7))
    seconds = {p.name: ss.replay(test, p, profile).seconds.tolist() for p in (with_filter, without)}
    report = ss.evaluate(test, profile, [with_filter])
    run.bar(
        "trained with the filter over without",
        ratio_of_sums(seconds[without.name], seconds[with_filter.name]),
        at_least=1.0,
    )
    run.bar(
        "trained with the filter: of best fixed", report[with_filter.shown_name].to_best_fixed, at_least=FILTER_LOSS
    )


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [replayed, sampled, filters]).execute())
