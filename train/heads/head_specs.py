"""What a kind of head asks of training: what it reads, its labels, and the rule that it was published with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...collect.store import Trace
from ...policies.errors import InputError
from ...policies.features import DRAFT_HIDDEN, HIDDEN_STATES, TOKEN_FEATURES, Kind, check_hidden, feature
from ...policies.heads.layers import HARD_FEATURES
from ..released.convert import ANY_THRESHOLD, STOP_THRESHOLD
from .fitting import HEAD_KINDS

_STOP_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)  # the grid of h that the paper of SpecDec++ searches
_CLASS_THRESHOLD = 0.5  # of the any-fork rule, the default of DynaSD's class


@dataclass(frozen=True)
class HeadSpec:
    """Of a kind of head.

    Attributes:
        features: the scalar features that it reads; None = those that are asked for.
        hidden: the hidden states that it must have.
        any_hidden: it takes further hidden states, those that the trace has.
        soft: its labels are min(1, p/q), so traces are read with those columns (`rows.SOFT_COLUMNS`).
        lag: its `accept` at depth j speaks of x_{j - lag}: rows pair a label with the state that many depths on.
        calibrated: outputs are calibrated; else they are used as they come, as published.
        rule: of a published policy; None = the derived rule.
        thresholds: of that rule, as published, the one taken first; others are what its authors searched.
        passes: times that it is fitted, see `run.train`.
        more, less: what it reads besides, and does without, unless it is told which features to read.
    """

    features: tuple[str, ...] | None = None
    hidden: tuple[str, ...] = ()
    any_hidden: bool = False
    soft: bool = False
    lag: int = 0
    calibrated: bool = True
    rule: str | None = None
    thresholds: tuple[float, ...] = ()
    passes: int = 1
    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()


def _survival(stops: tuple[float, ...]) -> tuple[float, ...]:
    """Return the least survival of each h, the chance of a rejection above which SpecDec++ stops: `STOP_THRESHOLD` first."""
    return tuple(round(1.0 - h, 6) for h in sorted(stops, key=lambda h: (h != STOP_THRESHOLD, h)))


HEAD_SPECS: dict[str, HeadSpec] = {
    # Beside tokens and the margin these tell little, less than the time that they take (`benchmarks/heads.py`). With many
    # weights it matters on which rounds they are fitted; heads of few gain nothing by a second pass.
    "tokens": HeadSpec(
        passes=2, more=("noisy_score", *TOKEN_FEATURES), less=("mean_full", "last_accepted", "top1", "depth")
    ),
    "resnet": HeadSpec(any_hidden=True),
    "dynasd-soft": HeadSpec(
        (), (DRAFT_HIDDEN,), soft=True, calibrated=False, rule="any", thresholds=(ANY_THRESHOLD, _CLASS_THRESHOLD)
    ),
    "dynasd-hard": HeadSpec(HARD_FEATURES, calibrated=False, rule="any", thresholds=(ANY_THRESHOLD, _CLASS_THRESHOLD)),
    "specdec": HeadSpec((), (DRAFT_HIDDEN,), soft=True, lag=1, rule="survival"),
    "specdec-published": HeadSpec(
        (),
        (DRAFT_HIDDEN,),
        soft=True,
        lag=1,
        calibrated=False,
        rule="survival",
        thresholds=_survival(_STOP_THRESHOLDS),
    ),
}
"""Those that ask for anything; all others read the scalars asked for."""


SCALAR_KINDS = tuple(kind for kind in HEAD_KINDS if not HEAD_SPECS.get(kind, HeadSpec()).hidden)
"""Kinds that can do without hidden states."""


def head_spec(kind: str) -> HeadSpec:
    """Return what a kind of head asks of training."""
    return HEAD_SPECS.get(kind, HeadSpec())


_KNOWN = (Kind.ANCHOR, Kind.HISTORY, Kind.PRE, Kind.POST)


def usual_features(kind: str, features: Sequence[str]) -> tuple[str, ...]:
    """Return what a head reads where `features` are what heads read unless told otherwise."""
    asked = head_spec(kind)
    if asked.features is not None:
        return asked.features
    if not asked.more and not asked.less:
        return tuple(features)
    names = dict.fromkeys((*(name for name in features if name not in asked.less), *asked.more))
    # In the order in which they become known, which spares the loop a reordering at each decision.
    return tuple(sorted(names, key=lambda name: _KNOWN.index(feature(name).kind)))


def read_hidden(kind: str, traces: Sequence[Trace], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the hidden states that a head is to read: those asked for, its own, or all that every trace holds.

    Raises:
        InputError: the head reads no hidden state, or other ones.
        PolicyError: there is no hidden state of a name.
    """
    asked = head_spec(kind)
    if wanted:
        names = check_hidden(wanted)
        if not asked.any_hidden and names != asked.hidden:
            reads = ", ".join(asked.hidden) or "no hidden state"
            raise InputError(f"--hidden: the head {kind} reads {reads}, not {', '.join(names)}")
        return names
    if not asked.any_hidden:
        return asked.hidden
    return check_hidden(name for name in HIDDEN_STATES if all(name in trace.header.hidden for trace in traces))
