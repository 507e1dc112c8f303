"""llama.cpp's largest-probability rule, tuned on traces by replayed throughput.

Its draft is greedy: the token drawn is the likeliest, and p is that token's share among the ten likeliest, at temperature 1
(`common/speculative.cpp`). Since `--spec-draft-n-max` and its kin came (`--draft-max` and `--draft-min` then ended with an
error) a token below `p_min` is dropped, and a draft below `n_min` tokens with it; before, that token was still verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...policies.display import markdown_table
from ...policies.errors import TraceError
from ..replay.known_lengths import ReplayedRuns, draft_bound, replay_lengths
from ..replay.traces.arrays import TraceArrays
from .folder import Export, Written, caveats, drafter_caveat
from .page import alone_table, page_text, policy_loss

ARGS, OLDER_ARGS = "llama.args", "llama-older.args"
SOURCE = "ggml-org/llama.cpp at 00dc805 (tools/server/README.md) and 001d906 (common/speculative.cpp)"

TOP = tuple(f"top{rank}" for rank in range(1, 11))
SHARES = tuple(round(0.05 * i, 2) for i in range(20))
LEAST = (0, 2, 3)
DEFAULT, DEFAULT_MAX = 0.0, 3
"""p_min and n_max of builds with `--spec-draft-*`, where nothing is said."""


@dataclass(frozen=True)
class Share:
    """Draft on while the likeliest token has at least the share `p_min` of the ten likeliest.

    Attributes:
        p_min, n_max, n_min: `--spec-draft-p-min`, `--spec-draft-n-max`, `--spec-draft-n-min`.
        older: as before the flags were renamed: the token that is not sure enough is verified as well.
    """

    p_min: float
    n_max: int
    n_min: int = 0
    older: bool = False

    def lengths(self, sure: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
        """Return (drafted, verified), each [N], where the first `sure` [N] tokens have that share and `bound` [N] can be
        drafted."""
        most = bound.clamp_max(self.n_max)
        drafted = torch.minimum(sure + 1, most)  # the token that falls short is drawn, too
        verified = drafted if self.older else torch.minimum(sure, most)
        return drafted, torch.where(verified >= self.n_min, verified, 0)


def shares(arrays: TraceArrays) -> Tensor:
    """Return [N, K], the likeliest token's share of the ten likeliest; of all where a trace has `top1` alone."""
    top1 = arrays.column("top1")
    if not set(TOP) <= set(arrays.columns):
        return top1
    return top1 / torch.stack([arrays.column(name) for name in TOP]).sum(0).clamp_min(1e-30)


def replay_shares(arrays: TraceArrays, rules: Sequence[Share]) -> ReplayedRuns:
    """Walk all texts under several rules."""
    p, bound = shares(arrays), draft_bound(arrays)
    counts = {t: (p >= t).long().cumprod(1).sum(1) for t in {rule.p_min for rule in rules}}  # [N] before the first
    pairs = [rule.lengths(counts[rule.p_min], bound) for rule in rules]
    drafted, verified = (torch.stack(column) for column in zip(*pairs, strict=True))
    return replay_lengths(arrays, drafted, verified)


def make_files(export: Export) -> Written:
    """Return llama.cpp's arguments: the draft length and `p_min` that replay fastest.

    Raises:
        TraceError: the traces lack `top1`.
    """
    if "top1" not in export.header.features:
        raise TraceError("--traces: expected the feature top1 (and top2 to top10); collect them again with it")
    now, older = tuned(export), tuned(export, older=True)
    usual = Share(DEFAULT, min(DEFAULT_MAX, export.depth))
    replayed = replay_shares(export.sides.held, [now, older, usual])
    mine, before, default = (replayed.rounds(run) for run in range(3))
    alone = export.alone(mine)
    beside = {"to_default": export.ratio(mine, default), "older": export.alone(before)}
    figures = {
        "settings": settings(now),
        "older_settings": settings(older),
        "alone": alone,
        **beside,
        "ten_likeliest": set(TOP) <= set(export.header.features),
    }
    files: dict[str, str | bytes] = {ARGS: args_text(now), OLDER_ARGS: args_text(older)}
    return Written(files, page(export, now, older, alone, beside), figures)


def tuned(export: Export, *, older: bool = False) -> Share:
    """Return the fastest setting on the fit side: every p_min with every length, and with every least length."""
    best, least = Share(0.0, max(export.best, 1), older=older), float("inf")
    for done, p in enumerate(SHARES):
        export.progress("tune, older" if older else "tune", done, len(SHARES))
        smallest = (0,) if older else LEAST
        rules = [Share(p, n, m, older) for n in range(1, export.depth + 1) for m in smallest if m <= n]
        seconds = replay_shares(export.sides.fit, rules).seconds(export.profile).sum(1)
        at = int(seconds.argmin())
        if float(seconds[at]) < least:
            best, least = rules[at], float(seconds[at])
    export.progress("tune, older" if older else "tune", len(SHARES), len(SHARES))
    return best


def settings(rule: Share) -> dict[str, Any]:
    """Return a rule's three numbers."""
    return {"p_min": rule.p_min, "n_max": rule.n_max, "n_min": rule.n_min}


def args_text(rule: Share) -> str:
    """Return the arguments, one a line."""
    names = ("--draft-max", "--draft-min", "--draft-p-min") if rule.older else (
        "--spec-draft-n-max", "--spec-draft-n-min", "--spec-draft-p-min")  # fmt: skip
    values = (str(rule.n_max), str(rule.n_min), f"{rule.p_min:g}")
    first = [] if rule.older else ["--spec-type draft-simple"]
    return "\n".join([*first, *(f"{name} {value}" for name, value in zip(names, values, strict=True))]) + "\n"


def page(export: Export, now: Share, older: Share, alone: Mapping[str, Any], beside: Mapping[str, Any]) -> str:
    """Return the README."""
    use = (
        "```console\nllama-server -m TARGET.gguf -md DRAFT.gguf $(cat llama.args)\n```\n\n"
        f"For builds that still have `--draft-max`: `$(cat {OLDER_ARGS})`. In newer ones that name ends with an error, while "
        "`--draft-p-min` stays as a second name whose default went from 0.75 to 0: set it always. Names and behaviour were "
        f"read in {SOURCE}."
    )
    rows = [
        ("n_max (most tokens drafted)", f"{now.n_max}", f"{older.n_max}"),
        ("n_min (fewer are dropped)", f"{now.n_min}", f"{older.n_min}"),
        ("p_min (stop below that share)", f"{now.p_min:g}", f"{older.p_min:g}"),
        ("to plain decoding", alone["to_plain"].text(), beside["older"]["to_plain"].text()),
        (
            f"to the best fixed length ({alone['best_fixed']})",
            alone["to_best_fixed"].text(),
            beside["older"]["to_best_fixed"].text(),
        ),
        (f"to llama.cpp's default ({DEFAULT_MAX} tokens, p_min 0)", beside["to_default"].text(), ""),
    ]
    chosen = "The settings, for builds with `--spec-draft-*` and for older ones:\n\n" + markdown_table(
        ("", f"`{ARGS}`", f"`{OLDER_ARGS}`"), rows
    )
    lost = [
        "The stop policy itself, but for one comparison: llama.cpp stops by the draft's largest probability alone. No other "
        "feature, no head, calibration, survival over several tokens or earlier round is carried over.",
        policy_loss(alone),
        "llama.cpp drops the token that it stopped at, although it was drafted already; a policy here has it verified.",
    ]
    assumed = [
        "One request at a time (`--parallel 1`), costs as the profile has them, measured through the loop of specstop. "
        "llama.cpp's own kernels and quantised weights cost otherwise, and its draft reads every verified token again.",
        "Quantised models draft and accept as those did that the traces were recorded with.",
        "A decision costs nothing.",
        *drafter_caveat(export, "llama.cpp"),
        *caveats(export),
    ]
    if not set(TOP) <= set(export.header.features):
        assumed.append(
            "The traces have no `top2` to `top10`: p is taken as the whole probability, which is below its share of ten."
        )
    if export.header.temperature > 0:
        assumed.append("llama.cpp's draft is greedy at every temperature; that of the traces was sampled.")
    what = "The draft length and `p_min` for llama.cpp with the highest replayed throughput under the latency profile."
    return page_text(
        "Draft settings for llama.cpp", what, use, [chosen, alone_table(alone)], lost, assumed, export.facts()
    )
