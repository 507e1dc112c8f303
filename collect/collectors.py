"""The collectors of a run: which one the options choose, and what it writes into the header."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..decode.verify.modes import Match
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.fixed import FixedLength
from ..policies.profile import Profile
from .completions import Completions, completed_texts
from .dense import DenseCollector, dense_mode, memory_budget
from .live import LiveCollector, PositionsCollector
from .schema import PromptTask
from .shards import nothing


@dataclass(frozen=True)
class Collector:
    """A collector of a run.

    Attributes:
        features: names recorded at each node.
        rows: returns the rows of a batch of prompts as column chunks.
        header: fields of the header that depend on the collector.
        begin: called before each shard.
        carries: policy or drafter carry something from text to text, which is reset before each shard.
        memory: MiB for rows as wide as the vocabulary; 0 = no budget.
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
    """Return the collector for these options; arguments as of `plan.plan_run`.

    Raises:
        InputError: options that do not go together; the message names them.
    """
    if collector not in ("dense", "live"):
        raise InputError(f"--collector: expected dense or live, not {collector!r}")
    if settings.verification == "auto" and (collector == "live" or mix or pair.drafter != "model"):
        settings = replace(settings, verification=Match.name)  # the only mode of these that can be replayed
    if collector == "live":
        if mix or completions is not None or draws > 1 or off_text != "exact" or memory is not None:
            raise InputError(
                "--mix, --completions, --draws, --off-text and --memory: for the dense collector; leave out --collector live"
            )
        policy = policy or FixedLength(tree.deepest)
        live = LiveCollector(pair, policy, settings, explore, hidden, batch, profile)
        header = {
            "collector": "live", "policy": policy.name, "explore": explore, "verification": live.mode.name,
            "label": live.mode.label, "batch": batch,
        }  # fmt: skip
        return Collector(live.features, live.rows, header, live.begin, live.carries)
    if profile is not None:
        raise InputError("--profile: for the live collector, whose policy hears what rounds take; leave it out")
    if batch > 1:
        raise InputError(
            "--batch: for the live collector; the dense one decodes as many texts side by side as --memory holds"
        )
    if policy is not None or explore:
        raise InputError("--policy and --explore: give --collector live with them; dense traces serve any policy")
    mode = dense_mode(settings, draws, off_text)
    header = {"verification": mode.name, "label": mode.label, "draws": draws, "off_text": off_text}
    memory = memory_budget(pair.device) if memory is None else memory
    if mix:
        if not 0.0 < mix < 1.0 or tree.nodes != 1 or completions is not None or mode.name != Match.name:
            raise InputError(
                "--mix: expected a share between 0 and 1, --depth 1, no --completions, and match verification"
            )
        if pair.drafter != "model":
            raise InputError(f"--mix: expected a draft model, not --drafter {pair.drafter}")
        header = {"mix": mix}
    if pair.drafter != "model":
        if completions is not None or mode.name != Match.name:
            raise InputError(
                f"--drafter {pair.drafter}: dense traces of it are of match verification, without --completions; or give "
                "--collector live"
            )
        positions = PositionsCollector(pair, settings, hidden, memory << 20)
        return Collector(positions.features, positions.rows, header, positions.begin, positions.carries, memory)
    texts = None
    if completions is not None:
        header["texts"] = "sampled" if settings.temperature > 0 else "completions"
        texts = partial(completed_texts, completions=completions)
    dense = DenseCollector(pair, settings, hidden, memory << 20, off_text=off_text, draws=draws, mix=mix, texts=texts)
    return Collector(dense.features, dense.rows, header, memory=memory)


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
    """Return the collector that runs a serving engine.

    Args:
        through: its name.
        models: names of target, draft and drafter.
        tree: a chain.
        settings, policy, explore, batch: as of `plan.plan_run`.
        dtype: of the models.
        other: options that engines do not support, each false if it is not used.

    Raises:
        InputError: an unknown engine, or options that it does not support.
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
    engine = ThroughVLLM(
        *models, policy or FixedLength(tree.deepest), tree.deepest, settings, explore, batch or REQUESTS,
        str(dtype).removeprefix("torch."),
    )  # fmt: skip
    return Collector(engine.features, engine.rows, engine.header)
