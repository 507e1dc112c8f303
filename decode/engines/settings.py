"""The settings of an engine, one JSON object under `specstop`; and which policies and drafters can run in one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.features import FEATURES, Kind
from ...policies.learned import LearnedPolicy
from ...policies.limits import check_limits
from ..drafters.spec import needs_draft, reads_states

ANCHORS = ("anchor_token", "before_token", "temperature")
"""ANCHOR features that need no row of the target's."""


def known_in_engines(name: str, greedy: bool) -> bool:
    """Whether an engine's drafter knows a feature.

    Args:
        name: of the feature.
        greedy: at temperature 0 there is no noise, and a noisy margin is one of the bare logits.
    """
    found = FEATURES[name]
    if found.kind is Kind.ANCHOR:
        return name in ANCHORS
    return not found.needs.noisy or greedy


def missing_in_engines(policy: StopPolicy) -> list[str]:
    """Return by name what a policy reads that an engine's drafter does not know."""
    greedy = isinstance(policy, LearnedPolicy) and policy.metadata.temperature == 0.0
    return [name for name in policy.features if not known_in_engines(name, greedy)] + list(policy.hidden)


def check_engine_policy(policy: StopPolicy, engine: str) -> StopPolicy:
    """Return the policy.

    Raises:
        PolicyError: it reads what the engine does not hand over; the message names it.
    """
    missing = missing_in_engines(policy)
    if missing:
        raise PolicyError(
            f"{policy.name}: reads {', '.join(missing)}, which {engine} does not hand to a drafter (neither the target's "
            f"rows and hidden states nor its noise); train one with `specstop train --for {engine}`"
        )
    return policy


def check_engine_drafter(name: str, engine: str, reads: bool = False) -> str:
    """Return the name of a drafter.

    Args:
        name: as of `--drafter`.
        engine: for the message.
        reads: whether it is known to read the target's hidden states; of trained drafters that is known by the name.

    Raises:
        InputError: it reads hidden states of the target.
    """
    if reads or reads_states(name):
        raise InputError(
            f"drafter {name}: it reads the target's hidden states, which {engine} does not hand to a class; expected "
            "model, lookup, suffix, or two such as suffix+model"
        )
    return name


KEY = "specstop"


@dataclass(frozen=True)
class EngineSettings:
    """What an engine's configuration says under `specstop`.

    Attributes:
        draft: folder or hub name of the draft model, if the drafter takes one.
        drafter: as of `--drafter`: `model`, `lookup`, `suffix`, a plugin's, or two such as `suffix+model`.
        policy: as of `--policy`: a folder, or a name such as `confidence:0.4`.
        profile: latency profile of the engine, for policies that observe what rounds took.
        dtype, device: of the draft; "" = the engine's.
        temperature: of the sampling, for features that read it.
        fallback: length that is drafted once the policy has failed.
        rows: requests that are drafted for at once, at most.
        traces: folder that `collect.engines.serving.RecordingProposer` writes traces to; `share` of the requests, `explore`
            of whose rounds are drafted to full depth whatever the policy says.
    """

    draft: str = ""
    policy: str = "fixed:4"
    drafter: str = "model"
    profile: str = ""
    dtype: str = ""
    device: str = ""
    temperature: float = 0.0
    fallback: int = 4
    rows: int = 64
    traces: str = ""
    share: float = 1.0
    explore: float = 0.0


def read_settings(raw: Any) -> EngineSettings:
    """Return the settings of an engine's additional configuration.

    Raises:
        InputError: there are none, a name is unknown, or a value is of the wrong kind or out of range.
    """
    found = raw.get(KEY) if isinstance(raw, Mapping) else None
    where = f"additional_config: {KEY}"
    if not isinstance(found, Mapping):
        raise InputError(
            f'{where}: expected an object such as {{"draft": "DRAFT", "policy": "policy"}}, not {found!r}; '
            "`specstop deploy --to vllm` writes one"
        )
    fields = {field.name: field for field in dataclasses.fields(EngineSettings)}
    kinds: dict[str, type] = {"float": float, "int": int, "str": str}
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name not in fields:
            raise InputError(f"{where}: unknown {name!r}{close_match(str(name), fields)}; known: {', '.join(fields)}")
        kind = kinds[str(fields[name].type)]  # annotations are strings in this module
        good = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
        if not good:
            raise InputError(f"{where}: {name}: expected {_WORDS[kind]}, not {value!r}")
        values[name] = kind(value)
    settings = EngineSettings(**values)
    if needs_draft(settings.drafter) and not settings.draft:
        raise InputError(f"{where}: draft: expected the folder or hub name of the draft model")
    check_limits(temperature=settings.temperature, fallback=settings.fallback, explore=settings.explore)
    if not 0.0 < settings.share <= 1.0:
        raise InputError(f"{where}: share: expected more than 0, at most 1, not {settings.share:g}")
    if not 1 <= settings.rows <= 1024:
        raise InputError(f"{where}: rows: expected 1 to 1024 requests, not {settings.rows}")
    return settings


_WORDS: dict[type, str] = {float: "a number", int: "a whole number", str: "a text"}
