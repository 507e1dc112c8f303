"""`demo`: the whole pipeline on the shipped pair: collect, profile, train, evaluate, decode live.

Each stage writes its files into a working folder next to the result. A demo that was interrupted continues with the first
stage that is not complete when it is called again with the same arguments.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from ...collect.prompts import Prompt, encode, read_prompts
from ...collect.run import collect, environment_facts
from ...collect.schema import stream_name
from ...collect.store import Trace
from ...decode.benchmark import run_alternating
from ...decode.loop import Speculator
from ...decode.models.pair import Pair, load_pair
from ...decode.profile import CalibrationRun, loop_decisions, measure_profile
from ...decode.settings import Settings
from ...decode.verify.modes import find_mode
from ...policies import kernels
from ...policies.contract import StopPolicy
from ...policies.display import Progress, shown
from ...policies.files import (
    check_separate,
    prepare_output_dir,
    read_json,
    replace_folder,
    sha256,
    staging_path,
    write_json,
)
from ...policies.fixed import Confidence, FixedLength
from ...policies.learned import LearnedPolicy
from ...policies.profile import Profile
from ...policies.storage import load_policy_folder
from ..demo import QUICK, LiveLine, Sizes, compare_live
from ..evaluate.evaluate import evaluate
from ..evaluate.records import Report
from ..fit.rules import best_of, fixed_grid
from ..fit.run import train
from ..fit.settle import settle
from ..replay.arrays import TraceArrays, trace_arrays
from ..shipped_pair import check_pair, shipped_pair
from .resume import STATE_FILE, begin, continued_sizes, only_one
from .texts import heads_text, live_text, profile_text, report_text, trace_text

PROFILE_PROMPTS = 16
STAGES = 5
"""Collect, profile, train, evaluate, decode."""


@dataclass(frozen=True)
class Offline:
    """Results of the stages before live decoding.

    Attributes:
        pair: Folder of the pair.
        models: The pair.
        prompts: Token ids of the held-out prompts by `stream_name`, which is the id of a prompt without samples.
        arrays: Traces of the held-out prompts.
        profile: Costs on this machine, decisions included.
        learned: Policies as loaded from their folders.
        best_fixed: Best fixed length on the training traces.
        report: Result of `evaluate`.
        profile_prompts: Training prompts that costs are measured on.
        settings: Settings of live runs.
    """

    pair: Path
    models: Pair
    prompts: dict[str, list[int]]
    arrays: TraceArrays
    profile: Profile
    learned: list[LearnedPolicy]
    best_fixed: FixedLength
    report: Report
    profile_prompts: list[list[int]]
    settings: Settings

    def calibration(self) -> CalibrationRun:
        """Return a calibration run for a live comparison."""
        return CalibrationRun(
            self.models,
            self.profile_prompts,
            depth=self.arrays.depth,
            temperature=self.profile.temperature,
            new_tokens=96,
            verification=self.settings.verification,
        )


@dataclass(frozen=True)
class Demo:
    """The result: folder, sizes, report of the replay, and the live comparison."""

    folder: Path
    sizes: Sizes
    report: Report
    live: list[LiveLine]


def ignore_line(line: str) -> None:
    """Ignore a line: the default receiver of result lines."""


def demo(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    verification: str = "auto",
    sizes: Sizes | None = None,
    quick: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = shown,
    announce: Callable[[str], None] = ignore_line,
) -> Demo:
    """Run the whole pipeline and leave traces, profile, policies and report in `out`.

    Everything is computed on one thread: threads that wait for each other make timings depend on what else runs.

    Args:
        out: A folder that is empty or does not exist.
        pair: Folder with `target/`, `draft/`, `prompts-train.jsonl` and `prompts-test.jsonl`. Default: the shipped pair.
        temperature: 0 = greedy.
        verification: Mode that policies are trained for and decode under. `auto`: the fastest lossless one.
        sizes: How much work to do. Default: adapted to the measured speed of the pair on this machine.
        quick: Start from the sizes of a run of less than a minute.
        seed: Seed of noise, splits and fits.
        overwrite: Replace an older result in `out` once the new one is complete.
        progress: See `Progress`.
        announce: Called with one line of result per stage.

    Raises:
        InputError: `pair` is not a pair with prompts, or see `prepare_output_dir`.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _demo(out, pair, temperature, verification, sizes, quick, seed, overwrite, progress, announce)
    finally:
        torch.set_num_threads(threads)


def _demo(
    out: str | Path, pair: str | Path | None, temperature: float, verification: str, sizes: Sizes | None, quick: bool,
    seed: int, overwrite: bool, progress: Progress, announce: Callable[[str], None],
) -> Demo:  # fmt: skip
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[pair])
    pair_folder = check_pair(pair) if pair is not None else shipped_pair()
    check_separate(folder, [pair_folder])
    if verification != "auto":
        find_mode(verification, temperature)
    with only_one(folder):
        progress("demo", 0, STAGES)
        progress("load models", 0, 2)
        models = load_pair(str(pair_folder / "target"), str(pair_folder / "draft"))
        progress("load models", 1, 2)
        kernels.load(progress)
        progress("load models", 2, 2)
        work = staging_path(folder)
        settings = {
            "pair": models.fingerprint,
            "prompts": [sha256(pair_folder / f"prompts-{side}.jsonl") for side in ("train", "test")],
            "folder": str(pair_folder),
            "temperature": temperature,
            "verification": verification,
            "quick": quick,
            "seed": seed,
            "sizes": None if sizes is None else dataclasses.asdict(sizes),
            "version": version("specstop"),
        }
        settings = json.loads(json.dumps(settings))  # as the state file holds them: tuples are lists
        default_sizes = QUICK if quick else Sizes()
        sizes = continued_sizes(work, folder, settings, overwrite, announce) or begin(
            work, pair_folder, models, settings, sizes, default_sizes, announce
        )
        offline = run_offline(
            work, folder, pair_folder, models, temperature, verification, sizes, seed, progress, announce
        )
        live = _live(offline, sizes, seed, progress)
        announce(f"decode: {live_text(live)}")
        (work / STATE_FILE).unlink()
        replace_folder(work, folder)
        progress("demo", STAGES, STAGES)
    return Demo(folder, sizes, offline.report, live)


def run_offline(
    work: Path, folder: Path, pair_folder: Path, models: Pair, temperature: float, verification: str, sizes: Sizes, seed: int,
    progress: Progress, announce: Callable[[str], None] = ignore_line,
) -> Offline:  # fmt: skip
    """Collect, profile, train and evaluate on the pair in `pair_folder`.

    Stages whose files are in `work` are not repeated, except for the evaluation.

    Args:
        work: Folder that the files are written to.
        folder: Name that `work` will have when it is complete.
        pair_folder: Folder of the pair.
        models: The pair, loaded.
        temperature: 0 = greedy.
        verification: Mode of traces, profile and policies.
        sizes: How much work to do.
        seed: Seed of noise, splits and fits.
        progress: See `Progress`.
        announce: Called with one line of result per stage.
    """
    prompts: dict[str, list[Prompt]] = {}
    traces: dict[str, Trace] = {}
    for side, count in (("train", sizes.train), ("test", sizes.test)):
        prompts[side] = read_prompts(pair_folder / f"prompts-{side}.jsonl", count)
        out = work / f"traces-{side}"
        trace = collect(
            models,
            prompts[side],
            out,
            target=str(pair_folder / "target"),
            draft=str(pair_folder / "draft"),
            depth=sizes.depth,
            temperature=temperature,
            verification=verification,
            max_new_tokens=sizes.tokens,
            seed=seed,
            resume=out.exists(),
            progress=_within(progress, side),
        )
        # Reports name the folder that the trace will have; its rows are read while it has another name.
        traces[side] = Trace(folder / out.name, trace.header, trace.rows)
    arrays = {side: trace_arrays(trace) for side, trace in traces.items()}
    progress("demo", 1, STAGES)
    announce(f"collect: {trace_text(arrays)}")
    ids = {side: encode(prompts[side], models.tokenizer, models.readable - sizes.tokens) for side in prompts}
    profile_prompts = ids["train"][:PROFILE_PROMPTS]
    settings = Settings(temperature, sizes.tokens, sizes.depth, verification=verification)
    profile = _profiled(work, models, profile_prompts, settings, sizes, progress)
    progress("demo", 2, STAGES)
    announce(f"profile: {profile_text(profile)}")
    profile, learned = _trained(work, traces["train"], profile, models, ids["train"], settings, sizes, seed, progress)
    progress("demo", 3, STAGES)
    announce(f"train: {heads_text(learned, profile)}")
    profile = dataclasses.replace(profile, source=folder / "profile.json")  # as it will be called
    report = evaluate(
        traces["test"],
        profile,
        learned,
        train_traces=traces["train"],
        out=work / "report",
        seed=seed,
        overwrite=True,
        progress=progress,
    )
    progress("demo", 4, STAGES)
    announce(f"evaluate: {report_text(report)}")
    best = best_of(fixed_grid(arrays["train"], profile))
    named = {prompt.stream_name: tokens for prompt, tokens in zip(prompts["test"], ids["test"], strict=True)}
    return Offline(
        pair_folder,
        models, named, arrays["test"], profile, learned, FixedLength(int(best.name.partition(":")[2])), report,
        profile_prompts, settings,
    )  # fmt: skip


def _profiled(
    work: Path, models: Pair, prompts: list[list[int]], settings: Settings, sizes: Sizes, progress: Progress
) -> Profile:
    """Load the profile of this machine; measure it first if it is missing."""
    path = work / "profile.json"
    if not path.is_file():
        profile = measure_profile(
            models,
            prompts,
            depth=sizes.depth,
            temperature=settings.temperature,
            verification=settings.verification,
            policies=[Confidence()],
            effort=sizes.effort,
            facts=environment_facts(models),
            progress=progress,
        )
        profile.save(path)
    return Profile.load(path)


def _trained(
    work: Path, traces: Trace, profile: Profile, models: Pair, ids: list[list[int]], settings: Settings, sizes: Sizes,
    seed: int, progress: Progress,
) -> tuple[Profile, list[LearnedPolicy]]:  # fmt: skip
    """Train the heads; return the profile with their decisions timed in the loop, and the policies tuned for it."""
    paths = [work / "policies" / kind for kind in sizes.heads]
    for kind, path in zip(sizes.heads, paths, strict=True):
        if not path.exists():
            train(traces, profile, head=kind, out=path, seed=seed, report_share=0, progress=_within(progress, kind))
    learned = [load_policy_folder(path) for path in paths]
    state = read_json(work / STATE_FILE, "the demo") if (work / STATE_FILE).is_file() else {}
    if state.get("tuned"):
        return profile, learned
    timings = loop_decisions(
        models, learned, ids, settings, effort=sizes.decision_effort, progress=_within(progress, "decisions")
    )
    profile = profile.with_measured_decisions(timings)
    tuned = []
    for done, path in enumerate(paths):
        progress("tune policies", done, len(paths))
        tuned.append(settle(path, traces, profile))
    progress("tune policies", len(paths), len(paths))
    profile.save(work / "profile.json")
    write_json(work / STATE_FILE, {**state, "tuned": True})
    return profile, tuned


def _live(offline: Offline, sizes: Sizes, seed: int, progress: Progress) -> list[LiveLine]:
    """Decode held-out prompts live: plain, with the best fixed length, and with the fastest learned policy by replay."""
    rates = {line.name: line.tokens_per_s for line in offline.report.lines}
    fastest = max(offline.learned, key=lambda policy: rates[policy.shown_name])
    policies: list[StopPolicy] = [FixedLength(0), offline.best_fixed, fastest]
    arrays = offline.arrays.subset(range(min(sizes.live, offline.arrays.sequences)))
    names = map(stream_name, arrays.prompt_ids, arrays.samples)
    prompts = [(name, offline.prompts[name]) for name in names]
    progress("decode: live", 0, len(prompts))
    calibration = offline.calibration()
    runs = [Speculator(offline.models, policy, offline.settings, offline.profile) for policy in policies]
    generations = run_alternating(
        runs,
        prompts,
        calibration=calibration,
        calibrate_every=1 if len(prompts) < 8 else 2,
        seed=seed,
        progress=_within(progress, "decode"),
    )
    profile = calibration.profile().with_decisions(offline.profile.decision_s)
    return compare_live(generations, policies, offline.arrays if arrays.header.given_text else arrays, profile)


def _within(progress: Progress, name: str) -> Progress:
    """Return a progress callback that shows tasks as parts of `name`."""

    def advance(task: str, done: int, total: int) -> None:
        progress(f"{name}: {task}", done, total)

    return advance
