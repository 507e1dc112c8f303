"""`demo`: the whole pipeline on the embedded pair: collect, profile, train, evaluate, decode live."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ...collect.facts import facts
from ...collect.prompts.read import encode, read_prompts
from ...collect.run import collect
from ...collect.store.folder import Trace
from ...decode.compare.alternate import run_alternating
from ...decode.loop import Speculator
from ...decode.models.pair import Pair, load_pair
from ...decode.profile import CalibrationRun, loop_decisions, measure_profile
from ...decode.profile.measuring import Effort
from ...decode.settings import Settings
from ...policies.baselines.fixed import Confidence, FixedLength
from ...policies.contract import StopPolicy
from ...policies.files.outputs import claim_folder, refuse_inputs, staged_folder
from ...policies.latency.profile import Profile
from ...policies.progress import Progress, shown
from ...policies.storage.folder import load_policy_folder
from ..fit.run import train
from ..fit.tuning.rates import best_of, fixed_grid
from ..fit.tuning.settled import settle
from ..replay.traces.arrays import TraceArrays, trace_arrays
from ..report.evaluate import evaluate
from ..report.records import Report
from .live import LiveLine, compare_live
from .pair import demo_pair

DEMO_HEADS = ("logistic", "tokens", "mlp", "xgboost")
PROFILE_PROMPTS = 16
LIVE_TOKENS = 96
"""Of the texts that are timed between the live ones, of which there are few."""


@dataclass(frozen=True)
class Sizes:
    """How much the demo does: prompts to train on, to evaluate, to decode live; tokens of each text; depth K; the profile."""

    train: int = 112
    test: int = 80
    live: int = 9
    tokens: int = 128
    depth: int = 10
    effort: Effort = field(default_factory=Effort)


@dataclass(frozen=True)
class Offline:
    """Everything before live decoding.

    Attributes:
        folder: of the results.
        pair, models: folder of the pair, and the pair.
        prompts: the test prompts' token ids by id.
        arrays: the test traces.
        profile: of this machine, decisions included.
        learned: policies, as loaded from their folders.
        best_fixed: on the training traces.
        report: of the replay.
        profile_prompts: training prompts that latency is measured on.
        settings: of live runs.
    """

    folder: Path
    pair: Path
    models: Pair
    prompts: dict[str, list[int]]
    arrays: TraceArrays
    profile: Profile
    learned: list[StopPolicy]
    best_fixed: FixedLength
    report: Report
    profile_prompts: list[list[int]]
    settings: Settings

    def calibration(self) -> CalibrationRun:
        """Return a calibration run on the prompts of the profile, for a live comparison."""
        return CalibrationRun(
            self.models,
            self.profile_prompts,
            depth=self.arrays.depth,
            temperature=self.profile.temperature,
            new_tokens=LIVE_TOKENS,
            verification=self.settings.verification,
        )


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: its folder, the report of the replay, and the live comparison."""

    folder: Path
    report: Report
    live: list[LiveLine]


def run_offline(
    stage: Path, folder: Path, where: Path, temperature: float, verification: str, sizes: Sizes, seed: int,
    progress: Progress,
) -> Offline:  # fmt: skip
    """Collect, profile, train and evaluate on the pair in `where`, into `stage`, which is called `folder` once complete."""
    models = load_pair(str(where / "target"), str(where / "draft"))
    prompts, traces = {}, {}
    for side, count in (("train", sizes.train), ("test", sizes.test)):
        prompts[side] = read_prompts(where / f"prompts-{side}.jsonl", count)
        out = stage / f"traces-{side}"
        made = collect(
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
            progress=_named(progress, side),
        )
        # The rows are read here and now, since the folder is not called so yet.
        traces[side] = Trace(folder / out.name, made.header, made.rows)  # by the name that it will have
    room = models.readable - sizes.tokens
    ids = {side: encode(asked, models.tokenizer, room) for side, asked in prompts.items()}
    settings = Settings(temperature, sizes.tokens, sizes.depth, verification=verification)
    profile = measure_profile(
        models,
        ids["train"][:PROFILE_PROMPTS],
        depth=sizes.depth,
        temperature=temperature,
        verification=verification,
        effort=sizes.effort,
        facts=facts(models),
        progress=progress,
    )
    profile, learned = _trained(stage, traces["train"], profile, models, ids["train"], settings, seed, progress)
    report = evaluate(
        traces["test"],
        profile,
        learned,
        train_traces=traces["train"],
        out=stage / "report",
        seed=seed,
        progress=progress,
    )
    best = best_of(fixed_grid(trace_arrays(traces["train"]), profile))
    named = {p.id: tokens for p, tokens in zip(prompts["test"], ids["test"], strict=True)}
    return Offline(
        folder,
        where,
        models,
        named,
        trace_arrays(traces["test"]),
        profile,
        learned,
        FixedLength(int(best.name.partition(":")[2])),
        report,
        ids["train"][:PROFILE_PROMPTS],
        settings,
    )


def _trained(
    stage: Path, traces: Trace, profile: Profile, models: Pair, ids: list[list[int]], settings: Settings, seed: int,
    progress: Progress,
) -> tuple[Profile, list[StopPolicy]]:  # fmt: skip
    """Train the demo's heads; return the profile with their decisions timed in the loop, and them settled for it."""
    profile = profile.with_measured_decisions(loop_decisions(models, [Confidence()], ids, settings))
    learned: list[StopPolicy] = []
    for kind in DEMO_HEADS:
        path = stage / "policies" / kind
        train(traces, profile, head=kind, out=path, seed=seed, progress=progress)
        learned.append(load_policy_folder(path))
    profile = profile.with_measured_decisions(loop_decisions(models, learned, ids, settings))
    profile.save(stage / "profile.json")
    return profile, [settle(stage / "policies" / kind, traces, profile) for kind in DEMO_HEADS]


def demo(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    verification: str = "auto",
    sizes: Sizes | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = shown,
) -> Demo:
    """Run the whole pipeline and leave traces, profile, policies, report and plot in `out`.

    Args:
        out: a folder that is empty or not there.
        pair: folder of a pair made by `make_pair`; by default the embedded one, built when it is first needed.
        temperature: 0 = greedy.
        verification: that policies are trained for and decode under; `auto` = the fastest lossless one: when sampling,
            `block` (`match` gives the text of plain sampling, whatever the policy).
        sizes: how much of everything.
        seed: of noise, splits and fits.
        overwrite: replace an older result in `out`, once the new one is complete.
        progress: see `Progress`.

    Raises:
        InputError: as `claim_folder`.
    """
    sizes = sizes or Sizes()
    folder = claim_folder(out, overwrite=overwrite, inputs=[pair])
    where = Path(pair) if pair is not None else demo_pair(progress=progress)
    refuse_inputs(folder, [where])
    with staged_folder(folder) as stage:
        offline = run_offline(stage, folder, where, temperature, verification, sizes, seed, progress)
        return Demo(folder, offline.report, _live(offline, sizes, seed, progress))


def _live(offline: Offline, sizes: Sizes, seed: int, progress: Progress) -> list[LiveLine]:
    """Decode test prompts live with every policy, and compare with what the replay said."""
    policies: list[StopPolicy] = [FixedLength(0), offline.best_fixed, *offline.learned]
    arrays = offline.arrays.subset(range(min(sizes.live, offline.arrays.sequences)))
    prompts = [(name, offline.prompts[name]) for name in arrays.prompt_ids]
    calibration = offline.calibration()
    runs = [Speculator(offline.models, policy, offline.settings, offline.profile) for policy in policies]
    generations = run_alternating(
        runs, prompts, calibration=calibration, calibrate_every=1, seed=seed, progress=progress
    )
    profile = calibration.profile().with_decisions(offline.profile.decision_s)
    return compare_live(generations, policies, offline.arrays if arrays.header.given_text else arrays, profile)


def _named(progress: Progress, side: str) -> Progress:
    def advance(task: str, done: int, total: int) -> None:
        progress(f"{task} {side}", done, total)

    return advance
