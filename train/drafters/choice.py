"""From which chance on the first of two drafters should take a round: the one that gives the most tokens a second, replayed.

A dense trace of each drafter over the same texts says what either would have drafted at every position. A round's drafter is
chosen by the committed text alone, so the two traces put together row by row are the trace of both at once, exactly.
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
from ..replay.log import Rounds, play
from ..replay.seconds import prompt_seconds
from ..replay.traces.arrays import TraceArrays

SURES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

_TOKEN = "anchor_token"

_SAME = ("topology", "temperature", "shaping", "seed", "max_new_tokens", "prompts_hash", "verification")


@dataclass(frozen=True)
class SureChoice:
    """What was found.

    Attributes:
        sure: for `suffix?sure=...+model`; None = the other drafter alone is the fastest.
        rate: tokens a second of `sure`, replayed.
        first, other: tokens a second of each alone.
        rates: of every chance that was tried.
    """

    sure: float | None
    rate: float
    first: float
    other: float
    rates: dict[float, float]

    @property
    def fastest(self) -> str:
        """What to draft with: `first` or `other` alone, or `both`."""
        if self.first > self.rate:
            return "first"
        return "other" if self.sure is None else "both"


def choose_sure(
    first: TraceArrays,
    other: TraceArrays,
    policy: StopPolicy,
    profiles: tuple[Profile, Profile],
    sures: Sequence[float] = SURES,
) -> SureChoice:
    """Return the chance from which on the first drafter should take a round (`FallbackDrafter`).

    Args:
        first, other: dense traces of the two drafters over the same prompts and settings.
        policy: that ends the drafts of both.
        profiles: of the two drafters, with the same target.
        sures: chances that are tried.

    Raises:
        TraceError: see `paired`.
    """
    first, other = paired(first, other)
    alone = [
        play_texts(arrays, everywhere(arrays, side == 0), policy, profiles).rate(profiles)
        for side, arrays in enumerate((first, other))
    ]
    rates = {sure: play_texts(*both(first, other, sure), policy, profiles, True).rate(profiles) for sure in sures}
    best = max(rates, key=lambda sure: rates[sure], default=None)
    if best is None or rates[best] <= alone[1]:
        return SureChoice(None, alone[1], alone[0], alone[1], rates)
    return SureChoice(best, rates[best], alone[0], alone[1], rates)


def paired(first: TraceArrays, other: TraceArrays) -> tuple[TraceArrays, TraceArrays]:
    """Return two traces with the texts that both hold, as `both` wants them.

    Two runs of a target may part where two tokens are equally good: such texts are left out, with a warning that counts them.

    Raises:
        TraceError: the traces are not dense, of other prompts or settings, or have no text in common.
    """
    headers = first.header, other.header
    differ = headers[0].differing(headers[1], _SAME)
    targets = {header.pair.get("target") for header in headers}
    if differ or len(targets) > 1 or not all(header.has_every_anchor for header in headers):
        what = ", ".join(differ) or ("target" if len(targets) > 1 else "collector: expected dense traces")
        raise TraceError(f"two drafters are compared on dense traces of the same texts, but these differ: {what}")
    if first.prompt_ids != other.prompt_ids:
        raise TraceError("two drafters are compared on dense traces of the same texts, but these differ: prompts")
    same = [at for at in range(first.sequences) if _text(first, at) == _text(other, at)]
    if not same:
        raise TraceError("two drafters are compared on traces of the same texts, but no text is in both")
    if len(same) == first.sequences:
        return first, other
    told = f"{first.sequences - len(same)} of {first.sequences} texts differ between the two traces and are left out"
    warnings.warn(told, SpecstopWarning, stacklevel=2)
    return first.subset(same), other.subset(same)


def _text(arrays: TraceArrays, sequence: int) -> tuple[int, ...]:
    """Return what tells a text from others: its lengths, and its tokens where they were recorded."""
    begin, rows = int(arrays.offset[sequence]), int(arrays.rows[sequence])
    sizes = int(arrays.prompt_tokens[sequence]), int(arrays.text_tokens[sequence]), int(arrays.first_anchor[sequence])
    tokens = arrays.columns.get(_TOKEN)
    return *sizes, rows, *(() if tokens is None else map(int, tokens[begin : begin + rows].tolist()))


def both(first: TraceArrays, other: TraceArrays, sure: float) -> tuple[TraceArrays, Tensor]:
    """Return the trace of two drafters at once, and [N] bool, the rounds that the first one drafts; of `paired` traces."""
    # All candidates for the next token were drawn from one row, of which any node of depth 1 has the largest chance.
    mine = (first.tokens[:, 0] != NO_TOKEN) & (first.column("top1")[:, 0] > sure - ROUNDING)

    def of(a: Tensor | None, b: Tensor | None) -> Any:
        if a is None or b is None:
            return None
        return torch.where(mine.reshape(-1, *[1] * (a.dim() - 1)), a, b)

    made = dataclasses.replace(
        other,
        columns={name: of(first.column(name), values) for name, values in other.columns.items()},
        hidden={},
        extra={},
        **{
            name: of(getattr(first, name), getattr(other, name))
            for name in ("accepted", "tokens", "ends", "cut", "path")
        },
    )
    return made, mine


@dataclass(frozen=True)
class TextRounds:
    """Rounds of S texts, each drafted by one of two drafters: what any pair of profiles says that they take.

    Attributes:
        tokens, prompt_tokens: [S] of each text.
        rounds: [R] of both drafters; those of the first one read nothing.
        by_first: [R] bool, rounds that the first one drafts.
        is_asked: whether the first one is called in the rounds of the other too, which takes its first draft step.
    """

    tokens: Tensor
    prompt_tokens: Tensor
    rounds: Rounds
    by_first: Tensor
    is_asked: bool

    def seconds(self, profiles: tuple[Profile, Profile], paces: tuple[float, float] = (1.0, 1.0)) -> Tensor:
        """Return [S] float64 seconds of each text under the profiles of the two drafters, each slowed down by a factor."""
        rounds = self.rounds
        mine, theirs = (rounds.seconds(profile) for profile in profiles)
        seconds = torch.where(self.by_first, paces[0] * mine, paces[1] * theirs)
        if self.is_asked:
            in_vain = torch.from_numpy(profiles[0].first_draft_s(1, rounds.context.numpy()))
            # A round that drafts nothing asks nobody.
            seconds = seconds + paces[0] * in_vain * (~self.by_first & (rounds.drafted > 0))
        read = prompt_seconds(profiles[1], self.prompt_tokens)
        return rounds.by_sequence(seconds, len(self.tokens)) + paces[1] * read

    def rate(self, profiles: tuple[Profile, Profile]) -> float:
        """Return tokens a second."""
        return float(self.tokens.sum() / self.seconds(profiles).sum())


def play_texts(
    arrays: TraceArrays,
    mine: Tensor,
    policy: StopPolicy,
    profiles: tuple[Profile, Profile],
    is_asked: bool = False,
) -> TextRounds:
    """Return the rounds of each text.

    Args:
        arrays: of the texts.
        mine: [N] bool, the rounds that the first drafter drafts.
        policy: that ends drafts.
        profiles: of the two drafters, for a policy that decides by costs.
        is_asked: see `TextRounds`.
    """
    depth = min(arrays.depth, *(profile.max_depth for profile in profiles))
    played = play(dataclasses.replace(arrays, reads=~mine), policy.limited(depth), profiles[1])
    rounds = played.rounds
    by_first = mine[torch.from_numpy(arrays.find(rounds.sequence.numpy(), rounds.anchor.numpy()))]
    return TextRounds(played.result.tokens, arrays.prompt_tokens, rounds, by_first, is_asked)


def everywhere(arrays: TraceArrays, first: bool) -> Tensor:
    """Return [N] bool, all rounds of one drafter."""
    return torch.full((len(arrays.accepted),), first)
