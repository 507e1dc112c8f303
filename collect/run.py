"""`collect`: prompts in, a trace folder out, shard by shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..decode.models.pair import Pair
from ..decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from ..policies.display import Progress, shown
from ..policies.profile import Profile
from ..policies.registry import PolicySpec
from .completions import Completions
from .plan import plan_run
from .prompts.read import Prompt
from .shards import record
from .store.folder import Trace


def collect(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    *,
    target: str = "",
    draft: str = "",
    depth: int = 10,
    tree: str | None = None,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    seed: int = 0,
    shards: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    repair: bool = False,
    progress: Progress = shown,
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
) -> Trace:
    """Record traces: what the draft proposes, and what of it the target accepts.

    The dense collector records the chain or tree at every position of the target's text; the live one the rounds of the
    running loop.

    For a part of the run, as one of several processes, or to be stopped between shards: `plan_run` and `record`.

    Args:
        pair: target and draft.
        prompts: with unique ids.
        out: folder of the trace; it must be empty, or one of the flags must say what to do with it.
        target, draft, depth, tree, temperature, max_new_tokens, seed, shards: see `plan_run`.
        resume: complete a run that was killed.
        overwrite: replace an older result there, once the new one is complete.
        repair: with `resume`: move damaged shards aside and collect them again.
        progress: see `Progress`.
        collector, policy, verification, explore, mix, completions, hidden, memory, draws, off_text, shaping, long,
            batch, through, profile: see `plan_run`.

    Raises:
        InputError: an option is out of range, a prompt too long, the folder not empty, or as `prepare_output_dir`.
        TraceError: `resume`, but the folder holds another run; or the disk is full.
    """
    plan = plan_run(
        pair, prompts, target=target, draft=draft, depth=depth, tree=tree, temperature=temperature,
        max_new_tokens=max_new_tokens, seed=seed, shards=shards, collector=collector, policy=policy,
        verification=verification, explore=explore, mix=mix, completions=completions, hidden=hidden, memory=memory,
        draws=draws, off_text=off_text, shaping=shaping, long=long, batch=batch, through=through,
        profile=profile,
    )  # fmt: skip
    return record(plan, Path(out), resume=resume, overwrite=overwrite, repair=repair, progress=progress)
