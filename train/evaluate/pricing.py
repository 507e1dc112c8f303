"""Seconds of replayed rounds in every resample: of the prompts, of the timings behind the profile, or of both.

A profile is an average of timings, and another hour on the same machine gives a different one. Each resample of the prompts
is therefore priced with a profile that is estimated from a bootstrap sample of the timings. Policies stop where they stopped
in the replay, because the same thresholds are deployed. Only the prices of their rounds change.

The price of a decision belongs to the profile, as that of a draft step does. If every report measured it again, every report
would give a different answer. Timings that the profile lacks are therefore read from the policy's folder if it was trained
for this profile, otherwise from the user's cache, under the policy's content, the machine, the versions and the profile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collect.schema import Header, pair_options
from ...decode.benchmark import Ratio
from ...decode.profile import measure_decision, missing_decisions, profile_device
from ...decode.settings import policy_tree
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.files import cache_folder, digest, read_json, write_json
from ...policies.learned import LearnedPolicy
from ...policies.measurements import DECISIONS, Measurements
from ...policies.profile import Profile
from ...policies.routing import RoutingPolicy
from ...policies.storage import policy_digest
from ..replay.rounds import Rounds
from .statistics import LEVEL, REPLICATES, Resamples, Values

TRAINED, TIMED = "as timed when it was trained", "timed once on this machine and kept"
_VERSIONS = ("specstop", "torch", "numpy", "numba")

Unpriced = Mapping[str, tuple[str, str]]
"""By `cost_name`, the policy that a profile does not price (folder or spec), and the source of its price."""


def with_prices(profile: Profile, policies: Sequence[StopPolicy], header: Header) -> tuple[Profile, Unpriced]:
    """Return the profile with the prices of the decisions of `policies`, and those that it lacked.

    Args:
        profile: as measured.
        policies: to be priced; several with the same `cost_name` share the price.
        header: of the traces: sizes of the vocabulary and of hidden states.

    Raises:
        InputError: the profile that a policy was trained for is damaged.
    """
    measured, unpriced = profile, dict[str, tuple[str, str]]()
    for name, policy in missing_decisions(profile, policies).items():
        trained = _training_profile(policy, measured)
        if trained is None:
            profile = profile.with_measured_decisions(_cached_timings(policy, measured, header))
        elif trained.measurements:
            profile = profile.with_measured_decisions(trained.measurements)
        else:
            profile = profile.with_decisions(trained.decision_s)
        unpriced[name] = (str(policy.source or policy.shown_name), TIMED if trained is None else TRAINED)
    return profile, unpriced


def unpriced_warnings(unpriced: Unpriced, profile: Profile, header: Header) -> tuple[str, ...]:
    """Return the warning about the decisions that a profile lacked, with the command that adds them; see `with_prices`."""
    if not unpriced:
        return ()
    engine = str(profile.facts.get("engine", ""))
    outside = f", outside {engine}" if engine.startswith("vllm ") else ""
    costs = {name: f"{1e6 * profile.decision(name):.0f} us each" for name in unpriced}
    prices = ", ".join(f"{name} ({source}{outside}: {costs[name]})" for name, (_, source) in unpriced.items())
    policies = [word for policy, _ in unpriced.values() for word in ("--policy", policy)]
    others = ["--profile", profile.source or "profile.json", *pair_options(header), "--prompts", "PROMPTS"]
    command = shlex.join(map(str, ["specstop", "profile", *policies, *others]))
    return (f"The profile does not price the decisions of {prices}; `{command}` adds them to it",)


def _training_profile(policy: StopPolicy, profile: Profile) -> Profile | None:
    """Return the profile that the policy was trained for, if that is this one with a price of its decisions."""
    if not isinstance(policy, LearnedPolicy | RoutingPolicy) or not profile.same_costs(policy.metadata.profile):
        return None
    saved, name = Profile.from_dict(policy.metadata.profile, "the policy's profile"), policy.cost_name
    return dataclasses.replace(saved, decision_s={name: saved.decision_s[name]}) if name in saved.decision_s else None


def _cached_timings(policy: StopPolicy, profile: Profile, header: Header) -> Measurements:
    """Return timings of a policy's decisions, from the cache or measured now."""
    device = profile_device(profile)
    key = _cache_key(policy, profile, header, device)
    path = cache_folder() / "decisions" / f"{digest(key)[:32]}.json"
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError, AttributeError):  # missing or damaged
        timings = Measurements.from_list(read_json(path, "decisions")["measurements"])
        if any(series.what == DECISIONS for series in timings.series):
            return timings
    tree = policy_tree(policy, "priced_tree") or policy_tree(policy)
    timings = measure_decision(policy, header.vocabulary, profile.temperature, device, header.hidden, profile, tree)
    with contextlib.suppress(OSError):  # the cache cannot be written
        write_json(path, {"key": key, "measurements": timings.to_list()})
    return timings


def _cache_key(policy: StopPolicy, profile: Profile, header: Header, device: torch.device) -> dict[str, Any]:
    """Return everything that a price depends on, as JSON values."""
    costs = {name: value for name, value in profile.to_dict().items() if name != "decision_s"}
    return {
        "policy": policy.cost_name,
        "content": policy_digest(policy),
        "machine": [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), str(device)],
        "versions": [platform.python_version(), *map(version, _VERSIONS)],
        "profile": digest(costs),
        "vocabulary": header.vocabulary,
        "vectors": dict(header.hidden),
    }


DRAWS = 200
"""Bootstrap samples of the profile's timings; each serves several resamples of the prompts."""


class ResampleSource(Enum):
    """What is resampled: everything, or one source of error while the other keeps its measured values."""

    ALL = "all"
    PROMPTS = "prompts"
    PROFILE = "profile"


class ProfileBootstrap:
    """A profile, and profiles from bootstrap samples of its timings.

    Args:
        profile: as measured.
        seed: of the samples.
        count: of them.

    Attributes:
        profiles: one per sample; empty if the profile kept no timings.
    """

    def __init__(self, profile: Profile, seed: int = 0, count: int = DRAWS) -> None:
        self.profile = profile
        # The random numbers are independent of those of the prompts' resamples. Each sample has its own generator: the model
        # calls of sample i are the same in all reports of a profile, however often the decisions of policies were timed.
        generators = (np.random.default_rng([seed, 1, number]) for number in range(count))
        self.profiles = tuple(map(profile.resampled, generators)) if profile.measurements else ()

    @property
    def is_timed(self) -> bool:
        """Whether samples differ in the costs of model calls: not if at most one repetition of their timings was kept."""
        first = self.profiles[:1]
        return any((one.low, one.high) != (first[0].low, first[0].high) for one in self.profiles)

    def describe(self, unit: str = "prompts") -> str:
        """Return the sources of error that intervals include; `unit` is what they resample, "prompts" or "groups"."""
        over, missing = f"{unit} and the profile's timings", ""
        if not self.is_timed:
            over = f"{unit} and timings of decisions" if self.profiles else unit
            missing = "; the profile kept no repeated timings of model calls, so that their error is not included"
        return f"{LEVEL:.0%} bootstrap over {over}, {REPLICATES} replicates{missing}"

    def interval(self, values: Values) -> Ratio:
        """Return the measured value and its percentile interval, of a statistic [1 + D] under every sample."""
        if not self.profiles:
            return Ratio(float(values[0]))
        low, high = np.quantile(values[1:], [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
        return Ratio(float(values[0]), float(low), float(high))


class PricedReplays:
    """Seconds of P replays of S texts in every resample.

    Args:
        boot: resamples of the texts.
        costs: the profile and its bootstrap samples.
        replays: the rounds of each replay.
        spent: [S, P] seconds under the measured profile, if they are already known.
    """

    def __init__(
        self, boot: Resamples, costs: ProfileBootstrap, replays: Sequence[Rounds], spent: Tensor | None = None
    ) -> None:
        self._boot, self._costs, self._replays, self._spent = boot, costs, list(replays), spent

    def by_text(self) -> Values:
        """Return [S, P] seconds of each text under the measured profile."""
        return self._texts(self._costs.profile) if self._spent is None else self._spent.double().numpy()

    def _texts(self, profile: Profile) -> Values:
        out: Values = torch.stack([rounds.text_seconds(profile) for rounds in self._replays], 1).numpy()
        return out

    @cached_property
    def _by_cluster(self) -> list[Values]:
        """[C, P] seconds of each cluster under the measured profile, then under each sample."""
        return [self._boot.by_cluster(self._texts(one)) for one in (self._costs.profile, *self._costs.profiles)]

    def factors(self, source: ResampleSource = ResampleSource.ALL) -> Values:
        """Return seconds under samples of the profile, relative to those under the measured profile.

        Returns:
            [1 + R, P], a sample for each resample; [1 + D, P] if only the profile is resampled. Row 0 is 1.
        """
        profiles, is_profile_only = self._costs.profiles, source is ResampleSource.PROFILE
        rows = 1 + (len(profiles) if is_profile_only else self._boot.replicates)
        out = np.ones((rows, len(self._replays)))
        if not profiles or source is ResampleSource.PROMPTS:
            return out
        measured, *sampled = self._by_cluster
        for at, seconds in enumerate(sampled, 1):
            # Sample `at` prices the resamples at, at + D, ...; row 0 keeps the measured profile.
            use = slice(1) if is_profile_only else slice(at, None, len(profiles))
            weights = self._boot.weights[use]
            out[slice(at, at + 1) if is_profile_only else use] = (weights @ seconds) / (weights @ measured)
        return out

    def seconds(self, source: ResampleSource = ResampleSource.ALL) -> Values:
        """Return [1 + R, P] seconds in the sample and in every resample; shapes as of `factors`."""
        spent = self._boot.total(self.by_text())
        return (spent[:1] if source is ResampleSource.PROFILE else spent) * self.factors(source)
