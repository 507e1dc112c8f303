"""The settings of drafting in an engine, and validation of policies and drafters for engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ...policies.arguments import check_limits
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.features import FEATURES, Kind, base_features
from ...policies.learned import LearnedPolicy
from ...policies.routing import RoutingPolicy
from ..drafters.spec import needs_draft, reads_states

KEY = "specstop"
ANCHORS = ("anchor_token", "before_token", "temperature")
"""ANCHOR features that do not read logits of the target."""


def is_available_in_engines(name: str, greedy: bool) -> bool:
    """Whether a feature can be computed in an engine; `greedy`: at temperature 0 there is no noise."""
    sources = [FEATURES[source] for source in base_features([name])]
    return all(one.name in ANCHORS if one.kind is Kind.ANCHOR else greedy or not one.needs.noisy for one in sources)


def missing_in_engines(policy: StopPolicy) -> list[str]:
    """Return the names of the features and hidden states of a policy that cannot be computed in an engine."""
    greedy = isinstance(policy, (LearnedPolicy, RoutingPolicy)) and policy.metadata.temperature == 0.0
    return [name for name in policy.features if not is_available_in_engines(name, greedy)] + list(policy.hidden)


def check_engine_policy(policy: StopPolicy) -> StopPolicy:
    """Return the policy. Raises `PolicyError` if it reads what vLLM does not pass on, or drafts more than a chain."""
    if missing := missing_in_engines(policy):
        raise PolicyError(
            f"{policy.name}: reads {', '.join(missing)}, which vllm does not pass to a drafter (neither logits and hidden "
            "states of the target nor its noise); train with --for vllm, or a route with --feature"
        )
    if policy.joins:
        raise PolicyError(
            f"{policy.name}: may let several drafters draft in one round, but vllm verifies chains; use a policy that "
            "chooses one"
        )
    return policy


def check_engine_drafter(name: str, reads: bool = False) -> str:
    """Return the spec of drafters. Raises `InputError` if one `reads` hidden states of the target."""
    if reads or reads_states(name):
        raise InputError(
            f"drafter {name}: reads the target's hidden states, which vllm does not pass to a drafter; expected model, "
            "lookup or suffix, or several such as suffix+model"
        )
    return name


@dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class EngineSettings:
    """The entry `specstop` of an engine's configuration.

    Attributes:
        draft: folder or hub name of the draft model, if the drafter has one.
        policy: value of `--policy`: a folder, or a name such as `confidence:0.4`.
        drafter: value of `--drafter`: `model`, `lookup`, `suffix`, or a plugin's; several are separated by +.
        profile: latency profile of the engine, for policies that observe the seconds of rounds.
        dtype, device: of the draft; "" = the engine's.
        temperature: of sampling, for features that read it.
        fallback: draft length after the policy has failed.
        rows: maximum number of requests with drafts.
    """

    draft: str = ""
    policy: str = "fixed:4"
    drafter: str = "model"
    profile: str = ""
    dtype: str = ""
    device: str = ""
    temperature: float = 0.0
    fallback: int = 4
    rows: Annotated[int, Field(ge=1, le=1024)] = 64


def read_settings(raw: Any) -> EngineSettings:
    """Return the settings in an engine's additional configuration.

    Raises:
        InputError: there are none, a name is unknown, or a value has a wrong type or is out of range.
    """
    values = raw.get(KEY) if isinstance(raw, Mapping) else None
    where = f"additional_config: {KEY}"
    if not isinstance(values, Mapping):
        raise InputError(
            f'{where}: expected an object such as {{"draft": "DRAFT", "policy": "policy"}}, not {values!r}; '
            "`specstop deploy --to vllm` writes one"
        )
    try:
        settings = EngineSettings(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        known = EngineSettings.__dataclass_fields__
        hint = "" if name in known else f"{close_match(name, known)}; expected {', '.join(known)}"
        raise InputError(f"{where}: {name}: {first['msg']}, not {first['input']!r}{hint}") from None
    if needs_draft(settings.drafter) and not settings.draft:
        raise InputError(f"{where}: draft: expected the folder or hub name of the draft model")
    check_limits(temperature=settings.temperature, fallback=settings.fallback)
    return settings
