"""Which collector a run's options choose, and what it writes into the header."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..decode.drafters import find_drafters
from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..decode.verify.modes import Match
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.fixed import FixedLength
from .dense import DenseCollector, memory_budget
from .live import LiveCollector
from .positions import PositionsCollector
from .schema import PromptTask

NOT_LIVE = {"mix": 0.0, "completions": None, "draws": 1, "memory": None}
NOT_DENSE = {"policy": None, "explore": 0.0, "profile": None, "batch": 1}
NOT_IN_ENGINES = {**NOT_LIVE, "profile": None, "tree": None}
"""Options of the dense collector only, of the live one only, and of neither in an engine, with their defaults."""


@dataclass(frozen=True)
class Collector:
    """A collector of a run.

    Attributes:
        rows: returns the rows of a batch of prompts as column chunks.
        header: fields of the header that depend on the collector.
        begin: called before each shard.
        carries: policy or drafter carry something from text to text, which is reset before each shard.
        memory: MiB for rows as wide as the vocabulary; 0 = no budget.
    """

    rows: Callable[[Sequence[PromptTask]], Sequence[Mapping[str, Any]]]
    header: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[], None] = lambda: None
    carries: bool = False
    memory: int = 0


def choose_collector(
    pair: Pair, settings: Settings, options: Any, policy: StopPolicy | None, hidden: Sequence[str]
) -> Collector:
    """Return the collector that a run's options choose.

    Args:
        pair: target and draft.
        settings: for this pair and tree.
        options: `CollectOptions` of the run; their module imports this one.
        policy: of a live run.
        hidden: names of the hidden states that are recorded.

    Raises:
        InputError: options contradict each other; the message names them.
    """
    if options.collector not in ("dense", "live", "vllm"):
        raise InputError(f"--collector: expected dense, live or vllm, not {options.collector!r}")
    is_live = options.collector == "live"
    if options.collector == "vllm":
        return _engine_collector(pair, settings, options, policy, hidden)
    if settings.verification == "auto" and (is_live or options.mix or pair.drafter != "model"):
        settings = replace(settings, verification=Match.name)  # the only mode of these that can be replayed
    _require_defaults(options, NOT_LIVE if is_live else NOT_DENSE, f"--collector {options.collector}")
    if is_live:
        policy = policy or FixedLength(settings.topology.deepest)
        batch = options.batch or 1
        live = LiveCollector(pair, policy, settings, options.explore, hidden, batch, options.profile)
        header = {
            "collector": "live", "policy": policy.name, "explore": options.explore, "verification": live.mode.name,
            "label": live.mode.label, "batch": batch, "features": live.features, "signals": live.signals,
        }  # fmt: skip
        return Collector(live.rows, header, live.begin, live.carries)
    memory = memory_budget(pair.device) if options.memory is None else options.memory
    if pair.drafter != "model":
        if settings.verification != Match.name and settings.temperature > 0:
            raise InputError(
                f"--drafter {pair.drafter}: expected match verification for a dense trace; or give --collector live"
            )
        _require_defaults(options, {"completions": None, "mix": 0.0, "draws": 1}, f"--drafter {pair.drafter}")
        positions = PositionsCollector(pair, settings, hidden, memory << 20)
        header = {"features": positions.features, "signals": positions.signals}
        return Collector(positions.rows, header, positions.begin, positions.carries, memory)
    dense = DenseCollector(
        pair, settings, hidden, memory << 20, draws=options.draws, mix=options.mix, completions=options.completions
    )
    if options.mix and (dense.tree.nodes != 1 or options.completions is not None or dense.mode.name != Match.name):
        raise InputError("--mix: expected a share between 0 and 1, --depth 1, no --completions, and match verification")
    header = {
        "features": dense.features, "verification": dense.mode.name, "label": dense.mode.label, "draws": options.draws,
        "mix": options.mix,
    }  # fmt: skip
    if options.completions is not None:
        header["texts"] = "sampled" if settings.temperature > 0 else "completions"
    return Collector(dense.rows, header, memory=memory)


def _require_defaults(options: Any, defaults: Mapping[str, Any], reason: str) -> None:
    """Raise `InputError` if an option has another value than its default."""
    for name, default in defaults.items():
        if getattr(options, name) not in (None, default):
            other = ", or give --collector live" if defaults is NOT_DENSE else ""
            raise InputError(f"--{name}: cannot be used with {reason}; leave it out{other}")


def _engine_collector(
    pair: Pair, settings: Settings, options: Any, policy: StopPolicy | None, hidden: Sequence[str]
) -> Collector:
    """Return the collector that runs a serving engine; arguments as of `choose_collector`."""
    from .engines.through_vllm import ThroughVLLM

    reason = "--collector vllm"
    _require_defaults(options, NOT_IN_ENGINES, reason)
    supported = ("auto", "point") if settings.temperature else ("auto", "match", "point")
    if settings.verification not in supported or hidden or settings.sampling.to_dict():
        raise InputError(
            f"--verification, --hidden, --sampling: cannot be used with {reason}; leave them out, and give "
            "--no-model-defaults if the target's generation_config sets sampling options"
        )
    engine = ThroughVLLM(pair, options, policy or FixedLength(settings.topology.deepest), settings)
    carries = (policy is not None and policy.carries) or any(d.carries for d in find_drafters(pair.drafter, pair))
    if carries and (options.shards or 1) > 1:
        raise InputError(
            f"--shards: expected 1 with {reason}, not {options.shards}: the state that the policy or the drafter carries "
            "from text to text is not reset there at the beginning of a shard"
        )
    return Collector(engine.rows, engine.header, carries=carries)


def check_dense(pair: Pair, tokens: int) -> None:
    """Refuse models for which a dense trace would differ from the live loop.

    Args:
        pair: of the trace.
        tokens: length of the longest text.

    Raises:
        InputError: the draft reads chains only, or a text is longer than one set of factors of a position encoding serves.
    """
    hint = "give --collector live"
    if pair.drafter == "model" and not pair.readings[1].tree:
        raise InputError(
            f"--collector dense: expected a draft that reads trees, not a {type(pair.draft_model).__name__}; {hint}"
        )
    for rope in pair.ropes:
        if tokens > rope.original:
            raise InputError(
                f"--collector dense: a text may take {tokens} tokens, but the position encoding changes after "
                f"{rope.original} (original_max_position_embeddings); {hint}, or lower --max-new-tokens"
            )


def tokens_beyond(pair: Pair, tree: Topology, collector: str) -> int:
    """Return the number of tokens beyond the limit that the models have to read."""
    # The positions collector decodes one token more than the depth of the tree.
    return tree.deepest + int(collector == "dense" and pair.drafter != "model")
