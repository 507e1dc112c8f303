"""The hidden states of a decision: name, kind, definition, and the rounding that makes them the same everywhere.

| name | kind | what |
|---|---|---|
| `draft_hidden` | PRE | the draft's last hidden state, from which q_j is computed; 0 at depth 0 |
| `target_hidden` | ANCHOR | the target's last hidden state of the row that the anchor token was drawn from |

The last hidden state is what the output layer reads, after the final norm: transformers' `hidden_states[-1]`. It is
rounded to float16: so it is stored, and so a policy sees it, live as well. Two forwards of one text differ
by about 1e-5 in float32, which moves a few of the numbers to the next float16, 5e-4 of their size away.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ..arguments import as_list
from ..contract import Array, StopPolicy
from ..errors import PolicyError, close_match
from . import Kind

MOST = float(np.finfo(np.float16).max)
"""The largest number that is stored; what is beyond is stored as this."""


@dataclass(frozen=True)
class HiddenState:
    """A named hidden state: when it is known, and what it is."""

    name: str
    kind: Kind
    definition: str


DRAFT_HIDDEN, TARGET_HIDDEN = "draft_hidden", "target_hidden"

HIDDEN_STATES: dict[str, HiddenState] = {
    state.name: state
    for state in (
        HiddenState(DRAFT_HIDDEN, Kind.PRE, "the draft's last hidden state, from which q_j is computed"),
        HiddenState(
            TARGET_HIDDEN, Kind.ANCHOR, "the target's last hidden state of the row that the anchor was drawn from"
        ),
    )
}
"""Every hidden state by name."""


def check_hidden(names: Iterable[str], who: str = "") -> tuple[str, ...]:
    """Return the names, each once and in the order of `HIDDEN_STATES`; an unknown one is a `PolicyError`."""
    named = as_list(names)
    for name in named:
        if name not in HIDDEN_STATES:
            raise PolicyError(
                f"{who and who + ': '}unknown hidden state {name!r}{close_match(name, HIDDEN_STATES)}; "
                f"known: {', '.join(HIDDEN_STATES)}"
            )
    return tuple(name for name in HIDDEN_STATES if name in named)


def check_sizes(policy: StopPolicy, widths: Mapping[str, int]) -> None:
    """Refuse a policy whose head was fitted for hidden states of another size than these models have.

    Args:
        policy: with `sizes`, H of each hidden state by name, where it knows them.
        widths: H of each hidden state that there is.
    """
    for name, size in getattr(policy, "sizes", {}).items():
        if widths.get(name, size) != size:
            raise PolicyError(
                f"{policy.name}: reads {name} of {size} numbers, but here it has {widths[name]}: the policy was made for "
                "another model; use it with its own pair"
            )


def seen(states: Array) -> Array:
    """Return hidden states [..., H] as a policy sees them: float32, rounded to float16, what is beyond its range at its ends.

    `decode.models.hidden.seen` is the same for the tensors of a model.
    """
    single = np.asarray(states, dtype=np.float32)
    return np.minimum(np.maximum(single, -MOST), MOST).astype(np.float16).astype(np.float32)
