"""Seconds of rounds and prompts as tensors: where traces, which are tensors, meet the latency profile, which is numpy."""

from __future__ import annotations

import torch
from torch import Tensor

from ...policies.profile import Profile


def round_seconds(
    profile: Profile,
    context: Tensor,
    drafted: Tensor,
    verified: Tensor,
    backlog: Tensor,
    decisions: Tensor | None = None,
    decision: float = 0.0,
    fed: Tensor | None = None,
) -> Tensor:
    """Return [S] float64 seconds of rounds; arguments as of `Profile.round_seconds`, no `decisions` = none are counted."""
    asked = torch.zeros_like(drafted) if decisions is None else decisions
    return torch.from_numpy(
        profile.round_seconds(
            context.numpy(),
            drafted.numpy(),
            verified.numpy(),
            backlog.numpy(),
            asked.numpy(),
            decision,
            None if fed is None else fed.numpy(),
        )
    )


def prompt_seconds(profile: Profile, prompt_tokens: Tensor) -> Tensor:
    """Return [S] float64 seconds to read prompts of so many tokens [S]."""
    return torch.from_numpy(profile.prefill_seconds(prompt_tokens.numpy()))
