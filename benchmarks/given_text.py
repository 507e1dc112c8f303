"""Rounds drawn given the text: whether replay has the live loop's law, exactly, and what collection of them costs.

    python benchmarks/given_text.py --check
    python benchmarks/given_text.py --quick

First the law: V = 3, depth 3, every choice of the loop, the collector and replay enumerated, random stop rules. Then a real
pair: what live rounds accept against what their own texts say; replay against live runs of the same prompts; and collection
under each verification beside that under `match`. It runs from the repository root, on the shipped
pair where there is no `--pair`.
The last line printed is one JSON object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import Bars, arguments
from drawn.beside_live import BATCH, DEPTH, MOST_ERRORS, QUICK, Side, Sizes
from pairs import pair_folder
from scipy import stats
from specstop.collect.prompts import Prompt, encode, read_prompts
from specstop.collect.run import collect
from specstop.decode import Settings
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair, load_pair
from specstop.decode.verify.noise import stream_key
from specstop.policies import FixedLength
from specstop.policies.contract import StopPolicy

_TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "decode")]

from drawn_law import replay_law  # noqa: E402
from enumeration import EXACT  # noqa: E402
from random_stops import ByTokens, TrimmingByRows  # noqa: E402
from text_law import Case, apart, live_law  # noqa: E402

MODES = ("rejection", "block")
STOPS: tuple[Callable[[int], StopPolicy], ...] = (
    partial(ByTokens, 3, stops=0.5),
    partial(ByTokens, 5, first=0, stops=0.2),
    partial(TrimmingByRows, 4),
)
LENGTHS = (3, 8)

SLOWER = {"rejection": 1.1, "block": 2.5}
"""Times the collection under `match` that one under these may take."""


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("law", "pair"), help="this part alone; no check then")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    torch.set_num_threads(1)
    bars, prompts = Bars(), list[Prompt]()
    if options.only != "pair":
        laws(sizes, options.quick, bars)
    if options.only != "law":
        folder = pair_folder(options)
        pair = load_pair(folder / "target", folder / "draft")
        prompts = read_prompts(folder / "prompts-test.jsonl", sizes.prompts)
        other = read_prompts(folder / "prompts-train.jsonl", sizes.train)
        for temperature in sizes.temperatures:
            for mode in MODES:
                given_their_texts(pair, prompts, temperature, mode, sizes, bars)
                with tempfile.TemporaryDirectory() as room:
                    Side(pair, other, prompts, temperature, mode, sizes, Path(room)).compare(bars)
        collecting(pair, prompts, sizes, bars)
    compared = (
        f"{bars.figures.get('law', {}).get('cases', 0)} enumerated cases, {len(prompts)} prompts x {sizes.runs} runs"
    )
    return bars.finish(options, compared, options.only is None)


def cases(seeds: int) -> list[Case]:
    """Return what is enumerated: every mode and shape, with and without ends of text, under every stop rule."""
    found = []
    for seed in range(1, seeds + 1):
        for stop in STOPS:
            for mode in ("rejection", "block", "point"):
                found += [
                    Case(mode, "chain:3", stop, kind, seed, eos) for kind, eos in (("mixed", False), ("mixed", True))
                ]
            found += [Case(mode, "chain:3", stop, "dense", seed) for mode in MODES]
        for tree in ("2,1", "2,2", "1,2"):
            found += [Case("rejection", tree, stop, "mixed", seed, True, new=4) for stop in STOPS[:2]]
        found += [Case("rejection_replace", tree, STOPS[1], "mixed", seed, True, new=4) for tree in ("2,1", "1,2")]
    return found


def laws(sizes: Sizes, quick: bool, bars: Bars) -> None:
    """Compare the joint law of text and rounds of replay with the live loop's, and show that of the approximate rows."""
    begin, worst, outcomes, wrong = time.perf_counter(), 0.0, 0, []
    todo = [case for case in cases(sizes.seeds) if not quick or case.kind == "mixed"]
    for case in todo[:: 4 if quick else 1]:
        live = live_law(case)
        far = apart(live, replay_law(case))
        worst, outcomes = max(worst, far), outcomes + len(live)
        if far > EXACT:
            wrong.append(f"{case.mode} {case.tree} {case.policy().name} {case.kind} seed {case.seed}: {far:.1e}")
            print("WRONG", wrong[-1], flush=True)
    done = len(todo[:: 4 if quick else 1])
    bars.add(
        "law",
        {"cases": done, "outcomes": outcomes, "worst": worst, "wrong": wrong, "seconds": time.perf_counter() - begin},
        not wrong and outcomes > 100,
        f"{done} cases, {outcomes} outcomes of text and rounds; largest total variation {worst:.1e}, at most {EXACT:g}",
    )
    near = [Case("block", "chain:3", STOPS[0], "mixed", seed, off_text="approximate") for seed in (1, 2)[: sizes.seeds]]
    told = [apart(live_law(case), replay_law(case)) for case in near]
    bars.figures["approximate block, total variation"] = told
    print(f"      block with approximate rows off the text: total variation {', '.join(f'{far:.3f}' for far in told)}")


def given_their_texts(
    pair: Pair, prompts: Sequence[Prompt], temperature: float, mode: str, sizes: Sizes, bars: Bars
) -> None:
    """Compare how many tokens live rounds of fixed lengths accept with what is to be expected given their own texts.

    The rounds of a text are independent given it, so this is the sharpest test of a live loop on a real pair, and it needs
    nothing but the probabilities of the text under both models: no draw of ours.
    """
    ids = encode(prompts, pair.tokenizer, pair.readable - sizes.tokens)
    for length in LENGTHS:
        settings = Settings(temperature, sizes.tokens, length, verification=mode)
        speculator = Speculator(pair, FixedLength(length), settings, batch=BATCH)
        gap, variance, rounds = np.zeros(length), np.zeros(length), 0
        for run in range(sizes.runs):
            asked = [Request(i, stream_key(200 + run, p.id)) for p, i in zip(prompts, ids, strict=True)]
            for prompt, made in zip(ids, speculator.run(asked), strict=True):
                anchors = [(r.anchor, r.accepted) for r in made.rounds if r.anchor + length < len(made.tokens)]
                if not anchors:
                    continue
                p, q = own_probabilities(pair, prompt, list(made.tokens), temperature)
                anchor, accepted = np.array(anchors).T
                at = anchor[:, None] + np.arange(length)
                survival = kept(p[at], q[at], mode == "block").cumprod(1)
                gap += ((accepted[:, None] > np.arange(length)) - survival).sum(0)
                variance += (survival * (1 - survival)).sum(0)
                rounds += len(anchors)
        z = gap / np.sqrt(variance.clip(1e-9))
        most = float(stats.norm.isf(stats.norm.sf(MOST_ERRORS) / length))  # the largest of so many
        bars.add(
            f"{mode} T={temperature:g} fixed:{length}, given the text", {"z": z.tolist(), "rounds": rounds},
            bool(np.abs(z).max() <= most),
            f"{rounds} live rounds, acceptance by depth {' '.join(f'{value:+.2f}' for value in z)} standard errors from what "
            f"their texts say; at most {most:.2f}",
        )  # fmt: skip


@torch.inference_mode()
def own_probabilities(pair: Pair, prompt: list[int], text: list[int], temperature: float) -> tuple[Any, Any]:
    """Return p and q [L] of the tokens of a text, each after the ones before."""
    found = []
    for model in (pair.target, pair.draft_model):
        cached = CachedModel(model, len(prompt) + len(text), pair.vocabulary)
        rows = cached.read(torch.tensor([[*prompt, *text[:-1]]], device=pair.device), rows=len(text))[0]
        own = torch.tensor(text, device=pair.device)[:, None]
        found.append(torch.softmax((rows / temperature).double(), -1).gather(-1, own)[:, 0].cpu().numpy())
    return found[0], found[1]


def kept(p: Any, q: Any, block: bool) -> Any:
    """Return [R, K], the chance given the text that the draft has its token, had it those before; p and q [R, K] of them.

    Written apart from `decode.verify`, which this is to test.
    """
    weight, chances = np.ones(len(p)), []
    for at in range(p.shape[1]):
        chances.append(np.minimum(1.0, q[:, at] / (weight * p[:, at])))
        weight = np.minimum(1.0, weight * p[:, at] / q[:, at]) if block else weight
    return np.stack(chances, 1)


def collecting(pair: Pair, prompts: Sequence[Prompt], sizes: Sizes, bars: Bars) -> None:
    """Time collection under each verification beside that under `match`, taking turns."""
    chosen = prompts[: min(48, len(prompts))]
    seconds: dict[str, list[float]] = {name: [] for name in ("match", *MODES)}
    for turn in range(sizes.repetitions + 1):
        for name in seconds:
            with tempfile.TemporaryDirectory() as room:
                begin = time.perf_counter()
                collect(
                    pair, chosen, Path(room) / "t", depth=DEPTH, temperature=0.7, max_new_tokens=sizes.tokens,
                    verification=name,
                )  # fmt: skip
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - begin)
    for name in MODES:
        each = [mine / base for mine, base in zip(seconds[name], seconds["match"], strict=True)]
        ratio = float(np.median(each))
        bars.add(
            f"collection under {name}",
            {"ratio": ratio, "each": each},
            ratio <= SLOWER[name],
            f"{ratio:.2f} of the time under match ({min(each):.2f} to {max(each):.2f}); at most {SLOWER[name]}",
        )


if __name__ == "__main__":
    raise SystemExit(main())
