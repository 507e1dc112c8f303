"""The cost of rounds inside vLLM, from the timings of its steps.

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
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ...decode.drafters.spec import drafter_names
from ...decode.engines.drafting import DraftingStats, EngineDraft, Options
from ...decode.engines.settings import check_engine_drafter, check_engine_policy
from ...decode.engines.vllm import Proposer
from ...decode.profile.calibration import NEW_TOKENS, profile_of_drafters, prompt_lengths, repeat_prompts
from ...decode.profile.decisions import EFFORT
from ...decode.profile.measuring import Case, Effort, Seconds, measure, measure_each
from ...decode.profile.scripts import REPEATS, BatchScript, seeded_permutation
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
from .through_vllm import start_vllm


class StepScript(StopPolicy):
    """Lets a number of requests draft with one drafter, all equally deep, from a shuffled deck; each card twice in a row.

    It counts steps, not rounds: an engine does not report the outcome of a round without a draft.
    """

    first, routes = 0, True

    def __init__(self, depth: int) -> None:
        self.max_depth, self.name = depth, f"step-script:{depth}"
        self.deal(0, 1, 0)

    def deal(self, drafter: int, streams: int, number: int) -> None:
        """Begin a deck for a drafter and a number of requests, shuffled by `number`."""
        self._drafter = drafter
        self._deck, self._streams = BatchScript(streams, self.max_depth).deck, streams
        self._number, self._turn = number, -1

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length on the card, in the requests of this turn."""
        self._turn += step.depth == 0  # called once per step at depth 0, for all requests
        deck, place = divmod(self._turn // REPEATS, len(self._deck))
        count, length = self._deck[seeded_permutation(len(self._deck), self._number, deck)[place]]
        # Which requests draft changes from step to step. Rows without a request are skipped.
        turns = ((step.batch >= 0).cumsum() - 1 - self._turn) % self._streams < count
        kept: Array = step.alive & (turns & (step.depth < length))[:, None]
        return kept if step.drafter is None else kept & (step.drafter == self._drafter), state


@dataclass
class _Step:
    """A step of the engine.

    Attributes:
        drafts: of all its requests.
        began: whether a text began in it.
        draft_s, first_s, model_s, policy_s: seconds of drafting, and in it of the first and of all draft steps, and of
            decisions.
        seconds: of the whole step; 0 unless the outcome of all its drafts is known.
    """

    drafts: Sequence[EngineDraft]
    began: bool
    draft_s: float
    first_s: float
    model_s: float
    policy_s: float
    seconds: float = 0.0


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
        self._spent, self._before, self._first, self._began = spent, (0.0, 0.0), 0.0, False
        self._last: _Step | None = None
        self.timed: dict[Key, list[float]] = defaultdict(list)
        self.contexts: dict[str, list[float]] = {side: [] for side in CONTEXTS}
        self.side, self.streams = CONTEXTS[0], 1
        self.policy: str | None = None

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        self._began = True

    def on_draft_step(self, depth: int, drafter: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            self._first = self._spent()[0]

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        if self._last is not None and len(drafts) == len(self._last.drafts) == self.streams:
            self._last.seconds = max(step_s)

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        # The last step has its seconds by now, unless a prompt was read in between.
        if self._last is not None and self._last.seconds and not self._began:
            self._add(self._last)
        (model_s, policy_s), before = self._spent(), self._before
        first_s = self._first - before[0] if any(draft.drafted for draft in drafts) else 0.0
        self._last = _Step(drafts, self._began, draft_s, first_s, model_s - before[0], policy_s - before[1])
        self._before, self._began = (model_s, policy_s), False

    def _add(self, step: _Step) -> None:
        """Add the timings of a step, unless the end of a text shortened it."""
        if any(draft.hit_limit for draft in step.drafts):
            return
        if self.policy is not None:
            if decisions := max(draft.decisions for draft in step.drafts):
                self.timed[Key(DECISIONS, self.policy, (decisions,))].append(step.policy_s)
            return
        drafting = [draft for draft in step.drafts if draft.drafted]
        tokens = sum(draft.drafted for draft in drafting)
        count, later_steps = len(step.drafts), max((draft.drafted for draft in drafting), default=1) - 1
        rest, outside = step.seconds - step.draft_s, step.draft_s - step.model_s - step.policy_s
        later = step.model_s - step.first_s
        timings = {Key(BATCH_VERIFY, self.side, (count, count + tokens)): rest + outside}
        if drafting and not step.began:  # the draft that begins a text reads all of it
            timings[Key(BATCH_FIRST, self.side, (len(drafting),))] = step.first_s
            if later_steps:
                timings[Key(BATCH_DRAFTS, self.side, (len(drafting), later_steps))] = later
        if count == 1:
            timings[Key(VERIFY, self.side, (tokens,))] = rest
            timings[Key(OUTSIDE, self.side, (tokens,))] = outside
            if drafting:
                timings[Key(FIRST, self.side, (max(drafting[0].backlog, 1),))] = step.first_s  # 0: it reads nothing
            if later_steps:
                timings[Key(LATER, self.side, (tokens,))] = later
        for key, seconds in timings.items():
            self.timed[key].append(seconds)
        self.contexts[self.side].append(statistics.fmean(draft.context for draft in step.drafts))


def create_timer(proposer: Proposer, options: Options) -> StepTimer:
    """Return a timer of a proposer's steps."""

    def spent() -> tuple[float, float]:
        so_far = DraftingStats() if proposer.drafting is None else proposer.drafting.stats
        return so_far.drafter_s, so_far.policy_s

    return StepTimer(spent)


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
        target, draft: folders or hub names; "" if no drafter has a draft model.
        prompts: token ids; not those of the evaluation.
        drafter: value of `--drafter`; the rounds of several are timed in alternation.
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
        InputError: vLLM is not installed, an option is out of range, or a drafter reads the target's hidden states.
        PolicyError: a policy reads what vLLM does not pass to a drafter, or lets several drafters draft in one round.
    """
    sizes = sorted({1, *batch})
    check_limits({"depth": 1}, depth=depth, temperature=temperature, batch=sizes[-1])
    run = _Run(target, draft, prompts, policies, drafter, depth, temperature, new_tokens, sizes[-1], readable, dtype)
    names = drafter_names(drafter)
    cases: dict[str, Case] = {f" {name}": case for name, case in run.deciding().items()}
    cases |= {f"{name} requests {n}": partial(run.play, at, n) for at, name in enumerate(names) for n in sizes}
    timed = measure_each(cases, effort, progress=progress)
    short, long = (statistics.fmean(run.timer.contexts[side]) for side in CONTEXTS)
    from vllm import __version__

    def build(name: str, measured: Measurements) -> Profile:
        profile = Profile.measured(measured, (short, long), depth, temperature)
        noise = profile.noise.to_dict() if profile.noise else {}
        described = {**(facts or {}), "engine": f"vllm {__version__}", **noise}
        return dataclasses.replace(profile, facts=described, verification="match" if temperature == 0.0 else "point")

    return profile_of_drafters(timed, names, build)


def measure_vllm_decisions(
    target: str, draft: str, prompts: Sequence[Sequence[int]], policies: Sequence[StopPolicy], *, most: int = 1,
    **options: Any,
) -> Measurements:  # fmt: skip
    """Return the timings of decisions inside vLLM, about one request and about `most`; arguments as of `measure_vllm`."""
    return measure(_Run(target, draft, prompts, policies, requests=most, **options).deciding(), EFFORT)


class _Run:
    """Times steps of vLLM while it decodes texts; see `measure_vllm`. `requests`: most that are decoded at once."""

    def __init__(
        self, target: str, draft: str, prompts: Sequence[Sequence[int]], policies: Sequence[StopPolicy],
        drafter: str = "model", depth: int = 8, temperature: float = 0.0, new_tokens: int = NEW_TOKENS, requests: int = 1,
        readable: int = 2048, dtype: str = "float32",
    ) -> None:  # fmt: skip
        self._policies = [check_engine_policy(policy).limited(depth) for policy in policies]
        self._requests, self._prompts = requests, prompts
        self._lengths = prompt_lengths(readable, prompts, new_tokens + depth)
        options = {
            "draft": draft, "drafter": check_engine_drafter(drafter), "rows": requests, "temperature": temperature
        }  # fmt: skip
        self._script = StepScript(depth)
        # The same texts are decoded again and again, and their prompts must be read each time.
        self._engine, proposer = start_vllm(
            create_timer, self._script, target, depth, options, dtype, enable_prefix_caching=False
        )
        assert proposer.drafting is not None
        self._drafting = proposer.drafting
        self.timer: StepTimer = proposer.observed
        from vllm import SamplingParams

        common = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
        self._params, self._one = (SamplingParams(max_tokens=count, **common) for count in (new_tokens, 1))

    def deciding(self) -> dict[str, Case]:
        """Return the cases of the policies' decisions: about one request, and about as many as the engine takes."""
        return {
            f"{policy.cost_name}, {streams} requests": partial(self._decide, policy, streams)
            for policy in self._policies
            for streams in (self._requests if 1 in policy.unasked else 1,)
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
        self.timer.timed, self.timer.streams, self.timer.policy = defaultdict(list), streams, policy
        return self.timer.timed

    def _texts(self, length: int, streams: int, number: int) -> list[dict[str, list[int]]]:
        """Return prompts of `length` tokens, different ones in each repetition."""
        at = range(number * streams, (number + 1) * streams)
        return [{"prompt_token_ids": repeat_prompts(self._prompts, length, n)} for n in at]

    def play(self, drafter: int, streams: int, number: int) -> Seconds:
        """Decode texts side by side at each context with a drafter."""
        timed = self._begin(streams, None)
        for side, length in zip(CONTEXTS, self._lengths, strict=True):
            texts, self.timer.side = self._texts(length, streams, number), side
            self._script.deal(drafter, streams, number)
            self._engine.generate(texts, self._params, use_tqdm=False)
            if streams == 1:
                # One token: the prompt is read, and whatever is drafted after it is subtracted.
                drafted, begin = self._drafting.stats.total_s, time.perf_counter()
                self._engine.generate(texts, self._one, use_tqdm=False)
                seconds = time.perf_counter() - begin - (self._drafting.stats.total_s - drafted)
                timed[Key(PREFILL, side, (length,))].append(seconds)
        self._drafting.check_failed()
        return timed if number else {}
