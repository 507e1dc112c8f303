"""The latency profile: costs of rounds, the measurements that they were estimated from, and the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .costs import MAX_STREAMS, BatchCosts, BatchTable, Costs, CostTable
from .entries import Entries
from .errors import InputError
from .estimate import check_measurements, decision_prices, estimate
from .files import write_atomic
from .limits import LIMITS
from .measurements import DECISIONS, VERIFY, Measurements, Noise, Timings, judge
from .safe_loading import check_values, digest, read_json

PROFILE_SCHEMA = 1
MARK = b'"kind": "profile"'
"""Stands near the beginning of every profile."""

MODEL_COSTS = tuple(field.name for field in dataclasses.fields(Costs) if field.name != "decision_s")

SAME = 1e-6
"""Relative difference of costs that another build of the same linear algebra may make."""

MAX_DEPTH, MAX_CONTEXT, MAX_POINTS = 1024, 1e9, 4096
MIN_CALL_S, MAX_S = 1e-9, 1e6
"""Limits of what is read from a file: a model call takes time, and nothing takes eleven days."""


@dataclass(frozen=True)
class Profile(Costs):
    """Costs with what they were measured from and under.

    Attributes:
        temperature: of the sampling.
        facts: device, dtype, threads, versions, noise: for readers.
        measurements: what the costs were estimated from; empty for costs that were not measured.
        source: the file it was read from, if any.
        shaping: what else changed the distribution that was sampled from (`decode.SamplingParams.facts`).
        verification: the mode whose rounds of chains were timed; "" = unknown.
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
        shaping: Mapping[str, Any] | None = None,
        verification: str = "",
    ) -> Profile:
        """Return the profile that measurements tell: the same one for the same measurements.

        Args:
            measurements: see `estimate`.
            contexts: mean tokens in the cache at the short and the long context.
            depth: K, the longest chain timed.
            temperature: of the sampling.
            facts, shaping, verification: kept in the profile.

        Raises:
            InputError: no round was timed.
        """
        costs = vars(estimate(measurements.pooled, contexts, depth))
        return Profile(
            **costs, temperature=temperature, facts=facts or {}, measurements=measurements, shaping=shaping or {},
            verification=verification,
        )  # fmt: skip

    def with_decisions(self, seconds: Mapping[str, float]) -> Profile:
        """Return this profile with prices of more policies' decisions; timings of theirs are dropped."""
        kept = self.measurements.where(lambda key: key.what != DECISIONS or key.of not in seconds)
        return dataclasses.replace(self, decision_s={**self.decision_s, **seconds}, measurements=kept)

    def with_measured_decisions(self, more: Measurements) -> Profile:
        """Return this profile with the decisions of more policies, priced by their timings, which are kept."""
        timed = more.where(lambda key: key.what == DECISIONS)
        priced = self.with_decisions(decision_prices(timed.pooled))
        return dataclasses.replace(priced, measurements=priced.measurements.with_series(timed))

    @property
    def _of_models(self) -> Measurements:
        # Decisions may have been timed at another time, or on another machine.
        return self.measurements.where(lambda key: key.what != DECISIONS)

    @cached_property
    def noise(self) -> Noise | None:
        """How noisy the machine was; None for costs that were not measured."""
        return judge(self._of_models) if self._is_measured else None

    @cached_property
    def _is_measured(self) -> bool:
        """Whether the costs, decisions aside, are those that the measurements tell, and not edited or scaled since."""
        if not any(key.what == VERIFY for key in self.measurements.series):
            return False
        estimated = self._with_costs(self.measurements.pooled)
        mine, theirs = (_numbers([getattr(p, name) for name in MODEL_COSTS]) for p in (self, estimated))
        return len(mine) == len(theirs) and bool(np.allclose(mine, theirs, rtol=SAME, atol=0.0))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all costs but decisions and of the timings behind them: equal for copies of one measurement."""
        plain = self.to_dict()
        costs = {name: plain[name] for name in MODEL_COSTS}
        return digest({"costs": costs, "measurements": self._of_models.to_list()})

    def _with_costs(self, timings: Timings) -> Profile:
        """Return this profile with the costs, decisions aside, that timings tell, at the same contexts."""
        costs = estimate(timings, (self.low.context, self.high.context), self.max_depth)
        return dataclasses.replace(self, **{**vars(costs), "decision_s": self.decision_s})

    def resampled(self, rng: np.random.Generator) -> Profile:
        """Return a bootstrap draw: the costs that a draw of the measurements tells, estimated as these were.

        Whole repetitions are drawn, for all costs at once: a slow phase affects all that was timed in it. Costs that were not
        measured, or edited or scaled since, stay as they are; a draw has no measurements.
        """
        if not self.measurements:
            return self
        drawn = self.measurements.resampled(rng, self.noise.lasting if self.noise else 1)
        costs = self._with_costs(drawn) if self._is_measured else self
        decision_s = {**self.decision_s, **decision_prices(drawn)}
        return dataclasses.replace(costs, decision_s=decision_s, measurements=Measurements())

    def same_costs(self, record: Mapping[str, Any]) -> bool:
        """Whether a profile's JSON form has the same costs, decisions aside."""
        try:
            theirs = Profile.from_dict({**record, "decision_s": {}, "measurements": []}, "a record")
        except InputError:
            return False
        return all(getattr(theirs, name) == getattr(self, name) for name in MODEL_COSTS)

    def save(self, path: Path) -> None:
        """Write the profile as JSON, each series of its measurements on a line of its own."""
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        if self.measurements:
            lines = ",\n".join(f"    {json.dumps(series)}" for series in self.measurements.to_list())
            text = f'{text[:-2]},\n  "measurements": [\n{lines}\n  ]\n}}'  # in place of the closing brace
        write_atomic(path, text + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain JSON values, without its measurements, which only its file has."""
        bare = dataclasses.asdict(dataclasses.replace(self, measurements=Measurements()))  # it would copy every timing
        del bare["measurements"], bare["source"]
        # As a file has it: lists for tuples, and strings for keys that are numbers.
        plain: dict[str, Any] = json.loads(json.dumps({"schema": PROFILE_SCHEMA, "kind": "profile", **bare}))
        return plain

    def record(self, name: str) -> dict[str, Any]:
        """Return `to_dict` with the timings of one policy's decisions: what that policy keeps of the profile."""
        timed = self.measurements.where(lambda key: key[:2] == (DECISIONS, name))
        return {**self.to_dict(), **({"measurements": timed.to_list()} if timed else {})}

    @staticmethod
    def load(path: str | Path, option: str = "--profile") -> Profile:
        """Read a profile; raises an `InputError` that names the option for anything else."""
        raw = read_json(Path(path), option)
        if not isinstance(raw, dict) or raw.get("kind") != "profile" or raw.get("schema") != PROFILE_SCHEMA:
            raise InputError(f"{option}: expected a latency profile of schema {PROFILE_SCHEMA}, but {path} is none")
        return dataclasses.replace(Profile.from_dict(raw, str(path)), source=Path(path))

    @staticmethod
    def from_dict(raw: Mapping[str, Any], where: str) -> Profile:
        """Return the profile of its JSON form; raises `InputError` if an entry is missing or no time."""
        try:
            check_values(raw)
            entries = Entries(raw)
            low, high = _both_contexts(entries, _read_table)
            if len(low.verify_s) != len(high.verify_s):
                raise ValueError("verify_s: both contexts need the same lengths")
            prices = entries.part("decision_s")
            prefill = entries.numbers("prefill_s", (2, 2), most=MAX_S)
            tree = entries.numbers("tree_outside_s", (3, 3), most=MAX_S) if entries.has("tree_outside_s") else None
            return Profile(
                low,
                high,
                entries.number("step_s", most=MAX_S),
                entries.number("round_s", most=MAX_S),
                (prefill[0], prefill[1]),
                {name: prices.number(name, MAX_S) for name in prices.values},
                tree_outside_s=None if tree is None else (tree[0], tree[1], tree[2]),
                batch=_read_batch(entries.part("batch")) if entries.has("batch") else None,
                plain_outside_s=entries.number_or("plain_outside_s", None, MAX_S),
                temperature=entries.number("temperature", most=LIMITS["temperature"].high),
                facts=dict(entries.part("facts").values),
                measurements=check_measurements(Measurements.from_list(raw.get("measurements", []))),
                shaping=dict(entries.part("shaping").values) if entries.has("shaping") else {},
                verification=entries.text("verification") if entries.has("verification") else "",
            )
        except (KeyError, ValueError) as error:
            raise InputError(f"--profile: {where} lacks or mangles {error}; measure it again") from None


def _both_contexts(raw: Entries, read: Any) -> Any:
    """Return what `read` makes of the entries `low` and `high`, whose contexts are equal or at least a token apart."""
    low, high = (read(raw.part(side)) for side in ("low", "high"))
    if high.context != low.context and high.context < low.context + 1.0:
        raise ValueError(f"{raw.part('high').named('context')}: expected that of low, or at least one token more")
    return low, high


def _read_table(raw: Entries) -> CostTable:
    one, two = raw.numbers("draft_s", (2, 2), most=MAX_S)
    return CostTable(
        raw.number("context", most=MAX_CONTEXT),
        (one, two),
        raw.number("draft_token_s", most=MAX_S),
        raw.numbers("verify_s", (1, MAX_DEPTH + 1), MIN_CALL_S, MAX_S),
        raw.number_or("later_draft_s", None, MAX_S),
        raw.points("tree_verify_s", (0, MAX_POINTS), 0, MIN_CALL_S, MAX_S) if raw.has("tree_verify_s") else (),
    )


def _read_batch(raw: Entries) -> BatchCosts:
    low, high = _both_contexts(raw, _read_batch_table)
    counts = [{size: [n for n, _ in points] for size, points in side.verify_s.items()} for side in (low, high)]
    if counts[0] != counts[1]:
        raise ValueError(f"{raw.named('high')}.verify_s: both contexts need the same sizes")
    return BatchCosts(low, high)


def _read_batch_table(raw: Entries) -> BatchTable:
    verify, sizes = raw.part("verify_s"), {}
    for key in verify.values:
        # `int` is slow for very long texts, and "04" would replace "4".
        size = int(key) if isinstance(key, str) and len(key) < 9 and key.isascii() and key.isdecimal() else 0
        if not 1 <= size <= MAX_STREAMS or key != str(size):
            raise ValueError(f"{verify.place}: expected batch sizes between 1 and {MAX_STREAMS}, not {key[:40]!r}")
        sizes[size] = verify.points(key, (1, MAX_POINTS), size, MIN_CALL_S, MAX_S)
    if not sizes:
        raise ValueError(f"{verify.place}: expected at least one batch size")
    drafts = raw.points("draft_s", (1, MAX_STREAMS), 1, 0.0, MAX_S)
    return BatchTable(raw.number("context", most=MAX_CONTEXT), drafts, dict(sorted(sizes.items())))


def _numbers(values: Any) -> list[float]:
    """Return the numbers in nested values, in order; None as -1, which is no cost."""
    if dataclasses.is_dataclass(values):
        values = dataclasses.astuple(values)  # type: ignore[arg-type]
    if isinstance(values, Mapping):
        values = [values[key] for key in sorted(values)]
    if isinstance(values, list | tuple):
        return [number for value in values for number in _numbers(value)]
    return [-1.0 if values is None else float(values)]
