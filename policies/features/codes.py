"""Numbers that stand for the formulas of features in compiled code (`kernels.rows`)."""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Which formula a column is; `PROBABILITY + k` is the probability of the token of rank k in its row."""

    MARGIN = 0
    LARGEST = 1
    ENTROPY = 2
    TOKEN_PROBABILITY = 3
    SAMPLED_PROBABILITY = 4
    PATH = 5
    NOISY_MARGIN = 6
    NOISY_SCORE = 7
    NOISY_LEAD = 8
    TOKEN = 9
    PARENT_TOKEN = 10
    DEPTH = 11
    RANK = 12
    TEMPERATURE = 13
    PROBABILITY = 16


TOP = 10
"""The most ranks of a row that features speak of."""

BOUND = 30.0
"""The most that a score can lie above or below another: where one token alone can be drawn (top-k 1, a small nucleus, a
grammar) the distance to the next is infinite, and a head would answer that with a number that it never saw in training. Under
shared noise a margin of 30 comes up once in 1e13 draws."""
