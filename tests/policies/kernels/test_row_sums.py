"""The pass over rows of logits: the same bits in every process and in every kernel that it is a part of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from specstop.policies.features import DrawnTokens, Needs, summarise

ROWS = 500
DIGEST = """
import hashlib
import test_row_sums
print(hashlib.sha256(b"".join(part.tobytes() for width in (7, 50, 3072) for part in test_row_sums.read(width))).hexdigest())
"""


def read(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-sum-exp and entropy of random rows, and the log-probabilities of a token of each."""
    logits = (3.0 * np.random.default_rng(width).standard_normal((ROWS, width))).astype(np.float32)
    drawn = DrawnTokens.of([(row, 0, 0, 0, 1, 0) for row in range(ROWS)])
    summary = summarise(Needs(5, True, True, True), logits, drawn, 0.7, scores=logits)
    return summary.stats, summary.numbers


@pytest.mark.parametrize("width", [1, 7, 64, 65, 3072])
def test_sums_are_those_of_double_precision(width: int) -> None:
    logits = (3.0 * np.random.default_rng(width).standard_normal((ROWS, width))).astype(np.float32).astype(np.float64)
    below = logits - logits.max(1, keepdims=True)
    total = np.exp(below).sum(1)
    entropy = np.log(total) - (np.exp(below) * below).sum(1) / total
    np.testing.assert_allclose(read(width)[0], np.stack([np.log(total), entropy], 1), rtol=1e-5, atol=1e-6)


def test_the_process_that_compiles_gets_the_bits_of_those_that_read_the_cache(tmp_path: Path) -> None:
    """Rows that one process collected are compared with another's; a folder that is continued is written by several."""
    environment = {
        **os.environ,
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", DIGEST]
    found = {
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout for _ in range(2)
    }
    assert list(tmp_path.rglob("*.nbc")), "nothing was kept"
    assert len(found) == 1
