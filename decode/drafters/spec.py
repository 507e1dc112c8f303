"""Specs of drafters, such as `suffix:FILE+hydra:PATH`: their syntax, and the drafters that they name."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, SpecstopWarning, close_match
from ...policies.registry import NAME, Registry, construct, read_number, set_option, split_spec
from ..models.pair import Pair
from ..topology import READINGS, parse_tree
from .base import Drafter
from .folder import load_drafter
from .model import ModelDrafter
from .suffix import file_hash

BUILTINS = {
    "model": "model:ModelDrafter",
    "lookup": "lookup:LookupDrafter",
    "suffix": "suffix:SuffixDrafter",
    "medusa": "heads:HeadsDrafter",
    "hydra": "heads:HeadsDrafter",
    "ctc": "ctc:CTCDrafter",
    "ctc-released": "ctc:ReleasedCTCDrafter",
    "layer": "layer:LayerDrafter",
}
"""The drafters of specstop: `module:class` by name."""

NETWORKS = {"medusa": "medusa", "hydra": "hydra", "ctc": "ctc", "ctc-released": "ctc", "layer": "layer"}
"""Kind of the network of each trained drafter."""

_VALUES = {"lookup": "longest", "suffix": "path", **dict.fromkeys(NETWORKS, "path")}
"""Parameter that the text after the colon sets."""


def _form(name: str) -> str:
    """Return the syntax of a drafter's spec, such as `suffix:PATH`."""
    return f"{name}:{_VALUES[name].upper()}" if name in _VALUES else name


def _usage(name: str, build: Callable[..., Any]) -> str:
    if name in BUILTINS:
        return _form(name) + (" of `specstop train-drafter`" if name in NETWORKS else "")
    names = [*inspect.signature(build).parameters][1:]
    draft = "; needs the draft model" if needs_draft(name) else ""
    return f"{name}?key=value{'; takes ' if names else ''}{', '.join(names)}{draft}"


DRAFTERS = Registry("specstop.drafters", "drafter", __package__, BUILTINS, _usage)
"""Classes or functions that construct a drafter for a pair. Those that use the draft model have `needs_draft = True`."""


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter of a spec.

    Attributes:
        text: the spec from this drafter on.
        name: of the drafter.
        options: by parameter, including the text after the colon; "" = it has no such parameter.
    """

    text: str
    name: str
    options: Mapping[str, Any]

    @property
    def path(self) -> str:
        """Folder or file that a built-in drafter reads, "" if there is none."""
        return str(self.options.get("path", "")) if self.name in _VALUES else ""

    def format(self, change_path: Callable[[str], str]) -> str:
        """Return the spec of this drafter alone with another path."""
        options = dict(self.options)
        if self.path:
            options["path"] = change_path(self.path)
        value = options.pop(_VALUES.get(self.name, ""), None)
        query = "&".join(f"{key}={options[key]}" for key in sorted(options))
        return self.name + ("" if value is None else f":{value}") + (f"?{query}" if query else "")

    def attribute(self, name: str) -> Any:
        """Return a class attribute of the drafter, without constructing it; the default if the drafter is not installed."""
        value = getattr(DRAFTERS.load(self.name) or Drafter, name, getattr(Drafter, name))
        allowed = READINGS if name == "reading" else (False, True)
        if value not in allowed:
            raise InputError(
                f"--drafter: {self.name}: expected for {name} {', '.join(map(str, allowed))}, not {value!r}"
            )
        return value


def parse_spec(text: str) -> list[DrafterSpec]:
    """Return the drafters of a spec, without a check that they exist.

    Raises:
        InputError: an option is not `key=value` or is given twice.
    """
    where = f"--drafter: {text!r}"
    # Paths and values may contain plus signs: one counts after a bare name, or before a known one.
    signs = (
        at
        for at, sign in enumerate(text)
        if sign == "+"
        and (NAME.fullmatch(text[:at]) or re.split("[:?+]", text[at + 1 :], maxsplit=1)[0] in DRAFTERS.names())
    )
    end = next(signs, len(text))
    name, value, options = split_spec(text[:end], where)
    if value is not None:
        parameter = _VALUES.get(name, "") if value else ""
        set_option(options, parameter, value if parameter == "path" else read_number(value), where)
    if end == len(text):
        return [DrafterSpec(text, name, options)]
    return [DrafterSpec(text, name, options), *parse_spec(text[end + 1 :])]


def check_drafter(name: str) -> None:
    """Raise `InputError` if a drafter of a spec does not exist. Options are checked when it is constructed."""
    for part in parse_spec(name):
        exists = part.name in BUILTINS or DRAFTERS.load(part.name)  # a search for plugins takes milliseconds
        lacks_path = part.name in NETWORKS and set(part.options) != {"path"}
        if not exists or lacks_path or "" in part.options:
            names = DRAFTERS.names()
            match = "" if part.name in names else close_match(part.name, names)
            raise InputError(
                f"--drafter: expected one of {', '.join(map(_form, names))}, or several such as suffix+model, not "
                f"{part.text!r}{match}; options are written NAME?key=value"
            )


def needs_draft(name: str) -> bool:
    """Return whether a spec uses the draft model of the pair; plugins are imported to find out."""
    return any(part.attribute("needs_draft") for part in parse_spec(name))


def reads_states(name: str) -> bool:
    """Return whether a spec names a trained drafter, which reads hidden states of the target."""
    return any(part.name in NETWORKS for part in parse_spec(name))


def spec_paths(name: str) -> list[str]:
    """Return the folders and files that a spec names."""
    return [part.path for part in parse_spec(name) if part.path]


def change_paths(name: str, change: Callable[[str], str]) -> str:
    """Return a spec with other folders and files; `change` returns the new path for an old one."""
    return "+".join(part.format(change) for part in parse_spec(name))


def find_drafters(name: str, pair: Pair) -> list[Drafter]:
    """Return the drafters of a spec.

    Args:
        name: `model`, `lookup`, `lookup:4` (at most four tokens of context), `suffix`, `suffix:FILE`, a trained drafter such
            as `medusa:PATH`, a plugin `name?key=value`, or several: `suffix+model`, `suffix:FILE+medusa:PATH`.
        pair: that they draft for.

    Raises:
        InputError: there is no such drafter, or it cannot be constructed.
    """
    if name == "model":  # the usual spec needs no search for plugins
        return [ModelDrafter(pair)]
    check_drafter(name)
    return [_build(part, pair) for part in parse_spec(name)]


def drafter_names(name: str) -> tuple[str, ...]:
    """Return the names of the drafters of a spec. Of several with one name, later ones have a number: `layer`, `layer2`."""
    names: list[str] = []
    parts = [part.name for part in parse_spec(name)]
    for index, part in enumerate(parts):
        count = parts[: index + 1].count(part)
        names.append(part if count == 1 else f"{part}{count}")
    return tuple(names)


def drafter_index(policy: StopPolicy, names: Sequence[str]) -> int:
    """Return the index of the drafter of a policy that does not route: the first one, or the one that it names.

    Raises:
        PolicyError: it names another drafter.
    """
    if not policy.drafter:
        return 0
    if policy.drafter not in names:
        raise PolicyError(f"{policy.name}: expected one of the drafters {', '.join(names)}, got {policy.drafter!r}")
    return names.index(policy.drafter)


def routed_drafters(policy: StopPolicy, name: str) -> tuple[str, ...]:
    """Return the names of the drafters of a spec that a policy chooses from; empty if it does not route."""
    names = drafter_names(name)
    return names if policy.routes and len(names) > 1 else ()


def each_drafter(pair: Pair) -> list[Pair]:
    """Return the pair with each of its drafters as the only one."""
    parts = parse_spec(pair.drafter)
    return [pair] if len(parts) == 1 else [with_drafter(pair, part.format(str)) for part in parts]


def one_drafter(pair: Pair, policy: StopPolicy | None) -> Pair:
    """Return the pair with only the drafter that a policy which does not route uses."""
    index = 0 if policy is None else drafter_index(policy, drafter_names(pair.drafter))
    return each_drafter(pair)[index]


def with_drafter(pair: Pair, name: str) -> Pair:
    """Return the pair with another default drafter.

    Raises:
        InputError: see `find_drafters`.
    """
    if name == pair.drafter:
        return pair
    new, needs = pair, needs_draft(name)
    if not needs:
        new = dataclasses.replace(pair, draft=None, engines=(pair.engines[0], "plain"))
    find_drafters(name, new)  # raises errors now instead of in the middle of a run
    draft = (_draft_hash(pair),) if needs else ()
    identity = "+".join(_identity(part, *draft) for part in parse_spec(name))
    return dataclasses.replace(new, hashes=(pair.fingerprint["target"], identity, *draft), drafter=name)


def _build(part: DrafterSpec, pair: Pair) -> Drafter:
    where, build = f"--drafter: {part.text!r}", DRAFTERS.load(part.name)
    assert build is not None  # of `check_drafter`
    if part.attribute("needs_draft"):
        _ = pair.draft_model  # raises an error if there is none
    if part.name in NETWORKS:
        drafter = construct(build, where, {}, pair, _shared_network(part, pair))
    else:
        drafter = construct(build, where, part.options, pair)
    if not isinstance(drafter, Drafter):
        raise InputError(
            f"{where} is a {type(drafter).__name__}, not a Drafter; subclass specstop.decode.drafters.Drafter"
        )
    return drafter


def _draft_hash(pair: Pair) -> str:
    """Return the hash of the draft model of a pair, the last one of a pair with another drafter."""
    return pair.hashes[-1] if pair.hashes else pair.fingerprint["draft"]


def _identity(part: DrafterSpec, draft: str = "") -> str:
    """Return a text that identifies a drafter; folders and files are identified by their contents, the draft by its hash."""
    if part.name == "model":
        return draft
    if part.name in NETWORKS:
        identity = load_drafter(part.path, weights=False).identity
        return identity if part.name == NETWORKS[part.name] else f"{part.name}:{identity}"
    return part.format(file_hash) + (f"+{draft}" if part.attribute("needs_draft") else "")


_SHARED: WeakKeyDictionary[PreTrainedModel, tuple[Any, Any]] = WeakKeyDictionary()
"""By target, key and network of the last trained drafter: loops share it, and `generate` creates a loop per call."""


def _shared_network(part: DrafterSpec, pair: Pair) -> Any:
    identity = load_drafter(part.path, weights=False).identity
    key = (part.name, identity, pair.fingerprint["target"], pair.device, pair.target.dtype)
    last_key, network = _SHARED.get(pair.target, (None, None))
    if key != last_key:
        network = load_drafter(part.path, kind=NETWORKS[part.name]).network_for(pair)
        _SHARED[pair.target] = key, network
    return network


def warn_depth_limited(pair: Pair, depth: int, tree: str | None = None) -> None:
    """Warn if a tree is deeper than `--depth`, or if a trained drafter does not reach the depth.

    Raises:
        InputError: the tree cannot be read (`parse_tree`), or see `find_drafters`.
    """
    deepest = depth if tree is None else parse_tree(tree).deepest
    if deepest > depth:
        text = f"--tree {tree}: nodes deeper than {depth} are left out; give --depth {deepest} for all"
        warnings.warn(text, SpecstopWarning, stacklevel=3)
    drafters = find_drafters(pair.drafter, pair) if reads_states(pair.drafter) else []
    limit = min((one.max_depth for one in drafters if one.max_depth is not None), default=deepest)
    if limit < min(depth, deepest):
        text = (
            f"--drafter {pair.drafter}: proposes {limit} tokens at most, so that most rounds stay shorter than {depth}"
        )
        warnings.warn(text, SpecstopWarning, stacklevel=3)
