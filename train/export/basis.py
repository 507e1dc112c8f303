"""The data of an export to a serving engine: prompts to choose on, other prompts to report on, replays of fixed lengths."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...collect.acceptance import LENGTHS
from ...collect.schema import draft_of, drafter_of
from ...collect.store import Trace
from ...decode.benchmark import Ratio
from ...policies.contract import Array, StopPolicy
from ...policies.display import Progress, silent
from ...policies.errors import InputError, TraceError
from ...policies.fixed import FixedLength
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ..evaluate.pricing import PricedReplays, ProfileBootstrap, with_prices
from ..evaluate.serving import Setting, serving_settings
from ..evaluate.statistics import Resamples
from ..fit.adapt import adapt_to_profile
from ..fit.rules import fixed_grid
from ..heads.rows import split_prompts
from ..replay.arrays import TraceArrays, trace_arrays
from ..replay.batch import arrive_at_once, replay_batch, request_order
from ..replay.bounds import oracle_plan, planned_rounds
from ..replay.checks import check_fit, require_disjoint, require_disjoint_policies, warn_other_rounds
from ..replay.rounds import Rounds
from ..replay.run import replay, replay_lengths
from ..replay.single_rounds import ROUND_COLUMNS, evaluate_rounds, identified_limit

HELD_OUT = 0.25
"""Share of the prompts that figures are reported on."""

MIN_TABLE_GAIN = 0.005
"""Minimum relative gain for which the length changes with the batch size. A length that changes with every request costs more
than it gains (vLLM, issue 49548)."""

TOP = tuple(f"top{rank}" for rank in range(1, 11))
THRESHOLDS = tuple(round(0.05 * i, 2) for i in range(20))


class Basis:
    """Traces split by prompt, the fixed lengths replayed on both parts, and the policy that is exported.

    Args:
        traces: dense traces of chains; or records of an engine, of which single rounds are evaluated, without a policy.
        profile: costs of rounds.
        policy: the policy, of which the loss is reported; None = none.
        held_out: traces of other prompts to report on; None = a quarter of the prompts of `traces`.
        seed: of the split, the bootstrap and the order of requests.
        progress: see `Progress`.

    Attributes:
        policy: as replayed and exported: for the costs of this profile, and no deeper than the traces.
        adaptation: how it was adapted to the profile; "" if it was not.
        fit, held: traces to choose on, and to report on.
        profile: with the price of the policy's decisions.
        fit_fixed, held_fixed: replays of the fixed lengths 0..K.
        best: the fixed length that is fastest on `fit`.
        facts: origin of the export.

    Raises:
        TraceError: the traces are not dense ones of chains, both share prompts, there are too few prompts to hold some out,
            or the policy cannot be replayed on them.
        InputError: the profile ends before depth 1.
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
        self.has_records = LENGTHS in traces.header.facts and policy is None
        warn_other_rounds(profile, traces.header)
        extra = ROUND_COLUMNS if self.has_records else ()
        arrays = trace_arrays(traces, extra=extra)
        held = None if held_out is None else trace_arrays(held_out, extra=extra)
        for option, one in (("--traces", arrays), ("--held-out", held)):
            is_known = one is not None and (self.has_records or one.header.has_every_anchor)
            if one is not None and not (one.tree.is_chain and is_known):
                raise TraceError(f"{option}: expected dense traces of chains, got those of the tree {one.tree.name}, "
                                 f"collector {one.header.collector}; engines draft chains")  # fmt: skip
        if profile.max_depth < 1:
            raise InputError("--profile: expected a depth of at least 1, got 0; measure it deeper")
        self.fit, self.held = _split(arrays, held, seed)
        self.depth = min(arrays.depth, profile.max_depth)
        if self.has_records:
            self.depth = min(self.depth, *map(identified_limit, (self.fit, self.held)))
        self.policy, self.adaptation, self.shares_prompts = policy, "", policy is not None and held is None
        if policy is not None:
            if held is not None:
                require_disjoint_policies("--held-out", held, [policy])
            check_fit(policy, held_out or traces)
            profile, _ = with_prices(profile, [policy], traces.header)
            if isinstance(policy, LearnedPolicy):  # others are exported by their name
                policy, self.adaptation = adapt_to_profile(policy, self.fit, profile)
            self.policy = policy.limited(self.depth)
        self.profile = profile
        self._costs, self._boot = ProfileBootstrap(profile, seed), Resamples(self.held.clusters, seed)
        self.fit_fixed, self.held_fixed = (self._fixed(part) for part in (self.fit, self.held))
        self.best = (
            self.settings()[0]["length"] if self.has_records else int(text_seconds(self.fit_fixed).sum(1).argmin())
        )
        self.facts: dict[str, Any] = {
            "specstop": version("specstop"),
            "traces": str(traces.folder),
            "target": self.header.target,
            "draft": draft_of(self.header),
            "drafter": drafter_of(self.header),
            "temperature": self.header.temperature,
            "verification": self.header.verification,
            "depth": self.depth,
            "profile": {k: v for k, v in profile.facts.items() if isinstance(v, (str, int, float))},
        }

    def _fixed(self, arrays: TraceArrays) -> list[Rounds]:
        """Return the rounds of the fixed lengths 0..K."""
        if not self.has_records:
            return fixed_grid(arrays, self.profile)
        return [evaluate_rounds(arrays, FixedLength(k), self.profile, self.depth) for k in range(self.depth + 1)]

    def ratio(self, values: Array) -> dict[str, Any]:
        """Return `value`, `low` and `high` of a statistic [1 + R], of which the first is the value, the others resamples."""
        return dataclasses.asdict(self._boot.interval(values))

    def single_request(self, export: Rounds) -> dict[str, Any]:
        """Return the held-out speed of an export at one request, relative to other methods."""
        if self.has_records:
            row, one = self.settings()[0], Ratio(1.0)
            return {
                "prompts": f"{len(set(self.held.clusters))} held-out requests, single rounds", "to_plain": row["to_plain"],
                "best_fixed": row["length"], "to_best_fixed": dataclasses.asdict(one),
                "oracle_bound_to_this": dataclasses.asdict(Ratio(row["headroom"])), "intervals": self._costs.describe(),
            }  # fmt: skip
        held, plan = self.held, oracle_plan(self.held, self.profile)
        replays = [export, self.held_fixed[0], self.held_fixed[self.best], planned_rounds(held, plan)]
        spent = [one.text_seconds(self.profile) for one in replays]
        # The bound has its own seconds; its rounds only describe how they vary with the timings of the profile.
        seconds = torch.stack([*spent[:-1], plan.seconds], 1)
        this, plain, best, bound = PricedReplays(self._boot, self._costs, replays, seconds).seconds().T
        report, choice = (len(set(part.clusters)) for part in (self.held, self.fit))
        figures: dict[str, Any] = {
            "prompts": f"{report} held-out prompts; the choice was made on the other {choice}",
            "to_plain": self.ratio(plain / this),
            "best_fixed": self.best,
            "to_best_fixed": self.ratio(best / this),
            "oracle_bound_to_this": self.ratio(this / bound),
            "intervals": self._costs.describe(),
        }
        if self.policy is not None:
            pair = [replay(held, self.policy, self.profile), export]
            mine, this = PricedReplays(self._boot, self._costs, pair).seconds().T
            figures |= {"policy": self.policy.name, "policy_to_this": self.ratio(this / mine)}
        return figures

    def sizes(self) -> tuple[int, ...]:
        """Return the batch sizes of tables: 1, and those that the profile has measured."""
        return (1, *(size for size in (self.profile.batch.sizes if self.profile.batch else ()) if size > 1))

    def batch_seconds(self, on: TraceArrays, fixed: Sequence[Rounds], size: int) -> Tensor:
        """Return [K + 1, S] seconds of the fixed lengths 0..K in batches of a size: the share of each text.

        Requests and their order are those of `evaluate(batch=...)` with the same seed.
        """
        if size == 1:
            return text_seconds(fixed)
        order = request_order(on.sequences, size, self.seed)
        seconds = []
        for length in range(self.depth + 1):
            played = replay_batch(on, FixedLength(length), self.profile, size, arrive_at_once(len(order)), order)
            seconds.append(np.bincount(order, played.seconds.numpy(), on.sequences) * (on.sequences / len(order)))
        return torch.from_numpy(np.stack(seconds))

    def length_table(self) -> list[dict[str, Any]]:
        """Return a row per batch size: the fixed length that is fastest on `fit`, and its speed on `held`.

        A larger batch does not draft longer than a smaller one, because more requests leave less room for drafting.
        """
        rows: list[dict[str, Any]] = []
        sizes = self.sizes()
        if self.has_records:
            short = self.settings()[: len(sizes)]  # at the short context
            return [{name: row[name] for name in ("batch", "length", "to_plain")} for row in short]
        for done, size in enumerate(sizes):
            self.progress("batches", done, len(sizes))
            spent = self.batch_seconds(self.fit, self.fit_fixed, size).sum(1)
            before = rows[-1]["length"] if rows else self.depth
            length = int(spent[: before + 1].argmin())
            if rows and spent[before] <= (1.0 + MIN_TABLE_GAIN) * spent[length]:
                length = before
            total = self._boot.total(self.batch_seconds(self.held, self.held_fixed, size).T)  # [1 + R, K + 1]
            rows.append({"batch": size, "length": length, "to_plain": self.ratio(total[:, 0] / total[:, length])})
        self.progress("batches", len(sizes), len(sizes))
        return rows

    def settings(self) -> list[Setting]:
        """Return the length by batch size and context that is fastest on `fit`, and its speed on `held`."""
        depth = self.depth + 1
        return serving_settings(self.fit_fixed[:depth], self.held_fixed[:depth], self._costs, self._boot)

    def threshold(self) -> tuple[float, int, Rounds]:
        """Return the fastest rule "draft until the largest probability is below p": p, most tokens, its held-out rounds.

        The largest probability is its share of the ten largest, as in llama.cpp, which drafts greedily and drops the token
        below p after drawing it.
        """
        limits, seconds = range(1, self.depth + 1), []
        for p in THRESHOLDS:  # not all at once: each rule needs numbers for each anchor
            replays = replay_thresholds(self.fit, [(p, most) for most in limits], self.profile)
            seconds += text_seconds(replays).sum(1).tolist()
        p, most = list(itertools.product(THRESHOLDS, limits))[int(np.argmin(seconds))]
        return p, most, replay_thresholds(self.held, [(p, most)], self.profile)[0]


def _split(arrays: TraceArrays, held: TraceArrays | None, seed: int) -> tuple[TraceArrays, TraceArrays]:
    """Return traces to choose on and to report on."""
    if held is None:
        fit, part = (arrays.subset(side) for side in split_prompts(arrays, HELD_OUT, seed))
        return fit, part
    require_disjoint("--held-out", held, "--traces", arrays.clusters)
    if held.depth < arrays.depth:
        raise TraceError(
            f"--held-out: expected traces of depth {arrays.depth} as --traces, got {held.depth}; collect both alike"
        )
    return arrays, held


def largest_share(arrays: TraceArrays) -> Tensor:
    """Return [N, K], the largest probability's share of the ten largest; of all if the trace has `top1` only."""
    top1 = arrays.column("top1")
    if not set(TOP) <= set(arrays.columns):
        return top1
    return top1 / torch.stack([arrays.column(name) for name in TOP]).sum(0).clamp_min(1e-30)


def text_seconds(rounds: Sequence[Rounds]) -> Tensor:
    """Return [C, S] float64 seconds of each text in C replays."""
    return torch.stack([one.seconds for one in rounds])


def replay_thresholds(arrays: TraceArrays, rules: Sequence[tuple[float, int]], profile: Profile) -> list[Rounds]:
    """Replay rules (p, most tokens): the first token below p is drafted and not verified."""
    share, bound = largest_share(arrays), arrays.draft_bound
    above = {p: (share >= p).long().cumprod(1).sum(1) for p, _ in rules}  # [N] tokens before the first one below p
    limits = [(above[p], bound.clamp_max(most)) for p, most in rules]
    drafted = torch.stack([torch.minimum(count + 1, limit) for count, limit in limits])
    verified = torch.stack([torch.minimum(count, limit) for count, limit in limits])
    return replay_lengths(arrays, drafted, verified, profile)
