"""Learned policies under filters that they were not trained with: top-p 0.5, top-k 1, min-p 0.9.

    python benchmarks/filters.py --check

For the pair at temperature 0.7: dense traces of training prompts without any filter, a latency profile, and each head that
`specstop train` fits; then test prompts decoded under each filter with every policy and with fixed lengths up to 8. The text
is the same for all of them, so a policy is judged by what its rounds cost by the profile, decisions included: tokens per
second over those of the best fixed length, picked on these very prompts. The bar: no head more than 2% below it.
The last line is one JSON object.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bars import Bars, arguments
from pairs import effort, pair_folder
from specstop.cli.console import progress_bars
from specstop.collect.prompts import encode, read_prompts
from specstop.collect.run import collect, reading_room
from specstop.decode import Generation, Settings, Speculator, load_pair, stream_key
from specstop.decode.profile import add_decisions, measure_profile
from specstop.decode.sampling import Shaping
from specstop.policies import FixedLength, Profile, StopPolicy
from specstop.policies.errors import SpecstopError
from specstop.train.fit.run import train

TEMPERATURE, DEPTH, BAR = 0.7, 8, 0.98
LENGTHS = (0, 1, 2, 3, 4, 6, 8)
HEADS = ("logistic", "mlp", "xgboost", "tokens")
FILTERS = {
    "none": Shaping(),
    "top-p 0.5": Shaping(top_p=0.5),
    "top-k 1": Shaping(top_k=1),
    "min-p 0.9": Shaping(min_p=0.9),
}


def rate(texts: Sequence[Generation], costs: Profile, policy: StopPolicy) -> float:
    """Return committed tokens per second of the rounds, by the profile."""
    rounds = [made for text in texts for made in text.rounds]
    names = ("context", "drafted", "verified", "backlog", "decisions")
    columns = (np.array([getattr(made, name) for made in rounds]) for name in names)
    seconds = costs.round_seconds(*columns, costs.decision(policy.cost_name))
    return float(sum(made.committed for made in rounds) / seconds.sum())


def measure(folder: Path, room: Path, options: Any, bars: Bars, progress: Any) -> dict[str, Any]:
    """Return tokens per second by filter and policy, and print their ratios to the best fixed length."""
    count, tests, tokens = (24, 4, 32) if options.quick else (options.train_prompts, options.prompts, 128)
    pair = load_pair(folder / "target", folder / "draft")
    prompts = read_prompts(folder / "prompts-train.jsonl", count)
    traces = collect(
        pair, prompts, room / "traces", temperature=TEMPERATURE, depth=DEPTH, max_new_tokens=tokens, progress=progress
    )
    texts_ids = encode(prompts, pair.tokenizer, reading_room(pair, tokens))
    costs = measure_profile(
        pair, texts_ids, depth=DEPTH, temperature=TEMPERATURE, effort=effort(options), progress=progress
    )
    learned: list[StopPolicy] = []
    for head in HEADS:
        try:
            learned.append(train(traces, costs, head=head, progress=progress).policy)
        except SpecstopError as error:  # a quick pair may have too little to learn from
            print(f"{head}: not trained ({error})")
    costs = add_decisions(costs, learned, pair.vocabulary)
    read = read_prompts(folder / "prompts-test.jsonl", tests)
    ids = encode(read, pair.tokenizer, reading_room(pair, tokens))
    fixed = [FixedLength(k) for k in LENGTHS]
    figures: dict[str, Any] = {}
    for name, shaping in FILTERS.items():
        rates, drafted = {}, {}
        for policy in (*fixed, *learned):
            speculator = Speculator(pair, policy, Settings(TEMPERATURE, tokens, DEPTH, shaping=shaping))
            texts = [speculator.generate(i, stream_key(0, p.id)) for i, p in zip(ids, read, strict=True)]
            rates[policy.name] = rate(texts, costs, policy)
            rounds = [made for text in texts for made in text.rounds]
            drafted[policy.name] = sum(made.drafted for made in rounds) / len(rounds)
        best = max(fixed, key=lambda policy: rates[policy.name])
        figures[name] = {"best fixed": best.name, "tokens_per_s": rates, "drafted a round": drafted}
        print(f"\n{folder.name}, {name}: best fixed {best.name}, {rates[best.name]:.1f} tokens/s")
        for policy in learned:
            ratio = rates[policy.name] / rates[best.name]
            text = f"{ratio:.3f} of {best.name}, {drafted[policy.name]:.2f} drafted a round; at least {BAR}"
            if name == "none":
                print(f"      {policy.name}: {text}")
            else:
                bars.add(f"{folder.name}, {name}, {policy.name}", ratio, ratio >= BAR, text)
    return figures


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=40, help="test prompts of 128 new tokens; a check needs 40")
    parser.add_argument("--train-prompts", type=int, default=160, help="training prompts")
    options = parser.parse_args()
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="specstop-filters-") as room, progress_bars() as progress:
        folder = pair_folder(options, progress)
        bars.figures["filters"] = measure(folder, Path(room), options, bars, progress)
    compared = f"{options.prompts} prompts of {folder.name}, {len(FILTERS)} filters, T = {TEMPERATURE}"
    return bars.finish(options, compared, whole=options.prompts >= 40)


if __name__ == "__main__":
    sys.exit(main())
