"""Exactness of the decoding loop: lossless modes sample from the target's distribution; lossy modes are detected.

    python benchmarks/exactness.py --check
    python benchmarks/exactness.py --part pair --pair DIR

- `enumeration`: every sequence of random choices of the rejection family on tiny vocabularies, by the test helpers.
  The total variation between the texts of the loop and those of the target is at most 1e-12.
- `texts`: greedy texts of the pair equal `generate` of transformers, and texts of `match` at 0.7 equal plain sampling
  by the same noise, alone and in a batch. Texts may differ at ties of the two best tokens, in at most 1 of 200 texts.
- `pair`: texts of the pair that every lossless mode samples, against the target's conditional distributions
  (Kolmogorov-Smirnov test of the probability integral transform) and against plain sampling (chi-square test).
- `lossy`: `typical` on tables, and target-initialized drafting (DynaSD, arXiv 2409.10644), a baseline of the
  literature. Its candidates for the next token come from the target, without replacement; below each the draft
  proposes a chain, and the longest branch wins. This is a reference loop without caches: it reports tokens per target
  call and no speed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from harness import Run, same_distribution
from scipy import stats
from specstop.decode import plain_texts, stream_key
from specstop.decode.benchmark import count_differences
from specstop.decode.loop import Request
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair
from torch import Tensor

import specstop as ss

# isort: split
from cases import Case, all_cases, other_cases
from enumeration import EXACT, Proof, prove, prove_within
from random_models import plain as generated

FALSE_ALARM, LOSSY = 1e-3, 0.05
MODES = (
    ("match", "chain:4"),
    ("match", "2,2,1"),
    ("rejection", "chain:4"),
    ("rejection", "2,2,1"),
    ("rejection_replace", "2,2,1"),
    ("block", "chain:4"),
)
NEW, BRANCH_DEPTH, WIDTHS = 6, 4, (1, 2, 4, 8)


@torch.inference_mode()
def pit(
    pair: Pair, prompt: Sequence[int], texts: Sequence[Sequence[int]], temperature: float, seed: int = 0
) -> np.ndarray:
    """Return a share in (0, 1) for each token: independent uniforms iff the texts are samples of the target.

    Tokens are ordered by probability, so that texts which are too likely have large shares. A token's share is drawn from
    the stretch that it takes up (Rosenblatt 1952, randomised for discrete outcomes).
    """
    places = torch.from_numpy(np.random.default_rng(seed).random((len(texts), max(map(len, texts)))))
    shares = []
    for text, place in zip(texts, places, strict=True):
        ids = torch.tensor([[*prompt, *text]], device=pair.device)
        logits = CachedModel(pair.target, ids.shape[1], pair.vocabulary).read(ids)[0, len(prompt) - 1 : -1]
        probs = torch.softmax(logits.double() / temperature, -1).cpu()
        prob = probs.gather(-1, torch.tensor(text)[:, None])
        less = torch.where(probs < prob, probs, 0.0).sum(-1)
        shares.append(less + prob[:, 0] * place[: len(text)])
    return torch.cat(shares).numpy()


def enumeration(run: Run) -> None:
    """Enumerate cases of mode, tree, policy, table, processors, end of text and drafter."""
    cases = [*all_cases(), *other_cases()][:: run.choose(1, 900)]
    worst, leaves, later = 0.0, 0, 0
    for proved, proof in run.map(partial(prove_quietly, most=run.choose(300, 100)), cases):
        leaves, later = leaves + proof.leaves, later + (proof.later > 0)
        if proof.distance > EXACT or proof.reused:
            print(f"WRONG {proved}: distance {proof.distance:.1e}, {proof.reused} random numbers used twice")
        worst = max(worst, proof.distance, float(proof.reused > 0))
    run.bar(
        "enumerated texts, total variation", worst, at_most=EXACT, always=True,
        note=f"{len(cases)} cases, {leaves} sequences of choices",
    )  # fmt: skip
    run.bar("cases with acceptance after the first round", later, at_least=1, always=True)


def prove_quietly(case: Case, most: int) -> tuple[Case, Proof]:
    """Enumerate a case of at most so many sequences, without the warnings of policies that fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prove_within(case, most)


def texts(run: Run) -> None:
    """Compare texts of the pair with plain decoding, alone and side by side, on chains and trees."""
    count, new = run.choose((16, 128), (2, 5))
    prompts = run.encoded("test", count)
    tokens = [ids for _, ids in prompts]
    keys = [stream_key(0, name) for name, _ in prompts]
    total = differing = wrong = 0
    for temperature in (0.0, 0.7):
        if temperature:
            plain = [tuple(text) for text in plain_texts(run.pair, tokens, keys, new, temperature).tokens]
        else:
            plain = [tuple(generated(run.stock.target, ids, new)) for ids in tokens]
        for tree in run.choose((None, "3,2,1,1"), ("3,2,1,1",)):
            settings = ss.Settings(temperature, new, tree=tree, verification="match")
            for policy in ("fixed:4", "confidence:0.4"):
                for batch in run.choose((1, 3, 8), (2,)):
                    speculator = ss.Speculator(run.pair, ss.load_policy(policy).limited(4), settings, batch=batch)
                    requests = [Request(ids, key) for ids, key in zip(tokens, keys, strict=True)]
                    results = speculator.run(requests)
                    total += len(results)
                    differing += sum(one.tokens != other for one, other in zip(results, plain, strict=True))
                    if not temperature:
                        base = ss.Speculator(run.pair, ss.load_policy("fixed:0"), settings).run(requests)
                        wrong += count_differences(run.pair, settings, tokens, results, base)[1]
    run.bar(
        "texts that differ from plain decoding", differing / total, at_most=1 / 200, always=True, note=f"of {total}"
    )
    run.bar("greedy texts that differ without a tie", wrong, at_most=0, always=True)


def pair(run: Run) -> None:
    """Test texts of every lossless mode on the pair against the target's distribution; a lossy mode has to fail."""
    count = run.choose(60, 2)
    prompts = run.ids("test", run.choose(4, 2))
    alarm = FALSE_ALARM / (4 * len(MODES))  # two tests at two temperatures
    for temperature in run.choose((0.7, 1.0), (1.0,)):
        keys = [[stream_key(17, f"plain {at}", i) for i in range(count)] for at in range(len(prompts))]
        plain = [
            plain_texts(run.pair, [ids] * count, keys[at], NEW, temperature, True).tokens
            for at, ids in enumerate(prompts)
        ]
        for mode, tree in (*MODES, ("typical", "chain:4")):
            settings = ss.Settings(temperature, NEW, ignore_eos=True, verification=mode, tree=tree)
            speculator = ss.Speculator(run.pair, ss.load_policy("confidence:0.2").limited(4), settings)
            drawn, shares = [], []
            for at, ids in enumerate(prompts):
                results = speculator.run([Request(ids, stream_key(17, f"{mode} {tree} {at}", i)) for i in range(count)])
                drawn.append([list(result.tokens) for result in results])
                shares.append(pit(run.pair, ids, drawn[-1], temperature, seed=23 + at))
            fit = float(stats.kstest(np.concatenate(shares), "uniform").pvalue)
            counts = [
                [Counter((at, text[place]) for at, row in enumerate(side) for text in row) for side in (drawn, plain)]
                for place in (1, 2)
            ]
            same = min(1.0, 2 * min(same_distribution(*sides) for sides in counts))
            name = f"p-value, {mode} {tree}, T={temperature:g}"
            note = f"conditionals {fit:.2g}, plain sampling {same:.2g}"
            if mode == "typical":
                run.bar(f"{name} (lossy)", min(fit, same), at_most=alarm, note=note)
            else:
                run.bar(name, min(fit, same), at_least=alarm, always=True, note=note)


def lossy(run: Run) -> None:
    """Measure how far `typical` is from the target, and what target-initialized drafting gains and costs."""
    seeds = range(run.choose(40, 1))
    distances = [prove(Case("typical", "2,1", kind="dense", seed=seed, new=3)).distance for seed in seeds]
    run.bar("typical on tables, mean total variation", float(np.mean(distances)), at_least=LOSSY)
    count, new = run.choose((10, 64), (1, 3))
    stock, prompts = run.stock, run.ids("test", count)
    for temperature in (0.0, 1.0):
        base = [target_initialized(stock, ids, 0, temperature, new, seed) for seed, ids in enumerate(prompts)]
        base_nats = sum(nats for _, _, nats in base) / sum(len(text) for text, _, _ in base)
        for width in run.choose(WIDTHS, WIDTHS[:2]):
            drawn = [target_initialized(stock, ids, width, temperature, new, seed) for seed, ids in enumerate(prompts)]
            tokens = sum(len(text) for text, _, _ in drawn)
            nats = sum(nats for _, _, nats in drawn) / tokens - base_nats
            name = f"target-initialized, width {width}, T={temperature:g}, tokens per call"
            run.row(name, tokens / sum(calls for _, calls, _ in drawn), f"{nats:+.3f} nats per token under the target")
            if temperature == 0.0 and width == 1:
                wrong = sum(one[0] != other[0] for one, other in zip(drawn, base, strict=True))
                run.bar("target-initialized greedy texts of one branch that differ", wrong, at_most=0, always=True)


@torch.inference_mode()
def target_initialized(
    pair: ss.Pair, prompt: Sequence[int], width: int, temperature: float, new: int, seed: int
) -> tuple[list[int], int, float]:
    """Decode with `width` branches that begin with tokens drawn from the target; width 0 is plain decoding.

    Returns:
        The text, the target calls, and the negative log-likelihood of the text under the target.
    """
    generator, text, result = torch.Generator().manual_seed(seed), list(prompt), list[int]()
    calls, nats = 0, 0.0
    weights = _probabilities(pair.target(torch.tensor([text])).logits[0, -1], temperature)
    while len(result) < new:
        count = max(width, 1)
        if temperature:
            count = min(count, int(torch.count_nonzero(weights)))
            roots = torch.multinomial(weights, count, generator=generator).tolist()
        else:
            roots = weights.topk(count).indices.tolist()
        branches, proposals = [[root] for root in roots], [list[Tensor]() for _ in roots]
        for _ in range(BRANCH_DEPTH if width else 0):
            logits = pair.draft_model(torch.tensor([[*text, *branch] for branch in branches])).logits[:, -1]
            for branch, proposal, q in zip(branches, proposals, _probabilities(logits, temperature), strict=True):
                branch.append(int(torch.multinomial(q, 1, generator=generator)))
                proposal.append(q)
        rows = pair.target(torch.tensor([[*text, *branch] for branch in branches])).logits[:, len(text) - 1 :]
        best: list[int] = []
        for branch, proposal, logits in zip(branches, proposals, rows, strict=True):
            path, residual = _accept(branch, _probabilities(logits[1:], temperature), proposal, temperature, generator)
            if len(path) > len(best):
                best, kept = path, logits
                weights = residual if temperature else logits[len(path)]
        calls += 1
        log_p = torch.log_softmax(kept.double() / (temperature or 1.0), -1)
        for at, token in enumerate(best[: new - len(result)]):
            nats -= float(log_p[at, token])
            result.append(token)
        text += best
    return result, calls, nats


def _probabilities(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities [..., V] in float64; at temperature 0 all mass is on the best token."""
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return torch.softmax(logits.double() / temperature, -1)


def _accept(
    path: list[int], p: Tensor, q: Sequence[Tensor], temperature: float, generator: torch.Generator
) -> tuple[list[int], Tensor]:
    """Return the accepted part of a branch and the weights of the next roots: the residual after a rejection."""
    for at, token in enumerate(path[1:]):
        ratio = float(p[at, token] / q[at][token])
        if (ratio < 1.0) if temperature == 0.0 else float(torch.rand((), generator=generator)) >= ratio:
            residual = (p[at] - q[at]).clamp_min(0.0)
            return path[: at + 1], residual if temperature and residual.sum() > 0 else p[at]
    return path, p[len(path) - 1]


if __name__ == "__main__":
    raise SystemExit(Run(__doc__, [enumeration, texts, pair, lossy]).execute())
