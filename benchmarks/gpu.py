"""The loop on a GPU: calls compared with the time that their bytes take, host waits, decisions, assisted generation,
costs.

    python benchmarks/gpu.py --check
    python benchmarks/gpu.py --part loops --pair DIR
    python benchmarks/gpu.py --part costs --profile h200.json

The models are Llamas of 8 and 1 billion random weights in bfloat16, created on the device. Their embedding and output
layers are permuted copies, so that each token has one successor with a large lead: the right text and the acceptance
rate are known. `--pair` adds a trained pair to the part `loops`. Without a GPU one line says so; `--smoke` then runs
tiny shapes on the CPU.

- `texts`: chains, trees and sampled texts are the known texts.
- `steps`: a call of one token takes at most 1.6 times (1B: 2 times) the time of its bytes at the bandwidth of a
  device copy.
- `decisions`: a decision adds at most 50 us, with the confidence rule and with all features.
- `loops`: the best fixed length is at least 2.5 times as fast as the best assisted setting of transformers.
- `waits`: reads of the device by the host: at most one per drafted token and two per round.
- `costs`: a profile through the loop, alone and in batches. `collection`: dense traces, anchors per second.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from harness import Run, alternate, spread
from specstop.decode import Tally, with_engine
from specstop.decode.benchmark import run_alternating
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted
from specstop.decode.models.attention import Part
from specstop.decode.models.cuda import open_cache
from specstop.decode.models.view import token_bytes
from specstop.decode.profile.measuring import Effort
from specstop.policies.contract import DraftStep, State
from specstop.policies.features import CHAIN_FEATURES
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

import specstop as ss

SHAPES = {
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "tiny target": (64, 128, 2, 4, 2, 512),
    "tiny draft": (64, 96, 1, 4, 2, 512),
    "100M": (640, 1712, 12, 10, 10, 32000),
    "18M": (256, 688, 2, 4, 4, 32000),
}
"""Hidden size, intermediate size, layers, heads, key-value heads and vocabulary; 8B and 1B are Llama 3.1 and 3.2."""

LENGTHS, AGREEMENT, LEAD = (2, 4, 6, 8), 0.8, 30.0
STEP_LIMITS = (1.6, 2.0)
"""Largest ratio of a call of one token to the time of its bytes, of the target and of the draft."""


def random_model(name: str, device: str, dtype: torch.dtype, positions: int, seed: int) -> LlamaForCausalLM:
    """Return a model with random weights, created on its device."""
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **dict(zip((*fields, "vocab_size"), SHAPES[name], strict=True)), max_position_embeddings=positions,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


@torch.no_grad()
def scripted_pair(
    names: tuple[str, str], device: str, dtype: torch.dtype, positions: int, agreement: float
) -> tuple[ss.Pair, torch.Tensor]:
    """Return a pair of two shapes and the target's successor of each token, [V].

    Layers between embedding and output take the time of trained ones and add little. The draft has the same successor for the
    share `agreement` of the tokens.
    """
    vocabulary = SHAPES[names[0]][-1]
    after = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(0))
    drawn = torch.rand(vocabulary, generator=torch.Generator().manual_seed(1))
    others = (drawn >= agreement).nonzero()[:, 0]
    draft_after = after.clone()
    draft_after[others] = after[others.roll(1)]
    models = []
    for seed, (name, successor) in enumerate(zip(names, (after, draft_after), strict=True)):
        model = random_model(name, device, dtype, positions, seed)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-3)
            layer.mlp.down_proj.weight.mul_(1e-3)
        embed = model.model.embed_tokens.weight.normal_()
        model.lm_head.weight[successor.to(device)] = embed * (LEAD / embed.shape[1])
        models.append(model)
    return ss.Pair(models[0], models[1], None, vocabulary), after


class AllFeatures(ss.StopPolicy):
    """Reads every feature of a chain and continues: the most that a decision reads of the device."""

    name, features, max_depth = "all-features", CHAIN_FEATURES, 4

    def keep(self, step: DraftStep, state: State) -> tuple[Any, State]:
        """Keep all branches."""
        return step.alive, state


@dataclass(frozen=True)
class Setup:
    """The models of a run and its sizes: prompts, their tokens, new tokens, contexts and tokens per call."""

    device: str
    dtype: torch.dtype
    names: tuple[str, str]
    prompts: int
    prompt_tokens: int
    new: int
    contexts: tuple[int, ...]
    rows: tuple[int, ...]

    @cached_property
    def scripted(self) -> tuple[ss.Pair, torch.Tensor]:
        """The pair on transformers' modules, and the successors."""
        return scripted_pair(self.names, self.device, self.dtype, max(self.contexts) + 1024, AGREEMENT)

    @cached_property
    def pair(self) -> ss.Pair:
        """The pair on our engine."""
        return with_engine(self.scripted[0])

    @cached_property
    def ids(self) -> list[list[int]]:
        """Random prompts."""
        shape = (self.prompts, self.prompt_tokens)
        rows: list[list[int]] = torch.randint(
            self.pair.vocabulary // 2, shape, generator=torch.Generator().manual_seed(2)
        ).tolist()
        return rows

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


FULL = Setup("cuda", torch.bfloat16, ("8B", "1B"), 3, 512, 192, (512, 2048, 8192), (1, 2, 3, 5, 9, 17))
TINY = Setup("cpu", torch.float32, ("tiny target", "tiny draft"), 1, 16, 24, (64,), (1, 3))
setup = FULL


def texts(run: Run) -> None:
    """Compare texts with the known ones."""
    cases = (("fixed:0", None, 0.0), ("fixed:4", None, 0.0), ("confidence:0.4", None, 0.0), ("fixed:3", "2,2,1", 0.0))
    wrong = count = 0
    for spec, tree, temperature in (*cases, ("all", None, 0.7), ("fixed:4", None, 0.0)):  # the last: recorded calls
        policy = AllFeatures() if spec == "all" else ss.load_policy(spec)
        settings = ss.Settings(temperature, setup.new, tree=tree, verification="match")
        speculator = ss.Speculator(setup.pair, policy, settings)
        for ids in setup.ids:
            token, expected = ids[-1], []
            for _ in range(setup.new):
                token = int(setup.scripted[1][token])
                expected.append(token)
            count += 1
            wrong += list(speculator.generate(ids, 1).tokens) != expected
    run.bar("wrong texts", wrong, at_most=0, always=True, note=f"of {count}")


@torch.inference_mode()
def steps(run: Run) -> None:
    """Time calls by context and tokens, on our engine and on transformers' modules."""
    count = 1 << (32 if setup.device == "cuda" else 22)
    source = torch.empty(count, dtype=torch.uint8, device=setup.device).random_()
    copy = torch.empty_like(source)
    repeats = run.choose(20, 2)
    seconds = alternate({"copy": lambda: copy.copy_(source)}, repeats, 3, setup.synchronize)["copy"]
    bandwidth = 2 * count / statistics.median(seconds)
    run.row("bandwidth of a copy, TB/s", bandwidth / 1e12)
    pairs = {"engine": setup.pair, "transformers": setup.scripted[0]}
    for at, name in enumerate(setup.names):
        models = {label: (pair.target, pair.draft_model)[at] for label, pair in pairs.items()}
        stock = models["transformers"]
        weights = sum(p.numel() for p in stock.parameters()) - stock.get_input_embeddings().weight.numel()
        for context in setup.contexts:
            floor = (weights * stock.dtype.itemsize + context * token_bytes(stock)) / bandwidth
            for rows in setup.rows:
                calls = {label: _call(model, context, rows) for label, model in models.items()}
                timed = alternate(calls, repeats, 3, setup.synchronize)
                for label, values in timed.items():
                    ratio = spread([value / floor for value in values])
                    key = f"{name}, {label}, context {context}, {rows} tokens: time of the bytes"
                    if label == "engine" and rows == 1 and context == setup.contexts[len(setup.contexts) // 2]:
                        run.bar(key, ratio, at_most=STEP_LIMITS[at], note=f"{1e3 * statistics.median(values):.3f} ms")
                    else:
                        run.row(key, ratio, f"{1e3 * statistics.median(values):.3f} ms")


def _call(model: Any, context: int, rows: int) -> Any:
    cache = open_cache(model, context + rows, model.config.vocab_size)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (1, context), generator=generator).to(setup.device)
    cache.read(tokens, 1)

    def call() -> None:
        cache.roll_back(context)
        cache.read_parts([Part(0, tokens[0, :rows])])

    return call


def decisions(run: Run) -> None:
    """Time what a policy adds to a draft step."""
    for policy in (ss.load_policy("confidence:0").limited(4), AllFeatures()):
        speculator = ss.Speculator(setup.pair, policy, ss.Settings(0.0, setup.new, ignore_eos=True))
        rounds = [r for key in range(3) for r in speculator.generate(setup.ids[0], key).rounds if key and r.decisions]
        us = spread([1e6 * r.policy_s / r.decisions for r in rounds])
        run.bar(f"decision of {policy.name}, us", us, at_most=50.0)


def loops(run: Run) -> None:
    """Compare fixed lengths with assisted generation, in alternation."""
    pairs = {"random weights": (setup.pair, setup.scripted[0])}
    if run.options.pair:
        dtype = str(setup.dtype).removeprefix("torch.")
        folders = run.options.pair / "target", run.options.pair / "draft"
        stock = ss.load_pair(*folders, device=setup.device, dtype=dtype, engine="plain")
        pairs[run.options.pair.name] = (with_engine(stock), stock)
    settings = ss.Settings(0.0, setup.new, ignore_eos=True)
    for where, (pair, stock) in pairs.items():
        methods: dict[str, Any] = {
            f"fixed:{k}": ss.Speculator(pair, ss.load_policy(f"fixed:{k}"), settings)
            for k in (0, *run.choose(LENGTHS, LENGTHS[:1]))
        }
        methods |= {one.name: Assisted(stock, one, settings) for one in (PLAIN, *run.choose(SETTINGS, SETTINGS[1:2]))}
        ids = [[token % pair.vocabulary for token in prompt] for prompt in setup.ids]
        rows = run_alternating(list(methods.values()), [(str(at), prompt) for at, prompt in enumerate(ids)])
        rates = {name: Tally(row).tokens_per_s for name, row in zip(methods, rows, strict=True)}
        for name, rate in rates.items():
            run.row(f"{where}, {name}, tokens/s", rate)
        ours = max((name for name in rates if name.startswith("fixed")), key=rates.__getitem__)
        theirs = max((name for name in rates if name.startswith("assistant")), key=rates.__getitem__)
        ratio = rates[ours] / rates[theirs]
        run.bar(f"{where}: best fixed length / best assisted", ratio, at_least=2.5, note=f"{ours} and {theirs}")


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count reads of the device, launches and waits of the block."""
    counts: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        yield counts
    for event in recorded.key_averages():
        counts["reads"] += event.count * event.key.startswith("Memcpy DtoH")
        counts["graphs"] += event.count * event.key.startswith("cudaGraphLaunch")
        counts["kernels"] += event.count * event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))


def waits(run: Run) -> None:
    """Count how often the host reads from the device in a text."""
    for policy, temperature in (
        (ss.load_policy("fixed:4"), 0.0),
        (ss.load_policy("fixed:4"), 0.7),
        (AllFeatures(), 0.7),
    ):
        settings = ss.Settings(temperature, setup.new, verification="match")
        speculator = ss.Speculator(setup.pair, policy, settings)
        for key in range(2):
            speculator.generate(setup.ids[0], key)
        with counted() as counts:
            text = speculator.generate(setup.ids[0], 2)
        drafted, rounds = sum(r.drafted for r in text.rounds), len(text.rounds)
        note = f"{drafted} drafted tokens, {rounds} rounds, {counts['kernels']} kernels, {counts['graphs']} graphs"
        limit = 4 + 2 * rounds + drafted
        run.bar(f"reads of the device, {policy.name}, T={temperature:g}", counts["reads"], at_most=limit, note=note)


def costs(run: Run) -> None:
    """Measure a profile, alone and in batches, and write it to `--profile`."""
    measured = ss.measure_profile(
        setup.pair, setup.ids, depth=6, temperature=0.7, policies=[AllFeatures()], batch=run.choose((1, 4, 16), (1, 2)),
        effort=Effort(repetitions=2) if run.smoke else Effort(budget_s=60.0), new_tokens=run.choose(48, 12),
    )  # fmt: skip
    for tokens, seconds in enumerate(measured.low.verify_s, 1):
        run.row(f"verification of {tokens} tokens, ms", 1e3 * seconds)
    for streams, points in measured.batch.low.verify_s.items():
        for tokens, seconds in points:
            run.row(f"verification of {tokens} tokens of {streams} texts, ms", 1e3 * seconds)
    for streams, seconds in measured.batch.low.draft_s:
        run.row(f"draft step of {streams} texts, ms", 1e3 * seconds)
    if run.options.profile:
        measured.save(run.options.profile)


def collection(run: Run) -> None:
    """Time dense traces."""
    options = {"temperature": 0.7, "verification": "match", "depth": 8, "max_new_tokens": setup.new}
    pair = ss.load_pair(run.pair_folder / "target", run.pair_folder / "draft", device=setup.device)
    prompts = run.prompts("train", run.choose(64, 2))
    ss.collect(pair, prompts[:2], run.folder("warm"), **options)
    begin = time.perf_counter()
    trace = ss.collect(pair, prompts, run.folder("timed"), **options)
    run.row(
        "dense traces of the shipped or given pair, anchors per second", trace.row_count / (time.perf_counter() - begin)
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this script."""
    parser.add_argument("--profile", type=Path, help="file for the profile of the part `costs`")


PARTS = {
    "texts": texts, "steps": steps, "decisions": decisions, "loops": loops, "waits": waits, "costs": costs,
    "collection": collection,
}  # fmt: skip

if __name__ == "__main__":
    run = Run(__doc__, PARTS, add_options)
    if torch.cuda.is_available():
        raise SystemExit(run.execute())
    print("skipped: there is no CUDA device" + ("; tiny models run on the CPU instead" if run.smoke else ""))
    setup = TINY
    raise SystemExit(run.execute() if run.smoke else 0)
