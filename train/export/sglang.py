"""SGLang's adaptive numbers of draft steps by batch size, chosen on traces.

Its rule follows the accepted length and knows no cost: so what it may choose from, and when it moves, is set here by what
replays fastest. The JSON has a key for each batch size, good up to the next one; each entry needs `candidate_steps`, a list
of whole numbers of 0 or more (`sglang/srt/speculative/adaptive_spec_params.py` of 0.5.23).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...decode.benchmark import Ratio
from ...decode.engines.sglang import KEY, rule_entry
from ...policies.display import markdown_table
from ..evaluate.statistics import Resamples, Values
from ..replay.traces.arrays import TraceArrays, typical_context
from .by_batch import WORTH, FixedBatches, choose_lengths
from .folder import Export, Written, caveats, drafter_caveat, find_sizes
from .lockstep import Steps, lockstep
from .page import alone_table, page_text, policy_loss
from .serving import assumptions, batch_profile, is_extrapolated, measured_rows, measured_text

CONFIG, COSTED = "adaptive.json", "costed.json"
VERSION = "0.5.23"

UP = (0.0, -0.75, -1.5, -2.5)
DOWN = (-0.25, -0.75, -1.5, -2.5)

DEFAULTS = {
    1: Steps((1, 3, 5, 7)),
    8: Steps((0, 1, 3), 0.0, 0.0),
    32: Steps((0, 1), 0.0, 0.0),
    64: Steps((0,), 0.0, 0.0),
}
"""What SGLang uses without a file."""

MAX_BATCH = 64


def make_files(export: Export) -> Written:
    """Return SGLang's adaptive configs: the candidate steps and thresholds that replay fastest.

    A batch larger than the largest one looked at shares its entry.
    """
    sizes = [size for size in find_sizes(export.max_batch or MAX_BATCH) if size & (size - 1) == 0]
    lengths = choose_lengths(FixedBatches(export, sizes))
    chosen = choose_steps(export, lengths)
    start = export.best
    config = {str(size): entry(rule) for size, rule in chosen.items()}
    batches = by_batch(export, chosen, lengths, start)
    alone = export.alone(lockstep(export.sides.held, [chosen[1]], 1, start, export.seed).rounds(0))
    figures = {
        "start": start,
        "alone": alone,
        "batches": batches,
        "measured_rows": measured_rows(export.profile),
    }
    files: dict[str, str | bytes] = {
        CONFIG: json.dumps(config, indent=2) + "\n",
        COSTED: json.dumps(costed(export, lengths), indent=2) + "\n",
    }
    return Written(files, page(export, chosen, start, alone, batches), figures)


def entry(rule: Steps) -> dict[str, Any]:
    """Return a rule as the JSON has it."""
    return {
        "candidate_steps": list(rule.candidates),
        "up_hysteresis": rule.up,
        "down_hysteresis": rule.down,
        "ceiling_coeff": 0,
    }


def costed(export: Export, lengths: Mapping[int, int]) -> dict[str, Any]:
    """Return the configuration of the rule that knows costs (`decode.engines.sglang`): steps near the best fixed length.

    Args:
        export: in the making.
        lengths: the fixed length of each batch size.
    """
    arrays = export.sides.fit
    reached = arrays.accepted[~arrays.cut].numpy()
    survive = [float((reached >= depth).mean()) for depth in range(export.depth + 1)]
    # Of each position given that all before it were accepted.
    acceptance = [after / before if before else 0.0 for before, after in itertools.pairwise(survive)]
    steps = np.arange(export.depth + 1)
    context, one = np.full(len(steps), typical_context(arrays)), np.ones(len(steps), dtype=np.int64)
    seconds = {}
    for size in lengths:
        share = batch_profile(export.profile, size).round_seconds(context, steps, steps, one, 0 * one, 0.0)
        seconds[size] = (size * share).tolist()
    near = {
        size: sorted({k for k in (length - 1, length, length + 1, 0 if size > 1 else length) if 0 <= k <= export.depth})
        for size, length in lengths.items()
    }
    config: dict[str, Any] = {str(size): {"candidate_steps": steps} for size, steps in near.items()}
    return {**config, KEY: rule_entry(acceptance, seconds)}


def rules_around(length: int, depth: int) -> list[Steps]:
    """Return the rules that are tried where `length` is the best fixed one: that alone, then sets around it."""
    raw = [
        (length - 1, length),
        (length, length + 1),
        (length - 1, length, length + 1),
        (length - 2, length, length + 2),
        (1, length),
        (1, length, 2 * length),
        (0, length),
    ]
    inside = dict.fromkeys(tuple(sorted({k for k in some if 0 <= k <= depth})) for some in raw)
    # With down above up a mean between both would send the length up and down again without end.
    shifts = [(up, down) for up, down in itertools.product(UP, DOWN) if up >= down]
    adaptive = [Steps(some, up, down) for some in inside if len(some) > 1 for up, down in shifts]
    return [Steps((length,)), *adaptive]


def choose_steps(export: Export, lengths: Mapping[int, int]) -> dict[int, Steps]:
    """Return the rules by the batch size that they begin at, chosen by the throughput of a full batch on the fit side.

    The most steps of a batch are no more than those of a smaller one, unless its best fixed length is clearly longer. A rule
    that the held-out prompts put clearly below the fixed length is not taken.

    Args:
        export: in the making.
        lengths: the fixed length of each batch size (`by_batch.choose_lengths`).
    """
    chosen: dict[int, Steps] = {}
    smaller = None
    for done, (size, length) in enumerate(lengths.items()):
        export.progress("adapt", done, len(lengths))
        # The engine uses it here too unless this size gets an entry of its own.
        before = list(chosen.values())[-1:]
        rises = smaller is not None and length > lengths[smaller]
        most = export.depth if rises or not before else before[0].candidates[-1]
        fixed, *around = rules_around(length, export.depth)
        adaptive = [rule for rule in around if rule.candidates[-1] <= most]
        rates = _Rates(export.sides.fit, [fixed, *before, *adaptive], size, lengths[1], export)
        top = max([fixed, *adaptive], key=rates.mean)
        if not rates.is_worth(top, fixed) or _is_slower(export, size, lengths[1], top, fixed):
            top = fixed
        if not before or rates.is_worth(top, before[0]) or _is_slower(export, size, lengths[1], before[0], fixed):
            chosen[size] = top
        smaller = size
    export.progress("adapt", len(lengths), len(lengths))
    return chosen


class _Rates:
    """Committed tokens per second of full batches under several rules, and how sure their ratios are."""

    def __init__(self, arrays: TraceArrays, rules: Sequence[Steps], size: int, start: int, export: Export) -> None:
        played = lockstep(arrays, rules, size, start, export.seed)
        committed, spent = played.of_rounds(batch_profile(export.profile, size))
        self._boot = Resamples(arrays.clusters, export.seed)
        rates = self._boot.total(committed.T) / self._boot.total(spent.T)  # [1 + R, rules]
        self._rates: dict[Steps, Values] = {rule: rates[:, at] for at, rule in enumerate(rules)}

    def mean(self, rule: Steps) -> float:
        """Return the rate of a rule over all prompts."""
        return float(self._rates[rule][0])

    def ratio(self, rule: Steps, than: Steps) -> Ratio:
        """Return how many times as fast a rule is as another one, with the interval over prompts."""
        return self._boot.interval(self._rates[rule] / self._rates[than])

    def is_worth(self, rule: Steps, than: Steps) -> bool:
        """Whether a rule is clearly faster than another one, by more than `WORTH`."""
        found = self.ratio(rule, than)
        return found.is_above and found.value > 1.0 + WORTH


def _is_slower(export: Export, size: int, start: int, rule: Steps, fixed: Steps) -> bool:
    """Whether the held-out prompts put a rule clearly below a fixed length."""
    return _Rates(export.sides.held, [rule, fixed], size, start, export).ratio(rule, fixed).is_below


def rule_at(chosen: Mapping[int, Steps], size: int) -> Steps:
    """Return the rule of a batch size, as the engine looks it up: that of the largest key not above it."""
    return [rule for first, rule in sorted(chosen.items()) if first <= size][-1]


def by_batch(
    export: Export, chosen: Mapping[int, Steps], lengths: Mapping[int, int], start: int
) -> list[dict[str, Any]]:
    """Return the held-out throughput of full batches: this file, SGLang's default, fixed lengths, as ratios."""
    lines = []
    for size, length in lengths.items():
        rule = rule_at(chosen, size)
        default = rule_at(DEFAULTS, size)
        # The traces say nothing of longer drafts.
        default = Steps(tuple(k for k in default.candidates if k <= export.depth), default.up, default.down)
        rows = size * (max(rule.candidates) + 1)
        fixed, same, plain = Steps((length,)), Steps((start,)), Steps((0,))
        rates = _Rates(export.sides.held, [rule, default, plain, fixed, same], size, start, export)
        lines.append(
            {
                "batch": size,
                "steps": list(rule.candidates),
                "rows": rows,
                "extrapolated": is_extrapolated(export.profile, size, rows),
                "to_plain": rates.ratio(rule, plain).value,
                "to_fixed_here": rates.ratio(rule, fixed),
                "fixed_here": length,
                "to_start": rates.ratio(rule, same).value,
                "to_default": rates.ratio(rule, default).value,
            }
        )
    return lines


def page(
    export: Export,
    chosen: Mapping[int, Steps],
    start: int,
    alone: Mapping[str, Any],
    batches: Sequence[Mapping[str, Any]],
) -> str:
    """Return the README."""
    lines = [
        (
            f"{line['batch']}",
            ", ".join(map(str, line["steps"])),
            f"{line['to_plain']:.3f}",
            f"{line['to_start']:.3f}",
            f"{line['to_fixed_here'].text()} ({line['fixed_here']})",
            f"{line['to_default']:.3f}",
            "extrapolated" if line["extrapolated"] else "",
        )
        for line in batches
    ]
    columns = ("batch", "steps", "to plain", f"to {start} always", "to best fixed here", "to SGLang's default",
               measured_text(export.profile))  # fmt: skip
    by_size = (
        f"A batch that is always full, all requests under SGLang's own rule, on {alone['prompts']}; reading prompts is left "
        "out:\n\n" + markdown_table(columns, lines)
    )
    first = rule_at(chosen, 1).candidates
    begin = start if start in first else first[len(first) // 2]
    fallback = max(start, 1)
    use = (
        "```console\npython -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 "
        "--speculative-draft-model-path DRAFT --speculative-eagle-topk 1 "
        f"--speculative-num-steps {begin} --speculative-num-draft-tokens {begin + 1} "
        "--speculative-adaptive --speculative-adaptive-config adaptive.json\n```\n\n"
        f"SGLang {VERSION} adapts for EAGLE and EAGLE3 with top-k 1 alone; for every other algorithm it says so and goes on "
        "with fixed steps. For a draft model of its own (`--speculative-algorithm STANDALONE`) what is left is the fixed "
        f"number: `--speculative-num-steps {fallback} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {fallback + 1}`. The loader of SGLang {VERSION} accepts the file.\n\n"
        f"`{COSTED}` in its place, with specstop installed beside SGLang: a plugin puts a rule in the place of SGLang's that "
        "knows what steps cost at each batch size and takes those with the most tokens a second, by acceptance as it is "
        "seen. It was held against SGLang's own classes, not run in a server; the figures below are not of it."
    )
    lost = [
        "The stop policy itself. SGLang gives all requests of a batch one number of steps and moves it by the mean accepted "
        "length of the last steps: it looks neither at the text nor at the draft's probabilities, and no head, calibration "
        "or rule is carried over.",
        policy_loss(alone),
        "SGLang's rule knows no costs. Where no thresholds make it clearly faster than one fixed length, by more than "
        f"{WORTH:.1%}, the file names that length alone and nothing adapts.",
    ]
    assumed = [
        "The traces are of the drafter that is deployed: lengths tuned on a draft model of its own say little about an EAGLE "
        "head.",
        *assumptions(export.profile),
        "The mean is over a batch that is always full and of these texts in random order; bursts, mixed lengths and CUDA "
        "graphs that pad the batch are not modelled.",
        *drafter_caveat(export, "SGLang"),
        *caveats(export),
    ]
    what = (
        "Candidate steps and thresholds by batch size for SGLang's `--speculative-adaptive`, chosen by replaying its rule on "
        "traces under the latency profile, scaled to each batch."
    )
    return page_text(
        "Adaptive draft steps for SGLang", what, use, [alone_table(alone), by_size], lost, assumed, export.facts()
    )
