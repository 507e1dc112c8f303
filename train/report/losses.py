"""The prompts on which a policy loses most, and the text where it happened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...collect.schema import Header
from ..replay.bounds.regret import Regret
from ..replay.log import Played
from ..replay.traces.arrays import TraceArrays
from .reliability import has_survival, survival

PROMPTS = 6
ROUNDS = 3
CONTEXT = 16
UNKNOWN = "▢"
"""Stands for a token that only the target proposed: a trace keeps the draft's."""


@dataclass(frozen=True)
class Piece:
    """A token of a round.

    Attributes:
        text: decoded, or the token's id.
        survival: S_j as the policy computed it; None where it is not asked, or computes none.
        state: accepted, rejected, or missed: not drafted, and it would have been accepted.
    """

    text: str
    survival: float | None
    state: str


@dataclass(frozen=True)
class LossRound:
    """A round that stopped wrongly.

    Attributes:
        anchor: tokens generated before it.
        kind: too early, or too late.
        chosen, ideal, accepted: depth drafted, depth the oracle would have drafted, tokens accepted.
        ms: lost against the oracle.
        context: the tokens before it.
        pieces: the round's tokens; in a tree those of the accepted path, then the first candidates.
    """

    anchor: int
    kind: str
    chosen: int
    ideal: int
    accepted: int
    ms: float
    context: tuple[str, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class LossPrompt:
    """A text with what wrong stops cost on it, in milliseconds, its speed against the best fixed length, its worst rounds."""

    prompt: str
    group: str
    tokens: int
    early_ms: float
    late_ms: float
    to_best_fixed: float
    rounds: tuple[LossRound, ...]


def decoder(header: Header) -> Callable[[int], str]:
    """Return token id -> text, from the target folder that the trace names if it lies here; else ids as they are.

    Nothing is fetched, and a tokenizer other than the recorded one is not used.
    """
    if header.target and Path(header.target).is_dir():
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(header.target, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError):
            return str
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
        if hashlib.blake2b(vocabulary, digest_size=8).hexdigest() == header.pair.get("tokenizer"):
            return lambda token: str(tokenizer.decode([token]))
    return str


def largest_losses(
    arrays: TraceArrays, played: Played, best: Played, regret: Regret, decode: Callable[[int], str]
) -> tuple[LossPrompt, ...]:
    """Return the texts that lose most by wrong stops, each with its worst rounds.

    Args:
        arrays: the trace.
        played: the policy.
        best: the best fixed length.
        regret: of the policy's rounds.
        decode: token id -> text.
    """
    rounds, streams = played.rounds, arrays.sequences
    wrong = torch.where(regret.early | regret.late, regret.choice_s, 0.0)
    early, late = (1e3 * rounds.by_sequence(regret.choice_s * kind, streams) for kind in (regret.early, regret.late))
    ratio = best.result.seconds / played.result.seconds
    out = []
    for text in torch.argsort(early + late, descending=True)[:PROMPTS].tolist():
        mine = torch.nonzero(rounds.sequence == text)[:, 0]
        worst = mine[torch.argsort(wrong[mine], descending=True)]
        lines = [_round(arrays, played, regret, at, decode) for at in _shown(worst[wrong[worst] > 0], regret)]
        if lines:
            out.append(
                LossPrompt(
                    arrays.prompt_ids[text],
                    arrays.groups[text],
                    int(arrays.text_tokens[text]),
                    float(early[text]),
                    float(late[text]),
                    float(ratio[text]),
                    tuple(lines),
                )
            )
    return tuple(out)


def _shown(worst: Tensor, regret: Regret) -> list[int]:
    """Return the worst rounds, the last of them of the other kind of mistake than the first, if there is one."""
    if not len(worst):
        return []
    other = worst[regret.early[worst] != regret.early[worst[0]]].tolist()
    first = [at for at in worst.tolist() if at not in other[:1]][: ROUNDS - len(other[:1])]
    return [*first, *other[:1]]


def _round(arrays: TraceArrays, played: Played, regret: Regret, at: int, decode: Callable[[int], str]) -> LossRound:
    rounds = played.rounds
    text, anchor, chosen = (int(values[at]) for values in (rounds.sequence, rounds.anchor, rounds.steps))
    begin = int(arrays.first_anchor[text])
    row = int(arrays.offset[text]) + anchor - begin
    nodes = _path(arrays, row)
    length = int(arrays.accepted[row])
    guesses: list[float] = []
    if has_survival(played.policy):
        one = slice(at, at + 1)
        found = survival(played.policy, arrays, torch.tensor([row]), played.result.history[one])[0]
        guesses = [float(found[node]) for node in nodes]
    pieces = []
    for depth, node in enumerate(nodes[: max(chosen, length)], 1):
        # NaN, which equals nothing: the policy is not asked there.
        guess = guesses[depth - 1] if guesses and guesses[depth - 1] == guesses[depth - 1] else None
        state = ("accepted" if depth <= chosen else "missed") if depth <= length else "rejected"
        pieces.append(Piece(decode(int(arrays.tokens[row, node])), guess, state))
    # A trace keeps drafts, not texts: a token of the text is known where the draft after the token before it was accepted.
    before = range(max(anchor - CONTEXT, begin), anchor)
    context = [_committed(arrays, row - anchor + position, decode) for position in before]
    return LossRound(
        anchor,
        "too early" if bool(regret.early[at]) else "too late",
        chosen,
        int(regret.ideal[at]),
        int(rounds.accepted[at]),
        1e3 * float(regret.choice_s[at]),
        tuple(context),
        tuple(pieces),
    )


def _path(arrays: TraceArrays, row: int) -> list[int]:
    """Return the nodes of the accepted path, and below it the first candidate of each depth."""
    tree, node, out = arrays.tree, 0, []
    while tree.children[node]:
        below = tree.children[node]
        hit = [] if arrays.path is None else [child for child in below if bool(arrays.path[row, child - 1])]
        node = (hit or below)[0]
        out.append(node - 1)
    return out


def _committed(arrays: TraceArrays, row: int, decode: Callable[[int], str]) -> str:
    """Return the token committed after the anchor of a row, if the draft proposed it."""
    if int(arrays.accepted[row]) < 1:
        return UNKNOWN
    return decode(int(arrays.tokens[row, _path(arrays, row)[0]]))
