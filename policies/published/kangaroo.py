"""Kangaroo: a threshold on the largest probability of the draft."""

from __future__ import annotations

from ..fixed import FeatureThreshold


class MaxProb(FeatureThreshold):
    """Draft while the largest probability of q_j is at least a threshold, whichever token was drawn.

    Kangaroo (arXiv 2404.18911, sec. 3.3; script: 0.6, at most 6 tokens). llama.cpp's `p_min` is the same rule with 0.75.
    """

    features = ("top1",)

    def __init__(self, threshold: float = 0.6, max_depth: int = 6) -> None:
        super().__init__("maxprob", threshold, max_depth)
