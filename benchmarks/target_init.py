"""Target-initialized drafting (DynaSD, arXiv 2409.10644), a LOSSY baseline: what it gains and what it costs.

    python benchmarks/target_init.py --pair pairs/a --check

The candidates for the next token are drawn from the target itself, without replacement (greedy: the best ones). Below each
the draft proposes a chain, which is verified by speculative sampling, and the longest branch wins. Tokens with a predictable
continuation are emitted too often. The published code leaves the residual out. Here it is included, so that with a single
branch the method is lossless.

This is a reference loop without caches, so it reports no speed: mean tokens per target call, negative log-likelihood per
token under the target, and greedy texts that equal plain decoding. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np
import torch
from bars import Bars, arguments
from specstop.collect.prompts import encode, read_prompts
from specstop.decode import Pair, load_pair
from specstop.train.demo.pair import shipped_pair
from torch import Tensor

DEPTH, WIDTHS, TEMPERATURES = 4, (1, 2, 4, 8), (0.0, 1.0)


@dataclass
class Decoded:
    """A text, its target calls, and the negative log-likelihood of its tokens under the target."""

    tokens: list[int]
    calls: int = 0
    nats: float = 0.0


def distribution(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities [..., V] in float64; at temperature 0 all on the best token."""
    if temperature == 0.0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return torch.softmax(logits.double() / temperature, -1)


def draw(p: Tensor, generator: torch.Generator) -> int:
    """Return a token drawn from p [V]."""
    return int(torch.multinomial(p, 1, generator=generator))


def draw_roots(weights: Tensor, width: int, temperature: float, generator: torch.Generator) -> list[int]:
    """Return `width` different tokens: drawn from weights [V] without replacement, or the best of them if greedy."""
    if temperature == 0.0:
        roots: list[int] = weights.topk(width).indices.tolist()
    else:
        count = min(width, int(torch.count_nonzero(weights)))
        roots = torch.multinomial(weights, count, generator=generator).tolist()
    return roots


def accept_branch(
    path: list[int], p: Tensor, q: list[Tensor], temperature: float, generator: torch.Generator
) -> tuple[list[int], Tensor]:
    """Return the accepted part of a branch and the weights that the next roots are drawn from.

    Args:
        path: root and drafted tokens.
        p: [len(path), V] probabilities of the target after each of them.
        q: by drafted token, the distribution that it was drawn from.
        temperature: 0 = a token is accepted if it is the target's best.
        generator: of the acceptance.
    """
    for at, token in enumerate(path[1:]):
        ratio = float(p[at, token] / q[at][token])
        if (ratio < 1.0) if temperature == 0.0 else float(torch.rand((), generator=generator)) >= ratio:
            left = (p[at] - q[at]).clamp_min(0.0)
            return path[: at + 1], left if temperature and left.sum() > 0 else p[at]
    return path, p[len(path) - 1]


@torch.inference_mode()
def decode(pair: Pair, prompt: list[int], width: int, temperature: float, new: int, seed: int) -> Decoded:
    """Decode one prompt with `width` branches of `DEPTH` drafted tokens; width 0 = plain decoding."""
    generator = torch.Generator().manual_seed(seed)
    text, made = list(prompt), Decoded([])
    logits = pair.target(torch.tensor([text])).logits[0, -1]
    weights = logits if temperature == 0.0 else distribution(logits, temperature)
    while len(made.tokens) < new:
        roots = draw_roots(weights, max(width, 1), temperature, generator)
        branches = [[root] for root in roots]
        proposed: list[list[Tensor]] = [[] for _ in roots]
        for _ in range(DEPTH if width else 0):
            scores = pair.draft_model(torch.tensor([[*text, *branch] for branch in branches])).logits[:, -1]
            for branch, own, q in zip(branches, proposed, distribution(scores, temperature), strict=True):
                branch.append(draw(q, generator))
                own.append(q)
        rows = pair.target(torch.tensor([[*text, *branch] for branch in branches])).logits[:, len(text) - 1 :]
        best: list[int] = []
        for branch, q_rows, own in zip(branches, proposed, rows, strict=True):
            path, left = accept_branch(branch, distribution(own[1:], temperature), q_rows, temperature, generator)
            if len(path) > len(best):  # the first of equals
                best, kept = path, own
                weights = own[len(path)] if temperature == 0.0 else left
        made.calls += 1
        log_p = torch.log_softmax(kept.double() / (temperature or 1.0), -1)
        for at, token in enumerate(best[: new - len(made.tokens)]):
            made.nats -= float(log_p[at, token])
            made.tokens.append(token)
        text += best
    return made


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__, pairs=True).parse_args()
    count, new = (4, 24) if options.quick else (20, 64)
    bars = Bars()
    for folder in options.pair or [shipped_pair()]:
        pair = load_pair(folder / "target", folder / "draft", engine="plain")
        read = read_prompts(folder / "prompts-test.jsonl", count)
        prompts = encode(read, pair.tokenizer, pair.readable - new - DEPTH - 1)
        for temperature in TEMPERATURES:
            plain = [decode(pair, prompt, 0, temperature, new, seed) for seed, prompt in enumerate(prompts)]
            nats = sum(text.nats for text in plain) / sum(len(text.tokens) for text in plain)
            for width in WIDTHS:
                texts = [decode(pair, prompt, width, temperature, new, seed) for seed, prompt in enumerate(prompts)]
                tokens = sum(len(text.tokens) for text in texts)
                more = sum(text.nats for text in texts) / tokens - nats
                same = np.mean([text.tokens == other.tokens for text, other in zip(texts, plain, strict=True)])
                figures = {"tokens_per_call": tokens / sum(text.calls for text in texts), "nats_per_token": more}
                figures |= {"greedy_texts_equal": float(same)} if temperature == 0.0 else {}
                bars.figures[f"{folder.name}, T={temperature:g}, width {width}"] = figures
                label = "lossless" if width == 1 else "LOSSY"
                print(
                    f"T={temperature:g} width {width} ({label}): "
                    + ", ".join(f"{k} {v:.3f}" for k, v in figures.items())
                )
                if temperature == 0.0 and width == 1:
                    bars.add("one greedy branch equals plain decoding", float(same), same == 1.0, "all texts")
    return bars.finish(options, f"{count} prompts of {new} tokens", whole=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
