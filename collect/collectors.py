"""The collectors: what each writes into the header, and how it makes rows of a batch of prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..decode.verify.modes import Block, Match, Verification, find_mode, resolve_mode
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.fixed import FixedLength
from ..policies.profile import Profile
from .dense.collector import dense_rows
from .dense.completions import Completions, completion_rows
from .dense.memory import budget_mib
from .dense.mixed import mixed_rows
from .dense.positions import PositionsCollector
from .dense.unroll import Unroller, node_features
from .live import LiveCollector
from .schema import GIVEN_TEXT, PromptTask
from .shards import nothing


@dataclass(frozen=True)
class Collector:
    """What a collection writes into the header, and how it makes rows.

    Attributes:
        features: recorded at each node.
        rows: the rows of a batch, as column chunks.
        header: what its header has beside what all have.
        begin: called before each shard.
        carries: something passes from text to text, of the policy's or the drafter's; it starts anew where a shard begins.
        memory: MiB that are taken for rows as wide as the vocabulary; 0 = as they come.
    """

    features: tuple[str, ...]
    rows: Callable[[Sequence[PromptTask]], Sequence[Mapping[str, Any]]]
    header: dict[str, Any] = field(default_factory=dict)
    begin: Callable[[], None] = nothing
    carries: bool = False
    memory: int = 0


def choose_collector(
    pair: Pair,
    tree: Topology,
    settings: Settings,
    collector: str,
    policy: StopPolicy | None,
    explore: float,
    mix: float,
    completions: Completions | None,
    hidden: Sequence[str] = (),
    memory: int | None = None,
    batch: int = 1,
    draws: int = 1,
    off_text: str = "exact",
    profile: Profile | None = None,
) -> Collector:
    """Return the collector that the options ask for; arguments as of `plan.plan_run`.

    Raises:
        InputError: options that do not go together; the message names them.
    """
    if collector not in ("dense", "live"):
        raise InputError(f"--collector: expected dense or live, not {collector!r}")
    if settings.verification == "auto" and (collector == "live" or mix or pair.drafter != "model"):
        settings = replace(settings, verification=Match.name)  # of these no other mode can be replayed
    if collector == "live":
        if mix or completions is not None or draws > 1 or off_text != "exact" or memory is not None:
            raise InputError(
                "--mix, --completions, --draws, --off-text and --memory: for the dense collector; leave out --collector live"
            )
        return _live(pair, policy or FixedLength(tree.deepest), settings, explore, hidden, batch, profile)
    if profile is not None:
        raise InputError("--profile: for the live collector, whose policy hears what rounds take; leave it out")
    if batch > 1:
        raise InputError(
            "--batch: for the live collector; the dense one decodes as many texts side by side as --memory holds"
        )
    if policy is not None or explore:
        raise InputError("--policy and --explore: give --collector live with them; dense traces serve any policy")
    return _dense(pair, tree, settings, mix, completions, hidden, memory, draws, off_text)


def _dense(
    pair: Pair,
    tree: Topology,
    settings: Settings,
    mix: float,
    completions: Completions | None,
    hidden: Sequence[str],
    memory: int | None,
    draws: int,
    off_text: str,
) -> Collector:
    """Return the collector of every anchor: of a mixed text, a drafter's positions, completions or the target's text."""
    mode = dense_mode(settings, tree, draws, off_text)
    features, limit = node_features(tree, mode.name), settings.max_new_tokens
    header: dict[str, Any] = {"verification": mode.name, "label": mode.label, "draws": draws, "off_text": off_text}
    memory = budget_mib(pair.device) if memory is None else memory
    if mix:
        if not 0.0 < mix < 1.0 or tree.nodes != 1 or completions is not None or mode.name != Match.name:
            raise InputError(
                "--mix: expected a share between 0 and 1, --depth 1, no --completions, and match verification"
            )
        if pair.drafter != "model":
            raise InputError(f"--mix: expected a draft model, not --drafter {pair.drafter}")
        rows = partial(mixed_rows, pair, settings=settings, share=mix, hidden=hidden, memory_bytes=memory << 20)
        return Collector(features, rows, {"mix": mix}, memory=memory)
    if pair.drafter != "model":
        if completions is not None or mode.name != Match.name:
            raise InputError(
                f"--drafter {pair.drafter}: dense traces of it are of match verification, without --completions; or give "
                "--collector live"
            )
        made = PositionsCollector(pair, settings, hidden, memory << 20)
        return Collector(features, made.rows, header, made.begin, made.carries, memory)
    unroller = Unroller(
        pair, tree, settings.temperature, memory_bytes=memory << 20, hidden=hidden, shaping=settings.shaping,
        verification=mode.name, off_text=off_text, draws=draws,
    )  # fmt: skip
    if completions is not None:
        header["texts"] = "sampled" if settings.temperature > 0 else "completions"
        rows = partial(completion_rows, pair, unroller, completions=completions, max_new_tokens=limit)
        return Collector(features, rows, header, memory=memory)
    return Collector(features, lambda batch: dense_rows(pair, unroller, batch, limit), header, memory=memory)


def check_dense(pair: Pair, tokens: int) -> None:
    """Refuse models of which a dense trace would not hold what a live loop sees.

    Args:
        pair: of the trace.
        tokens: of the longest text.

    Raises:
        InputError: the draft reads chains only, or a text is longer than a position encoding has one set of factors for.
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
    """Return how many tokens beyond the limit of new ones a text takes: the models have to read those too."""
    # The collector of positions decodes one more than the tree is deep (`PositionsCollector`).
    return tree.deepest + int(collector == "dense" and pair.drafter != "model")


def dense_mode(settings: Settings, tree: Topology, draws: int, off_text: str) -> Verification:
    """Return the verification whose rounds a dense trace holds; at temperature 0 that of all is greedy matching.

    Raises:
        InputError: it is lossy, so that its texts depend on the policy, or it does not go with the other options.
    """
    # A trace serves any policy: the mode is that of one which reads nothing.
    name = resolve_mode(settings.verification, FixedLength(tree.deepest), tree, settings.temperature)
    mode = find_mode(name, settings.temperature)
    if not mode.lossless:
        raise InputError(
            f"--verification {mode.name}: expected a lossless one, whose texts do not depend on the policy; or give "
            "--collector live"
        )
    if mode.chains_only and not tree.is_chain:
        raise InputError(f"--verification {mode.name}: expected a chain, not the tree {tree.name}; use rejection")
    if draws > 1 and mode.name not in GIVEN_TEXT:
        raise InputError(
            f"--draws: expected 1 under {mode.name} at temperature {settings.temperature:g}, where nothing is drawn given "
            f"the text; several are for {', '.join(GIVEN_TEXT)}"
        )
    if off_text not in ("exact", "approximate"):
        raise InputError(f"--off-text: expected exact or approximate, not {off_text!r}")
    if off_text != "exact" and mode.name != Block.name:
        raise InputError(f"--off-text {off_text}: for --verification block; the others need no target there")
    return mode


def choose_engine_collector(
    through: str,
    models: tuple[str, str, str],
    tree: Topology,
    settings: Settings,
    policy: StopPolicy | None,
    explore: float,
    batch: int | None,
    dtype: Any,
    other: Sequence[Any],
) -> Collector:
    """Return the collector that goes through a serving engine.

    Args:
        through: its name.
        models: names of target, draft and drafter.
        tree: a chain.
        settings, policy, explore, batch: as of `plan.plan_run`.
        dtype: of the models.
        other: options that are not for engines, each false where it is not used.

    Raises:
        InputError: an unknown engine, or options that it does not take.
    """
    from .engines.through_vllm import REQUESTS, ThroughVLLM

    if through != "vllm":
        raise InputError(f"--through: expected vllm, not {through!r}")
    known = ("auto", "point") if settings.temperature else ("auto", "match", "point")
    if not tree.is_chain or settings.verification not in known or any(other):
        raise InputError(
            f"--through {through}: expected chains of a policy, at a temperature: leave out --tree, --verification, --mix, "
            "--completions, --hidden, --profile, --draws, --off-text, --memory, options that change what is sampled from, "
            "and give --no-model-defaults where the target's generation_config sets some"
        )
    made = ThroughVLLM(
        *models, policy or FixedLength(tree.deepest), tree.deepest, settings.temperature, settings.max_new_tokens, explore,
        batch or REQUESTS, str(dtype).removeprefix("torch."),
    )  # fmt: skip
    return Collector(made.features, made.rows, {**made.header, "batch": batch or REQUESTS})


def _live(
    pair: Pair, policy: StopPolicy, settings: Settings, explore: float, hidden: Sequence[str], batch: int,
    profile: Profile | None,
) -> Collector:  # fmt: skip
    made = LiveCollector(pair, policy, settings, explore, hidden, batch, profile)
    header = {
        "collector": "live",
        "policy": policy.name,
        "explore": explore,
        "verification": made.verification,
        "label": made.label,
        "batch": batch,
    }
    return Collector(made.features, made.rows, header, made.begin, made.carries)
