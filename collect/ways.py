"""The ways to collect: what each writes into the header, and how it makes rows of a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..policies.baselines.fixed import FixedLength
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.limits import check_limits
from .completions import Completions, completion_rows
from .dense import dense_rows
from .live import LiveCollector
from .mixed import mixed_rows
from .shards import nothing
from .unroll import Unroller, node_features

MEMORY_MIB = 256
"""For the scores of the positions that are unrolled together, unless a run says otherwise."""

Batch = Sequence[tuple[int, str, str, list[int], int]]
"""(sequence, prompt id, group, token ids, stream key) of each prompt."""


@dataclass(frozen=True)
class Way:
    """A way to collect.

    Attributes:
        features: recorded at each node.
        rows: the rows of a batch, as column chunks.
        header: what its header has beside what all have.
        begin: called before each shard.
    """

    features: tuple[str, ...]
    rows: Callable[[Batch], Sequence[Mapping[str, Any]]]
    header: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[], None] = nothing


def choose_way(
    pair: Pair,
    tree: Topology,
    settings: Settings,
    collector: str,
    policy: StopPolicy | None,
    explore: float,
    mix: float,
    completions: Completions | None,
    vectors: Sequence[str] = (),
    memory: int = MEMORY_MIB,
    batch: int = 1,
) -> Way:
    """Return the way that the options ask for; arguments as of `run.plan_run`.

    Raises:
        InputError: options that do not go together; the message names them.
    """
    if collector not in ("dense", "live"):
        raise InputError(f"--collector: expected dense or live, not {collector!r}")
    if collector == "live":
        if mix or completions is not None:
            raise InputError("--mix and --completions: for the dense collector; leave out --collector live")
        return _live(pair, policy or FixedLength(tree.deepest), settings, explore, vectors, batch)
    if batch > 1:
        raise InputError(
            "--batch: for the live collector; the dense one decodes as many texts side by side as --memory holds"
        )
    if policy is not None or explore or settings.verification != "match":
        raise InputError(
            "--policy, --explore and --verification: give --collector live with them; dense traces serve any policy"
        )
    features, limit = node_features(tree), settings.max_new_tokens
    if mix:
        if not 0.0 < mix < 1.0 or tree.nodes != 1 or completions is not None:
            raise InputError("--mix: expected a share between 0 and 1, --depth 1, and no --completions")
        return Way(features, lambda batch: mixed_rows(pair, batch, settings, mix, vectors), {"mix": mix})
    check_limits(memory=memory)
    unroller = Unroller(
        pair, tree, settings.temperature, memory_bytes=memory << 20, vectors=vectors, shaping=settings.shaping
    )
    if completions is not None:
        given, texts = dict(completions), "sampled" if settings.temperature > 0 else "completions"
        return Way(features, lambda batch: completion_rows(pair, unroller, batch, given, limit), {"texts": texts})
    return Way(features, lambda batch: dense_rows(pair, unroller, batch, limit))


def _live(
    pair: Pair, policy: StopPolicy, settings: Settings, explore: float, vectors: Sequence[str], batch: int
) -> Way:
    made = LiveCollector(pair, policy, settings, explore, vectors=vectors, batch=batch)
    header = {
        "collector": "live",
        "policy": policy.name,
        "explore": explore,
        "verification": made.verification,
        "label": made.label,
    }
    return Way(made.features, made.rows, header, made.begin)
