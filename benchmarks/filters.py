"""Filtered sampling and completions: replay as live, heads with and without the filter that is served, texts of an engine.

    python benchmarks/filters.py --check --pair path/to/other

Every choice of the rejection family under a filter, enumerated; and rounds of replay beside those of the live loop on a tiny
random pair in float64, under four filters, at three temperatures, as chains and trees. Then on the shipped pair and each of
`--pair`, at temperature 0.7: heads of `specstop train` trained without a filter and decoded under ones that leave few tokens,
each no more than 2% below the best fixed length there, by the profile's time; heads trained under top-p 0.9 and replayed
there, beside those trained without; and texts that transformers' own `generate` has sampled, as traces: labels,
acceptance beside keyed collection, refusals of other temperatures, training.
The last line is one JSON object.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from attacks.random_pair import save_pair
from bars import Bars, arguments
from filtered.completions import completed, repeated
from filtered.enumerated import enumerated
from filtered.heads import TRAINED, Place, alike, unlike
from filtered.same_rounds import FILTERS, SHAPES, TEMPERATURES, same_rounds
from pairs import effort
from specstop.cli.output import progress_bars
from specstop.collect.prompts import Prompt, read_prompts
from specstop.decode import load_pair
from specstop.train.demo.pair import shipped_pair

ROUNDS = 3000
"""Compared of each filter, temperature and shape."""

PARTS = ("rounds", "unfiltered", "filtered", "texts")


def compared(options: Any, room: Path, bars: Bars) -> None:
    """Compare replay with the live loop under every filter."""
    folder = save_pair(room / "tiny")
    pair = load_pair(folder / "target", folder / "draft", dtype="float64")
    count, tokens = (3, 16) if options.quick else (48, 40)
    prompts = [
        Prompt(f"p{at}", " ".join(f"w{3 + (at * 7 + n * 13) % 40}" for n in range(1 + at % 6))) for at in range(count)
    ]
    for name, sampling in FILTERS.items():
        for temperature in TEMPERATURES:
            for shape, tree in SHAPES.items():
                at = f"{name}, T = {temperature:g}, {shape}"
                found = same_rounds(pair, prompts, tokens, sampling, temperature, tree, room / at.replace(" ", "-"))
                enough = found.rounds >= ROUNDS or options.quick
                bars.add(
                    f"rounds replayed as live, {at}", found.rounds, enough and not found.wrong and not found.not_finite,
                    f"{found.rounds} rounds, {found.wrong} wrong, {found.not_finite} features not finite; {ROUNDS}, 0, 0",
                )  # fmt: skip


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, "folders of further pairs made by make_pair.py", pairs=True)
    parser.add_argument("--only-pairs", action="store_true", help="leave the shipped pair out; no check then")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="parts to run; a check needs all")
    parser.add_argument("--prompts", type=int, default=40, help="test prompts of 128 new tokens; a check needs 40")
    parser.add_argument("--train-prompts", type=int, default=160, help="training prompts")
    parser.add_argument("--samples", type=int, default=1, help="texts of each training prompt")
    parser.add_argument("--texts", type=int, default=400, help="completions; a check needs 400")
    options = parser.parse_args()
    count, tests, tokens, texts = (24, 4, 32, 32) if options.quick else (
        options.train_prompts, options.prompts, 128, options.texts
    )  # fmt: skip
    bars = Bars()
    with tempfile.TemporaryDirectory(prefix="specstop-filters-") as room, progress_bars() as progress:
        if "rounds" in options.part:
            enumerated(100 if options.quick else 4, bars)
            compared(options, Path(room), bars)
        shipped = [] if options.only_pairs or (options.quick and options.pair) else [shipped_pair()]
        folders = [*shipped, *options.pair]
        for folder in folders if set(options.part) - {"rounds"} else ():
            pair, stock = (load_pair(folder / "target", folder / "draft", engine=e) for e in ("auto", "plain"))
            known, tested = (
                read_prompts(folder / f"prompts-{s}.jsonl", n) for s, n in (("train", count), ("test", tests))
            )
            known = known if options.samples == 1 else repeated(known, options.samples * len(known))
            inner = Path(room) / f"pair-{len(bars.figures)}"
            place = Place(folder.name, pair, known, tested, tokens, effort(options), inner, progress)
            costs = place.profile(TRAINED)  # one for all, so that nothing hangs on a lucky moment
            if {"unfiltered", "filtered"} & set(options.part):
                plain = place.fitted(place.traces("plain", known), costs, "")
            if "unfiltered" in options.part:
                bars.figures[f"filters, {folder.name}"] = unlike(place, plain, costs, bars)
            if "filtered" in options.part:
                bars.figures[f"trained, {folder.name}"] = alike(place, plain, costs, bars)
            if "texts" in options.part:
                bars.figures[f"completions, {folder.name}"] = completed(place, stock, texts, costs, bars)
    names = ", ".join(folder.name for folder in folders)
    enough = options.prompts >= 40 and options.texts >= 400 and len(folders) > 1
    whole = enough and not options.only_pairs and set(options.part) == set(PARTS)
    return bars.finish(options, f"{tests} prompts and {texts} texts of {names}", whole)


if __name__ == "__main__":
    sys.exit(main())
