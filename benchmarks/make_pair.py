"""Build a target and draft pair from any text and measure how often the draft's greedy token is the target's.

    python benchmarks/make_pair.py --size 15m --out pairs/stdlib-15m
    python benchmarks/make_pair.py --text records.jsonl --size small --out pairs/records

The bar: P(A >= 1) between 0.5 and 0.85. The last line is one JSON object: parameters, seconds and acceptance by depth.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from bars import NO_PAIR, Bars, arguments
from specstop.policies.errors import SpecstopError
from specstop.policies.files.outputs import claim_folder, list_also
from specstop.train.demo.pair import make_pair
from specstop.train.demo.pair_recipe import RECIPES
from specstop.train.demo.pair_text import stdlib_documents
from text_files import read_documents
from transformers import AutoModelForCausalLM, AutoTokenizer

DEPTHS = 8
QUICK_STEPS = 20
LEAST, MOST = 0.5, 0.85


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, NO_PAIR, out="folder to write the pair and the figures to; must be given")
    parser.add_argument("--text", type=Path, help="JSON Lines file or folder; default: the standard library")
    parser.add_argument("--size", choices=("small", "15m", "100m"), default="small", help="recipe")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and batches")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the pair in --out, once the new one is complete"
    )
    options = parser.parse_args()
    if options.out is None:
        parser.error("expected --out, the folder to write the pair to")
    recipe = dataclasses.replace(RECIPES[options.size], seed=options.seed)
    if options.quick:
        recipe = dataclasses.replace(recipe, steps=QUICK_STEPS, own_steps=QUICK_STEPS, own_rows=8)
    try:
        claim_folder(options.out, overwrite=options.overwrite, inputs=[options.text])
        documents = read_documents(options.text) if options.text else stdlib_documents()
        begun = time.perf_counter()
        make_pair(documents, recipe, options.out, progress=show)
        seconds = time.perf_counter() - begun
    except SpecstopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rates = acceptance(options.out, prompts=4 if options.quick else 60, tokens=32 if options.quick else 128)
    target, draft = recipe.parameters()
    print(f"{'depth':>5} {'P(A >= depth)':>14} {'given the depth before':>23}")
    for depth, (reached, given) in enumerate(zip(rates["reached"], rates["given"], strict=True), start=1):
        print(f"{depth:>5} {reached:>14.3f} {given:>23.3f}")
    bars = Bars()
    first = rates["reached"][0]
    bars.add("P(A >= 1)", first, LEAST <= first <= MOST, f"{first:.3f}; between {LEAST} and {MOST}")
    bars.figures |= {
        "out": str(options.out),
        "size": options.size,
        "seed": options.seed,
        "target_parameters": target,
        "draft_parameters": draft,
        "seconds": round(seconds, 1),
        **rates,
    }
    list_also(options.out, "figures.json")
    return bars.finish(options, f"{rates['rounds']} rounds of greedy text on held-out prompts")


def show(task: str, done: int, total: int) -> None:
    """Show progress on one line of standard error."""
    if done % 20 == 0 or done == total:
        end = "\n" if done == total else ""
        print(f"\r{task}: step {done} of {total}", end=end, file=sys.stderr, flush=True)


def acceptance(pair: Path, prompts: int, tokens: int) -> dict[str, Any]:
    """Measure greedy acceptance on the held-out test prompts.

    Every position of the target's greedy continuations starts a round. As long as all drafted tokens were
    accepted the draft has continued the target's own text, so one pass of the draft over that text is exact.
    """
    tokenizer = AutoTokenizer.from_pretrained(pair / "target")
    target: Any = AutoModelForCausalLM.from_pretrained(pair / "target")
    draft = AutoModelForCausalLM.from_pretrained(pair / "draft")
    lines = (pair / "prompts-test.jsonl").read_text(encoding="utf-8").splitlines()
    hits = [0] * DEPTHS
    rounds = [0] * DEPTHS
    for line in lines[:prompts]:
        ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids  # [1, prompt]
        with torch.inference_mode():
            text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
            guess = draft(text[:, :-1]).logits[0, ids.shape[1] - 1 :].argmax(-1)
        same = (guess == text[0, ids.shape[1] :]).tolist()
        for start in range(len(same) - DEPTHS + 1):
            for depth in range(DEPTHS):
                rounds[depth] += 1
                if not same[start + depth]:
                    break
                hits[depth] += 1
    given = [hit / max(1, count) for hit, count in zip(hits, rounds, strict=True)]
    reached = [hit / max(1, rounds[0]) for hit in hits]
    return {
        "rounds": rounds[0],
        "reached": [round(value, 4) for value in reached],
        "given": [round(value, 4) for value in given],
    }


if __name__ == "__main__":
    sys.exit(main())
