"""Specs of drafters, such as `suffix:FILE?confidence=0.6+hydra:PATH`: their syntax, and the drafters that they name."""

from __future__ import annotations

import dataclasses
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...policies.errors import InputError, SpecstopWarning, close_match
from ...policies.registry import NAME, Registry, construct, read_number, set_option, split_spec
from ..models.pair import Pair
from ..topology import parse_tree
from .base import READINGS, Drafter
from .fallback import MIN_CONFIDENCE, FallbackDrafter
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
        min_confidence: option `confidence`, from which confidence on it is used instead of the next drafter.
    """

    text: str
    name: str
    options: Mapping[str, Any]
    min_confidence: float = MIN_CONFIDENCE

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
        if self.min_confidence != MIN_CONFIDENCE:
            options["confidence"] = f"{self.min_confidence:g}"
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
        InputError: an option is not `key=value` or is given twice, or `confidence` is not between 0 and 1.
    """
    where, known = f"--drafter: {text!r}", DRAFTERS.names() if "+" in text else ()
    # Paths and values may contain plus signs: one counts after a bare name, or before a known one.
    signs = (
        at
        for at, sign in enumerate(text)
        if sign == "+" and (NAME.fullmatch(text[:at]) or re.split("[:?+]", text[at + 1 :], maxsplit=1)[0] in known)
    )
    end = next(signs, len(text))
    name, value, options = split_spec(text[:end], where)
    if value is not None:
        parameter = _VALUES.get(name, "") if value else ""
        set_option(options, parameter, value if parameter == "path" else read_number(value), where)
    if end == len(text):
        return [DrafterSpec(text, name, options)]
    confidence = options.pop("confidence", MIN_CONFIDENCE)
    if not isinstance(confidence, int | float) or not 0.0 <= confidence <= 1.0:
        raise InputError(f"{where}: expected for confidence a probability between 0 and 1, not {confidence!r}")
    return [DrafterSpec(text, name, options, float(confidence)), *parse_spec(text[end + 1 :])]


def check_drafter(name: str) -> None:
    """Raise `InputError` if a drafter of a spec does not exist. Options are checked when it is constructed."""
    for part in parse_spec(name):
        exists = part.name in BUILTINS or DRAFTERS.load(part.name)  # a search for plugins takes milliseconds
        lacks_path = part.name in NETWORKS and set(part.options) != {"path"}
        if not exists or lacks_path or "" in part.options:
            names = DRAFTERS.names()
            match = "" if part.name in names else close_match(part.name, names)
            raise InputError(
                f"--drafter: expected one of {', '.join(map(_form, names))}, or two such as suffix+model, not "
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


def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter of a spec.

    Args:
        name: `model`, `lookup`, `lookup:4` (at most four tokens of context), `suffix`, `suffix:FILE`, a trained drafter such
            as `medusa:PATH`, a plugin `name?key=value`, or two: `suffix+model`, `suffix:FILE?confidence=0.6+medusa:PATH`
            (`FallbackDrafter`).
        pair: target, and the draft model if the drafter needs one.

    Raises:
        InputError: there is no such drafter, or it cannot be constructed.
    """
    if name == "model":  # the usual spec needs no search for plugins
        return ModelDrafter(pair)
    check_drafter(name)
    *before, last = parse_spec(name)
    drafter = _build(last, pair)
    for part in reversed(before):
        first = _build(part, pair)
        if first.layers or part.attribute("needs_draft"):
            raise InputError(
                f"--drafter: {part.text!r}: expected first one that reads neither hidden states nor a draft model, such as "
                f"suffix, not {part.name}"
            )
        drafter = FallbackDrafter(pair, first, drafter, part.min_confidence)
    return drafter


def with_drafter(pair: Pair, name: str) -> Pair:
    """Return the pair with another default drafter.

    Raises:
        InputError: see `find_drafter`.
    """
    if name == "model":
        return pair
    new = pair
    if not needs_draft(name):
        new = dataclasses.replace(pair, draft=None, engines=(pair.engines[0], "plain"))
    find_drafter(name, new)  # raises errors now instead of in the middle of a run
    identity = "+".join(_identity(part, pair) for part in parse_spec(name))
    return dataclasses.replace(new, hashes=(pair.fingerprint["target"], identity), drafter=name)


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


def _identity(part: DrafterSpec, pair: Pair) -> str:
    """Return a text that identifies a drafter; folders and files are identified by their contents."""
    if part.name == "model":
        return pair.fingerprint["draft"]
    if part.name in NETWORKS:
        identity = load_drafter(part.path, weights=False).identity
        return identity if part.name == NETWORKS[part.name] else f"{part.name}:{identity}"
    return part.format(file_hash) + (f"+{pair.fingerprint['draft']}" if part.attribute("needs_draft") else "")


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
        InputError: the tree cannot be read (`parse_tree`), or see `find_drafter`.
    """
    deepest = depth if tree is None else parse_tree(tree).deepest
    if deepest > depth:
        text = f"--tree {tree}: nodes deeper than {depth} are left out; give --depth {deepest} for all"
        warnings.warn(text, SpecstopWarning, stacklevel=3)
    limit = find_drafter(pair.drafter, pair).max_depth if reads_states(pair.drafter) else None
    if limit is not None and limit < min(depth, deepest):
        text = (
            f"--drafter {pair.drafter}: proposes {limit} tokens at most, so that most rounds stay shorter than {depth}"
        )
        warnings.warn(text, SpecstopWarning, stacklevel=3)
