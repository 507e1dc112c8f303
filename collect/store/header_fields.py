"""Types of the header fields, with bounds that are validated for each field separately when a header is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field
from typing_extensions import TypedDict

from ...decode.topology import Topology
from ...policies.arguments import LIMITS, MAX_ROWS
from ...policies.features import FEATURES, HIDDEN_STATES, Kind

MOST = 1 << 31
"""Exclusive upper bound of token ids and counts, because columns are int32."""

_WIDEST = 1 << 20
_LONGEST, _DEEPEST = 4096, 8
"""Maximum number of characters of a text, and of levels of nested JSON values."""


def limited(name: str) -> AfterValidator:
    """Return a validator for the bounds of the option `name` in `policies.arguments`."""

    def check(value: Any) -> Any:
        if requirement := LIMITS[name].requirement(value):
            raise ValueError(f"expected {requirement}")
        return value

    return AfterValidator(check)


def _check_topology(parents: tuple[int, ...]) -> tuple[int, ...]:
    if min(parents) < -1:
        raise ValueError("expected parents of -1 or more")
    Topology([-1, *(parent + 1 for parent in parents)])
    return parents


def _check_features(names: Sequence[str], kinds: Sequence[Kind]) -> None:
    valid = [name for name, feature in FEATURES.items() if feature.kind in kinds]
    if len(set(names)) < len(names) or not set(names) <= set(valid):
        raise ValueError(f"expected distinct features among {', '.join(valid)}")


def _check_node_features(names: tuple[str, ...]) -> tuple[str, ...]:
    _check_features(names, (Kind.PRE, Kind.POST))
    return names


def _check_anchor_features(names: tuple[str, ...]) -> tuple[str, ...]:
    _check_features(names, (Kind.ANCHOR,))
    return names


def _check_verification(name: str) -> str:
    from ...decode.verify.modes import MODES

    if name not in MODES:
        raise ValueError(f"expected one of {', '.join(MODES)}")
    return name


def _check_label(name: str) -> str:
    from ...decode.verify.modes import MODES

    labels = dict.fromkeys([*(mode.label for mode in MODES.values()), "outcome"])  # "outcome": records of an engine
    if name not in labels:
        raise ValueError(f"expected one of {', '.join(labels)}")
    return name


def _check_hidden(widths: Mapping[str, int]) -> Mapping[str, int]:
    if not set(widths) <= set(HIDDEN_STATES) or not all(0 < width <= _WIDEST for width in widths.values()):
        raise ValueError(f"expected widths from 1 to {_WIDEST} for {', '.join(HIDDEN_STATES)}")
    return widths


def _check_sampling(options: Mapping[str, Any]) -> Mapping[str, Any]:
    for option, value in options.items():
        name = option.replace("_", "-")
        if name in LIMITS and (requirement := LIMITS[name].requirement(value)):
            raise ValueError(f"expected {requirement} as {option}")
    _check_json(options)
    return options


def _check_json(value: Any, level: int = 0) -> Any:
    """Validate a JSON value: numbers must be finite, and the length of texts and the nesting are limited."""
    if level > _DEEPEST:
        raise ValueError(f"expected at most {_DEEPEST} levels of nesting")
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"expected texts of at most {_LONGEST} characters")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("expected finite numbers")
    if isinstance(value, dict):
        _check_json(list(value), level)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_json(inner, level + 1)
    return value


class _Balance(TypedDict):
    texts: int
    tokens: int
    impossible: int
    mean: float
    standard_error: float


_Facts = TypedDict(
    "_Facts",
    {
        "device": str, "dtype": str, "threads": int, "drafter": str, "draft model": str,
        "reading": str, "prompts from": str, "prompts left out": str, "temperature": str, "lengths": str,
        "completions": _Balance, "digests": dict[str, str], "versions": dict[str, str],
    },
    total=False,
)  # fmt: skip
_Facts.__pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[attr-defined]

Name: TypeAlias = Annotated[str, Field(max_length=_LONGEST)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=MOST)]
Count: TypeAlias = Annotated[int, Field(ge=1, lt=MOST)]
Parents: TypeAlias = Annotated[
    tuple[int, ...], Field(min_length=1, max_length=MAX_ROWS - 1), AfterValidator(_check_topology)
]
NodeFeatures: TypeAlias = Annotated[tuple[Name, ...], AfterValidator(_check_node_features)]
AnchorFeatures: TypeAlias = Annotated[tuple[Name, ...], AfterValidator(_check_anchor_features)]
ModeName: TypeAlias = Annotated[str, AfterValidator(_check_verification)]
Label: TypeAlias = Annotated[str, AfterValidator(_check_label)]
Widths: TypeAlias = Annotated[Mapping[str, int], AfterValidator(_check_hidden)]
Sampling: TypeAlias = Annotated[Mapping[str, Any], AfterValidator(_check_sampling)]
if TYPE_CHECKING:
    Facts: TypeAlias = Mapping[str, Any]
else:
    Facts = Annotated[_Facts, AfterValidator(_check_json)]
