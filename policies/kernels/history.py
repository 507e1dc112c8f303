"""What a finished round tells: the running record of earlier rounds, and the depths whose outcome is known."""

from __future__ import annotations

from typing import Any

from .compiled import copy_row, exact, kernel


@exact
def known_depths(active: Any, cut: Any, accepted: Any, verified: Any) -> Any:
    """Return of how many depths a round tells the outcome: those accepted and the first one refused. 0 = it tells nothing."""
    return min(accepted + 1, verified) if active and not cut else 0


@kernel(
    "void(float64[:,::1], float64[::1], int64[::1], int64[::1], boolean[::1], float64, float64[:,::1], float64[::1])"
)
def add_round(
    record: Any, weight: Any, accepted: Any, verified: Any, counts: Any, past: float, record_after: Any,
    weight_after: Any,
) -> None:  # fmt: skip
    """Take a round into the record of S streams.

    Args:
        record: [S, 4] running means of min(A, k) and of full acceptance, min(A, k) and k of the last round.
        weight: [S] of the past in the running means.
        accepted, verified: [S] min(A, k) and k.
        counts: [S] whether the stream had a round that counts.
        past: the weight of all earlier rounds against this one.
        record_after, weight_after: are written.
    """
    for s in range(record.shape[0]):
        copy_row(record[s], record_after[s])
        weight_after[s] = weight[s]
        if not counts[s]:
            continue
        # The weights of the past add up to less than 1 at first: divided by them, the first round counts whole.
        weight_after[s] = past * weight[s] + (1.0 - past)
        share = (1.0 - past) / weight_after[s]
        full = 1.0 if accepted[s] == verified[s] else 0.0
        record_after[s, 0] += share * (accepted[s] - record[s, 0])
        record_after[s, 1] += share * (full - record[s, 1])
        record_after[s, 2] = accepted[s]
        record_after[s, 3] = verified[s]
