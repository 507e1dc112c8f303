"""The pass over rows of logits: the same bits in every process and in every kernel that it is a part of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from specstop.policies.kernels import features as rows

ROWS = 500
DIGEST = """
import hashlib
import test_row_sums
print(hashlib.sha256(b"".join(part.tobytes() for width in (7, 50, 3072) for part in test_row_sums.read(width))).hexdigest())
"""


def read(width: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-sum-exp and entropy of random rows, and what is known of a token of each."""
    logits = (3.0 * np.random.default_rng(width).standard_normal((ROWS, width))).astype(np.float32)
    ids, none = np.zeros((ROWS, 6), dtype=np.int64), np.zeros(0)
    ids[:, 0] = np.arange(ROWS)
    top, best = np.zeros((ROWS, 8), dtype=np.float32), np.zeros((ROWS, 2), dtype=np.float32)
    stats, numbers = np.zeros((ROWS, 2)), np.zeros((ROWS, 4))
    no_columns = np.zeros((0, 2), dtype=np.int64)
    rows.read_rows(
        logits, 5, True, logits, 2, logits, 1.0 / 0.7, ids, none, none, top, stats, best, numbers, no_columns, 0.7, logits
    )  # fmt: skip
    return stats, numbers


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
