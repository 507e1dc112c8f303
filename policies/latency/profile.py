"""What a round costs: the latency profile as a plain record, and the one function that turns a round into seconds.

The live loop (for `RoundOutcome.seconds`), replay and the derived stop rule all read costs from here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files.atomic import read_json, write_atomic
from ..files.entries import Entries
from ..storage.safe_loading import check_values
from .batch import BatchCosts
from .estimate import DECISIONS, VERIFY, batch_costs, check, decisions, estimate
from .measurements import Measurements, Timings
from .noise import Noise, judge
from .tables import CLEARLY, MOST_S, ChainCosts, CostTable, Price, at_context, least_later, read_price, read_table

Array = np.ndarray[Any, Any]

PROFILE_SCHEMA = 1
MARK = b'"kind": "profile"'
"""Stands near the beginning of every profile."""

COSTS = ("low", "high", "step_s", "round_s", "prefill_s", "tree_outside_s", "batch", "plain_outside_s", "carry_over")
"""What a profile has beside decisions."""

MOST_CARRIED = 0.5
"""The largest `carry_over` that is believed."""

SAME = 1e-6
"""Relative difference of costs that another build of the same linear algebra may make."""


@dataclass(frozen=True)
class Profile:
    """Latency of a pair on a machine, at two context lengths; between and beyond them costs are linear in the context.

    Attributes:
        low, high: the tables at a short and a long context.
        step_s: outside the models, per drafted token.
        round_s: outside the models, per round.
        prefill_s: reading a prompt: (constant, per token).
        decision_s: decisions, by the policy's `cost_name`; a number is that of each.
        temperature: of the sampling it was measured under.
        facts: device, dtype, threads, versions, spread: what a reader wants to know.
        tree_outside_s: outside the models in a round of a tree: (per round, per draft step, per drafted token); None = as
            in a chain, where each step drafts one.
        measurements: what the costs were estimated from; none of costs that nobody measured. A price of decisions is
            estimated from those that are kept under its name, all other costs from the rest.
        source: the file it was read from; None = none.
        shaping: what else changed the distribution that was sampled from (`decode.Shaping.facts`).
        batch: what texts that are decoded side by side cost; None = not measured.
        verification: the mode whose rounds of chains were timed; "" = not told.
        plain_outside_s: outside the models in a round that drafts nothing and asks nobody; None = as in any other.
        carry_over: share of a round's seconds by which the verifications behind it take longer. All costs are charged for
            it but those in `decision_s`, for which `decision` does it.
    """

    low: CostTable
    high: CostTable
    step_s: float
    round_s: float
    prefill_s: tuple[float, float]
    decision_s: Mapping[str, float | Price] = field(default_factory=dict)
    temperature: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    tree_outside_s: tuple[float, float, float] | None = None
    measurements: Measurements = field(default_factory=Measurements)
    source: Path | None = field(default=None, repr=False, compare=False)
    shaping: Mapping[str, Any] = field(default_factory=dict)
    batch: BatchCosts | None = None
    verification: str = ""
    plain_outside_s: float | None = None
    carry_over: float = 0.0

    @staticmethod
    def measured(
        measurements: Measurements,
        contexts: tuple[float, float],
        depth: int,
        temperature: float = 0.0,
        facts: Mapping[str, Any] | None = None,
    ) -> Profile:
        """Return the profile that measurements tell: the same one for the same measurements.

        Args:
            measurements: see `latency.estimate`.
            contexts: mean tokens in the cache at the short and the long context.
            depth: K, the longest chain timed.
            temperature: of the sampling.
            facts: kept in the profile.

        Raises:
            InputError: no round was timed.
        """
        timings = measurements.pooled()
        told = estimate(timings, depth)
        return Profile(
            CostTable(contexts[0], **told.low._asdict()),
            CostTable(contexts[1], **told.high._asdict()),
            told.step_s,
            told.round_s,
            told.prefill_s,
            {name: Price(*price) for name, price in told.decision_s.items()},
            temperature,
            facts or {},
            told.tree_outside_s,
            measurements,
            batch=batch_costs(timings, contexts),
            plain_outside_s=told.plain_outside_s,
        )

    @property
    def max_depth(self) -> int:
        """The deepest chain whose verification was measured."""
        return len(self.low.verify_s) - 1

    def between(self, context: float, of: Callable[[CostTable], Sequence[float]]) -> list[float]:
        """Return what `of` takes from the tables, at a context length; beyond those measured, as at the nearest one."""
        span = self.high.context - self.low.context
        share = min(max((context - self.low.context) / span, 0.0), 1.0) if span else 0.0
        return [(1.0 - share) * a + share * b for a, b in zip(of(self.low), of(self.high), strict=True)]

    def decision(self, name: str) -> Price:
        """Return what decisions of the policy whose `cost_name` is `name` cost; nothing where they were not measured."""
        price = Price.read(self.decision_s.get(name, 0.0))
        return price.times(1.0 / (1.0 - self.carry_over)) if self.carry_over else price

    def with_decisions(self, seconds: Mapping[str, float | Price]) -> Profile:
        """Return this profile with the decisions of more policies; those measured before are no longer theirs."""
        kept = self.measurements
        for name in seconds:
            kept = kept.without(DECISIONS, name)
        return dataclasses.replace(self, decision_s={**self.decision_s, **seconds}, measurements=kept)

    def with_measured_decisions(self, more: Measurements) -> Profile:
        """Return this profile with the decisions of more policies, priced by their timings, which are kept."""
        prices = {name: Price(*price) for name, price in decisions(more.pooled()).items()}
        made = self.with_decisions(prices)
        return dataclasses.replace(made, measurements=made.measurements.with_series(more.only(DECISIONS)))

    @cached_property
    def noise(self) -> Noise | None:
        """How noisy the machine was; None of costs that were not measured, or before measurements were kept."""
        return judge(self.measurements.leaving(DECISIONS)) if self._is_measured else None

    @cached_property
    def _is_measured(self) -> bool:
        """Whether the costs of chains and trees are those that the measurements tell, and not edited or scaled since."""
        if not any(key.what == VERIFY for key in self.measurements.series):
            return False
        told = self._with_costs(self.measurements.pooled())
        mine, theirs = (_numbers([getattr(p, name) for name in COSTS]) for p in (self, told))
        return len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=SAME, atol=0.0))

    def _with_costs(self, timings: Timings) -> Profile:
        """Return this profile with the costs of chains, trees and batches that timings tell, at the same contexts."""
        told = estimate(timings, self.max_depth)
        low, high = (
            CostTable(table.context, **side._asdict())
            for table, side in zip((self.low, self.high), (told.low, told.high), strict=True)
        )
        return dataclasses.replace(
            self,
            low=low,
            high=high,
            step_s=told.step_s,
            round_s=told.round_s,
            prefill_s=told.prefill_s,
            tree_outside_s=told.tree_outside_s,
            batch=batch_costs(timings, (low.context, high.context)),
            plain_outside_s=told.plain_outside_s,
        )

    def resampled(self, rng: np.random.Generator) -> Profile:
        """Return a bootstrap draw: the costs that a draw of the measurements tells, estimated as these were.

        Whole repetitions are drawn, for all costs at once: a slow phase hits all that was timed in it. What was not measured,
        or edited or scaled since, stays as it is; so does the draw itself when it is drawn from.
        """
        if not self.measurements:
            return self
        drawn = self.measurements.resampled(rng, self.noise.lasting if self.noise else 1)
        prices = {name: Price(*price) for name, price in decisions(drawn).items()}
        made = self._with_costs(drawn) if self._is_measured else self
        return dataclasses.replace(made, decision_s={**self.decision_s, **prices}, measurements=Measurements())

    def same_costs(self, record: Mapping[str, Any]) -> bool:
        """Whether a profile's JSON form has the same costs of everything but decisions."""
        mine = self.to_dict()
        return all(record.get(key) == mine[key] for key in COSTS)

    def padded(self) -> tuple[int, ...]:
        """Return for n = 0..K drafted tokens how many are best verified: filling up to a size that is clearly cheaper pays.

        Where verification is flat, the cheapest of several sizes is the one whose measurement was luckiest; filling up to it
        gains nothing, and its seconds are too few.
        """
        cost = np.array(self.low.verify_s) + np.array(self.high.verify_s)
        least = least_later(cost)
        return tuple(np.where(cost[least] < (1.0 - CLEARLY) * cost, least, np.arange(len(cost))).tolist())

    def round_seconds(
        self,
        context: Array,
        drafted: Array,
        verified: Array,
        backlog: Array,
        decisions: Array,
        decision: float | Price,
        fed: Array | None = None,
    ) -> Array:
        """Return [S] float64 seconds of rounds, [R, S] of contexts [R, S].

        Args:
            context: [S] or [R, S] tokens committed before the round.
            drafted, verified: [S] int64, tokens drawn, tokens sent to the target.
            backlog: [S] committed tokens that the draft has not read yet.
            decisions: [S] times the policy was asked.
            decision: of the policy.
            fed: [S, K] int64, of trees: how many tokens the draft read at each of its steps; None = chains, one a step.
        """
        decided = Price.read(decision).of(decisions)
        if fed is not None:
            per_round, per_step, per_token = self.tree_outside_s or (self.round_s, self.step_s, 0.0)
            outside = per_round + per_step * (fed > 0).sum(1) + per_token * drafted
            calls = self._tree_calls(verified, backlog, fed)
        else:
            outside = self.round_s + self.step_s * drafted
            calls = self._calls(drafted, self._padded[verified], backlog)
        if self.plain_outside_s is not None:
            outside = np.where((drafted == 0) & (decisions == 0), self.plain_outside_s, outside)
        out: Array = self._at(context, calls) + outside + decided
        return out

    def _at(self, context: Array, calls: Array) -> Array:
        """Return [S] seconds of model calls at `context`, given those at the two contexts measured [2, S]."""
        return at_context(calls[0], calls[1], (self.low.context, self.high.context), context)

    def _first_step(self, backlog: Array) -> Array:
        """Return [2, S] seconds of the first draft step of a round, at the two contexts."""
        costs = self._costs
        out: Array = costs.first + costs.more * (backlog > 1) + np.maximum(backlog - 2, 0) * costs.token
        return out

    def _tree_calls(self, verified: Array, backlog: Array, fed: Array) -> Array:
        """Return [2, S] seconds of the model calls of trees, at the two contexts."""
        rows, sent = int(fed.max(initial=0)), int(verified.max(initial=0))
        draft = np.array([side.tree_draft(rows) for side in (self.low, self.high)])
        verify = np.array([side.tree_verify(sent) for side in (self.low, self.high)])
        first = self._first_step(backlog) * (fed[:, 0] > 0)
        out: Array = first + draft[:, fed[:, 1:]].sum(-1) + verify[:, verified]
        return out

    def _calls(self, drafted: Array, verified: Array, backlog: Array) -> Array:
        """Return [2, S] seconds of the model calls of chains, at the two contexts."""
        costs = self._costs
        drafts = self._first_step(backlog) + costs.second * (drafted > 1) + costs.later * np.maximum(drafted - 2, 0)
        out: Array = drafts * (drafted > 0) + costs.verify[:, verified]
        return out

    @cached_property
    def _padded(self) -> Array:
        return np.array(self.padded(), dtype=np.int64)

    @cached_property
    def _costs(self) -> ChainCosts:
        return ChainCosts(self.low, self.high)

    def chain_costs(self, context: float, decision: float | Price, first: int = 0, depth: int | None = None) -> Array:
        """Return [K + 1] float64, the seconds of a round that drafts k = 0..K tokens at `context`, backlog 1.

        A policy that is asked from depth `first` on decides k - first + 1 times, but not at depth K.
        """
        depth = self.max_depth if depth is None else depth
        k = np.arange(depth + 1)
        asked = np.maximum(np.minimum(k, depth - 1) - first + 1, 0)
        one = np.ones_like(k)
        return self.round_seconds(one * context, k, k, one, asked, decision)

    def prefill_seconds(self, length: Array) -> Array:
        """Return [S] float64 seconds to read prompts of `length` [S] tokens with the target."""
        return self.prefill_s[0] + self.prefill_s[1] * np.asarray(length, dtype=np.float64)

    def save(self, path: Path) -> None:
        """Write the profile as JSON, each series of its measurements on a line of its own."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if self.measurements:
            lines = ",\n".join(f"    {json.dumps(series)}" for series in self.measurements.to_list())
            text = f'{text[:-2]},\n  "measurements": [\n{lines}\n  ]\n}}'
        write_atomic(path, text + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain JSON values, without its measurements, which only its file has."""
        bare = dataclasses.asdict(dataclasses.replace(self, measurements=Measurements()))
        del bare["measurements"], bare["source"]
        plain: dict[str, Any] = json.loads(json.dumps({"schema": PROFILE_SCHEMA, "kind": "profile", **bare}))
        return plain

    def record(self, name: str) -> dict[str, Any]:
        """Return `to_dict` with the timings of one policy's decisions: what that policy keeps of the profile."""
        series = {key: series for key, series in self.measurements.series.items() if key[:2] == (DECISIONS, name)}
        return {**self.to_dict(), **({"measurements": Measurements(series).to_list()} if series else {})}

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a profile; anything else is an `InputError`."""
        raw = read_json(Path(path), "--profile")
        if not isinstance(raw, dict) or raw.get("kind") != "profile" or raw.get("schema") != PROFILE_SCHEMA:
            raise InputError(f"--profile: expected a latency profile of schema {PROFILE_SCHEMA}, but {path} is none")
        return dataclasses.replace(Profile.from_dict(raw, str(path)), source=Path(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str) -> Profile:
        """Build a profile from its JSON form; an entry that is missing, mangled or no time is an `InputError`."""
        try:
            check_values(raw)
            entries = Entries(raw)
            low, high = (read_table(entries.part(side)) for side in ("low", "high"))
            if len(low.verify_s) != len(high.verify_s):
                raise ValueError("verify_s: both contexts need the same lengths")
            if high.context != low.context and high.context < low.context + 1.0:
                raise ValueError("high.context: expected that of low, or at least one token more")
            outside = entries.numbers("tree_outside_s", (3, 3), most=MOST_S) if entries.has("tree_outside_s") else None
            prefill = entries.numbers("prefill_s", (2, 2), most=MOST_S)
            return Profile(
                low,
                high,
                entries.number("step_s", most=MOST_S),
                entries.number("round_s", most=MOST_S),
                (prefill[0], prefill[1]),
                {name: read_price(entries.part("decision_s"), name) for name in entries.part("decision_s").values},
                entries.number("temperature"),
                dict(entries.part("facts").values),
                None if outside is None else (outside[0], outside[1], outside[2]),
                check(Measurements.from_list(raw.get("measurements", []))),
                shaping=dict(entries.part("shaping").values) if entries.has("shaping") else {},
                batch=BatchCosts.read(entries.part("batch")) if entries.has("batch") else None,
                verification=entries.text("verification") if entries.has("verification") else "",
                carry_over=entries.number("carry_over", most=MOST_CARRIED) if entries.has("carry_over") else 0.0,
                plain_outside_s=entries.number("plain_outside_s", most=MOST_S)
                if entries.has("plain_outside_s")
                else None,
            )
        except (KeyError, ValueError) as error:
            raise InputError(f"--profile: {where} lacks or mangles {error}; measure it again") from None


def _numbers(values: Any) -> list[float]:
    """Return the numbers in nested values, in order; None is one of its own."""
    if dataclasses.is_dataclass(values):
        values = dataclasses.astuple(values)  # type: ignore[arg-type]
    if isinstance(values, Mapping):
        values = [values[key] for key in sorted(values)]
    if isinstance(values, list | tuple):
        return [number for value in values for number in _numbers(value)]
    return [-1.0 if values is None else float(values)]
