"""The latency profile: what rounds cost, what that was measured from, and its file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..calibration import decisions
from ..costs import BatchCosts, Costs, CostTable as CostTable
from ..entries import Entries
from ..errors import InputError
from ..files import write_atomic
from ..limits import LIMITS
from ..measurements import DECISIONS, VERIFY, Measurements, Noise, Timings
from ..safe_loading import check_values, digest
from ..text import read_json
from .estimate import check, estimate
from .noise import judge
from .tables import MOST_S, Price, read_price, read_table

Array = np.ndarray[Any, Any]

PROFILE_SCHEMA = 1
MARK = b'"kind": "profile"'
"""Stands near the beginning of every profile."""

COSTS = tuple(field.name for field in dataclasses.fields(Costs) if field.name != "decision_s")
"""What a profile has beside decisions."""

MOST_CARRIED = 0.5
"""The largest `carry_over` that is believed."""

SAME = 1e-6
"""Relative difference of costs that another build of the same linear algebra may make."""


@dataclass(frozen=True)
class Profile(Costs):
    """Costs with what they were measured from and under.

    Attributes:
        temperature: of the sampling it was measured under.
        facts: device, dtype, threads, versions, spread: what a reader wants to know.
        measurements: what the costs were estimated from; none of costs that nobody measured. A price of decisions is
            estimated from those that are kept under its name, all other costs from the rest.
        source: the file it was read from; None = none.
        shaping: what else changed the distribution that was sampled from (`decode.SamplingParams.to_dict`).
        verification: the mode whose rounds of chains were timed; "" = not told.
    """

    temperature: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    source: Path | None = field(default=None, repr=False, compare=False)
    shaping: Mapping[str, Any] = field(default_factory=dict)
    verification: str = ""

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
        told = {**vars(estimate(timings, contexts, depth)), "decision_s": decisions(timings)}
        return Profile(**told, temperature=temperature, facts=facts or {}, measurements=measurements)

    def with_decisions(self, seconds: Mapping[str, float | Price]) -> Profile:
        """Return this profile with the decisions of more policies; those measured before are no longer theirs."""
        kept = self.measurements
        for name in seconds:
            kept = kept.without(DECISIONS, name)
        return dataclasses.replace(self, decision_s={**self.decision_s, **seconds}, measurements=kept)

    def with_measured_decisions(self, more: Measurements) -> Profile:
        """Return this profile with the decisions of more policies, priced by their timings, which are kept."""
        made = self.with_decisions(decisions(more.pooled()))
        return dataclasses.replace(made, measurements=made.measurements.with_series(more.only(DECISIONS)))

    @cached_property
    def noise(self) -> Noise | None:
        """How noisy the machine was; None of costs that were not measured, or before measurements were kept."""
        # Decisions may have been timed at another time, or on another machine.
        return judge(self.measurements.leaving(DECISIONS)) if self._is_measured else None

    @cached_property
    def _is_measured(self) -> bool:
        """Whether the costs of chains and trees are those that the measurements tell, and not edited or scaled since."""
        if not any(key.what == VERIFY for key in self.measurements.series):
            return False
        told = self._with_costs(self.measurements.pooled())
        mine, theirs = (_numbers([getattr(p, name) for name in COSTS]) for p in (self, told))
        return len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=SAME, atol=0.0))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all costs but decisions and of the timings behind them: equal for copies of one measurement."""
        plain, timings = self.to_dict(), self.measurements.leaving(DECISIONS)
        return digest({"costs": {name: plain[name] for name in COSTS}, "measurements": timings.to_list()})

    def _with_costs(self, timings: Timings) -> Profile:
        """Return this profile with the costs of chains, trees and batches that timings tell, at the same contexts."""
        told = vars(estimate(timings, (self.low.context, self.high.context), self.max_depth))
        return dataclasses.replace(self, **{**told, "decision_s": self.decision_s, "carry_over": self.carry_over})

    def resampled(self, rng: np.random.Generator) -> Profile:
        """Return a bootstrap draw: the costs that a draw of the measurements tells, estimated as these were.

        Whole repetitions are drawn, for all costs at once: a slow phase hits all that was timed in it. What was not measured,
        or edited or scaled since, stays as it is; so does the draw itself when it is drawn from.
        """
        if not self.measurements:
            return self
        drawn = self.measurements.resampled(rng, self.noise.lasting if self.noise else 1)
        made = self._with_costs(drawn) if self._is_measured else self
        return dataclasses.replace(
            made, decision_s={**self.decision_s, **decisions(drawn)}, measurements=Measurements()
        )

    def same_costs(self, record: Mapping[str, Any]) -> bool:
        """Whether a profile's JSON form has the same costs of everything but decisions."""
        try:  # read first: a record of an earlier version may lack what came later
            theirs = Profile.from_dict({**record, "decision_s": {}, "measurements": []}, "a record")
        except InputError:
            return False
        return all(getattr(theirs, key) == getattr(self, key) for key in COSTS)

    def save(self, path: Path) -> None:
        """Write the profile as JSON, each series of its measurements on a line of its own."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if self.measurements:
            # The closing brace of the indented text makes room for one more entry.
            lines = ",\n".join(f"    {json.dumps(series)}" for series in self.measurements.to_list())
            text = f'{text[:-2]},\n  "measurements": [\n{lines}\n  ]\n}}'
        write_atomic(path, text + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain JSON values, without its measurements, which only its file has."""
        # Emptied first: `asdict` would copy every timing.
        bare = dataclasses.asdict(dataclasses.replace(self, measurements=Measurements()))
        del bare["measurements"], bare["source"]
        # As a file has it: lists for tuples, and texts for keys that are numbers.
        plain: dict[str, Any] = json.loads(json.dumps({"schema": PROFILE_SCHEMA, "kind": "profile", **bare}))
        return plain

    def record(self, name: str) -> dict[str, Any]:
        """Return `to_dict` with the timings of one policy's decisions: what that policy keeps of the profile."""
        series = {key: series for key, series in self.measurements.series.items() if key[:2] == (DECISIONS, name)}
        return {**self.to_dict(), **({"measurements": Measurements(series).to_list()} if series else {})}

    @staticmethod
    def load(path: str | Path, option: str = "--profile") -> Profile:
        """Read a profile; anything else is an `InputError`, which names the option."""
        raw = read_json(Path(path), option)
        if not isinstance(raw, dict) or raw.get("kind") != "profile" or raw.get("schema") != PROFILE_SCHEMA:
            raise InputError(f"{option}: expected a latency profile of schema {PROFILE_SCHEMA}, but {path} is none")
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
            # `at_context` divides by the span.
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
                entries.number("temperature", most=LIMITS["temperature"].most),
                dict(entries.part("facts").values),
                check(Measurements.from_list(raw.get("measurements", []))),
                tree_outside_s=None if outside is None else (outside[0], outside[1], outside[2]),
                shaping=dict(entries.part("shaping").values) if entries.has("shaping") else {},
                batch=BatchCosts.read(entries.part("batch")) if entries.has("batch") else None,
                verification=entries.text("verification") if entries.has("verification") else "",
                carry_over=entries.number_or("carry_over", 0.0, MOST_CARRIED),
                plain_outside_s=entries.number_or("plain_outside_s", None, MOST_S),
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
    return [-1.0 if values is None else float(values)]  # no cost is below 0
