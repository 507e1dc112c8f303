"""What every export to a serving engine shares: prompts to choose on and others to say figures on, replayed."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...collect.pair_options import draft_of, drafter_of
from ...collect.store.folder import Trace
from ...decode.benchmark import Ratio
from ...policies.arguments import check_limits
from ...policies.contract import StopPolicy
from ...policies.display import Progress, silent
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ..evaluate.decision_costs import with_prices
from ..evaluate.pricing import Priced, ProfileBootstrap
from ..evaluate.statistics import Resamples
from ..fit.settle import settle_for
from ..replay.bounds.oracle import oracle_plan
from ..replay.bounds.regret import planned_rounds
from ..replay.known_lengths import ReplayedRuns, replay_fixed
from ..replay.log import Rounds, play
from ..replay.traces.arrays import trace_arrays
from ..replay.traces.checking import check_fit, require_disjoint_policies, tell_other_rounds
from .serving import Sides, split_sides

SEEN = (
    "Figures are on prompts that were held out of the choice made here. A policy trained on the same traces may have seen "
    "them, which flatters it: give `--held-out` traces for a clean comparison."
)

SAMPLED = (
    "The traces were sampled at temperature {0:g}, where the draft proposes under the target's own noise (match). An engine "
    "that samples draft and target apart accepts differently, so lengths and ratios are approximate; traces at temperature 0 "
    "give exact counts for greedy decoding."
)


@dataclass(frozen=True)
class Written:
    """What an engine gets: contents by path below the folder, the page, and the figures behind both."""

    files: dict[str, str | bytes]
    page: str
    figures: dict[str, Any]


class Export:
    """An export in the making: traces split by prompt, the fixed lengths replayed, the policy that it stands in for.

    Args:
        traces: dense traces of chains.
        profile: what rounds cost.
        policy: whose loss is to be stated; None = none.
        held_out: traces of other prompts to say figures on; None = a part of `traces` is held out.
        seed: of split and bootstrap.
        progress: see `Progress`.
        out: the folder that is written at the end.
        max_batch: the largest batch looked at; None = as the engine's module says.

    Attributes:
        policy: as it is replayed and as an engine gets it: settled for this profile, no deeper than the traces; None = none.
        settled: what is to be said of that; "" where the policy came for this profile.
        sides: to choose on and to say figures on.
        profile: with the policy's decisions.
        draws: of that.
        fit_fixed, held_fixed: the fixed lengths 0..K, replayed.
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
        out: Path = Path(),
        max_batch: int | None = None,
    ) -> None:
        self.header, self.seed, self.progress = traces.header, seed, progress
        self.out, self.max_batch = out, max_batch
        tell_other_rounds(profile, traces.header)
        arrays = trace_arrays(traces)
        held = trace_arrays(held_out) if held_out is not None else None
        self.sides: Sides = split_sides(arrays, profile, held, seed)
        if held is not None and policy is not None:
            require_disjoint_policies("--held-out", held, [policy])
        self.depth = min(arrays.depth, profile.max_depth)
        self.folder = traces.folder
        self.policy, self.settled = policy, ""
        if policy is not None:
            check_fit(policy, held_out or traces)
            profile, _ = with_prices(profile, [policy], traces.header)
            # What is not trained is written by its name, and decides there as it does here.
            if isinstance(policy, LearnedPolicy):
                policy, self.settled = settle_for(policy, self.sides.fit, profile)
            self.policy = policy.limited(self.depth)
        self.profile, self.draws = profile, ProfileBootstrap(profile, seed)
        self.fit_fixed: ReplayedRuns = replay_fixed(self.sides.fit, self.depth)
        self.held_fixed: ReplayedRuns = replay_fixed(self.sides.held, self.depth)
        self.held_boot = Resamples(self.sides.held.clusters, seed)
        self.best = int(self.fit_fixed.seconds(profile).sum(1).argmin())

    def played(self, policy: StopPolicy) -> Rounds:
        """Replay a policy on the held-out prompts."""
        return play(self.sides.held, policy, self.profile).rounds

    def ratio(self, mine: Rounds, than: Rounds) -> Ratio:
        """Return the speed of a held-out replay over that of another."""
        spent = Priced(self.held_boot, self.draws, [mine, than], self.sides.held.prompt_tokens).seconds()
        return self.held_boot.interval(spent[:, 1] / spent[:, 0])

    def alone(self, mine: Rounds) -> dict[str, Any]:
        """Return the figures of an export at one request: ratios of its held-out rounds to those of the others."""
        held, boot = self.sides.held, self.held_boot
        plan = oracle_plan(held, self.profile)
        replays = [mine, self.held_fixed.rounds(0), self.held_fixed.rounds(self.best), planned_rounds(held, plan)]
        spent = [one.of_texts(self.profile, held.prompt_tokens) for one in replays]
        # The bound is what the plan takes, at the cheapest sizes; its rounds tell only how that varies with the timings.
        priced = Priced(boot, self.draws, replays, held.prompt_tokens, torch.stack([*spent[:-1], plan.seconds], 1))
        this, plain, best, bound = priced.seconds().T
        found: dict[str, Any] = {
            "prompts": self.sides.note,
            "to_plain": boot.interval(plain / this),
            "best_fixed": self.best,
            "to_best_fixed": boot.interval(best / this),
            "oracle_bound_to_this": boot.interval(this / bound),
            "intervals": self.draws.describe(),
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


def plain_values(value: Any) -> Any:
    """Return records and tuples as JSON values."""
    return json.loads(json.dumps(value, default=dataclasses.asdict))


def caveats(export: Export) -> list[str]:
    """Return what else is assumed, by what the traces are."""
    found = [SEEN] if export.policy is not None and export.sides.is_part else []
    if export.settled:
        found.append(
            f"The policy was trained under another profile. Figures and files are of what it is here: {export.settled}."
        )
    if export.header.temperature > 0:
        found.append(SAMPLED.format(export.header.temperature))
    return found


def drafter_caveat(export: Export, engine: str) -> list[str]:
    """Return what is to be said where an engine's files name a draft model and the traces are of another drafter."""
    drafter = drafter_of(export.header)
    if drafter == "model":
        return []
    return [
        f"The traces are of the drafter `{drafter}`, which {engine} cannot run: its files are for a draft model "
        f"(`{draft_of(export.header)}`), and hold as far as what drafts there is accepted as often and as fast."
    ]


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
