"""`profile --through vllm`: what rounds cost inside vLLM, timed by its own steps.

A script replaces the policy in texts that vLLM decodes. A step of vLLM, from one draft to the next, is what the proposer
spends (first draft step, later ones, decisions, everything else) and the rest: vLLM's verification with its scheduler and
sampling. Decisions are timed in other texts under the policies. Drafting nothing is vLLM's step with speculation switched
on; without it, a step is a little shorter.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...decode.engines.drafting import EngineDraft, EngineObserver, Options, Spent
from ...decode.engines.settings import check_engine_drafter, check_engine_policy
from ...decode.profile.calibration import NEW_TOKENS, stretch, two_lengths
from ...decode.profile.decisions import EFFORT
from ...decode.profile.measuring import Case, Effort, Seconds, measure
from ...decode.profile.scripts import TWICE, BatchScript, shuffled
from ...policies.arguments import check_limits
from ...policies.contract import Array, DraftStep, State, StopPolicy
from ...policies.display import Progress, shown
from ...policies.features import DrawnTokens
from ...policies.measurements import (
    BATCH_DRAFTS,
    BATCH_FIRST,
    BATCH_VERIFY,
    CONTEXTS,
    DECISIONS,
    FIRST,
    LATER,
    OUTSIDE,
    PREFILL,
    VERIFY,
    Key,
    Measurements,
)
from ...policies.profile import Profile
from .through_vllm import InProcessProposer, start_vllm


class StepScript(StopPolicy):
    """Lets some requests draft, all equally deep, from a shuffled deck; each card twice in a row.

    It counts steps, not rounds: an engine does not report the outcome of a round without a draft.
    """

    first = 0

    def __init__(self, depth: int) -> None:
        self.max_depth, self.name = depth, f"step-script:{depth}"
        self.deal(1, 0)

    def deal(self, streams: int, number: int) -> None:
        """Begin a deck for this number of requests, shuffled by `number`."""
        self._deck, self._streams = BatchScript(streams, self.max_depth).deck, streams
        self._number, self._turn = number, -1

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length on the card, in the requests whose turn it is."""
        self._turn += step.depth == 0  # called once per step at depth 0, for all requests
        deck, place = divmod(self._turn // TWICE, len(self._deck))
        count, length = self._deck[shuffled(len(self._deck), self._number, deck)[place]]
        # Which requests draft changes from step to step. Rows without a request are skipped.
        turns = ((step.batch >= 0).cumsum() - 1 - self._turn) % self._streams < count
        return step.alive & (turns & (step.depth < length))[:, None], state


class StepTimer:
    """Times steps; see `decode.engines.drafting.EngineObserver`.

    Args:
        spent: returns the seconds that the draft model and decisions have taken so far.

    Attributes:
        timed: seconds by what was timed.
        contexts: mean tokens of the texts, by side and step.
        side, streams: context and number of requests that are timed now.
        policy: only its decisions are timed; None = the script decides, and everything else is timed.
    """

    def __init__(self, spent: Callable[[], tuple[float, float]]) -> None:
        self._spent, self._before, self._first = spent, (0.0, 0.0), 0.0
        self.timed: dict[Key, list[float]] = defaultdict(list)
        self.contexts: dict[str, list[float]] = {side: [] for side in CONTEXTS}
        self.side, self.streams = CONTEXTS[0], 1
        self.policy: str | None = None
        self._began, self._seconds = (
            False,
            0.0,
        )  # a text began in this step; seconds of the last step, if it is to be timed
        self._last: Sequence[EngineDraft] = ()
        self._add: Callable[[float], None] | None = None  # files the seconds of the last step

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        self._began = True

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            self._first = self._spent()[0]

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        # A step is timed if it drafted for all requests and the outcome of all is known now.
        self._seconds = max(step_s) if len(drafts) == len(self._last) == self.streams else 0.0

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        # The seconds of the last step are known by now, unless a prompt was read in between.
        if self._add is not None and self._seconds and not self._began:
            self._add(self._seconds)
        spent, before = self._spent(), self._before
        first_s = self._first - before[0] if any(draft.drafted for draft in drafts) else 0.0
        seconds = draft_s, first_s, spent[0] - before[0], spent[1] - before[1]
        self._last, self._add = drafts, partial(self._add_step, drafts, self._began, *seconds)
        self._before, self._began, self._seconds = spent, False, 0.0

    def _add_step(
        self, drafts: Sequence[EngineDraft], began: bool, draft_s: float, first_s: float, model_s: float, policy_s: float,
        seconds: float,
    ) -> None:  # fmt: skip
        """Add the timings of a step, unless the end of a text shortened it.

        Args:
            drafts: of the step.
            began: a text began in it.
            draft_s, first_s, model_s, policy_s: seconds of drafting, and in it of the first and of all draft steps, and of
                decisions.
            seconds: of the whole step.
        """
        if any(draft.hit_limit for draft in drafts):
            return
        if self.policy is not None:
            if decisions := max(draft.decisions for draft in drafts):
                self.timed[Key(DECISIONS, self.policy, (decisions,))].append(policy_s)
            return
        drafting, tokens = [draft for draft in drafts if draft.drafted], sum(draft.drafted for draft in drafts)
        rest, outside, later = seconds - draft_s, draft_s - model_s - policy_s, model_s - first_s

        def add(what: str, counts: tuple[int, ...], value: float) -> None:
            self.timed[Key(what, self.side, counts)].append(value)

        self.contexts[self.side].append(statistics.fmean(draft.context for draft in drafts))
        count, later_steps = len(drafts), max((draft.drafted for draft in drafting), default=0) - 1
        add(BATCH_VERIFY, (count, count + tokens), rest + outside)
        if drafting and not began:  # the draft that begins a text reads all of it
            add(BATCH_FIRST, (len(drafting),), first_s)
            if later_steps:
                add(BATCH_DRAFTS, (len(drafting), later_steps), later)
        if count == 1:
            add(VERIFY, (tokens,), rest)
            add(OUTSIDE, (tokens,), outside)
            if drafting:
                add(FIRST, (drafting[0].backlog,), first_s)
            if later_steps > 0:
                add(LATER, (tokens,), later)


class TimedProposer(InProcessProposer):
    """Drafts for vLLM as the script decides, and times it."""

    timer: StepTimer

    def observer(self, options: Options) -> EngineObserver:
        """Return the timer."""
        self.timer = StepTimer(self._spent)
        return self.timer

    def _spent(self) -> tuple[float, float]:
        spent = Spent() if self.drafting is None else self.drafting.spent
        return spent.model_s, spent.policy_s


def measure_vllm(
    target: str,
    draft: str,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: str = "model",
    depth: int = 8,
    temperature: float = 0.0,
    new_tokens: int = NEW_TOKENS,
    batch: Sequence[int] = (1,),
    policies: Sequence[StopPolicy] = (),
    readable: int = 2048,
    dtype: str = "float32",
    effort: Effort | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Progress = shown,
) -> Profile:
    """Measure what rounds cost inside vLLM, which runs in this process.

    Args:
        target, draft: folders or hub names; "" where the drafter takes no draft model.
        prompts: token ids; not those of the evaluation.
        drafter: value of `--drafter`.
        depth: K, the longest draft timed.
        temperature: of the sampling.
        new_tokens: decoded from each of two contexts.
        batch: numbers of requests that are decoded side by side; 1 is always included.
        policies: their decisions are timed too.
        readable: the longest text that both models read.
        dtype: of both models.
        effort: how long to measure.
        facts: kept in the profile.
        progress: see `Progress`.

    Raises:
        InputError: vLLM is not installed, an option is out of range, or the drafter reads the target's hidden states.
        PolicyError: a policy reads what vLLM does not pass to a drafter.
    """
    sizes = sorted({1, *batch})
    check_limits({"depth": 1}, depth=depth, temperature=temperature, batch=sizes[-1])
    run = _Run((target, draft, drafter), prompts, policies, depth, temperature, new_tokens, sizes[-1], readable, dtype)
    cases = {f"requests {n}": partial(run.play, n) for n in sizes}
    measured = measure({**cases, **run.deciding()}, effort, progress=progress)
    short, long = (statistics.fmean(run.contexts[side]) for side in CONTEXTS)
    from vllm import __version__

    mode = "match" if temperature == 0.0 else "point"
    profile = Profile.measured(measured, (short, long), depth, temperature)
    noise = profile.noise.to_dict() if profile.noise else {}
    facts = {**(facts or {}), "engine": f"vllm {__version__}", **noise}
    return dataclasses.replace(profile, facts=facts, verification=mode)


def measure_vllm_decisions(
    target: str,
    draft: str,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[StopPolicy],
    *,
    drafter: str = "model",
    depth: int,
    temperature: float = 0.0,
    new_tokens: int = NEW_TOKENS,
    most: int = 1,
    readable: int = 2048,
    dtype: str = "float32",
) -> Measurements:
    """Return the timings of decisions inside vLLM, about one request and about `most`; see `measure_vllm`."""
    run = _Run((target, draft, drafter), prompts, policies, depth, temperature, new_tokens, most, readable, dtype)
    return measure(run.deciding(), EFFORT)


class _Run:
    """vLLM, started to decode texts whose steps are timed; see `measure_vllm`."""

    def __init__(
        self, models: tuple[str, str, str], prompts: Sequence[Sequence[int]], policies: Sequence[StopPolicy], depth: int,
        temperature: float, new_tokens: int, rows: int, readable: int, dtype: str,
    ) -> None:  # fmt: skip
        self._policies = [check_engine_policy(policy).limited(depth) for policy in policies]
        self._rows, self._prompts, self._lengths = rows, prompts, two_lengths(readable, prompts, new_tokens + depth)
        target, draft, drafter = models
        options = {"draft": draft, "drafter": check_engine_drafter(drafter), "rows": rows, "temperature": temperature}
        self._script = StepScript(depth)
        # The same texts are decoded again and again, and their prompts must be read each time.
        self._engine, proposer = start_vllm(
            TimedProposer, self._script, target, depth, options, dtype, enable_prefix_caching=False
        )
        assert proposer.drafting is not None
        self._drafting, self._timer = proposer.drafting, proposer.timer
        self.contexts = self._timer.contexts
        from vllm import SamplingParams

        common = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
        self._params, self._one = (SamplingParams(max_tokens=count, **common) for count in (new_tokens, 1))

    def deciding(self) -> dict[str, Case]:
        """Return the cases of the policies' decisions: about one request, and about as many as the engine takes."""
        return {
            f"{policy.cost_name}, {streams} requests": partial(self._decide, policy, streams)
            for policy in self._policies
            for streams in (self._rows if 1 in policy.unasked else 1,)
        }

    def _decide(self, policy: StopPolicy, streams: int, number: int) -> Seconds:
        """Decode texts under a policy and return the seconds of its decisions, round by round."""
        timed = self._begin(streams, policy.cost_name)
        self._drafting.use(policy)
        self._engine.generate(self._texts(self._lengths[0], streams, number), self._params, use_tqdm=False)
        self._drafting.check_failed()
        self._drafting.use(self._script)
        return timed if number else {}

    def _begin(self, streams: int, policy: str | None) -> dict[Key, list[float]]:
        """Return what the timer fills from now on."""
        self._timer.timed, self._timer.streams, self._timer.policy = defaultdict(list), streams, policy
        return self._timer.timed

    def _texts(self, length: int, streams: int, number: int) -> list[dict[str, list[int]]]:
        """Return prompts of `length` tokens, different ones in each repetition."""
        at = range(number * streams, (number + 1) * streams)
        return [{"prompt_token_ids": stretch(self._prompts, length, n)} for n in at]

    def play(self, streams: int, number: int) -> Seconds:
        """Decode texts side by side at each context."""
        timed = self._begin(streams, None)
        for side, length in zip(CONTEXTS, self._lengths, strict=True):
            texts, self._timer.side = self._texts(length, streams, number), side
            self._script.deal(streams, number)
            self._engine.generate(texts, self._params, use_tqdm=False)
            if streams == 1:
                # One token: the prompt is read, and whatever is drafted after it is subtracted.
                drafted, begin = self._drafting.spent.all_s, time.perf_counter()
                self._engine.generate(texts, self._one, use_tqdm=False)
                seconds = time.perf_counter() - begin - (self._drafting.spent.all_s - drafted)
                timed[Key(PREFILL, side, (length,))].append(seconds)
        self._drafting.check_failed()
        return timed if number else {}
