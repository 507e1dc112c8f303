"""Calibration: decode texts through the round loop with scripted draft lengths, to time the parts of a round.

Timings of isolated forward passes miss 12 to 18% of the cost of a round. Therefore the loop runs unchanged, with a script
instead of the policy. The script drafts each length 0..K equally often. Plain decoding is timed in alternation.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
    TREE_DRAFTS,
    TREE_OUTSIDE,
    TREE_VERIFY,
    VERIFY,
    Key,
    Measurements,
    Series,
    merge_repetitions,
)
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policies
from ..drafters.spec import drafter_names, each_drafter, warn_depth_limited
from ..loop import Request, Speculator
from ..models.device import Recorded
from ..models.pair import Pair
from ..prompts import Prompts, encode_prompts
from ..records import Generation, Round
from ..settings import Settings
from ..verify.sampling import MODEL_DEFAULTS, SamplingParams
from .decisions import complete_rounds, decision_case
from .measuring import Case, Clock, Effort, Seconds, measure_each, merge_cases
from .scripts import BatchScript, ChainScript, TreeScript

NEW_TOKENS, PROBE_TOKENS, MIN_TOKENS = 48, 8, 16
"""Tokens of a text (a repetition takes less than a second on a small pair), of the texts that estimate the seconds per token,
and the minimum for slow pairs."""

WARM_UP_KEYS = (0, 1)
"""Keys of the warm-up texts. Together they draft nearly all lengths, and each length may have to be recorded once."""

SETTLING_ROUNDS = 4
"""First rounds of a batch, which are not timed. Reading the prompts clears the caches: the first round took 1.5 times as long
as the tenth."""

OF_TARGET = (VERIFY, PLAIN, PREFILL, TREE_VERIFY, BATCH_PLAIN, BATCH_VERIFY)
"""Timings that several drafters share."""

MAX_WARM_UPS, MAX_TRIES = 12, 3
"""Maximum number of warm-up repetitions on a GPU, and of tries of a timed repetition. A call is recorded when its shape
occurs for the second time, and a text contains few shapes."""


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
    """Measure the seconds of draft steps, verifications and the rest of a round.

    If the pair has several drafters, the rounds of each are timed in alternation. Verifications are those of the first.

    Args:
        pair: target and draft on the device to measure.
        prompts: see `decode.prompts.Prompts`. Use other prompts than those that speeds are predicted for. They are
            concatenated to reach a short and a long context.
        depth: K, length of the longest chain.
        temperature: sampling temperature.
        policies: policies whose decisions, including features, are timed.
        new_tokens: tokens decoded from each context; fewer if the pair is too slow for the budget.
        effort: how long to measure.
        facts: metadata that is stored in the profile.
        progress: see `Progress`.
        tree: topology that is timed in addition to chains.
        clock: measures the budget.
        sampling: other sampling parameters; processing logits takes time too.
        batch: batch sizes that are timed in addition to single texts.
        verification: name of a mode; `auto` = the fastest lossless one (`modes.resolve_mode`).

    Returns:
        The profile with all measurements. Its `noise` says whether the machine was quiet.

    Raises:
        InputError: an option is out of range, there is no prompt, or the prompts are too long for the models.
    """
    tokens = [ids for _, ids in encode_prompts(pair, prompts)]
    check_limits({"depth": 1}, depth=depth, temperature=temperature)
    warn_depth_limited(pair, depth, tree)
    effort = effort or Effort()

    def calibrations(new_tokens: int) -> list[CalibrationRun]:
        return [
            CalibrationRun(
                one, tokens, depth=depth, temperature=temperature, tree=tree, sampling=sampling, batch=batch,
                verification=verification, new_tokens=new_tokens,
            )
            for one in each_drafter(pair)
        ]  # fmt: skip

    if effort.repetitions is None:
        new_tokens = _affordable_tokens(calibrations(min(PROBE_TOKENS, new_tokens)), new_tokens, effort, clock)
    runs = dict(zip(drafter_names(pair.drafter), calibrations(new_tokens), strict=True))
    first = next(iter(runs))
    # Policies with one `cost_name` share a price: only the last of them is timed.
    decisions = {p.cost_name: decision_case(pair, p, tokens, runs[first].settings, None) for p in as_policies(policies)}
    cases = {f"{drafter} {name}": case for drafter, run in runs.items() for name, case in run.cases().items()}
    cases |= {f" {name}": case for name, case in runs[first].with_warm_up(decisions).items()}
    timed = measure_each(cases, effort, clock=clock, progress=progress)
    return profile_of_drafters(timed, list(runs), lambda name, measured: runs[name].profile(facts, measured))


def profile_of_drafters(
    timed: Mapping[str, Sequence[Seconds]], drafters: Sequence[str], build: Callable[[str, Measurements], Profile]
) -> Profile:
    """Return the profile of the first drafter, with those of the others.

    Args:
        timed: timings of each repetition by case. Names of cases begin with that of a drafter and a space; those that begin
            with a space are of the whole pair.
        drafters: names.
        build: returns the profile of a drafter, given its name and measurements.
    """

    def series(drafter: str) -> Mapping[Key, Series]:
        return merge_cases(parts for name, parts in timed.items() if name.partition(" ")[0] == drafter).series

    # A drafter without candidates in some rounds leaves sizes of verifications to the others.
    target = {key: one for name in reversed(drafters) for key, one in series(name).items() if key.what in OF_TARGET}
    first, *others = (
        build(name, Measurements({**series(name), **target, **(series("") if name == drafters[0] else {})}))
        for name in drafters
    )
    named = (
        dataclasses.replace(one, facts={**one.facts, "drafter": name})
        for name, one in zip(drafters[1:], others, strict=True)
    )
    return dataclasses.replace(first, others=tuple(named))


def _affordable_tokens(probes: Sequence[CalibrationRun], maximum: int, effort: Effort, clock: Clock) -> int:
    """Return the largest text length, in tokens, with which the minimum number of repetitions fits the budget."""
    for probe in probes:
        probe.play(0)  # excludes one-time work
    begin = clock()
    for probe in probes:
        probe.play(1)
    token_s = (clock() - begin) / probes[0].settings.max_new_tokens
    warm_ups = len(WARM_UP_KEYS) if probes[0].on_host else MAX_WARM_UPS  # the budget includes the warm-up
    text_s = effort.budget_s / (effort.quiet_after + warm_ups)
    return maximum if token_s * maximum <= text_s else min(maximum, max(MIN_TOKENS, int(text_s / token_s)))


class CalibrationRun:
    """Decodes texts to time the parts of a round, alone or in alternation with a live comparison.

    The speed of a shared machine changes within minutes, and not equally for all sizes. Therefore a live comparison and the
    profile that predicts it are measured in alternation.

    Args:
        pair, prompts, depth, temperature, new_tokens, tree, sampling, batch, verification: see `measure_profile`.

    Attributes:
        settings: settings of the texts.
        on_host: whether the pair is on the CPU, where no calls are recorded and a short warm-up is enough.
        recordings: number of calls that were recorded while they were timed, in spite of the warm-up and of repetitions.
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
        self._prompts, self.on_host, self.recordings = prompts, pair.device.type == "cpu", 0
        self._lengths = prompt_lengths(pair.readable, prompts, new_tokens)
        # Plain decoding is timed in separate texts, because a draft model clears the caches.
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
            # Size 1 is included because the number of texts falls at the end of a batch.
            size: [
                Speculator(pair, policy, self.settings, batch=size)
                for policy in (BatchScript(size, depth), FixedLength(0))
            ]
            for size in sorted({1, *batch} if batch else ())
        }
        self._timed: list[Seconds] = []
        self._contexts: tuple[list[float], list[float]] = [], []

    def cases(self) -> dict[str, Case]:
        """Return the cases to time in alternation: single texts (chains, plain decoding and trees), and each batch size."""
        batches = {f"batch {size}": partial(self._batch, size) for size in self._batches}
        return self.with_warm_up({"rounds": self._rounds, **batches})

    def with_warm_up(self, cases: Mapping[str, Case]) -> dict[str, Case]:
        """Return cases that are repeated while a GPU records calls: the warm-up with other texts, the rest with the same."""
        return {name: partial(self._repeat, case) for name, case in cases.items()}

    def _repeat(self, case: Case, number: int) -> Seconds:
        lengths = [len(side) for side in self._contexts]
        tries = 1 if self.on_host else MAX_TRIES if number else MAX_WARM_UPS
        seconds: Seconds = {}
        recorded = 0
        for turn in range(tries):
            for side, length in zip(self._contexts, lengths, strict=True):
                del side[length:]
            before, seconds = Recorded.not_replayed, case(number or turn)
            recorded = Recorded.not_replayed - before
            if not recorded and (number or turn):
                break
        self.recordings += recorded if number else 0
        if not number:
            for side, length in zip(self._contexts, lengths, strict=True):
                del side[length:]
        return seconds if number else {}

    def play(self, number: int) -> None:
        """Time all cases once for `profile`. Number 0 is the warm-up."""
        seconds = {key: values for case in self.cases().values() for key, values in case(number).items()}
        if number:
            self._timed.append(seconds)

    def profile(self, facts: Mapping[str, Any] | None = None, measurements: Measurements | None = None) -> Profile:
        """Return the profile.

        Args:
            facts: metadata that is stored in the profile.
            measurements: timings of the cases; default: those of `play`, which must have been called after the warm-up.
        """
        short, long = (statistics.fmean(side) if side else 0.0 for side in self._contexts)
        profile = Profile.measured(
            measurements or merge_repetitions(self._timed), (short, long), self.settings.max_depth, self.settings.temperature,
            sampling=self.settings.sampling.to_dict(), verification=self._script.mode.name,
        )  # fmt: skip
        noise = profile.noise.to_dict() if profile.noise else {}
        counts = {"rounds": sum(map(len, self._contexts)), **({} if self.on_host else {"recordings": self.recordings})}
        return dataclasses.replace(profile, facts={**(facts or {}), **noise, **counts})

    def _rounds(self, number: int) -> Seconds:
        """Time texts of chains, plain decoding and trees at each context. They are one case, because they are compared."""
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
        """Time batches of texts at each context, scripted and plain."""
        timed: dict[Key, list[float]] = defaultdict(list)
        texts = [self._texts(number * size + at) for at in range(size)]  # a different text for each stream
        for context, side, prompts in zip(self._contexts, CONTEXTS, zip(*texts, strict=True), strict=True):
            requests = [Request(prompt, number) for prompt in prompts]
            scripted, plain = (complete_rounds(run.run(requests)) for run in self._batches[size])
            for parts in scripted[min(SETTLING_ROUNDS, len(scripted) // 4) :]:
                _add_batch_round(timed, side, parts)
            for parts in plain[min(SETTLING_ROUNDS, len(plain) // 4) :]:
                timed[Key(BATCH_PLAIN, side, (size,))].append(sum(r.verify_s + r.outside_s for r in parts))
            if number:
                context.extend(sum(r.context for r in parts) / size for parts in scripted)
        return timed

    def _texts(self, number: int) -> list[list[int]]:
        """Return the short and the long prompt of a repetition."""
        return [repeat_prompts(self._prompts, length, number) for length in self._lengths]


def _add_text(
    timed: dict[Key, list[float]], side: str, scripted: Generation, plain: Generation, tree: Generation | None
) -> None:
    """Add the timings of texts at one context, except rounds that an end of text or a length limit ended."""
    timed[Key(PREFILL, side, (scripted.prompt_tokens,))].append(scripted.prefill_s)
    for at, r in enumerate(scripted.rounds):
        if r.cut:
            continue
        if at:  # the first round follows the prompt, which clears the caches
            timed[Key(VERIFY, side, (r.verified,))].append(r.verify_s)
        timed[Key(OUTSIDE, side, (r.drafted,))].append(r.outside_s)
        if r.drafted:
            # The backlog of a drafter that reads no tokens counts as 1.
            timed[Key(FIRST, side, (max(r.backlog, 1),))].append(r.first_draft_s)
        if r.drafted > 1:
            timed[Key(LATER, side, (r.drafted,))].append(r.draft_s)
    timed[Key(PLAIN, side)].extend(r.verify_s for r in plain.rounds if not r.cut)
    for r in tree.rounds[1:] if tree else ():
        if r.verified and not r.cut:  # without candidates it is plain decoding, which is timed separately
            timed[Key(TREE_VERIFY, side, (r.verified,))].append(r.verify_s)
            timed[Key(TREE_OUTSIDE, side, (r.drafted,))].append(r.outside_s)
            if r.later_steps:
                timed[Key(TREE_DRAFTS, side, (r.later_steps, r.later_rows))].append(r.draft_s)


def _add_batch_round(timed: dict[Key, list[float]], side: str, parts: Sequence[Round]) -> None:
    """Add the timings of a round. The record of each stream has an equal share of them."""
    sent = len(parts) + sum(r.verified for r in parts)
    timed[Key(BATCH_VERIFY, side, (len(parts), sent))].append(sum(r.verify_s + r.outside_s for r in parts))
    drafting = [r for r in parts if r.drafted]
    # All streams share the seconds of a step. They give a price only if all drafts are equally long and no drafter has to
    # read its whole text.
    if drafting and len({r.drafted for r in drafting}) == 1 and not any(r.backlog == r.context for r in drafting):
        timed[Key(BATCH_FIRST, side, (len(drafting),))].append(sum(r.first_draft_s for r in parts))
        if steps := drafting[0].drafted - 1:
            timed[Key(BATCH_DRAFTS, side, (len(drafting), steps))].append(sum(r.draft_s for r in parts))


def prompt_lengths(readable: int, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[int, int]:
    """Return the lengths of the short and the long prompt."""
    if not prompts or not all(prompts):
        raise InputError("profile: expected at least one prompt, and at least one token in each")
    short = int(statistics.median(map(len, prompts)))
    long = min(4 * short, readable - new_tokens)
    if long <= short:
        raise InputError(
            f"profile: the models cannot read the prompts and {new_tokens} new tokens; give shorter prompts"
        )
    return short, long


def repeat_prompts(prompts: Sequence[Sequence[int]], length: int, start: int) -> list[int]:
    """Return the first `length` tokens of the concatenated and repeated prompts, beginning with prompt `start`."""
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.extend(prompts[start % len(prompts)])
        start += 1
    return tokens[:length]
