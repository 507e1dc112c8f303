"""What a run is told, and what the loop keeps: the settings, the clock, one text, one drafted chain."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..policies.contract import State
from ..policies.errors import InputError
from ..policies.history import HistoryOne
from .noise import Source


@dataclass(frozen=True)
class Settings:
    """What a run is told, beside its pair and its policy.

    Attributes:
        temperature: 0 = greedy.
        max_new_tokens: length limit of each text.
        max_depth: no round drafts deeper, whatever the policy says.
        fallback: drafts this many tokens once a policy has failed.
        ignore_eos: go on after the end-of-text token.
    """

    temperature: float = 0.0
    max_new_tokens: int = 128
    max_depth: int = 20
    fallback: int = 4
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise InputError(f"--temperature: expected 0 or more, not {self.temperature}")
        if self.max_new_tokens < 1:
            raise InputError(f"--max-new-tokens: expected 1 or more, not {self.max_new_tokens}")
        if self.max_depth < 0 or self.fallback < 0:
            raise InputError("depth and fallback: expected 0 or more")


@dataclass
class Stopwatch:
    """Seconds by phase of one round; waits for the device before each reading."""

    device: torch.device
    laps: dict[str, float] = field(default_factory=lambda: {"first": 0.0, "draft": 0.0, "verify": 0.0, "policy": 0.0})
    mark: float = 0.0

    def now(self) -> float:
        """Return the clock, once the device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start(self) -> None:
        """Begin a lap."""
        self.mark = self.now()

    def lap(self, phase: str) -> None:
        """Add the time since `start` to a phase."""
        self.laps[phase] += self.now() - self.mark


@dataclass
class Text:
    """One sequence while it is decoded."""

    tokens: list[int]  # committed, prompt included
    prompt: int
    source: Source
    anchor_row: Tensor  # [1, V] the target's row that the anchor was drawn from
    policy_state: State
    history: HistoryOne
    ended: bool = False

    @property
    def generated(self) -> int:
        """Tokens committed behind the prompt."""
        return len(self.tokens) - self.prompt


@dataclass
class Chain:
    """What the draft phase leaves behind: the tokens drawn and how often the policy was asked."""

    tokens: list[int]
    decisions: int = 0
    dropped: int = 0  # trailing tokens that a trimming policy does not send
    capped: bool = False  # the length limit or EOS ended drafting, not the policy
