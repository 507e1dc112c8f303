"""The latency profile: costs of rounds, the measurements from which they were estimated, and the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .arguments import LIMITS
from .contract import Array, StopPolicy
from .costs import Costs, extrapolate, interpolate
from .errors import InputError
from .files import check_values, digest, read_json, write_atomic
from .measurements import (
    DECISIONS,
    VERIFY,
    Measurements,
    Noise,
    Timings,
    check_measurements,
    decision_prices,
    estimate,
    measure_noise,
)

PROFILE_SCHEMA = 1
MARK = b'"kind": "profile"'
"""Text near the beginning of every profile file."""

MODEL_COSTS = tuple(field.name for field in dataclasses.fields(Costs) if field.name != "decision_s")

TOLERANCE = 1e-6
"""Relative difference of costs that another build of the same linear algebra may make."""

MAX_NAME = 200
"""Characters of the name of a verification mode."""


@dataclass(frozen=True)
class Profile(Costs):
    """Costs, their measurements, and the conditions of these.

    Attributes:
        temperature: of the sampling.
        facts: device, dtype, threads, versions and noise, for display only.
        measurements: what the costs were estimated from; empty for costs that were not measured.
        source: the file it was read from, if any.
        sampling: other options that changed the distribution that was sampled from (`decode.SamplingParams.facts`).
        verification: the mode in which rounds of chains were timed; "" = unknown.
        others: profiles of further drafters of the same target, in the order of the drafters. Verifications are those
            of the first, and if a policy routes also what a round costs outside the models.
    """

    temperature: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    source: Path | None = field(default=None, repr=False, compare=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    verification: str = ""
    others: tuple[Profile, ...] = ()

    @property
    def each_drafter(self) -> list[Profile]:
        """The costs of each drafter, as if it were the only one. Decisions are timed with all drafters, once."""
        costs = (self, *self.others)
        return [dataclasses.replace(one, others=(), decision_s=self.decision_s) for one in costs]

    def of_policy(self, policy: StopPolicy, drafters: Sequence[str]) -> Profile:
        """Return the costs of a policy's rounds: all of them if it routes, otherwise those of its drafter.

        Args:
            policy: see `StopPolicy.drafter`.
            drafters: names of the drafters.

        Raises:
            InputError: the profile was measured with fewer drafters.
        """
        if len(drafters) == 1:
            return self
        profiles = self.each_drafter
        index = drafters.index(policy.drafter) if policy.drafter else 0
        if index >= len(profiles) or (policy.routes and len(profiles) != len(drafters)):
            raise InputError(
                f"--profile: expected the costs of the drafters {', '.join(drafters)} for {policy.name}, got those of "
                f"{len(profiles)}; measure it with the same --drafter options"
            )
        return self if policy.routes else profiles[index]

    def round_seconds(
        self, context: Array, drafted: Array, verified: Array, backlog: Array, decisions: Array, decision: float,
        fed: Array | None = None,
    ) -> Array:  # fmt: skip
        """Return the seconds of rounds, see `Costs.round_seconds`; `backlog` [S, D] and `fed` [S, D, K] of D drafters."""
        if fed is None or fed.ndim == 2:
            return super().round_seconds(context, drafted, verified, backlog, decisions, decision, fed)
        profiles = (self, *self.others)[: fed.shape[1]]
        contexts = [(one.low.context, one.high.context) for one in profiles]
        seconds = self.round_s + decision * decisions
        for index, (one, xs) in enumerate(zip(profiles, contexts, strict=True)):
            steps = fed[:, index]
            calls = np.stack([table.draft_calls_s(backlog[:, index], steps) for table in (one.low, one.high)])
            seconds = seconds + interpolate(context, xs, calls) * (steps[:, 0] > 0) + one.step_s * (steps > 0).sum(1)
        # The tokens of one drafter's chain are verified as a chain.
        is_path = ((fed > 0).any(2).sum(1) <= 1) & (fed <= 1).all((1, 2))
        most = int(verified.max(initial=0))
        calls = np.stack([np.where(is_path, extrapolate(table.verify_s, max(most, self.max_depth) + 1)[verified],
                                   table.tree_verify(most)[verified]) for table in (self.low, self.high)])  # fmt: skip
        out: Array = seconds + interpolate(context, contexts[0], calls)
        return out

    @staticmethod
    def measured(
        measurements: Measurements,
        contexts: tuple[float, float],
        depth: int,
        temperature: float = 0.0,
        facts: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        verification: str = "",
    ) -> Profile:
        """Return the profile that is estimated from measurements; it depends on nothing else.

        Args:
            measurements: see `estimate`.
            contexts: mean tokens in the cache at the short and the long context.
            depth: K, the longest chain timed.
            temperature: of the sampling.
            facts, sampling, verification: see `Profile`.

        Raises:
            InputError: no round was timed.
        """
        costs = vars(estimate(measurements.pooled, contexts, depth))
        return Profile(
            **costs, temperature=temperature, facts=facts or {}, measurements=check_measurements(measurements),
            sampling=sampling or {}, verification=verification,
        )  # fmt: skip

    def with_decisions(self, seconds: Mapping[str, float]) -> Profile:
        """Return this profile with the seconds of decisions of further policies, whose timings are dropped."""
        kept = self.measurements.where(lambda key: key.what != DECISIONS or key.of not in seconds)
        return dataclasses.replace(self, decision_s={**self.decision_s, **seconds}, measurements=kept)

    def with_measured_decisions(self, more: Measurements) -> Profile:
        """Return this profile with the timings of decisions of further policies, and the seconds estimated from them."""
        timed = more.where(lambda key: key.what == DECISIONS)
        priced = self.with_decisions(decision_prices(timed.pooled))
        return dataclasses.replace(priced, measurements=Measurements({**priced.measurements.series, **timed.series}))

    @property
    def _of_models(self) -> Measurements:
        # Decisions may have been timed at another time, or on another machine.
        return self.measurements.where(lambda key: key.what != DECISIONS)

    @cached_property
    def noise(self) -> Noise | None:
        """How noisy the machine was; None for costs that were not measured."""
        return measure_noise(self._of_models) if self._is_measured else None

    @cached_property
    def _is_measured(self) -> bool:
        """Whether the costs, decisions aside, are those of the measurements, and not edited or scaled since."""
        if not any(key.what == VERIFY for key in self.measurements.series):
            return False
        estimated = self._with(self.measurements.pooled)
        costs, expected = (list(_numbers(profile._model_costs)) for profile in (self, estimated))
        return len(costs) == len(expected) and np.allclose(costs, expected, rtol=TOLERANCE, atol=0.0)

    @property
    def _model_costs(self) -> dict[str, Any]:
        """All costs but those of decisions, as JSON values."""
        plain = self.to_dict()
        return {name: plain[name] for name in MODEL_COSTS}

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all costs but decisions and of the timings behind them: equal for copies of one measurement."""
        own: dict[str, Any] = {"costs": self._model_costs, "measurements": self._of_models.to_list()}
        return digest({**own, "others": [one.fingerprint for one in self.others]} if self.others else own)

    def _with(self, timings: Timings) -> Profile:
        """Return this profile with the costs, decisions aside, that are estimated from timings at the same contexts."""
        costs = estimate(timings, (self.low.context, self.high.context), self.max_depth)
        return dataclasses.replace(self, **{**vars(costs), "decision_s": self.decision_s})

    def resampled(self, rng: np.random.Generator) -> Profile:
        """Return a bootstrap draw: the costs that a draw of the measurements gives, estimated as these were.

        Whole repetitions are drawn, for all costs at once: a slow phase affects all that was timed in it. Costs that were not
        measured, or edited or scaled since, stay as they are; a draw has no measurements.
        """
        if self.others:
            others = tuple(one.resampled(rng) for one in self.others)
            return dataclasses.replace(dataclasses.replace(self, others=()).resampled(rng), others=others)
        if not self.measurements:
            return self
        drawn = self.measurements.resampled(rng, self.noise.block if self.noise else 1)
        costs = self._with(drawn) if self._is_measured else self
        decision_s = {**self.decision_s, **decision_prices(drawn)}
        return dataclasses.replace(costs, decision_s=decision_s, measurements=Measurements())

    def same_costs(self, record: Mapping[str, Any]) -> bool:
        """Whether a profile's JSON form has the same costs, decisions aside."""
        try:
            other = Profile.from_dict({**record, "decision_s": {}, "measurements": []}, "a record")
        except InputError:
            return False
        others = record.get("others", [])
        return (
            len(others) == len(self.others)
            and all(getattr(other, name) == getattr(self, name) for name in MODEL_COSTS)
            and all(one.same_costs(plain) for one, plain in zip(self.others, others, strict=True))
        )

    def describe(self) -> dict[str, Any]:
        """Return facts for display: noise of the machine, costs of each context and batch size, and costs of decisions."""
        no_noise = "unknown noise: the profile has no timings, or its costs were edited"
        values: dict[str, Any] = {"kind": "profile", "verdict": self.noise.text if self.noise else no_noise}
        for side, costs in (("short", self.low), ("long", self.high)):
            where = f"{side} context ({costs.context:.0f})"
            values[f"{where}: draft step, ms"] = f"{costs.draft_s[0] * 1e3:.2f}"
            values[f"{where}: verification of 0, 1, ... tokens, ms"] = " ".join(
                f"{s * 1e3:.2f}" for s in costs.verify_s
            )
        if batch := self.batch:
            context = 0.5 * (batch.low.context + batch.high.context)
            for size in batch.sizes:
                tokens = batch.low.verify_s[size][-1][0]
                alone, full = (self.verify_s(size, sent, context) * 1e3 for sent in (size, tokens))
                draft = self.draft_s(size, context) * 1e3
                values[f"batch of {size}, ms"] = (
                    f"plain {alone:.2f}, draft step {draft:.2f}, verification of {tokens} tokens {full:.2f}"
                )
        return {
            **values,
            "framework overhead, ms a round": self.round_s * 1e3,
            "framework overhead, ms a drafted token": self.step_s * 1e3,
            **{
                f"{one.facts.get('drafter', number)}: draft step, overhead a drafted token, ms": (
                    f"{one.low.draft_s[0] * 1e3:.2f} to {one.high.draft_s[0] * 1e3:.2f}, {one.step_s * 1e3:.2f}"
                )
                for number, one in enumerate(self.others, 2)
            },
            **{f"decision of {name}, us": self.decision(name) * 1e6 for name in self.decision_s},
            **self.facts,
        }

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON, one line for each series of measurements."""
        plain = self.to_dict()
        if self.others:
            timed = [{**one.to_dict(), "measurements": one.measurements.to_list()} for one in self.others]
            plain["others"] = timed
        text = json.dumps(plain, indent=2, allow_nan=False)
        if self.measurements:
            lines = ",\n".join(f"    {json.dumps(series)}" for series in self.measurements.to_list())
            text = f'{text[:-2]},\n  "measurements": [\n{lines}\n  ]\n}}'  # instead of the closing brace
        write_atomic(Path(path), text + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Return the profile as plain JSON values, without its measurements, which only its file has."""
        # Without measurements, as `asdict` would copy every timing.
        bare = dataclasses.asdict(dataclasses.replace(self, measurements=Measurements(), others=()))
        del bare["measurements"], bare["source"], bare["others"]
        if self.others:
            bare["others"] = [one.to_dict() for one in self.others]
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
        """Return the profile of its JSON form; raises `InputError` if an entry is missing or out of range."""
        from pydantic import ValidationError  # takes 0.1 s to import

        names = {field.name for field in dataclasses.fields(Profile)} - {"measurements", "source", "others"}
        try:
            check_values(raw)
            # From text, because strict validation of Python objects would not convert lists to tuples.
            text = json.dumps({name: value for name, value in raw.items() if name in names})
            profile: Profile = _validator().validate_json(text, strict=True)
            if not 0.0 <= profile.temperature <= LIMITS["temperature"].high or len(profile.verification) > MAX_NAME:
                raise ValueError("temperature or verification: out of range")
            measurements = check_measurements(Measurements.from_list(raw.get("measurements", [])))
            others = tuple(Profile.from_dict(one, where) for one in raw.get("others", []))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            reason = f"{place}: {first['msg']}".replace("Value error, ", "").removeprefix(": ")
        except (ValueError, RecursionError) as error:
            reason = str(error)
        else:
            return dataclasses.replace(profile, measurements=measurements, others=others)
        raise InputError(f"--profile: {where} has a missing or invalid entry: {reason}; measure it again")


def load_profile(profile: Profile | str | Path) -> Profile:
    """Return a profile, or read the file of `measure_profile` or `specstop profile` at a path; see `Profile.load`."""
    return profile if isinstance(profile, Profile) else Profile.load(profile)


@cache
def _validator() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Profile)


def _numbers(values: Any) -> Iterator[float]:
    """Yield the numbers in nested JSON values; None as -1, which is no cost."""
    if isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _numbers(value)
    else:
        yield -1.0 if values is None else float(values)
