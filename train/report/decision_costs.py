"""What decisions cost where the profile does not say: timed once, kept, and used again.

The price of a decision belongs to the profile, like that of a draft step. Where a policy is unknown to it, timing anew with
each report would give each report another answer. So what is timed is kept: in the policy's own folder where it was trained
for this profile, else in the user's cache, under the policy's content, the machine, the versions and the profile; and the
report's folder has a copy.
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
from pathlib import Path
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

SCHEMA = 4
FILE = "decisions.json"
"""Of a report's folder: the timings that its profile lacks."""

TRAINED, TIMED = "as timed when it was trained", "timed once on this machine and kept"
_VERSIONS = ("specstop", "torch", "numpy", "numba")


@dataclass(frozen=True)
class Lacking:
    """A policy whose decisions a profile does not price.

    Attributes:
        policy: which; several that share a `cost_name` share the price.
        source: `TRAINED` or `TIMED`.
        price: in the place of the profile's.
        record: what is kept, as JSON values.
    """

    policy: StopPolicy
    source: str
    price: float
    record: dict[str, Any]


def with_prices(
    profile: Profile, policies: Sequence[StopPolicy], header: Header, out: Path | None = None
) -> tuple[Profile, tuple[Lacking, ...]]:
    """Return the profile with the decisions of `policies`, and those that it did not know.

    Args:
        profile: as measured.
        policies: to be priced.
        header: of the traces: sizes of the vocabulary and of hidden states.
        out: a report's folder, which may hold timings of an earlier run.

    Raises:
        InputError: the profile that a policy was trained for is mangled.
    """
    known, lacking = profile, []
    for name, policy in missing_decisions(profile, policies).items():
        trained, record = _of_training(policy, known), {}
        if trained is not None:
            timed = trained.measurements
            profile = profile.with_measured_decisions(timed) if timed else profile.with_decisions(trained.decision_s)
        else:
            record = _kept(policy, known, header, out)
            profile = profile.with_measured_decisions(Measurements.from_list(record["measurements"]))
        lacking.append(Lacking(policy, TIMED if record else TRAINED, profile.decision(name), record))
    return profile, tuple(lacking)


def lacking_line(lacking: Sequence[Lacking], profile: Profile, header: Header) -> tuple[str, ...]:
    """Return the line that says what the profile lacks and the command that adds it; nothing where it lacks nothing.

    Args:
        lacking: see `with_prices`.
        profile: which lacks them.
        header: of the traces, which names the pair.
    """
    if not lacking:
        return ()
    engine = str(profile.facts.get("engine", ""))
    where = f", outside {engine}" if engine.startswith("vllm ") else ""
    prices = [f"{one.policy.cost_name} ({one.source}{where}: {1e6 * one.price:.0f} us each)" for one in lacking]
    options = [word for one in lacking for word in ("--policy", one.policy.source or one.policy.shown_name)]
    known = ["--profile", profile.source or "profile.json", *pair_options(header), "--prompts", "PROMPTS"]
    command = shlex.join(map(str, ["specstop", "profile", *options, *known]))
    return (f"The profile does not price the decisions of {', '.join(prices)}; `{command}` adds them to it",)


def copies(lacking: Sequence[Lacking]) -> dict[str, Any] | None:
    """Return what a report's folder keeps of the timings, as JSON values; None where there are none."""
    records = [one.record for one in lacking if one.record]
    return {"schema": SCHEMA, "kind": "decisions", "decisions": records} if records else None


def _of_training(policy: StopPolicy, profile: Profile) -> Profile | None:
    """Return the profile that the policy was trained for, if that is this one with a price of its decisions."""
    if not isinstance(policy, LearnedPolicy) or not profile.same_costs(policy.metadata.profile):
        return None
    saved, name = Profile.from_dict(policy.metadata.profile, "the policy's profile"), policy.cost_name
    return dataclasses.replace(saved, decision_s={name: saved.decision_s[name]}) if name in saved.decision_s else None


def _kept(policy: StopPolicy, profile: Profile, header: Header, out: Path | None) -> dict[str, Any]:
    """Return the record of a policy's decisions: of an earlier run, or timed now."""
    device = device_of(profile)
    key = _key(policy, profile, header, device)
    cache = cache_folder() / "decisions" / f"{digest(key)[:32]}.json"
    earlier = [cache] if out is None else [out / FILE, cache]
    found = next((record for path in earlier for record in _records(path) if record["key"] == key), None)
    if found is None:
        tree = tree_of(policy, "priced_tree") or tree_of(policy)
        timed = measure_decision(policy, header.vocabulary, profile.temperature, device, header.hidden, profile, tree)
        found = {"key": key, "measurements": timed.to_list()}
    if not cache.is_file():
        # Where there is no cache that can be written, the report's folder has a copy, which serves when it is replaced.
        with contextlib.suppress(OSError):
            write_json(cache, {"schema": SCHEMA, "kind": "decisions", "decisions": [found]})
    return found


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none of one that is missing, or that is not as it was written."""
    if not path.is_file():
        return []
    try:
        raw = read_json(path, "decisions")
        if (raw["schema"], raw["kind"]) != (SCHEMA, "decisions"):
            return []
        for record in raw["decisions"]:
            if not any(key.what == DECISIONS for key in Measurements.from_list(record["measurements"]).series):
                return []
        return [dict(record) for record in raw["decisions"]]
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return []


def _key(policy: StopPolicy, profile: Profile, header: Header, device: torch.device) -> dict[str, Any]:
    """Return all that a price depends on, as JSON values."""
    costs = {name: value for name, value in profile.to_dict().items() if name != "decision_s"}
    return {
        "policy": policy.cost_name,
        "content": content(policy) if isinstance(policy, LearnedPolicy) else _content(policy),
        "machine": [platform.node(), platform.machine(), os.cpu_count(), torch.get_num_threads(), str(device)],
        "versions": [platform.python_version(), *map(version, _VERSIONS)],
        "profile": digest(costs),
        "vocabulary": header.vocabulary,
        "vectors": dict(header.hidden),
    }


def _content(policy: StopPolicy) -> str:
    """Return a digest of a policy's code, and of its settings as far as they are numbers and texts."""
    kind = type(policy)
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        source = ""
    plain = {name: value for name, value in vars(policy).items() if isinstance(value, (bool, int, float, str, tuple))}
    text = f"{kind.__module__}.{kind.__qualname__} {sorted(plain.items())!r} {source}"
    return hashlib.sha256(text.encode()).hexdigest()
