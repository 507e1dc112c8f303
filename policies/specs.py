"""Policies by name: `fixed:4`, a folder, `hub:owner/name`, or `name?key=value` for built-ins and plugins."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .baselines import Confidence, FixedLength
from .baselines_adaptive import AdaEDL, Heuristic, HeuristicTransient
from .baselines_bandit import Bandit
from .baselines_gain import Gain
from .baselines_online import Online
from .baselines_roc import Roc
from .baselines_scores import EntropyBound, MaxProb, Product
from .baselines_trees import C2T, DDD, Eagle, OptTree
from .contract import StopPolicy
from .errors import PolicyError, close_match
from .folder import POLICY_FILE, from_pretrained, load_policy_folder

GROUP = "specstop.policies"
SWITCH = "SPECSTOP_PLUGINS"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Builtin:
    """A built-in policy: its class, the parameter that a bare value after the colon sets, and its use."""

    build: Callable[..., StopPolicy]
    value: str
    usage: str


def build_bandit(
    explore: float = 2.0**0.5,
    kind: str = "ucb",
    arms: str = "fixed:2,fixed:4,fixed:8,confidence:0.4,entropy:0.6,maxprob:0.6",
) -> Bandit:
    """Return the bandit over the policies that `arms` names, with commas between them."""
    return Bandit([load_policy(arm) for arm in str(arms).split(",") if arm], kind, explore)


BUILTINS = {
    "fixed": Builtin(FixedLength, "length", "fixed:4 drafts 4 tokens a round; fixed:0 is plain decoding"),
    "confidence": Builtin(Confidence, "threshold", "confidence:0.4 stops below that draft probability"),
    "heuristic": Builtin(Heuristic, "start", "heuristic:20 drafts 2 more after full acceptance, else 1 less"),
    "heuristic-transient": Builtin(HeuristicTransient, "start", "heuristic-transient:20 starts anew with each text"),
    "roc": Builtin(Roc, "threshold", "roc:0.4 is confidence with a threshold fitted to the text so far"),
    "entropy": Builtin(EntropyBound, "level", "entropy:0.6 stops above that entropy of the draft (SVIP)"),
    "adaedl": Builtin(AdaEDL, "start", "adaedl:0.6 stops by an entropy bound that adapts from there"),
    "maxprob": Builtin(MaxProb, "threshold", "maxprob:0.6 stops below that largest probability (Kangaroo, p_min)"),
    "product": Builtin(Product, "threshold", "product:0.3 stops below that probability of the whole draft"),
    "online": Builtin(Online, "threshold", "online:0.4 stops below that survival, learned while decoding"),
    "bandit": Builtin(build_bandit, "explore", "bandit?kind=thompson&arms=fixed:2,fixed:6 picks a policy each round"),
    "ddd": Builtin(DDD, "threshold", "ddd:-0.5 stops below that log-probability of the beam"),
    "eagle": Builtin(Eagle, "nodes", "eagle:59 verifies the likeliest nodes of a tree (EAGLE-2)"),
    "opt": Builtin(OptTree, "delta", "opt:0.5 goes deeper while that much is expected of it (OPT-Tree)"),
    "c2t": Builtin(C2T, "bias", "c2t:2 prunes nodes by path probability, entropy and depth"),
    "gain": Builtin(Gain, "step", "gain:0.1 expands and verifies nodes worth their price in tokens"),
}
"""The policies that come with specstop."""


def plugins() -> dict[str, EntryPoint]:
    """Return the installed plugins by name, without importing them; two of one name are a `PolicyError`.

    The environment variable `SPECSTOP_PLUGINS=0` turns discovery off: there are none then.
    """
    found: dict[str, EntryPoint] = {}
    if os.environ.get(SWITCH) == "0":
        return found
    for point in entry_points(group=GROUP):
        if not _NAME.fullmatch(point.name):
            raise PolicyError(f"the policy {point.name!r} of {_origin(point)} needs a name of letters, digits, - and _")
        if point.name in found or point.name in BUILTINS:
            other = _origin(found[point.name]) if point.name in found else "a built-in"
            raise PolicyError(f"two policies are called {point.name!r}: {_origin(point)} and {other}; uninstall one")
        found[point.name] = point
    return found


def _origin(point: EntryPoint) -> str:
    """Return `module:name`, and the distribution where it is known."""
    return point.value + (f" of {point.dist.name} {point.dist.version}" if point.dist else "")


@dataclass(frozen=True)
class Listed:
    """A policy in a list: its name, where it comes from, its module, its use, and why it does not load ("" if it does)."""

    name: str
    where: str
    module: str
    what: str
    problem: str = ""


def listed_policies() -> list[Listed]:
    """Return the built-in policies, and the plugins with whether they load: this imports them."""
    found = [Listed(name, "built in", b.build.__module__, b.usage) for name, b in BUILTINS.items()]
    for name, point in plugins().items():
        where = f"{point.dist.name} {point.dist.version}" if point.dist else "?"
        try:
            build = _load(point)
            problem = "" if callable(build) else f"{point.value} is no class or function"
            takes = "" if problem else ", ".join(inspect.signature(build).parameters)
        except Exception as error:  # a plugin may be anything
            takes, problem = "", " ".join(str(error).removeprefix("--policy: ").split())
        found.append(
            Listed(name, where, point.module, f"{name}?key=value" + (f"; takes {takes}" if takes else ""), problem)
        )
    return found


def load_policy(spec: str | Path) -> StopPolicy:
    """Return the policy that `spec` names.

    Raises:
        PolicyError: no such policy (the message has the close match), a wrong value, or a broken folder.
    """
    text = str(spec)
    path = Path(text).expanduser()
    if (path / POLICY_FILE).is_file() or (path.is_dir() and ("/" in text or text.startswith("."))):
        return load_policy_folder(path)
    name, _, query = text.partition("?")
    name, colon, value = name.partition(":")
    known: dict[str, Any] = {**{key: builtin.build for key, builtin in BUILTINS.items()}, **plugins()}
    if name not in known:
        if text.startswith("hub:"):
            return from_pretrained(text.removeprefix("hub:"))
        if "/" in text or text.startswith("."):
            raise PolicyError(f"--policy: the folder {text} does not exist; one on the hub is written hub:owner/name")
        raise PolicyError(
            f"--policy: unknown policy {text!r}{close_match(name, known)}; expected a policy folder or one of "
            f"{', '.join(sorted(known))}"
        )
    arguments = _arguments(query, text)
    if colon:
        if name not in BUILTINS:
            raise PolicyError(f"--policy: {text!r}: write the plugin's options as {name}?key=value")
        arguments[BUILTINS[name].value] = number = _number(value)
        if isinstance(number, str):
            raise PolicyError(f"--policy: {text!r}: expected a number after the colon, not {value!r}")
    point = known[name]
    return _build(_load(point) if isinstance(point, EntryPoint) else point, arguments, text)


def _load(point: EntryPoint) -> Callable[..., Any]:
    try:
        build: Callable[..., Any] = point.load()
    except Exception as error:  # a plugin's import may raise anything
        raise PolicyError(
            f"--policy: the plugin {point.name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}"
        ) from None
    return build


def _build(build: Callable[..., Any], arguments: dict[str, Any], text: str) -> StopPolicy:
    if not callable(build):
        raise PolicyError(f"--policy: {text!r} is a {type(build).__name__}, not a StopPolicy")
    try:
        inspect.signature(build).bind(**arguments)
    except TypeError as error:
        takes = ", ".join(inspect.signature(build).parameters) or "nothing"
        raise PolicyError(f"--policy: {text!r}: {error}; it takes {takes}") from None
    try:
        policy = build(**arguments)
    except PolicyError:
        raise
    except Exception as error:  # a plugin may raise anything
        reason = str(error) if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
        raise PolicyError(f"--policy: {text!r}: {reason}") from None
    if not isinstance(policy, StopPolicy):
        raise PolicyError(f"--policy: {text!r} is a {type(policy).__name__}, not a StopPolicy")
    return policy


def _arguments(query: str, text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise PolicyError(f"--policy: {text!r}: expected key=value after the question mark, not {part!r}")
        arguments[key] = _number(value)
    return arguments


def _number(value: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
