"""Which drafters there are: those that come with specstop, and those of installed packages; and what they need."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NamedTuple

from ...policies.errors import InputError, PolicyError, close_match
from ...policies.plugins import DRAFTER_PLUGINS, PluginInfo, known_names, parameters, split_first
from ..models.pair import Pair
from .base import READINGS, READS_PATH, Drafter
from .heads.collapsed import ReleasedCTCDrafter
from .heads.ctc import CTCDrafter
from .heads.drafter import HeadsDrafter
from .heads.layer import LayerDrafter
from .lookup import LookupDrafter
from .model import ModelDrafter
from .names import Named, as_input, read_name
from .suffix import SuffixDrafter


class Builtin(NamedTuple):
    """A drafter that needs no training: what makes it of a pair, the parameter that is set after the colon, and its use."""

    build: Callable[..., Drafter]
    value: str
    usage: str


BUILTINS: dict[str, Builtin] = {
    "model": Builtin(ModelDrafter, "", "the draft model, --draft"),
    "lookup": Builtin(LookupDrafter, "longest", "lookup:4 looks for the last four tokens at most"),
    "suffix": Builtin(SuffixDrafter, "path", "suffix:FILE searches a file too, suffix?keep=1 earlier texts"),
}


class Trained(NamedTuple):
    """A drafter that is trained: what makes it of a pair and the network in a folder, and the kind of that network."""

    build: Callable[[Pair, Any], Drafter]
    network: str


TRAINED: dict[str, Trained] = {
    "medusa": Trained(HeadsDrafter, "medusa"),
    "hydra": Trained(HeadsDrafter, "hydra"),
    "ctc": Trained(CTCDrafter, "ctc"),
    "ctc-released": Trained(ReleasedCTCDrafter, "ctc"),
    "layer": Trained(LayerDrafter, "layer"),
}
"""By name; the folder is named after the colon."""


@as_input()
def check_drafter(name: str) -> None:
    """Raise `InputError` where there is no drafter of that name, or its spec cannot be read; its values are not looked at."""
    for part in read_known(name).parts():
        found = (
            part.value and not part.options
            if part.kind in TRAINED
            else part.kind in BUILTINS or DRAFTER_PLUGINS.find(part.kind)
        )
        if not found:
            raise unknown(part)


@as_input()
def needs_draft(name: str) -> bool:
    """Whether a spec takes the pair's draft model; to ask a plugin it is imported.

    Raises:
        InputError: the spec cannot be read, or a plugin does not load.
    """
    return any(takes_draft(part.kind) for part in read_known(name).parts())


@as_input()
def reads_states(name: str) -> bool:
    """Whether a spec names a trained drafter, which reads the target's hidden states; a plugin's tells by its `layers`."""
    return any(part.kind in TRAINED for part in read_known(name).parts())


@as_input()
def drafts_in_turn(name: str) -> bool:
    """Whether a spec names several drafters, of which one or another drafts a round."""
    return len([*read_known(name).parts()]) > 1


@as_input()
def reading_of(name: str) -> str:
    """Return what a spec's drafter reads before a round (`base.READINGS`).

    Raises:
        InputError: the spec cannot be read.
        PolicyError: a plugin does not load, or says something else.
    """
    kind = [*read_known(name).parts()][-1].kind  # of several only the last one may have something to read
    if made := BUILTINS.get(kind) or TRAINED.get(kind):
        return str(getattr(made.build, "reading", READS_PATH))
    if (point := DRAFTER_PLUGINS.find(kind)) is None:
        return READS_PATH
    says = getattr(DRAFTER_PLUGINS.load(point), "reading", READS_PATH)
    if says not in READINGS:
        raise PolicyError(f"--drafter: {point.value}: expected for reading {', '.join(READINGS)}, not {says!r}")
    return str(says)


@as_input()
def paths_of(name: str) -> list[str]:
    """Return the folders and files that a spec names."""
    values = [(part.kind, part.options.get("path", part.value)) for part in read_known(name).parts()]
    return [str(value) for kind, value in values if value is not None and kind in ("suffix", *TRAINED)]


def with_full_paths(name: str) -> str:
    """Return a spec whose folders and files are named from the root, as it is read in any folder."""
    own, rest = split_first(name, known_names(name))
    head, mark, query = own.partition("?")
    kind, colon, value = head.partition(":")
    if kind in ("suffix", *TRAINED):
        value = _full(value)
        options = (option.partition("=") for option in query.split("&"))
        query = "&".join(key + sign + (_full(to) if key == "path" else to) for key, sign, to in options)
    made = kind + colon + value + mark + query
    return made if rest is None else f"{made}+{with_full_paths(rest)}"


def _full(path: str) -> str:
    return str(Path(path).expanduser().resolve()) if path else ""


def listed_drafters() -> list[PluginInfo]:
    """Return the drafters that come with specstop, and the plugins with whether they load: this imports them."""
    own = {name: (made.build.__module__, made.usage) for name, made in BUILTINS.items()}
    trained = {
        name: (made.build.__module__, f"{name}:PATH of `specstop train-drafter --kind {made.network}`")
        for name, made in TRAINED.items()
    }
    return DRAFTER_PLUGINS.listed(own | trained, _usage)


def _usage(point: EntryPoint) -> str:
    """Return how a plugin is written in a spec."""
    takes = [*parameters(DRAFTER_PLUGINS.load(point), f"{point.name!r}")][1:]
    draft = "; needs the draft model" if takes_draft(point.name) else ""
    return f"{point.name}?key=value{'; takes ' if takes else ''}{', '.join(takes)}{draft}"


def read_known(name: str) -> Named:
    """Return what a spec says; see `read_name`."""
    return read_name(name, known_names(name))


def takes_draft(kind: str) -> bool:
    """Whether drafters of a name take the pair's draft model; `PolicyError` where a plugin does not load."""
    if kind in BUILTINS or kind in TRAINED:
        return kind == "model"
    if (point := DRAFTER_PLUGINS.find(kind)) is None:
        return False
    says = getattr(DRAFTER_PLUGINS.load(point), "needs_draft", False)
    if not isinstance(says, bool):
        raise PolicyError(f"--drafter: {point.value}: expected for needs_draft True or False, not {says!r}")
    return says


def unknown(named: Named) -> InputError:
    """Return the error of a spec that names none of them."""
    plugins = sorted(DRAFTER_PLUGINS.usable())
    known = [*BUILTINS, *TRAINED, *plugins]
    more = f", or a plugin's ({', '.join(plugins)})" if plugins else ""
    meant = "" if named.kind in known else close_match(named.kind, known)
    trained = ", ".join(f"{kind}:PATH" for kind in TRAINED)
    return InputError(
        f"--drafter: expected model, lookup, lookup:LENGTH, suffix, suffix:FILE, {trained}, two such as "
        f"suffix+model{more}, not {named.text!r}{meant}"
    )
