"""SpecDec++'s rule on the draft's probabilities."""

from __future__ import annotations

import math

import numpy as np

from ..arguments import validate_number
from ..fixed import FeatureThreshold


class Product(FeatureThreshold):
    """Draft while q_1(x_1) ... q_j(x_j) is at least a threshold.

    SpecDec++ (arXiv 2405.19715, sec. 3.3) stops if 1 - prod p_i > h, with h = 0.7 and at most 20 tokens, where p_i is
    predicted by a trained head. This is the ablation without a head, which the paper does not have.
    """

    features = ("path_logprob",)

    def __init__(self, threshold: float = 0.3, max_depth: int = 20) -> None:
        super().__init__("product", validate_number("product", "threshold", threshold, 1e-30, 1.0), max_depth)
        self.level = float(np.float32(math.log(self.threshold)))
