"""`demo`: the whole pipeline on the shipped pair: collect, profile, train, evaluate, decode live.

Each stage writes its files into a working folder next to the result. A demo that was interrupted continues with the first
stage that is not complete when it is called again with the same arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import filelock
import torch

from ...collect.facts import facts
from ...collect.prompts.read import Prompt, encode, read_prompts
from ...collect.run import collect
from ...collect.store.folder import Trace
from ...decode.compare.alternate import run_alternating
from ...decode.loop import Speculator
from ...decode.models.pair import Pair, load_pair
from ...decode.profile import CalibrationRun, loop_decisions, measure_profile
from ...decode.profile.measuring import Effort
from ...decode.settings import Settings
from ...decode.verify.modes import find_mode
from ...policies import kernels
from ...policies.baselines.fixed import Confidence, FixedLength
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.files.atomic import STAGE_PREFIX, cache_folder, read_json, sha256, write_json
from ...policies.files.outputs import beside, claim_folder, put_in_place, refuse_inputs
from ...policies.latency.profile import Profile
from ...policies.learned.policy import LearnedPolicy
from ...policies.progress import Progress, shown
from ...policies.storage.folder import load_policy_folder
from ..fit.run import train
from ..fit.tuning.rates import best_of, fixed_grid
from ..fit.tuning.settled import settle
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..report.evaluate import evaluate
from ..report.records import Report
from .live import LiveLine, compare_live
from .pair import check_pair, shipped_pair

PROFILE_PROMPTS = 16
STATE_FILE = "demo.json"
PROBE_TOKENS = 24
STAGES = 5
"""Collect, profile, train, evaluate, decode."""

REFERENCE_TOKEN_S = 3.3e-3
"""Seconds per token of plain decoding on a quiet machine; the default sizes assume it."""

SMALLEST_SHARE = 0.35
"""Smallest share of the default prompts: fewer give wide intervals."""


@dataclass(frozen=True)
class Sizes:
    """How much work the demo does.

    Attributes:
        train: Training prompts.
        test: Held-out prompts.
        live: Held-out prompts that are decoded live.
        tokens: New tokens of each text.
        depth: Longest draft, K.
        heads: Kinds of heads to train.
        effort: How long the costs of model calls are measured.
        decision_effort: How long the costs of decisions are measured.
    """

    train: int = 116
    test: int = 84
    live: int = 10
    tokens: int = 160
    depth: int = 10
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    effort: Effort = field(default_factory=lambda: Effort(budget_s=14.0))
    decision_effort: Effort = field(default_factory=lambda: Effort(repetitions=6))

    def scaled(self, share: float) -> Sizes:
        """Scale the numbers of prompts by `share`, and shorten the texts if it is at most 0.6."""
        fewest = {"train": 16, "test": 20, "live": 3}  # fewer give no verdict, or no profile between live texts
        counts = {name: max(least, round(getattr(self, name) * share)) for name, least in fewest.items()}
        return dataclasses.replace(self, **counts, tokens=self.tokens if share > 0.6 else min(self.tokens, 128))

    def text(self) -> str:
        """Return the sizes in words."""
        return f"{self.train} training and {self.test} held-out prompts of {self.tokens} tokens, drafts of up to {self.depth}"


QUICK = Sizes(
    train=48, test=40, live=6, tokens=96, heads=("logistic", "tokens"), effort=Effort(budget_s=5.0),
    decision_effort=Effort(repetitions=4),
)  # fmt: skip


@dataclass(frozen=True)
class Offline:
    """Results of the stages before live decoding.

    Attributes:
        pair: Folder of the pair.
        models: The pair.
        prompts: Token ids of the held-out prompts by id.
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
        InputError: `pair` is not a pair with prompts, or see `claim_folder`.
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
    folder = claim_folder(out, overwrite=overwrite, inputs=[pair])
    pair_folder = check_pair(pair) if pair is not None else shipped_pair()
    refuse_inputs(folder, [pair_folder])
    if verification != "auto":
        find_mode(verification, temperature)
    with _only_one(folder):
        progress("demo", 0, STAGES)
        progress("load models", 0, 2)
        models = load_pair(str(pair_folder / "target"), str(pair_folder / "draft"))
        progress("load models", 1, 2)
        kernels.load(progress)
        progress("load models", 2, 2)
        work = beside(folder)
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
        sizes = _continued(work, folder, settings, overwrite, announce) or _begun(
            work, pair_folder, models, settings, sizes, default_sizes, announce
        )
        offline = run_offline(
            work, folder, pair_folder, models, temperature, verification, sizes, seed, progress, announce
        )
        live = _live(offline, sizes, seed, progress)
        announce(f"decode: {_live_text(live)}")
        (work / STATE_FILE).unlink()
        put_in_place(work, folder)
        progress("demo", STAGES, STAGES)
    return Demo(folder, sizes, offline.report, live)


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold a lock that two demos with the same result folder share.

    Raises:
        InputError: Another process holds it.
    """
    name = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    cache_folder().mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(cache_folder() / f"demo-{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise InputError(f"--out: another demo is writing {folder}; wait for it, or choose another folder") from None
    try:
        yield
    finally:
        lock.release()


def _continued(
    work: Path, folder: Path, settings: dict[str, Any], overwrite: bool, announce: Callable[[str], None]
) -> Sizes | None:
    """Return the sizes of an interrupted run with these settings; remove an interrupted run that cannot be continued.

    Raises:
        InputError: There is an interrupted run with other settings, and `overwrite` is not given.
    """
    if not (work / STATE_FILE).is_file():
        shutil.rmtree(work, ignore_errors=True)
        return None
    state = read_json(work / STATE_FILE, "the interrupted demo")
    if state.get("settings") == settings:
        announce("Continuing the interrupted demo.")
        for left in work.rglob(f"{STAGE_PREFIX}*"):  # files that were being written
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
        saved = state["sizes"]
        efforts = {name: Effort(**saved[name]) for name in ("effort", "decision_effort")}
        return Sizes(**{**saved, **efforts, "heads": tuple(saved["heads"])})
    if not overwrite:
        changed = [name for name, value in settings.items() if state.get("settings", {}).get(name) != value]
        raise InputError(
            f"--out: an interrupted demo for {folder} differs in {', '.join(changed)}; repeat its options to continue it, "
            "pass --overwrite to discard it, or choose another folder"
        )
    (work / STATE_FILE).unlink()  # first: without it the rest is never continued
    shutil.rmtree(work, ignore_errors=True)
    return None


def _begun(
    work: Path, pair_folder: Path, models: Pair, settings: dict[str, Any], sizes: Sizes | None, default_sizes: Sizes,
    announce: Callable[[str], None],
) -> Sizes:  # fmt: skip
    """Create the working folder and return the sizes, by default adapted to the measured speed."""
    if sizes is None:
        prompts = read_prompts(pair_folder / "prompts-train.jsonl", 4)
        token_s = token_seconds(models, encode(prompts, models.tokenizer, models.readable - PROBE_TOKENS))
        sizes = default_sizes.scaled(min(1.0, max(SMALLEST_SHARE, REFERENCE_TOKEN_S / token_s)))
        announce(f"This machine decodes {1 / token_s:.0f} tokens/s with the target alone: {sizes.text()}.")
    work.mkdir(parents=True)
    write_json(work / STATE_FILE, {"settings": settings, "sizes": dataclasses.asdict(sizes)})
    return sizes


def token_seconds(models: Pair, prompts: Sequence[Sequence[int]]) -> float:
    """Return the median seconds per token of plain decoding over `prompts`, after a warm-up."""
    plain = Speculator(models, FixedLength(0), Settings(0.0, PROBE_TOKENS, 1, ignore_eos=True))
    plain.generate(prompts[0], 0)
    seconds = []
    for number, tokens in enumerate(prompts):
        started = time.perf_counter()
        plain.generate(tokens, number)
        seconds.append((time.perf_counter() - started) / PROBE_TOKENS)
    return statistics.median(seconds)


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
    announce(f"collect: {_trace_text(arrays)}")
    ids = {side: encode(prompts[side], models.tokenizer, models.readable - sizes.tokens) for side in prompts}
    profile_prompts = ids["train"][:PROFILE_PROMPTS]
    settings = Settings(temperature, sizes.tokens, sizes.depth, verification=verification)
    profile = _profiled(work, models, profile_prompts, settings, sizes, progress)
    progress("demo", 2, STAGES)
    announce(f"profile: {_profile_text(profile)}")
    profile, learned = _trained(work, traces["train"], profile, models, ids["train"], settings, sizes, seed, progress)
    progress("demo", 3, STAGES)
    announce(f"train: {_heads_text(learned, profile)}")
    report = evaluate(
        traces["test"],
        profile,
        learned,
        train_traces=traces["train"],
        out=work / "report",
        sweep=False,
        seed=seed,
        overwrite=True,
        progress=progress,
    )
    progress("demo", 4, STAGES)
    announce(f"evaluate: {_report_text(report)}")
    best = best_of(fixed_grid(arrays["train"], profile))
    named = {prompt.id: tokens for prompt, tokens in zip(prompts["test"], ids["test"], strict=True)}
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
            facts=facts(models),
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
            train(traces, profile, head=kind, out=path, seed=seed, progress=_within(progress, kind))
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
    prompts = [(name, offline.prompts[name]) for name in arrays.prompt_ids]
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


def _trace_text(arrays: dict[str, TraceArrays]) -> str:
    anchors = sum(len(side.accepted) for side in arrays.values())
    whole = arrays["test"].accepted[~arrays["test"].cut]
    shares = [float((whole >= k).float().mean()) for k in (1, min(6, arrays["test"].depth))]
    return (
        f"{anchors:,} rounds; the first drafted token is accepted in {shares[0]:.0%} of them, "
        f"{min(6, arrays['test'].depth)} or more in {shares[1]:.0%}"
    )


def _profile_text(profile: Profile) -> str:
    target, draft = profile.low.verify_s[0], profile.low.later_draft_s
    noise = "" if profile.noise is None or not profile.noise.is_noisy else "; the machine was not quiet"
    return (
        f"a target call takes {1e3 * target:.2f} ms, a draft step {1e3 * draft:.2f} ms (1/{target / draft:.0f}){noise}"
    )


def _heads_text(learned: Sequence[LearnedPolicy], profile: Profile) -> str:
    prices = [f"{p.name} {1e6 * profile.decision(p.cost_name).each:.0f}" for p in learned]
    return f"{len(learned)} policies; one decision costs (µs): {', '.join(prices)}"


def _report_text(report: Report) -> str:
    best, oracle = report.line("best fixed"), next(line for line in report.lines if line.kind == "bound")
    top = max((line for line in report.lines if line.kind == "learned"), key=lambda line: line.tokens_per_s)
    return (
        f"best fixed length ({best.note.partition(',')[0]}) {best.to_plain.value:.2f} times plain decoding; {top.name} "
        f"{top.to_best_fixed.text()} times that, oracle bound {oracle.to_best_fixed.value:.2f} times"
    )


def _live_text(live: Sequence[LiveLine]) -> str:
    _, fixed, top = live
    measured, predicted = top.measured / fixed.measured, top.predicted / fixed.predicted
    same_text = (
        ""
        if top.same_text is None
        else f"; {sum(line.same_text == top.tally.texts for line in live)} of {len(live)} give plain decoding's text"
    )
    return f"{top.name} {measured:.3f} times {fixed.name} live, {predicted:.3f} predicted{same_text}"
