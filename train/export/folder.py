"""What every export to a serving engine shares: figures on held-out prompts, and the folder with its page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...collect.store.folder import Trace
from ...decode.hf.export import deploy_hf
from ...policies.contract import StopPolicy
from ...policies.files.atomic import write_atomic, write_json
from ...policies.files.outputs import claim_folder, staged_folder
from ...policies.latency.profile import Profile
from ...policies.learned.policy import LearnedPolicy
from ...policies.limits import check_limits
from ...policies.progress import Progress, silent
from ...policies.storage.registry import load_policy
from ..fit.tuning.rates import solve_rate
from ..replay.bounds.oracle import oracle_plan
from ..replay.bounds.regret import planned_rounds
from ..replay.log import Rounds, play
from ..replay.traces.arrays import trace_arrays
from ..report.decision_costs import with_prices
from ..report.evaluate import check_fit
from ..report.intervals import Resamples, Values
from ..report.pricing import Change, Draws, Priced
from ..report.records import Ratio
from .lengths import Walked, walk_fixed
from .page import FIGURES
from .serving import Sides, split_sides

PAGE = "README.md"
EXPORT_SCHEMA = 1

SEEN = (
    "Figures are on prompts that were held out of the choice made here. A policy trained on the same traces may have seen "
    "them, which flatters it: give `--held-out` traces for a clean comparison."
)

SAMPLED = (
    "The traces were sampled at temperature {0:g}, where the draft proposes under the target's own noise (match). An engine "
    "that samples draft and target apart accepts differently, so lengths and ratios are approximate; traces at temperature 0 "
    "give exact counts for greedy decoding."
)


class Export:
    """An export in the making: traces split by prompt, the fixed lengths replayed, the policy that it stands in for.

    Args:
        traces: dense traces of chains.
        profile: what rounds cost.
        policy: whose loss is to be stated; None = none.
        held_out: traces of other prompts to say figures on; None = a part of `traces` is held out.
        seed: of split and bootstrap.
        progress: see `Progress`.

    Attributes:
        sides: to choose on and to say figures on.
        profile: with the policy's decisions.
        policy: as it was replayed, or None.
        draws: of that.
        fit_fixed, held_fixed: the fixed lengths 0..K, walked.
        held_boot: resamples of the held-out prompts.
        best: the fixed length that is fastest on the prompts of the choice.
    """

    def __init__(
        self,
        traces: Trace,
        profile: Profile,
        policy: StopPolicy | None = None,
        *,
        held_out: Trace | None = None,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        self.header, self.seed, self.progress = traces.header, seed, progress
        arrays = trace_arrays(traces)
        held = trace_arrays(held_out) if held_out is not None else None
        self.sides: Sides = split_sides(arrays, profile, held, seed)
        self.depth = min(arrays.depth, profile.max_depth)
        self.folder = traces.folder
        self.policy = None
        if policy is not None:
            check_fit(policy, held_out or traces)
            profile, _ = with_prices(profile, [policy], traces.header)
            self.policy = self._ready(policy, profile)
        self.profile, self.draws = profile, Draws(profile, seed)
        self.fit_fixed: Walked = walk_fixed(self.sides.fit, self.depth)
        self.held_fixed: Walked = walk_fixed(self.sides.held, self.depth)
        self.held_boot = Resamples(self.sides.held.prompt_ids, seed)
        self.best = int(self.fit_fixed.seconds(profile).sum(1).argmin())

    def _ready(self, policy: StopPolicy, profile: Profile) -> StopPolicy:
        """Return the policy as `evaluate` would replay it: no deeper than the trace, its rate solved for this profile."""
        is_derived = isinstance(policy, LearnedPolicy) and policy.rule.kind == "derived"
        if isinstance(policy, LearnedPolicy) and is_derived and not profile.same_costs(policy.facts.profile):
            policy, _ = solve_rate(policy, self.sides.fit, profile, policy.facts.acceptance)
        return policy.limited(self.depth)

    def played(self, policy: StopPolicy) -> Rounds:
        """Replay a policy on the held-out prompts."""
        return play(self.sides.held, policy, self.profile).rounds

    def spent(self, replays: Sequence[Rounds], change: Change | None = None) -> Values:
        """Return [1 + R, P] seconds of held-out replays in every resample; `change` is made to the profile before."""
        priced = Priced(self.held_boot, self.draws, replays, self.sides.held.prompt_tokens)
        return priced.seconds(change=change)

    def ratio(self, mine: Rounds, than: Rounds) -> Ratio:
        """Return the speed of a held-out replay over that of another."""
        spent = self.spent([mine, than])
        return self.held_boot.interval(spent[:, 1] / spent[:, 0])

    def alone(self, mine: Rounds) -> dict[str, Any]:
        """Return the figures of an export at one request: ratios of its held-out rounds to those of the others."""
        held, boot = self.sides.held, self.held_boot
        plan = oracle_plan(held, self.profile)
        replays = [mine, self.held_fixed.rounds(0), self.held_fixed.rounds(self.best), planned_rounds(held, plan)]
        spent = [one.of_texts(self.profile, held.prompt_tokens) for one in replays]
        priced = Priced(boot, self.draws, replays, held.prompt_tokens, torch.stack([*spent[:-1], plan.seconds], 1))
        this, plain, best, bound = priced.seconds().T
        found: dict[str, Any] = {
            "prompts": self.sides.note,
            "to_plain": boot.interval(plain / this),
            "best_fixed": self.best,
            "to_best_fixed": boot.interval(best / this),
            "oracle_bound_to_this": boot.interval(this / bound),
            "intervals": self.draws.text,
        }
        if self.policy is not None:
            found["policy"] = self.policy.name
            found["policy_to_this"] = self.ratio(self.played(self.policy), mine)
        return found

    def facts(self) -> dict[str, Any]:
        """Return what the export was made from."""
        header = self.header
        return {
            "specstop": version("specstop"),
            "traces": str(self.folder),
            "target": header.target,
            "draft": header.draft,
            "pair": dict(header.pair),
            "temperature": header.temperature,
            "verification": header.verification,
            "depth": self.depth,
            "profile": {k: v for k, v in self.profile.facts.items() if isinstance(v, (str, int, float))},
        }


def deploy_hf_replayed(
    policy: str | Path,
    traces: Trace,
    profile: Profile,
    out: str | Path,
    *,
    held_out: Trace | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Write the folder of `decode.hf.export.deploy_hf` with the policy's replayed gains on its card.

    Args:
        policy: a policy folder, `hub:owner/name`, or a built-in.
        traces, profile, held_out, seed, progress: see `Export`.
        out, overwrite: see `deploy_hf`.

    Raises:
        InputError, PolicyError: see `deploy_hf`.
        TraceError: the traces cannot be replayed.
    """
    chosen = load_policy(policy)
    folder = claimed(out, traces, profile, chosen, held_out, overwrite=overwrite)
    export = Export(traces, profile, chosen, held_out=held_out, seed=seed, progress=progress)
    assert export.policy is not None
    rounds = export.played(export.policy)
    export.policy = None  # it is itself what is exported
    gains = plain_values({"alone": export.alone(rounds), "facts": export.facts()})
    return deploy_hf(policy, folder, gains=gains, overwrite=overwrite)


def claimed(
    out: str | Path,
    traces: Trace,
    profile: Profile,
    policy: StopPolicy | None,
    held_out: Trace | None,
    *,
    overwrite: bool,
) -> Path:
    """Return `out` as a folder that may be written, asked before any work is done; see `claim_folder`."""
    read = [trace.folder for trace in (traces, held_out) if trace is not None]
    sources = [profile.source, policy.source if policy is not None else None]
    return claim_folder(out, overwrite=overwrite, inputs=[*read, *sources])


def write_export(
    out: Path, engine: str, files: Mapping[str, str | bytes], page: str, figures: Mapping[str, Any]
) -> dict[str, Any]:
    """Write an export's folder, whole or not at all, and return its figures as plain JSON values.

    Args:
        out: the folder; what is there is replaced.
        engine: its name.
        files: contents by path below the folder.
        page: the README.
        figures: ratios and facts.
    """
    plain: dict[str, Any] = {"schema": EXPORT_SCHEMA, "kind": "export", "engine": engine, **plain_values(figures)}
    with staged_folder(out) as folder:
        for name, text in files.items():
            write_atomic(folder / name, text)
        write_json(folder / FIGURES, plain)
        write_atomic(folder / PAGE, page)
    return plain


def plain_values(value: Any) -> Any:
    """Return records and tuples as JSON values."""
    if isinstance(value, Ratio):
        return dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {str(k): plain_values(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(v) for v in value]
    return value


def caveats(export: Export) -> list[str]:
    """Return what else is assumed, by what the traces are."""
    found = [SEEN] if export.policy is not None and export.sides.is_part else []
    if export.header.temperature > 0:
        found.append(SAMPLED.format(export.header.temperature))
    return found


def find_sizes(most: int) -> list[int]:
    """Return the batch sizes that are looked at: 1, 2, 3, 4, 6, 8, 12, 16, ... up to `most`.

    Raises:
        InputError: `most` is below 1.
    """
    check_limits(max_batch=most)
    sizes, power = [1], 1
    while sizes[-1] < most:
        sizes += [size for size in (2 * power, 3 * power) if sizes[-1] < size]
        power *= 2
    return [size for size in sizes if size <= most]
