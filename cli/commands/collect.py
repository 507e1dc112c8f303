"""`specstop collect`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...policies.errors import InputError
from ...policies.files import RUN_FILE, prepare_output_dir, staging_path
from .. import options
from ..output import Interrupted, next_step, output, progress_bars, table
from .info import describe_trace

if TYPE_CHECKING:
    from ...collect import DistributedRank, Trace
    from ...collect.prompts import Prompt
    from ...collect.schema import Header

COLLECTORS = ("dense", "live", "vllm")


def collect(
    *,
    out: options.Out,
    source: options.PromptSource,
    models: options.Models,
    collector: options.Collector = "dense",
    policy: options.LivePolicy = None,
    depth: options.Depth = 10,
    tree: options.Tree = None,
    verification: options.Verification = "auto",
    temperature: options.Temperature = 0.0,
    sampling: options.Sampling,
    max_new_tokens: options.MaxNewTokens = 128,
    seed: options.Seed = 0,
    extra: options.Extra = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
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

    from ...collect.prompts import share_prompts
    from ...collect.run import collect as run
    from ...decode.settings import Settings

    Settings(temperature, max_new_tokens, depth, verification=verification, tree=tree)
    with progress_bars(quiet) as progress:
        paths = models.find(None if collector == "dense" else progress)
        pair = replace(models, device=rank.device(models.device)).open(paths)
        if stored is None:
            prompts = source.apply_template(prompts, pair)
            if rank.world > 1:
                prompts = share_prompts(out, prompts)
        if not quiet:
            options.print_model_defaults(pair, Settings(temperature, max_new_tokens, sampling=sampling.params()))
        create_trace = partial(
            run, pair, prompts, out, rank=rank, resume=resume, overwrite=overwrite, progress=progress, target=paths.target,
            draft=(paths.draft or "") if models.drafter == "model" else models.drafter,
            depth=depth, tree=tree, collector="dense" if collector == "dense" else "live",
            through="vllm" if collector == "vllm" else None, policy=rule, verification=verification,
            temperature=temperature, sampling=sampling.params(sampling.grammar(pair)),
            max_new_tokens=max_new_tokens, seed=seed, source=source.description(), prompt_options=selection,
            completions=completions and {(prompt.id, prompt.sample): prompt.completion or "" for prompt in prompts},
            **parameters,
        )  # fmt: skip
        trace = _record(create_trace, folder if overwrite else out, resume)
    show(trace, rank)


def _read_extra(items: list[str] | None) -> dict[str, Any]:
    """Return further parameters of `specstop.collect`, validated without importing torch."""
    from ...policies.arguments import check_limits
    from ...policies.profile import Profile

    values = options.key_values("--extra", items, options.COLLECT_KEYS)
    check_limits(**{name: value for name, value in values.items() if name not in ("profile", "completions", "hidden")})
    if "profile" in values:
        values["profile"] = Profile.load(Path(values["profile"]))
    if "hidden" in values:
        names = [word.strip() for word in str(values["hidden"]).split(",")]
        if set(names) - {"draft", "target"}:
            raise InputError(f"--extra hidden: expected draft, target, or draft,target, not {values['hidden']!r}")
        values["hidden"] = [f"{name}_hidden" for name in names]
    return values


def _stored_prompts(folder: Path, selection: Mapping[str, Any]) -> list[Prompt] | None:
    """Return the prompts that a run has stored, or None if there is no run, or they were selected by other options."""
    from ...collect.prompt_files import is_stream
    from ...collect.prompts import stored_prompts
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


def _record(create_trace: Callable[[], Trace], out: Path, resume: bool) -> Trace:
    """Collect the shards, and save the options with them. After Ctrl-C, state how to continue."""
    try:
        trace = create_trace()
    except KeyboardInterrupt:
        if not (out / "header.json").exists():
            raise
        options.save_config(out / RUN_FILE)
        command = f"specstop collect --config {out / RUN_FILE} --resume"
        raise Interrupted(f"interrupted; completed shards are kept; continue with: {command}") from None
    if not (resume and (trace.folder / RUN_FILE).exists()):
        options.save_config(trace.folder / RUN_FILE)
    return trace


def show(trace: Trace, rank: DistributedRank) -> None:
    """Print the acceptance in a trace and the next command, or of an incomplete trace the number of its shards."""
    from ...collect.schema import pair_options

    header, console = trace.header, output()
    if not trace.complete:
        shards = f"{len(trace.finished)} of {header.shards} shards exist"
        console.print(f"{trace.folder}: process {rank.rank} of {rank.world} has ended; {shards}", soft_wrap=True)
        return
    facts, depths = describe_trace(trace)
    title = f"{trace.folder}: {facts['positions']} positions of {facts['prompts']} prompts"
    table(title, ("depth", "P(A >= depth)", "positions"), depths)
    if note := facts.get("note on acceptance"):
        console.print(f"Note: {note}", soft_wrap=True)
    context = options.running.get()
    used = context.params if context else {}
    source = used.get("prompts")
    next_step(
        "profile", *pair_options(header), *(["--chat"] if used.get("chat") else []),
        *(["--temperature", header.temperature] if header.temperature else []),
        *(word for item in used.get("sampling") or () for word in ("--sampling", item)),
        *_round_options(header, used.get("collector") == "vllm"),
        "--prompts", "PROMPTS" if source in (None, "-") else source, "--out", "profile.json",
    )  # fmt: skip


def _round_options(header: Header, in_vllm: bool) -> list[str]:
    """Return the options with which `profile` measures rounds like those in a trace."""
    from ...decode.topology import chain
    from ...decode.verify.modes import resolve_mode
    from ...policies.fixed import FixedLength

    depth = ["--depth", str(header.depth)]
    if in_vllm:
        return ["--through", "vllm", *depth]
    tree = [] if header.tree.is_chain else ["--tree", header.tree.name]
    default = resolve_mode("auto", FixedLength(header.depth), chain(header.depth), header.temperature)
    # At temperature 0 all modes accept the same tokens.
    same = header.temperature == 0 or header.verification == default
    return [*([] if same else ["--verification", header.verification]), *depth, *tree]
