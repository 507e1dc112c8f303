"""Shared by the benchmark scripts: options, one table, bars, timing in alternation, intervals, and the JSON line.

A script defines its parts, functions that take a `Run`, and ends with `raise SystemExit(Run(__doc__,
[part, ...]).execute())`. A part adds rows to the table and bars with `Run.row` and `Run.bar`. All scripts have these
options:

- `--pair DIR`: a pair with `target/`, `prompts-train.jsonl`, `prompts-test.jsonl` and perhaps `draft/` (default: the
  shipped one). Chat models get the prompts in their template.
- `--part NAME`: only these parts.
- `--temperatures T`: of the parts that compare temperatures (default: 0 and 0.7).
- `--smoke`: small sizes, to see that the script runs. Its figures mean nothing, and only bars on correctness are
  decided.
- `--check`: exit with 1 if a bar is missed.
- `--work DIR`: keeps what takes long to train or collect, for another run (default: a temporary folder).
- `--out FILE`: write table and bars as JSON, which is also the last line of the output, or the table as Markdown if
  the name ends in `.md`.

Scripts can import helpers of the tests after this module.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from scipy import stats
from specstop.collect import apply_chat_template
from specstop.decode import Generation
from specstop.decode.benchmark import Ratio
from specstop.decode.profile import loop_decisions
from specstop.decode.profile.measuring import Effort
from specstop.decode.prompts import encode_prompts
from threadpoolctl import threadpool_limits

import specstop as ss

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "decode")]

REPLICATES, SMOKE_LAYERS = 2000, 3


class Run:
    """One run of a script: its options, its pair, and what it has measured so far.

    Attributes:
        options: parsed options of the command line.
        figures: rows of the table by name.
        bars: by name, the value, the requirement, and whether it is met (None if a smoke run does not decide it).
    """

    def __init__(
        self,
        doc: str | None,
        parts: Sequence[Callable[[Run], None]],
        argv: Sequence[str] | None = None,
    ) -> None:
        self._parts = {part.__name__: part for part in parts}
        names = list(self._parts)
        self._folder = tempfile.TemporaryDirectory(prefix="specstop-benchmark-")
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--pair", type=Path, help="folder of a pair (default: the shipped pair)")
        parser.add_argument("--part", nargs="+", choices=names, default=names, help="parts to run (default: all)")
        parser.add_argument("--temperatures", nargs="+", type=float, help="of texts (default: 0 and 0.7)")
        parser.add_argument("--smoke", action="store_true", help="small sizes: shows that the script runs")
        parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
        parser.add_argument("--drafters", default="suffix+model", help="of the part routes (default: suffix+model)")
        parser.add_argument("--work", type=Path, help="folder that keeps what takes long (default: a temporary one)")
        parser.add_argument("--out", type=Path, help="file for table and bars, .json or .md")
        self.options = parser.parse_args(argv)
        self.figures: dict[str, dict[str, Any]] = {}
        self.bars: dict[str, dict[str, Any]] = {}
        if self.smoke:  # threads that wait for each other take most of the time on a busy machine
            torch.set_num_threads(1)
            threadpool_limits(1)

    @property
    def smoke(self) -> bool:
        """Whether this is a smoke run."""
        return bool(self.options.smoke)

    def choose(self, full: Any, smoke: Any) -> Any:
        """Return the first value, or the second one in a smoke run."""
        return smoke if self.smoke else full

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures that are compared."""
        return tuple(self.options.temperatures or self.choose((0.0, 0.7), (0.7,)))

    @cached_property
    def pair_folder(self) -> Path:
        """Folder of the pair; the shipped target has only its first layers in a smoke run."""
        if self.options.pair or not self.smoke:
            return self.options.pair or ss.shipped_pair()
        folder = self.folder("pair")
        shutil.copytree(ss.shipped_pair(), folder)
        config, weights = folder / "target" / "config.json", folder / "target" / "model.safetensors"
        config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": SMOKE_LAYERS}))
        names = [f"model.layers.{layer}." for layer in range(SMOKE_LAYERS)]
        parts = {
            name: part
            for name, part in load_file(weights).items()
            if not name.startswith("model.layers.") or name.startswith(tuple(names))
        }
        save_file(parts, weights, {"format": "pt"})
        return folder

    @cached_property
    def pair(self) -> ss.Pair:
        """The pair, loaded."""
        return self._load("auto")

    @cached_property
    def stock(self) -> ss.Pair:
        """The pair on transformers' modules."""
        return self._load("plain")

    def _load(self, engine: str) -> ss.Pair:
        draft = self.pair_folder / "draft"
        return ss.load_pair(self.pair_folder / "target", draft if draft.exists() else None, engine=engine)

    def prompts(self, side: str, count: int) -> list[ss.Prompt]:
        """Return the first prompts of a side, `train` or `test`; those of a smoke run are shorter."""
        prompts = ss.read_prompts(self.pair_folder / f"prompts-{side}.jsonl", count)
        prompts = [replace(prompt, text=prompt.text[:60]) for prompt in prompts] if self.smoke else prompts
        tokenizer = self.pair.tokenizer
        return apply_chat_template(prompts, tokenizer) if getattr(tokenizer, "chat_template", None) else prompts

    def encoded(self, side: str, count: int) -> list[tuple[str, list[int]]]:
        """Return names and tokens of the first prompts of a side."""
        return encode_prompts(self.pair, self.prompts(side, count))

    def ids(self, side: str, count: int) -> list[list[int]]:
        """Return the tokens of the first prompts of a side."""
        return [ids for _, ids in self.encoded(side, count)]

    def traces(
        self, name: str, counts: Mapping[str, int], pair: ss.Pair | None = None, **options: Any
    ) -> dict[str, ss.Trace]:
        """Return dense traces of the first prompts of each side."""
        options = {"verification": "match", **options}
        return {
            side: ss.collect(pair or self.pair, self.prompts(side, count), self.folder(f"{name}-{side}"), **options)
            for side, count in counts.items()
        }

    def profile(self, pair: ss.Pair | None = None, prompts: int = 16, **options: Any) -> ss.Profile:
        """Return the costs of this machine on training prompts."""
        defaults = {"new_tokens": self.choose(48, 8), "effort": self.effort, "verification": "match"}
        prompts = self.choose(prompts, 2)
        return ss.measure_profile(pair or self.pair, self.prompts("train", prompts), **{**defaults, **options})

    def with_decisions(
        self, profile: ss.Profile, policies: list[ss.StopPolicy], settings: ss.Settings, pair: ss.Pair | None = None
    ) -> ss.Profile:
        """Return the profile with the costs of decisions of policies, timed in the loop on training prompts."""
        ids = self.ids("train", self.choose(16, 2))
        timed = loop_decisions(pair or self.pair, policies, ids, settings, profile, self.effort)
        return profile.with_measured_decisions(timed)

    @property
    def effort(self) -> Effort:
        """How long costs are measured."""
        return Effort(repetitions=1) if self.smoke else Effort()

    def apart(self, function: Callable[..., Any], *arguments: object) -> Any:
        """Return the result of a function in a new process, or in this one if this is a smoke run."""
        if self.smoke:
            return function(*arguments)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()

    def map(self, function: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
        """Return the results of all jobs, computed in one process per core unless this is a smoke run."""
        if self.smoke:
            return [function(job) for job in jobs]
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
            return list(pool.map(function, jobs, chunksize=10))

    def folder(self, name: str) -> Path:
        """Return a path in a temporary folder that exists as long as the run."""
        return Path(self._folder.name) / name

    @cached_property
    def work(self) -> Path:
        """The folder `--work`."""
        folder: Path = (self.options.work or self.folder("work")).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def row(self, name: str, value: Any, note: str = "") -> None:
        """Add and print a row: a number, or a `Ratio` with its interval."""
        if not self.figures:
            print(f"{'measurement':<58}{'value':>12}  {'interval or quartiles':<24}note")
        interval = ""
        if isinstance(value, Ratio):
            interval = "" if value.low is None else f"[{value.low:.4g}, {value.high:.4g}]"
            self.figures[name] = {"value": value.value, "low": value.low, "high": value.high, "note": note}
            value = value.value
        else:
            self.figures[name] = {"value": value, "note": note}
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        print(f"{name:<58}{shown:>12}  {interval:<24}{note}", flush=True)

    def bar(
        self,
        name: str,
        value: float | Ratio,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        above: float | None = None,
        always: bool = False,
        note: str = "",
    ) -> None:
        """Add a row with a requirement.

        Args:
            name: of the row.
            value: a number, or a `Ratio`.
            at_least, at_most: requirements on the value.
            above: the whole interval of a `Ratio` has to be above this.
            always: a smoke run decides the bar too, because it is about correctness.
            note: printed in the row.
        """
        number = value.value if isinstance(value, Ratio) else float(value)
        low = value.low if isinstance(value, Ratio) and value.low is not None else number
        limits = {"at least": at_least, "at most": at_most, "interval above": above}
        required = " and ".join(f"{word} {limit:g}" for word, limit in limits.items() if limit is not None)
        met = (
            (at_least is None or number >= at_least)
            and (at_most is None or number <= at_most)
            and (above is None or low > above)
        )
        self.bars[name] = {"value": number, "required": required, "met": met if always or not self.smoke else None}
        self.row(name, value, f"{note}{'; ' if note else ''}{required}")

    def execute(self) -> int:
        """Run the parts, print bars and the JSON line, and return the exit code."""
        started = time.perf_counter()
        if self.smoke:
            print("smoke run: the numbers below are of a few prompts and mean nothing")
        with self._folder:
            for name in self.options.part:
                self._parts[name](self)
        missed = [name for name, bar in self.bars.items() if bar["met"] is False]
        for name, bar in self.bars.items():
            word = {True: "met", False: "MISSED", None: "not decided"}[bar["met"]]
            print(f"{word:<12}{name}: {bar['value']:.4g} ({bar['required']})")
        line = {
            "script": Path(sys.argv[0]).stem,
            "smoke": self.smoke,
            "missed": missed,
            "seconds": round(time.perf_counter() - started, 1),
            "version": ss.__version__,
            "figures": self.figures,
            "bars": self.bars,
        }
        if self.options.out:
            is_table = self.options.out.suffix == ".md"
            self.options.out.write_text(self._markdown() if is_table else json.dumps(line, indent=1) + "\n", "utf-8")
        print(json.dumps(line))
        return int(self.options.check and bool(missed))

    def _markdown(self) -> str:
        """Return device, version of torch and figures as a table."""
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        lines = [f"{card}, torch {torch.__version__}", "", "| measurement | value | note |", "|---|---|---|"]
        lines += [f"| {name} | {figure['value']:.4g} | {figure['note']} |" for name, figure in self.figures.items()]
        return "\n".join(lines) + "\n"


def alternate(
    methods: Mapping[str, Callable[[], object]],
    repeats: int,
    warm_up: int = 1,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time methods in alternation.

    Args:
        methods: by name.
        repeats: timed calls of each method.
        warm_up: calls of each method that are not timed.
        synchronize: waits for a device, before and after each call.

    Returns:
        Seconds of each call, by name. The i-th values of all methods were measured one after the other.
    """
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(warm_up + repeats):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if synchronize:
                synchronize()
            begin = time.perf_counter()
            methods[name]()
            if synchronize:
                synchronize()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def peak_mib(function: Callable[[], object]) -> float:
    """Return the peak memory of this process while a function runs, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present size
    function()
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024


def spread(values: Sequence[float]) -> Ratio:
    """Return the median of values with their quartiles."""
    if len(values) < 2:
        return Ratio(float(values[0]))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(middle, low, high)


def quotients(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the median and quartiles of the quotients of paired values."""
    return spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> Ratio:
    """Return sum(numerators) / sum(denominators) with a paired 95% bootstrap interval over clusters.

    Args:
        numerators, denominators: [n], of the same prompts.
        clusters: [n] labels; equal ones are resampled together. Default: each value is a cluster.
    """
    labels = list(range(len(numerators))) if clusters is None else list(clusters)
    index = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    sums = np.zeros((2, len(index)))
    for label, a, b in zip(labels, numerators, denominators, strict=True):
        sums[:, index[label]] += float(a), float(b)
    value = float(sums[0].sum() / sums[1].sum())
    if len(index) < 2:
        return Ratio(value)
    drawn = np.random.default_rng(0).integers(0, len(index), (REPLICATES, len(index)))
    low, high = np.quantile(sums[0][drawn].sum(1) / sums[1][drawn].sum(1), (0.025, 0.975))
    return Ratio(value, float(low), float(high))


def same_distribution(one: Counter[Any], other: Counter[Any], least: int = 10) -> float:
    """Return the p-value of a chi-square test that two counts have one distribution; values below `least` are merged."""
    frequent = [key for key in one | other if one[key] + other[key] >= least]
    table = np.array(
        [[c[key] for key in frequent] + [c.total() - sum(c[key] for key in frequent)] for c in (one, other)]
    )
    table = table[:, table.sum(0) > 0]
    return float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0


def compare_rounds(
    trace: ss.Trace, policy: ss.StopPolicy, profile: ss.Profile, texts: Sequence[Generation]
) -> tuple[int, int]:
    """Compare live rounds with those that replay predicts, at the anchors that both visit.

    Args:
        trace: dense trace of the prompts.
        policy: the policy of the live run.
        profile: of the live run.
        texts: live texts, in the order of the prompts.

    Returns:
        Number of rounds compared, and of those with other counts of drafted, verified or accepted tokens.
    """
    rounds = ss.replay(trace, policy, profile)
    columns = (rounds.sequence, rounds.anchor, rounds.drafted, rounds.verified, rounds.accepted)
    replayed = {(text, anchor): counts for text, anchor, *counts in zip(*(c.tolist() for c in columns), strict=True)}
    pairs = [
        ([r.drafted, r.verified, r.accepted], replayed[number, r.anchor])
        for number, text in enumerate(texts)
        for r in text.rounds
        if (number, r.anchor) in replayed
    ]
    return len(pairs), sum(live != counts for live, counts in pairs)


MAX_TIES = 1 / 2000
"""Share of rounds that may differ: rows of one forward and of a batch differ by 1e-5, which decides ties."""
