"""Policies by name: `fixed:4`, `name?key=value`, a folder, `folder?rule=batch`, `hub:owner/name`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from .arguments import as_list
from .batch_rules import for_batches
from .contract import StopPolicy
from .errors import InputError, PolicyError, close_match
from .host import plugin_errors, validate_policy
from .plugins import PluginInfo, Plugins, check_options, read_number, set_option, split_spec
from .profile import Profile
from .storage import POLICY_FILE, from_pretrained, load_policy_folder

GROUP = "specstop.policies"

BUILTINS = {
    name: EntryPoint(name, f"{__package__}.{value}", GROUP)
    for name, value in {
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
        "gain": "tree_rules:Gain",
        "tetris": "published.tetris:Tetris",
        "adaptive-verification": "published.adaptive_verification:AdaptiveVerification",
        "load": "published.load:LoadLength",
        "smartspec": "published.smartspec:SmartSpec",
    }.items()
}
"""The policies of specstop, declared like the entry points of a plugin. Each is imported when it is used."""

_PLUGINS = Plugins(GROUP, "policy", BUILTINS)

PolicySpec = StopPolicy | str | Path
"""A policy, or an argument of `load_policy`."""


def plugins() -> dict[str, EntryPoint]:
    """Return the installed plugins, not imported; none with `SPECSTOP_PLUGINS=0` in the environment."""
    return _PLUGINS.usable()


def listed_policies() -> list[PluginInfo]:
    """Return the built-in policies and the plugins, all imported, with the reason if one does not load."""
    builtin = {name: (point.value.partition(":")[0], _usage(point)) for name, point in BUILTINS.items()}
    return _PLUGINS.listed(builtin, _usage)


def load_policy(spec: str | Path) -> StopPolicy:
    """Return the policy that `spec` names; the value after a colon sets its first parameter.

    Raises:
        PolicyError: no such policy, a wrong value, or a broken folder.
    """
    policy = _load(str(spec))
    object.__setattr__(policy, "label", str(spec))  # a plugin may be a frozen dataclass
    return policy


def as_policy(policy: PolicySpec) -> StopPolicy:
    """Return a policy, or the one that a spec or a folder names."""
    return load_policy(policy) if isinstance(policy, str | Path) else policy


def as_policies(policies: PolicySpec | Sequence[PolicySpec]) -> list[StopPolicy]:
    """Return one policy or several, or those that specs or folders name, as a list."""
    return [as_policy(policy) for policy in as_list(policies, StopPolicy)]


def _load(text: str) -> StopPolicy:
    folder, mark, _ = text.partition("?")
    where = f"--policy: {text!r}"
    if _is_folder(text):
        return load_policy_folder(Path(text).expanduser())
    if mark and _is_folder(folder):
        return _load_batch_policy(folder, split_spec(text.removeprefix(folder), where)[2], where)
    name, value, options = split_spec(text, where)
    point = _PLUGINS.find(name) or BUILTINS.get(name)
    if point is None:
        if name == "hub":
            return from_pretrained(text.removeprefix("hub:"))
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist; one on the hub is written hub:owner/name")
        known = sorted([*BUILTINS, *plugins()])
        names, match = ", ".join(known), close_match(name, known)
        raise PolicyError(f"--policy: unknown policy {text!r}{match}; expected a policy folder or one of {names}")
    build = _PLUGINS.load(point)
    if value is not None:
        number = read_number(value)
        if isinstance(number, str):
            raise PolicyError(f"{where}: expected a number after the colon, not {value!r}")
        set_option(options, next(iter(inspect.signature(build).parameters), "value"), number, where)
    check_options(build, where, options)
    return _build(build, options, where)


def _is_folder(text: str) -> bool:
    # A bare name is a folder only if a policy is in it: a folder `fixed` does not hide the built-in.
    path = Path(os.path.expanduser(text))  # unlike `Path.expanduser`, does not raise for an unknown user
    return (path / POLICY_FILE).is_file() or (path.is_dir() and ("/" in text or text.startswith(".")))


def _load_batch_policy(folder: str, options: dict[str, Any], where: str) -> StopPolicy:
    """Return the policy of a folder under the rule `batch`, the only one that can be chosen without training."""
    policy = load_policy_folder(Path(folder).expanduser())
    rule, profile, send = (str(options.pop(name, "")) for name in ("rule", "profile", "send"))
    if options or rule != "batch":
        raise PolicyError(f"{where}: expected rule=batch after the folder, and perhaps profile=FILE or send=all")
    try:
        return for_batches(policy, send, Profile.load(profile) if profile else None)
    except InputError as error:
        raise PolicyError(f"{where}: {error.command_line.removeprefix('--profile: ')}") from None


def _usage(point: EntryPoint) -> str:
    """Return the spec of a policy, with its parameters and summary; a plugin is built with its defaults."""
    build, where = _PLUGINS.load(point), f"{point.name!r}"
    accepted = inspect.signature(build).parameters
    required = [
        p for p in accepted.values() if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if not required and point.name not in BUILTINS:
        _build(build, {}, where)
    usage = f"{point.name}:{next(iter(accepted))}; takes {', '.join(accepted)}" if accepted else point.name
    summary = (build.__doc__ or "").strip().partition("\n")[0]
    return f"{usage}. {summary}" if summary else usage


def _build(build: Callable[..., Any], options: dict[str, Any], where: str) -> StopPolicy:
    with plugin_errors(where, "making it"):
        policy = build(**options)
    try:
        return validate_policy(policy)
    except PolicyError as error:
        raise PolicyError(f"{where}: {error.command_line}") from None
