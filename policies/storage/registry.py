"""Policies by name: `fixed:4`, a folder, `hub:owner/name`, or `name?key=value` for built-ins and plugins.

A folder may be put under the rule for batches: `folder?rule=batch`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from .. import baselines, joint
from ..arguments import as_list
from ..baselines.bandit import Bandit
from ..builtins import BUILTINS as BUILTINS, builtin
from ..contract import StopPolicy
from ..errors import InputError, PolicyError, close_match
from ..joint.survival import for_batches
from ..lazy import modules
from ..learned.policy import LearnedPolicy
from ..profile import Profile
from ..validation import plugin_errors, validate_policy
from .folder import POLICY_FILE, from_pretrained, load_policy_folder
from .specs import Listed, Plugins, check_options, parameters, read_number, read_options

GROUP = "specstop.policies"
_PLUGINS = Plugins(GROUP, "policy", "policies", BUILTINS)


for _folder in (baselines, joint):
    modules(_folder)  # each enters its policies

ARMS = "fixed:2,fixed:4,fixed:8,confidence:0.4,entropy:0.6,maxprob:0.6"


@builtin("bandit", "explore", "bandit?kind=thompson&arms=fixed:2,fixed:6 picks a policy each round")
def build_bandit(explore: float = 2.0**0.5, kind: str = "ucb", arms: str = ARMS) -> Bandit:
    """Return the bandit over the policies that `arms` names, with commas between them."""
    # The default arms are built-ins: a plugin that claims the name of one must not break the bandit.
    return Bandit([load_policy(arm, plain=arms == ARMS) for arm in str(arms).split(",") if arm], kind, explore)


def plugins() -> dict[str, EntryPoint]:
    """Return the installed plugins that can be named, without importing them.

    The environment variable `SPECSTOP_PLUGINS=0` turns discovery off: there are none then.
    """
    return _PLUGINS.usable()


def listed_policies() -> list[Listed]:
    """Return the built-in policies, and the plugins with whether they load: this imports them, and makes them if it can."""
    return _PLUGINS.listed({name: (made.build.__module__, made.usage) for name, made in BUILTINS.items()}, _usage)


def load_policy(spec: str | Path, *, plain: bool = False) -> StopPolicy:
    """Return the policy that `spec` names.

    Args:
        spec: see the top of this module.
        plain: a built-in is meant, whatever plugins are installed.

    Raises:
        PolicyError: no such policy (the message has the close match), a wrong value, or a broken folder.
    """
    policy = _of_spec(str(spec), plain)
    object.__setattr__(policy, "label", str(spec))  # a plugin may be a frozen dataclass
    return policy


PolicySpec = StopPolicy | str | Path
"""A policy, or what `load_policy` reads."""


def as_policy(policy: PolicySpec) -> StopPolicy:
    """Return a policy, or the one that a spec or a folder names."""
    return load_policy(policy) if isinstance(policy, str | Path) else policy


def as_policies(policies: PolicySpec | Sequence[PolicySpec]) -> list[StopPolicy]:
    """Return policies that are given as such or named; one by itself is a list of one."""
    return [as_policy(policy) for policy in as_list(policies, StopPolicy)]


def _of_spec(text: str, plain: bool) -> StopPolicy:
    if _is_folder(text):
        return load_policy_folder(Path(os.path.expanduser(text)))
    where = f"--policy: {text!r}"
    name, _, query = text.partition("?")
    if query and _is_folder(name):
        return _under_options(load_policy_folder(Path(os.path.expanduser(name))), read_options(query, where), text)
    name, colon, value = name.partition(":")
    point = None if plain else _PLUGINS.find(name)
    if name not in BUILTINS and point is None:
        if text.startswith("hub:"):
            return from_pretrained(text.removeprefix("hub:"))
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist; one on the hub is written hub:owner/name")
        known = sorted([*BUILTINS, *plugins()])
        raise PolicyError(
            f"--policy: unknown policy {text!r}{close_match(name, known)}; expected a policy folder or one of "
            f"{', '.join(known)}"
        )
    arguments = read_options(query, where)
    if colon:
        if name not in BUILTINS:
            raise PolicyError(f"{where}: write the plugin's options as {name}?key=value")
        if BUILTINS[name].value in arguments:
            raise PolicyError(f"{where}: {BUILTINS[name].value} is given twice; give it once")
        arguments[BUILTINS[name].value] = number = read_number(value)
        if isinstance(number, str):
            raise PolicyError(f"{where}: expected a number after the colon, not {value!r}")
    return _build(BUILTINS[name].build if point is None else _PLUGINS.load(point), arguments, text)


def _is_folder(text: str) -> bool:
    # A bare name is a folder only if a policy is in it: a folder `fixed` in the way does not hide the built-in.
    path = Path(os.path.expanduser(text))
    return (path / POLICY_FILE).is_file() or (path.is_dir() and ("/" in text or text.startswith(".")))


def _under_options(policy: LearnedPolicy, arguments: dict[str, Any], text: str) -> StopPolicy:
    """Return a policy of a folder under the rule `batch`, the only one that needs no training of its own."""
    rule, profile, send = (str(arguments.pop(name, "")) for name in ("rule", "profile", "send"))
    if arguments or rule != "batch":
        raise PolicyError(
            f"--policy: {text!r}: expected rule=batch after the folder, and perhaps profile=FILE or send=all"
        )
    try:
        return for_batches(policy, send, Profile.load(profile) if profile else None)
    except InputError as error:
        raise PolicyError(f"--policy: {text!r}: {error.command_line.removeprefix('--profile: ')}") from None


def _usage(point: EntryPoint) -> str:
    """Return how a plugin is written in a spec, once it was made with what it takes by default."""
    build, usage = _PLUGINS.load(point), f"{point.name}?key=value"
    takes = parameters(build, f"{point.name!r}")
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes.values()):
        _build(build, {}, point.name)
    return f"{usage}; takes {', '.join(takes)}" if takes else usage


def _build(build: Callable[..., Any], arguments: dict[str, Any], text: str) -> StopPolicy:
    """Make a policy, and check what it says of itself."""
    where = f"--policy: {text!r}"
    check_options(parameters(build, where), where, arguments)
    with plugin_errors(where, "making it"):
        policy = build(**arguments)
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"{where} is a {type(policy).__name__}, not a StopPolicy")
    try:
        return validate_policy(policy)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.command_line}") from None
