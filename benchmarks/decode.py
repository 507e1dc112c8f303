"""The live loop against transformers' assisted generation, and against the time of its own forwards.

    python benchmarks/make_pair.py --size 100m --out pairs/100m
    python benchmarks/decode.py --check --pair pairs/100m

The shipped pair always runs, and with a draft disturbed until it is right only every other time; `--pair` adds others. For
each pair, greedy and at T = 0.7, alternating per prompt: our best fixed length over the library's best assisted setting; the
share of a round outside model calls and policy; the floor (the same forwards with nothing between them) over the loop;
trees; memory over a long run. The two methods of each kind that are fastest on the first 6 prompts are run on the others as
well. The last line is one JSON object.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bars import Bars, arguments
from pairs import accepted_first, weaker_pair
from specstop.cli.output import progress_bars
from specstop.collect.prompts.read import encode, read_prompts
from specstop.decode import Generation, Pair, Settings, Speculator, Topology, load_pair, parse_tree, stream_key
from specstop.decode.benchmark import bench_line, run_alternating, speed_ratio
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.topology import chain
from specstop.policies import FixedLength
from specstop.train.demo.pair import shipped_pair

LENGTHS = (2, 3, 4, 6, 8)
TREES = ("2,1", "2,2,1,1", "4,2,1", "fork:2x4")
FLOOR_TREE = "2,2,1,1"
KINDS = (tuple(f"fixed:{k}" for k in LENGTHS), TREES, tuple(s.name for s in SETTINGS))
LONG = 2048
AT_LEAST, AT_LEAST_WEAKER, OUTSIDE = 2.3, 2.0, 0.12
"""Least ratio to assisted generation, that of the weaker pair, and the largest share of a round outside the models."""
SCREEN = 6
"""Prompts on which every way runs; then the fastest of each kind go on."""

STAY = 2

Prompts = list[tuple[str, list[int]]]


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, "folders of further pairs", pairs=True)
    parser.add_argument("--only-pairs", action="store_true", help="leave the shipped pair out")
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.7], help="temperatures to run at")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of 128 new tokens; a check needs 40")
    parser.add_argument("--engine", default="auto", help="how our models compute")
    options = parser.parse_args()
    count, tokens = (3, 32) if options.quick else (options.prompts, 128)
    bars = Bars()
    results = bars.figures["pairs"] = {}
    with tempfile.TemporaryDirectory() as room, progress_bars() as progress:
        weaker = None if options.only_pairs else weaker_pair(own := shipped_pair(), Path(room))
        for folder in [*([own, weaker] if weaker else []), *options.pair]:
            least = AT_LEAST_WEAKER if folder == weaker else AT_LEAST
            pair = load_pair(folder / "target", folder / "draft", engine=options.engine)
            stock = load_pair(folder / "target", folder / "draft", engine="plain")
            read = read_prompts(folder / "prompts-test.jsonl", count)
            ids = encode(read, pair.tokenizer, pair.readable - tokens)
            prompts = list(zip([p.id for p in read], ids, strict=True))
            print(f"\n{folder.name}, engines {' and '.join(pair.engines)}, {torch.get_num_threads()} threads")
            figures = results[folder.name] = {}
            for temperature in options.temperature:
                figures[f"T={temperature:g}"] = measure(
                    pair, stock, prompts, tokens, temperature, least, bars, progress
                )  # fmt: skip
            figures["memory"] = memory(pair, prompts[0][1], bars)
    at = ", ".join(f"T = {t:g}" for t in options.temperature)
    compared = f"{count} prompts of {tokens} tokens, {at}, on {', '.join(results) or 'no pair'}"
    return bars.finish(options, compared, whole=count >= 40 and bool(results))


def measure(
    pair: Pair,
    stock: Pair,
    prompts: Prompts,
    tokens: int,
    temperature: float,
    least: float,
    bars: Bars,
    progress: Any,
) -> dict[str, Any]:
    """Return the figures of one pair at one temperature, and print them; `least` is the bar beside assisted generation."""
    names = ["plain", *(f"fixed:{k}" for k in LENGTHS), *TREES, PLAIN.name, *(s.name for s in SETTINGS)]
    runs: list[Any] = [
        Speculator(pair, FixedLength(k), Settings(temperature, tokens, verification="match")) for k in (0, *LENGTHS)
    ]
    for tree in TREES:
        depth = parse_tree(tree).deepest
        runs.append(
            Speculator(pair, FixedLength(depth), Settings(temperature, tokens, tree=tree, verification="match"))
        )
    runs += [Assisted(stock, setting, Settings(temperature, tokens)) for setting in (PLAIN, *SETTINGS)]
    texts = contest(dict(zip(names, runs, strict=True)), prompts, progress)
    lines = {name: bench_line(name, row, texts["plain"][: len(row)]) for name, row in texts.items()}
    print(f" T = {temperature:g}")
    for name, line in lines.items():
        interval = f"{line.ratio.text(2)} of plain"
        left = "" if len(texts[name]) == len(prompts) else f", on {len(texts[name])} prompts"
        print(f"  {name:<26}{line.tokens_per_s:>8.1f} tokens/s  {interval}{left}")
    whole = {name: line.tokens_per_s for name, line in lines.items() if len(texts[name]) == len(prompts)}
    ours, tree, theirs = (max(whole.keys() & set(kind), key=whole.__getitem__) for kind in KINDS)
    figures: dict[str, Any] = {"tokens_per_s": {name: line.tokens_per_s for name, line in lines.items()}}

    def bar(name: str, value: Any, text: str, met: bool) -> None:
        figures[name] = value
        print(f" {'met ' if met else 'MISS'}  {name}: {text}")
        if not met:
            bars.missed.append(f"T={temperature:g}: {name}: {text}")

    ratio = speed_ratio(texts[ours], texts[theirs])
    first = figures["P(A >= 1)"] = accepted_first(texts[ours])
    text = f"{ratio.text(2)} ({ours} over {theirs}, P(A >= 1) {first:.2f}); at least {least}"
    bar("best fixed over best assisted", [ratio.value, ratio.low, ratio.high], text, ratio.value >= least)
    print(f"  best tree {tree}: {speed_ratio(texts[tree], texts[ours]).value:.2f} of {ours}")
    for name in (ours, FLOOR_TREE):
        rounds = [r for g in texts[name] for r in g.rounds]
        outside = sum(r.outside_s for r in rounds) / sum(r.seconds for r in rounds)
        text = f"{outside:.1%} of a round; at most {OUTSIDE:.0%}"
        bar(f"outside forwards and policy, {name}", outside, text, outside <= OUTSIDE)
        shape = chain(LENGTHS[-1]) if name == ours else parse_tree(name)
        share = floor(pair, prompts, temperature, tokens, shape, ours if name == ours else name)
        bar(f"floor over loop, {name}", share, f"{share:.3f}; at least 0.85", share >= 0.85)
    return figures


def contest(runs: dict[str, Any], prompts: Prompts, progress: Any) -> dict[str, list[Generation]]:
    """Return the texts of all methods on the first prompts, and on the others of those that may be the best of their kind."""
    texts = dict(zip(runs, run_alternating(list(runs.values()), prompts[:SCREEN], progress=progress), strict=True))
    stay = {"plain", FLOOR_TREE}
    for kind in KINDS:
        stay |= set(sorted(kind, key=lambda name: speed_ratio(texts[name], texts["plain"]).value, reverse=True)[:STAY])
    rest = {name: run for name, run in runs.items() if name in stay}
    if prompts[SCREEN:]:
        for name, row in zip(
            rest, run_alternating(list(rest.values()), prompts[SCREEN:], progress=progress), strict=True
        ):
            texts[name] += row
    return texts


def floor(pair: Pair, prompts: Prompts, temperature: float, tokens: int, shape: Topology, name: str) -> float:
    """Return the time of the same forwards alone over that of the loop, text by text in alternation."""
    depth = int(name.partition(":")[2]) if shape.is_chain else shape.deepest
    settings = Settings(temperature, tokens, tree=None if shape.is_chain else name, verification="match")
    loop, bare = Speculator(pair, FixedLength(depth), settings), Bare(pair, shape)
    loop_s = bare_s = 0.0
    for number, (prompt_id, prompt) in enumerate(prompts[:1] + prompts):
        text = loop.generate(prompt, stream_key(0, prompt_id))
        seconds = bare.play(prompt, text)
        if number:
            loop_s += sum(r.seconds for r in text.rounds)
            bare_s += seconds
    return bare_s / loop_s


class Bare:
    """Forwards of the shapes of a text that was decoded, and nothing else."""

    def __init__(self, pair: Pair, shape: Topology) -> None:
        self._shape = shape
        self._target, self._draft = (CachedModel(m, LONG, pair.vocabulary) for m in (pair.target, pair.draft_model))

    @torch.inference_mode()
    def play(self, prompt: list[int], text: Generation) -> float:
        """Return the seconds of the forwards of all rounds."""
        everything = [*prompt, *text.tokens, *([0] * len(self._shape))]
        ids = torch.tensor([everything])
        for model in (self._target, self._draft):
            model.roll_back(0)
            model.read(ids[:, : len(prompt)], rows=1)
        self._draft.roll_back(0)
        seconds = 0.0
        for r in text.rounds:
            base = r.context - 1
            self._target.roll_back(base)
            self._draft.roll_back(min(self._draft.length, r.context - r.backlog))
            begin = time.perf_counter()
            (self._chain if self._shape.is_chain else self._tree)(ids, base, r.context, r.drafted, r.verified)
            seconds += time.perf_counter() - begin
        return seconds

    def _chain(self, ids: torch.Tensor, base: int, context: int, drafted: int, verified: int) -> None:
        for step in range(drafted):
            start = self._draft.length if step == 0 else context + step - 1
            self._draft.read(ids[:, start : context + step], rows=1)
        self._target.read(ids[:, base : base + verified + 1])

    def _tree(self, ids: torch.Tensor, base: int, context: int, drafted: int, verified: int) -> None:
        shape, tokens, fed = self._shape, [0] * len(self._shape), [0]
        depth = next(d for d in range(shape.deepest + 1) if sum(map(len, shape.levels[1 : d + 1])) >= drafted)
        if depth:
            self._draft.read(ids[:, self._draft.length : context], rows=1)
        for level in shape.levels[1:depth]:
            rows = [row for row in level if shape.children[row]]
            self._draft.read_parts([Part(0, tokens[: len(rows)], tree=TreeRows(shape, base, fed, rows))])
            fed += rows
        rows = list(range(1 + verified))
        self._target.read_parts([Part(0, tokens[: len(rows)], tree=TreeRows(shape, base, [], rows))])


def memory(pair: Pair, prompt: list[int], bars: Bars) -> dict[str, float]:
    """Return the peak memory after a long text of few rounds, and what one of many rounds adds to it, in MiB."""
    peaks, rounds = [], []
    for length in (8, 8, 0):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        settings = Settings(0.7, LONG - len(prompt) - 16, ignore_eos=True, verification="match")
        rounds.append(len(Speculator(pair, FixedLength(length), settings).generate(prompt, 1).rounds))
        peaks.append(int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1024)
    grown = peaks[2] - peaks[1]
    met = grown <= 0.01 * peaks[1]
    more = f"{rounds[2]} rounds take {grown:+.1f} MiB more than {rounds[1]}, which take {peaks[1]:.0f}"
    print(f" {'met ' if met else 'MISS'}  peak memory: {more}")
    if not met:
        bars.missed.append(f"peak memory grows by {grown:.1f} MiB")
    return {"peak_mib": peaks[1], "grown_mib": grown}


if __name__ == "__main__":
    sys.exit(main())
