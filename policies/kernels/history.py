"""What a finished round tells: the running record of earlier rounds, and the depths whose outcome is known."""

from __future__ import annotations

from typing import Any

from .compiled import copy_row, exact, kernel


@exact
def known_depths(active: Any, cut: Any, accepted: Any, verified: Any) -> Any:
    """Return of how many depths a round tells the outcome: those accepted and the first one refused. 0 = it tells nothing."""
    return min(accepted + 1, verified) if active and not cut else 0


@kernel("void(float64[:,::1], int64[::1], int64[::1], boolean[::1], boolean[::1], float64, float64[:,::1])")
def add_round(
    record: Any, accepted: Any, verified: Any, active: Any, cut: Any, past: float, after: Any
) -> None:  # fmt: skip
    """Take a round into the record of S streams.

    Args:
        record: [S, 5] running means of min(A, k) and of full acceptance, min(A, k) and k of the last round, and the weight of
            the past in the means.
        accepted, verified: [S] min(A, k) and k.
        active, cut: [S] whether the stream had a round, and whether it was cut short: such a one does not count.
        past: the weight of all earlier rounds against this one.
        after: [S, 5], is written.
    """
    for s in range(record.shape[0]):
        copy_row(record[s], after[s])
        if cut[s] or not active[s]:
            continue
        # The weights of the past add up to less than 1 at first: divided by them, the first round counts whole.
        after[s, 4] = past * record[s, 4] + (1.0 - past)
        share = (1.0 - past) / after[s, 4]
        full = 1.0 if accepted[s] == verified[s] else 0.0  # also where nothing was verified
        after[s, 0] += share * (accepted[s] - record[s, 0])
        after[s, 1] += share * (full - record[s, 1])
        after[s, 2] = accepted[s]
        after[s, 3] = verified[s]


@kernel("void(float64[:,::1], int64[::1], int64[::1], float32[:,::1])")
def write_history(record: Any, columns: Any, at: Any, out: Any) -> None:
    """Write columns of a record.

    Args:
        record: [S, 5].
        columns, at: [F] columns of the record, and those of `out` that they go to.
        out: [S, .].
    """
    for s in range(record.shape[0]):
        for f in range(columns.shape[0]):
            out[s, at[f]] = record[s, columns[f]]
