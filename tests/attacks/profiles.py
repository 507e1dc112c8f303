"""Damaged latency profiles: each is refused in one line, or prices rounds sanely wherever a profile is read.

Damages are accidents of the file (bits, cuts, insertions), odd values at any place, entries lost, added or swapped, and
numbers scaled. What the loader takes is described (`info`), asked for the seconds of all sorts of rounds, written and read
again, and every `EVALUATED`th replayed by `evaluate`: all numbers must be finite, and no time below 0.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from specstop.cli.commands.info import info
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.models.pair import Pair, load_pair
from specstop.decode.profile import measure_profile
from specstop.decode.profile.measuring import Effort
from specstop.policies.costs import BatchCosts, BatchTable, CostTable
from specstop.policies.errors import InputError
from specstop.policies.fixed import Confidence
from specstop.policies.profile import Profile
from specstop.train.evaluate.evaluate import evaluate

from .random_pair import PROMPTS, prompt_ids, save_pair

COUNT, QUICK = 1000, 60
"""Damaged profiles in a full run, and in a quick one."""

EVALUATED = 6
SECONDS = 20.0
"""Of processor time, which does not depend on how busy the machine is."""

DEPTH = 4
ODD_VALUES = (
    None, True, -1, 0, 1, 10**400, -(10**30), 1e308, -1e308, 5e-324, 1e-12, -0.0, math.nan, math.inf, -math.inf, 3.5, 1e7, "",
    "fast", "0.004", "\ud800", "a\udfffb", "\x1b[2J", "line\nline", [], {}, [[[]]], [1e-3] * 3000, [[0, 1e-3], [0, 1e-3]],
    [[2**40, 1e-3]], [[1, 1e-3], [4, 0]], {"each": -1, "opening": 0}, {"each": math.nan}, [1e-3, math.nan],
)  # fmt: skip
Damage = Callable[[str, random.Random], str]


def chain_profile() -> Profile:
    """Return the profile of a chain."""
    low = CostTable(8.0, (1e-3, 1.1e-3), 2e-5, (4e-3, 4.1e-3, 4.3e-3, 4.8e-3, 5.4e-3, 4.9e-3, 5.5e-3))
    high = CostTable(40.0, (1.5e-3, 1.7e-3), 3e-5, (6e-3, 6.2e-3, 6.3e-3, 7e-3, 7.6e-3, 7.1e-3, 8e-3), 1.2e-3)
    prices = {"confidence": 6e-5, "logistic": 5e-5}
    facts = {"device": "cpu", "threads": 1, "versions": {"torch": "2"}, "spread": 0.1}
    return Profile(low, high, 3e-5, 2e-4, (5e-3, 1e-4), prices, 0.0, facts)


def good_profiles(pair: Pair) -> list[str]:
    """Return the text of the profile of a chain, of a tree, of batches, and of two that were measured."""
    chain = chain_profile()
    points = (0, 4e-3), (1, 4.1e-3), (8, 6e-3), (14, 6.2e-3)
    wide = [dataclasses.replace(t, later_draft_s=1e-3, tree_verify_s=points) for t in (chain.low, chain.high)]
    tree = dataclasses.replace(chain, low=wide[0], high=wide[1], temperature=0.7, tree_outside_s=(1e-4, 2e-5, 1e-6))
    sides = [
        BatchTable(at, ((1, 1e-3), (2, 1.1e-3), (4, 1.5e-3)),
                   {1: ((1, 4e-3), (5, 5e-3)), 4: ((4, 5e-3), (16, 5e-3), (17, 7e-3), (20, 7e-3))})
        for at in (8.0, 40.0)
    ]  # fmt: skip
    batch = dataclasses.replace(chain, batch=BatchCosts(sides[0], sides[1]))
    options: dict[str, Any] = {"depth": 3, "new_tokens": 24, "effort": Effort(repetitions=3)}
    with tempfile.TemporaryDirectory() as folder:
        path, texts = Path(folder) / "profile.json", []
        for more in ({"tree": "2,1"}, {"batch": (1, 2)}):
            measure_profile(pair, prompt_ids(), policies=[Confidence(0.6, DEPTH)], **options, **more).save(path)
            texts.append(path.read_text())
        return [*(json.dumps(one.to_dict()) for one in (chain, tree, batch)), *texts]


# Damages: each changes the text of a profile, with a random generator.


def flip_bits(text: str, chance: random.Random) -> str:
    """Flip 1 to 8 bits."""
    raw = bytearray(text.encode())
    for _ in range(chance.randint(1, 8)):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(7)
    return raw.decode()


def cut(text: str, chance: random.Random) -> str:
    """Cut it short."""
    return text[: chance.randrange(len(text))]


def insert(text: str, chance: random.Random) -> str:
    """Put characters in that mean something in JSON."""
    at = chance.randrange(len(text))
    return text[:at] + "".join(chance.choices('0123456789eE-+.,:"[]{}nN\\', k=chance.randint(1, 6))) + text[at:]


def nest(text: str, chance: random.Random) -> str:
    """Nest lists without end, or nearly."""
    depth = chance.choice([60, 70, 900, 100_000])
    return text.replace('"facts": {', '"facts": {"deep": ' + "[" * depth + "]" * depth + ", ", 1)


def _places(raw: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(raw) if isinstance(raw, dict) else range(len(raw)):
        yield raw, key
        if isinstance(raw[key], dict | list):
            yield from _places(raw[key])


def odd_value(text: str, chance: random.Random) -> str:
    """Write an odd value at any place."""
    raw = json.loads(text)
    holder, key = chance.choice(list(_places(raw)))
    holder[key] = chance.choice(ODD_VALUES)
    return json.dumps(raw)


def lose(text: str, chance: random.Random) -> str:
    """Leave an entry out."""
    raw = json.loads(text)
    holder, key = chance.choice(list(_places(raw)))
    del holder[key]
    return json.dumps(raw)


def add(text: str, chance: random.Random) -> str:
    """Add an entry, under a known name or a new one."""
    raw = json.loads(text)
    holder = chance.choice([raw, raw["low"], raw["high"], raw["decision_s"], raw["facts"]])
    names = [
        "x",
        "\ud83d",
        "verify_s",
        "tree_verify_s",
        "tree_outside_s",
        "kind",
        "batch",
    ]
    holder[chance.choice(names)] = chance.choice(ODD_VALUES)
    return json.dumps(raw)


def swap(text: str, chance: random.Random) -> str:
    """Exchange two entries."""
    raw = json.loads(text)
    (one, a), (other, b) = chance.sample(list(_places(raw)), 2)
    with contextlib.suppress(KeyError, IndexError, TypeError):  # one lay within the other
        one[a], other[b] = other[b], one[a]
    try:
        return json.dumps(raw)
    except ValueError:  # a circle: no file has one
        return odd_value(text, chance)


def scale(text: str, chance: random.Random) -> str:
    """Multiply every number, or some of them, by a factor."""
    factor = chance.choice([-1.0, 0.0, 1e-300, 1e-9, 1e-3, 1e3, 1e9, 1e300, math.nan, math.inf])
    share = chance.choice([0.1, 1.0])

    def scaled(number: str) -> float:
        return float(number) * factor if chance.random() < share else float(number)

    return json.dumps(json.loads(text, parse_float=scaled))


def times(text: str, chance: random.Random) -> str:
    """Write possible but unlikely times: each of its own order of magnitude."""
    share = chance.choice([0.05, 0.3, 1.0])

    def drawn(number: str) -> float:
        return 10.0 ** chance.uniform(-9.0, 6.0) if chance.random() < share else float(number)

    return json.dumps(json.loads(text, parse_float=drawn))


DAMAGES: tuple[Damage, ...] = (
    flip_bits, cut, insert, nest, odd_value, odd_value, odd_value, lose, lose, add, swap, scale, times, times,
)  # fmt: skip


def use(profile: Profile, path: Path) -> None:
    """Ask a profile what every command may ask; raises `AssertionError` where an answer is no time."""
    profile.save(path.with_name("again.json"))
    again = dataclasses.replace(Profile.load(path.with_name("again.json")), source=profile.source)
    assert again == profile, "another profile once written"
    assert profile.noise is None or profile.measurements
    for draw in (profile, *(profile.resampled(np.random.default_rng(seed)) for seed in range(2))):
        price_rounds(draw)
    for json_ in (False, True):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            info(path, json_)
        out.getvalue().encode()


def price_rounds(profile: Profile) -> None:
    """Ask for the seconds of all sorts of rounds; raises `AssertionError` where they are none."""
    seconds = [profile.prefill_seconds(np.array([1, 100]))]
    depth = profile.max_depth
    for name in (*profile.decision_s, "unknown"):
        price = profile.decision(name)
        for context in (1.0, 20.0, 4096.0):
            seconds.append(profile.chain_costs(context, price))
            k = np.arange(depth + 1)
            fed = np.stack([k > 0, 2 * k, 0 * k], 1)
            seconds.append(profile.round_seconds(0 * k + context, k, k[::-1], 1 + 9 * k, k, price, fed))
    seconds.append(np.array([*profile.low.tree_draft(20), *profile.high.tree_verify(20)]))
    streams = np.arange(40)
    for context in (1.0, 20.0, 4096.0):
        seconds += [profile.first_draft_s(streams, context), profile.draft_s(streams, context)]
        seconds += [profile.verify_s(streams, tokens * streams, context) for tokens in (1, 3, 9)]
    for values in seconds:
        assert (np.isfinite(values) & (values >= 0)).all(), f"seconds of {values.tolist()}"


def replay(profile: Profile, trace: Trace) -> None:
    """Evaluate with a profile; raises `AssertionError` where the report has numbers that are none."""
    report = evaluate(trace, profile, [Confidence(0.6, DEPTH)])
    json.dumps(report.to_dict(), allow_nan=False)
    for line in report.lines:
        assert math.isfinite(line.tokens_per_s) and line.tokens_per_s > 0, f"{line.name}: {line.tokens_per_s} tokens/s"


def _trace(pair: Pair, room: Path) -> Trace:
    prompts = [Prompt(f"p{i}", text) for i, text in enumerate(PROMPTS)]
    return collect(pair, prompts, room / "trace", depth=DEPTH, temperature=0.0, max_new_tokens=12, shards=1)


@functools.cache
def _material() -> tuple[Pair, list[str]]:
    """Return a pair and good profiles, which take longer to measure than to damage."""
    with tempfile.TemporaryDirectory() as folder:
        save_pair(Path(folder))
        pair = load_pair(Path(folder) / "target", Path(folder) / "draft", dtype="float64", engine="compact")
        return pair, good_profiles(pair)


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Damage `count` profiles; return how often what happened, and the faults found."""
    pair, texts = _material()
    trace, path = _trace(pair, room), room / "profile.json"
    seen: Counter[str] = Counter()
    faults, taken = [], 0
    for number in range(count):
        chance = random.Random(f"{seed}-{number}")
        damage = chance.choice(DAMAGES)
        path.write_text(damage(chance.choice(texts), chance), encoding="utf-8")
        began, outcome = time.process_time(), "read, and sane"
        try:
            try:
                profile = Profile.load(path)
            except InputError as error:
                outcome, line = "refused", str(error)
                line.encode()
                assert line.isprintable() and len(line) < 400, f"not one line: {line[:200]!r}"
            else:
                use(profile, path)
                taken += 1
                if taken % EVALUATED == 1:
                    outcome = "read, and sane when replayed"
                    replay(profile, trace)
        except Exception as error:  # whatever it is, it is a fault
            outcome = "fault"
            faults.append(f"{number} {damage.__name__}: {type(error).__name__}: {str(error)[:200]}")
        if time.process_time() - began > SECONDS:
            faults.append(f"{number} {damage.__name__}: took {time.process_time() - began:.1f} s")
        seen[f"{damage.__name__}: {outcome}"] += 1
    return seen, faults
