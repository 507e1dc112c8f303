"""What a round of one stream takes, and how much of it is neither model nor policy: by shape, policy and temperature.

    python benchmarks/round_time.py
    python benchmarks/ab.py BEFORE . round_time.py --copy after --key '*.outside_us' --pair pairs/a

All methods take turns on the same prompts, on one thread. It is made for `ab.py`: ratios of two states are what it is for,
and it asks nothing of a state but the public names. Without `--pair` the shipped pair is used. The last line is one JSON
object: medians over rounds, in microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys

import torch
from bars import Bars, arguments
from specstop.decode import Settings, Speculator, load_pair, stream_key
from specstop.policies import Confidence, FixedLength

DEPTH, TREE = 8, "2,2,1,1"
POLICIES = {"fixed:4": FixedLength(4), "confidence:0.4": Confidence(0.4, DEPTH)}
TEMPERATURES = (0.0, 0.7)


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=12, help="of 128 new tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, tokens = (3, 32) if options.quick else (options.prompts, 128)
    if options.pair is None:
        from pairs import pair_folder  # not above: its imports are those of this state alone

        options.pair = pair_folder(options)
    folder = options.pair
    pair = load_pair(folder / "target", folder / "draft")
    lines = (folder / "prompts-test.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    prompts = [pair.tokenizer(json.loads(line)["prompt"]).input_ids for line in lines]
    runs = {
        (shape, name, temperature): Speculator(
            pair, policy, Settings(temperature, tokens, DEPTH, tree=tree, verification="match")
        )
        for shape, tree in (("chain", None), ("tree", TREE))
        for name, policy in POLICIES.items()
        for temperature in TEMPERATURES
    }
    rounds: dict[tuple[str, str, float], list[tuple[float, float]]] = {key: [] for key in runs}
    for number, prompt in enumerate(prompts[:1] + prompts):
        for key, run in runs.items():
            made = run.generate(prompt, stream_key(0, str(number))).rounds
            rounds[key] += [(r.seconds, r.outside_s) for r in made] if number else []
    bars = Bars()
    for (shape, name, temperature), made in rounds.items():
        whole, outside = (1e6 * statistics.median(column) for column in zip(*made, strict=True))
        label = f"{shape} {name} T={temperature:g}"
        print(f"{label:<28}{whole:>8.0f} us a round, {outside:>6.0f} outside models and policy, {len(made)} rounds")
        bars.figures[label] = {"whole_us": round(whole, 1), "outside_us": round(outside, 1)}
    return bars.finish(options, f"{len(runs)} methods on {count} prompts of {tokens} tokens")


if __name__ == "__main__":
    sys.exit(main())
