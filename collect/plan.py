"""What a run will do: its options checked, its prompts dealt to shards, the header of its trace written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..decode.drafters.spec import find_drafter, paths_of, warn_depth_limited
from ..decode.models.outputs import hidden_widths
from ..decode.models.pair import Pair
from ..decode.settings import Settings
from ..decode.verify.noise import stream_key
from ..decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from ..policies.arguments import check_limits
from ..policies.contract import StopPolicy
from ..policies.errors import InputError
from ..policies.features import ANCHOR_FEATURES, DRAFT_HIDDEN, TARGET_HIDDEN, check_hidden
from ..policies.files import digest
from ..policies.fixed import FixedLength
from ..policies.profile import Profile
from ..policies.registry import PolicySpec, as_policy
from .collectors import check_dense, choose_collector, choose_engine_collector, tokens_beyond
from .completions import Completions, check_completions
from .digests import digests, short_hash
from .facts import facts
from .prompts.read import Prompt, fit
from .prompts.samples import DistinctPrompts
from .schema import Header, parents
from .shards import BATCH, Plan
from .work import Work

PROMPTS_PER_SHARD = 32
SHARD_BYTES = 1 << 29
"""Hidden states of a shard, at most, unless the number of shards is given: a shard is held in memory until it is written."""


def plan_run(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    target: str = "",
    draft: str = "",
    depth: int = 10,
    tree: str | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    shards: int | None = None,
    source: str = "",
    collector: str = "dense",
    policy: PolicySpec | None = None,
    verification: str = "auto",
    explore: float = 0.0,
    mix: float = 0.0,
    completions: Completions | None = None,
    hidden: Sequence[str] = (),
    memory: int | None = None,
    draws: int = 1,
    off_text: str = "exact",
    shaping: SamplingParams = MODEL_DEFAULTS,
    long: str = "skip",
    batch: int | None = None,
    through: str | None = None,
    profile: Profile | None = None,
) -> Plan:
    """Check everything that can be checked before a run, deal the prompts to shards, and return what is to be done.

    Args:
        pair: target and draft.
        prompts: with unique (id, sample); samples of a prompt have the same text.
        target, draft: names for the header.
        depth: K of a chain.
        tree: what `decode.topology.parse_tree` reads; None = a chain, or the policy's own tree.
        temperature: 0 = greedy, else sampling with keyed noise.
        max_new_tokens: limit of each text.
        seed: of the streams.
        shards: number of shards; by default one for every 32 prompts, more of them where hidden states make them large, and
            one in all for a policy or drafter that passes something from text to text: with each shard it starts anew.
        source: where the prompts are from, for the data card.
        collector: "dense", or "live" for the rounds of the running loop, with their times.
        policy: of a live run: a policy, a spec such as `fixed:4`, or a policy folder; by default one that drafts to full
            depth.
        verification: of a live run; or whose rounds a dense trace holds: `match`, exact path by path, as is `point` (the
            draft is greedy while the text is sampled); `rejection`, `rejection_replace` or `block`, drawn given the text,
            exact in law. `auto` = the fastest lossless one that can be replayed: `block` for sampled chains of a draft model,
            dense (`modes.resolve_mode`), else `match`.
        explore: share of the rounds of a live run that are drafted to full depth whatever the policy says.
        mix: of dense chains of depth 1: share of the target's tokens in the text that the draft reads, the other ones being
            its own samples, as SpecDec++ trains on; 0 = the text as it is.
        completions: text (or token ids) after each prompt, by prompt id or by (prompt id, sample), to label in the place of
            the target's own; above temperature 0 they must have been sampled from the target as `temperature` and `shaping`
            say.
        hidden: hidden states to record (`features.hidden_states`), in float16: 2 bytes x width for the target's, and
            2 bytes x width x nodes for the draft's, at each anchor.
        draws: of drafts and acceptances given each text, under those; several shrink the variance of replay.
        off_text: under `block`: "exact", where the target reads candidates off the text too, or "approximate", without.
        memory: MiB for the scores of the positions that the dense collector unrolls together; None = a share of what the
            device has free (`dense.memory_budget`), which the header's facts tell.
        long: what becomes of prompts that are too long; see `prompts.tokens.fit`.
        batch: texts that are decoded side by side in a live run; None = 1, and 8 inside vLLM.
        profile: of a live run, see `Speculator`.
        through: "vllm" = a live trace of rounds inside vLLM, which decodes the prompts in this process.
        shaping: what else changes the distribution that is sampled from: top-p, a repetition penalty, logits processors.

    Raises:
        InputError: an option is out of range, prompts are not unique, one is too long, a logits processor cannot follow
            candidates, or the completions were not sampled so.
        PolicyError: an unknown hidden state.
    """
    check_limits(
        {"depth": 1, "max_new_tokens": 2},  # to have an anchor
        depth=depth, max_new_tokens=max_new_tokens, temperature=temperature, shards=shards, seed=seed, memory=memory,
        explore=explore, mix=mix, batch=batch, draws=draws,
    )  # fmt: skip
    _check_prompts(prompts, completions, long)
    given = tuple(prompts)
    settings = Settings(temperature, max_new_tokens, depth, verification=verification, tree=tree, shaping=shaping)
    settings = settings.for_pair(pair)
    shaping = settings.shaping
    policy = None if policy is None else as_policy(policy)
    settings = settings if policy is None else settings.for_policy(policy)
    topology = settings.topology
    asked = len(prompts)
    new = max_new_tokens + tokens_beyond(pair, topology, collector if through is None else "live")
    prompts, ids = fit(prompts, pair.tokenizer, pair.readable - new, long)
    if shards is not None and shards > len(prompts):
        raise InputError(f"--shards: expected at most {len(prompts)}, one for each prompt, not {shards}")
    settings = replace(settings, max_depth=topology.deepest)
    widths = _widths(pair, check_hidden(hidden, "--hidden"))
    if through is None:
        if collector == "dense":
            check_dense(pair, max(map(len, ids), default=0) + new)
        chosen = choose_collector(
            pair, topology, settings, collector, policy, explore, mix, completions, tuple(widths), memory, batch or 1,
            draws, off_text, profile,
        )  # fmt: skip
    else:
        chosen = choose_engine_collector(
            through, (target, draft if pair.drafter == "model" else pair.draft_name, pair.drafter), topology, settings,
            policy, explore, batch, pair.target.dtype,
            [mix, completions, *widths, *shaping.to_dict(), profile, draws > 1, off_text != "exact", memory],
        )  # fmt: skip
        chosen = replace(chosen, carries=_remembers(pair, policy, through, shards))
    warn_depth_limited(pair, depth, settings.tree)
    told = _told(source, chosen.memory, len(prompts), asked, profile)
    told["digests"] = digests(policy or FixedLength(topology.deepest), profile, prompts, completions)
    if completions is not None:
        texts = list(zip(prompts, ids, strict=True))
        if found := check_completions(pair, settings, texts, completions, max_new_tokens + topology.deepest):
            told["completions"] = found
    count = shards or _shard_count(chosen.carries, len(prompts), draws * max_new_tokens, widths, topology.nodes)
    header = Header(
        target=target,
        draft=draft,
        pair=pair.fingerprint,
        vocabulary=pair.vocabulary,
        eos=pair.eos,
        temperature=temperature,
        topology=parents(topology),
        features=chosen.features,
        max_new_tokens=max_new_tokens,
        seed=seed,
        shards=count,
        prompts=len(prompts),
        # --resume goes on with the very same prompts only (`Header.differences`).
        prompts_hash=short_hash([[p.id, p.sample, p.group, i] for p, i in zip(prompts, ids, strict=True)]),
        hidden=widths,
        shaping=shaping.to_dict(),
        **{"anchor_features": ANCHOR_FEATURES, **chosen.header},  # an engine knows fewer
        facts={**facts(pair), **told},
    )
    work, read = _dealt(prompts, ids, seed, count), _read_by(pair, target, draft, policy, profile)
    # Twice as many prompts as texts side by side: one that ends gives its place to another.
    return Plan(header, work, chosen.rows, chosen.begin, read, max(BATCH, 2 * (batch or 1)), given)


def _check_prompts(prompts: Sequence[Prompt], completions: Completions | None, long: str) -> None:
    if not prompts:
        raise InputError("--prompts: expected at least one prompt")
    if not all(isinstance(prompt, Prompt) for prompt in prompts):  # the letters of a text are none either
        raise InputError("prompts: expected a list of Prompt(id, text), as read_prompts returns it")
    distinct = DistinctPrompts()
    for number, prompt in enumerate(prompts, 1):
        distinct.add(prompt.id, prompt.sample, (prompt.system, prompt.text), f"prompt number {number}")
    if completions is not None and long in ("left", "right"):
        raise InputError(
            f"--long {long}: expected skip or refuse with --completions, whose texts follow the whole prompt"
        )


def _dealt(prompts: Sequence[Prompt], ids: Sequence[list[int]], seed: int, shards: int) -> tuple[tuple[Work, ...], ...]:
    """Return the work of each shard, which depends on ids and samples alone: some prompts go where they would among all."""
    work: list[list[Work]] = [[] for _ in range(shards)]
    for sequence, (prompt, tokens) in enumerate(zip(prompts, ids, strict=True)):
        key = stream_key(seed, prompt.stream_name)
        shard = work[int(short_hash(prompt.stream_name), 16) % shards]
        shard.append(Work(sequence, prompt.id, prompt.group, tokens, key, prompt.sample))
    return tuple(map(tuple, work))


def _read_by(
    pair: Pair, target: str, draft: str, policy: StopPolicy | None, profile: Profile | None
) -> tuple[str | Path | None, ...]:
    """Return what a run reads: names or files of models, drafter, policy and profile, which no result may land on."""
    models = [model.config.name_or_path for model in (pair.target, pair.draft) if model is not None]
    sources = [one.source for one in (policy, profile) if one is not None]
    return (target, draft, *models, *paths_of(pair.drafter), *sources)


def _remembers(pair: Pair, policy: StopPolicy | None, through: str, shards: int | None) -> bool:
    """Whether policy or drafter carry something from text to text, which forbids several shards inside an engine."""
    remembers = (policy is not None and policy.carries) or find_drafter(pair.drafter, pair).carries
    if remembers and (shards or 1) > 1:
        raise InputError(
            f"--shards: expected 1 with --through {through}, not {shards}: what the policy or the drafter knows of "
            "earlier texts does not start anew there with each shard"
        )
    return remembers


def _told(source: str, memory: int, taken: int, asked: int, profile: Profile | None) -> dict[str, Any]:
    """Return what the header tells of how the run was set up, beside `facts`."""
    told: dict[str, Any] = {"prompts from": source}
    if memory:
        told["memory MiB"] = memory
    if taken < asked:
        told["prompts left out"] = f"{asked - taken} of {asked}, longer than the pair reads"
    if profile is not None:
        told["profile"] = digest(profile.to_dict())[:16]
    return told


def _widths(pair: Pair, names: Sequence[str]) -> dict[str, int]:
    """Return the width of each hidden state that is recorded."""
    # A drafter is made only where it is asked: those of a file read it.
    asked = pair.drafter != "model" and DRAFT_HIDDEN in names
    return hidden_widths(pair, names, find_drafter(pair.drafter, pair) if asked else None)


def _shard_count(remembers: bool, prompts: int, rows: int, widths: Mapping[str, int], nodes: int) -> int:
    """Return how many shards a run has unless it is told; a prompt has so many `rows` at most."""
    if remembers:
        return 1  # with each shard it would start anew
    row_bytes = 2 * (widths.get(DRAFT_HIDDEN, 0) * nodes + widths.get(TARGET_HIDDEN, 0))  # float16
    return max(1, -(-prompts // PROMPTS_PER_SHARD), -(-prompts * rows * row_bytes // SHARD_BYTES))
