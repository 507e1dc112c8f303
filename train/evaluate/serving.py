"""What to set on a server: the best draft length by batch size and context, its gain, and where not to draft.

All requests of a batch draft the same number of tokens, as engines do. With T(k) tokens in a round of length k and seconds
s(k) of such a batch, the speed over plain decoding is T(k) s(0) / s(k). T comes from replays or from recorded rounds, s from
the profile. The head-room is the speed of a length that is chosen for each round in the knowledge of what will be accepted,
over that of the best single length; a request then costs its share of a batch in which all draft as many tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import numpy as np

from ...decode.benchmark import Ratio
from ...policies.profile import Profile
from ..replay.rounds import Rounds
from .pricing import ProfileBootstrap
from .statistics import Resamples, Values

ITERATIONS = 30
"""Of Dinkelbach's method, which ends sooner."""


class Setting(TypedDict):
    """What to set at one batch size and context: the length, its speed over plain decoding, and the head-room."""

    batch: int
    context: int
    length: int
    to_plain: dict[str, Any]
    headroom: float


def serving_settings(
    choose: Sequence[Rounds], report: Sequence[Rounds], costs: ProfileBootstrap, boot: Resamples
) -> list[Setting]:
    """Return the best length at every batch size and context of the profile.

    Args:
        choose, report: rounds of the lengths 0..K on which lengths are chosen, and their speed computed.
        costs: the profile and its bootstrap samples.
        boot: resamples of the texts of `report`.
    """
    profile, depth = costs.profile, len(choose) - 1
    sizes = sorted({1, *(profile.batch.sizes if profile.batch else ())})
    contexts = sorted({round(profile.low.context), round(profile.high.context)})
    chosen_tokens = np.array([float(one.committed.double().mean()) for one in choose])
    tokens = np.stack([_tokens_per_round(one, boot) for one in report], 1)  # [1 + R, K + 1]
    accepted = choose[-1].committed.double().numpy() - 1.0
    rows: list[Setting] = []
    for context in contexts:
        for size in sizes:
            drawn = np.stack([round_seconds(one, size, context, depth) for one in (profile, *costs.profiles)])
            which = np.arange(len(tokens)) - 1  # resample r has the sample (r - 1) mod D of the profile
            seconds = drawn[np.where(which < 0, 0, 1 + which % max(len(drawn) - 1, 1)) if len(drawn) > 1 else 0 * which]
            speeds = tokens * seconds[:, :1] / seconds
            length = int((chosen_tokens / drawn[0]).argmax())
            ratio = boot.interval(speeds[:, length]) if length else Ratio(1.0, 1.0, 1.0)
            headroom = _headroom(accepted, drawn[0])
            rows.append(Setting(batch=size, context=context, length=length, to_plain=dataclasses.asdict(ratio),
                                headroom=headroom))  # fmt: skip
    return rows


def round_seconds(profile: Profile, size: int, context: float, depth: int) -> Values:
    """Return [K + 1], the seconds of a round in which each of `size` requests drafts 0..K tokens."""
    if size == 1:
        return profile.chain_costs(context, 0.0, depth=depth)
    k = np.arange(depth + 1)
    drafts = profile.first_draft_s(size, context) + (k - 1) * profile.draft_s(size, context)
    out: Values = profile.verify_s(np.full(depth + 1, size), size * (k + 1), context) + np.where(k > 0, drafts, 0.0)
    return out


def _tokens_per_round(rounds: Rounds, boot: Resamples) -> Values:
    """Return [1 + R], mean committed tokens of a round."""
    committed, counts = rounds.by_sequence(rounds.committed), rounds.by_sequence(rounds.committed * 0 + 1)
    out: Values = boot.total(committed.numpy()) / boot.total(counts.numpy())
    return out


def _headroom(accepted: Values, seconds: Values) -> float:
    """Return the speed with the best length for each round over that with the best single length."""
    tokens = 1.0 + np.minimum(accepted[:, None], np.arange(len(seconds)))  # [R, K + 1]
    best = rate = float((tokens.mean(0) / seconds).max())
    for _ in range(ITERATIONS):
        at = (tokens - rate * seconds).argmax(1)
        before, rate = rate, float(np.take_along_axis(tokens, at[:, None], 1).mean() / seconds[at].mean())
        if rate <= before * (1 + 1e-12):
            break
    return rate / best


def pays(row: Mapping[str, Any]) -> bool:
    """Return whether drafting is faster than plain decoding at a setting: its interval lies above 1."""
    ratio = Ratio(**row["to_plain"])
    return bool(row["length"]) and (ratio.value > 1.0 if ratio.low is None else ratio.low > 1.0)


def off_from(rows: Sequence[Setting]) -> dict[int, int | None]:
    """Return by context the smallest batch from which on drafting does not pay; None if it does at the largest one."""
    out: dict[int, int | None] = {}
    for context in sorted({row["context"] for row in rows}):
        at_context = sorted((row for row in rows if row["context"] == context), key=lambda row: row["batch"])
        off = None
        for row in reversed(at_context):
            if pays(row):
                break
            off = row["batch"]
        out[context] = off
    return out


def serving_section(rows: Sequence[Setting]) -> dict[str, Any]:
    """Return the table as a section of a report, of lengths that were chosen on the reported prompts."""
    sentences = []
    for context, size in off_from(rows).items():
        sizes = [row["batch"] for row in rows if row["context"] == context]
        if size is None:
            where = f"at every batch up to {max(sizes)}"
        else:
            where = "at no batch" if size == min(sizes) else f"below a batch of {size}: do not draft from there on"
        sentences.append(f"At {context:,} tokens of context drafting pays {where}.")
    return {
        "title": "Settings of a server",
        "text": "The best draft length if all requests of a batch draft as many tokens, chosen on these prompts, its speed "
        "over plain decoding, and the head-room of a length that is chosen for each round in hindsight. "
        + " ".join(sentences),
        "columns": ["batch", "context", "length", "vs plain", "head-room"],
        "rows": [[r["batch"], r["context"], r["length"], r["to_plain"], r["headroom"]] for r in rows],
    }
