"""The verification modes: how candidates are drawn, and which of them are accepted.

p and q are the distributions of target and draft, after temperature and filters. At temperature 0 every mode is greedy
matching (`find_mode`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import StopPolicy
from ...policies.errors import InputError, PolicyError, close_match
from ...policies.features import FEATURES, Kind, base_features
from ...policies.learned import LearnedPolicy
from ..models.device import download, upload
from ..round_state import RoundState, Rows
from ..topology import Topology
from .noise import Choices, Purpose, best_of_rows, best_scores, match_scores, stable_topk, target_tokens, token_at

Accepted = tuple[list[int], int]
"""The rows of the accepted path, row 0 first, and the next token of the target."""


class Draw(NamedTuple):
    """Candidates below fed rows.

    Attributes:
        tokens: by fed row its candidates, in the order in which they are tried; or [R] int64, one candidate of each row.
        scores: [R, V], the scores of which `match` takes the largest; None in other modes.
        best: by fed row the largest of these scores, descending, one more than candidates; None if unknown.
    """

    tokens: list[list[int]] | Tensor
    scores: Tensor | None = None
    best: list[list[float]] | None = None


class Verification:
    """A verification mode. It has no state: one object serves all texts.

    Subclasses implement `accept_one` and `accept_chain`, or `accept` for all streams at once.

    Attributes:
        name: as in commands and reports.
        lossless: whether the output has the distribution of the target.
        label: name in traces of the kind of acceptance that heads are trained on.
        hides: whether the rows sent to the target must not depend on the tokens drawn, as the output would be biased.
        chains_only: whether trees are not supported.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    label: ClassVar[str]
    hides: ClassVar[bool] = False
    chains_only: ClassVar[bool] = False

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor, drafter: int = 0) -> Draw:
        """Draw candidates below fed rows of one depth; by default the best tokens of the draft.

        Args:
            round: provides the topology and the random choices; `draft_probs` are set if the acceptance needs them.
            rows: fed rows, R in total.
            sampled: [R, V] processed logits of the draft.
            drafter: index of the drafter.
        """
        if is_deferrable(round, sampled):
            return Draw(best_of_rows(sampled))
        return Draw(best_tokens(sampled, candidate_counts(round, rows, drafter))[0])

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """Return the first token of a text, drawn from the processed logits [V] of the target after the prompt."""
        return choices.draw(torch.softmax(sampled.double(), -1), 0, Purpose.RESIDUAL)

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """Return the accepted path of each stream.

        Args:
            round: with its candidates.
            rows: rows that the target has read, R in total, row 0 of each stream first.
            sampled: [R, V] processed logits of the target.
        """
        sizes = [len(sent) for _, sent in rows]
        parts = zip(rows, sampled.split(sizes), strict=True)
        if not is_deferrable(round, sampled):
            return [self.accept_one(round, stream, sent, part) for (stream, sent), part in parts]
        if round.device_tokens is None:
            round.device_tokens = upload(round.tokens, sampled.device)
        outcomes = torch.stack([self._accept_on_device(round, stream, part) for (stream, _), part in parts])
        starts = upload(np.cumsum([0, *sizes[:-1]]), sampled.device)
        at = torch.stack([starts + outcomes[:, 0], outcomes[:, 1]], 1)
        kept, tokens, valid = np.array(round.fetch(outcomes.flatten(), at, by_row=False)).reshape(-1, 3).T.tolist()
        if not all(valid):
            require_number(math.nan)
        return [(list(range(count + 1)), token) for count, token in zip(kept, tokens, strict=True)]

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """Return the accepted path of one stream, given the processed logits [n, V] of the target after the rows `sent`."""
        raise NotImplementedError

    def accept_chain(self, drafted: ChainDraft, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `accept_one` does for a chain of n >= 1 candidates on a device, without a wait.

        Args:
            drafted: the candidates.
            p: [n + 1, V] distributions of the target.

        Returns:
            [1] int64 number of accepted candidates, [V] weights of the next token, and [1] bool, whether all numbers are
            valid.
        """
        raise NotImplementedError

    def _accept_on_device(self, round: RoundState, stream: int, sampled: Tensor) -> Tensor:
        """Return [3] int64 of a chain: accepted candidates, the next token, and whether the draft's numbers are valid."""
        assert round.device_tokens is not None
        p, choices, count = torch.softmax(sampled.double(), -1), round.choices[stream], len(sampled) - 1
        purposes = Purpose.ACCEPT, Purpose.RESIDUAL
        numbers = [[choices.uniform(node, purpose) for node in range(count + 1)] for purpose in purposes]
        uniforms = upload(np.array(numbers), p.device)
        kept, rest, valid = round.device_tokens.new_zeros(1), p[0], round.device_tokens.new_ones(1)
        if count:
            tokens, q = (
                round.device_tokens[stream, 1 : count + 1],
                [round.draft_probs[stream, row, 0] for row in range(count) if (stream, row, 0) in round.draft_probs],
            )
            last = upload([count], p.device)
            if round.ends:  # what follows an end of text is not a candidate
                ends = torch.isin(tokens, upload(sorted(round.ends), p.device))
                last = torch.where(ends.any(), ends.int().argmax() + 1, count)[None]
            kept, rest, valid = self.accept_chain(ChainDraft(tokens, q, last, uniforms[0, 1:]), p)
        return torch.cat([kept, token_at(rest, uniforms[1].index_select(0, kept)), valid.long()])


class ChainDraft(NamedTuple):
    """n candidates of a chain on a device.

    Attributes:
        tokens: [n] int64.
        probs: n distributions [V] that they were drawn from; empty if the mode does not use them.
        last: [1] int64, number of candidates up to the first end of a text.
        uniforms: [n] float64, the numbers that acceptances compare with.
    """

    tokens: Tensor
    probs: list[Tensor]
    last: Tensor
    uniforms: Tensor


def is_deferrable(round: RoundState, sampled: Tensor) -> bool:
    """Return whether candidates stay on a device, so that the host need not wait for them: those of a chain do."""
    return round.topology.is_chain and not sampled.is_cpu


def at_row(rows: Tensor, index: Tensor) -> Tensor:
    """Return the row [V] of [n, V] with an index [1] on the device; plain indexing would wait for the index."""
    return rows.index_select(0, index)[0]


def candidate_counts(round: RoundState, rows: Rows, drafter: int) -> list[int]:
    """Return the number of candidates that a drafter draws below each fed row."""
    return [len(round.topology.below(row, drafter)) for _, fed in rows for row in fed]


def best_tokens(scores: Tensor, counts: Sequence[int], extra: int = 0) -> tuple[list[list[int]], list[list[float]]]:
    """Return the best `counts[row]` tokens of each row [R, V], and the best max(counts) + `extra` scores, descending.

    Of equal scores the first token comes first. Tokens with a score of -inf are left out.
    """
    size = max(counts) + extra
    values, tokens, tied = download(*best_scores(scores, size))
    if ties := [row for row, has_ties in enumerate(tied) if has_ties]:  # frequencies, or numbers in half precision
        for row, ordered in zip(ties, stable_topk(scores[ties], size).tolist(), strict=True):
            tokens[row] = ordered
    possible = [
        [token for token, value in zip(row[:count], best, strict=False) if value > -torch.inf]
        for row, best, count in zip(tokens, values, counts, strict=True)
    ]
    return possible, values


class Match(Verification):
    """Lossless. Accepts a candidate that is the target's draw argmax(log p + g), with Gumbel noise g by stream and position.

    The text does not depend on the candidates. They are the best tokens of log q + g, draws from q without replacement.
    """

    name, lossless, label = "match", True, "match"

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor, drafter: int = 0) -> Draw:
        """See `Verification.draw`."""
        scores, depth = sampled, round.topology.depth[rows[0][1][0]]
        if not round.choices[rows[0][0]].greedy:
            # All rows have one depth, so the candidates of a stream share the noise of one position.
            noise = [round.choices[stream].noise(depth + 1, 1).expand(len(fed), -1) for stream, fed in rows]
            scores = match_scores(sampled, noise[0] if len(noise) == 1 else torch.cat(noise))
        counts = candidate_counts(round, rows, drafter)
        if max(counts) == 1:
            return Draw(best_of_rows(scores), scores)
        # One more score: policies compare the candidates with the best token that was not drawn.
        tokens, best = best_tokens(scores, counts, extra=1)
        return Draw(tokens, scores, best)

    def start(self, sampled: Tensor, choices: Choices) -> int:
        """See `Verification.start`."""
        return int(target_tokens(sampled[None], None if choices.greedy else choices.noise(0, 1)))

    def accept(self, round: RoundState, rows: Rows, sampled: Tensor) -> list[Accepted]:
        """See `Verification.accept`."""
        noise = None
        if not round.choices[rows[0][0]].greedy:
            parts = [_noise_after(round, stream, sent) for stream, sent in rows]
            noise = parts[0] if len(parts) == 1 else torch.cat(parts)
        tokens = target_tokens(sampled, noise)
        at = (
            None
            if round.next_anchors is None
            else torch.stack([torch.arange(len(tokens), device=tokens.device), tokens], 1)
        )
        next_tokens = iter(round.fetch(tokens, at))
        return [_follow(round, stream, {row: next(next_tokens) for row in sent}) for stream, sent in rows]


class Point(Match):
    """Proposes the best tokens of q, as engines do that keep no draft probabilities. The text is that of `match`.

    A candidate x is accepted with probability p(x): speculative sampling for a draft that is certain of x.
    """

    name, label = "point", "point"
    draw = Verification.draw


def _noise_after(round: RoundState, stream: int, sent: Sequence[int]) -> Tensor:
    """Return the noise [n, V] for the tokens after each row."""
    depth = round.topology.depth
    noise = round.choices[stream].noise(1, depth[sent[-1]] + 1)  # the last row is one of the deepest
    return noise if round.topology.is_chain else noise[upload([depth[row] for row in sent], noise.device)]


def _follow(round: RoundState, stream: int, target: dict[int, int]) -> Accepted:
    """Return the path of candidates that equal the target's token after their parent, given by row sent."""
    children, tokens, longest = round.topology.children, round.tokens[stream].tolist(), [0]
    # Candidates of one drafter differ below a row, so at most one of them is the target's token. Drafters may agree.
    for start in children[0]:
        path, row = [0], start if start in target and tokens[start] == target[0] else None
        while row is not None:
            path.append(row)
            token = target[row]
            row = next((child for child in children[row] if child in target and tokens[child] == token), None)
        longest = path if len(path) > len(longest) else longest
    return longest, target[longest[-1]]


class Typical(Verification):
    """Lossy. Accepts a candidate x if p(x) > min(epsilon, delta exp(-H(p))), and the longest path of such candidates.

    Proposes the best tokens of the draft. The next token is drawn from p. Epsilon and delta are Medusa's defaults.
    """

    name, lossless, label = "typical", False, "typical"
    epsilon, delta = 0.3, 0.09

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Of equally long paths the most probable one is accepted."""
        tree, tokens = round.topology, round.tokens[stream].tolist()
        p = torch.softmax(sampled.double(), -1)
        index = {row: at for at, row in enumerate(sent)}
        parents = [index[max(tree.parent[row], 0)] for row in sent]
        at, chosen = upload([parents, [tokens[row] for row in sent]], p.device)
        entropy, prob = download(torch.special.entr(p).sum(-1), p[at, chosen])
        log_prob = {0: 0.0}  # by row, of the path to it, if all its candidates are accepted
        for row, parent, chance in zip(sent[1:], parents[1:], prob[1:], strict=True):  # parents precede children
            threshold = min(self.epsilon, self.delta * math.exp(-entropy[parent]))
            if sent[parent] in log_prob and chance > threshold:
                log_prob[row] = log_prob[sent[parent]] + math.log(chance)
        end = max(log_prob, key=lambda row: (tree.depth[row], log_prob[row]))
        number = round.numbers(stream)[end]
        return tree.paths[end], round.choices[stream].draw(p[index[end]], number, Purpose.RESIDUAL)

    def accept_chain(self, drafted: ChainDraft, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Verification.accept_chain`."""
        chance = p[:-1].gather(1, drafted.tokens[:, None])[:, 0]
        threshold = (self.delta * (-torch.special.entr(p[:-1]).sum(-1)).exp()).clamp_max(self.epsilon)
        kept = (chance > threshold).long().cumprod(0).sum(0, keepdim=True)
        return kept, at_row(p, kept), torch.ones_like(kept)


class Rejection(Verification):
    """Lossless. Recursive rejection without replacement (MCSD, arXiv 2401.06706).

    With one candidate it is speculative sampling (Leviathan et al., arXiv 2211.17192).
    """

    name, lossless, label, hides = "rejection", True, "ratio", True
    replacement = False

    def draw(self, round: RoundState, rows: Rows, sampled: Tensor, drafter: int = 0) -> Draw:
        """See `Verification.draw`. Draws from q, and each further sibling from q without the tokens before it."""
        probs = torch.softmax(sampled.double(), -1)  # float64, because residuals are differences
        if is_deferrable(round, sampled):
            drawn = []
            for (stream, fed), row_probs in zip(rows, probs, strict=True):
                round.draft_probs[stream, fed[0], drafter] = row_probs
                drawn.append(
                    token_at(row_probs, round.choices[stream].uniform(round.next_number(stream), Purpose.DRAFT))
                )
            return Draw(torch.cat(drawn))
        tokens: list[list[int]] = []
        for stream, fed in rows:
            choices, number = round.choices[stream], round.next_number(stream)
            for row in fed:
                q: Tensor | None = probs[len(tokens)]
                round.draft_probs[stream, row, drafter] = probs[len(tokens)]
                siblings: list[int] = []
                width = len(round.topology.below(row, drafter))
                while q is not None and len(siblings) < width:
                    siblings.append(choices.draw(q, number + len(siblings), Purpose.DRAFT))
                    if not self.replacement and len(siblings) < width:
                        q = remove_token(q, siblings[-1])
                tokens.append(siblings)
                number += len(siblings)
        return Draw(tokens)

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Accepts x with probability min(1, p(x) / q(x)), else p becomes norm((p - q)+)."""
        all_probs = torch.softmax(sampled.double(), -1)
        probs = dict(zip(sent, all_probs, strict=True))
        choices, numbers, path = round.choices[stream], round.numbers(stream), [0]
        ratios: dict[int, float] = {}  # by row of a chain, for all of which the host waits once
        if round.topology.is_chain and len(sent) > 1:
            at, chosen = upload([range(len(sent) - 1), round.tokens[stream, sent[1:]].tolist()], sampled.device)
            q_rows = torch.stack([round.draft_probs[stream, row, 0] for row in sent[:-1]])
            (values,) = download(all_probs[at, chosen] / q_rows[at, chosen])
            ratios = dict(zip(sent[1:], values, strict=True))
        while True:
            row = path[-1]
            p = probs[row]
            # The candidates of each drafter in turn: those of a later one are tried against what earlier ones left of p.
            for drafter, siblings in groupby(round.drawn_below(stream, row), round.topology.drafter.__getitem__):
                p, child = self._try(round, stream, row, drafter, list(siblings), p, probs, ratios, numbers)
                if child is not None:
                    path.append(child)
                    break
            else:
                return path, choices.draw(p, numbers[row], Purpose.RESIDUAL)

    def accept_chain(self, drafted: ChainDraft, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Verification.accept_chain`."""
        q, at = torch.stack(drafted.probs), drafted.tokens[:, None]
        chance = (p[:-1].gather(1, at) / q.gather(1, at))[:, 0]
        kept = (drafted.uniforms < chance).long().cumprod(0).sum(0, keepdim=True)
        rejected = residual(at_row(p, kept), at_row(q, kept.clamp_max(len(q) - 1)))
        rest = torch.where(kept == len(q), p[-1], rejected)
        return kept, rest, ~chance.isnan().any(0, keepdim=True)

    def _try(
        self, round: RoundState, stream: int, row: int, drafter: int, siblings: list[int], p: Tensor,
        sent: Collection[int], ratios: Mapping[int, float], numbers: Sequence[int],
    ) -> tuple[Tensor, int | None]:  # fmt: skip
        """Return the accepted one of the candidates of a drafter below a row, or None and what is left of p."""
        q: Tensor | None = round.draft_probs[stream, row, drafter]
        for child in siblings:
            token = int(round.tokens[stream, child])
            assert q is not None
            # A candidate that was not sent is skipped, but its later siblings were drawn without its token.
            if child in sent:
                chance = ratios[child] if child in ratios else float(p[token] / q[token])
                if round.choices[stream].accept(min(1.0, require_number(chance)), numbers[child]):
                    return p, child
                p = residual(p, q)
            if child != siblings[-1] and not self.replacement:
                q = remove_token(q, token)
        return p, None


class RejectionReplace(Rejection):
    """Recursive rejection of independently drawn candidates, which may be equal (SpecInfer, arXiv 2305.09781)."""

    name, replacement = "rejection_replace", True


class Block(Rejection):
    """Block verification of a chain (Sun et al., arXiv 2403.10444, Algorithm 2). On average it accepts the most tokens."""

    name, label, chains_only = "block", "block", True

    def accept_one(self, round: RoundState, stream: int, sent: Sequence[int], sampled: Tensor) -> Accepted:
        """See `Verification.accept_one`. Each prefix is tested, and the longest that passes is accepted."""
        choices, tokens, last = round.choices[stream], round.tokens[stream, sent].tolist(), len(sent) - 1
        p, numbers, drafter = (
            torch.softmax(sampled.double(), -1),
            round.numbers(stream),
            round.topology.drafter[sent[-1]],
        )
        q = [round.draft_probs[stream, row, drafter] for row in sent[:last]]
        # w_i = min(1, w_(i-1) p / q) and R_i = sum of (w_i p - q)+. Prefix i < k passes with probability
        # R_i / (R_i + 1 - w_i), the whole block with w_k. R_0 is not used.
        weight, rest = [p.new_ones(())], [p.new_zeros(())]
        for i in range(1, last + 1):
            weight.append(ratio(weight[-1] * p[i - 1, tokens[i]], q[i - 1][tokens[i]]))
            if i < last:
                rest.append((weight[i] * p[i] - q[i]).clamp_min(0.0).sum())
        w, chance = download(torch.stack(weight), block_chance(torch.stack(rest), torch.stack(weight[: len(rest)])))
        chance = [*chance[:last], require_number(w[-1])]
        passed = [i for i in range(1, last + 1) if choices.accept(chance[i], numbers[sent[i]])]
        kept = max(passed, default=0)
        rest_p = p[kept] if kept == last else residual(w[kept] * p[kept], q[kept], p[kept])
        return list(sent[: kept + 1]), choices.draw(rest_p, numbers[sent[kept]], Purpose.RESIDUAL)

    def accept_chain(self, drafted: ChainDraft, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Verification.accept_chain`."""
        q, at, count = torch.stack(drafted.probs), drafted.tokens[:, None], len(drafted.probs)
        target, draft = p[:-1].gather(1, at), q.gather(1, at)  # [n, 1]
        weights = [p.new_ones(1)]
        for i in range(count):
            weights.append(ratio(weights[-1] * target[i], draft[i]))
        weight, number = torch.cat(weights), torch.arange(1, count + 1, device=p.device)  # [n + 1], [n]
        rest = (weight[1:-1, None] * p[1:-1] - q[1:]).clamp_min(0.0).sum(-1)
        chance = torch.cat([block_chance(rest, weight[1:-1]), weight[-1:]])
        chance = torch.where(number == drafted.last, weight[1:], chance)
        passed = (drafted.uniforms < chance) & (number <= drafted.last)
        kept = (passed * number).amax(0, keepdim=True)
        p_kept, q_kept = at_row(p, kept), at_row(q, kept.clamp_max(count - 1))
        rejected = residual(weight.index_select(0, kept) * p_kept, q_kept, p_kept)
        return kept, torch.where(kept == drafted.last, p_kept, rejected), ~weight.isnan().any(0, keepdim=True)


def require_number(ratio: float) -> float:
    """Return p/q of a token that was drawn from q.

    Raises:
        PairError: it is NaN, because the draft's logits are NaN. Otherwise the token would be accepted.
    """
    if math.isnan(ratio):
        from ..models.outputs import nonfinite_error  # imports transformers, which replay does not need

        raise nonfinite_error("draft")
    return ratio


def residual(p: Tensor, q: Tensor, otherwise: Tensor | None = None) -> Tensor:
    """Return norm((p - q)+) [V], or `otherwise` (default: p) if it is 0 everywhere, which has probability 0."""
    rest = (p - q).clamp_min(0.0)
    total = rest.sum()
    return torch.where(total > 0.0, rest / total, p if otherwise is None else otherwise)


def remove_token(q: Tensor, token: int) -> Tensor | None:
    """Return q [V] without a token, normalised, or None if no other token is possible."""
    rest = q.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if float(total) > 0.0 else None


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return min(1, p / q) elementwise; 1 if q is 0, NaN if one of them is."""
    return torch.where(q == 0.0, 1.0, p / q.clamp_min(torch.finfo(q.dtype).tiny)).clamp_max(1.0)


def block_chance(rest: Tensor, weight: Tensor) -> Tensor:
    """Return R / (R + 1 - w), the probability that a prefix passes; R is the sum of (w p - q)+."""
    # R = 0 and w = 1: p equals q, and the prefix passes.
    return torch.where(rest > 0.0, rest / (rest + 1.0 - weight), (weight >= 1.0).to(rest.dtype))


MODES: dict[str, type[Verification]] = {
    mode.name: mode for mode in (Match, Rejection, RejectionReplace, Block, Point, Typical)
}
"""All modes by name."""

POSITION_FEATURES = ("depth", "branch_rank")
"""POST features that do not depend on the drawn token."""


def check_mode_name(name: str) -> None:
    """Check that a name is `auto` or the name of a mode.

    Raises:
        InputError: it is not.
    """
    if name != "auto" and name not in MODES:
        hint = close_match(str(name), MODES)
        raise InputError(f"--verification: expected auto or one of {', '.join(MODES)}, not {name!r}{hint}")


def find_mode(name: str, temperature: float) -> Verification:
    """Return the mode called `name`; `match` at temperature 0, as all modes are then greedy matching.

    Raises:
        InputError: there is no such mode.
    """
    check_mode_name(name)
    return Match() if temperature == 0.0 else MODES[name]()


def resolve_mode(name: str, policy: StopPolicy, topology: Topology, temperature: float) -> str:
    """Return the name of a mode; `auto` becomes the fastest lossless one for this policy and tree.

    That is the mode a learned policy was trained for. For other policies it is `block` on a chain, and `match` on a tree, at
    temperature 0 and if `block` does not support the policy (measured by `benchmarks/speed.py --part modes`).
    """
    if name != "auto":
        return name
    if isinstance(policy, LearnedPolicy):
        return policy.metadata.verification
    if temperature == 0.0 or not all(tree.is_chain for tree in _drafted(topology, policy).trees):
        return Match.name
    try:
        check_mode(Block(), policy, topology)
    except PolicyError:
        return Match.name
    return Block.name


def _drafted(topology: Topology, policy: StopPolicy) -> Topology:
    """Return the part of a topology that a policy can draft; one level for plain decoding."""
    return topology.limited(max(policy.max_depth, 1))


def describe_mode(name: str) -> str:
    """Return the name of a mode and whether it is lossless, for reports."""
    return f"{name} ({'lossless' if name == 'auto' or MODES[name].lossless else 'LOSSY'})"


def is_trimming(policy: StopPolicy) -> bool:
    """Whether a policy may exclude drawn tokens from verification."""
    return policy.trims or type(policy).select is not StopPolicy.select


def check_mode(mode: Verification, policy: StopPolicy, topology: Topology) -> None:
    """Check that a mode supports a policy and a tree.

    Raises:
        InputError: the mode verifies chains only.
        PolicyError: the policy reads features that the mode does not have, or would bias the output.
    """
    drafted = _drafted(topology, policy)
    if mode.chains_only and policy.joins:
        raise PolicyError(
            f"{policy.name}: may verify several drafters together, which {mode.name} cannot; use rejection"
        )
    if mode.chains_only and not all(tree.is_chain for tree in drafted.trees):
        raise InputError(f"--verification {mode.name}: expected a chain, not the tree {topology.name}; use rejection")
    noisy = [name for name in base_features(policy.features) if name.startswith("noisy_")]
    if noisy and mode.name != Match.name:
        raise PolicyError(f"{policy.name}: reads {', '.join(noisy)}, which requires match verification")
    drawn = [n for n in base_features(policy.features) if FEATURES[n].kind is Kind.POST and n not in POSITION_FEATURES]
    if mode.hides and is_trimming(policy) and drawn:
        raise PolicyError(
            f"{policy.name}: excludes drawn tokens and reads {', '.join(drawn)}, which would bias the output under "
            f"{mode.name}; use match verification, or features that do not depend on the drawn token"
        )
