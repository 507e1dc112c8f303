"""The features of a few tokens of a tree, on the CPU, as plain numbers: what `single` does for one row.

The rows of logits are read once each, however many tokens were drawn from them, and in few operations (see `single`). The
definitions stay in `features`; the tests hold this module to `Rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import PolicyError

_KNOWN = (
    "top1", "top2", "margin", "top1_logit", "entropy", "drawn_prob", "path_logprob", "noisy_margin", "noisy_score",
    "noisy_behind", "depth", "branch_rank", "temperature", "drawn_token", "above_token",
)  # fmt: skip
_PLACE = {name: place for place, name in enumerate(_KNOWN)}


def reads_few(names: Sequence[str]) -> bool:
    """Whether all of these features are known here."""
    return all(name in _PLACE for name in names)


class FewRows:
    """What `features.Rows` is, for the tokens of a depth that were drawn from few rows of logits.

    Args:
        logits: [R, V] raw logits.
        temperature: of the sampling.
        scores: [R, V] that `match` takes the largest of; None elsewhere.
        owner, tokens, rank, width: by token: its row, itself, its rank among its siblings and their number.
        behind: by token, the token that it was drawn behind.
        above: the rows of the depth above, None at depth 1; `parent` by token, the place of its parent there.
        depth: j.
        sampled: [R, V] log-weights of what is sampled from, where it is not softmax(logits / T).
    """

    __slots__ = (
        "above", "behind", "depth", "logits", "owner", "parent", "paths", "rank", "sampled", "scores", "temperature",
        "tokens", "width",
    )  # fmt: skip

    def __init__(
        self,
        logits: Tensor,
        temperature: float,
        scores: Tensor | None,
        owner: Sequence[int],
        tokens: Sequence[int],
        rank: Sequence[int],
        width: Sequence[int],
        behind: Sequence[int],
        above: FewRows | None = None,
        parent: Sequence[int] = (),
        depth: int = 1,
        sampled: Tensor | None = None,
    ) -> None:
        self.logits, self.temperature, self.scores, self.sampled = logits, temperature, scores, sampled
        self.owner, self.tokens, self.rank, self.width, self.behind = owner, tokens, rank, width, behind
        self.above, self.parent, self.depth = above, parent, depth
        self.paths: list[float] | None = None


class FewReader:
    """Computes the named features, all of them PRE or POST and known here (`reads_few`)."""

    def __init__(self, names: Sequence[str]) -> None:
        wanted = set(names)
        self._places = [_PLACE[name] for name in names]
        self._second = not wanted.isdisjoint(("top2", "margin"))
        self._entropy = "entropy" in wanted
        self._noisy = not wanted.isdisjoint(("noisy_margin", "noisy_score", "noisy_behind"))
        self._path, self._shaped = "path_logprob" in wanted, "drawn_prob" in wanted
        self._softmax = self._second or self._entropy or "top1" in wanted
        self._logit = "top1_logit" in wanted

    def __call__(self, rows: FewRows) -> list[list[float]]:
        """Return [tokens][F], what `features.compute` returns."""
        raw, count = rows.logits, len(rows.logits)
        zeros = [0.0] * count
        top1, top2, entropy, most = zeros, zeros, zeros, zeros
        probs: Tensor | None = None
        if self._softmax:
            probs = torch.softmax(raw, -1)
            if self._second:
                top1, top2 = torch.topk(probs, 2, -1).values.T.tolist()
            else:
                top1 = probs.amax(-1).tolist()
            if self._entropy:
                entropy = torch.special.entr(probs).sum(-1).tolist()
        if self._logit:
            most = raw.amax(-1).tolist()
        drawn = self._drawn_probs(rows, probs) if self._shaped else ()
        paths = self.paths(rows) if self._path else ()
        noisy = self._scores(rows) if self._noisy else ()
        out = []
        for at, owner in enumerate(rows.owner):
            best, score, left_out = noisy[at] if noisy else (0.0, 0.0, 0.0)
            values = (
                top1[owner], top2[owner], top1[owner] - top2[owner], most[owner], entropy[owner],
                drawn[at] if drawn else 0.0, paths[at] if paths else 0.0, score - left_out, score, best - score,
                float(rows.depth), float(rows.rank[at]), rows.temperature, float(rows.tokens[at]), float(rows.behind[at]),
            )  # fmt: skip
            out.append([values[place] for place in self._places])
        return out

    def _drawn_probs(self, rows: FewRows, probs: Tensor | None) -> list[float]:
        """Return by token its probability in the distribution that is sampled from; `probs` are those at temperature 1."""
        if rows.sampled is not None:
            probs = torch.softmax(rows.sampled, -1)
        elif rows.temperature not in (0.0, 1.0):
            probs = torch.softmax(rows.logits / rows.temperature, -1)
        elif probs is None:
            probs = torch.softmax(rows.logits, -1)
        entries = probs.numpy()
        return [float(entries[o, t]) for o, t in zip(rows.owner, rows.tokens, strict=True)]

    def paths(self, rows: FewRows) -> list[float]:
        """Return by token the log-probability of its path at temperature 1."""
        if rows.paths is None:
            before = self.paths(rows.above) if rows.above is not None else []
            norms, entries = torch.logsumexp(rows.logits, -1).tolist(), rows.logits.numpy()
            own = [float(entries[o, t]) - norms[o] for o, t in zip(rows.owner, rows.tokens, strict=True)]
            rows.paths = [one + before[p] for one, p in zip(own, rows.parent, strict=True)] if before else own
        return rows.paths

    def _scores(self, rows: FewRows) -> list[tuple[float, float, float]]:
        """Return by token the best noisy score of its row, its own, and that of the best token that was not drawn."""
        if rows.scores is None:
            raise PolicyError("noisy_* features need the match verification: choose it, or a policy without them")
        size = rows.scores.shape[-1]
        best = torch.topk(rows.scores, min(max(rows.width) + 1, size), -1).values.tolist()
        entries = rows.scores.numpy()
        return [
            (best[o][0], float(entries[o, t]), best[o][min(w, size - 1)])
            for o, t, w in zip(rows.owner, rows.tokens, rows.width, strict=True)
        ]
