"""Policies by name: `fixed:4`, a folder, `hub:owner/name`, or `name?key=value` for built-ins and plugins.

A folder may be put under the rule for batches: `folder?rule=batch`.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .. import baselines, joint
from ..baselines.bandit import Bandit
from ..builtins import BUILTINS as BUILTINS, builtin
from ..checking import check_policy
from ..contract import StopPolicy
from ..errors import InputError, PolicyError, SpecstopWarning, close_match
from ..joint.survival import for_batches
from ..latency.profile import Profile
from ..lazy import modules
from ..learned.policy import LearnedPolicy
from ..plugin_code import loading, reason
from .folder import POLICY_FILE, from_pretrained, load_policy_folder

GROUP = "specstop.policies"
SWITCH = "SPECSTOP_PLUGINS"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


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
    points, refused = _installed()
    return {point.name: point for point in points if point.name not in refused}


def _installed() -> tuple[list[EntryPoint], dict[str, str]]:
    """Return all installed plugins, and by name why it cannot be used: no other name is affected."""
    if os.environ.get(SWITCH) == "0":
        return [], {}
    try:
        points = list(entry_points(group=GROUP))
    except Exception as error:  # the metadata of any package may be damaged
        warnings.warn(f"installed policies cannot be looked for: {reason(error)}", SpecstopWarning, stacklevel=2)
        return [], {}
    refused = {}
    for name in sorted({point.name for point in points}):
        claims = [_origin(point) for point in points if point.name == name]
        if not _NAME.fullmatch(name):
            refused[name] = f"the policy {name!r} of {claims[0]} needs a name of letters, digits, - and _"
        elif name in BUILTINS:
            refused[name] = f"two policies are called {name!r}: {claims[0]} and a built-in; rename that entry point"
        elif len(claims) > 1:
            refused[name] = f"two policies are called {name!r}: {claims[-1]} and {claims[0]}; uninstall one"
    return points, refused


def _package(point: EntryPoint) -> str:
    """Return the distribution and its version, or "?"."""
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    except Exception:  # its metadata may be damaged, or gone
        return "?"


def _origin(point: EntryPoint) -> str:
    """Return `module:name`, and the distribution where it is known."""
    package = _package(point)
    return point.value if package == "?" else f"{point.value} of {package}"


@dataclass(frozen=True)
class Listed:
    """A policy in a list: its name, where it comes from, its module, its use, and why it does not load ("" if it does)."""

    name: str
    where: str
    module: str
    what: str
    problem: str = ""


def listed_policies() -> list[Listed]:
    """Return the built-in policies, and the plugins with whether they load: this imports them, and makes them if it can."""
    points, refused = _installed()
    found = [Listed(n, "built in", b.build.__module__, b.usage, refused.get(n, "")) for n, b in BUILTINS.items()]
    for point in points:
        usage, problem = f"{point.name}?key=value", refused.get(point.name, "")
        try:
            usage = usage if problem else _usage(point)
        except PolicyError as error:
            problem = " ".join(str(error).removeprefix("--policy: ").split())
        found.append(Listed(point.name, _package(point), point.value.partition(":")[0], usage, problem))
    return found


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


def _of_spec(text: str, plain: bool) -> StopPolicy:
    if _is_folder(text):
        return load_policy_folder(Path(text).expanduser())
    name, _, query = text.partition("?")
    if query and _is_folder(name):
        return _under_options(load_policy_folder(Path(name).expanduser()), _arguments(query, text), text)
    name, colon, value = name.partition(":")
    points, refused = ([], {}) if plain else _installed()
    if name in refused:  # a built-in, too, whose name a plugin claims: which one is meant?
        raise PolicyError(f"--policy: {refused[name]}")
    installed = {point.name: point for point in points if point.name not in refused}
    if name not in BUILTINS and name not in installed:
        if text.startswith("hub:"):
            return from_pretrained(text.removeprefix("hub:"))
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist; one on the hub is written hub:owner/name")
        known = sorted([*BUILTINS, *installed])
        raise PolicyError(
            f"--policy: unknown policy {text!r}{close_match(name, known)}; expected a policy folder or one of "
            f"{', '.join(known)}"
        )
    arguments = _arguments(query, text)
    if colon:
        if name not in BUILTINS:
            raise PolicyError(f"--policy: {text!r}: write the plugin's options as {name}?key=value")
        if BUILTINS[name].value in arguments:
            raise PolicyError(f"--policy: {text!r}: {BUILTINS[name].value} is given twice; give it once")
        arguments[BUILTINS[name].value] = number = _number(value)
        if isinstance(number, str):
            raise PolicyError(f"--policy: {text!r}: expected a number after the colon, not {value!r}")
    return _build(BUILTINS[name].build if name in BUILTINS else _load(installed[name]), arguments, text)


def _is_folder(text: str) -> bool:
    # A bare name is a folder only if a policy is in it: a folder `fixed` in the way does not hide the built-in.
    path = Path(text).expanduser()
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
        raise PolicyError(f"--policy: {text!r}: {str(error).removeprefix('--profile: ')}") from None


def _usage(point: EntryPoint) -> str:
    """Return how a plugin is written in a spec, once it was made with what it takes by default."""
    build, usage = _load(point), f"{point.name}?key=value"
    takes = _takes(build, f"{point.name!r}")
    if all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in takes.values()):
        _build(build, {}, point.name)
    return f"{usage}; takes {', '.join(takes)}" if takes else usage


def _load(point: EntryPoint) -> Callable[..., Any]:
    with loading("--policy", f"loading the plugin {point.name!r} ({point.value})"):
        build: Callable[..., Any] = point.load()
    if not callable(build):
        raise PolicyError(
            f"--policy: {point.value} is a {type(build).__name__}, no class or function that makes a policy"
        )
    return build


def _takes(build: Callable[..., Any], where: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of what makes a policy."""
    with loading(where, "reading what it takes"):
        return inspect.signature(build).parameters


def _build(build: Callable[..., Any], arguments: dict[str, Any], text: str) -> StopPolicy:
    """Make a policy, and check what it says of itself."""
    where = f"--policy: {text!r}"
    takes = _takes(build, where)
    with loading(where, "making it"):
        try:
            # Bound before the call: a TypeError of the plugin's own code is no wrong option.
            inspect.Signature([*takes.values()]).bind(**arguments)
        except TypeError as error:
            raise PolicyError(f"{where}: {error}; it takes {', '.join(takes) or 'nothing'}") from None
        policy = build(**arguments)
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"{where} is a {type(policy).__name__}, not a StopPolicy")
    try:
        return check_policy(policy)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error}") from None


def _arguments(query: str, text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"--policy: {text!r}: expected key=value after the question mark, not {part!r}")
        if key in arguments:
            raise PolicyError(f"--policy: {text!r}: {key} is given twice; give it once")
        arguments[key] = _number(value)
    return arguments


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
