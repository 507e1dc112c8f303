"""What collecting costs: dense traces beside the live loop, trees beside chains, memory by length of text.

    python benchmarks/collect.py --check
    python benchmarks/collect.py --pair pairs/a --out collect.json

Without `--pair` the shipped pair is used. The last line is one JSON object; with `--check` the exit code is 1 where a bar
falls short.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from bars import Bars, arguments
from pairs import pair_folder
from specstop.collect.dense import DenseCollector
from specstop.collect.live import LiveCollector
from specstop.collect.prompts import encode, read_prompts
from specstop.collect.proposals import TargetText
from specstop.collect.schema import PromptTask
from specstop.decode import Pair, Settings, load_pair, plain_texts, stream_key
from specstop.decode.topology import chain, parse_tree
from specstop.policies import FixedLength

DEPTH, TREE = 12, "4,2,2,1"
TIE = 1e-4
NEAR = 2e-3

CHILD = """
import sys, torch
torch.set_num_threads(1)
from specstop.collect.prompts import encode, read_prompts
from specstop.collect.run import collect
from specstop.decode import load_pair
folder, out, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
pair = load_pair(folder + "/target", folder + "/draft")
collect(pair, read_prompts(folder + "/prompts-test.jsonl", 4), out, depth=12, max_new_tokens=tokens, temperature=0.7,
        verification="match")
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # getrusage begins with the parent's
"""


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    folder = pair_folder(options)
    count, tokens = (4, 32) if options.quick else (40, 128)
    pair = load_pair(folder / "target", folder / "draft")
    prompts = read_prompts(folder / "prompts-test.jsonl", count)
    ids = encode(prompts, pair.tokenizer, pair.readable - tokens - DEPTH)
    work = [PromptTask(i, p.id, "", x, stream_key(0, p.id)) for i, (p, x) in enumerate(zip(prompts, ids, strict=True))]
    bars = Bars()
    for temperature in (0.0, 0.7):
        speeds(pair, work, tokens, temperature, bars)
        for tree in (None, TREE):
            agreement(pair, work[: count // 2], tokens, temperature, tree, bars)
    memory(folder, options.quick, bars)
    return bars.finish(options, f"{len(work)} prompts of {tokens} tokens", whole=len(work) >= 40)


def speeds(pair: Pair, work: Sequence[PromptTask], tokens: int, temperature: float, bars: Bars) -> None:
    """Time generation, unrolling and the live loop, alternating by batch of 16 prompts."""
    chains, trees = (
        DenseCollector(pair, Settings(temperature, tokens, DEPTH, tree=tree, verification="match"))
        for tree in (None, TREE)
    )
    live = LiveCollector(pair, FixedLength(DEPTH), Settings(temperature, tokens, DEPTH, verification="match"))
    ratios, ratios_tree, dense_s, live_s, dense_rate, live_rate = ([] for _ in range(6))
    warm = work[:2]
    chains.rows(warm)
    for start in range(0, len(work), 16):
        batch = work[start : start + 16]
        begin = time.perf_counter()
        ids, keys = [one.tokens for one in batch], [one.key for one in batch]
        texts = plain_texts(pair, ids, keys, tokens + DEPTH, temperature, noise=True)
        generated = time.perf_counter() - begin
        spent = []
        for collector in (chains, trees):
            begin = time.perf_counter()
            chunks = []
            for at, (one, text) in enumerate(zip(batch, texts.tokens, strict=True)):
                length = min(len(text), tokens)
                if length > 1:
                    anchor = torch.arange(1, length, device=pair.device)
                    noise = None if texts.noise is None else texts.noise[at, : len(text)]
                    known = TargetText(one, text, texts.logits[at, : len(text)], noise, None, length, anchor)
                    with torch.inference_mode():
                        trees_of_text = collector.propose(known).trees(anchor - 1)
                        chunks.append(collector.columns(known, 0, trees_of_text))
            spent.append(time.perf_counter() - begin)
            if collector is chains:
                anchors, labels = (sum(c[n].size for c in chunks) for n in ("anchor", "observed"))
                labels = sum(int(c["observed"].sum()) for c in chunks)
        ratios.append((generated + spent[0]) / generated)
        ratios_tree.append((generated + spent[1]) / generated)
        dense_s.append(anchors / spent[0])
        dense_rate.append(labels / (generated + spent[0]))
        rows = live.rows(batch)
        drafting = sum(float((c["seconds"] - c["verify_s"]).sum()) for c in rows)
        live_s.append(sum(len(c["anchor"]) for c in rows) / drafting)
        live_rate.append(sum(int(c["observed"].sum()) for c in rows) / sum(float(c["seconds"].sum()) for c in rows))
    at = f"T={temperature:g}"
    faster = statistics.median(d / v for d, v in zip(dense_s, live_s, strict=True))
    bars.add(
        f"anchors a second, dense over live, {at}",
        faster,
        faster >= 6,
        f"{faster:.1f} ({statistics.median(dense_s):.0f} a second); at least 6",
    )
    decisions = statistics.median(d / v for d, v in zip(dense_rate, live_rate, strict=True))
    bars.add(
        f"labelled decisions a second, dense over live fixed:{DEPTH}, {at}",
        decisions,
        decisions >= 2.5,
        f"{decisions:.1f}; at least 2.5",
    )
    whole = statistics.median(ratios)
    bars.add(
        f"(generation + unrolling) / generation, depth {DEPTH}, {at}",
        whole,
        whole <= 1.3,
        f"{whole:.2f}, from {min(ratios):.2f} to {max(ratios):.2f}; at most 1.3",
    )
    bars.figures[f"the same for {TREE}, {at}"] = statistics.median(ratios_tree)
    print(f"      the same for {TREE}: {statistics.median(ratios_tree):.2f}")


def agreement(
    pair: Pair, work: Sequence[PromptTask], tokens: int, temperature: float, tree: str | None, bars: Bars
) -> None:
    """Compare the rows of live rounds at full depth with the dense ones at the same anchors."""
    topology = chain(DEPTH) if tree is None else parse_tree(tree)
    live = LiveCollector(
        pair,
        FixedLength(topology.deepest),
        Settings(temperature, tokens, topology.deepest, tree=tree, verification="match"),
    )
    settings = Settings(temperature, tokens, topology.deepest, tree=tree, verification="match")
    dense = DenseCollector(pair, settings).rows(work)
    known = {(int(c["sequence"][0]), int(a)): (c, at) for c in dense for at, a in enumerate(c["anchor"])}
    compared = ties = wrong = 0
    far = 0.0
    for chunk in live.rows(work):
        for row in range(len(chunk["anchor"])):
            key = (int(chunk["sequence"][row]), int(chunk["anchor"][row]))
            if key not in known:
                ties += 1  # after a tie the text went another way
                continue
            other, at = known[key]
            drawn = chunk["drawn"][row]
            same = (chunk["tokens"][row] == other["tokens"][at])[drawn].all()
            label = chunk["observed"][row] & other["observed"][at]
            same = same and (chunk["accepted"][row] == other["accepted"][at])[label].all()
            compared += 1
            if same:
                for name in live.features:
                    gap = np.abs(chunk[name][row] - other[name][at])[drawn] / np.maximum(
                        1, np.abs(other[name][at][drawn])
                    )
                    far = max(far, float(gap.max(initial=0.0)))
            elif float(np.abs(other["noisy_margin"][at]).min()) < TIE:
                ties += 1
            else:
                wrong += 1
    name = f"rounds where dense and live agree, {tree or f'chain of {DEPTH}'}, T={temperature:g}"
    met = wrong == 0 and compared > 0 and ties <= max(1, compared / 500) and far < NEAR
    bars.add(name, compared, met, f"{compared} compared, {ties} ties, {wrong} wrong; features within {far:.1e}")


def memory(folder: Path, quick: bool, bars: Bars) -> None:
    """Compare the peak memory of collecting short and long texts, each in a process of its own."""
    peaks = []
    with tempfile.TemporaryDirectory() as out:
        for tokens in (32, 64) if quick else (128, 512):
            command = [sys.executable, "-c", CHILD, str(folder), f"{out}/{tokens}", str(tokens)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            peaks.append(int(done.stdout.split()[-1]) / 1024)
    grown = peaks[1] - peaks[0]
    bars.add(
        "peak memory, long texts less short ones, MiB",
        grown,
        grown < 100,
        f"{peaks[0]:.0f} and {peaks[1]:.0f} MiB; within 100",
    )


if __name__ == "__main__":
    sys.exit(main())
