"""`demo`: all stages on the shipped pair: collect, profile, train, evaluate, decode live."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..collect.prompts import Prompt, read_prompts, tokenize_prompts
from ..collect.run import collect, environment_facts
from ..collect.schema import stream_name
from ..collect.store import Trace
from ..decode.benchmark import run_alternating
from ..decode.drafters import with_drafter
from ..decode.loop import Speculator
from ..decode.models.pair import Pair, load_pair
from ..decode.profile import CalibrationRun, loop_decisions, measure_profile
from ..decode.profile.measuring import Effort
from ..decode.records import Generation, Tally
from ..decode.settings import Settings
from ..policies import kernels
from ..policies.arguments import check_limits
from ..policies.contract import StopPolicy
from ..policies.display import Progress, shown
from ..policies.files import check_separate, prepare_output_dir, staged_folder
from ..policies.fixed import Confidence, FixedLength
from ..policies.learned import LearnedPolicy
from ..policies.profile import Profile
from ..policies.routing import agreement
from ..policies.storage import load_policy_folder, save_policy
from .evaluate.evaluate import evaluate
from .evaluate.records import Report
from .fit.adapt import is_priced, retune, unfitted_prompts
from .fit.rules import best_of, fixed_grid
from .fit.run import train
from .replay.arrays import TraceArrays, trace_arrays
from .replay.run import replay
from .shipped_pair import check_pair, shipped_pair

PROFILE_PROMPTS = 16
PROBE_TOKENS = 24

REFERENCE_TOKEN_S = 3.3e-3
"""Seconds per token of plain decoding on a quiet machine; the default sizes assume it."""

SMALLEST_SHARE = 0.35
"""Smallest share of the default prompts: fewer give wide intervals."""

ROUTED = "suffix+model"
"""Drafters among which a route is learned."""

ROUTED_TOKENS = 64
"""Tokens of these texts, at most."""


@dataclass(frozen=True)
class Sizes:
    """How much work the demo does.

    Attributes:
        train: training prompts.
        test: held-out prompts.
        live: held-out prompts that are decoded live.
        routed: training and held-out prompts for which a route among drafters is learned; 0 = none.
        tokens: new tokens of each text.
        depth: longest draft, K.
        heads: kinds of heads to train.
        effort: how long the costs of model calls are measured.
        decision_effort: how long the costs of decisions are measured.
        route_effort: how long the costs of several drafters are measured.
    """

    train: int = 104
    test: int = 76
    live: int = 8
    routed: int = 20
    tokens: int = 160
    depth: int = 10
    heads: tuple[str, ...] = ("logistic", "tokens", "mlp", "xgboost")
    effort: Effort = field(default_factory=lambda: Effort(budget_s=12.0))
    decision_effort: Effort = field(default_factory=lambda: Effort(repetitions=6))
    route_effort: Effort = field(default_factory=lambda: Effort(budget_s=4.0))

    def scaled(self, share: float) -> Sizes:
        """Return the sizes with fewer prompts, and with shorter texts if `share` is at most 0.6."""
        fewest = {"train": 16, "test": 20, "live": 3}  # fewer give no verdict, or no profile between live texts
        counts = {name: max(least, round(getattr(self, name) * share)) for name, least in fewest.items()}
        return dataclasses.replace(self, **counts, tokens=self.tokens if share > 0.6 else min(self.tokens, 128))


QUICK = Sizes(
    train=48, test=40, live=6, routed=0, tokens=96, heads=("logistic", "tokens"), effort=Effort(budget_s=5.0),
    decision_effort=Effort(repetitions=4),
)  # fmt: skip


@dataclass(frozen=True)
class LiveLine:
    """One policy, live.

    Attributes:
        name: of the policy.
        tally: sums over its texts.
        measured, predicted: tokens/s relative to the first policy, in this run and by replay.
        same_text: number of prompts with the text of the first policy; None where texts depend on what is drafted.
    """

    name: str
    tally: Tally
    measured: float
    predicted: float
    same_text: int | None

    @property
    def miss(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured / self.predicted - 1.0


@dataclass(frozen=True)
class Demo:
    """The result: folder, sizes, report of the replay, live comparison, and the report of a route among drafters."""

    folder: Path
    sizes: Sizes
    report: Report
    live: list[LiveLine]
    routes: Report | None = None


def demo(
    out: str | Path,
    *,
    pair: str | Path | None = None,
    temperature: float = 0.0,
    sizes: Sizes | None = None,
    quick: bool = False,
    seed: int = 0,
    overwrite: bool = False,
    progress: Progress = shown,
    announce: Callable[[str], None] = lambda line: None,
) -> Demo:
    """Run all stages and leave traces, profile, policies and report in `out`.

    Everything is computed on one thread: threads that wait for each other make timings depend on what else runs.

    Args:
        out: folder that is empty or does not exist.
        pair: folder with `target/`, `draft/`, `prompts-train.jsonl` and `prompts-test.jsonl`; default: the shipped pair.
        temperature: 0 = greedy.
        sizes: how much work to do; default: adapted to the measured speed of the pair on this machine.
        quick: start from the sizes of a run of less than a minute.
        seed: of noise, splits and fits.
        overwrite: replace an older result in `out` when the new one is complete.
        progress: see `Progress`.
        announce: called with one line of result per stage.

    Raises:
        InputError: `pair` is not a pair with prompts, or see `prepare_output_dir`.
    """
    folder = prepare_output_dir(out, overwrite=overwrite, inputs=[pair])
    pair_folder = check_pair(pair) if pair is not None else shipped_pair()
    check_separate(folder, [pair_folder])
    check_limits(temperature=temperature)
    threads = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        stage = stack.enter_context(staged_folder(folder))
        progress("load models", 0, 1)
        models = load_pair(str(pair_folder / "target"), str(pair_folder / "draft"))
        kernels.load(progress)
        progress("load models", 1, 1)
        if sizes is None:
            token_s = _seconds_per_token(models, pair_folder)
            sizes = (QUICK if quick else Sizes()).scaled(min(1.0, max(SMALLEST_SHARE, REFERENCE_TOKEN_S / token_s)))
            announce(
                f"This machine decodes {1 / token_s:.0f} tokens/s with the target alone: {sizes.train} training and "
                f"{sizes.test} held-out prompts of {sizes.tokens} tokens, drafts of up to {sizes.depth}."
            )
        stages = _Stages(stage, folder, pair_folder, models, sizes, temperature, seed, progress)
        order = [stages.collect, stages.profile, stages.train, stages.evaluate, stages.decode]
        if sizes.routed:
            order.append(stages.route)
        for done, run_stage in enumerate(order, 1):
            announce(f"{run_stage.__name__}: {run_stage()}")
            progress("demo", done, len(order))
    return Demo(folder, sizes, stages.report, stages.live, stages.routes)


def _seconds_per_token(models: Pair, pair_folder: Path) -> float:
    """Return the seconds per token of plain decoding, measured on three prompts after a warm-up."""
    prompts = read_prompts(pair_folder / "prompts-train.jsonl", 4)
    plain = Speculator(models, FixedLength(0), Settings(0.0, PROBE_TOKENS, 1, ignore_eos=True))
    encoded = tokenize_prompts(prompts, models.tokenizer, models.readable - PROBE_TOKENS, skip_long=False)[1]
    texts = [plain.generate(ids, number) for number, ids in enumerate(encoded)]
    return statistics.median(1 / text.tokens_per_s for text in texts[1:])


@dataclass
class _Stages:
    """The stages in the order of their methods. Each writes its files and returns its result in words.

    Args:
        stage: folder that files are written to.
        folder: name that `stage` will have at the end, which reports show.
        pair_folder, models: the pair.
        sizes, temperature, seed, progress: see `demo`.
    """

    stage: Path
    folder: Path
    pair_folder: Path
    models: Pair
    sizes: Sizes
    temperature: float
    seed: int
    progress: Progress

    def __post_init__(self) -> None:
        self.shared: dict[str, Any] = {"depth": self.sizes.depth, "temperature": self.temperature}
        self.settings = Settings(self.temperature, self.sizes.tokens, self.sizes.depth)
        self.prompts: dict[str, list[Prompt]] = {
            side: read_prompts(self.pair_folder / f"prompts-{side}.jsonl", getattr(self.sizes, side))
            for side in ("train", "test")
        }
        max_prompt_tokens = self.models.readable - self.sizes.tokens
        self.ids = {
            side: tokenize_prompts(prompts, self.models.tokenizer, max_prompt_tokens, skip_long=False)[1]
            for side, prompts in self.prompts.items()
        }
        self.traces: dict[str, Trace] = {}
        self.arrays: dict[str, TraceArrays] = {}
        self.learned: list[LearnedPolicy] = []
        self.routes: Report | None = None

    def within(self, name: str) -> Progress:
        """Return a progress callback that shows tasks as parts of `name`."""
        return lambda task, done, total: self.progress(f"{name}: {task}", done, total)

    def collect(self) -> str:
        """Record traces of both sides. Return the number of rounds and how many drafted tokens are accepted."""
        names: dict[str, Any] = {name: str(self.pair_folder / name) for name in ("target", "draft")}
        for side, prompts in self.prompts.items():
            trace = collect(
                self.models, prompts, self.stage / f"traces-{side}", max_new_tokens=self.sizes.tokens, seed=self.seed,
                verification="auto", progress=self.within(side), **names, **self.shared,
            )  # fmt: skip
            self.traces[side] = Trace(self.folder / f"traces-{side}", trace.header, trace.rows)
            self.arrays[side] = trace_arrays(self.traces[side])
        test = self.arrays["test"]
        length, deep = test.accepted[~test.cut], min(6, test.depth)
        first, last = (float((length >= k).float().mean()) for k in (1, deep))
        return (
            f"{sum(len(side.accepted) for side in self.arrays.values()):,} rounds; the first drafted token is accepted in "
            f"{first:.0%} of them, {deep} or more in {last:.0%}"
        )

    def profile(self) -> str:
        """Measure the profile. Return the costs of a target call and a draft step."""
        self.costs = measure_profile(
            self.models, self.ids["train"][:PROFILE_PROMPTS], policies=[Confidence()], effort=self.sizes.effort,
            facts=environment_facts(self.models), progress=self.progress, **self.shared,
        )  # fmt: skip
        costs = self.costs.low
        target, draft = costs.verify_s[0], costs.later_draft_s or costs.draft_s[0]
        noise = "" if self.costs.noise is None or not self.costs.noise.is_noisy else "; the machine was not quiet"
        return f"a target call takes {1e3 * target:.2f} ms, a draft step {1e3 * draft:.2f} ms (1/{target / draft:.0f}){noise}"

    def train(self) -> str:
        """Train the heads, time their decisions in the loop, and retune them. Return the costs of their decisions."""
        paths = {kind: self.stage / "policies" / kind for kind in self.sizes.heads}
        for kind, path in paths.items():
            train(
                self.traces["train"], self.costs, head=kind, out=path, seed=self.seed, report_share=0,
                progress=self.within(kind),
            )  # fmt: skip
        loaded = map(load_policy_folder, paths.values())
        policies = [policy for policy in loaded if isinstance(policy, LearnedPolicy)]
        timings = loop_decisions(
            self.models, policies, self.ids["train"], self.settings, effort=self.sizes.decision_effort,
            progress=self.within("decisions"),
        )  # fmt: skip
        # `train` estimated what a decision costs: until it is measured, rho is that of slightly different costs.
        self.costs = self.costs.with_measured_decisions(timings)
        for done, (policy, path) in enumerate(zip(policies, paths.values(), strict=True)):
            self.progress("tune policies", done, len(paths))
            unfitted = unfitted_prompts(policy, self.arrays["train"]) if is_priced(policy) else None
            # The first decision was chosen on more prompts than these, so it stays.
            tuned = policy if unfitted is None else retune(policy, unfitted, self.costs, [policy.rule.first])
            save_policy(tuned, path)
            self.learned.append(tuned)
        self.progress("tune policies", len(paths), len(paths))
        self.costs.save(self.stage / "profile.json")
        prices = [f"{policy.name} {1e6 * self.costs.decision(policy.cost_name):.0f}" for policy in self.learned]
        return f"{len(self.learned)} policies; one decision costs (µs): {', '.join(prices)}"

    def evaluate(self) -> str:
        """Replay on the held-out prompts. Return the speeds of best fixed length, fastest learned policy and bound."""
        profile = dataclasses.replace(self.costs, source=self.folder / "profile.json")
        self.report = report = evaluate(
            self.traces["test"], profile, self.learned, train_traces=self.traces["train"], out=self.stage / "report",
            seed=self.seed, progress=self.progress,
        )  # fmt: skip
        best, oracle = report["best fixed"], next(line for line in report.lines if line.kind == "bound")
        top = max((line for line in report.lines if line.kind == "learned"), key=lambda line: line.tokens_per_s)
        return (
            f"best fixed length ({best.note.partition(',')[0]}) {best.to_plain.value:.2f} times plain decoding; {top.name} "
            f"{top.to_best_fixed.text()} times that, oracle bound {oracle.to_best_fixed.value:.2f} times"
        )

    def decode(self) -> str:
        """Decode live: plain, best fixed length, fastest policy. Return measured and predicted speed of the latter."""
        rates = {line.name: line.tokens_per_s for line in self.report.lines}
        fastest = max(self.learned, key=lambda policy: rates[policy.shown_name])
        grid = fixed_grid(self.arrays["train"], self.costs)
        policies: list[StopPolicy] = [FixedLength(0), FixedLength(grid.index(best_of(grid))), fastest]
        arrays = self.arrays["test"].subset(range(min(self.sizes.live, self.arrays["test"].sequences)))
        ids = {prompt.stream_name: ids for prompt, ids in zip(self.prompts["test"], self.ids["test"], strict=True)}
        prompts = [(name, ids[name]) for name in map(stream_name, arrays.prompt_ids, arrays.samples)]
        self.progress("decode: live", 0, len(prompts))
        calibration = CalibrationRun(self.models, self.ids["train"][:PROFILE_PROMPTS], new_tokens=96, **self.shared)
        generations = run_alternating(
            [Speculator(self.models, policy, self.settings, self.costs) for policy in policies], prompts,
            calibration=calibration, calibrate_every=1 if len(prompts) < 8 else 2, seed=self.seed,
            progress=self.within("decode"),
        )  # fmt: skip
        costs = calibration.profile().with_decisions(self.costs.decision_s)  # of the same minutes
        # Where replay is exact in law alone, more prompts predict better than the same ones.
        given_text = self.arrays["test"].header.given_text
        self.live = compare_live(generations, policies, self.arrays["test"] if given_text else arrays, costs)
        _, fixed, top = self.live
        measured, predicted = top.measured / fixed.measured, top.predicted / fixed.predicted
        equal = sum(line.same_text == top.tally.texts for line in self.live)
        same_text = "" if given_text else f"; {equal} of {len(self.live)} give plain decoding's text"
        return f"{top.name} {measured:.3f} times {fixed.name} live, {predicted:.3f} predicted{same_text}"

    def route(self) -> str:
        """Learn which drafter drafts in a round. Return the speed relative to the best drafter at its best fixed length."""
        pair, traces = with_drafter(self.models, ROUTED), dict[str, Trace]()
        names: dict[str, Any] = {name: str(self.pair_folder / name) for name in ("target", "draft")}
        for side, prompts in self.prompts.items():
            traces[side] = collect(
                pair, prompts[: self.sizes.routed], self.stage / f"traces-{side}-routed", seed=self.seed,
                max_new_tokens=min(self.sizes.tokens, ROUTED_TOKENS), verification="match",
                progress=self.within(f"{side}, routed"), **names, **self.shared,
            )  # fmt: skip
        costs = measure_profile(
            pair, self.ids["train"][:PROFILE_PROMPTS], policies=[agreement()], effort=self.sizes.route_effort,
            facts=environment_facts(pair), progress=self.within("routes"), verification="match", **self.shared,
        )  # fmt: skip
        trained = train(
            traces["train"], costs, decide="route", head="logistic", out=self.stage / "policies" / "route",
            seed=self.seed, report_share=0, progress=self.within("route"),
        )  # fmt: skip
        self.routes = evaluate(traces["test"], costs, [trained.policy], seed=self.seed, progress=self.within("routes"))
        line, best = self.routes[trained.policy.name], self.routes["best fixed"]
        return f"{line.name} {line.to_best_fixed.text()} times {best.note.partition(',')[0]}, the best of all fixed lengths"


def compare_live(
    generations: Sequence[Sequence[Generation]], policies: Sequence[StopPolicy], arrays: TraceArrays, profile: Profile
) -> list[LiveLine]:
    """Return measured and predicted speeds, both relative to the first policy.

    Args:
        generations: of `decode.benchmark.run_alternating`.
        policies: the policies, in the same order.
        arrays: traces of these prompts.
        profile: of this machine.
    """
    predicted = [replay(arrays, policy, profile).rate for policy in policies]
    lines, plain = [], Tally(generations[0])
    for policy, texts, rate in zip(policies, generations, predicted, strict=True):
        tally, measured = Tally(texts), Tally(texts).tokens_per_s / plain.tokens_per_s
        same = sum(a.tokens == b.tokens for a, b in zip(texts, generations[0], strict=True))
        same_text = None if arrays.header.given_text else same
        lines.append(LiveLine(policy.name, tally, measured, rate / predicted[0], same_text))
    return lines
