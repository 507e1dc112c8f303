"""Published rules that compare one score of the token just drawn with a level: entropy, largest probability, product."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from ..builtins import builtin
from ..contract import DraftStep, State, StopPolicy
from ..errors import PolicyError
from ..typing import Array


def check_number(policy: str, name: str, value: Any, low: float, high: float = math.inf) -> float:
    """Return a parameter as a float; a `PolicyError` where it is no finite number between `low` and `high`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not low <= value <= min(high, sys.float_info.max)
    ):
        most = f"between {low:g} and {high:g}" if math.isfinite(high) else f"of {low:g} or more"
        raise PolicyError(f"{policy}: expected for {name} a number {most}, not {value!r}")
    return float(value)


def check_whole(policy: str, name: str, value: Any, low: int = 1) -> int:
    """Return a parameter that must be a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise PolicyError(f"{policy}: expected for {name} a whole number of {low} or more, not {value!r}")
    return value


def float32(value: float) -> float:
    """Return the float32 next to a number: what it is in a comparison with a float32 array."""
    return float(np.float32(value))


class AtLeast(StopPolicy):
    """A rule that drafts on while its one feature is at least a level.

    Attributes:
        level: a number, or [S, 1] float32 where each stream has its own.
    """

    level: float | Array

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches that reach the level."""
        return step.alive & (step.features[:, :, 0] >= self.level), state


@builtin("entropy", "level", "entropy:0.6 stops above that entropy of the draft (SVIP)")
class EntropyBound(StopPolicy):
    """Draft on while the entropy of q_j, in nats at temperature 1, is at most a level.

    SVIP (arXiv 2411.18462, eq. 6): stop after x_j once sqrt(c H_j) > h; the released script has c = 0.15 and h = 0.3, so a
    level of h^2 / c = 0.6 nats, at most 40 tokens, and at least one. AdaEDL's rule (`AdaEDL`) is the same with a level that
    moves.
    """

    features = ("entropy",)

    def __init__(self, level: float = 0.6, max_depth: int = 40) -> None:
        self.level = float32(check_number("entropy", "level", level, 0.0))
        self.max_depth = check_whole("entropy", "max_depth", max_depth)
        self.name = f"entropy:{level:g}"

    def keep(self, step: DraftStep, state: State) -> tuple[Array, State]:
        """Keep the branches whose distribution was sharp enough."""
        return step.alive & (step.features[:, :, 0] <= self.level), state


@builtin("maxprob", "threshold", "maxprob:0.6 stops below that largest probability (Kangaroo, p_min)")
class MaxProb(AtLeast):
    """Draft on while the largest probability of q_j is at least a threshold, whichever token was drawn.

    Kangaroo (arXiv 2404.18911, sec. 3.3; script: 0.6 and at most 6 tokens). llama.cpp's `p_min` is the same rule with 0.75.
    """

    features = ("top1",)

    def __init__(self, threshold: float = 0.6, max_depth: int = 6) -> None:
        self.threshold = check_number("maxprob", "threshold", threshold, 0.0, 1.0)
        self.level = float32(self.threshold)
        self.max_depth = check_whole("maxprob", "max_depth", max_depth)
        self.name = f"maxprob:{threshold:g}"


@builtin("product", "threshold", "product:0.3 stops below that probability of the whole draft")
class Product(AtLeast):
    """Draft on while the product of the drawn tokens' probabilities, q_1(x_1) ... q_j(x_j), is at least a threshold.

    SpecDec++'s rule (arXiv 2405.19715, sec. 3.3: stop once 1 - prod p_i > h, h = 0.7, at most 20 tokens) with the draft's
    own probabilities, at temperature 1, in the place of its trained ones: the ablation that the paper leaves out.
    """

    features = ("path_logprob",)

    def __init__(self, threshold: float = 0.3, max_depth: int = 20) -> None:
        self.threshold = check_number("product", "threshold", threshold, 1e-30, 1.0)  # its logarithm must be finite
        self.level = float32(math.log(self.threshold))
        self.max_depth = check_whole("product", "max_depth", max_depth)
        self.name = f"product:{threshold:g}"
