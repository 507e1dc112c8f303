"""What if a policy were used elsewhere: `transfer` says where it must not be deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ....collect.store.folder import Trace
from ....policies.arguments import as_list
from ....policies.contract import StopPolicy
from ....policies.display import Progress, shown
from ....policies.errors import InputError, TraceError
from ....policies.fixed import FixedLength
from ....policies.host import with_costs
from ....policies.learned import LearnedPolicy, other_conditions
from ....policies.profile import Profile
from ....policies.registry import PolicySpec, as_policies
from ...evaluate.comparison import Comparison
from ...evaluate.decision_costs import with_prices
from ...evaluate.pricing import Priced, ProfileBootstrap
from ...evaluate.records import POLICIES
from ...evaluate.statistics import Resamples
from ...replay.log import play
from ...replay.traces.arrays import TraceArrays, trace_arrays
from ...replay.traces.checking import require_disjoint_policies
from .records import Cell, Transfer, temperature_text, unique_names


def transfer(
    policies: PolicySpec | Sequence[PolicySpec],
    traces: Trace | Sequence[Trace],
    profiles: Profile | Sequence[Profile],
    *,
    names: Sequence[str] | None = None,
    by_group: bool = False,
    allow_overlap: bool = False,
    seed: int = 0,
    progress: Progress = shown,
) -> Transfer:
    """Use each policy on each trace (or group of prompts) and say where it must not be deployed.

    Policies are used as they are: nothing is tuned or solved on what they are used on. The intervals of a column hold for
    all of its policies at once.

    Args:
        policies: the rows.
        traces: the columns, held-out prompts each; with `by_group` every group of every trace is one.
        profiles: one for all traces, or one for each.
        names: of the policies; by default their own.
        by_group: split traces by the group of their prompts.
        allow_overlap: see `evaluate`.
        seed: of the bootstrap.
        progress: see `Progress`.

    Raises:
        InputError: no policy or trace, one of them twice, or profiles that do not go with the traces.
        TraceError: a policy does not fit a trace.
    """
    policies, traces, profiles = as_policies(policies), as_list(traces, Trace), as_list(profiles, Profile)
    names = None if names is None else as_list(names)
    if not policies or not traces:
        raise InputError("expected at least one --policy and one --traces for the table")
    if len(profiles) not in (1, len(traces)):
        raise InputError(
            f"--profile: expected one for all traces or one for each of {len(traces)}, not {len(profiles)}"
        )
    rows = unique_names(policies, names)
    columns: list[_Column] = []
    for at, (trace, label) in enumerate(zip(traces, _labels(traces), strict=True)):
        costs, _ = with_prices(profiles[at if len(profiles) > 1 else 0], policies, trace.header)
        arrays, draws = trace_arrays(trace), ProfileBootstrap(costs, seed)  # groups of one trace share them
        require_disjoint_policies("--traces", arrays, policies, allow=allow_overlap)
        for group, part in (_groups(arrays) if by_group else {"": arrays}).items():
            name = (group or label) if len(traces) == 1 else "/".join(filter(None, (label, group)))
            columns.append(_Column(name, trace, part, draws))
    cells: list[list[Cell]] = [[] for _ in policies]
    best, counts = [], []
    for done, column in enumerate(columns):
        progress("transfer", done, len(columns))
        beside = _compared(column, dict(zip(rows, policies, strict=True)), seed)
        best.append(int(np.argmax(beside.fixed)))
        counts.append(len(set(column.arrays.clusters)))
        for row, name, policy in zip(cells, rows, policies, strict=True):
            line = beside.line(name, POLICIES[0], beside.rate(name), None, "")
            row.append(Cell(line.to_best_fixed, line.verdict, _is_own(policy, column.trace)))
    progress("transfer", len(columns), len(columns))
    return Transfer(
        rows,
        tuple(_trained_on(p) for p in policies),
        tuple(column.name for column in columns),
        tuple(counts),
        tuple(best),
        tuple(map(tuple, cells)),
        {"intervals": columns[0].draws.describe(), "profiles": [dict(p.facts) for p in profiles]},
    )


@dataclass(frozen=True)
class _Column:
    """A trace, or the part of it that is a group of prompts, and what rounds cost there."""

    name: str
    trace: Trace
    arrays: TraceArrays
    draws: ProfileBootstrap


def _compared(column: _Column, policies: Mapping[str, StopPolicy], seed: int) -> Comparison:
    """Return the policies of a column beside its fixed lengths."""
    arrays, costs, draws = column.arrays, column.draws.profile, column.draws
    depth, boot = min(arrays.depth, costs.max_depth), Resamples(arrays.clusters, seed)
    limited = [with_costs(policy, costs).limited(depth) for policy in policies.values()]
    every = [*(FixedLength(k) for k in range(depth + 1)), *limited]
    rounds = [play(arrays, policy, costs).rounds for policy in every]
    priced = Priced(boot, draws, rounds, arrays.prompt_tokens)
    tokens = arrays.text_tokens.double().numpy()
    largest = float(boot.by_cluster(tokens).max() / tokens.sum()) if boot.clusters > 1 else 0.0
    kinds = dict.fromkeys(policies, POLICIES[0])
    return Comparison(boot, draws, tokens, priced, kinds, largest=largest)


def _labels(traces: Sequence[Trace]) -> list[str]:
    """Return a name for each trace: its folder's, with as many folders above as tell them apart."""
    parts = [trace.folder.resolve().parts for trace in traces]
    if len(set(parts)) < len(parts):
        again = next(str(trace.folder) for trace, p in zip(traces, parts, strict=True) if parts.count(p) > 1)
        raise InputError(f"--traces: {again} is there twice; give each trace once")
    size = next(n for n in range(1, max(map(len, parts)) + 1) if len({p[-n:] for p in parts}) == len(parts))
    return ["/".join(p[-size:]) for p in parts]


def _groups(arrays: TraceArrays) -> dict[str, TraceArrays]:
    """Return the part of each group of prompts, by name."""
    names = sorted(set(arrays.groups))
    if names == [""]:
        raise TraceError(
            "--by-group: the prompts of this trace have no group; collect with a `group` in each prompt line"
        )
    return {
        name or "(none)": arrays.subset([s for s, group in enumerate(arrays.groups) if group == name]) for name in names
    }


def _is_own(policy: StopPolicy, trace: Trace) -> bool:
    if not isinstance(policy, LearnedPolicy):
        return False
    return policy.metadata.pair == trace.header.pair and not other_conditions(policy, trace.header.conditions)


def _trained_on(policy: StopPolicy) -> str:
    if not isinstance(policy, LearnedPolicy):
        return "nothing"
    source = "/".join(Path(str(policy.metadata.provenance.get("traces", ""))).parts[-2:])
    return f"{source or 'unknown traces'}, T = {temperature_text(policy)}"
