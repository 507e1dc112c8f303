"""Benchmark of decoding methods: policies, plain decoding and loops of transformers on the same prompts, alternating."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..policies.display import Progress, Table, shown, silent
from ..policies.errors import InputError, PolicyFailure
from ..policies.fixed import FixedLength
from ..policies.host import with_costs
from ..policies.profile import Profile, load_profile
from ..policies.registry import PolicySpec, as_policies
from .drafters.spec import routed_drafters
from .hf.baseline import LOOKUP_SETTINGS, PLAIN, SETTINGS, Assisted
from .loop import Request, Speculator
from .models.cache import CachedModel
from .models.device import Recorded
from .models.pair import Pair
from .models.self_check import ROUNDING
from .profile import CalibrationRun
from .prompts import Prompts, encode_prompts
from .records import Generation, Tally
from .settings import Settings
from .verify.conditions import warn_if_unmeasured, warn_if_untrained
from .verify.noise import stream_key
from .verify.sampler import Sampler

MIN_TURNS = 8
"""Number of turns of a batch below which a ratio has no interval."""

MAX_REHEARSALS, MAX_TRIES = 4, 3
"""Limits of untimed repetitions of all texts and of timed repetitions of a turn, until no CUDA graph is recorded."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of sums and its bootstrap interval, which is None if there is a single cluster."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above(self) -> bool:
        """Whether the whole interval lies above 1."""
        return self.low is not None and self.low > 1.0

    @property
    def is_below(self) -> bool:
        """Whether the whole interval lies below 1."""
        return self.high is not None and self.high < 1.0

    def text(self, digits: int = 3) -> str:
        """Return `1.042 [1.021, 1.063]`, or the value alone if there is no interval."""
        interval = "" if self.low is None or self.high is None else f" [{self.low:.{digits}f}, {self.high:.{digits}f}]"
        return f"{self.value:.{digits}f}{interval}"


@dataclass(frozen=True)
class BenchLine:
    """Measurements of one decoding method.

    Attributes:
        name: of the method.
        tokens_per_s: generated tokens / seconds.
        ratio: to the first method, with a 95% bootstrap interval over prompts, or over turns of a batch (see `MIN_TURNS`).
        block_efficiency: tokens per target call; 0 if unknown.
        shares: of the seconds, by phase; empty if unknown.
        same_text: number of prompts with the text of the first method.
        ties: greedy texts of a lossless policy that differ from those of the first method at a tie of the two best tokens.
        wrong: texts that differ for another reason.
        recordings: CUDA graphs that were recorded while the method was timed.
        drafters: of a policy that routes, the rounds of each drafter, of several and of none.
        failure: of the policy. The other figures are then those of the fallback length, at least in part.
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
    drafters: dict[str, int] = field(default_factory=dict)
    failure: PolicyFailure | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the line as plain values; `low` and `high` are the interval. Speeds of a failed policy are None."""
        values = {**asdict(self), "ratio": self.ratio.value, "low": self.ratio.low, "high": self.ratio.high}
        values["failed"] = values.pop("failure") is not None
        if self.failure is not None:
            values |= dict.fromkeys(("tokens_per_s", "ratio", "low", "high", "block_efficiency", "shares"))
            values |= self.failure.to_dict()
        return values


class BenchResult(list[BenchLine]):
    """The lines of `bench`, plain decoding first."""

    @property
    def table(self) -> Table:
        """A row per method: tokens/s, its ratio to plain decoding with the 95% interval, and tokens per target call."""
        return Table(
            {
                "method": line.name,
                "tokens_per_s": line.tokens_per_s,
                "vs_plain": line.ratio.value,
                "low": line.ratio.low,
                "high": line.ratio.high,
                "tokens_per_call": line.block_efficiency,
            }
            for line in self
        )

    def to_pandas(self) -> Any:
        """Return the table as a `pandas.DataFrame`."""
        return self.table.to_pandas()

    def __repr__(self) -> str:
        return repr(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()


class Method(Protocol):
    """A decoding method: a `Speculator`, or another library."""

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the text of each request."""


def bench(
    pair: Pair,
    prompts: Prompts,
    policies: PolicySpec | Sequence[PolicySpec],
    *,
    ids: Sequence[str] | None = None,
    settings: Settings | None = None,
    library: Pair | None = None,
    profile: Profile | str | Path | None = None,
    seed: int = 0,
    batch: int = 1,
    progress: Progress = shown,
) -> BenchResult:
    """Measure decoding methods in alternation; the first line is plain decoding.

    Args:
        pair: models that the policies run on.
        prompts: see `decode.prompts.Prompts`.
        policies: policies, specs such as `fixed:4`, or policy folders.
        ids: name of each prompt; default: see `encode_prompts`.
        settings: shared by all policies, except for the tree of a policy that has one (`Settings.for_policy`).
        library: the same pair with the engine `plain`. If given, transformers' `generate` is measured too. With batch size 1,
            its assisted generation is measured as well; without a draft model, prompt lookup.
        profile: see `Speculator`.
        seed: of the streams.
        batch: number of texts decoded side by side.
        progress: see `Progress`.

    Raises:
        InputError: there is no prompt, or a default of the model cannot be applied.
    """
    encoded = encode_prompts(pair, prompts, ids)
    if not encoded:
        raise InputError("prompts: expected at least one")
    settings = (settings or Settings()).for_pair(pair)
    costs = None if profile is None else load_profile(profile)
    rules = [with_costs(policy, costs) for policy in as_policies(policies)]
    warn_if_unmeasured(costs, rules, settings, pair.drafter)
    # A list, because two policies may have the same name.
    methods: list[tuple[str, Method]] = [("plain", Speculator(pair, FixedLength(0), settings, costs, batch=batch))]
    for policy in rules:
        policy_settings = settings.for_policy(policy)
        warn_if_untrained(policy, policy_settings, pair)
        methods.append((policy.shown_name, Speculator(pair, policy, policy_settings, costs, batch=batch)))
    if library is not None:
        assisted = LOOKUP_SETTINGS if library.draft is None else SETTINGS
        for setting in (PLAIN, *(assisted if batch == 1 else ())):
            methods.append((setting.name, Assisted(library, setting, settings, batch)))
    recordings = Counter[int]()
    texts = run_alternating(
        [method for _, method in methods], encoded, seed=seed, batch=batch, recordings=recordings, progress=progress
    )
    tokens = [tuple(ids) for _, ids in encoded]
    lines = BenchResult()
    for at, (name, method) in enumerate(methods):
        line = bench_line(name, texts[at], texts[0], texts_per_turn(batch), tokens)
        names = routed_drafters(method.policy, pair.drafter) if isinstance(method, Speculator) else ()
        used = Tally(texts[at]).by_drafter(names)
        ties = wrong = 0
        if settings.temperature == 0.0 and isinstance(method, Speculator) and method.mode.lossless:
            ties, wrong = count_differences(pair, settings, tokens, texts[at], texts[0])
        lines.append(replace(line, ties=ties, wrong=wrong, recordings=recordings[at], drafters=used))
    return lines


def bench_line(
    name: str,
    texts: Sequence[Generation],
    base: Sequence[Generation],
    turn: int = 1,
    prompts: Sequence[Hashable] = (),
) -> BenchLine:
    """Return the line of one method relative to another one on the same prompts; see `speed_ratio`."""
    tally = Tally(texts)
    ratio, seconds = speed_ratio(texts, base, turn, prompts), tally.shares()
    total = sum(seconds.values())
    shares = {phase: part / total for phase, part in seconds.items()} if tally.rounds else {}
    same = sum(a.tokens == b.tokens for a, b in zip(texts, base, strict=True))
    return BenchLine(name, tally.tokens_per_s, ratio, tally.block_efficiency, shares, same, failure=tally.failure)


def speed_ratio(
    texts: Sequence[Generation], base: Sequence[Generation], turn: int = 1, prompts: Sequence[Hashable] = ()
) -> Ratio:
    """Return tokens/s of `texts` over that of `base`, with a paired 95% cluster bootstrap interval.

    The interval is the expanded percentile interval (Hesterberg, The American Statistician 69, 2015).

    Args:
        texts, base: of the same prompts.
        turn: prompts that are decoded side by side; a turn is then a cluster, because its texts share their seconds.
        prompts: prompt of each text. With `turn` = 1 all texts of one prompt are a cluster.
    """
    from scipy.stats import bootstrap  # scipy.stats takes half a second to import

    labels = list(prompts) if turn == 1 and prompts else [at // turn for at in range(len(texts))]
    index = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    sums = np.zeros((4, len(index)))  # tokens and seconds of `texts` and of `base`, by cluster
    for label, text, other in zip(labels, texts, base, strict=True):
        sums[:, index[label]] += len(text.tokens), text.seconds, len(other.tokens), other.seconds

    def ratio(*parts: np.ndarray[Any, Any], axis: int = -1) -> Any:
        tokens, seconds, base_tokens, base_seconds = (part.sum(axis) for part in parts)
        return tokens / seconds / (base_tokens / base_seconds)

    value, clusters = float(ratio(*sums)), len(index)
    if clusters < 2 or (turn > 1 and clusters < MIN_TURNS):
        return Ratio(value)
    result = bootstrap(
        tuple(sums), ratio, paired=True, vectorized=True, n_resamples=2000, method="percentile",
        confidence_level=1.0 - 2.0 * expanded_tail(clusters), rng=np.random.default_rng(0),
    )  # fmt: skip
    return Ratio(value, float(result.confidence_interval.low), float(result.confidence_interval.high))


def expanded_tail(clusters: int, level: float = 0.95) -> float:
    """Return the share of resamples below (and above) an expanded percentile interval of this level."""
    from scipy.special import ndtr, stdtrit  # scipy takes long to import, and most callers do not need it

    t = stdtrit(clusters - 1, (1.0 + level) / 2)
    return float(ndtr(-np.sqrt(clusters / (clusters - 1)) * t))


def texts_per_turn(batch: int) -> int:
    """Return how many prompts each method decodes before the next one: two per slot of a batch, which refills slots."""
    return 2 * batch if batch > 1 else 1


def run_alternating(
    methods: Sequence[Method],
    prompts: Sequence[tuple[str, Sequence[int]]],
    *,
    calibration: CalibrationRun | None = None,
    calibrate_every: int = 1,
    seed: int = 0,
    batch: int = 1,
    recordings: Counter[int] | None = None,
    progress: Progress = silent,
) -> list[list[Generation]]:
    """Decode every prompt with every method; the first method changes from turn to turn.

    Args:
        methods: the methods.
        prompts: (id, token ids). The first ones are decoded once more for warm-up; if calls are recorded as CUDA graphs, all
            are, until nothing is recorded any more.
        calibration: run in between, so that its profile describes the same minutes.
        calibrate_every: turns between two calibration runs.
        seed: of the streams.
        batch: number of texts that each method decodes side by side.
        recordings: receives, by index of the method, the number of graphs recorded while it was timed.
        progress: see `Progress`.

    Returns:
        Texts by method and prompt.
    """
    texts: list[list[Generation]] = [[] for _ in methods]
    requests = [Request(tokens, stream_key(seed, name)) for name, tokens in prompts]
    size = texts_per_turn(batch)
    turns = [requests[first : first + size] for first in range(0, len(requests), size)]
    for method in methods:
        _warm_up(method, turns, batch)
    for number, turn in enumerate(turns):
        for offset in range(len(methods)):
            at = (offset + number) % len(methods)
            method = methods[at]
            # A method that carries state from text to text must not decode a text twice.
            for _ in range(1 if isinstance(method, Speculator) and method.carries else MAX_TRIES):
                before = Recorded.not_replayed
                generations = method.run(turn)
                recorded = Recorded.not_replayed - before
                if not recorded:
                    break
            texts[at] += generations
            if recordings is not None:
                recordings[at] += recorded
        if calibration is not None and number % calibrate_every == 0:
            calibration.play(number // calibrate_every)  # 0 warms up
        progress("live", min((number + 1) * size, len(prompts)), len(prompts))
    return texts


def _warm_up(method: Method, turns: Sequence[Sequence[Request]], batch: int) -> None:
    """Decode the first texts; if calls are recorded as CUDA graphs, decode all texts until no call is recorded any more."""
    method.run(turns[0][:batch] if turns else [])
    if not isinstance(method, Speculator):
        return
    if Recorded.not_replayed:
        lengths = [len(request.prompt) for turn in turns for request in turn]
        if method.batch == 1 and method.topology.is_chain:
            method.prepare(range(min(lengths) + 1, max(lengths) + method.settings.max_new_tokens + 1))
        for _ in range(MAX_REHEARSALS):
            before = Recorded.not_replayed
            method.reset()
            for turn in turns:
                method.run(turn)
            if Recorded.not_replayed == before:
                break
    method.reset()  # forget the state that a policy carries from text to text


def count_differences(
    pair: Pair,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Generation],
    base: Sequence[Generation],
) -> tuple[int, int]:
    """Return how many greedy texts differ from plain decoding at a tie, and how many for other reasons.

    A tie means that the scores of the two best tokens differ by no more than the rounding error of the target's dtype.

    Args:
        pair, settings: of the run, at temperature 0.
        prompts: token ids of each prompt.
        texts, base: texts of the method and of plain decoding.
    """
    ties = wrong = 0
    for prompt, text, plain in zip(prompts, texts, base, strict=True):
        if text.tokens == plain.tokens:
            continue
        pairs = enumerate(zip(text.tokens, plain.tokens, strict=False))
        first = next((at for at, (token, other) in pairs if token != other), None)  # None: one is a prefix of the other
        is_tie = first is not None and _is_tie(pair, settings, prompt, plain.tokens[:first])
        ties, wrong = ties + is_tie, wrong + (not is_tie)
    return ties, wrong


@torch.inference_mode()
def _is_tie(pair: Pair, settings: Settings, prompt: Sequence[int], generated: Sequence[int]) -> bool:
    text = [*prompt, *generated]
    cache = CachedModel(pair.target, len(text), pair.vocabulary, device=pair.device, reading=pair.readings[0])
    logits = cache.read(torch.tensor([text], device=pair.device), 1)[0]
    processors = settings.sampling.build(0.0, prompt, () if settings.ignore_eos else pair.eos, pair.device)
    best = Sampler(processors, 0.0, ())(logits, lambda: [text]).topk(2, -1).values[0]
    spread = logits[logits.isfinite()].std(correction=0)
    return bool(best[0] - best[1] <= ROUNDING.get(pair.target.dtype, ROUNDING[torch.bfloat16]) * spread)
