"""Trees of anchors, put together of what was drafted after each place of a text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...decode.topology import Topology
from ...policies.features import DrawnTokens, RowSummary
from ..schema import NO_TOKEN
from .places import Places


@dataclass(frozen=True)
class Unrolled:
    """The candidates of n anchors, N nodes each in the order of the topology.

    Attributes:
        tokens: [n, N]; `NO_TOKEN` where a filter has left fewer tokens than the tree has siblings. All else is 0 there.
        features: [n, N, F] float32 in the order of `Unroller.features`.
        draft_prob, target_prob: [n, N], q and p of the token in the sampled distributions (T = 0: at temperature 1).
        overlap: [n, N], sum over tokens of min(p, q).
        labelled: [n, N] bool, the parent is on the text, which goes on, and no sibling was accepted before; elsewhere p and
            overlap are 0, but after such a sibling.
        accepted: [n, N] bool, the node is on the text.
        hidden: [n, N, H] float16, the draft's hidden states, if asked for.
        chance, some: [n, N], the chance of acceptance where it is drawn, of the token and before it is known which comes.
    """

    tokens: Tensor
    features: Tensor
    draft_prob: Tensor
    target_prob: Tensor
    overlap: Tensor
    labelled: Tensor
    accepted: Tensor
    hidden: Tensor | None = None
    chance: Tensor | None = None
    some: Tensor | None = None


def gather(places: Places, start: Tensor, tree: Topology) -> Unrolled:
    """Return the trees of the anchors at the places `start` [n]: each follows the text as far as it can.

    Args:
        places: with all that is drafted after them.
        start: places of the anchors.
        tree: of each.
    """
    parent = torch.tensor(tree.parent, device=start.device)
    rank = torch.tensor([0, *(tree.children[tree.parent[row]].index(row) for row in range(1, len(tree)))])
    rank = rank.to(start.device)
    # (state, row of the shape) of records, as of `Places`: of those of a node's siblings, and of those of its own children.
    place, row = (start.new_zeros(len(start), len(tree)) for _ in range(2))  # of what each node is drawn after
    next_place, next_row = (start.new_zeros(len(start), len(tree)) for _ in range(2))
    next_place[:, 0] = places.begin[start]  # under block verification the state of weight 1
    for level in map(torch.tensor, tree.levels[1:]):
        parents = parent[level]
        place[:, level], row[:, level] = here, state_row = next_place[:, parents], next_row[:, parents]
        # The text's own token leads to the next place, as its row 0; any other candidate to its row of the shape.
        on_text = (state_row == 0) & (places.kept[here] == rank[level])
        next_place[:, level] = torch.where(on_text, places.after[here], here)
        next_row[:, level] = torch.where(on_text, 0, places.child[state_row, rank[level]])
    place, row, rank = place[:, 1:], row[:, 1:], rank[1:]
    fed, own = places.at[row], places.own[place]
    # What the target says of a candidate is known where its parent is on the text and the text goes on.
    token, known = places.token[place, fed, rank], (row == 0) & (own >= 0)
    accepted = known & (places.kept[place] == rank)
    features, prob = _features(places, place, row, rank, tree)
    hidden = None if places.hidden is None else places.hidden[place, fed]
    missing = torch.nn.functional.pad(token == NO_TOKEN, (1, 0))
    if bool(missing.any()):
        # After a token that is not there token 0 was fed (`Places._grow_chunk`): all that follows it is void.
        for rows in tree.levels[2:]:
            missing[:, rows] |= missing[:, parent[rows]]
        missing = missing[:, 1:]
        token, known, accepted = token.masked_fill(missing, NO_TOKEN), known & ~missing, accepted & ~missing
        features, prob = features.masked_fill(missing.cpu()[..., None], 0.0), prob.masked_fill(missing, 0.0)
        hidden = None if hidden is None else hidden.masked_fill(missing[..., None], 0.0)
    # Taken before `known` shrinks: the siblings after an accepted one were not tried, but p of them is known.
    p, overlap = places.target_prob[place, rank] * known, places.overlap[place] * known
    chance = some = None
    if places.job.given_text:
        known &= (places.kept[place] < 0) | (rank <= places.kept[place])  # the others are not tried
        chance, some = places.chance[place, rank] * known, places.some[place] * known
    return Unrolled(token, features, prob, p, overlap, known, accepted, hidden, chance, some)


def _features(places: Places, place: Tensor, row: Tensor, rank: Tensor, tree: Topology) -> tuple[Tensor, Tensor]:
    """Return [n, N, F] features and [n, N] probabilities of the nodes of n trees, each drawn after (place, row)."""
    at, fed, rank_at = place.cpu().numpy(), places.at[row].cpu().numpy(), rank.cpu().numpy()
    numbers = places.numbers[at, fed, rank_at]  # [n, N, 3]
    # [n, 1 + N], the anchor first: log-probabilities of paths, which depend on the anchor, so that no place keeps them.
    path = np.concatenate([np.zeros((len(at), 1)), numbers[..., 0]], 1)
    for level in tree.levels[2:]:
        path[:, level] += path[:, [tree.parent[node] for node in level]]
    ids = np.zeros((*at.shape, 6), dtype=np.int64)
    ids[..., 0], ids[..., 3] = at * len(places.fed) + fed, rank_at
    # Siblings in the tree: the shape's rows may have more, and noisy_margin is to the best token that the tree leaves out.
    ids[..., 4] = [len(tree.children[up]) for up in tree.parent[1:]]
    ids[..., 5] = tree.depth[1:]
    # The columns of `RowSummary.numbers`.
    four = np.concatenate([numbers[..., :2], path[:, 1:, None], numbers[..., 2:]], -1).reshape(-1, 4)
    best = places.best.reshape(-1, places.best.shape[-1])
    # No POST feature reads the largest logits or the spread of a row.
    nothing = np.zeros((1, 10), dtype=np.float32), np.zeros((1, 2))
    post = places.post_columns(RowSummary(*nothing, best, four), DrawnTokens(ids.reshape(-1, 6)), places.temperature)
    features = np.concatenate([places.pre[at, fed], post.reshape(*at.shape, -1)], -1)
    return torch.from_numpy(features), torch.from_numpy(np.exp(numbers[..., 1])).to(places.own.device)
