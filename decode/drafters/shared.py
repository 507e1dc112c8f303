"""Networks of trained drafters, which the loops of a process share: a profile makes a dozen, of a network of gigabytes."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import nn
from transformers import PreTrainedModel

from ...policies.errors import InputError
from ..models.pair import Pair
from .folder import TrainedDrafter, drafter_identity, load_drafter
from .known import TRAINED

_ALIVE: WeakValueDictionary[tuple[Any, ...], nn.Module] = WeakValueDictionary()
_LAST: WeakKeyDictionary[PreTrainedModel, nn.Module] = WeakKeyDictionary()
"""The last one of each target outlives its loops: `generate` makes a loop a call."""

_LOADING = threading.Lock()
"""Held while a network is looked up or loaded, so that threads that start together load it once."""


def load_named(kind: str, path: str) -> TrainedDrafter:
    """Return what the folder of a spec such as `medusa:PATH` holds; `kind` is a key of `TRAINED`.

    Raises:
        InputError: see `load_drafter`, or it is of another kind.
    """
    trained = load_drafter(path)
    if trained.kind != TRAINED[kind].network:
        raise InputError(f"--drafter: {path} holds a drafter of the kind {trained.kind}: write {trained.kind}:{path}")
    return trained


def shared_network(kind: str, path: str, pair: Pair) -> Any:
    """Return the network of a folder where the pair's target is, read once as long as the folder says the same.

    Raises:
        InputError: as `load_named`, or it was trained for another target.
    """
    # By what it holds, not by where it lies: `generate` unpacks the drafter of an exported folder at every call.
    key = (kind, drafter_identity(path), pair.fingerprint["target"], pair.device, pair.target.dtype)
    with _LOADING:
        network = _ALIVE.get(key)
        if network is None:
            trained = load_named(kind, path)
            try:
                network = trained.network_for(pair)
            except InputError as error:
                raise InputError(f"--drafter: {path}: {error.command_line}") from None
            _ALIVE[key] = network
        _LAST[pair.target] = network
    return network
