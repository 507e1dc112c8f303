"""Whether a trace and a profile fit a policy, and whether sets of prompts are disjoint."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ...collect.schema import Header
from ...collect.store import Trace, load_trace
from ...decode.verify.modes import check_mode, find_mode
from ...policies.contract import StopPolicy
from ...policies.errors import SpecstopWarning, TraceError
from ...policies.features import check_sizes
from ...policies.host import validate_policy
from ...policies.learned import LearnedPolicy, sampling_options_text, warn_other_conditions
from ...policies.profile import Profile
from ...policies.routing import RoutingPolicy
from .arrays import TraceArrays


def load_traces(traces: Trace | str | Path) -> Trace:
    """Return a trace, opened if it is a folder.

    Raises:
        TraceError: the folder is incomplete, or as of `load_trace`.
    """
    if isinstance(traces, Trace):
        return traces
    trace = load_trace(traces)
    if not trace.complete:
        raise TraceError(f"traces: {trace.folder} is not complete; run collect with --resume first")
    return trace


def check_fit(policy: StopPolicy, traces: Trace) -> None:
    """Warn if a learned policy was trained for another temperature, filter, verification, pair or tree."""
    used = dataclasses.replace(traces.header.conditions, tree=traces.header.tree.name)
    warn_other_conditions(policy, used, "these traces")


def check_training_traces(training: Trace, trace: Trace) -> None:
    """Refuse training traces with another sampling filter; warn of another pair, temperature (if known) or verification."""
    used, expected = (sampling_options_text(one.header.sampling, one.header.temperature) for one in (training, trace))
    if used != expected:
        raise TraceError(
            f"--train-traces: {training.folder} was sampled with the filter {used}, not {expected}; "
            "collect traces with the options that will be served"
        )
    is_known = all(one.header.conditions.temperature is not None for one in (training, trace))
    names = ("pair", "temperature", "verification") if is_known else ("pair", "verification")
    if differences := training.header.differing(trace.header, names):
        text = f"--train-traces: {training.folder} differs from --traces in {', '.join(differences)}"
        warnings.warn(f"{text}: what is tuned there is for other rounds", SpecstopWarning, stacklevel=3)


def warn_other_rounds(profile: Profile, header: Header) -> None:
    """Warn if a profile timed other rounds than a trace has: of another drafter, or of chains with another verification."""
    from ...decode.verify.conditions import warn_other_profile  # imports transformers, which replay does not need

    if "device" in header.facts:  # without it the trace does not describe how it was recorded
        warn_other_profile(profile, "the trace holds", drafter=str(header.facts.get("drafter", "model")))
    if header.tree.is_chain and header.temperature > 0:
        warn_other_profile(profile, "the trace holds", verification=header.verification)


def check_replayable(arrays: TraceArrays, policy: StopPolicy, profile: Profile) -> None:
    """Refuse a policy that cannot be replayed exactly on a trace, or priced by a profile.

    Raises:
        TraceError: the trace or the profile lacks something that the message names.
        PolicyError: the policy is invalid, reads hidden states of another size than the trace's, or would bias the
            verification.
    """
    validate_policy(policy)
    header = arrays.header
    if header.collector == "live" and header.verification != "match":
        raise TraceError(
            f"the trace was recorded live under {header.verification}, where the text depends on the policy; "
            "replay needs dense traces, or ask for single rounds (`evaluate_rounds`)"
        )
    if header.mix:
        raise TraceError("the trace mixes draft samples into the text (--mix): it can be trained on, not replayed")
    if header.exactness == "law":  # as the live loop would
        check_mode(find_mode(header.verification, header.temperature), policy, arrays.tree)
    if policy.max_depth > arrays.depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the trace was recorded to depth {arrays.depth}; "
            f"limit the policy (max_depth={arrays.depth}) or collect with --depth {policy.max_depth}"
        )
    # Prices of trees are interpolated and extrapolated, so that no depth is out of range.
    if arrays.tree.is_chain and profile.max_depth < policy.max_depth:
        raise TraceError(
            f"{policy.name} drafts up to {policy.max_depth} tokens, but the profile ends at {profile.max_depth}"
        )
    if policy.reads_clock:
        raise TraceError(f"{policy.name} reads the clock, which no trace holds; measure it live (`specstop bench`)")
    if missing := [name for name in policy.hidden if name not in arrays.hidden]:
        models = ",".join(name.removesuffix("_hidden") for name in missing)
        raise TraceError(
            f"{policy.name} reads hidden states ({', '.join(missing)}), which the trace was recorded without; "
            f"collect it with --hidden {models}"
        )
    check_sizes(policy, header.hidden)


def check_whole(arrays: TraceArrays, instead: str) -> None:
    """Refuse a trace without whole texts, on which no rule can be chosen by replay; `instead` says what to do."""
    if arrays.only_positions:
        mixed = arrays.header.mix > 0
        why = "mixes draft samples into the text (--mix)" if mixed else "has not every position of its texts"
        raise TraceError(f"the trace {why}, so that no text can be replayed to choose a rule: {instead}")


def require_disjoint(
    option: str, arrays: TraceArrays, others: str, prompts: Collection[str], *, allow: bool | None = None
) -> None:
    """Refuse a trace that shares prompts with training data.

    Args:
        option: of the trace.
        arrays: the trace.
        others: name of the training data.
        prompts: of the training data, as in `TraceArrays.clusters`: equal texts are the same prompt under any id.
        allow: warn instead of raising; None if the command has no such option.

    Raises:
        TraceError: a prompt is in both.
    """
    evaluated = set(arrays.clusters)
    if shared := evaluated & set(prompts):
        text = f"{option}: {len(shared)} of {len(evaluated)} prompts are in {others} too (compared by text)"
        if not allow:
            hint = "" if allow is None else ", or use --allow-overlap if the figures need not be held-out"
            raise TraceError(f"{text}; collect other prompts{hint}")
        warnings.warn(f"{text}: figures of these prompts are not held-out", SpecstopWarning, stacklevel=3)


def require_disjoint_prompts(
    arrays: TraceArrays, tuning: TraceArrays | None, policies: Sequence[StopPolicy], *, allow: bool = False
) -> None:
    """Refuse evaluated prompts on which thresholds are tuned or a policy was trained; see `require_disjoint`."""
    if tuning is not None:
        require_disjoint("--traces", arrays, "--train-traces", tuning.clusters, allow=allow)
    require_disjoint_policies("--traces", arrays, policies, allow=allow)


def kept_back(arrays: TraceArrays, policies: Iterable[StopPolicy]) -> TraceArrays:
    """Return the prompts that all trained policies kept back for reports.

    Raises:
        TraceError: there are none.
    """
    trained = [
        policy for policy in policies if isinstance(policy, LearnedPolicy | RoutingPolicy) and policy.metadata.prompts
    ]
    sets = [set(policy.metadata.prompts.get("report", ())) for policy in trained]
    keep = [at for at, name in enumerate(arrays.clusters) if sets and all(name in one for one in sets)]
    if not keep:
        raise TraceError("--report-prompts: expected policies trained on these traces with --report-share above 0")
    return arrays.subset(keep)


def require_disjoint_policies(
    option: str, arrays: TraceArrays, policies: Iterable[StopPolicy], *, allow: bool | None = None
) -> None:
    """Refuse prompts on which a policy was trained; see `require_disjoint`."""
    for policy in policies:
        if isinstance(policy, LearnedPolicy | RoutingPolicy):
            # The prompts of the report group had no influence on the policy.
            prompts = [name for group in ("fit", "select") for name in policy.metadata.prompts.get(group, ())]
            require_disjoint(option, arrays, f"the training prompts of {policy.name}", prompts, allow=allow)
