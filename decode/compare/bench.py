"""`bench`: policies, plain decoding and transformers' own loops on the same prompts, in alternation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...policies.baselines.fixed import FixedLength
from ...policies.checking import with_costs
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.latency.profile import Profile
from ...policies.progress import Progress, shown
from ..loop import Speculator
from ..models.pair import Pair
from ..records import Generation, Tally
from ..settings import Settings
from ..verify.trained_for import tell_if_unmeasured, tell_if_untrained
from .alternate import Runner, run_alternating
from .hf_baseline import PLAIN, SETTINGS, Assisted

_REPLICATES = 2000


@dataclass(frozen=True)
class BenchLine:
    """One method of decoding, measured.

    Attributes:
        name: of the method.
        tokens_per_s: generated tokens over all seconds.
        ratio: to the first method, in the same run; with its 95% bootstrap interval over prompts in `low`, `high`.
        block_efficiency: tokens per target call; 0 where it is not reported.
        shares: of the seconds, by phase; empty where they are not reported.
        same_text: prompts whose text equals the first method's.
    """

    name: str
    tokens_per_s: float
    ratio: float
    low: float
    high: float
    block_efficiency: float
    shares: dict[str, float]
    same_text: int

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain values."""
        return asdict(self)


def bench(
    pair: Pair,
    prompts: Sequence[tuple[str, Sequence[int]]],
    policies: Sequence[StopPolicy],
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
        policies: to compare.
        settings: shared by all.
        library: the same pair with the engine `plain`; given, transformers' `generate` and, where texts are decoded one by
            one, which is all that they can do, its assisted settings run too.
        profile: see `Speculator`.
        seed: of the streams.
        batch: texts that are decoded side by side.
        progress: see `Progress`.

    Raises:
        InputError: there is no prompt.
    """
    if not prompts:
        raise InputError("bench: expected at least one prompt")
    settings, policies = settings or Settings(), [with_costs(policy, profile) for policy in policies]
    for policy in policies:
        tell_if_untrained(policy, settings)
    tell_if_unmeasured(profile, policies, settings, pair.drafter)
    runs: list[Runner] = [
        Speculator(pair, policy, settings, profile, batch=batch) for policy in (FixedLength(0), *policies)
    ]
    names = ["plain", *(policy.shown_name for policy in policies)]
    if library is not None:
        for setting in (PLAIN, *(SETTINGS if batch == 1 and library.draft is not None else ())):
            runs.append(
                Assisted(
                    library, setting, settings.temperature, settings.max_new_tokens, settings.ignore_eos,
                    settings.shaping,
                )
            )  # fmt: skip
            names.append(setting.name)
    texts = run_alternating(runs, prompts, seed=seed, batch=batch, progress=progress)
    return [bench_line(name, row, texts[0]) for name, row in zip(names, texts, strict=True)]


def bench_line(name: str, texts: Sequence[Generation], base: Sequence[Generation]) -> BenchLine:
    """Return the line of one method, as ratio to another one on the same prompts."""
    tally = Tally.of(texts)
    ratio, low, high = speed_ratio(texts, base)
    total = sum(tally.shares().values())
    shares = {phase: seconds / total for phase, seconds in tally.shares().items()} if tally.rounds else {}
    same = sum(a.tokens == b.tokens for a, b in zip(texts, base, strict=True))
    return BenchLine(name, tally.tokens_per_s, ratio, low, high, tally.block_efficiency, shares, same)


def speed_ratio(texts: Sequence[Generation], base: Sequence[Generation]) -> tuple[float, float, float]:
    """Return tokens/s of `texts` over that of `base`, with the 95% bootstrap interval over prompts."""
    a, b = (np.array([(len(g.tokens), g.seconds) for g in side]) for side in (texts, base))
    generator = np.random.default_rng(0)

    def of(at: Any) -> float:
        return float(a[at, 0].sum() / a[at, 1].sum() * b[at, 1].sum() / b[at, 0].sum())

    # The same prompts of both sides in each draw: a long or hard one weighs on both.
    draws = [of(generator.integers(0, len(a), len(a))) for _ in range(_REPLICATES)]
    low, high = np.quantile(draws, [0.025, 0.975])
    return of(np.arange(len(a))), float(low), float(high)
