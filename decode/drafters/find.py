"""Drafters by name: made for a pair, and put in the place of its draft model."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...policies.errors import InputError
from ...policies.storage.drafter_names import PLUGINS
from ...policies.storage.specs import check_options, parameters, read_number
from ...policies.validation import plugin_errors
from ..models.pair import Pair
from .base import Drafter, lacks
from .either import EitherDrafter
from .folder import drafter_identity
from .known import BUILTINS, TRAINED, needs_draft, read_known, takes_draft, unknown
from .model import ModelDrafter
from .names import Named, as_input
from .shared import shared_network
from .suffix import file_hash


@as_input()
def find_drafter(name: str, pair: Pair) -> Drafter:
    """Return the drafter that a spec names.

    Args:
        name: `model`, `lookup`, `lookup:4` (looks for four tokens at most), `suffix`, `suffix:FILE`, a trained one by its
            folder, such as `medusa:PATH`, a plugin's: `name?key=value`, or two at once: `suffix+model`,
            `suffix:FILE?sure=0.6+medusa:PATH` (`EitherDrafter`).
        pair: that it drafts for.

    Raises:
        InputError: there is none of that name, or it cannot be made so.
    """
    # What every pair drafts by unless it is told otherwise: no installed package is looked at.
    return ModelDrafter(pair) if name == "model" else _make(read_known(name), pair)


@as_input()
def with_drafter(pair: Pair, name: str) -> Pair:
    """Return a pair whose candidates come from a drafter in the place of its draft model, wherever none is named.

    Raises:
        InputError: see `find_drafter`.
    """
    if name == "model":
        return pair
    named, used = read_known(name), pair
    if not needs_draft(name):
        used = dataclasses.replace(pair, draft=None, engines=(pair.engines[0], "plain"))
    _make(named, used)  # told now, not in the middle of a run
    hashes = pair.fingerprint["target"], _identity(named, pair)
    return dataclasses.replace(used, hashes=hashes, drafter=name)


def _make(named: Named, pair: Pair) -> Drafter:
    first = _alone(named, pair)
    if named.other is None:
        return first
    if first.layers or takes_draft(named.kind):
        raise InputError(
            f"--drafter: {named.text!r}: expected first one that reads neither hidden states nor a draft model, such as "
            f"suffix, not {named.kind}"
        )
    return EitherDrafter(pair, first, _make(named.other, pair), named.sure)


def _alone(named: Named, pair: Pair) -> Drafter:
    """Return a drafter without the one that may follow it."""
    where = f"--drafter: {named.text!r}"
    if named.kind in TRAINED:
        if not named.value or named.options:
            raise unknown(named)
        return TRAINED[named.kind].build(pair, shared_network(named.kind, named.value, pair))
    point = PLUGINS.find(named.kind)
    if named.kind in BUILTINS:
        build, options = BUILTINS[named.kind].build, _with_value(named, where)
        check_options(parameters(build, where), where, options, (pair,))
        return build(pair, **options)
    if point is None:
        raise unknown(named)
    if named.value is not None:
        raise InputError(f"{where}: write the plugin's options as {named.kind}?key=value")
    make = PLUGINS.load(point)
    if takes_draft(named.kind):
        _ = pair.draft_model  # told by our own error where there is none
    check_options(parameters(make, where), where, named.options, (pair,))
    with plugin_errors("--drafter", f"making {named.text!r} ({point.value})"):
        made: Drafter = make(pair, **named.options)
        missing = lacks(made)
    if missing:
        raise InputError(f"{where} is a {type(made).__name__}, which lacks {', '.join(missing)} of a Drafter")
    return made


def _with_value(named: Named, where: str) -> dict[str, Any]:
    """Return the options of a built-in drafter, what stands after the colon among them."""
    options, parameter = dict(named.options), BUILTINS[named.kind].value
    if named.value is not None:
        if not parameter or not named.value:
            raise unknown(named)
        if parameter in options:
            raise InputError(f"{where}: {parameter} is given twice; give it once")
        options[parameter] = named.value if parameter == "path" else read_number(named.value)
    return options


def _identity(named: Named, pair: Pair) -> str:
    """Return what tells a drafter from others: a folder or a file by what it holds, wherever it lies."""
    if named.kind == "model":
        return pair.fingerprint["draft"]
    if named.kind in TRAINED:
        own = drafter_identity(str(named.value))
        return own if named.kind == TRAINED[named.kind].network else f"{named.kind}:{own}"
    options, value = dict(named.options), None
    if named.kind in BUILTINS:
        options = _with_value(named, "")
        value = options.pop(BUILTINS[named.kind].value, None)
        if value and named.kind == "suffix":
            value = file_hash(value)
    told = [f"{key}={options[key]}" for key in sorted(options)]
    if named.other is not None:
        told.append(f"sure={named.sure:g}")
    own = named.kind + ("" if value is None else f":{value}") + ("?" + "&".join(told) if told else "")
    draft = "+" + pair.fingerprint["draft"] if takes_draft(named.kind) else ""
    return own + draft + ("" if named.other is None else "+" + _identity(named.other, pair))
