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

from ..decode.drafters.spec import (
    drafter_names,
    find_drafters,
    one_drafter,
    parse_spec,
    spec_paths,
    warn_depth_limited,
)
from ..decode.models.outputs import hidden_widths
from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.topology import with_drafters
from ..decode.verify.noise import stream_key
from ..decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from ..policies.arguments import check_limits
from ..policies.display import Progress, shown
from ..policies.errors import InputError
from ..policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden
from ..policies.fixed import FixedLength
from ..policies.profile import Profile
from ..policies.registry import PolicySpec, as_policy
from ..policies.storage import policy_digest
from .collectors import check_dense, choose_collector, tokens_beyond
from .completions import CompletionIds, Completions, check_sampled, encode_completions
from .prompts import Prompt, as_prompts, tokenize_prompts
from .schema import Header, PromptTask, first_drafters, parents
from .shards import ALONE, BATCH, DistributedRank, Plan, record, short_hash
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
        collector: "dense", or "live" for the rounds of the decoding loop with their times, or "vllm" for those inside vLLM.
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
        memory: MiB for the scores of positions that the dense collector unrolls together. Default: a share of the free
            memory.
        batch: number of texts that a live run decodes in parallel. Default: 1, and 8 inside vLLM.
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
    memory: int | None = None
    batch: int | None = None
    profile: Profile | None = None
    sampling: SamplingParams = MODEL_DEFAULTS

    def __post_init__(self) -> None:
        check_limits({"depth": 1, "max_new_tokens": 2}, **vars(self))  # a text needs two tokens to have an anchor


def collect(
    pair: Pair,
    prompts: str | Sequence[Prompt | str],
    out: str | Path,
    *,
    rank: DistributedRank = ALONE,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = shown,
    **options: Any,
) -> Trace:
    """Record a trace: what the draft proposes, and what of it the target accepts.

    The dense collector records the chain or tree at every position of the target's text. The live collector records the
    rounds of the decoding loop.

    Args:
        pair: target and draft.
        prompts: texts, or `Prompt`s with unique (id, sample); samples of a prompt have the same text.
        out: folder of the trace.
        rank: this process, if several collect different shards of the trace.
        resume: continue an interrupted run in `out`.
        overwrite: replace an older result in `out` when the new one is complete.
        progress: see `Progress`.
        options: fields of `CollectOptions`, such as `depth=8`.

    Returns:
        The trace, which is incomplete if other processes have not finished their shards.

    Raises:
        InputError: an option is out of range, prompts are not unique or too long, `out` is not empty, a logits
            processor cannot follow candidates, or the completions are not samples of the target.
        PolicyError: an unknown policy or hidden state.
        TraceError: `resume`, but the folder holds another run.
    """
    plan = plan_run(pair, prompts, **options)
    return record(plan, Path(out), rank=rank, resume=resume, overwrite=overwrite, progress=progress)


def plan_run(pair: Pair, prompts: str | Sequence[Prompt | str], **changes: Any) -> Plan:
    """Validate a run before anything is written, and assign its prompts to shards; arguments and errors as of
    `collect`."""
    options, all_prompts = CollectOptions(**changes), as_prompts(prompts)
    settings = Settings(
        options.temperature, options.max_new_tokens, options.depth, verification=options.verification,
        tree=options.tree, sampling=options.sampling,
    ).for_pair(pair)  # fmt: skip
    policy = None if options.policy is None else as_policy(options.policy)
    settings = settings if policy is None else settings.for_policy(policy)
    if options.collector != "dense" and not (policy and policy.routes):
        pair = one_drafter(pair, policy)
    tree = with_drafters(settings.topology, len(drafter_names(pair.drafter)))
    settings = dataclasses.replace(settings, max_depth=tree.deepest)
    new = options.max_new_tokens + tokens_beyond(pair, tree, options.collector)
    readable, ids = tokenize_prompts(all_prompts, pair.tokenizer, pair.readable - new)
    completions: CompletionIds | None = None
    if options.shards is not None and options.shards > len(readable):
        raise InputError(f"--shards: expected at most {len(readable)}, one for each prompt, not {options.shards}")
    if options.collector == "dense":
        check_dense(pair, max(map(len, ids), default=0) + new)
        if options.completions is not None:
            completions = encode_completions(pair, options.completions, readable)
            options = dataclasses.replace(options, completions=completions)
    hidden = check_hidden(options.hidden, "--hidden")
    # A drafter is only loaded if its width is needed.
    drafter = find_drafters(pair.drafter, pair)[0] if pair.drafter != "model" and DRAFT_HIDDEN in hidden else None
    widths = hidden_widths(pair, hidden, drafter)
    collector = choose_collector(pair, settings, options, policy, tuple(widths))
    warn_depth_limited(pair, options.depth, settings.tree)
    facts = environment_facts(pair) | {
        "prompts from": options.source,
        "prompt options": dict(options.prompt_options),
        "policy digest": policy_digest(policy or FixedLength(tree.deepest)),
    }
    if collector.memory:
        facts["memory MiB"] = int(collector.memory)
    if len(readable) < len(all_prompts):
        facts["prompts left out"] = (
            f"{len(all_prompts) - len(readable)} of {len(all_prompts)}, longer than the pair reads"
        )
    if options.profile is not None:
        facts["profile digest"] = short_hash(options.profile.to_dict())
    if completions is not None:
        facts |= _completion_facts(pair, settings, ids, list(completions.values()))
    default_shards = 1 if collector.carries else _shard_count(len(readable), options, widths, tree.nodes)
    shards = int(options.shards or default_shards)
    tasks: list[list[PromptTask]] = [[] for _ in range(shards)]
    for sequence, (prompt, tokens) in enumerate(zip(readable, ids, strict=True)):
        # The shard depends on id and sample alone: the same for a part of the prompts.
        shard = tasks[int(short_hash(prompt.stream_name), 16) % shards]
        key = stream_key(options.seed, prompt.stream_name)
        shard.append(PromptTask(sequence, prompt.id, prompt.group, tokens, key, prompt.sample))
    fields = {"anchor_features": ANCHOR_FEATURES, **collector.header}  # an engine records fewer
    header = Header(
        target=str(options.target), draft=str(options.draft), pair=pair.fingerprint, vocabulary=pair.vocabulary, eos=pair.eos,
        temperature=options.temperature, topology=parents(tree), drafters=first_drafters(tree),
        max_new_tokens=options.max_new_tokens, seed=options.seed, shards=shards, prompts=len(readable), hidden=widths,
        sampling=settings.sampling.to_dict(), facts=facts,
        # A run can be resumed with exactly the same prompts only (`Header.differences`).
        prompts_hash=short_hash([[p.id, p.sample, p.group, tokens] for p, tokens in zip(readable, ids, strict=True)]),
        **fields,
    )  # fmt: skip
    # What no result may overwrite.
    models = [model.config.name_or_path for model in (pair.target, pair.draft) if model is not None]
    sources = [one.source for one in (policy, options.profile) if one is not None]
    inputs = (options.target, options.draft, *models, *spec_paths(pair.drafter), *sources)
    # Twice as many prompts as texts in parallel: when one ends, the next takes its place.
    batch = max(BATCH, 2 * (options.batch or 1))
    return Plan(header, tuple(map(tuple, tasks)), collector.rows, collector.begin, inputs, batch, tuple(all_prompts))


def _completion_facts(
    pair: Pair, settings: Settings, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> dict[str, str]:
    """Return a hash of the completions, and above temperature 0 how well they agree with samples of the target."""
    facts = {"completions digest": short_hash(texts)}
    if settings.temperature > 0:
        limit = settings.max_new_tokens + settings.topology.deepest
        balance = check_sampled(pair, settings, prompts, [text[:limit] for text in texts])
        facts["completions"] = (
            f"{balance['texts']} checked: log p + entropy {balance['mean']:+.4f} a token (standard error "
            f"{balance['standard_error']:.4f}), {balance['impossible']} of {balance['tokens']} tokens cannot be drawn"
        )
    return facts


def _shard_count(prompts: int, options: CollectOptions, widths: Mapping[str, int], nodes: int) -> int:
    """Return the default number of shards; `widths` are those of the hidden states, in float16."""
    row_bytes = 2 * (widths.get(DRAFT_HIDDEN, 0) * nodes + widths.get(TARGET_HIDDEN, 0))
    rows = prompts * options.draws * options.max_new_tokens
    return max(1, -(-prompts // PROMPTS_PER_SHARD), -(-rows * row_bytes // SHARD_BYTES))


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
        readings = [part.attribute("reading") for part in parse_spec(pair.drafter)]
        facts |= {"drafter": pair.drafter, "draft model": pair.draft_name, "reading": readings}
    return facts
