"""Policies by name: `fixed:4`, `name?key=value`, a folder, `folder?rule=batch`, `hub:owner/name`.

Of several drafters a policy uses the first one, or the one after an @: `fixed:4@model`.

`Registry` also finds the drafters of `decode.drafters.spec`. Built-ins are declared like the entry points of plugins.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .arguments import as_list
from .batch_rules import for_batches
from .contract import StopPolicy
from .errors import InputError, PolicyError, SpecstopWarning, close_match
from .failures import error_text, plugin_errors
from .features import PLUGIN_SWITCH
from .host import validate_policy
from .learned import LearnedPolicy
from .profile import Profile
from .storage import POLICY_FILE, from_pretrained, load_policy_folder

NAME = re.compile(r"[A-Za-z0-9_-]+")

BUILTINS = {
    "fixed": "fixed:FixedLength",
    "confidence": "fixed:Confidence",
    "heuristic": "published.hugging_face:Heuristic",
    "heuristic-transient": "published.hugging_face:HeuristicTransient",
    "roc": "published.hugging_face:Roc",
    "entropy": "published.svip:EntropyBound",
    "adaedl": "published.adaedl:AdaEDL",
    "maxprob": "published.kangaroo:MaxProb",
    "product": "published.specdecpp:Product",
    "online": "published.online:Online",
    "bandit": "published.bandit:Bandit",
    "ddd": "published.ddd:DDD",
    "eagle": "published.eagle:Eagle",
    "opt": "published.eagle:OptTree",
    "c2t": "published.c2t:C2T",
    "tetris": "published.tetris:Tetris",
    "adaptive-verification": "published.adaptive_verification:AdaptiveVerification",
    "load": "published.load:LoadLength",
    "smartspec": "published.smartspec:SmartSpec",
    "agreement": "routing:agreement",
    "match": "routing:match",
}
"""The policies of specstop: `module:object` by name."""

PolicySpec = StopPolicy | str | Path
"""A policy, or an argument of `load_policy`."""


@dataclass(frozen=True)
class PluginInfo:
    """A row of `specstop policies`; `problem` is the reason why the entry cannot be used, "" if it can."""

    name: str
    where: str
    module: str
    what: str
    problem: str = ""


class Registry:
    """Built-in and installed policies or drafters by name. Each is imported when it is used.

    Args:
        group: of the entry points of plugins.
        kind: "policy" or "drafter", for messages.
        package: of the built-ins.
        builtin: `module:object` by name. No plugin may have one of these names.
        usage: returns the usage of a name and what it stands for, or raises `InputError`.
    """

    def __init__(
        self, group: str, kind: str, package: str, builtin: Mapping[str, str], usage: Callable[[str, Any], str]
    ) -> None:
        self.group, self.kind, self._usage = group, kind, usage
        self.builtin = {name: EntryPoint(name, f"{package}.{value}", group) for name, value in builtin.items()}

    def _entries(self) -> dict[str, tuple[EntryPoint, str]]:
        """Return built-ins and plugins by name, each with the reason why it cannot be used, or ""."""
        out = {name: (point, "") for name, point in self.builtin.items()}
        if os.environ.get(PLUGIN_SWITCH) == "0":
            return out
        plural = self.group.rpartition(".")[2]
        try:
            points = sorted(entry_points(group=self.group), key=lambda point: point.name)
        except Exception as error:  # the metadata of any package may be damaged
            warnings.warn(f"installed {plural} cannot be listed: {error_text(error)}", SpecstopWarning, stacklevel=3)
            return out
        for point in points:
            problem, two = "", f"two {plural} are called {point.name!r}: {_origin(point)}"
            if not NAME.fullmatch(point.name):
                problem = f"the {self.kind} {point.name!r} of {_origin(point)} needs a name of letters, digits, - and _"
            elif point.name in self.builtin:
                problem = f"{two} and a built-in; rename that entry point"
            elif point.name in out:
                problem = f"{two} and {_origin(out[point.name][0])}; uninstall one"
            out[point.name] = self.builtin.get(point.name, point), problem
        return out

    def names(self) -> list[str]:
        """Return the names of the built-ins and of the plugins that can be used."""
        return [name for name, (_, problem) in self._entries().items() if name in self.builtin or not problem]

    def load(self, name: str) -> Callable[..., Any] | None:
        """Import the class or function of a name; None if there is no such name.

        Raises:
            PolicyError: the name is ambiguous, or it cannot be imported.
        """
        point, problem = self._entries().get(name, (None, ""))
        if problem:
            raise PolicyError(f"--{self.kind}: {problem}")
        return None if point is None else self._import(point)

    def _import(self, point: EntryPoint) -> Callable[..., Any]:
        with plugin_errors(f"--{self.kind}", f"loading the plugin {point.name!r} ({point.value})"):
            build: Callable[..., Any] = point.load()
            inspect.signature(build)  # raises an error if it is not callable
        return build

    def listed(self) -> list[PluginInfo]:
        """Return the built-ins and the plugins, all imported, with the reason if one does not load."""
        rows = []
        for name, (point, problem) in self._entries().items():
            what = f"{name}?key=value"
            try:
                what = what if problem else self._usage(name, self._import(point))
            except InputError as error:
                problem = " ".join(error.command_line.removeprefix(f"--{self.kind}: ").split())
            where = "built in" if name in self.builtin else _package(point)
            rows.append(PluginInfo(name, where, point.value.partition(":")[0], what, problem))
        return rows


def _package(point: EntryPoint) -> str:
    try:
        return f"{point.dist.name} {point.dist.version}" if point.dist else "?"
    except Exception:  # its metadata may be damaged
        return "?"


def _origin(point: EntryPoint) -> str:
    package = _package(point)
    return point.value if package == "?" else f"{point.value} of {package}"


def split_spec(text: str, where: str) -> tuple[str, str | None, dict[str, Any]]:
    """Return name, value (None if there is no colon) and options of a spec; `where` begins the message of an error."""
    head, _, query = text.partition("?")
    name, colon, value = head.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, option = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"{where}: expected key=value after the question mark, not {part!r}")
        set_option(options, key, read_number(option), where)
    return name, value if colon else None, options


def set_option(options: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Add an option; a `PolicyError` if it is there already."""
    if key in options:
        raise PolicyError(f"{where}: {key} is given twice; give it once")
    options[key] = value


def read_number(value: str) -> int | float | str:
    """Return a value as a number if it is one."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def construct(build: Callable[..., Any], where: str, options: Mapping[str, Any], *positional: Any) -> Any:
    """Call a class or function of an entry point; a `PolicyError` if it rejects the options or raises an error."""
    signature = inspect.signature(build)
    try:  # before the call, so that a TypeError raised by the plugin is not taken for a wrong option
        signature.bind(*positional, **options)
    except TypeError as error:
        names = ", ".join([*signature.parameters][len(positional) :]) or "nothing"
        raise PolicyError(f"{where}: {error}; it takes {names}") from None
    with plugin_errors(where, "its construction"):
        return build(*positional, **options)


def _usage(name: str, build: Callable[..., Any]) -> str:
    """Return the spec of a policy, with its parameters and summary; a plugin is constructed with its defaults."""
    parameters = inspect.signature(build).parameters
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if name not in BUILTINS and all(p.default is not p.empty or p.kind in optional for p in parameters.values()):
        _construct_policy(build, f"{name!r}", {})
    usage = f"{name}:{next(iter(parameters))}; takes {', '.join(parameters)}" if parameters else name
    summary = (build.__doc__ or "").strip().partition("\n")[0]
    return f"{usage}. {summary}" if summary else usage


POLICIES = Registry("specstop.policies", "policy", __package__, BUILTINS, _usage)


def load_policy(spec: str | Path) -> StopPolicy:
    """Return the policy that `spec` names; the value after a colon sets its first parameter.

    Raises:
        PolicyError: no such policy, a wrong value, or a broken folder.
    """
    policy = _load(str(spec))
    object.__setattr__(policy, "label", str(spec))  # a plugin may be a frozen dataclass
    return policy


def as_policy(policy: PolicySpec) -> StopPolicy:
    """Return a policy, or the one that a spec or a folder names. Raises `PolicyError` for anything else."""
    return load_policy(policy) if isinstance(policy, str | Path) else validate_policy(policy)


def as_policies(policies: PolicySpec | Sequence[PolicySpec]) -> list[StopPolicy]:
    """Return one policy or several, or those that specs or folders name, as a list."""
    return [as_policy(policy) for policy in as_list(policies, StopPolicy)]


def _load(text: str) -> StopPolicy:
    folder, mark, _ = text.partition("?")
    where = f"--policy: {text!r}"
    if _is_folder(text):
        return load_policy_folder(Path(text).expanduser())
    spec, at, drafter = text.rpartition("@")
    if at and NAME.fullmatch(drafter):
        policy = _load(spec)
        if policy.routes:
            raise PolicyError(f"{where}: {spec} chooses among the drafters itself; leave out @{drafter}")
        object.__setattr__(policy, "drafter", drafter)  # a plugin may be a frozen dataclass
        return policy
    if mark and _is_folder(folder):
        return _load_batch_policy(folder, split_spec(text.removeprefix(folder), where)[2], where)
    name, value, options = split_spec(text, where)
    build = POLICIES.load(name)
    if build is None:
        if name == "hub":
            return from_pretrained(text.removeprefix("hub:"))
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist; one on the hub is written hub:owner/name")
        known = sorted(POLICIES.names())
        names, match = ", ".join(known), close_match(name, known)
        raise PolicyError(f"--policy: unknown policy {text!r}{match}; expected a policy folder or one of {names}")
    if value is not None:
        number = read_number(value)
        if isinstance(number, str):
            raise PolicyError(f"{where}: expected a number after the colon, not {value!r}")
        set_option(options, next(iter(inspect.signature(build).parameters), "value"), number, where)
    return _construct_policy(build, where, options)


def _construct_policy(build: Callable[..., Any], where: str, options: Mapping[str, Any]) -> StopPolicy:
    policy = construct(build, where, options)
    try:
        return validate_policy(policy)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.command_line}") from None


def _is_folder(text: str) -> bool:
    # A bare name is a folder only if a policy is in it: a folder `fixed` does not hide the built-in.
    # Functions of `os.path`, because those of `Path` raise errors for unknown users and for long specs.
    path = os.path.expanduser(text)
    is_path = "/" in text or text.startswith(".")
    return os.path.isfile(os.path.join(path, POLICY_FILE)) or (is_path and os.path.isdir(path))


def _load_batch_policy(folder: str, options: dict[str, Any], where: str) -> StopPolicy:
    """Return the policy of a folder under the rule `batch`, the only one that can be chosen without training."""
    policy = load_policy_folder(Path(folder).expanduser())
    rule, profile, send = (str(options.pop(name, "")) for name in ("rule", "profile", "send"))
    if options or rule != "batch" or not isinstance(policy, LearnedPolicy):
        raise PolicyError(
            f"{where}: expected rule=batch after the folder of a stop policy, and perhaps profile=FILE or send=all"
        )
    try:
        return for_batches(policy, send, Profile.load(profile) if profile else None)
    except InputError as error:
        raise PolicyError(f"{where}: {error.command_line.removeprefix('--profile: ')}") from None
