"""Which traces and policies can be evaluated together, and which policies fail."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...collect.store.folder import Trace, open_trace
from ...decode.verify.sampling import SamplingParams
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyFailure, SpecstopWarning, TraceError
from ...policies.host import is_trusted, validate_policy
from ...policies.learned import shaping_text, warn_other_conditions
from ...policies.profile import Profile
from ..replay.log import play
from ..replay.rounds import evaluate_rounds
from ..replay.traces.arrays import TraceArrays
from .records import HF_DEFAULT, TUNED


def load_traces(path: str | Path) -> Trace:
    """Open traces for evaluation; an incomplete run is refused."""
    trace = open_trace(path)
    if not trace.complete:
        raise TraceError(f"traces: {path} is not complete; run collect with --resume first")
    return trace


def check_together(
    traces: Trace,
    train_traces: Trace | None,
    policies: Sequence[StopPolicy],
    shaping: SamplingParams | None,
    batches: bool,
) -> None:
    """Refuse policies and traces that cannot be evaluated together; warn of training traces of other rounds."""
    for policy in policies:
        validate_policy(policy)
    require_different_names([HF_DEFAULT, TUNED, *(policy.shown_name for policy in policies)])
    wanted = traces.header.shaping if shaping is None else shaping.override(traces.header.shaping)
    for option, trace in (("--traces", traces), ("--train-traces", train_traces)):
        _check_sampled(option, trace, wanted)
    if train_traces is not None:
        _tell_apart(train_traces, traces)
    if batches and not traces.header.has_every_anchor:
        raise TraceError(
            "--batch: expected dense traces, in which any round of a batch can be looked up; collect them so"
        )


def require_different_names(names: Sequence[str]) -> None:
    """Refuse policies with the same name in a report."""
    if again := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"--policy: two policies are called {again!r}; give each once, or rename one")


def _tell_apart(train_traces: Trace, traces: Trace) -> None:
    """Warn where thresholds are tuned on rounds of another pair, temperature (if it is known) or verification."""
    known = all(trace.header.conditions.temperature is not None for trace in (train_traces, traces))
    names = ("pair", "temperature", "verification") if known else ("pair", "verification")
    if differ := train_traces.header.differing(traces.header, names):
        warnings.warn(
            f"--train-traces: {train_traces.folder} differs from --traces in {', '.join(differ)}: what is tuned there is for "
            "other rounds",
            SpecstopWarning,
            stacklevel=4,
        )


def check_fit(policy: StopPolicy, traces: Trace) -> None:
    """Warn where a learned policy was trained for another temperature, filter, verification, pair or tree."""
    used = dataclasses.replace(traces.header.conditions, tree=traces.header.tree.name)
    warn_other_conditions(policy, used, "these traces")


def _check_sampled(option: str, trace: Trace | None, wanted: Mapping[str, Any]) -> None:
    """Refuse traces that were sampled from another distribution than the one asked for."""
    if trace is None:
        return
    asked, found = (shaping_text(options, trace.header.temperature) for options in (wanted, trace.header.shaping))
    if asked != found:
        raise TraceError(
            f"{option}: {trace.folder} was sampled with the filter {found}, not {asked}; "
            "collect traces with the options that will be served"
        )


def failure_of(policy: StopPolicy, arrays: TraceArrays, profile: Profile) -> PolicyFailure | None:
    """Return the failure of a plugin's policy in a replay; None if there is none, or the policy is one of specstop."""
    if is_trusted(policy):
        return None
    shorter = policy.limited(min(arrays.depth, profile.max_depth))
    try:
        if arrays.header.collector == "live":
            evaluate_rounds(arrays, shorter, profile)
        else:
            play(arrays, shorter, profile)
    except PolicyFailure as error:
        return error
    return None
