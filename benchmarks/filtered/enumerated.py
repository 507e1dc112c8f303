"""The rejection family under a filter, exactly: every sequence of choices gone through, with the helpers of the tests."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

from bars import Bars

_TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "decode")]

from cases import all_cases  # noqa: E402
from enumeration import EXACT, prove_within  # noqa: E402

LEAVES = 1500
"""Sequences of choices above which a case is made smaller."""


def enumerated(stride: int, bars: Bars) -> None:
    """Compare the texts of the loop with the target's own distribution, under top-k and a repetition penalty."""
    cases = [case for case in all_cases() if case.sampling == "shaped"][::stride]
    worst, leaves = 0.0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # policies that fail on purpose say so
        for case in cases:
            _, proof = prove_within(case, LEAVES)
            worst, leaves = max(worst, proof.distance), leaves + proof.leaves
    bars.add(
        "enumeration with a filter", worst, worst <= EXACT and leaves > len(cases) > 0,
        f"{len(cases)} cases, {leaves} sequences of choices; largest distance {worst:.1e}, at most {EXACT:g}",
    )  # fmt: skip
