"""`specstop collect`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from ...policies.files import prepare_output_dir, staging_path
from .. import options
from ..output import next_step, progress_bars, write
from .info import print_acceptance

if TYPE_CHECKING:
    from ...collect.prompts import Prompt

COLLECTORS = ("dense", "live", "vllm")


def collect(
    *,
    out: Path,
    source: options.PromptSource,
    models: options.Models,
    collector: str = "dense",
    policy: str | None = None,
    depth: int = 10,
    tree: str | None = None,
    verification: str = "auto",
    sampling: options.Sampling,
    max_new_tokens: int = 128,
    seed: int = 0,
    extra: list[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> None:
    """Record what the draft proposes at every position of the target's text, and what the target accepts.

    Under torchrun or accelerate each process collects the shards assigned to it by RANK and WORLD_SIZE.
    Example: specstop collect --target T --draft D --prompts train.jsonl --out traces
    """
    from ...collect.shards import DistributedRank
    from ...policies.registry import load_policy

    # Everything is validated before torch is imported and a model is loaded.
    parameters = _read_extra(extra)
    if collector not in COLLECTORS:
        raise InputError(f"--collector: expected one of {', '.join(COLLECTORS)}, not {collector!r}")
    rule = None if policy is None else load_policy(policy)
    rank = DistributedRank.from_environment(os.environ)
    if overwrite and rank.world > 1:
        raise InputError("--overwrite: expected one process, because others may write already; remove the folder first")
    prepare_output_dir(out, overwrite=overwrite, resume=resume or rank.world > 1)
    completions = parameters.pop("completions", None)
    selection = {**asdict(source), "completions": completions}
    folder = staging_path(out) if overwrite and staging_path(out).exists() else out
    stored = _stored_prompts(folder, selection) if resume or rank.world > 1 else None
    prompts = source.read(models, completions=completions) if stored is None else stored

    from ...collect.run import collect as run
    from ...decode.settings import Settings

    Settings(sampling.temperature, max_new_tokens, depth, verification=verification, tree=tree)
    with progress_bars(quiet) as progress:
        pair = replace(models, device=rank.device(models.device)).open(None if collector == "dense" else progress)
        if stored is None:
            prompts = source.apply_template(prompts, pair)
        if not quiet:
            settings = Settings(sampling.temperature, max_new_tokens, sampling=sampling.params())
            options.print_model_defaults(pair, settings)
        target, draft = models.names
        trace = run(
            pair, prompts, out, rank=rank, resume=resume, overwrite=overwrite, progress=progress, target=target,
            draft=(draft or "") if models.drafters == "model" else models.drafters, depth=depth, tree=tree,
            collector=collector, policy=rule, verification=verification, temperature=sampling.temperature,
            sampling=sampling.params(pair), max_new_tokens=max_new_tokens, seed=seed, source=source.description(),
            prompt_options=selection,
            completions=completions and {(prompt.id, prompt.sample): prompt.completion or "" for prompt in prompts},
            **parameters,
        )  # fmt: skip
    header = trace.header
    if not trace.complete:
        shards = f"{len(trace.finished)} of {header.shards} shards exist"
        write(f"{trace.folder}: process {rank.rank} of {rank.world} has ended; {shards}")
        return
    print_acceptance(trace)
    # A profile has to time the rounds that the trace holds.
    rounds = ["--through", "vllm"] if collector == "vllm" else options.repeated("sampling", "tree")
    if sampling.temperature > 0 and collector != "vllm":
        rounds += ["--verification", header.verification]
    rounds += ["--depth", str(header.depth)]
    # The shipped pair has its own prompts; standard input cannot be read again.
    if source.prompts is not None:
        rounds += ["--prompts", "PROMPTS" if source.prompts == "-" else source.prompts]
    next_step(
        "profile", *options.repeated("target", "draft", "drafter", "device", "device_map", "dtype", "chat", "temperature"),
        *rounds, "--out", "profile.json",
    )  # fmt: skip


def _read_extra(items: list[str] | None) -> dict[str, Any]:
    """Return further parameters of `specstop.collect`, validated without importing torch."""
    from ...policies.arguments import check_limits
    from ...policies.profile import Profile

    texts = ("profile", "completions", "hidden")
    values = options.key_values("--extra", items, options.COLLECT_KEYS, texts)
    check_limits(**{name: value for name, value in values.items() if name not in texts})
    if "profile" in values:
        values["profile"] = Profile.load(Path(values["profile"]))
    if "hidden" in values:
        names = [word.strip() for word in values["hidden"].split(",")]
        if set(names) - {"draft", "target"}:
            raise InputError(f"--extra hidden: expected draft, target, or draft,target, not {values['hidden']!r}")
        values["hidden"] = [f"{name}_hidden" for name in names]
    return values


def _stored_prompts(folder: Path, selection: Mapping[str, Any]) -> list[Prompt] | None:
    """Return the prompts that a run has stored, or None if there is no run, or they were selected by other options."""
    from ...collect.prompts import is_stream, stored_prompts
    from ...collect.store import HEADER_FILE, read_header

    if (folder / HEADER_FILE).exists() and read_header(folder).facts.get("prompt options") == selection:
        return stored_prompts(folder)
    source = selection["prompts"]
    if source is not None and is_stream(source):
        raise InputError(
            f"--prompts {source}: expected a file or a data set, because a pipe is read only once, not again by --resume or "
            "by several processes; write the prompts to a file first"
        )
    return None
