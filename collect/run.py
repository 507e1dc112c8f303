"""`collect`: record a trace of prompts. Options are validated, prompts are assigned to shards, and the shards are
collected."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..decode.drafters.spec import find_drafter, parse_spec, paths_of, warn_depth_limited
from ..decode.models.outputs import hidden_widths
from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import Topology
from ..decode.verify.noise import stream_key
from ..decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from ..policies.arguments import check_limits
from ..policies.contract import StopPolicy
from ..policies.display import Progress, shown
from ..policies.errors import InputError
from ..policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden
from ..policies.files import digest
from ..policies.fixed import FixedLength
from ..policies.profile import Profile
from ..policies.registry import PolicySpec, as_policy
from .collectors import Collector, check_dense, choose_collector, choose_engine_collector, tokens_beyond
from .completions import Completions, check_completions, find_completion
from .prompts import Prompt, as_prompts, check_distinct, fit
from .schema import Header, PromptTask, parents
from .shards import ALONE, BATCH, DistributedRank, Plan, policy_digest, record, short_hash
from .store import Trace

PROMPTS_PER_SHARD = 32
SHARD_BYTES = 1 << 29
"""Maximum size of the hidden states of a shard by default: a shard is held in memory until it is written."""


@dataclass(frozen=True)
class CollectOptions:
    """Options of `collect`.

    Attributes:
        target, draft: names of the models for the header.
        depth: K of a chain.
        tree: a tree, as `decode.topology.parse_tree` reads it; None = a chain, or the policy's own tree.
        temperature: 0 = greedy; otherwise texts are sampled with keyed noise.
        max_new_tokens: limit of each text.
        seed: of the streams.
        shards: number of shards. Default: one per 32 prompts, more if hidden states make them large, and one if the
            policy or the drafter carries state from text to text, which is reset at the beginning of each shard.
        source: description of the source of the prompts for the data card.
        prompt_options: options that selected the prompts. A resumed command uses the stored prompts if they are equal.
        collector: "dense", or "live" for the rounds of the decoding loop with their times.
        policy: of a live run: a policy, a spec such as `fixed:4`, or a policy folder. Default: draft to the full depth.
        verification: mode of a live run, or mode of the rounds of a dense trace: `match` and `point` (the draft is
            greedy while the text is sampled) are exact path by path; `rejection`, `rejection_replace` and `block` are
            drawn given the text and exact in law. `auto`: the fastest lossless mode that can be replayed, which is
            `block` for dense sampled chains of a draft model and `match` otherwise.
        explore: share of the rounds of a live run that are drafted to full depth regardless of the policy.
        mix: of dense chains of depth 1: share of the target's tokens in the text that the draft reads; the others are
            samples of the draft, as in the training of SpecDec++. 0 = the text as it is.
        completions: texts (or token ids) after the prompts, by prompt id or by (prompt id, sample), that are labelled
            instead of the target's own; above temperature 0 they must be samples of the target with this `temperature`
            and `sampling`.
        hidden: hidden states to record (`features.hidden_states`) in float16.
        draws: number of draws of drafts and acceptances per text; several reduce the variance of replay.
        off_text: under `block`: "exact", the target reads candidates off the text too; or "approximate".
        memory: MiB for the scores of positions that the dense collector unrolls together. Default: a share of the free
            memory.
        batch: number of texts that a live run decodes in parallel. Default: 1, and 8 inside vLLM.
        through: "vllm" = a live trace of rounds inside vLLM.
        profile: of a live run, see `Speculator`.
        sampling: other options that change the sampled distribution: top-p, a repetition penalty, logits processors.

    Raises:
        InputError: an option is out of range.
    """

    target: str = ""
    draft: str = ""
    depth: int = 10
    tree: str | None = None
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    shards: int | None = None
    source: str = ""
    prompt_options: Mapping[str, Any] = field(default_factory=dict)
    collector: str = "dense"
    policy: PolicySpec | None = None
    verification: str = "auto"
    explore: float = 0.0
    mix: float = 0.0
    completions: Completions | None = None
    hidden: Sequence[str] = ()
    draws: int = 1
    off_text: str = "exact"
    memory: int | None = None
    batch: int | None = None
    through: str | None = None
    profile: Profile | None = None
    sampling: SamplingParams = MODEL_DEFAULTS

    def __post_init__(self) -> None:
        names = (
            "depth",
            "max_new_tokens",
            "temperature",
            "shards",
            "seed",
            "memory",
            "explore",
            "mix",
            "batch",
            "draws",
        )
        # A text needs two tokens to have an anchor.
        check_limits({"depth": 1, "max_new_tokens": 2}, **{name: getattr(self, name) for name in names})


def collect(
    pair: Pair,
    prompts: str | Sequence[Prompt | str],
    out: str | Path,
    options: CollectOptions | None = None,
    *,
    rank: DistributedRank = ALONE,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = shown,
    **changes: Any,
) -> Trace:
    """Record a trace: what the draft proposes, and what of it the target accepts.

    The dense collector records the chain or tree at every position of the target's text. The live collector records the
    rounds of the decoding loop.

    Args:
        pair: target and draft.
        prompts: texts, or `Prompt`s with unique (id, sample); samples of a prompt have the same text.
        out: folder of the trace.
        options: of the run.
        rank: this process, if several collect different shards of the trace.
        resume: continue an interrupted run in `out`.
        overwrite: replace an older result in `out` when the new one is complete.
        progress: see `Progress`.
        changes: fields of `CollectOptions`, such as `depth=8`.

    Returns:
        The trace, which is incomplete if other processes have not finished their shards.

    Raises:
        InputError: an option is out of range, prompts are not unique or too long, `out` is not empty, a logits
            processor cannot follow candidates, or the completions are not samples of the target.
        PolicyError: an unknown policy or hidden state.
        TraceError: `resume`, but the folder holds another run; or the disk is full.
    """
    plan = plan_run(pair, as_prompts(prompts), options, **changes)
    return record(plan, Path(out), rank=rank, resume=resume, overwrite=overwrite, progress=progress)


def plan_run(pair: Pair, prompts: Sequence[Prompt], options: CollectOptions | None = None, **changes: Any) -> Plan:
    """Validate a run before anything is written, and assign its prompts to shards; arguments and errors as of
    `collect`."""
    options = dataclasses.replace(options or CollectOptions(), **changes)
    _check_distinct(prompts)
    settings = Settings(
        options.temperature, options.max_new_tokens, options.depth, verification=options.verification,
        tree=options.tree, sampling=options.sampling,
    ).for_pair(pair)  # fmt: skip
    policy = None if options.policy is None else as_policy(options.policy)
    settings = settings if policy is None else settings.for_policy(policy)
    tree = settings.topology
    settings = dataclasses.replace(settings, max_depth=tree.deepest)
    new = options.max_new_tokens + tokens_beyond(pair, tree, "live" if options.through else options.collector)
    readable, ids = fit(prompts, pair.tokenizer, pair.readable - new)
    if options.shards is not None and options.shards > len(readable):
        raise InputError(f"--shards: expected at most {len(readable)}, one for each prompt, not {options.shards}")
    if options.through is None and options.collector == "dense":
        check_dense(pair, max(map(len, ids), default=0) + new)
    hidden = check_hidden(options.hidden, "--hidden")
    # A drafter is only loaded if its width is needed.
    drafter = find_drafter(pair.drafter, pair) if pair.drafter != "model" and DRAFT_HIDDEN in hidden else None
    widths = hidden_widths(pair, hidden, drafter)
    chosen = _choose_collector(pair, tree, settings, options, policy, widths)
    warn_depth_limited(pair, options.depth, settings.tree)
    facts = environment_facts(pair) | {
        "prompts from": options.source,
        "prompt options": dict(options.prompt_options),
        "digests": _digests(options, policy or FixedLength(tree.deepest), readable),
    }
    if chosen.memory:
        facts["memory MiB"] = chosen.memory
    if len(readable) < len(prompts):
        facts["prompts left out"] = f"{len(prompts) - len(readable)} of {len(prompts)}, longer than the pair reads"
    if options.profile is not None:
        facts["profile"] = digest(options.profile.to_dict())[:16]
    if options.completions is not None:
        texts = list(zip(readable, ids, strict=True))
        limit = options.max_new_tokens + tree.deepest
        if balance := check_completions(pair, settings, texts, options.completions, limit):
            facts["completions"] = balance
    shards = options.shards or _shard_count(chosen.carries, len(readable), options, widths, tree.nodes)
    tasks: list[list[PromptTask]] = [[] for _ in range(shards)]
    for sequence, (prompt, tokens) in enumerate(zip(readable, ids, strict=True)):
        # The shard depends on id and sample alone: the same for a part of the prompts.
        shard = tasks[int(short_hash(prompt.stream_name), 16) % shards]
        key = stream_key(options.seed, prompt.stream_name)
        shard.append(PromptTask(sequence, prompt.id, prompt.group, tokens, key, prompt.sample))
    header = _header(pair, tree, settings, options, chosen, widths, facts, tuple(readable), ids, shards)
    # Twice as many prompts as texts in parallel: when one ends, the next takes its place.
    batch = max(BATCH, 2 * (options.batch or 1))
    inputs = _inputs(pair, options, policy)
    return Plan(header, tuple(map(tuple, tasks)), chosen.rows, chosen.begin, inputs, batch, tuple(prompts))


def _check_distinct(prompts: Sequence[Prompt]) -> None:
    if not prompts:
        raise InputError("--prompts: expected at least one prompt")
    if not all(isinstance(prompt, Prompt) for prompt in prompts):  # a text is a sequence too
        raise InputError("prompts: expected a list of Prompt(id, text), as read_prompts returns it")
    check_distinct(prompts, [f"prompt number {number}" for number in range(1, len(prompts) + 1)])


def _choose_collector(
    pair: Pair, tree: Topology, settings: Settings, options: CollectOptions, policy: StopPolicy | None, widths:
    Mapping[str, int]
) -> Collector:  # fmt: skip
    if options.through is None:
        return choose_collector(
            pair, tree, settings, options.collector, policy, options.explore, options.mix, options.completions,
            tuple(widths), options.memory, options.batch or 1, options.draws, options.off_text, options.profile,
        )  # fmt: skip
    unsupported = [
        options.mix, options.completions, *widths, *settings.sampling.to_dict(), options.profile, options.draws > 1,
        options.off_text != "exact", options.memory,
    ]  # fmt: skip
    draft = options.draft if pair.drafter == "model" else pair.draft_name
    chosen = choose_engine_collector(
        options.through, (options.target, draft, pair.drafter), tree, settings, policy, options.explore, options.batch,
        pair.target.dtype, unsupported,
    )  # fmt: skip
    carries = (policy is not None and policy.carries) or find_drafter(pair.drafter, pair).carries
    if carries and (options.shards or 1) > 1:
        raise InputError(
            f"--shards: expected 1 with --through {options.through}, not {options.shards}: the state that the policy or the "
            "drafter carries from text to text is not reset there at the beginning of a shard"
        )
    return dataclasses.replace(chosen, carries=carries)


def _header(
    pair: Pair, tree: Topology, settings: Settings, options: CollectOptions, chosen: Collector, widths: Mapping[str,
    int],
    facts: Mapping[str, Any], prompts: Sequence[Prompt], ids: Sequence[list[int]], shards: int,
) -> Header:  # fmt: skip
    return Header(
        target=options.target,
        draft=options.draft,
        pair=pair.fingerprint,
        vocabulary=pair.vocabulary,
        eos=pair.eos,
        temperature=options.temperature,
        topology=parents(tree),
        features=chosen.features,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        shards=shards,
        prompts=len(prompts),
        # A run can be resumed with exactly the same prompts only (`Header.differences`).
        prompts_hash=short_hash([[p.id, p.sample, p.group, tokens] for p, tokens in zip(prompts, ids, strict=True)]),
        hidden=widths,
        sampling=settings.sampling.to_dict(),
        **{"anchor_features": ANCHOR_FEATURES, **chosen.header},  # an engine knows fewer
        facts=facts,
    )


def _shard_count(carries: bool, prompts: int, options: CollectOptions, widths: Mapping[str, int], nodes: int) -> int:
    if carries:
        return 1
    row_bytes = 2 * (widths.get(DRAFT_HIDDEN, 0) * nodes + widths.get(TARGET_HIDDEN, 0))  # float16
    rows = prompts * options.draws * options.max_new_tokens
    return max(1, -(-prompts // PROMPTS_PER_SHARD), -(-rows * row_bytes // SHARD_BYTES))


def _inputs(pair: Pair, options: CollectOptions, policy: StopPolicy | None) -> tuple[str | Path | None, ...]:
    """Return names and files of models, drafter, policy and profile, which no result may overwrite."""
    models = [model.config.name_or_path for model in (pair.target, pair.draft) if model is not None]
    sources = [one.source for one in (policy, options.profile) if one is not None]
    return (options.target, options.draft, *models, *paths_of(pair.drafter), *sources)


def _digests(options: CollectOptions, policy: StopPolicy, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return hashes of inputs whose contents may change under the same name; "" = not used."""
    completions, profile = options.completions, options.profile
    texts = (
        [] if completions is None else [find_completion(completions, prompt.id, prompt.sample) for prompt in prompts]
    )
    values = [text if text is None or isinstance(text, str) else [int(token) for token in text] for text in texts]
    return {
        "policy": policy_digest(policy),
        "profile": "" if profile is None else short_hash(profile.to_dict()),
        "completions": "" if completions is None else short_hash(values),
    }


def environment_facts(pair: Pair) -> dict[str, Any]:
    """Return device, setup of the models, versions and time, for the header of a trace or a profile."""
    facts = {
        "device": torch.cuda.get_device_name(pair.device) if pair.device.type == "cuda" else str(pair.device),
        "dtype": str(pair.target.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("specstop", "torch", "transformers")},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    if pair.drafter != "model":
        parts = parse_spec(pair.drafter)
        reading = parts[-1].attribute("reading")  # only the last drafter of a spec may have a backlog
        facts |= {"drafter": pair.drafter, "draft model": pair.draft_name, "reading": reading}
        facts |= {"in turn": True} if len(parts) > 1 else {}
    return facts
