"""Calibration: texts decoded through the round loop, driven by scripts, to time the parts of a round.

Timings of isolated forwards miss a good part of what a round costs, so the loop runs as it is, on prompts that no prediction
is made for, with a script in place of the policy: every length 0..K equally often, and plain decoding beside it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...policies.arguments import check_token_ids
from ...policies.display import Progress, shown
from ...policies.errors import InputError
from ...policies.estimate import (
    BATCH_DRAFTS,
    BATCH_PLAIN,
    BATCH_VERIFY,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PLAIN_OUTSIDE,
    PREFILL,
    TREE_OUTSIDE,
    TREE_VERIFY,
)
from ...policies.fixed import FixedLength
from ...policies.limits import check_limit, check_limits
from ...policies.measurements import CONTEXTS, VERIFY, Key, Measurements, collected
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..drafters.spec import warn_depth_limited
from ..loop import Request, Speculator
from ..models.device import Recorded
from ..models.pair import Pair
from ..records import Generation, Round
from ..settings import Settings
from ..verify.sampling import MODEL_DEFAULTS, SamplingParams
from .decisions import decision_case, whole_rounds
from .measuring import Case, Clock, Effort, Seconds, measure
from .scripts import BatchScript, ChainScript, TreeScript

NEW_TOKENS = 48
"""Of a text: so few that a repetition is over within a second on a small pair."""

PROBED, SHORTEST = 8, 16
"""Tokens of the texts that tell how fast a pair is, and the fewest of others."""

WARM_UPS = (0, 1)
"""Keys of the texts that warm up: together they draft nearly all lengths, each of which may have to be captured once."""

SETTLING = 4
"""Rounds of a batch after the prompts that are not timed: reading these empties the caches, and the first one took half as
long again as the tenth."""

MOST_WARM_UPS, MOST_TRIES = 12, 3
"""Repetitions that warm up a GPU at most: a call is recorded the second time that its shape comes, and a text has few."""


def measure_profile(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int = 10,
    temperature: float = 0.0,
    policies: PolicySpec | Sequence[PolicySpec] = (),
    new_tokens: int = NEW_TOKENS,
    effort: Effort | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = shown,
    tree: str | None = None,
    clock: Clock = time.perf_counter,
    shaping: SamplingParams = MODEL_DEFAULTS,
    batch: Sequence[int] = (),
    verification: str = "auto",
) -> Profile:
    """Measure what draft steps, verifications and everything around them cost.

    Args:
        pair: on its device.
        prompts: token ids; not the ones that predictions are made for. They are laid end to end to reach a short and
            a long context.
        depth: K, the longest chain timed.
        temperature: of the sampling.
        policies: whose decisions are timed, features included.
        new_tokens: decoded from each context; fewer where a pair is too slow for the budget.
        effort: how long to measure.
        facts: kept in the profile.
        progress: see `Progress`.
        tree: a topology whose rounds are timed too.
        clock: what the budget is counted by.
        shaping: what else changes the distribution that is sampled from; processing logits takes time, too.
        batch: how many texts are decoded side by side, of each size whose rounds are timed too.
        verification: the mode whose rounds are timed; `auto` = the fastest lossless one (`modes.resolve_mode`).

    Returns:
        The profile with all its measurements; `noise` says whether the machine was quiet.
    """
    check_token_ids(prompts)
    check_limits(depth=depth, temperature=temperature)
    check_limit("depth", depth, low=1)
    warn_depth_limited(pair, depth, tree)
    effort = effort or Effort()
    calibration = partial(
        CalibrationRun, pair, prompts, depth=depth, temperature=temperature, tree=tree, shaping=shaping, batch=batch,
        verification=verification,
    )  # fmt: skip
    if effort.repetitions is None:
        new_tokens = _affordable(calibration(new_tokens=min(PROBED, new_tokens)), new_tokens, effort, clock)
    run = calibration(new_tokens=new_tokens)
    # Of policies that share a `cost_name` the last is timed, for all.
    decisions = {p.cost_name: decision_case(pair, p, prompts, run.settings, None) for p in as_policies(policies)}
    cases = {**run.cases(), **run.warmed(decisions)}
    return run.told(measure(cases, effort, clock=clock, progress=progress), facts)


def _affordable(probe: CalibrationRun, most: int, effort: Effort, clock: Clock) -> int:
    """Return how many tokens a text may have, at most `most`, for the budget to hold the fewest repetitions."""
    probe.play(0)  # what is set up once does not count
    begun = clock()
    probe.play(1)
    a_token = (clock() - begun) / probe.settings.max_new_tokens
    warm_ups = len(WARM_UPS) if probe.on_host else MOST_WARM_UPS
    room = effort.budget_s / (effort.fewest + warm_ups)  # the warm-up comes out of it as well
    return most if a_token * most <= room else min(most, max(SHORTEST, int(room / a_token)))


class CalibrationRun:
    """Texts decoded to time the parts of a round: in turns of their own, or between those of a live comparison.

    A shared machine changes its pace within minutes, and not equally for all sizes: what is compared with a prediction is
    best timed in the same minutes as the profile that the prediction is made from.

    Args:
        pair, prompts, depth, temperature, new_tokens, tree, shaping, batch, verification: as of `measure_profile`.

    Attributes:
        settings: of the texts.
        on_host: whether nothing is recorded, so that a short warm-up is enough.
    """

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Sequence[int]],
        *,
        depth: int,
        temperature: float,
        new_tokens: int = NEW_TOKENS,
        tree: str | None = None,
        shaping: SamplingParams = MODEL_DEFAULTS,
        batch: Sequence[int] = (),
        verification: str = "auto",
    ) -> None:
        check_limits(batch=max(batch, default=1))
        shared: dict[str, Any] = {"ignore_eos": True, "shaping": shaping, "verification": verification}
        self.settings = Settings(temperature, new_tokens, depth, **shared).for_pair(pair)
        self._prompts, self.on_host = prompts, pair.device.type == "cpu"
        self._lengths = two_lengths(pair.readable, prompts, new_tokens)
        # After a drafting round a plain one runs on cold caches: plain decoding is timed as it occurs, on its own.
        self._script, self._plain = (
            Speculator(pair, policy, self.settings) for policy in (ChainScript(depth), FixedLength(0))
        )
        for speculator in (self._script, self._plain):
            # From the context of the first round to that of the last.
            speculator.prepare([length + new for length in self._lengths for new in (1, new_tokens)])
        self._tree = None
        if tree:
            settings = Settings(temperature, new_tokens, tree=tree, **shared)
            self._tree = Speculator(pair, TreeScript(settings.topology.deepest, settings.topology.width), settings)
        self._batches = {
            # Batches end with fewer and fewer texts: between one and the smallest size costs are known by both.
            size: [
                Speculator(pair, policy, self.settings, batch=size)
                for policy in (BatchScript(size, depth), FixedLength(0))
            ]
            for size in sorted({1, *batch} if batch else ())
        }
        self._timed: list[Seconds] = []
        self._contexts: tuple[list[float], list[float]] = [], []

    def cases(self) -> dict[str, Case]:
        """Return what is timed in turns: chains with plain decoding and trees, and each batch size."""
        batches = {f"batch {size}": partial(self._batch, size) for size in self._batches}
        return self.warmed({"rounds": self._rounds, **batches})

    def warmed(self, cases: Mapping[str, Case]) -> dict[str, Case]:
        """Return cases whose warm-up goes on, in other rounds, until a GPU has recorded what they call for."""
        return {name: partial(self._warm_or_time, case) for name, case in cases.items()}

    def _warm_or_time(self, case: Case, number: int) -> Seconds:
        """Time a case, or at number 0 warm it up."""
        if number:
            return self._time(case, number)
        case(0)
        counts = [len(side) for side in self._contexts]
        for more in range(1, 1 if self.on_host else MOST_WARM_UPS):
            before = Recorded.fresh
            case(more)
            if Recorded.fresh == before:
                break
        self._cut_contexts(counts)
        return {}

    def _time(self, case: Case, number: int) -> Seconds:
        """Time a case, and again if a GPU has recorded calls meanwhile."""
        counts, seconds = [len(side) for side in self._contexts], dict[Key, Sequence[float]]()
        for _ in range(1 if self.on_host else MOST_TRIES):
            self._cut_contexts(counts)
            before, seconds = Recorded.fresh, dict(case(number))
            if Recorded.fresh == before:
                break
        return seconds

    def _cut_contexts(self, counts: Sequence[int]) -> None:
        """Forget all contexts of timed rounds but the first ones on each side."""
        for side, count in zip(self._contexts, counts, strict=True):
            del side[count:]

    def play(self, number: int) -> None:
        """Time all cases once, for `profile`; number 0 only warms up."""
        seconds = {key: values for case in self.cases().values() for key, values in case(number).items()}
        if number:
            self._timed.append(seconds)

    def profile(self, facts: Mapping[str, Any] | None = None) -> Profile:
        """Return the profile of the texts timed so far, at least one after the warm-up; `facts` are kept in it."""
        return self.told(collected(self._timed), facts)

    def told(self, measurements: Measurements, facts: Mapping[str, Any] | None = None) -> Profile:
        """Return the profile that the measurements of its cases tell."""
        short, long = (statistics.fmean(side) if side else 0.0 for side in self._contexts)
        made = Profile.measured(
            measurements, (short, long), self.settings.max_depth, self.settings.temperature,
            shaping=self.settings.shaping.to_dict(), verification=self._script.mode.name,
        )  # fmt: skip
        noise = made.noise.to_dict() if made.noise else {}
        return dataclasses.replace(made, facts={**(facts or {}), **noise, "rounds": sum(map(len, self._contexts))})

    def _rounds(self, number: int) -> Seconds:
        """Decode texts of chains and of trees at each context: in one case, since one is compared with the other."""
        timed: dict[Key, list[float]] = defaultdict(list)
        for key in (number,) if number else WARM_UPS:
            for context, side, tokens in zip(self._contexts, CONTEXTS, self._texts(key), strict=True):
                scripted, plain = self._script.generate(tokens, key), self._plain.generate(tokens, key)
                tree = self._tree.generate(tokens, key) if self._tree else None
                if number:
                    _add_text(timed, side, scripted, plain, tree)
                    context.extend(r.context for r in scripted.rounds if not r.cut)
        return timed

    def _batch(self, size: int, number: int) -> Seconds:
        """Decode as many texts side by side as a batch has, at each context, scripted and plain."""
        timed: dict[Key, list[float]] = defaultdict(list)
        texts = [self._texts(number * size + at) for at in range(size)]  # each stream another text
        for context, side, prompts in zip(self._contexts, CONTEXTS, zip(*texts, strict=True), strict=True):
            requests = [Request(prompt, number) for prompt in prompts]
            scripted, plain = (whole_rounds(run.run(requests)) for run in self._batches[size])
            for parts in scripted[min(SETTLING, len(scripted) // 4) :]:
                _add_batch_round(timed, side, parts)
            for parts in plain[min(SETTLING, len(plain) // 4) :]:
                timed[Key(BATCH_PLAIN, side, (size,))].append(sum(r.verify_s + r.outside_s for r in parts))
            if number:
                context.extend(sum(r.context for r in parts) / size for parts in scripted)
        return timed

    def _texts(self, number: int) -> list[list[int]]:
        """Return the short and the long prompt of a repetition."""
        return [stretch(self._prompts, length, number) for length in self._lengths]


def _add_text(
    timed: dict[Key, list[float]], side: str, scripted: Generation, plain: Generation, tree: Generation | None
) -> None:
    """Add the timings of texts at one context, without rounds that were cut short."""
    timed[Key(PREFILL, side, (scripted.prompt_tokens,))].append(scripted.prefill_s)
    for at, r in enumerate(scripted.rounds):
        if r.cut:
            continue
        if at:  # the first one runs after the prompt
            timed[Key(VERIFY, side, (r.verified,))].append(r.verify_s)
        timed[Key(OUTSIDE, side, (r.drafted,))].append(r.outside_s)
        if r.drafted:
            # A drafter that reads nothing is timed as one that reads the root alone.
            timed[Key(FIRST, side, (max(r.backlog, 1),))].append(r.first_draft_s)
        if r.drafted > 1:
            timed[Key(LATER, side, (r.drafted,))].append(r.draft_s)
    whole = [r for r in plain.rounds if not r.cut]
    timed[Key(PLAIN, side)].extend(r.verify_s for r in whole)
    timed[Key(PLAIN_OUTSIDE, side)].extend(r.outside_s for r in whole)
    for r in tree.rounds[1:] if tree else ():
        if r.verified and not r.cut:  # of none: plain decoding, timed on its own
            timed[Key(TREE_VERIFY, side, (r.verified,))].append(r.verify_s)
            timed[Key(TREE_OUTSIDE, side, (r.drafted,))].append(r.outside_s)


def _add_batch_round(timed: dict[Key, list[float]], side: str, parts: Sequence[Round]) -> None:
    """Add the timings of one round; each stream's record has its share of them."""
    sent = len(parts) + sum(r.verified for r in parts)
    timed[Key(BATCH_VERIFY, side, (len(parts), sent))].append(sum(r.verify_s + r.outside_s for r in parts))
    drafting = [r for r in parts if r.drafted]
    # Steps are timed together: they tell a price only if all drafts went equally deep and none had its whole text to read.
    if drafting and len({r.drafted for r in drafting}) == 1 and not any(r.backlog == r.context for r in drafting):
        seconds = sum(r.first_draft_s + r.draft_s for r in parts)
        timed[Key(BATCH_DRAFTS, side, (len(drafting), drafting[0].drafted))].append(seconds)


def two_lengths(readable: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[int, int]:
    """Return the lengths of the short and the long prompt."""
    if not prompts or not all(prompts):
        raise InputError("profile: expected at least one prompt, and none empty")
    short = int(statistics.median(map(len, prompts)))
    long = min(4 * short, readable - new_tokens)
    if long <= short:
        raise InputError(f"profile: the prompts leave no room for {new_tokens} new tokens; give shorter ones")
    return short, long


def stretch(prompts: Sequence[Sequence[int]], length: int, start: int) -> list[int]:
    """Return `length` tokens of the prompts laid end to end, beginning with prompt `start`."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(prompts[start % len(prompts)])
        start += 1
    return tokens[:length]
