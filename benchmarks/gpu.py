"""The loop on a GPU: calls compared with the time that their bytes take, waits, decisions, assisted generation, batches.

    python benchmarks/gpu.py --check --out gpu.md
    python benchmarks/gpu.py --part loops --pair DIR

The models are Llamas of 8 and 1 billion random weights in bfloat16, created on the device. Their embedding and output
layers are permuted copies, so that each token has one successor with a large lead: the right text and the acceptance
rate are known. The draft is unsure where it errs, as a trained one is. `--pair` adds a trained pair to the part
`loops`. All parts take at most 12 minutes. Without a GPU one line says so; `--smoke` then runs tiny shapes on the CPU.

- `texts`: chains, trees and sampled texts are the known texts.
- `steps`: a call of one token takes at most 1.25 times (1B: 1.6 times) the time of its bytes at the bandwidth of a
  device copy.
- `decisions`: the confidence rule, a logistic head and all features add at most 60 us to a draft step of a fixed length.
- `waits`: waits of the host: one per round for a fixed length, one more if a head decides on the GPU, else one per step.
- `loops`: the best fixed length is at least 4 times as fast as the best assisted setting of transformers; policies on
  the same scripted acceptance; no call is recorded while it is timed.
- `batches`: 1, 8 and 32 texts side by side, and the memory of the device.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from harness import Run, alternate, spread
from specstop.decode import Tally, with_engine
from specstop.decode.benchmark import run_alternating
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted
from specstop.decode.models.attention import Part
from specstop.decode.models.cuda import open_cache
from specstop.decode.models.view import token_bytes
from specstop.policies.contract import DraftStep, State
from specstop.policies.features import CHAIN_FEATURES
from specstop.policies.heads.layers import LinearHead
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Threshold
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import specstop as ss

SHAPES = {
    "8B": (4096, 14336, 32, 32, 8, 128256),
    "1B": (2048, 8192, 16, 32, 8, 128256),
    "tiny target": (64, 128, 2, 4, 2, 512),
    "tiny draft": (64, 96, 1, 4, 2, 512),
}
"""Hidden size, intermediate size, layers, heads, key-value heads and vocabulary; 8B and 1B are Llama 3.1 and 3.2."""

LENGTHS, AGREEMENT, LEAD = (2, 4, 6, 8), 0.8, 30.0
STEP_LIMITS = (1.25, 1.6)
"""Largest ratio of a call of one token to the time of its bytes, of the target and of the draft."""


def random_model(name: str, device: str, dtype: torch.dtype, positions: int, seed: int) -> LlamaForCausalLM:
    """Return a model with random weights, created on its device."""
    fields = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = LlamaConfig(
        **dict(zip((*fields, "vocab_size"), SHAPES[name], strict=True)), max_position_embeddings=positions,
        bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


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
        if seed:  # a small lead is a small probability
            model.lm_head.weight[draft_after[others].to(device)] *= 0.25
        models.append(model)
    return ss.Pair(models[0], models[1], None, vocabulary), after


class AllFeatures(ss.StopPolicy):
    """Reads every feature of a chain and continues: the most that a decision reads of the device."""

    name, features, max_depth = "all-features", CHAIN_FEATURES, 4

    def keep(self, step: DraftStep, state: State) -> tuple[Any, State]:
        """Keep all branches."""
        return step.alive, state


def logistic(threshold: float = 0.5, deepest: int = 8) -> ss.StopPolicy:
    """Return a learned policy: a logistic head on the probability of the drawn token, with a threshold."""
    numbers = {"mean": [0, 0], "scale": [1, 1], "weight": [[0, 1]] * 3, "bias": [0] * 3}
    head = LinearHead(("drawn_prob",), {name: np.array(value, dtype=np.float32) for name, value in numbers.items()})
    rule = Threshold("step", threshold)
    return LearnedPolicy("logistic", ("drawn_prob",), head, Calibrator(), Calibrator(), rule, deepest)


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


FULL = Setup("cuda", torch.bfloat16, ("8B", "1B"), 2, 512, 96, (512, 2048, 8192), (1, 2, 3, 5, 9, 17))
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
    """Time what a policy that never stops adds to each draft step of a fixed length."""
    never = ss.load_policy("confidence:0").limited(4), logistic(0.0, 4), AllFeatures()
    settings = ss.Settings(0.0, setup.new, ignore_eos=True)
    methods = {one.name: ss.Speculator(setup.pair, one, settings) for one in (ss.load_policy("fixed:4"), *never)}
    drafted = {sum(r.drafted for r in method.generate(setup.ids[0], 1).rounds) for method in methods.values()}
    run.bar("drafted tokens of policies that never stop", len(drafted), at_most=1, always=True)
    calls = {name: partial(method.generate, setup.ids[0], 1) for name, method in methods.items()}
    fixed, *others = alternate(calls, run.choose(7, 2), 2, setup.synchronize).values()
    run.row("fixed:4, ms per drafted token", spread([1e3 * s / max(drafted) for s in fixed]))
    for policy, seconds in zip(never, others, strict=True):
        us = [1e6 * (one - base) / max(drafted) for one, base in zip(seconds, fixed, strict=True)]
        run.bar(f"decision of {policy.name}, us", spread(us), at_most=60.0)


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
        specs = [*(f"fixed:{k}" for k in (0, *run.choose(LENGTHS, LENGTHS[:1]))), "confidence:0.4"]
        policies = [*map(ss.load_policy, specs), logistic()]
        methods: dict[str, Any] = {one.name: ss.Speculator(pair, one, settings) for one in policies}
        methods |= {one.name: Assisted(stock, one, settings) for one in (PLAIN, *run.choose(SETTINGS, SETTINGS[1:2]))}
        prompts = [(str(at), [token % pair.vocabulary for token in ids]) for at, ids in enumerate(setup.ids)]
        rows = run_alternating(list(methods.values()), prompts, recordings=(counts := Counter[int]()))
        rates = {name: Tally(row).tokens_per_s for name, row in zip(methods, rows, strict=True)}
        for name, rate in rates.items():
            run.row(f"{where}, {name}, tokens/s", rate)
        ours = max((name for name in rates if name.startswith("fixed")), key=rates.__getitem__)
        theirs = max((name for name in rates if name.startswith("assistant")), key=rates.__getitem__)
        ratio = rates[ours] / rates[theirs]
        run.bar(f"{where}: best fixed length / best assisted", ratio, at_least=4.0, note=f"{ours} and {theirs}")
        for policy in policies[-2:]:
            run.row(f"{where}: {policy.name} / best fixed length", rates[policy.name] / rates[ours])
        run.bar(f"{where}: calls recorded while timed", sum(counts.values()), at_most=0, always=True)


def batches(run: Run) -> None:
    """Decode texts side by side."""
    settings = ss.Settings(0.0, setup.new, ignore_eos=True)
    for size in run.choose((1, 8, 32), (1, 2)):
        methods = [ss.Speculator(setup.pair, ss.load_policy(f"fixed:{k}"), settings, batch=size) for k in (0, 4)]
        prompts = [(str(at), setup.ids[at % len(setup.ids)]) for at in range(2 * size)]
        plain, drafted = run_alternating(methods, prompts, batch=size, recordings=(counts := Counter[int]()))
        rates = [Tally(texts).tokens_per_s for texts in (plain, drafted)]
        run.row(f"batch {size}: fixed:4, tokens/s", rates[1], f"{rates[1] / rates[0]:.2f} times plain decoding")
        run.bar(f"batch {size}: calls recorded while timed", sum(counts.values()), at_most=0, always=True)
    if setup.device == "cuda":
        run.row("largest memory of the device, GB", torch.cuda.max_memory_allocated() / 1e9)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count waits for the device and launches of the block."""
    counts: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.device == "cuda" else [])]
    with profile(activities=activities) as recorded:
        yield counts
    waits = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"
    names = {"waits": waits, "graphs": "cudaGraphLaunch", "kernels": ("cudaLaunchKernel", "cuLaunchKernel")}
    for event in recorded.key_averages():
        for name, prefix in names.items():
            counts[name] += event.count * event.key.startswith(prefix)


def waits(run: Run) -> None:
    """Count how often the host waits for the device in a text, the prompt and the profiler included."""
    cases = [("fixed:4", 0.0, "match"), ("fixed:4", 0.7, "match"), ("fixed:4", 0.7, "block"), ("all", 0.7, "match")]
    for spec, temperature, mode in (*cases, ("logistic", 0.7, "match"), ("logistic", 0.7, "block")):
        policy = {"all": AllFeatures(), "logistic": logistic()}.get(spec) or ss.load_policy(spec)
        speculator = ss.Speculator(setup.pair, policy, ss.Settings(temperature, setup.new, verification=mode))
        for key in (2, 2):  # records the calls
            speculator.generate(setup.ids[0], key)
        with counted() as counts:
            text = speculator.generate(setup.ids[0], 2)
        drafted, rounds = sum(r.drafted for r in text.rounds), len(text.rounds)
        note = f"{drafted} drafted tokens, {rounds} rounds, {counts['kernels']} kernels, {counts['graphs']} graphs"
        limit = 8 + rounds + {"all": drafted, "logistic": rounds}.get(spec, 0)
        run.bar(f"waits, {spec}, T={temperature:g}, {mode}", counts["waits"], at_most=limit, note=note)


if __name__ == "__main__":
    run = Run(__doc__, [texts, steps, decisions, waits, loops, batches])
    if torch.cuda.is_available() or run.smoke:
        setup = FULL if torch.cuda.is_available() else TINY
        raise SystemExit(run.execute())
    print("skipped: there is no CUDA device")
