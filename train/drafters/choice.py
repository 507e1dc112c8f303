"""The probability from which on the first of two drafters should draft a round: the one with the highest replayed throughput.

A dense trace of each drafter on the same texts says what each would have drafted at every position. The drafter of a round
depends on the committed text alone, so the two traces combined row by row are exactly the trace of both drafters together.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...collect.schema import NO_TOKEN
from ...decode.drafters.fallback import ROUNDING
from ...policies.contract import StopPolicy
from ...policies.errors import SpecstopWarning, TraceError
from ...policies.profile import Profile
from ..replay.log import play
from ..replay.seconds import prompt_seconds
from ..replay.traces.arrays import TraceArrays

MIN_CONFIDENCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

_SAME = ("topology", "temperature", "sampling", "seed", "max_new_tokens", "prompts_hash", "verification")


@dataclass(frozen=True)
class SureChoice:
    """The best use of two drafters.

    Attributes:
        sure: for `suffix?confidence=...+model`; None = the other drafter alone is the fastest.
        rate: tokens per second of `sure`, replayed.
        first, other: tokens per second of each alone.
        rates: of every probability that was tried.
    """

    sure: float | None
    rate: float
    first: float
    other: float
    rates: dict[float, float]

    @property
    def fastest(self) -> str:
        """The drafters to use: `first` or `other` alone, or `both`."""
        if self.first > self.rate:
            return "first"
        return "other" if self.sure is None else "both"


def choose_sure(
    first: TraceArrays,
    other: TraceArrays,
    policy: StopPolicy,
    profiles: tuple[Profile, Profile],
    sures: Sequence[float] = MIN_CONFIDENCES,
) -> SureChoice:
    """Return the probability from which on the first drafter should draft a round (`FallbackDrafter`).

    Args:
        first, other: dense traces of the two drafters on the same prompts with the same settings.
        policy: ends the drafts of both.
        profiles: of the two drafters, with the same target.
        sures: probabilities that are tried.

    Raises:
        TraceError: see `paired`.
    """
    first, other = paired(first, other)
    alone = [
        _rate(arrays, torch.full((len(arrays.accepted),), side == 0), policy, profiles)
        for side, arrays in enumerate((first, other))
    ]
    rates = {sure: _rate(*both(first, other, sure), policy, profiles, calls_first=True) for sure in sures}
    best = max(rates, key=lambda sure: rates[sure], default=None)
    if best is None or rates[best] <= alone[1]:
        return SureChoice(None, alone[1], alone[0], alone[1], rates)
    return SureChoice(best, rates[best], alone[0], alone[1], rates)


def paired(first: TraceArrays, other: TraceArrays) -> tuple[TraceArrays, TraceArrays]:
    """Return two traces with the texts that both hold, as `both` requires.

    Two runs of a target may diverge where two tokens are equally likely: such texts are left out, and a warning counts them.

    Raises:
        TraceError: the traces are not dense, of other prompts or settings, or have no text in common.
    """
    headers = first.header, other.header
    different = headers[0].differing(headers[1], _SAME)
    if len({header.pair.get("target") for header in headers}) > 1:
        different = [*different, "target"]
    if not all(header.has_every_anchor for header in headers):
        different = [*different, "collector: expected dense traces"]
    if not different and first.prompt_ids != other.prompt_ids:
        different = ["prompts"]
    if different:
        raise TraceError(
            f"two drafters are compared on dense traces of the same texts, but these differ: {', '.join(different)}"
        )
    same = [at for at in range(first.sequences) if _text(first, at) == _text(other, at)]
    if not same:
        raise TraceError("two drafters are compared on traces of the same texts, but no text is in both")
    if len(same) == first.sequences:
        return first, other
    count = f"{first.sequences - len(same)} of {first.sequences} texts"
    warnings.warn(f"{count} differ between the two traces and are left out", SpecstopWarning, stacklevel=2)
    return first.subset(same), other.subset(same)


def _text(arrays: TraceArrays, sequence: int) -> tuple[int, ...]:
    """Return the lengths of a text, and its tokens if they were recorded."""
    begin, rows = int(arrays.offset[sequence]), int(arrays.rows[sequence])
    sizes = int(arrays.prompt_tokens[sequence]), int(arrays.text_tokens[sequence]), int(arrays.first_anchor[sequence])
    tokens = arrays.columns.get("anchor_token")
    return *sizes, rows, *(() if tokens is None else map(int, tokens[begin : begin + rows].tolist()))


def both(first: TraceArrays, other: TraceArrays, sure: float) -> tuple[TraceArrays, Tensor]:
    """Return the trace of two drafters together, and [N] bool, the rounds that the first one drafts; of `paired` traces."""
    # All candidates for the next token were drawn from one row; any node of depth 1 holds its largest probability.
    by_first = (first.tokens[:, 0] != NO_TOKEN) & (first.column("top1")[:, 0] > sure - ROUNDING)

    def select(a: Tensor | None, b: Tensor | None) -> Any:
        if a is None or b is None:
            return None
        return torch.where(by_first.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    fields = ("accepted", "tokens", "ends", "cut", "path")
    combined = dataclasses.replace(
        other,
        columns={name: select(first.column(name), values) for name, values in other.columns.items()},
        hidden={},
        extra={},
        **{name: select(getattr(first, name), getattr(other, name)) for name in fields},
    )
    return combined, by_first


def _rate(
    arrays: TraceArrays,
    by_first: Tensor,
    policy: StopPolicy,
    profiles: tuple[Profile, Profile],
    calls_first: bool = False,
) -> float:
    """Return tokens per second of texts with rounds of two drafters, each in the time of its drafter.

    Args:
        arrays: of the texts.
        by_first: [N] bool, the rounds that the first drafter drafts.
        policy: ends drafts.
        profiles: of the two drafters.
        calls_first: the first drafter is also called, in vain, in the rounds of the other one: its first draft step.
    """
    depth = min(arrays.depth, *(profile.max_depth for profile in profiles))
    played = play(dataclasses.replace(arrays, reads=~by_first), policy.limited(depth), profiles[1])
    rounds = played.rounds
    by_first = by_first[torch.from_numpy(arrays.find(rounds.sequence.numpy(), rounds.anchor.numpy()))]
    seconds = torch.where(by_first, rounds.seconds(profiles[0]), rounds.seconds(profiles[1]))
    if calls_first:
        in_vain = torch.from_numpy(profiles[0].first_draft_s(1, rounds.context.numpy()))
        seconds = seconds + in_vain * (~by_first & (rounds.drafted > 0))  # a round without drafts calls no drafter
    total = float(seconds.sum() + prompt_seconds(profiles[1], arrays.prompt_tokens).sum())
    return float(played.result.tokens.sum()) / total
