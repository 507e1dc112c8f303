"""Speed on the CPU: the loop compared with assisted generation, decisions, memory and start-up.

    python benchmarks/speed.py --check
    python benchmarks/speed.py --part loop --pair DIR --temperatures 0
    python benchmarks/tools/ab.py main . speed.py --key '*warm*' -- --part decisions

- `loop`: fixed lengths and trees compared with `generate` of transformers and its assisted settings, alternating per
  prompt. The best fixed length is at least 2.3 times as fast as the best assisted setting, and 2.0 times with a draft
  that is disturbed until it is right every other time. At most 12% of a round is outside of model calls and policy,
  and the same forward passes with nothing between them take at least 85% of the time of the loop.
- `decisions`: microseconds of one decision with its features, by policy, size of the vocabulary and state of the
  caches.
- `memory`: a text of many rounds takes at most 1% more memory than a text of few rounds.
- `startup`: seconds of commands, of imports, and of the numba kernels with an empty and with a full cache.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness import Run, alternate, peak_mib, spread
from specstop.decode import Generation, Tally, stream_key
from specstop.decode.benchmark import bench_line, run_alternating, speed_ratio
from specstop.decode.feature_reader import FeatureReader
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.prompts import encode_prompts
from specstop.decode.round_state import DraftScores, RoundState
from specstop.decode.texts import Anchor
from specstop.decode.topology import Topology, chain
from specstop.policies.contract import DraftStep, RoundOutcome
from specstop.policies.features import History
from specstop.policies.host import PolicyHost
from specstop.policies.registry import BUILTINS
from specstop.policies.rules import Threshold
from transformers import AutoModelForCausalLM

import specstop as ss

LENGTHS, TREES, FLOOR_TREE = (2, 3, 4, 6, 8), ("2,1", "2,2,1,1", "4,2,1", "fork:2x4"), "2,2,1,1"
ASSISTED, ASSISTED_WEAKER, OUTSIDE, FLOOR = 2.3, 2.0, 0.12, 0.85
SCREEN, FINALISTS = 6, 2
"""Prompts that every method decodes; the fastest methods of each kind then decode the others."""

DECISION_US, RULE_US, ROUND_US = {3072: 18.0, 32000: 60.0}, 12.0, 15.0
MEGABYTES = {"warm": 0, "cold": 9, "colder": 45}
"""Megabytes of a matrix product between two decisions: none, a small draft step, a target call."""

LONG = 2048
Prompts = Sequence[tuple[str, Sequence[int]]]


def loop(run: Run) -> None:
    """Compare the loop with assisted generation, on the pair and on one with a disturbed draft."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {run.pair_folder.name: (run.pair_folder, ASSISTED)}
        if not run.smoke and run.options.pair is None:
            folders["disturbed draft"] = (disturbed_pair(run, Path(folder)), ASSISTED_WEAKER)
        for name, (where, required) in folders.items():
            pair, stock = (
                ss.load_pair(where / "target", where / "draft", engine=engine) for engine in ("auto", "plain")
            )
            prompts = encode_prompts(pair, run.prompts("test", run.choose(20, 2)))
            for temperature in run.temperatures:
                _contest(run, f"{name}, T={temperature:g}", pair, stock, prompts, temperature, required)


def _contest(
    run: Run, where: str, pair: ss.Pair, stock: ss.Pair, prompts: Prompts, temperature: float, required: float
) -> None:
    new, lengths, trees = run.choose(128, 12), run.choose(LENGTHS, LENGTHS[1:3]), run.choose(TREES, TREES[1:2])
    assisted = run.choose(SETTINGS, SETTINGS[1:2])

    def settings(tree: str | None = None) -> ss.Settings:
        return ss.Settings(temperature, new, tree=tree, verification="match")

    kinds: dict[str, dict[str, Any]] = {
        "plain": {"plain": ss.Speculator(pair, ss.load_policy("fixed:0"), settings())},
        "fixed": {f"fixed:{k}": ss.Speculator(pair, ss.load_policy(f"fixed:{k}"), settings()) for k in lengths},
        "tree": {
            tree: ss.Speculator(pair, ss.load_policy(f"fixed:{ss.parse_tree(tree).deepest}"), settings(tree))
            for tree in trees
        },
        "generate": {PLAIN.name: Assisted(stock, PLAIN, settings())},
        "assisted": {one.name: Assisted(stock, one, settings()) for one in assisted},
    }
    methods = {name: method for kind in kinds.values() for name, method in kind.items()}
    texts = dict(zip(methods, run_alternating(list(methods.values()), prompts[:SCREEN]), strict=True))
    fastest = {
        kind: sorted(names, key=lambda name: -speed_ratio(texts[name], texts["plain"]).value)[:FINALISTS]
        for kind, names in kinds.items()
    }
    finalists = [name for names in fastest.values() for name in names]
    if prompts[SCREEN:]:
        rows = run_alternating([methods[name] for name in finalists], prompts[SCREEN:])
        for name, row in zip(finalists, rows, strict=True):
            texts[name] += row
    for name, row in texts.items():
        line = bench_line(name, row, texts["plain"][: len(row)])
        run.row(
            f"{where}, {name}: of plain decoding", line.ratio, f"{line.tokens_per_s:.1f} tokens/s, {len(row)} prompts"
        )
    ours, tree, theirs = (
        max(fastest[kind], key=lambda name: Tally(texts[name]).tokens_per_s) for kind in ("fixed", "tree", "assisted")
    )
    ratio = speed_ratio(texts[ours], texts[theirs])
    accepted = [r.accepted > 0 for text in texts[ours] for r in text.rounds if r.verified]
    note = f"{ours} and {theirs}, P(A >= 1) {statistics.fmean(accepted):.2f}"
    run.bar(f"{where}: best fixed length / best assisted", ratio, at_least=required, note=note)
    for name in dict.fromkeys((ours, FLOOR_TREE, tree)):
        tally = Tally(texts[name])
        share = sum(r.outside_s for r in tally.rounds) / sum(r.seconds for r in tally.rounds)
        if name != tree:
            run.bar(f"{where}, {name}: outside models and policy", share, at_most=OUTSIDE)
            shape = chain(int(name[6:])) if name == ours else ss.parse_tree(name)
            bare = BareForwards(pair, shape)
            bare.play(prompts[0][1], texts[name][0])
            seconds = sum(bare.play(ids, text) for (_, ids), text in zip(prompts, texts[name], strict=False))
            floor = seconds / sum(r.seconds for text in texts[name] for r in text.rounds)
            run.bar(f"{where}, {name}: bare forward passes / loop", floor, at_least=FLOOR)


class BareForwards:
    """The forward passes of decoded texts, and nothing else."""

    def __init__(self, pair: ss.Pair, shape: Topology) -> None:
        self._shape = shape
        self._target, self._draft = (CachedModel(m, LONG, pair.vocabulary) for m in (pair.target, pair.draft_model))

    @torch.inference_mode()
    def play(self, prompt: Sequence[int], text: Generation) -> float:
        """Return the seconds of the forward passes of all rounds."""
        ids = torch.tensor([[*prompt, *text.tokens, *([0] * len(self._shape))]])
        for model in (self._target, self._draft):
            model.roll_back(0)
            model.read(ids[:, : len(prompt)], rows=1)
        self._draft.roll_back(0)
        seconds = 0.0
        for r in text.rounds:
            base = r.context - 1
            self._target.roll_back(base)
            self._draft.roll_back(min(self._draft.lengths[0], r.context - r.backlog))
            begin = time.perf_counter()
            (self._chain if self._shape.is_chain else self._tree)(ids, base, r.context, r.drafted, r.verified)
            seconds += time.perf_counter() - begin
        return seconds

    def _chain(self, ids: torch.Tensor, base: int, context: int, drafted: int, verified: int) -> None:
        for step in range(drafted):
            start = self._draft.lengths[0] if step == 0 else context + step - 1
            self._draft.read(ids[:, start : context + step], rows=1)
        self._target.read(ids[:, base : base + verified + 1])

    def _tree(self, ids: torch.Tensor, base: int, context: int, drafted: int, verified: int) -> None:
        shape, tokens, fed = self._shape, [0] * len(self._shape), [0]
        depth = next(d for d in range(shape.deepest + 1) if sum(map(len, shape.levels[1 : d + 1])) >= drafted)
        if depth:
            self._draft.read(ids[:, self._draft.lengths[0] : context], rows=1)
        for level in shape.levels[1:depth]:
            rows = [row for row in level if shape.children[row]]
            self._draft.read_parts([Part(0, tokens[: len(rows)], tree=TreeRows(shape, base, fed, rows))])
            fed += rows
        rows = list(range(1 + verified))
        self._target.read_parts([Part(0, tokens[: len(rows)], tree=TreeRows(shape, base, [], rows))])


def disturbed_pair(run: Run, folder: Path) -> Path:
    """Write the pair with noise on the draft's weights, so much that P(A >= 1) is between 0.5 and 0.58."""
    for path in run.pair_folder.iterdir():
        if path.name != "draft":
            (folder / path.name).symlink_to(path.resolve())
    scale, low, high = 0.0, 0.0, 1.0
    for _ in range(12):
        draft = AutoModelForCausalLM.from_pretrained(run.pair_folder / "draft", dtype=torch.float32)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in draft.parameters():
                if weight.dim() > 1:
                    weight.add_(scale * weight.std() * torch.randn(weight.shape, generator=generator))
        draft.save_pretrained(folder / "draft")
        for path in (run.pair_folder / "draft").glob("tokenizer*"):
            (folder / "draft" / path.name).write_bytes(path.read_bytes())
        pair = ss.load_pair(folder / "target", folder / "draft")
        texts = ss.decode(pair, run.prompts("train", 24), "fixed:1", settings=ss.Settings(max_new_tokens=128))
        rounds = [r for text in texts for r in text.rounds if r.verified]
        rate = sum(r.accepted > 0 for r in rounds) / len(rounds)
        if 0.5 <= rate <= 0.58:
            return folder
        low, high = (scale, high) if rate > 0.58 else (low, scale)
        scale = (low + high) / 2.0
    raise RuntimeError("no noise on the draft's weights gives P(A >= 1) between 0.5 and 0.58")


def decisions(run: Run) -> None:
    """Time decisions of trained heads and of the confidence rule, and deciding and observing of every built-in rule."""
    torch.set_num_threads(1)
    traces = run.traces("decisions", {"train": run.choose(40, 5)}, depth=6, max_new_tokens=run.choose(96, 16))["train"]
    profile = run.profile(prompts=4, depth=6, new_tokens=run.choose(24, 8))
    policies = {"confidence": ss.load_policy("confidence:0.4")}
    for head in run.choose(("logistic", "mlp", "xgboost"), ("logistic",)):
        # The rule decides from depth 1 on: a derived rule may begin later.
        policies[head] = ss.train(traces, profile, head=head).policy.with_rule(Threshold("survival", 0.3))
    for name, policy in policies.items():
        for size, limit_us in DECISION_US.items():
            for temperature in run.choose((0.0, 0.7), (0.0,)):
                for caches, megabytes in list(MEGABYTES.items())[: run.choose(None, 1)]:
                    us = decision_us(policy, size, megabytes, run.choose(400, 20), temperature)
                    label = f"decision, {name}, {size} logits, T={temperature:g}, {caches}, us"
                    if caches == "warm" and temperature == 0.0 and (name != "confidence" or size == 3072):
                        run.bar(label, us, at_most=RULE_US if name == "confidence" else limit_us)
                    else:
                        run.row(label, us)
    for spec in BUILTINS:
        if spec != "fixed":
            run.bar(
                f"keep and observe, {spec}, us", round_us(ss.load_policy(spec), run.choose(2000, 30)), at_most=ROUND_US
            )


@torch.inference_mode()
def decision_us(policy: ss.StopPolicy, vocabulary: int, megabytes: int, count: int, temperature: float) -> float:
    """Return the median microseconds of one decision at depth 1 with its features, as the loop calls the policy."""
    generator = torch.Generator().manual_seed(0)
    tree, host = chain(2), PolicyHost(policy)
    reader = FeatureReader(policy, tree, temperature)
    yes, one = np.array([True]), np.ones((1, 1), dtype=bool)
    history = History.start(1).after(RoundOutcome(yes, np.array([3]), np.array([3]), np.array([2]), ~yes, np.zeros(1)))
    host.state, text = np.full((1, 1), 0.9), SimpleNamespace(tokens=[0, 0])
    noise = -torch.rand(1, vocabulary, generator=generator).log_().neg_().log_()
    rows = [3 * torch.randn(1, vocabulary, generator=generator) for _ in range(8)]
    scratch = torch.ones(512 * megabytes, 512) if megabytes else None
    seconds = []
    for number in range(count):
        state = RoundState(tree, one[0], np.ones(1, dtype=np.int64), np.ones(1, dtype=np.int64))
        row = rows[number % 8]
        state.texts, state.anchors = [text], [Anchor(row, 0, None)]
        reader.begin(state)
        reader.step(0, one, history)  # the ANCHOR and HISTORY columns
        if scratch is not None:
            scratch @ scratch[:8].T
        scores = torch.log_softmax(row / temperature, -1) + noise if temperature else row
        state.tokens[0, :2] = 0, int(scores.argmax(-1))  # the loop draws right before it calls the policy
        begin = time.perf_counter()
        reader.drawn(1, [DraftScores([(0, [0])], [1], row, scores=scores)])
        host.keep(reader.step(1, one, history))
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def round_us(policy: ss.StopPolicy, count: int) -> float:
    """Return the median microseconds of one `keep` and one `observe`, without features."""
    features = np.full((1, 1, len(policy.features)), 0.5, dtype=np.float32)
    alive, parent, one = np.ones((1, 1), dtype=bool), np.zeros((1, 1), dtype=np.int64), np.ones(1, dtype=np.int64)
    step = DraftStep(max(policy.first, 1), alive, parent, features, {}, np.zeros(1, dtype=np.int64))
    outcome = RoundOutcome(np.ones(1, dtype=bool), 2 * one, 2 * one, one, np.zeros(1, dtype=bool), np.full(1, 0.01))
    state, seconds = policy.start(1, np.zeros(1, dtype=np.int64)), []
    for _ in range(count):
        begin = time.perf_counter()
        _, state = policy.keep(step, state)
        state = policy.observe(outcome, state)
        seconds.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(seconds)


def memory(run: Run) -> None:
    """Compare the peak memory of a long text of many rounds with that of few rounds."""
    (ids,) = run.ids("test", 1)
    settings = ss.Settings(0.7, run.choose(LONG - len(ids) - 16, 32), ignore_eos=True, verification="match")

    def decode(length: int) -> None:
        ss.Speculator(run.pair, ss.load_policy(f"fixed:{length}"), settings).generate(ids, stream_key(0, "memory"))

    peaks = [peak_mib(partial(decode, length)) for length in (8, 8, 0)]
    grown = (peaks[2] - peaks[1]) / peaks[1]
    run.bar("peak memory, many rounds over few rounds", grown, at_most=0.01, note=f"{peaks[1]:.0f} MiB")


def startup(run: Run) -> None:
    """Time commands, the import of the policies, and the kernels."""
    command = "import sys; from specstop.cli.main import run; sys.argv[0] = 'specstop'; run()"
    refused = ["collect", "--target", "missing", "--draft", "missing", "--prompts", "missing.jsonl", "--out", "missing"]
    cases: dict[str, tuple[Sequence[str], float]] = {
        "specstop --help": (["-c", command, "--help"], 0.5),
        "specstop policies": (["-c", command, "policies"], 0.5),
        "specstop collect with a missing file": (["-c", command, *refused], 1.0),
        "import specstop.policies": (["-c", "import specstop.policies, sys; assert 'torch' not in sys.modules"], 0.5),
    }
    timed = alternate({name: _process(words) for name, (words, _) in cases.items()}, run.choose(7, 1), run.choose(1, 0))
    for name, (_, limit_s) in cases.items():
        run.bar(f"{name}, seconds", spread(timed[name]), at_most=limit_s)
    kernels = ["-c", "from specstop.policies.kernels import load; load()"]
    if run.smoke:
        return  # compiling takes up to 20 s
    with tempfile.TemporaryDirectory() as cache:
        fresh = alternate({"compiled": _process(kernels, NUMBA_CACHE_DIR=cache)}, 1, warm_up=0)["compiled"]
        cached = alternate({"cached": _process(kernels, NUMBA_CACHE_DIR=cache)}, 5)["cached"]
    run.bar("kernels compiled, seconds", fresh[0], at_most=20.0)
    run.bar("kernels from the cache, seconds", spread(cached), at_most=1.5)


def _process(words: Sequence[str], **environment: str) -> Callable[[], object]:
    """Return a function that runs Python with these arguments."""
    return lambda: subprocess.run([sys.executable, *words], capture_output=True, env={**os.environ, **environment})


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [loop, decisions, memory, startup]).execute())
