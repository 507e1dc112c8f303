"""Prices of decisions that the profile does not have: timed once, cached, and used again.

The price of a decision belongs to the profile, like that of a draft step. If each report timed it again, each report would
give a different answer. Timings are therefore read from the policy's folder if it was trained for this profile, otherwise
from the user's cache, under the policy's content, the machine, the versions and the profile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from ...collect.pair_options import pair_options
from ...collect.schema import Header
from ...decode.profile import device_of, measure_decision, missing_decisions
from ...decode.settings import tree_of
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.files import cache_folder, digest, read_json, write_json
from ...policies.learned import LearnedPolicy
from ...policies.measurements import DECISIONS, Measurements
from ...policies.profile import Profile
from ...policies.storage import content

TRAINED, TIMED = "as timed when it was trained", "timed once on this machine and kept"
_VERSIONS = ("specstop", "torch", "numpy", "numba")


@dataclass(frozen=True)
class UnpricedPolicy:
    """A policy whose decisions a profile does not price.

    Attributes:
        policy: several policies with the same `cost_name` share the price.
        source: `TRAINED` or `TIMED`.
        price: seconds per decision.
    """

    policy: StopPolicy
    source: str
    price: float


def with_prices(
    profile: Profile, policies: Sequence[StopPolicy], header: Header
) -> tuple[Profile, tuple[UnpricedPolicy, ...]]:
    """Return the profile with the prices of the decisions of `policies`, and the policies that it lacked.

    Args:
        profile: as measured.
        policies: to be priced.
        header: of the traces: sizes of the vocabulary and of hidden states.

    Raises:
        InputError: the profile that a policy was trained for is damaged.
    """
    measured, unpriced = profile, []
    for name, policy in missing_decisions(profile, policies).items():
        trained = _training_profile(policy, measured)
        if trained is None:
            profile = profile.with_measured_decisions(_cached_timings(policy, measured, header))
        elif trained.measurements:
            profile = profile.with_measured_decisions(trained.measurements)
        else:
            profile = profile.with_decisions(trained.decision_s)
        unpriced.append(UnpricedPolicy(policy, TIMED if trained is None else TRAINED, profile.decision(name)))
    return profile, tuple(unpriced)


def unpriced_finding(unpriced: Sequence[UnpricedPolicy], profile: Profile, header: Header) -> tuple[str, ...]:
    """Return the warning about missing prices, with the command that adds them; empty if none is missing.

    Args:
        unpriced: see `with_prices`.
        profile: that lacks them.
        header: of the traces, which names the pair.
    """
    if not unpriced:
        return ()
    engine = str(profile.facts.get("engine", ""))
    where = f", outside {engine}" if engine.startswith("vllm ") else ""
    prices = [f"{one.policy.cost_name} ({one.source}{where}: {1e6 * one.price:.0f} us each)" for one in unpriced]
    options = [word for one in unpriced for word in ("--policy", one.policy.source or one.policy.shown_name)]
    others = ["--profile", profile.source or "profile.json", *pair_options(header), "--prompts", "PROMPTS"]
    command = shlex.join(map(str, ["specstop", "profile", *options, *others]))
    return (f"The profile does not price the decisions of {', '.join(prices)}; `{command}` adds them to it",)


def _training_profile(policy: StopPolicy, profile: Profile) -> Profile | None:
    """Return the profile that the policy was trained for, if that is this one with a price of its decisions."""
    if not isinstance(policy, LearnedPolicy) or not profile.same_costs(policy.metadata.profile):
        return None
    saved, name = Profile.from_dict(policy.metadata.profile, "the policy's profile"), policy.cost_name
    return dataclasses.replace(saved, decision_s={name: saved.decision_s[name]}) if name in saved.decision_s else None


def _cached_timings(policy: StopPolicy, profile: Profile, header: Header) -> Measurements:
    """Return timings of a policy's decisions, from the cache or measured now."""
    device = device_of(profile)
    key = _cache_key(policy, profile, header, device)
    path = cache_folder() / "decisions" / f"{digest(key)[:32]}.json"
    with contextlib.suppress(InputError, KeyError, TypeError, ValueError, AttributeError):  # missing or damaged
        timings = Measurements.from_list(read_json(path, "decisions")["measurements"])
        if any(series.what == DECISIONS for series in timings.series):
            return timings
    tree = tree_of(policy, "priced_tree") or tree_of(policy)
    timings = measure_decision(policy, header.vocabulary, profile.temperature, device, header.hidden, profile, tree)
    with contextlib.suppress(OSError):  # the cache cannot be written
        write_json(path, {"key": key, "measurements": timings.to_list()})
    return timings


def _cache_key(policy: StopPolicy, profile: Profile, header: Header, device: torch.device) -> dict[str, Any]:
    """Return everything that a price depends on, as JSON values."""
    costs = {name: value for name, value in profile.to_dict().items() if name != "decision_s"}
    return {
        "policy": policy.cost_name,
        "content": content(policy) if isinstance(policy, LearnedPolicy) else _code_digest(policy),
        "machine": [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), str(device)],
        "versions": [platform.python_version(), *map(version, _VERSIONS)],
        "profile": digest(costs),
        "vocabulary": header.vocabulary,
        "vectors": dict(header.hidden),
    }


def _code_digest(policy: StopPolicy) -> str:
    """Return a digest of a policy's code and of its settings that are numbers or texts, but not of its label."""
    kind = type(policy)
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        source = ""
    kinds = (bool, int, float, str, tuple)
    settings = sorted(item for item in vars(policy).items() if item[0] != "label" and isinstance(item[1], kinds))
    text = f"{kind.__module__}.{kind.__qualname__} {settings!r} {source}"
    return hashlib.sha256(text.encode()).hexdigest()
