"""`bench`: policies, plain decoding and transformers' own loops on the same prompts, in alternation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...policies.arguments import check_token_ids
from ...policies.baselines.fixed import FixedLength
from ...policies.checking import with_costs
from ...policies.errors import InputError
from ...policies.plugin_code import Failure
from ...policies.profile import Profile
from ...policies.progress import Progress, shown
from ...policies.storage.registry import PolicySpec, as_policies
from ..loop import Speculator
from ..models.pair import Pair
from ..records import Generation, Tally
from ..settings import Settings
from ..verify.trained_for import tell_if_unmeasured, tell_if_untrained
from .alternate import Runner, run_alternating, texts_a_turn
from .hf_baseline import PLAIN, SETTINGS, Assisted
from .intervals import Ratio, Resamples
from .ties import count_differences

FEWEST_TURNS = 8
"""Turns of a batch below which a ratio has no interval."""


@dataclass(frozen=True)
class BenchLine:
    """One method of decoding, measured.

    Attributes:
        name: of the method.
        tokens_per_s: generated tokens over all seconds.
        ratio: to the first method, in the same run; with its 95% bootstrap interval over turns, each a prompt or, of a batch,
            those decoded side by side. None where there were too few turns.
        block_efficiency: tokens per target call; 0 where it is not reported.
        shares: of the seconds, by phase; empty where they are not reported.
        same_text: prompts whose text equals the first method's.
        ties: greedy texts of a lossless policy that leave the first method's at a tie of the two best tokens.
        wrong: those that leave it for no such reason.
        recordings: calls that were recorded as CUDA graphs while the method was timed, which takes longer than making them.
        failure: of the policy; the figures are then in part or wholly those of a fixed length, and not reported.
    """

    name: str
    tokens_per_s: float
    ratio: Ratio
    block_efficiency: float
    shares: dict[str, float]
    same_text: int
    ties: int = 0
    wrong: int = 0
    recordings: int = 0
    failure: Failure | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain values; `low` and `high` are the ratio's interval. A policy that failed has no speed."""
        values = {**asdict(self), "ratio": self.ratio.value, "low": self.ratio.low, "high": self.ratio.high}
        values["failed"] = values.pop("failure") is not None
        if self.failure is not None:
            values |= dict.fromkeys(("tokens_per_s", "ratio", "low", "high", "block_efficiency", "shares"))
            values |= self.failure.to_dict()
        return values


def bench(
    pair: Pair,
    prompts: Sequence[tuple[str, Sequence[int]]],
    policies: PolicySpec | Sequence[PolicySpec],
    *,
    settings: Settings | None = None,
    library: Pair | None = None,
    profile: Profile | None = None,
    seed: int = 0,
    batch: int = 1,
    progress: Progress = shown,
) -> list[BenchLine]:
    """Measure decoding methods side by side; the first line is our plain decoding.

    Args:
        pair: on which policies run.
        prompts: (id, token ids).
        policies: to compare: policies, specs such as `fixed:4`, or policy folders.
        settings: shared by all, but for the tree of a policy that has one (`Settings.for_policy`).
        library: the same pair with the engine `plain`; given, transformers' `generate` and, where texts are decoded one by
            one, which is all that they can do, its assisted settings run too.
        profile: see `Speculator`.
        seed: of the streams.
        batch: texts that are decoded side by side.
        progress: see `Progress`.

    Raises:
        InputError: there is no prompt, or a default of the model cannot be applied.
    """
    if not prompts:
        raise InputError("prompts: expected at least one (id, token ids)")
    check_token_ids([prompt[-1] for prompt in prompts])
    settings = (settings or Settings()).for_pair(pair)
    rules = [with_costs(policy, profile) for policy in as_policies(policies)]
    runs: list[Runner] = [Speculator(pair, FixedLength(0), settings, profile, batch=batch)]
    for policy in rules:
        own = settings.for_policy(policy)
        tell_if_untrained(policy, own, pair)
        runs.append(Speculator(pair, policy, own, profile, batch=batch))
    tell_if_unmeasured(profile, rules, settings, pair.drafter)
    names = ["plain", *(policy.shown_name for policy in rules)]
    if library is not None:
        for setting in (PLAIN, *(SETTINGS if batch == 1 and library.draft is not None else ())):
            runs.append(
                Assisted(
                    library, setting, settings.temperature, settings.max_new_tokens, settings.ignore_eos,
                    settings.shaping, batch,
                )
            )  # fmt: skip
            names.append(setting.name)
    recordings = Counter[int]()
    texts = run_alternating(runs, prompts, seed=seed, batch=batch, recordings=recordings, progress=progress)
    turn = texts_a_turn(batch)
    read = [tuple(tokens) for _, tokens in prompts]
    lines = [bench_line(name, row, texts[0], turn, read) for name, row in zip(names, texts, strict=True)]
    lines = [replace(line, recordings=recordings[at]) for at, line in enumerate(lines)]
    if settings.temperature == 0.0:
        for at, run in enumerate(runs):
            if isinstance(run, Speculator) and run.mode.lossless:
                ties, wrong = count_differences(pair, settings, read, texts[at], texts[0])
                lines[at] = replace(lines[at], ties=ties, wrong=wrong)
    return lines


def bench_line(
    name: str,
    texts: Sequence[Generation],
    base: Sequence[Generation],
    turn: int = 1,
    prompts: Sequence[Hashable] = (),
) -> BenchLine:
    """Return the line of one method, as ratio to another one on the same prompts; see `speed_ratio`."""
    tally = Tally.of(texts)
    ratio = speed_ratio(texts, base, turn, prompts)
    total = sum(tally.shares().values())
    shares = {phase: seconds / total for phase, seconds in tally.shares().items()} if tally.rounds else {}
    same = sum(a.tokens == b.tokens for a, b in zip(texts, base, strict=True))
    return BenchLine(name, tally.tokens_per_s, ratio, tally.block_efficiency, shares, same, failure=tally.failure)


def speed_ratio(
    texts: Sequence[Generation], base: Sequence[Generation], turn: int = 1, prompts: Sequence[Hashable] = ()
) -> Ratio:
    """Return tokens/s of `texts` over that of `base`, with the 95% bootstrap interval over turns of so many prompts.

    Both have the same prompts in each resample, as a long or hard one weighs on both; those of a turn share its seconds.
    Two or three turns of a batch would give the range of as many numbers: fewer than `FEWEST_TURNS` have no interval.

    Args:
        texts, base: of the same prompts.
        turn: prompts that are decoded side by side.
        prompts: what each text is of, if turns are of one text: texts of one prompt are drawn together.
    """
    number = {prompt: at for at, prompt in enumerate(dict.fromkeys(prompts))} if turn == 1 else {}
    samples = Resamples([number[p] for p in prompts] if number else [at // turn for at in range(len(texts))])
    mine, theirs = (
        samples.total([len(g.tokens) for g in side]) / samples.total([g.seconds for g in side])
        for side in (texts, base)
    )
    ratio = samples.interval(mine / theirs)
    return Ratio(ratio.value) if turn > 1 and samples.clusters < FEWEST_TURNS else ratio
