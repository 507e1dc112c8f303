"""`demo`: the whole pipeline on the embedded pair: collect, profile, train, evaluate, decode live."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...collect.prompts import encode, read_prompts
from ...collect.run import collect, facts, reading_room
from ...decode.alternate import run_alternating
from ...decode.loop import Speculator
from ...decode.pair import Pair, load_pair
from ...decode.profile import Gauge, loop_decisions, measure_profile
from ...decode.settings import Settings
from ...policies.baselines import Confidence, FixedLength
from ...policies.contract import StopPolicy
from ...policies.costs import Profile
from ...policies.files import claim_folder
from ...policies.folder import load_policy_folder
from ...policies.progress import Progress, silent
from ..fit.run import settle, train
from ..fit.tune import best_of, fixed_grid
from ..report.evaluate import evaluate
from ..report.records import Report
from ..traces.data import TraceArrays, trace_arrays
from .live import LiveLine, compare_live
from .pair import demo_pair

DEMO_HEADS = ("logistic", "tokens", "mlp", "xgboost")
PROFILE_PROMPTS = 16


@dataclass(frozen=True)
class Sizes:
    """How much the demo does: prompts to train on, to evaluate, to decode live; tokens of each text; depth K."""

    train: int = 112
    test: int = 80
    live: int = 9
    tokens: int = 128
    depth: int = 10


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

    def gauge(self) -> Gauge:
        """Return a gauge on the prompts of the profile, for a live comparison."""
        return Gauge(self.models, self.profile_prompts, depth=self.arrays.depth, temperature=self.profile.temperature)


@dataclass(frozen=True)
class Demo:
    """What the demo leaves: its folder, the report of the replay, and the live comparison."""

    folder: Path
    report: Report
    live: list[LiveLine]


def run_offline(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    sizes: Sizes | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Offline:
    """Collect, profile, train and evaluate on a pair with its own prompts; arguments as of `demo`."""
    sizes = sizes or Sizes()
    folder = claim_folder(Path(out), overwrite=overwrite)
    where = Path(pair) if pair is not None else demo_pair(progress=progress)
    target, draft = str(where / "target"), str(where / "draft")
    models = load_pair(target, draft)
    prompts, ids, traces = {}, {}, {}
    for side, count in (("train", sizes.train), ("test", sizes.test)):
        prompts[side] = read_prompts(where / f"prompts-{side}.jsonl", count)
        ids[side] = encode(prompts[side], models.tokenizer, reading_room(models, sizes.tokens))
        traces[side] = collect(
            models,
            prompts[side],
            folder / f"traces-{side}",
            target=target,
            draft=draft,
            depth=sizes.depth,
            temperature=temperature,
            max_new_tokens=sizes.tokens,
            seed=seed,
            progress=_named(progress, side),
        )
    profile = measure_profile(
        models,
        ids["train"][:PROFILE_PROMPTS],
        depth=sizes.depth,
        temperature=temperature,
        facts=facts(models),
        progress=progress,
    )
    profile = profile.with_measured_decisions(
        loop_decisions(models, [Confidence()], ids["train"], Settings(temperature, sizes.tokens, sizes.depth))
    )
    learned: list[StopPolicy] = []
    for kind in DEMO_HEADS:
        path = folder / "policies" / kind
        train(traces["train"], profile, head=kind, out=path, seed=seed, progress=progress)
        learned.append(load_policy_folder(path))
    settings = Settings(temperature, sizes.tokens, sizes.depth)
    profile = profile.with_measured_decisions(loop_decisions(models, learned, ids["train"], settings))
    profile.save(folder / "profile.json")
    learned = [settle(folder / "policies" / kind, traces["train"], profile) for kind in DEMO_HEADS]
    report = evaluate(
        traces["test"],
        profile,
        learned,
        train_traces=traces["train"],
        out=folder / "report",
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
    )


def demo(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    sizes: Sizes | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Demo:
    """Run the whole pipeline and leave traces, profile, policies, report and plot in `out`.

    Args:
        out: a folder that is empty or not there.
        pair: folder of a pair made by `make_pair`; by default the embedded one, built when it is first needed.
        temperature: 0 = greedy.
        sizes: how much of everything.
        seed: of noise, splits and fits.
        overwrite: replace what is in `out`.
        progress: see `Progress`.
    """
    sizes = sizes or Sizes()
    offline = run_offline(
        out, pair=pair, temperature=temperature, sizes=sizes, seed=seed, overwrite=overwrite, progress=progress
    )
    policies: list[StopPolicy] = [FixedLength(0), offline.best_fixed, *offline.learned]
    arrays = offline.arrays.subset(range(min(sizes.live, offline.arrays.sequences)))
    prompts = [(name, offline.prompts[name]) for name in arrays.prompt_ids]
    settings = Settings(temperature, sizes.tokens, sizes.depth)
    gauge = offline.gauge()
    runs = [Speculator(offline.models, policy, settings, offline.profile) for policy in policies]
    generations = run_alternating(runs, prompts, gauge=gauge, gauge_every=1, seed=seed, progress=progress)
    live = compare_live(generations, policies, arrays, gauge.profile().with_decisions(offline.profile.decision_s))
    return Demo(offline.folder, offline.report, live)


def _named(progress: Progress, side: str) -> Progress:
    def advance(task: str, done: int, total: int) -> None:
        progress(f"{task} {side}", done, total)

    return advance
