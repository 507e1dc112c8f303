"""What each round of a policy lost against the oracle's plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....policies.profile import Profile
from ..log import Rounds
from ..traces.arrays import TraceArrays
from .oracle import SAME_S, Ideal


@dataclass(frozen=True)
class Regret:
    """What each round lost against the oracle going on from the same anchor; all [R].

    Attributes:
        ideal: how deep the oracle would have drafted.
        early: bool, committed less than the ideal round.
        late: bool, drafted or sent more than it for nothing.
        choice_s: seconds lost by where the policy stopped, what the rest of the text costs included.
        decision_s: seconds of decisions.
        backlog_s: seconds of reading tokens that the draft had not read, which the bound leaves out.
    """

    ideal: Tensor
    early: Tensor
    late: Tensor
    choice_s: Tensor
    decision_s: Tensor
    backlog_s: Tensor


def planned_rounds(arrays: TraceArrays, ideal: Ideal) -> Rounds:
    """Return the rounds of the oracle's plan, drafting and verifying one path each, text by text side by side."""
    sequence = torch.arange(arrays.sequences)
    anchor, parts = arrays.first_anchor, []
    while len(sequence):
        at = anchor - arrays.first_anchor[sequence]
        steps = ideal.steps[sequence, at]
        accepted = torch.minimum(arrays.accepted[arrays.offset[sequence] + at], steps)
        parts.append(torch.stack([sequence, anchor, arrays.prompt_tokens[sequence] + anchor, steps, accepted]))
        anchor = anchor + accepted + 1
        on = anchor < arrays.text_tokens[sequence]
        sequence, anchor = sequence[on], anchor[on]
    sequence, anchor, context, steps, accepted = torch.cat(parts, 1).unbind(0)
    one = torch.ones_like(steps)
    fed = None if arrays.tree.is_chain else (torch.arange(arrays.depth) < steps[:, None]).long()
    return Rounds(sequence, anchor, context, steps, steps, accepted, one, 0 * one, steps, fed, "")


def judge(arrays: TraceArrays, rounds: Rounds, ideal: Ideal, profile: Profile) -> Regret:
    """Compare rounds with the oracle's.

    A round that took c seconds from t to t' loses c + V(t') - V(t). Summed over a text the V's cancel, so that the losses
    add up to exactly the seconds by which the policy is slower than the oracle.
    """
    sequence = rounds.sequence
    at = rounds.anchor - arrays.first_anchor[sequence]
    left = arrays.text_tokens[sequence] - rounds.anchor
    best = ideal.steps[sequence, at]
    committed = torch.minimum(rounds.accepted + 1, left)
    reach = torch.minimum(torch.minimum(arrays.accepted[arrays.offset[sequence] + at], best) + 1, left)
    bare = rounds.bare_seconds(ideal.profile)
    choice = bare + ideal.value[sequence, at + committed] - ideal.value[sequence, at]
    decided = rounds.decision_seconds(profile)
    early = committed < reach
    late = ~early & (choice > SAME_S) & ((rounds.steps > best) | (rounds.verified > best))
    return Regret(best, early, late, choice, decided, rounds.seconds(profile) - decided - bare)
