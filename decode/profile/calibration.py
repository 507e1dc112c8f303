"""Calibration: texts decoded through the round loop by scripts, to time the parts of a round.

Timings of isolated forwards miss a good part of what a round costs. So the loop runs unchanged, on prompts without
predictions, with a script instead of the policy: every length 0..K equally often, and plain decoding in turns with it.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ...policies.arguments import check_limits
from ...policies.display import Progress, shown
from ...policies.errors import InputError
from ...policies.fixed import FixedLength
from ...policies.measurements import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_PLAIN,
    BATCH_VERIFY,
    CONTEXTS,
    FIRST,
    LATER,
    OUTSIDE,
    PLAIN,
    PREFILL,
    TREE_OUTSIDE,
    TREE_VERIFY,
    VERIFY,
    Key,
    Measurements,
    merge_repetitions,
)
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..drafters.spec import warn_depth_limited
from ..loop import Request, Speculator
from ..models.device import Recorded
from ..models.pair import Pair
from ..prompts import Prompts, encode_prompts
from ..records import Generation, Round
from ..settings import Settings
from ..verify.sampling import MODEL_DEFAULTS, SamplingParams
from .decisions import decision_case, whole_rounds
from .measuring import Case, Clock, Effort, Seconds, measure
from .scripts import BatchScript, ChainScript, TreeScript

NEW_TOKENS, PROBE_TOKENS, MIN_TOKENS = 48, 8, 16
"""Tokens of a text, so few that a repetition is over within a second on a small pair; of texts that time a token; and the
fewest for slow pairs."""

WARM_UP_KEYS = (0, 1)
"""Keys of the texts that warm up: together they draft nearly all lengths, each of which may have to be captured once."""

SETTLING_ROUNDS = 4
"""Rounds of a batch after the prompts that are not timed: reading these empties the caches, and the first one took half as
long again as the tenth."""

MAX_WARM_UPS, MAX_TRIES = 12, 3
"""Repetitions that warm up a GPU at most: a call is recorded the second time that its shape comes, and a text has few."""


def measure_profile(
    pair: Pair,
    prompts: Prompts,
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
    sampling: SamplingParams = MODEL_DEFAULTS,
    batch: Sequence[int] = (),
    verification: str = "auto",
) -> Profile:
    """Measure what draft steps, verifications and everything around them cost.

    Args:
        pair: on its device.
        prompts: see `decode.prompts.Prompts`; not the ones that predictions are made for. They are laid end to end to
            reach a short and a long context.
        depth: K, the longest chain timed.
        temperature: of the sampling.
        policies: policies to time, features included.
        new_tokens: decoded from each context; fewer if a pair is too slow for the budget.
        effort: how long to measure.
        facts: kept in the profile.
        progress: see `Progress`.
        tree: a topology to time as well.
        clock: counts the budget.
        sampling: what else changes the distribution that is sampled from; processing logits takes time, too.
        batch: batch sizes to time as well.
        verification: the mode to time; `auto` = the fastest lossless one (`modes.resolve_mode`).

    Returns:
        The profile with all its measurements; `noise` says whether the machine was quiet.
    """
    tokens = [ids for _, ids in encode_prompts(pair, prompts)]
    check_limits({"depth": 1}, depth=depth, temperature=temperature)
    warn_depth_limited(pair, depth, tree)
    effort = effort or Effort()
    calibration = partial(
        CalibrationRun, pair, tokens, depth=depth, temperature=temperature, tree=tree, sampling=sampling, batch=batch,
        verification=verification,
    )  # fmt: skip
    if effort.repetitions is None:
        new_tokens = _affordable_tokens(
            calibration(new_tokens=min(PROBE_TOKENS, new_tokens)), new_tokens, effort, clock
        )
    run = calibration(new_tokens=new_tokens)
    # Of policies that share a `cost_name` the last is timed, for all.
    decisions = {p.cost_name: decision_case(pair, p, tokens, run.settings, None) for p in as_policies(policies)}
    cases = {**run.cases(), **run.warmed(decisions)}
    return run.profile(facts, measure(cases, effort, clock=clock, progress=progress))


def _affordable_tokens(probe: CalibrationRun, maximum: int, effort: Effort, clock: Clock) -> int:
    """Return how many tokens a text may have for the budget to hold the fewest repetitions."""
    probe.play(0)  # what is set up once does not count
    begin = clock()
    probe.play(1)
    token_s = (clock() - begin) / probe.settings.max_new_tokens
    warm_ups = len(WARM_UP_KEYS) if probe.on_host else MAX_WARM_UPS  # the warm-up is a part of the budget
    text_s = effort.budget_s / (effort.fewest + warm_ups)
    return maximum if token_s * maximum <= text_s else min(maximum, max(MIN_TOKENS, int(text_s / token_s)))


class CalibrationRun:
    """Texts decoded to time the parts of a round: in separate turns, or between those of a live comparison.

    A shared machine changes its pace within minutes, and not equally for all sizes. So a live comparison is timed in the
    same minutes as the profile that predicts it.

    Args:
        pair, prompts, depth, temperature, new_tokens, tree, sampling, batch, verification: as of `measure_profile`.

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
        sampling: SamplingParams = MODEL_DEFAULTS,
        batch: Sequence[int] = (),
        verification: str = "auto",
    ) -> None:
        check_limits(batch=max(batch, default=1))
        options: dict[str, Any] = {"ignore_eos": True, "sampling": sampling, "verification": verification}
        self.settings = Settings(temperature, new_tokens, depth, **options).for_pair(pair)
        self._prompts, self.on_host = prompts, pair.device.type == "cpu"
        self._lengths = two_lengths(pair.readable, prompts, new_tokens)
        # After a drafting round a plain one runs on cold caches: plain decoding is timed in separate texts.
        self._script, self._plain = (
            Speculator(pair, policy, self.settings) for policy in (ChainScript(depth), FixedLength(0))
        )
        for speculator in (self._script, self._plain):
            # From the context of the first round to that of the last.
            speculator.prepare([length + new for length in self._lengths for new in (1, new_tokens)])
        self._tree = None
        if tree:
            settings = Settings(temperature, new_tokens, tree=tree, **options)
            self._tree = Speculator(pair, TreeScript(settings.topology.deepest, settings.topology.width), settings)
        self._batches = {
            # Batches end with fewer and fewer texts: between one and the smallest size costs are interpolated.
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
        """Return cases that are repeated while a GPU records calls: with other texts to warm up, else with the same."""
        return {name: partial(self._repeat, case) for name, case in cases.items()}

    def _repeat(self, case: Case, number: int) -> Seconds:
        lengths = [len(side) for side in self._contexts]
        tries = 1 if self.on_host else MAX_TRIES if number else MAX_WARM_UPS
        seconds: Seconds = {}
        for turn in range(tries):
            for side, length in zip(self._contexts, lengths, strict=True):
                del side[length:]
            before, seconds = Recorded.fresh, case(number or turn)
            if Recorded.fresh == before and (number or turn):
                break
        if not number:
            for side, length in zip(self._contexts, lengths, strict=True):
                del side[length:]
        return seconds if number else {}

    def play(self, number: int) -> None:
        """Time all cases once, for `profile`; number 0 only warms up."""
        seconds = {key: values for case in self.cases().values() for key, values in case(number).items()}
        if number:
            self._timed.append(seconds)

    def profile(self, facts: Mapping[str, Any] | None = None, measurements: Measurements | None = None) -> Profile:
        """Return the profile of the measurements of the cases.

        Args:
            facts: kept in the profile.
            measurements: default: those of `play`, which was called at least once after the warm-up.
        """
        short, long = (statistics.fmean(side) if side else 0.0 for side in self._contexts)
        profile = Profile.measured(
            measurements or merge_repetitions(self._timed), (short, long), self.settings.max_depth, self.settings.temperature,
            sampling=self.settings.sampling.to_dict(), verification=self._script.mode.name,
        )  # fmt: skip
        noise = profile.noise.to_dict() if profile.noise else {}
        return dataclasses.replace(profile, facts={**(facts or {}), **noise, "rounds": sum(map(len, self._contexts))})

    def _rounds(self, number: int) -> Seconds:
        """Decode texts of chains and of trees at each context: in one case, since they are compared."""
        timed: dict[Key, list[float]] = defaultdict(list)
        for key in (number,) if number else WARM_UP_KEYS:
            for context, side, tokens in zip(self._contexts, CONTEXTS, self._texts(key), strict=True):
                scripted, plain = self._script.generate(tokens, key), self._plain.generate(tokens, key)
                tree = self._tree.generate(tokens, key) if self._tree else None
                if number:
                    _add_text(timed, side, scripted, plain, tree)
                    context.extend(r.context for r in scripted.rounds if not r.cut)
        return timed

    def _batch(self, size: int, number: int) -> Seconds:
        """Decode texts side by side at each context, scripted and plain."""
        timed: dict[Key, list[float]] = defaultdict(list)
        texts = [self._texts(number * size + at) for at in range(size)]  # each stream another text
        for context, side, prompts in zip(self._contexts, CONTEXTS, zip(*texts, strict=True), strict=True):
            requests = [Request(prompt, number) for prompt in prompts]
            scripted, plain = (whole_rounds(run.run(requests)) for run in self._batches[size])
            for parts in scripted[min(SETTLING_ROUNDS, len(scripted) // 4) :]:
                _add_batch_round(timed, side, parts)
            for parts in plain[min(SETTLING_ROUNDS, len(plain) // 4) :]:
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
    timed[Key(PLAIN, side)].extend(r.verify_s for r in plain.rounds if not r.cut)
    for r in tree.rounds[1:] if tree else ():
        if r.verified and not r.cut:  # of none: plain decoding, timed in other texts
            timed[Key(TREE_VERIFY, side, (r.verified,))].append(r.verify_s)
            timed[Key(TREE_OUTSIDE, side, (r.drafted,))].append(r.outside_s)


def _add_batch_round(timed: dict[Key, list[float]], side: str, parts: Sequence[Round]) -> None:
    """Add the timings of one round; each stream's record has its share of them."""
    sent = len(parts) + sum(r.verified for r in parts)
    timed[Key(BATCH_VERIFY, side, (len(parts), sent))].append(sum(r.verify_s + r.outside_s for r in parts))
    drafting = [r for r in parts if r.drafted]
    # Steps are timed together: they give a price only if all drafts went equally deep and none had its whole text to read.
    if drafting and len({r.drafted for r in drafting}) == 1 and not any(r.backlog == r.context for r in drafting):
        timed[Key(BATCH_FIRST, side, (len(drafting),))].append(sum(r.first_draft_s for r in parts))
        if steps := drafting[0].drafted - 1:
            timed[Key(BATCH_DRAFTS, side, (len(drafting), steps))].append(sum(r.draft_s for r in parts))


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
