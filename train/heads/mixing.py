"""Training rows from mixed texts (`collect --mix`): what the draft says after its own samples, and what came of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...collect.store import Trace
from ...policies.errors import TraceError
from ...policies.features import HISTORY_FEATURES
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..replay.traces.concatenate import check_alike
from .rows import SOFT_COLUMNS, FitRows, Visits, fit_rows, soft_labels

OWN = "mixed"
"""The column that says whether the last token that the draft had read was its own."""


def mixed_arrays(trace: Trace, like: Trace, features: Sequence[str], hidden: Sequence[str]) -> TraceArrays:
    """Read a mixed trace for heads that are calibrated on another trace.

    Raises:
        TraceError: it is not mixed, of another pair, or lacks a feature or hidden state.
    """
    if not trace.header.mix:
        raise TraceError(f"--mixed: {trace.folder} is no mixed trace; collect one with --mix 0.15 --depth 1")
    check_alike(like.header, trace.header, str(like.folder), str(trace.folder), ("pair", "vocabulary", "verification"))
    read = [name for name in features if name not in HISTORY_FEATURES]
    return trace_arrays(trace, read, (*SOFT_COLUMNS, OWN), hidden)


def mixed_rows(arrays: TraceArrays, without: set[str], features: Sequence[str], lag: int = 0) -> FitRows:
    """Return the rows of a mixed trace, one for each position.

    A head without lag scores the token Y_i by what the draft says after Z_<i. SpecDec++'s (lag 1) scores it by the state
    after Y_i, so where Z_i is Y_i: the row is left out where Z_i is the target's token.

    Args:
        arrays: read with the hidden states of the head.
        without: clusters of prompts that are held out.
        features: scalar features.
        lag: of the head.
    """
    use = torch.tensor([name not in without for name in arrays.clusters])
    owner = arrays.owner
    row = (use[owner] & ~arrays.cut).nonzero()[:, 0]
    hidden = tuple(arrays.hidden)
    if lag == 0:
        return fit_rows(arrays, features, Visits.once(row), hidden)
    if lag > 1 or features:
        raise TraceError(f"--mixed: expected a head of hidden states with lag 0 or 1, got lag {lag}")
    # The state after Y_i stands in the next position's row, which must be of the same text.
    row = row[row + 1 < len(owner)]
    row = row[(owner[row + 1] == owner[row]) & arrays.extra[OWN][row + 1].bool()]
    soft, first, none = soft_labels(arrays, Visits.once(row)), torch.zeros_like(row), torch.zeros_like(row).bool()
    return FitRows(
        torch.zeros(len(row), 0),
        torch.ones_like(row),
        arrays.accepted[row] >= 1,
        none,
        none,
        {
            name: arrays.hidden_state(name).at(row + 1, first if arrays.hidden_state(name).of_nodes else None)
            for name in hidden
        },
        None if soft is None else soft[:, 1],
    )
