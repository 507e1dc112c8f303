"""`profile --through vllm`: what rounds cost inside vLLM, timed by its own steps.

A script drafts in the place of a policy, in texts that vLLM decodes. A step of vLLM's, from one draft to the next, is what
the class spends (first draft step, later ones, decisions, all else) and the rest: vLLM's verification with its scheduler
and sampling. Decisions are those of policies, which take the script's place in other texts. Drafting nothing is vLLM's step
with speculation switched on; without it, a step is a little shorter.
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
from ...decode.engines.vllm import Proposer
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
from .through_vllm import start_vllm

CLASS = f"{__name__}.TimedProposer"


class StepScript(StopPolicy):
    """Has some requests draft, all equally deep, from a shuffled deck; each card twice in a row.

    It counts steps, not rounds: an engine does not say what came of a round without a draft.
    """

    first = 0

    def __init__(self, depth: int) -> None:
        self.max_depth, self.name = depth, f"step-script:{depth}"
        self.deal(1, 0)

    def deal(self, streams: int, number: int) -> None:
        """Begin with a deck for so many requests; `number` shuffles it."""
        self._deck, self._streams = BatchScript(streams, self.max_depth).deck, streams
        self._number, self._turn = number, -1

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep up to the length on the card, in the requests whose turn it is."""
        self._turn += step.depth == 0  # one such question a step, for all requests
        deck, place = divmod(self._turn // TWICE, len(self._deck))
        some, length = self._deck[shuffled(len(self._deck), self._number, deck)[place]]
        # Which requests draft changes from step to step. Rows without a request are skipped.
        turns = ((step.batch >= 0).cumsum() - 1 - self._turn) % self._streams < some
        return step.alive & (turns & (step.depth < length))[:, None], state


@dataclasses.dataclass
class _Step:
    """The drafts of a step: seconds of all of it, of the first draft step, of all of them and of decisions; whether a text
    began in it."""

    drafts: Sequence[EngineDraft]
    draft_s: float
    first_s: float
    model_s: float
    asked_s: float
    began: bool


class StepTimer:
    """Times steps; see `decode.engines.drafting.EngineObserver`.

    Args:
        spent: returns the seconds that the draft model and decisions have taken so far.

    Attributes:
        timed: seconds by what was timed.
        contexts: mean tokens of the texts, by side and step.
        side: the context that is timed now; `streams` as many requests.
        policy: whose decisions are timed, and nothing else; None = the script decides, and all else is timed.
    """

    def __init__(self, spent: Callable[[], tuple[float, float]]) -> None:
        self._spent, self._known, self._first = spent, (0.0, 0.0), 0.0
        self.timed: dict[Key, list[float]] = defaultdict(list)
        self.contexts: dict[str, list[float]] = {side: [] for side in CONTEXTS}
        self.side, self.streams = CONTEXTS[0], 1
        self.policy: str | None = None
        self._began, self._seconds = False, 0.0
        self._last: _Step | None = None

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        self._began = True

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            self._first = self._spent()[0]

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        # A step is timed where all requests were drafted for in it, and all are heard of now.
        whole = self._last is not None and len(drafts) == len(self._last.drafts) == self.streams
        self._seconds = max(step_s) if whole else 0.0

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        # The last step's seconds are known by now, unless a prompt was read in between.
        if self._last is not None and self._seconds and not self._began:
            self._add(self._last, self._seconds)
        spent, known = self._spent(), self._known
        first = self._first - known[0] if any(sent.drafted for sent in drafts) else 0.0
        self._last = _Step(drafts, draft_s, first, spent[0] - known[0], spent[1] - known[1], self._began)
        self._known, self._began, self._seconds = spent, False, 0.0

    def _add(self, step: _Step, seconds: float) -> None:
        """Add the timings of a step; one that an end of a text has cut short is none."""
        drafts, count = step.drafts, len(step.drafts)
        if any(sent.hit_limit for sent in drafts):
            return
        if self.policy is not None:
            asked = [sent.decisions for sent in drafts]
            if any(asked):
                self.timed[Key(DECISIONS, self.policy, (max(asked),))].append(step.asked_s)
            return
        drafting, tokens = [sent for sent in drafts if sent.drafted], sum(sent.drafted for sent in drafts)
        rest, outside, later = (
            seconds - step.draft_s, step.draft_s - step.model_s - step.asked_s, step.model_s - step.first_s
        )  # fmt: skip

        def add(what: str, counts: tuple[int, ...], value: float) -> None:
            self.timed[Key(what, self.side, counts)].append(value)

        self.contexts[self.side].append(statistics.fmean(sent.context for sent in drafts))
        add(BATCH_VERIFY, (count, count + tokens), rest + outside)
        read, steps = sum(sent.backlog for sent in drafting), max((sent.drafted for sent in drafting), default=0) - 1
        # A draft that begins a text reads all of it.
        if drafting and not step.began:
            add(BATCH_FIRST, (len(drafting),), step.first_s)
            if steps:
                add(BATCH_DRAFTS, (len(drafting), steps), later)
        if count == 1:
            add(VERIFY, (tokens,), rest)
            add(OUTSIDE, (tokens,), outside)
            if drafting:
                add(FIRST, (read,), step.first_s)
            if steps > 0:
                add(LATER, (tokens,), later)


class TimedProposer(Proposer):
    """Drafts for vLLM as the script says, and times it."""

    made: TimedProposer
    script: StepScript
    timer: StepTimer

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the script."""
        TimedProposer.made, self.script = self, StepScript(self.depth)
        return self.script

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
        prompts: token ids; not the ones that predictions are made for.
        drafter: as of `--drafter`.
        depth: K, the longest draft timed.
        temperature: of the sampling.
        new_tokens: decoded from each of two contexts.
        batch: how many requests are decoded side by side, of each size that is timed; 1 always is.
        policies: whose decisions are timed as well, of one request.
        readable: the longest text that both models read.
        dtype: of both models.
        effort: how long to measure.
        facts: kept in the profile.
        progress: see `Progress`.

    Raises:
        InputError: vLLM is not installed, an option is out of range, or the drafter reads the target's hidden states.
        PolicyError: a policy reads what vLLM does not hand to a drafter.
    """
    sizes = sorted({1, *batch})
    check_limits({"depth": 1}, depth=depth, temperature=temperature, batch=sizes[-1])
    run = _Run((target, draft, drafter), prompts, policies, depth, temperature, new_tokens, sizes[-1], readable, dtype)
    cases = {f"requests {n}": partial(run.play, n) for n in sizes}
    measured = measure({**cases, **run.deciding()}, effort, progress=progress)
    short, long = (statistics.fmean(run.contexts[side]) for side in CONTEXTS)
    from vllm import __version__

    mode = "match" if temperature == 0.0 else "point"
    made = Profile.measured(measured, (short, long), depth, temperature)
    noise = made.noise.to_dict() if made.noise else {}
    return dataclasses.replace(
        made, facts={**(facts or {}), "engine": f"vllm {__version__}", **noise}, verification=mode
    )


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
    """Texts that vLLM, started for them, decodes to time its steps; see `measure_vllm`."""

    def __init__(
        self, models: tuple[str, str, str], prompts: Sequence[Sequence[int]], policies: Sequence[StopPolicy], depth: int,
        temperature: float, new_tokens: int, rows: int, readable: int, dtype: str,
    ) -> None:  # fmt: skip
        self._policies = [check_engine_policy(policy).limited(depth) for policy in policies]
        self._rows = rows
        self._prompts, self._lengths = prompts, two_lengths(readable, prompts, new_tokens + depth)
        drafter = check_engine_drafter(models[2])
        settings = {"draft": models[1], "drafter": drafter, "rows": rows, "temperature": temperature}
        # The same texts are decoded again and again, and their prompts are to be read each time.
        self._engine = start_vllm(models[0], CLASS, depth, settings, dtype, enable_prefix_caching=False)
        self._proposer = TimedProposer.made
        from vllm import SamplingParams

        told = {"temperature": temperature, "ignore_eos": True, "detokenize": False}
        self._params, self._one = (SamplingParams(max_tokens=n, **told) for n in (new_tokens, 1))
        self.contexts: dict[str, list[float]] = {side: [] for side in CONTEXTS}

    def deciding(self) -> dict[str, Case]:
        """Return the cases of the policies' decisions: about one request, and about as many as the engine takes."""
        return {
            f"{policy.cost_name}, {streams} requests": partial(self._decide, policy, streams)
            for policy in self._policies
            for streams in (self._rows if 1 in policy.unasked else 1,)
        }

    def _decide(self, policy: StopPolicy, streams: int, number: int) -> Seconds:
        """Decode texts under a policy and return the seconds of its decisions, round by round."""
        proposer, timed = self._proposer, defaultdict[Key, list[float]](list)
        assert proposer.drafting is not None
        proposer.timer.timed, proposer.timer.streams, proposer.timer.policy = timed, streams, policy.cost_name
        proposer.drafting.use(policy)
        self._engine.generate(self._texts(self._lengths[0], streams, number), self._params, use_tqdm=False)
        proposer.drafting.check_failed()
        proposer.drafting.use(proposer.script)
        proposer.timer.policy = None
        return timed if number else {}

    def _texts(self, length: int, streams: int, number: int) -> list[dict[str, list[int]]]:
        """Return so many prompts of so many tokens, others in each repetition."""
        at = range(number * streams, (number + 1) * streams)
        return [{"prompt_token_ids": stretch(self._prompts, length, n)} for n in at]

    def play(self, streams: int, number: int) -> Seconds:
        """Decode so many texts side by side at each context."""
        proposer, timed = self._proposer, defaultdict[Key, list[float]](list)
        assert proposer.drafting is not None
        for side, length in zip(CONTEXTS, self._lengths, strict=True):
            texts, timer = self._texts(length, streams, number), proposer.timer
            timer.timed, timer.contexts, timer.side, timer.streams = timed, self.contexts, side, streams
            proposer.script.deal(streams, number)
            self._engine.generate(texts, self._params, use_tqdm=False)
            if streams == 1:
                # One token: the prompt is read, and whatever is drafted after it is subtracted.
                before, begun = proposer.drafting.spent.all_s, time.perf_counter()
                self._engine.generate(texts, self._one, use_tqdm=False)
                spent = time.perf_counter() - begun - (proposer.drafting.spent.all_s - before)
                timed[Key(PREFILL, side, (length,))].append(spent)
        proposer.drafting.check_failed()
        return timed if number else {}
