"""A drafter's settings decoded live beside plain decoding: texts, rounds and speeds, against what replay says of them."""

from __future__ import annotations

from dataclasses import dataclass

from replay import equality
from specstop.decode import Generation, Pair, Settings, Speculator, Tally, stream_key, with_drafter
from specstop.decode.benchmark import Ratio, run_alternating
from specstop.decode.loop import Request
from specstop.decode.profile import CalibrationRun
from specstop.policies import FixedLength
from specstop.train.evaluate.statistics import Resamples
from specstop.train.replay.run import replay

from .chosen import FIXED, STATIC, WHOLE, Chosen, Setting
from .ground import Ground

LOSSY = "whole tree, typical acceptance (LOSSY)"
BATCH, BEFORE = 4, 4


@dataclass(frozen=True)
class Live:
    """What was decoded.

    Attributes:
        tallies: by setting: tokens a target call, and speed over plain decoding.
        same, texts: of lossless settings, how many equal plain decoding; some of them in a batch.
        rounds, ties, wrong: compared with replay; a tie is told apart by float noise alone.
        miss: by setting, predicted speed over plain decoding by that measured, less 1.
    """

    tallies: dict[str, tuple[float, float]]
    same: int
    texts: int
    rounds: int
    ties: int
    wrong: int
    miss: dict[str, float]


def decode(ground: Ground, drafter: str, chosen: Chosen) -> Live:
    """Decode the test prompts in alternation with plain decoding, under a profile of these very minutes."""
    pair, known = with_drafter(ground.pair, drafter), ground.ids(ground.fit)
    prompts = list(zip([p.id for p in ground.test], ground.ids(ground.test), strict=True))
    calibration = CalibrationRun(
        pair, known, depth=ground.depth, temperature=ground.temperature, tree=ground.tree, verification="match"
    )
    for number in range(BEFORE):
        calibration.play(number)
    settings = dict(chosen.settings)
    plain = Setting(FixedLength(0), None, settings[FIXED].test)
    runs = {name: _run(ground, pair, one, chosen) for name, one in {"plain": plain, **settings}.items()}
    if ground.temperature > 0 and drafter.startswith("medusa"):
        runs[LOSSY] = _run(ground, pair, settings[WHOLE], chosen, "typical")
    # After every prompt: a machine that changes its pace by a third makes a price from half as many 5% uncertain.
    made = run_alternating(list(runs.values()), prompts, calibration=calibration, calibrate_every=1)
    texts = dict(zip(runs, made, strict=True))
    rates = {name: Tally(made).tokens_per_s for name, made in texts.items()}
    tallies = {name: (Tally(made).block_efficiency, rates[name] / rates["plain"]) for name, made in texts.items()}
    profile = calibration.profile().with_decisions(chosen.profile.decision_s)
    guessed = {name: replay(one.test, one.policy, profile).rate for name, one in settings.items()}
    base = replay(plain.test, plain.policy, profile).rate
    sums = [equality(one.test, one.policy, chosen.profile, texts[name]) for name, one in settings.items()]
    lossless = [texts[name] for name in settings] + [
        _side_by_side(ground, pair, settings[n], chosen) for n in (FIXED, STATIC)
    ]
    same = [a.tokens == b.tokens for made in lossless for a, b in zip(made, texts["plain"], strict=True)]
    return Live(
        tallies, sum(same), len(same), *(sum(column) for column in zip(*sums, strict=True)),
        {name: (guess / base) / tallies[name][1] - 1 for name, guess in guessed.items()},
    )  # fmt: skip


def beside(ground: Ground, drafters: dict[str, tuple[str, str, Chosen]], first: str) -> dict[str, tuple[float, Ratio]]:
    """Decode the test prompts with several drafters in turns, so that minutes in which the machine is slow hit all alike.

    Args:
        ground: see `Ground`.
        drafters: by name what `--drafter` takes, the setting it is run in, and what was chosen for it.
        first: the drafter that the others are compared with.

    Returns:
        By name, speed over plain decoding, and over the first with an interval over prompts.
    """
    prompts = list(zip([p.id for p in ground.test], ground.ids(ground.test), strict=True))
    runs = {
        name: _run(ground, with_drafter(ground.pair, spec), chosen.settings[setting], chosen)
        for name, (spec, setting, chosen) in drafters.items()
    }
    _, _, chosen = drafters[first]
    plain = _run(ground, ground.pair, Setting(FixedLength(0), None, chosen.settings[FIXED].test), chosen)
    made = run_alternating([plain, *runs.values()], prompts)
    samples = Resamples([p.id for p in ground.test])
    spent = [samples.total([text.seconds for text in texts]) for texts in made]
    seconds = dict(zip(runs, spent[1:], strict=True))
    return {
        name: (float(spent[0][0] / own[0]), samples.interval(seconds[first] / own)) for name, own in seconds.items()
    }


def per_call(ground: Ground, drafters: dict[str, str]) -> dict[str, tuple[float, float, int]]:
    """Return by name tokens a target call in chains and in the whole tree, and how many texts equal plain decoding."""
    asked = [Request(ids, stream_key(0, p.id)) for p, ids in zip(ground.test, ground.ids(ground.test), strict=True)]
    shapes = [
        Settings(ground.temperature, ground.tokens, ground.depth, tree=tree, verification="match")
        for tree in (None, ground.tree)
    ]
    plain = Speculator(ground.pair, FixedLength(0), shapes[0]).run(asked)
    out = {}
    for done, (name, spec) in enumerate(drafters.items()):
        ground.progress("tokens a call", done, len(drafters))
        pair = with_drafter(ground.pair, spec)
        chains, trees = (Speculator(pair, FixedLength(ground.depth), shape).run(asked) for shape in shapes)
        same = sum(a.tokens == b.tokens for made in (chains, trees) for a, b in zip(made, plain, strict=True))
        out[name] = Tally(chains).block_efficiency, Tally(trees).block_efficiency, same
    return out


def _run(
    ground: Ground, pair: Pair, setting: Setting, chosen: Chosen, verification: str = "match", batch: int = 1
) -> Speculator:
    settings = Settings(ground.temperature, ground.tokens, ground.depth, verification=verification, tree=setting.tree)
    return Speculator(pair, setting.policy, settings, chosen.profile, batch=batch)


def _side_by_side(ground: Ground, pair: Pair, setting: Setting, chosen: Chosen) -> list[Generation]:
    """Return the texts of the test prompts decoded in a batch."""
    asked = [
        Request(ids, stream_key(0, prompt.id)) for prompt, ids in zip(ground.test, ground.ids(ground.test), strict=True)
    ]
    return _run(ground, pair, setting, chosen, batch=BATCH).run(asked)
