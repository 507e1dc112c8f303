"""`demo`: the whole pipeline on the shipped pair: collect, profile, train, evaluate, decode live.

Each stage writes its files into a working folder next to the result. A demo that was interrupted continues with the first
stage that is not complete when it is called again with the same arguments.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from ...policies import kernels
from ...policies.baselines.fixed import Confidence, FixedLength
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.files.atomic import read_json, write_json
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
from .pair import shipped_pair

PROFILE_PROMPTS = 16
STATE_FILE = "demo.json"
PROBE_TOKENS = 24

REFERENCE_TOKEN_S = 2.6e-3
"""Seconds of a token of the shipped target alone on two quiet cores, for which the default sizes are chosen."""

SMALLEST_SHARE = 0.35
"""Share of the default prompts below which no speed reduces them: fewer give no verdict."""


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

    train: int = 160
    test: int = 120
    live: int = 12
    tokens: int = 128
    depth: int = 10
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    effort: Effort = field(default_factory=lambda: Effort(budget_s=20.0))
    decision_effort: Effort = field(default_factory=lambda: Effort(repetitions=8))

    def scaled(self, share: float) -> Sizes:
        """Return sizes with `share` of the prompts, and shorter texts where that is little."""
        counts = {name: max(1, round(getattr(self, name) * share)) for name in ("train", "test", "live")}
        return dataclasses.replace(self, **counts, tokens=self.tokens if share > 0.6 else min(self.tokens, 96))

    def text(self) -> str:
        """Return the sizes in words."""
        return f"{self.train} training and {self.test} held-out prompts of {self.tokens} tokens, drafts of up to {self.depth}"


QUICK = Sizes(
    train=48, test=40, live=4, tokens=96, heads=("logistic", "tokens"), effort=Effort(budget_s=5.0),
    decision_effort=Effort(repetitions=4),
)  # fmt: skip


@dataclass(frozen=True)
class Offline:
    """What the stages before live decoding leave.

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
    where = Path(pair) if pair is not None else shipped_pair()
    refuse_inputs(folder, [where])
    progress("load models", 0, 2)
    models = load_pair(str(where / "target"), str(where / "draft"))
    progress("load models", 1, 2)
    kernels.load(progress)
    progress("load models", 2, 2)
    work = beside(folder)
    settings = {
        "pair": str(where.resolve()), "temperature": temperature, "verification": verification, "quick": quick, "seed": seed,
        "sizes": None if sizes is None else dataclasses.asdict(sizes),
    }  # fmt: skip
    sizes = _sizes(work, where, models, settings, sizes, QUICK if quick else Sizes(), announce)
    offline = run_offline(work, folder, where, models, temperature, verification, sizes, seed, progress, announce)
    live = _live(offline, sizes, seed, progress)
    announce(f"decode: {_live_text(live, offline)}")
    put_in_place(work, folder)
    return Demo(folder, sizes, offline.report, live)


def _sizes(
    work: Path, where: Path, models: Pair, settings: dict[str, Any], requested: Sizes | None, usual: Sizes,
    announce: Callable[[str], None],
) -> Sizes:  # fmt: skip
    """Return the sizes of this run, those of an interrupted one with the same settings if there is one."""
    state = read_json(work / STATE_FILE, "the interrupted demo") if (work / STATE_FILE).is_file() else {}
    if state.get("settings") == settings:
        announce(f"Continuing the interrupted run in {work}.")
        kept = state["sizes"]
        return Sizes(**{**kept, "heads": tuple(kept["heads"]), "effort": Effort(**kept["effort"]),
                        "decision_effort": Effort(**kept["decision_effort"])})  # fmt: skip
    shutil.rmtree(work, ignore_errors=True)  # an interrupted run with other settings
    sizes = requested
    if sizes is None:
        token_s = token_seconds(models, _encoded(where, "train", 4, models, PROBE_TOKENS))
        share = min(1.0, max(SMALLEST_SHARE, REFERENCE_TOKEN_S / token_s))
        sizes = usual.scaled(share)
        announce(f"This machine decodes {1 / token_s:.0f} tokens/s with the target alone: {sizes.text()}.")
    work.mkdir(parents=True)
    write_json(work / STATE_FILE, {"settings": settings, "sizes": dataclasses.asdict(sizes)})
    return sizes


def token_seconds(models: Pair, prompts: Sequence[Sequence[int]]) -> float:
    """Return the median seconds of a token that the target decodes alone, over `prompts` after a warm-up."""
    plain = Speculator(models, FixedLength(0), Settings(0.0, PROBE_TOKENS, 1, ignore_eos=True))
    plain.generate(prompts[0], 0)
    seconds = []
    for number, tokens in enumerate(prompts):
        started = time.perf_counter()
        plain.generate(tokens, number)
        seconds.append((time.perf_counter() - started) / PROBE_TOKENS)
    return statistics.median(seconds)


def run_offline(
    work: Path, folder: Path, where: Path, models: Pair, temperature: float, verification: str, sizes: Sizes, seed: int,
    progress: Progress, announce: Callable[[str], None] = ignore_line,
) -> Offline:  # fmt: skip
    """Collect, profile, train and evaluate on the pair in `where`; stages whose files are in `work` are not repeated.

    Args:
        work: Folder that the files are written to.
        folder: Name that `work` will have when it is complete.
        where: Folder of the pair.
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
        prompts[side] = _prompts(where, side, count)
        out = work / f"traces-{side}"
        trace = collect(
            models,
            prompts[side],
            out,
            target=str(where / "target"),
            draft=str(where / "draft"),
            depth=sizes.depth,
            temperature=temperature,
            verification=verification,
            max_new_tokens=sizes.tokens,
            seed=seed,
            resume=out.exists(),
            progress=_renamed(progress, f"collect {side}"),
        )
        # Reports name the folder that the trace will have; its rows are read while it has another name.
        traces[side] = Trace(folder / out.name, trace.header, trace.rows)
    arrays = {side: trace_arrays(trace) for side, trace in traces.items()}
    announce(f"collect: {_trace_text(arrays)}")
    ids = {side: encode(prompts[side], models.tokenizer, models.readable - sizes.tokens) for side in prompts}
    profile_prompts = ids["train"][:PROFILE_PROMPTS]
    settings = Settings(temperature, sizes.tokens, sizes.depth, verification=verification)
    profile = _profiled(work, models, profile_prompts, settings, sizes, progress)
    announce(f"profile: {_profile_text(profile)}")
    profile, learned = _trained(work, traces["train"], profile, models, ids["train"], settings, sizes, seed, progress)
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
    announce(f"evaluate: {_report_text(report)}")
    best = best_of(fixed_grid(arrays["train"], profile))
    named = {prompt.id: tokens for prompt, tokens in zip(prompts["test"], ids["test"], strict=True)}
    return Offline(
        where,
        models, named, arrays["test"], profile, learned, FixedLength(int(best.name.partition(":")[2])), report,
        profile_prompts, settings,
    )  # fmt: skip


def _prompts(where: Path, side: str, count: int) -> list[Prompt]:
    """Return prompts of a pair's folder."""
    path = where / f"prompts-{side}.jsonl"
    if not path.is_file():
        raise InputError(f"--pair: expected {path.name} in {where}, with one JSON object with `prompt` per line")
    return read_prompts(path, count)


def _encoded(where: Path, side: str, count: int, models: Pair, tokens: int) -> list[list[int]]:
    return encode(_prompts(where, side, count), models.tokenizer, models.readable - tokens)


def _profiled(
    work: Path, models: Pair, prompts: list[list[int]], settings: Settings, sizes: Sizes, progress: Progress
) -> Profile:
    """Return the profile of this machine with the decisions of a threshold, measured unless it was before."""
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
            train(traces, profile, head=kind, out=path, seed=seed, progress=_renamed(progress, f"train {kind}"))
    learned = [load_policy_folder(path) for path in paths]
    if all(policy.cost_name in profile.decision_s for policy in learned):
        return profile, learned
    timings = loop_decisions(
        models, learned, ids, settings, effort=sizes.decision_effort, progress=_renamed(progress, "time decisions")
    )
    profile = profile.with_measured_decisions(timings)
    tuned = []
    for done, path in enumerate(paths):
        progress("tune policies", done, len(paths))
        tuned.append(settle(path, traces, profile))
    progress("tune policies", len(paths), len(paths))
    profile.save(work / "profile.json")  # last: it marks the stage as complete
    return profile, tuned


def _live(offline: Offline, sizes: Sizes, seed: int, progress: Progress) -> list[LiveLine]:
    """Decode held-out prompts live with every policy, and compare with the replay."""
    policies: list[StopPolicy] = [FixedLength(0), offline.best_fixed, *offline.learned]
    arrays = offline.arrays.subset(range(min(sizes.live, offline.arrays.sequences)))
    prompts = [(name, offline.prompts[name]) for name in arrays.prompt_ids]
    progress("decode live", 0, len(prompts))
    calibration = offline.calibration()
    runs = [Speculator(offline.models, policy, offline.settings, offline.profile) for policy in policies]
    generations = run_alternating(
        runs,
        prompts,
        calibration=calibration,
        calibrate_every=1,
        seed=seed,
        progress=_renamed(progress, "decode live"),
    )
    profile = calibration.profile().with_decisions(offline.profile.decision_s)
    return compare_live(generations, policies, offline.arrays if arrays.header.given_text else arrays, profile)


def _renamed(progress: Progress, name: str) -> Progress:
    """Return a progress callback that shows one task under `name`."""

    def advance(task: str, done: int, total: int) -> None:
        progress(name, done, total)

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


def _live_text(live: Sequence[LiveLine], offline: Offline) -> str:
    fixed = live[1]
    top = max(live[2:], key=lambda line: line.predicted)
    measured, predicted = top.measured / fixed.measured, top.predicted / fixed.predicted
    same = (
        ""
        if top.same_text is None
        else f"; {sum(line.same_text == top.tally.texts for line in live)} of {len(live)} give plain decoding's text"
    )
    return f"{top.name} {measured:.3f} times {fixed.name} live, {predicted:.3f} predicted{same}"
