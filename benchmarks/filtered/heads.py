"""Policies under filters that they were not trained with, decoded live; and policies trained with a filter, by replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bars
from specstop.collect.prompts import Prompt, encode
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode import Generation, Pair, SamplingParams, Settings, Speculator, stream_key
from specstop.decode.profile import add_decisions, measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength, Profile, StopPolicy
from specstop.policies.display import Progress
from specstop.policies.errors import SpecstopError
from specstop.policies.learned import LearnedPolicy
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train

TEMPERATURE, DEPTH, BAR = 0.7, 8, 0.98
LENGTHS = (0, 1, 2, 3, 4, 6, 8)
HEADS = ("logistic", "mlp", "xgboost", "tokens")
FILTERS = {
    "none": SamplingParams(),
    "top-p 0.5": SamplingParams(top_p=0.5),
    "top-k 1": SamplingParams(top_k=1),
    "min-p 0.9": SamplingParams(min_p=0.9),
}
TRAINED = SamplingParams(top_p=0.9)

ENOUGH = 40
"""Test prompts from which on the achievable estimate, which takes minutes, is worth having."""


@dataclass(frozen=True)
class Place:
    """A pair, its prompts, and how much is decoded and timed.

    Attributes:
        name: of the pair.
        train, test: prompts.
        tokens: of each text.
        room: folder for traces.
    """

    name: str
    pair: Pair
    train: Sequence[Prompt]
    test: Sequence[Prompt]
    tokens: int
    effort: Effort
    room: Path
    progress: Progress

    def traces(
        self, name: str, prompts: Sequence[Prompt], sampling: SamplingParams = FILTERS["none"], **more: Any
    ) -> Trace:
        """Return a dense trace."""
        return collect(
            self.pair, prompts, self.room / name, temperature=TEMPERATURE, verification="match", depth=DEPTH,
            max_new_tokens=self.tokens, sampling=sampling, progress=self.progress, **more,
        )  # fmt: skip

    def profile(self, sampling: SamplingParams) -> Profile:
        """Return what rounds cost."""
        ids = encode(self.train, self.pair.tokenizer, self.pair.readable - self.tokens)
        return measure_profile(
            self.pair, ids, depth=DEPTH, temperature=TEMPERATURE, effort=self.effort, sampling=sampling,
            verification="match", progress=self.progress,
        )  # fmt: skip

    def fitted(self, traces: Trace, costs: Profile, kind: str) -> list[LearnedPolicy]:
        """Return each head that the traces have enough for, named after its kind."""
        made = []
        for head in HEADS:
            try:
                made.append(train(traces, costs, head=head, name=f"{head}{kind}", progress=self.progress).policy)
            except SpecstopError as error:  # a quick pair may have too little to learn from
                print(f"{head}{kind}: not trained ({error})")
        return made


def unlike(place: Place, plain: Sequence[LearnedPolicy], costs: Profile, bars: Bars) -> dict[str, Any]:
    """Decode under filters with policies trained without: tokens per second by filter and policy."""
    costs = add_decisions(costs, plain, place.pair.vocabulary)
    ids = encode(place.test, place.pair.tokenizer, place.pair.readable - place.tokens)
    fixed = [FixedLength(k) for k in LENGTHS]
    figures: dict[str, Any] = {}
    for name, sampling in FILTERS.items():
        rates, drafted = {}, {}
        for policy in (*fixed, *plain):
            settings = Settings(TEMPERATURE, place.tokens, DEPTH, verification="match", sampling=sampling)
            speculator = Speculator(place.pair, policy, settings)
            texts = [speculator.generate(i, stream_key(0, p.id)) for i, p in zip(ids, place.test, strict=True)]
            rates[policy.name] = _rate(texts, costs, policy)
            rounds = [made for text in texts for made in text.rounds]
            drafted[policy.name] = sum(made.drafted for made in rounds) / len(rounds)
        best = max(fixed, key=lambda policy: rates[policy.name])
        figures[name] = {"best fixed": best.name, "tokens_per_s": rates, "drafted a round": drafted}
        print(f"\n{place.name}, {name}: best fixed {best.name}, {rates[best.name]:.1f} tokens/s")
        for policy in plain:
            ratio = rates[policy.name] / rates[best.name]
            text = f"{ratio:.3f} of {best.name}, {drafted[policy.name]:.2f} drafted a round; at least {BAR}"
            if name == "none":
                print(f"      {policy.name}: {text}")
            else:
                bars.add(f"{place.name}, {name}, {policy.name}", ratio, ratio >= BAR, text)
    return figures


def alike(place: Place, plain: Sequence[LearnedPolicy], costs: Profile, bars: Bars) -> dict[str, Any]:
    """Train under a filter and replay there, beside heads trained without; the head is named on training prompts."""
    known = place.traces("filtered", place.train, TRAINED)
    heads = place.fitted(known, costs, ", filtered")
    if not heads or not plain:
        return {}
    named = max(heads, key=lambda policy: policy.metadata.metrics["held_out_ratio_to_best_fixed"])
    rivals: list[StopPolicy] = [*heads, *plain]
    costs = add_decisions(costs, [*heads, *plain], place.pair.vocabulary)
    told = len(place.test) >= ENOUGH
    report = evaluate(
        place.traces("filtered-test", place.test, TRAINED), costs, rivals, train_traces=None, achievable=told
    )
    lines = {line.name: line for line in report.lines}
    print(f"\n{place.name}, top-p 0.9: trained there, and trained without a filter, to the best fixed length")
    for policy in rivals:
        print(f"      {policy.name}: {lines[policy.shown_name].to_best_fixed.text()}")
    ratio = lines[named.shown_name].to_best_fixed
    other = max(plain, key=lambda policy: lines[policy.shown_name].tokens_per_s)
    share = lines[named.shown_name].tokens_per_s / lines[other.shown_name].tokens_per_s
    bars.add(
        f"{place.name}, trained under top-p 0.9", ratio.value, ratio.is_above,
        f"{named.name} {ratio.text()} of the best fixed length; clear of 1",
    )  # fmt: skip
    bars.add(
        f"{place.name}, trained under top-p 0.9 and without", share, share > 1.0,
        f"{named.name} {share:.3f} of {other.name}, the fastest of those trained without; above 1",
    )  # fmt: skip
    if told:
        room = lines["achievable estimate"].tokens_per_s / lines[other.shown_name].tokens_per_s
        print(f"      the best cross-fitted policy on all features, fitted there: {room:.3f} of {other.name}")
    return {name: line.to_best_fixed.value for name, line in lines.items()}


def _rate(texts: Sequence[Generation], costs: Profile, policy: StopPolicy) -> float:
    """Return committed tokens per second of the rounds, by the profile."""
    rounds = [made for text in texts for made in text.rounds]
    names = ("context", "drafted", "verified", "backlog", "decisions")
    columns = (np.array([getattr(made, name) for made in rounds]) for name in names)
    seconds = costs.round_seconds(*columns, costs.decision(policy.cost_name))
    return float(sum(made.committed for made in rounds) / seconds.sum())
