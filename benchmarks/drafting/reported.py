"""What is printed of the settings of drafters, replayed and live, and the bars that they are held to."""

from __future__ import annotations

from typing import Any

from bars import Bars
from specstop.decode.benchmark import Ratio

from .chosen import CHAIN, FIXED, NODES, STATIC, WHOLE, Chosen
from .ground import Ground
from .live import Live, beside

SETTINGS = (FIXED, CHAIN, WHOLE, STATIC, NODES)
TRAINED = ("medusa", "hydra", "ctc", "layer")
BETTER, MISS, ROUNDS = 1.05, 0.07, 10_000


def replayed(name: str, chosen: Chosen) -> dict[str, Any]:
    """Print and return what replay says of a drafter's settings."""
    bound = chosen.bound / chosen.plain
    print(f"{name}: tokens a target call, speed over plain decoding, replayed; no one has more than {bound:.2f}")
    low = chosen.profile.low
    first, later, plain, one = steps = [1e3 * s for s in (low.draft_s[0], low.later_s, *low.verify_s[:2])]
    print(f"  draft steps {first:.2f} and {later:.2f} ms, verifications of no token {plain:.2f}, of one {one:.2f} ms")
    out: dict[str, Any] = {"bound": bound, "ms": steps}
    for setting in SETTINGS:
        played = chosen.played[setting]
        speed, sent = played.rate / chosen.plain, float(played.verified.sum() / played.rounds.sum())
        tree = chosen.settings[setting].tree
        drafted = f"{played.name} in the tree {tree}" if tree else played.name
        print(f"  {setting:<20}{played.block_efficiency:6.2f}{speed:7.2f}   {sent:.1f} verified, {drafted}", flush=True)
        out[setting] = {"per call": played.block_efficiency, "speed": speed, "verified": sent, "policy": played.name}
    return out


def node_bar(bars: Bars, name: str, chosen: Chosen, told: tuple[float, float]) -> None:
    """Note whether learned nodes are ahead of the best static tree, or by `told`, with decisions paid for, cannot be."""
    ratio = chosen.over(NODES, STATIC)
    free, priced = (rate / chosen.played[STATIC].rate for rate in told)
    text = (
        f"learned {ratio.value:.3f} [{ratio.low or 0:.3f}, {ratio.high or 0:.3f}] x the best static tree, {BETTER:g} wanted; "
        f"learned on the test prompts themselves {priced:.3f}, decisions free {free:.3f}"
    )
    met = ratio.value >= BETTER or priced < BETTER  # who knows the test prompts has to pay for decisions as well
    bars.add(name, [ratio.value, ratio.low, ratio.high, priced, free], met, text)


def live_bars(bars: Bars, at: str, lived: dict[str, Live], figures: dict[str, Any]) -> None:
    """Print what was decoded, and note its bars."""
    for name, live in lived.items():
        print(f"{at} {name}, live: tokens a target call, speed over plain decoding, predicted less measured")
        for setting, (tokens, speed) in live.tallies.items():
            miss = f"{live.miss[setting]:+.1%}" if setting in live.miss else ""
            print(f"  {setting:<40}{tokens:6.2f}{speed:7.2f} {miss}", flush=True)
        figures.setdefault(name, {})["live"] = live.tallies
        worst = max(map(abs, live.miss.values()))
        bars.add(f"{at} {name} predicted", live.miss, worst <= MISS, f"worst {worst:.1%}, within {MISS:.0%} wanted")
        text = f"{live.rounds} rounds, {live.ties} ties, {live.wrong} wrong; {ROUNDS} wanted, none wrong"
        bars.add(f"{at} {name} replay", live.rounds, not live.wrong and live.rounds >= ROUNDS, text)
    same, texts = sum(live.same for live in lived.values()), sum(live.texts for live in lived.values())
    bars.add(
        f"{at} texts",
        [same, texts],
        same == texts,
        f"{same} of {texts} lossless texts equal plain decoding, all wanted",
    )


def heads(
    bars: Bars, ground: Ground, specs: dict[str, str], chosen: dict[str, Chosen], lived: dict[str, Live], at: str
) -> None:
    """Decode with every head and the draft model in turns, each in its fastest setting, and note the best head."""
    names = [name for name in ("model", *TRAINED) if name in lived]
    if len(names) < 2 or names[0] != "model":
        return
    best = {name: max(SETTINGS, key=lambda setting: lived[name].tallies[setting][1]) for name in names}
    found = beside(ground, {name: (specs[name], best[name], chosen[name]) for name in names}, "model")
    for name, (speed, ratio) in found.items():
        print(
            f"{at} {name} in turns with the others, {best[name]}: {speed:.2f} of plain, {ratio.text()} of the draft model"
        )
    head = max(names[1:], key=lambda name: found[name][1].value)
    ratio = found[head][1]
    bars.figures[f"{at} in turns"] = {name: [speed, *_numbers(ratio)] for name, (speed, ratio) in found.items()}
    bars.add(
        f"{at} heads",
        _numbers(ratio),
        ratio.value > 1.0,
        f"{head} has {ratio.text()} x the draft model's tokens/s, more wanted",
    )


def _numbers(ratio: Ratio) -> list[float | None]:
    return [ratio.value, ratio.low, ratio.high]
