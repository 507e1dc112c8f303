"""What a GPU does with the loop: time against the bytes that it reads, launches, what the host waits for, and equal texts.

    python benchmarks/gpu.py --check
    python benchmarks/gpu.py --pair DIR
    python benchmarks/gpu.py --part costs --profile h100.json

Models of 8 and 1 billion weights in bfloat16 with the shapes of Llama 3, made on the device: random weights, whose texts
and acceptance are scripted (`shapes.py`). `--pair` adds a trained pair to the comparison of loops. Part `costs` writes what
rounds cost, alone and side by side, as a profile: what any policy would gain on this GPU is then `evaluate --profile`.
Without a GPU there is nothing to check; `--quick` then runs tiny shapes on the CPU. The last line is one JSON object.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bars import Bars, arguments
from calls.steps import Size, bandwidth, steps
from shapes import SHAPES, random_model, right_text, scripted_pair
from specstop.collect.dense import DenseCollector
from specstop.collect.schema import PromptTask
from specstop.decode import (
    Generation,
    Pair,
    Settings,
    Speculator,
    load_pair,
    with_engine,
)
from specstop.decode.benchmark import run_alternating
from specstop.decode.hf.baseline import PLAIN, SETTINGS, Assisted
from specstop.decode.models import cache as cache_module
from specstop.decode.models.attention import Part
from specstop.decode.models.cuda import KEPT, open_cache
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies import FixedLength
from specstop.policies.contract import DraftStep, State, StopPolicy
from specstop.policies.display import silent
from specstop.policies.features import CHAIN_FEATURES
from specstop.policies.fixed import Confidence
from torch.profiler import ProfilerActivity, profile

LENGTHS = (2, 4, 6, 8)
PARTS = ("texts", "steps", "decisions", "loops", "costs", "collection", "flips", "waits")
BATCHES, COSTS_S = (1, 4, 16), 60.0
AGREEMENT = 0.8


FULL = Size(("8B", "1B"), "cuda", torch.bfloat16, (512, 2048, 8192), (1, 2, 3, 5, 9, 17), 512, 192, 3, 20)
TINY = Size(("tiny target", "tiny draft"), "cpu", torch.float32, (64, 300), (1, 3), 16, 24, 1, 2)


class AllFeatures(StopPolicy):
    """Reads every feature of a chain and drafts on: the most that a decision can ask of the device."""

    name, features, max_depth = "all-features", CHAIN_FEATURES, 4

    def keep(self, step: DraftStep, state: State) -> tuple[Any, State]:
        """Keep all."""
        return step.alive, state


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, pair="folder of a trained pair, beside the shapes")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to run; a check needs all")
    parser.add_argument("--profile", type=Path, help="where part `costs` writes the profile")
    parser.add_argument("--prompts", type=int, help="how many are decoded; a check needs 3")
    parser.add_argument("--tokens", type=int, help="new tokens of a text; a check needs 192")
    options = parser.parse_args()
    bars, gpu = Bars(), torch.cuda.is_available()
    size = TINY if options.quick and not gpu else FULL
    size = dataclasses.replace(size, prompts=options.prompts or size.prompts, tokens=options.tokens or size.tokens)
    bars.figures["device"] = torch.cuda.get_device_name() if gpu else "cpu"
    if not gpu:
        print("no CUDA device: nothing here can be checked" + ("; tiny shapes run on the CPU" * options.quick))
        if not options.quick:
            return bars.finish(options, "nothing", whole=False)
    rate = bandwidth(size)
    bars.figures["bandwidth_tb_s"] = rate / 1e12
    plain, after = scripted_pair(size.pair, size.device, size.dtype, max(size.contexts) + 1024, AGREEMENT)
    pair = with_engine(plain)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(pair.vocabulary, (size.prompt,), generator=generator).tolist() for _ in range(size.prompts)
    ]
    if "texts" in options.part:
        equal_texts(pair, after, prompts, size, bars)
    if "steps" in options.part:
        steps(pair.target, plain.target, size.pair[0], size, rate, 1.6, bars)
        steps(pair.draft_model, plain.draft_model, size.pair[1], size, rate, 2.0, bars)
    if "decisions" in options.part:
        decisions(pair, prompts[0], size, bars)
    if "loops" in options.part:
        loops(pair, plain, prompts, size, "shapes", bars)
        if options.pair:
            folders = options.pair / "target", options.pair / "draft"
            trained = load_pair(*folders, device=size.device, dtype=dtype_name(size), engine="plain")
            loops(with_engine(trained), trained, prompts_of(trained, size), size, options.pair.name, bars)
    if "costs" in options.part:
        costs(pair, prompts, size, options.profile, bars)
    if "collection" in options.part:
        collection(pair, prompts, size, bars)
    if "waits" in options.part:
        waits(pair, prompts[0], size, bars)
    del pair, plain
    if "flips" in options.part:
        flips(size, bars)
    whole = size == FULL and not set(PARTS) - set(options.part)
    return bars.finish(options, f"{' and '.join(size.pair)} on {bars.figures['device']}", whole=whole)


def dtype_name(size: Size) -> str:
    """Return the type as `--dtype` has it."""
    return str(size.dtype).removeprefix("torch.")


def prompts_of(pair: Pair, size: Size) -> list[list[int]]:
    """Return prompts of any tokens that a pair knows."""
    generator = torch.Generator().manual_seed(3)
    shape = (size.prompts, min(size.prompt, 256))
    rows: list[list[int]] = torch.randint(pair.vocabulary // 2, shape, generator=generator).tolist()
    return rows


def equal_texts(pair: Pair, after: torch.Tensor, prompts: Sequence[list[int]], size: Size, bars: Bars) -> None:
    """Check texts that are known beforehand: by length, as a tree, sampled, and from recordings of an earlier loop."""
    wrong, count = 0, 0
    for policy, tree, temperature in (
        (FixedLength(0), None, 0.0),
        (FixedLength(4), None, 0.0),
        (Confidence(0.4, 6), None, 0.0),
        (AllFeatures(), None, 0.7),
        (FixedLength(3), "2,2,1", 0.0),
        (FixedLength(4), None, 0.0),
    ):
        speculator = Speculator(pair, policy, Settings(temperature, size.tokens, tree=tree, verification="match"))
        for prompt in prompts:
            count += 1
            wrong += list(speculator.generate(prompt, 1).tokens) != right_text(after, prompt, size.tokens)
    bars.add("wrong texts", wrong, wrong == 0, f"{wrong} of {count}; none")


def loops(pair: Pair, plain: Pair, prompts: Sequence[list[int]], size: Size, where: str, bars: Bars) -> None:
    """Compare fixed lengths of the loop with transformers' settings on the `plain` pair, in alternation."""
    runs: dict[str, Any] = {
        f"fixed:{k}": Speculator(pair, FixedLength(k), Settings(0.0, size.tokens, ignore_eos=True))
        for k in (0, *LENGTHS)
    }
    settings = (PLAIN, *SETTINGS) if size.device == "cuda" else (PLAIN, SETTINGS[1])
    runs |= {
        setting.name: Assisted(plain, setting, Settings(0.0, size.tokens, ignore_eos=True)) for setting in settings
    }
    named = [(str(number), prompt) for number, prompt in enumerate(prompts)]
    texts = dict(zip(runs, run_alternating(list(runs.values()), named), strict=True))
    speeds = {name: sum(len(g.tokens) for g in row) / sum(g.seconds for g in row) for name, row in texts.items()}
    print(f"\n{where}: tokens/s")
    for name, speed in speeds.items():
        print(f"  {name:<26}{speed:>9.1f}{shares(texts[name])}")
    ours = max((name for name in speeds if name.startswith("fixed:")), key=speeds.__getitem__)
    theirs = max((name for name in speeds if name.startswith("assistant")), key=speeds.__getitem__)
    ratio = speeds[ours] / speeds[theirs]
    bars.figures[f"{where}, tokens_per_s"] = speeds
    if size.device == "cuda":
        text = f"{ratio:.2f} ({ours} over {theirs}); at least 2.5"
        bars.add(f"{where}, best fixed over best assisted", ratio, ratio >= 2.5, text)


def shares(texts: Sequence[Generation]) -> str:
    """Return the milliseconds of a round by phase, and the acceptance, as text."""
    rounds = [r for g in texts for r in g.rounds]
    if not rounds:
        return ""
    parts = ("first_draft_s", "draft_s", "verify_s", "policy_s", "outside_s")
    means = ", ".join(
        f"{p.removesuffix('_s')} {1e3 * statistics.fmean(getattr(r, p) for r in rounds):.2f}" for p in parts
    )
    return f"  ms a round: {means}; {sum(r.committed for r in rounds) / len(rounds):.2f} tokens"


@contextlib.contextmanager
def counted(device: str) -> Iterator[Counter[str]]:
    """Count launches and waits of the block."""
    count: Counter[str] = Counter()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as seen:
        yield count
    for event in seen.key_averages():
        kinds = {
            "reads": event.key.startswith("Memcpy DtoH"),
            "waits": event.key in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"),
            "kernels": event.key.startswith(("cudaLaunchKernel", "cuLaunchKernel")),
            "graphs": event.key.startswith("cudaGraphLaunch"),
            "copies": event.key.startswith("cudaMemcpy"),
            "item": event.key == "aten::_local_scalar_dense",
        }
        for kind, counts in kinds.items():
            count[kind] += event.count * counts


def waits(pair: Pair, prompt: list[int], size: Size, bars: Bars) -> None:
    """Count what the host waits for and launches in a text, by drafted token and round."""
    found = bars.figures["waits"] = {}
    for policy, temperature in ((FixedLength(4), 0.0), (FixedLength(4), 0.7), (AllFeatures(), 0.7)):
        speculator = Speculator(pair, policy, Settings(temperature, size.tokens, verification="match"))
        for key in range(2):
            speculator.generate(prompt, key)
        with counted(size.device) as count:
            text = speculator.generate(prompt, 2)
        drafted, rounds = sum(r.drafted for r in text.rounds), len(text.rounds)
        name = f"{policy.name} at T={temperature:g}"
        found[name] = {"drafted": drafted, "rounds": rounds, **count}
        allowed = 4 + 2 * rounds + drafted
        said = ", ".join(f"{n} {kind}" for kind, n in count.items())
        text_ = f"{said} over {drafted} drafted tokens and {rounds} rounds; at most {allowed} reads"
        if size.device == "cuda":
            bars.add(f"reads, {name}", count["reads"], count["reads"] <= allowed, text_)
        else:
            print(f"{name}: {text_}")


def decisions(pair: Pair, prompt: list[int], size: Size, bars: Bars) -> None:
    """Time what a policy adds to a draft step."""
    for policy in (Confidence(0.0, 4), AllFeatures()):
        speculator = Speculator(pair, policy, Settings(0.0, size.tokens, ignore_eos=True))
        rounds = [r for key in range(3) for r in speculator.generate(prompt, key).rounds if key and r.decisions]
        seconds = statistics.median(r.policy_s / r.decisions for r in rounds)
        text = f"{1e6 * seconds:.0f} us; at most 50"
        if size.device == "cuda":
            bars.add(f"a decision of {policy.name}", 1e6 * seconds, seconds <= 50e-6, text)
        else:
            print(f"a decision of {policy.name}: {text}")


def costs(pair: Pair, prompts: Sequence[list[int]], size: Size, path: Path | None, bars: Bars) -> None:
    """Measure a profile, print what verifying costs by texts and tokens, and write it where it is wanted."""
    gpu = size.device == "cuda"
    profile = measure_profile(
        pair, prompts, depth=6, temperature=0.7, policies=[AllFeatures()], batch=BATCHES if gpu else BATCHES[:2],
        effort=Effort(budget_s=COSTS_S) if gpu else Effort(repetitions=2), facts={"device": bars.figures["device"]},
        progress=silent,
    )  # fmt: skip
    assert profile.batch is not None
    recordings = sum(len(m.calls) for kept in KEPT.values() for m in kept)
    print(f"\ncosts, ms, at {profile.low.context:.0f} tokens; {recordings} recordings are kept")
    alone = {0: list(enumerate(profile.low.verify_s, 1))}
    for streams, points in {**alone, **profile.batch.low.verify_s}.items():
        print(f"  {streams or 'no batch':>8}: verify", *(f"{tokens}:{1e3 * seconds:.2f}" for tokens, seconds in points))
    print("  draft step by texts", *(f"{n}:{1e3 * seconds:.2f}" for n, seconds in profile.batch.low.draft_s))
    if path is not None:
        profile.save(path)


def collection(pair: Pair, prompts: Sequence[list[int]], size: Size, bars: Bars) -> None:
    """Time dense traces: tokens of text a second, every position an anchor."""
    settings = Settings(0.7, size.tokens, 8, verification="match")
    collector = DenseCollector(pair, settings, memory_bytes=(4 << 30) if size.device == "cuda" else (1 << 26))
    batch = [
        PromptTask(n, str(n), "", prompt, n)
        for n, prompt in enumerate([*prompts] * (4 if size.device == "cuda" else 1))
    ]
    collector.rows(batch[:1])
    begin = time.perf_counter()
    chunks = collector.rows(batch)
    seconds = time.perf_counter() - begin
    rate = sum(len(chunk["anchor"]) for chunk in chunks) / seconds
    bars.figures["anchors_per_s"] = rate
    print(f"collection: {rate:.0f} anchors/s, chains of 8, {len(batch)} prompts of {size.tokens} tokens")


@torch.inference_mode()
def flips(size: Size, bars: Bars) -> None:
    """Count tokens whose argmax depends on how many were read together; untrained weights have many near ties."""
    model = random_model(SHAPES[size.pair[1]], size.device, size.dtype, 1024)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(model.config.vocab_size, (1, 16 + 4 * size.tokens), generator=generator).to(size.device)
    heads = {"float32 head": contextlib.nullcontext()}
    heads["rounded head"] = mock.patch.object(cache_module, "widen", lambda view: None)
    for head, changed in heads.items():
        with changed:
            KEPT.clear()
            single, together = (argmaxes(model, tokens, step) for step in (1, 4))
        flipped = 1e3 * float((single != together).float().mean())
        bars.figures[f"flips per 1,000, {head}"] = flipped
        print(f"flips, {head}: {flipped:.1f} of 1,000 tokens differ between reading one and four together")


def argmaxes(model: Any, tokens: torch.Tensor, step: int) -> torch.Tensor:
    """Return the most likely token after each but the first 16, read `step` at a time."""
    cache = open_cache(model, tokens.shape[1], model.config.vocab_size)
    cache.read(tokens[:, :16], 1)
    read = range(16, tokens.shape[1], step)
    return torch.cat([cache.read_parts([Part(0, tokens[0, at : at + step])]).argmax(-1) for at in read])


if __name__ == "__main__":
    sys.exit(main())
