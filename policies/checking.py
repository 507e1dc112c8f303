"""What a policy says of itself, checked once where it enters: every attribute of its kind and range, every name known."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from .contract import StopPolicy
from .errors import PolicyError, close_match
from .features import FEATURES
from .features.hidden_states import HIDDEN_STATES
from .plugin_code import Contained, own
from .profile import Profile

METHODS = ("start", "keep", "select", "observe", "limited")


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_count(number) for entry in value.items() for number in entry)


def _is_line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and bool(value.strip())


ATTRIBUTES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("name", "cost_name"), ("one line of text", _is_line)),
    **dict.fromkeys(("first", "max_depth"), ("a whole number, 0 or more", _is_count)),
    **dict.fromkeys(("trims", "carries", "reads_clock", "reads_seconds", "joint"), ("True or False", _is_flag)),
    "unasked": ("whole numbers by whole numbers", _is_table),
    **dict.fromkeys(METHODS, ("a method", callable)),
}
"""By attribute: what is expected, and whether a value is that."""


def check_policy(policy: Any) -> StopPolicy:
    """Return the policy.

    Raises:
        PolicyError: it is none, or an attribute is wrong: class, attribute, what was expected and what came.
    """
    if isinstance(policy, type) and issubclass(policy, StopPolicy):
        raise PolicyError(f"expected a policy, not the class {policy.__name__}; write {policy.__name__}(...)")
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"expected a StopPolicy, not {_shown(policy)}")
    if own(policy):
        return policy
    who = type(policy).__name__
    # By its class's name: given the policy, the block would read attributes of it that nobody has checked.
    with Contained(who, "reading what it says of itself"):
        for name, (expected, fits) in ATTRIBUTES.items():
            if not fits(value := getattr(policy, name)):
                raise PolicyError(f"{who}.{name}: expected {expected}, not {_shown(value)}")
        _check_names(f"{who}.features", "feature", policy.features, FEATURES)
        _check_names(f"{who}.hidden", "hidden state", policy.hidden, HIDDEN_STATES)
        sizes = getattr(policy, "sizes", {})  # only of policies whose hidden states are of one size
        if not isinstance(sizes, Mapping) or not all(
            name in HIDDEN_STATES and _is_count(sizes[name]) for name in sizes
        ):
            raise PolicyError(f"{who}.sizes: expected whole numbers by name of a hidden state, not {_shown(sizes)}")
        _check_limited(who, policy)
    return policy


def with_costs(policy: StopPolicy, profile: Profile | None) -> StopPolicy:
    """Return a policy as it decides by the costs of a profile, if there is one and the policy asks for them.

    Raises:
        PolicyFailure: a plugin raised an error.
        PolicyError: it is no policy, or what it returned is none.
    """
    if profile is None:
        return policy
    if own(check_policy(policy)):
        return policy.with_costs(profile)
    with Contained(policy, "with_costs()"):
        found = policy.with_costs(profile)
    return check_policy(found)


def _check_names(where: str, what: str, names: Any, known: Mapping[str, Any]) -> None:
    """Refuse what is not a tuple of known names, each once."""
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        hint = f"; write ({names!r},)" if isinstance(names, str) and names in known else ""
        raise PolicyError(f"{where}: expected a tuple of {what} names, not {_shown(names)}{hint}")
    for at, name in enumerate(names):
        if name not in known:
            raise PolicyError(
                f"{where}: unknown {what} {_shown(name)}{close_match(name, known)}; known: {', '.join(known)}"
            )
        if name in names[:at]:
            raise PolicyError(f"{where}: expected each {what} once, but {name!r} is there twice")


def _check_limited(who: str, policy: StopPolicy) -> None:
    """Refuse a policy that cannot be held to a smaller depth, as a trace or a profile may ask for."""
    depth = max(policy.max_depth - 1, 0)
    try:
        shorter = policy.limited(depth)
    except AttributeError as error:  # of a frozen dataclass, or a property
        raise PolicyError(f"{who}.max_depth: expected an attribute that can be set on a copy ({error})") from None
    if not isinstance(shorter, StopPolicy) or not _is_count(shorter.max_depth) or shorter.max_depth > depth:
        raise PolicyError(f"{who}.limited: expected limited({depth}) to draft no deeper than {depth}")


def _shown(value: Any) -> str:
    """Return a value with its kind, in short."""
    text = "".join(c if c.isprintable() else "?" for c in reprlib.repr(value))
    return text if value is None or isinstance(value, bool) else f"the {type(value).__name__} {text}"
