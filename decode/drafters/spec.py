"""Specs of drafters, such as `suffix:FILE?sure=0.6+hydra:PATH`: their syntax, and the drafters that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ...policies.errors import InputError, PolicyError, SpecstopWarning, close_match
from ...policies.host import plugin_errors
from ...policies.plugins import (
    DRAFTER_PLUGINS,
    PluginInfo,
    check_options,
    parameters,
    read_number,
    set_option,
    split_first,
    split_spec,
)
from ..models.pair import Pair
from ..topology import parse_tree
from .base import READINGS, REQUIRED, Drafter
from .fallback import MIN_CONFIDENCE, FallbackDrafter
from .folder import TrainedDrafter, load_drafter
from .heads.ctc import CTCDrafter, ReleasedCTCDrafter
from .heads.layer import LayerDrafter
from .heads.medusa import HeadsDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .suffix import SuffixDrafter, file_hash


class Entry(NamedTuple):
    """A drafter of specstop: its class, and the parameter set after the colon, or the kind of its network."""

    build: Callable[..., Drafter]
    value: str = ""
    network: str = ""


BUILTINS = {
    "model": Entry(ModelDrafter),
    "lookup": Entry(LookupDrafter, "longest"),
    "suffix": Entry(SuffixDrafter, "path"),
}
TRAINED = {
    "medusa": Entry(HeadsDrafter, network="medusa"),
    "hydra": Entry(HeadsDrafter, network="hydra"),
    "ctc": Entry(CTCDrafter, network="ctc"),
    "ctc-released": Entry(ReleasedCTCDrafter, network="ctc"),
    "layer": Entry(LayerDrafter, network="layer"),
}
"""By name; the folder follows the colon."""

_USAGE = {
    "model": "the draft model, --draft",
    "lookup": "lookup:4 looks for the last four tokens at most",
    "suffix": "suffix:FILE searches a file too, suffix?keep=1 earlier texts",
    **{name: f"{name}:PATH of `specstop train-drafter --kind {entry.network}`" for name, entry in TRAINED.items()},
}


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter of a spec.

    Attributes:
        text: the spec from here on.
        kind: name of the drafter.
        value: text after the colon; None = none.
        options: options after the question mark.
        min_confidence: option `sure`, from which confidence on the drafter is used instead of the next one.
        other: the next drafter; None = none.
    """

    text: str
    kind: str
    value: str | None
    options: Mapping[str, Any]
    min_confidence: float = MIN_CONFIDENCE
    other: DrafterSpec | None = None

    def parts(self) -> list[DrafterSpec]:
        """Return this drafter and the following ones."""
        return [self, *(self.other.parts() if self.other is not None else ())]


@contextlib.contextmanager
def _as_input_error() -> Iterator[None]:
    try:
        yield
    except PolicyError as error:
        raise InputError(error.command_line) from None


@_as_input_error()
def parse_spec(text: str) -> DrafterSpec:
    """Return the meaning of a spec, without a check that its drafters exist.

    Raises:
        InputError: an option is not `key=value` or is given twice, or `sure` is not between 0 and 1.
    """
    first, rest = split_first(text)
    where = f"--drafter: {text!r}"
    kind, value, options = split_spec(first, where)
    spec = DrafterSpec(text, kind, value, options)
    if rest is None:
        return spec
    sure = options.pop("sure", MIN_CONFIDENCE)
    if not isinstance(sure, int | float) or not 0.0 <= sure <= 1.0:
        raise PolicyError(f"{where}: expected for sure a chance between 0 and 1, not {sure!r}")
    return dataclasses.replace(spec, min_confidence=float(sure), other=parse_spec(rest))


@_as_input_error()
def check_drafter(name: str) -> None:
    """Raise `InputError` if a drafter of a spec does not exist."""
    for part in parse_spec(name).parts():
        if part.kind in TRAINED:
            _trained_path(part)
        elif part.kind not in BUILTINS and DRAFTER_PLUGINS.find(part.kind) is None:
            raise _unknown(part)


@_as_input_error()
def needs_draft(name: str) -> bool:
    """Return whether a spec uses the draft model of the pair; plugins are imported to find out.

    Raises:
        InputError: the spec cannot be read, or a plugin does not load.
    """
    return any(_attribute(part.kind, "needs_draft", (False, True)) for part in parse_spec(name).parts())


def reads_states(name: str) -> bool:
    """Return whether a spec names a trained drafter, which reads hidden states of the target."""
    return any(part.kind in TRAINED for part in parse_spec(name).parts())


def drafts_in_turn(name: str) -> bool:
    """Return whether a spec names several drafters, one of which drafts each round."""
    return parse_spec(name).other is not None


@_as_input_error()
def reading_of(name: str) -> str:
    """Return `Drafter.reading` of the last drafter of a spec, the only one that may have a backlog.

    Raises:
        InputError: the spec cannot be read, or a plugin does not load or has another value.
    """
    return str(_attribute(parse_spec(name).parts()[-1].kind, "reading", READINGS))


def _attribute(kind: str, name: str, allowed: tuple[Any, ...]) -> Any:
    """Return a class attribute of a drafter; the default, which is the first allowed value, if there is no such drafter."""
    if builtin := BUILTINS.get(kind) or TRAINED.get(kind):
        return getattr(builtin.build, name)
    if (point := DRAFTER_PLUGINS.find(kind)) is None:
        return allowed[0]
    value = getattr(DRAFTER_PLUGINS.load(point), name, allowed[0])
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise PolicyError(
            f"--drafter: {point.value}: expected for {name} {', '.join(map(str, allowed))}, not {value!r}"
        )
    return value


def paths_of(name: str) -> list[str]:
    """Return the folders and files that a spec names."""
    values = [(part.kind, part.options.get("path", part.value)) for part in parse_spec(name).parts()]
    return [str(value) for kind, value in values if value is not None and kind in ("suffix", *TRAINED)]


def with_full_paths(name: str) -> str:
    """Return a spec with absolute paths."""
    first, rest = split_first(name)
    head, mark, query = first.partition("?")
    kind, colon, value = head.partition(":")
    if kind in ("suffix", *TRAINED):
        value = _absolute(value)
        options = (option.partition("=") for option in query.split("&"))
        query = "&".join(key + sign + (_absolute(path) if key == "path" else path) for key, sign, path in options)
    spec = kind + colon + value + mark + query
    return spec if rest is None else f"{spec}+{with_full_paths(rest)}"


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def listed_drafters() -> list[PluginInfo]:
    """Return built-in drafters and plugins, with the reason if a plugin does not load. Plugins are imported."""
    entries = (BUILTINS | TRAINED).items()
    return DRAFTER_PLUGINS.listed({name: (entry.build.__module__, _USAGE[name]) for name, entry in entries}, _usage)


def _usage(point: EntryPoint) -> str:
    names = [*parameters(DRAFTER_PLUGINS.load(point), f"{point.name!r}")][1:]
    draft = "; needs the draft model" if _attribute(point.name, "needs_draft", (False, True)) else ""
    return f"{point.name}?key=value{'; takes ' if names else ''}{', '.join(names)}{draft}"


def _unknown(spec: DrafterSpec) -> InputError:
    plugins = sorted(DRAFTER_PLUGINS.usable())
    known = [*BUILTINS, *TRAINED, *plugins]
    more = f", or a plugin's ({', '.join(plugins)})" if plugins else ""
    match = "" if spec.kind in known else close_match(spec.kind, known)
    trained = ", ".join(f"{kind}:PATH" for kind in TRAINED)
    return InputError(
        f"--drafter: expected model, lookup, lookup:LENGTH, suffix, suffix:FILE, {trained}, two such as "
        f"suffix+model{more}, not {spec.text!r}{match}"
    )


@_as_input_error()
def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter of a spec.

    Args:
        name: `model`, `lookup`, `lookup:4` (at most four tokens of context), `suffix`, `suffix:FILE`, a trained drafter such
            as `medusa:PATH`, a plugin `name?key=value`, or two: `suffix+model`, `suffix:FILE?sure=0.6+medusa:PATH`
            (`FallbackDrafter`).
        pair: that it drafts for.

    Raises:
        InputError: there is no such drafter, or it cannot be constructed.
    """
    # The usual spec needs no search for plugins.
    return ModelDrafter(pair) if name == "model" else _build(parse_spec(name), pair)


@_as_input_error()
def with_drafter(pair: Pair, name: str) -> Pair:
    """Return the pair with another default drafter.

    Raises:
        InputError: see `find_drafter`.
    """
    if name == "model":
        return pair
    spec, new = parse_spec(name), pair
    if not needs_draft(name):
        new = dataclasses.replace(pair, draft=None, engines=(pair.engines[0], "plain"))
    _build(spec, new)  # raises errors now instead of in the middle of a run
    hashes = pair.fingerprint["target"], _identity(spec, pair)
    return dataclasses.replace(new, hashes=hashes, drafter=name)


def _build(spec: DrafterSpec, pair: Pair) -> Drafter:
    first = _build_one(spec, pair)
    if spec.other is None:
        return first
    if first.layers or _attribute(spec.kind, "needs_draft", (False, True)):
        raise InputError(
            f"--drafter: {spec.text!r}: expected first one that reads neither hidden states nor a draft model, such as "
            f"suffix, not {spec.kind}"
        )
    return FallbackDrafter(pair, first, _build(spec.other, pair), spec.min_confidence)


def _build_one(spec: DrafterSpec, pair: Pair) -> Drafter:
    where = f"--drafter: {spec.text!r}"
    if spec.kind in TRAINED:
        return TRAINED[spec.kind].build(pair, _shared_network(spec.kind, _trained_path(spec), pair))
    point = DRAFTER_PLUGINS.find(spec.kind)  # raises an error for a built-in if a plugin has its name
    if spec.kind in BUILTINS:
        build, options = BUILTINS[spec.kind].build, _builtin_options(spec)
        check_options(build, where, options, pair)
        return build(pair, **options)
    if point is None:
        raise _unknown(spec)
    if spec.value is not None:
        raise InputError(f"{where}: write the plugin's options as {spec.kind}?key=value")
    build = DRAFTER_PLUGINS.load(point)
    if _attribute(spec.kind, "needs_draft", (False, True)):
        _ = pair.draft_model  # raises an error if there is none
    check_options(build, where, spec.options, pair)
    with plugin_errors("--drafter", f"making {spec.text!r} ({point.value})"):
        drafter: Drafter = build(pair, **spec.options)
        missing = [name for name in REQUIRED if not hasattr(drafter, name)]
    if missing:
        raise InputError(f"{where} is a {type(drafter).__name__}, which lacks {', '.join(missing)} of a Drafter")
    return drafter


def _trained_path(spec: DrafterSpec) -> str:
    if not spec.value or spec.options:
        raise _unknown(spec)
    return spec.value


def _builtin_options(spec: DrafterSpec) -> dict[str, Any]:
    """Return the options of a built-in drafter, including the value after the colon."""
    options, parameter = dict(spec.options), BUILTINS[spec.kind].value
    if spec.value is not None:
        if not parameter or not spec.value:
            raise _unknown(spec)
        value = spec.value if parameter == "path" else read_number(spec.value)
        set_option(options, parameter, value, f"--drafter: {spec.text!r}")
    return options


def _identity(spec: DrafterSpec, pair: Pair) -> str:
    """Return a text that identifies a drafter; folders and files are identified by their contents."""
    if spec.kind == "model":
        return pair.fingerprint["draft"]
    if spec.kind in TRAINED:
        identity = load_drafter(str(spec.value), weights=False).identity
        return identity if spec.kind == TRAINED[spec.kind].network else f"{spec.kind}:{identity}"
    options, value = dict(spec.options), None
    if spec.kind in BUILTINS:
        options = _builtin_options(spec)
        value = options.pop(BUILTINS[spec.kind].value, None)
        if value and spec.kind == "suffix":
            value = file_hash(value)
    words = [f"{key}={options[key]}" for key in sorted(options)]
    if spec.other is not None:
        words.append(f"sure={spec.min_confidence:g}")
    own = spec.kind + ("" if value is None else f":{value}") + ("?" + "&".join(words) if words else "")
    draft = "+" + pair.fingerprint["draft"] if _attribute(spec.kind, "needs_draft", (False, True)) else ""
    return own + draft + ("" if spec.other is None else "+" + _identity(spec.other, pair))


_NETWORKS: WeakKeyDictionary[PreTrainedModel, tuple[Any, Any]] = WeakKeyDictionary()
"""By target, key and network of the last trained drafter: loops share it, and `generate` creates a loop per call."""

_LOADING = threading.Lock()


def load_trained(kind: str, path: str) -> TrainedDrafter:
    """Return the trained drafter of a spec such as `medusa:PATH`; `kind` is a key of `TRAINED`.

    Raises:
        InputError: see `load_drafter`, or the network is of another kind.
    """
    trained = load_drafter(path)
    if trained.kind != TRAINED[kind].network:
        raise InputError(f"--drafter: {path} holds a drafter of the kind {trained.kind}: write {trained.kind}:{path}")
    return trained


def _shared_network(kind: str, path: str, pair: Pair) -> Any:
    identity = load_drafter(path, weights=False).identity
    key = (kind, identity, pair.fingerprint["target"], pair.device, pair.target.dtype)
    with _LOADING:
        last_key, network = _NETWORKS.get(pair.target, (None, None))
        if key != last_key:
            trained = load_trained(kind, path)
            try:
                network = trained.network_for(pair)
            except InputError as error:
                raise InputError(f"--drafter: {path}: {error.command_line}") from None
            _NETWORKS[pair.target] = key, network
    return network


def warn_depth_limited(pair: Pair, depth: int, tree: str | None = None) -> None:
    """Warn if a tree is deeper than `--depth`, or if a trained drafter does not reach the depth.

    Args:
        pair: with its drafter.
        depth: of the rounds that are recorded or timed.
        tree: see `parse_tree`; None = a chain.

    Raises:
        InputError: the tree cannot be read, or see `find_drafter`.
    """
    deepest = depth if tree is None else parse_tree(tree).deepest
    if deepest > depth:
        text = f"--tree {tree}: nodes deeper than {depth} are left out; give --depth {deepest} for all"
        warnings.warn(text, SpecstopWarning, stacklevel=3)
    limit = find_drafter(pair.drafter, pair).max_depth if reads_states(pair.drafter) else None
    if limit is not None and limit < (reached := min(depth, deepest)):
        text = f"proposes {limit} tokens at most, so that rounds of {reached} stay shorter"
        # With two drafters the first one still reaches the depth.
        text = f"the second drafter {text}" if drafts_in_turn(pair.drafter) else f"{text}; give --depth {limit}"
        warnings.warn(f"--drafter {pair.drafter}: {text}", SpecstopWarning, stacklevel=3)
