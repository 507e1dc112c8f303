"""The features of a few tokens of a tree, on the CPU, as plain numbers: what `single` does for one row.

The rows of logits are read once each, however many tokens were drawn from them, and in few operations (see `single`). The
definitions stay in `features`; the tests hold this module to `Rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .errors import PolicyError
from .features import single_precision


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
        best: by row the best of the scores in falling order, one more than the most siblings, where they are known.
    """

    __slots__ = (
        "above", "behind", "best", "depth", "logits", "owner", "parent", "paths", "rank", "sampled", "scores", "temperature",
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
        best: list[list[float]] | None = None,
    ) -> None:
        self.logits, self.temperature, self.scores, self.sampled = logits, temperature, scores, sampled
        self.owner, self.tokens, self.rank, self.width, self.behind = owner, tokens, rank, width, behind
        self.above, self.parent, self.depth = above, parent, depth
        self.best = best
        self.paths: list[float] | None = None


class _Read:
    """What was read of the rows of a depth: by row, or (`drawn`, `paths`) by token; `best` as in `FewRows`."""

    top1: Sequence[float] = ()
    top2: Sequence[float] = ()
    most: Sequence[float] = ()
    entropy: Sequence[float] = ()
    drawn: Sequence[float] = ()
    paths: Sequence[float] = ()
    best: Sequence[Sequence[float]] = ()
    last = 0
    """Of a row of logits."""


def _margins(rows: FewRows, read: _Read) -> list[float]:
    best, last = read.best, read.last
    ranked = zip(rows.owner, rows.rank, rows.width, strict=True)
    return [best[o][r] - best[o][w if w < last else last] for o, r, w in ranked]


_COLUMNS: dict[str, Callable[[FewRows, _Read], Sequence[float]]] = {
    "top1": lambda rows, read: [read.top1[o] for o in rows.owner],
    "top2": lambda rows, read: [read.top2[o] for o in rows.owner],
    "margin": lambda rows, read: [read.top1[o] - read.top2[o] for o in rows.owner],
    "top1_logit": lambda rows, read: [read.most[o] for o in rows.owner],
    "entropy": lambda rows, read: [read.entropy[o] for o in rows.owner],
    "drawn_prob": lambda rows, read: read.drawn,
    "path_logprob": lambda rows, read: read.paths,
    "noisy_margin": _margins,
    "noisy_score": lambda rows, read: [read.best[o][r] for o, r in zip(rows.owner, rows.rank, strict=True)],
    "noisy_lead": lambda rows, read: [
        read.best[o][r] - read.best[o][0 if r else 1] for o, r in zip(rows.owner, rows.rank, strict=True)
    ],
    "depth": lambda rows, read: [float(rows.depth)] * len(rows.tokens),
    "branch_rank": lambda rows, read: rows.rank,
    "temperature": lambda rows, read: [rows.temperature] * len(rows.tokens),
    "drawn_token": lambda rows, read: rows.tokens,
    "above_token": lambda rows, read: rows.behind,
}

_WHOLE = ("depth", "branch_rank", "drawn_token", "above_token")
"""Those that are whole numbers: single precision has them as they are."""


def reads_few(names: Sequence[str]) -> bool:
    """Whether all of these features are known here."""
    return all(name in _COLUMNS for name in names)


class FewReader:
    """Computes the named features, all of them PRE or POST and known here (`reads_few`)."""

    def __init__(self, names: Sequence[str]) -> None:
        wanted = set(names)
        self._columns = [(_COLUMNS[name], name in _WHOLE) for name in names]
        self._second = not wanted.isdisjoint(("top2", "margin"))
        self._entropy = "entropy" in wanted
        self._noisy = not wanted.isdisjoint(("noisy_margin", "noisy_score", "noisy_lead"))
        self._path, self._shaped = "path_logprob" in wanted, "drawn_prob" in wanted
        self._softmax = self._second or self._entropy or "top1" in wanted
        self._logit = "top1_logit" in wanted

    def __call__(self, rows: FewRows) -> list[Sequence[float]]:
        """Return [F][tokens], by columns what `features.compute` returns, in single precision."""
        raw, read = rows.logits, _Read()
        probs: Tensor | None = None
        if self._softmax:
            probs = torch.softmax(raw, -1)
            if self._second:
                read.top1, read.top2 = torch.topk(probs, 2, -1).values.T.tolist()
            else:
                read.top1 = probs.amax(-1).tolist()
            if self._entropy:
                read.entropy = torch.special.entr(probs).sum(-1).tolist()
        if self._logit:
            read.most = raw.amax(-1).tolist()
        if self._shaped:
            read.drawn = self._drawn_probs(rows, probs)
        if self._path:
            read.paths = self.paths(rows)
        if self._noisy:
            read.best, read.last = self._best(rows)
        return [
            column(rows, read) if whole else single_precision(column(rows, read)) for column, whole in self._columns
        ]

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

    def _best(self, rows: FewRows) -> tuple[list[list[float]], int]:
        """Return by row its best noisy scores in falling order, and the last place of a row."""
        if rows.scores is None:
            raise PolicyError("noisy_* features need the match verification: choose it, or a policy without them")
        size, best = rows.scores.shape[-1], rows.best
        if best is None:
            best = torch.topk(rows.scores, min(max(rows.width) + 1, size), -1).values.tolist()
        return best, size - 1
