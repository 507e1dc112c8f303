"""Unrolls a draft from every anchor of a text at once.

Under `match` what is proposed depends on the prefix and the position alone, and what is drawn given the text
(`given_text`) on the place, so two anchors whose candidates follow the text up to the same place propose the same from
there on. Candidates on the text itself need no forward beyond the one that reads the text; only what leaves it is drafted,
once for each place where it does, depth by depth, many places as rows of one forward under a mask that lets each see its
prefix and its own branch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...decode.models.cache import CachedModel
from ...decode.models.engine import CompactModel
from ...decode.models.pair import Pair
from ...decode.models.view import hidden_width, token_bytes
from ...decode.settings import shaping_of
from ...decode.topology import Topology, chain
from ...decode.verify.sampling import MODEL_DEFAULTS, SamplingParams
from ...policies.errors import InputError
from ...policies.features import CHAIN_FEATURES, DRAFT_HIDDEN, TREE_FEATURES
from .gather import Unrolled as Unrolled, gather
from .given_text import DrawsAt
from .job import BYTES_PER_SCORE, Anchors as Anchors, Job
from .places import Places
from .proposals import keyed_draws

_MOST_ROWS = {"cpu": 160, "cuda": 2048}
"""Rows of one forward: more of them see more columns that are not theirs, fewer cost more calls."""

MEMORY_BYTES = 1 << 28
"""Budget for rows as wide as the vocabulary, where none is given."""

_SEGMENT = 256
"""Places of a text that are read together."""


class Unroller:
    """Unrolls one draft; keeps its cache between texts.

    Args:
        pair: whose draft is unrolled.
        tree: the candidates of a round; a number = a chain of that depth.
        temperature: of the sampling.
        memory_bytes: budget for the rows of a forward.
        hidden: hidden states to record (`features.hidden_states`).
        shaping: what else changes the distribution that is sampled from.
        verification: under which rounds are to be replayed; `point`: the draft is greedy while the text is sampled.
        off_text: of block verification, `exact` or `approximate` (`given_text.block_candidates`).
        draws: of each text, given it.
        choices: see `Job.draws`.

    Attributes:
        tree: the topology.
        shape: drafted after each place of a text.
        features: names recorded at each node.
    """

    def __init__(
        self,
        pair: Pair,
        tree: int | Topology,
        temperature: float,
        memory_bytes: int = MEMORY_BYTES,
        rows: int | None = None,
        hidden: Sequence[str] = (),
        shaping: SamplingParams = MODEL_DEFAULTS,
        verification: str = "match",
        off_text: str = "exact",
        draws: int = 1,
        choices: Callable[[int, int], DrawsAt] = keyed_draws,
    ) -> None:
        self.pair, self.temperature, self.memory_bytes = pair, temperature, memory_bytes
        shaping = shaping_of(pair, shaping)
        self.shaping, self.verification, self.draws = shaping, verification, draws
        self.tree = chain(tree) if isinstance(tree, int) else tree
        if max(map(len, self.tree.children)) > pair.vocabulary:
            raise InputError(f"--tree: {self.tree.name} wants more candidates than the vocabulary has")
        self.features = node_features(self.tree, verification if temperature > 0 else "match")
        self.shape = closure(self.tree)
        most = _MOST_ROWS.get(pair.device.type, 512) if rows is None else rows
        self._rows = max(8, min(most, memory_bytes // (BYTES_PER_SCORE * pair.vocabulary)))
        self.hidden = tuple(hidden)
        self._hidden_width = hidden_width(pair.draft_model) if DRAFT_HIDDEN in hidden else 0
        self._copies = [self]
        self._job = Job(
            pair, self.shape, self.features, temperature, memory_bytes, shaping, self._hidden_width, verification,
            off_text == "exact", choices,
        )  # fmt: skip
        # Off the text block verification alone looks at p (`given_text`), from the second token of a round on.
        reads = self._job.given_text and verification == "block" and off_text == "exact" and self.depth > 1
        if reads and not pair.readings[0].tree:
            name = type(pair.target).__name__
            raise InputError(
                f"--verification block: expected a target that reads trees, not a {name}; give --collector live"
            )
        self._take_caches(0, reads)

    def _take_caches(self, capacity: int, reads: bool) -> None:
        """Begin with empty caches: that of the draft, and the target's if it reads candidates."""
        pair, vocabulary = self.pair, self.pair.vocabulary
        self._model = CachedModel(pair.draft_model, capacity, vocabulary, bool(self._hidden_width))
        self._target = CachedModel(pair.target, capacity, vocabulary, device=pair.device) if reads else None

    @property
    def depth(self) -> int:
        """K, the deepest candidate."""
        return self.tree.deepest

    @torch.inference_mode()
    def unroll(self, anchors: Anchors, target_rows: Tensor) -> Unrolled:
        """Draft the tree from every anchor.

        Args:
            anchors: of one text.
            target_rows: [L, V] logits, row i the one that generated token i was drawn from.
        """
        first, last = int(anchors.anchor[0]), int(anchors.anchor[-1])
        end = min(len(anchors.text) - anchors.prompt, last + self.depth - 1)  # the last place that is looked at
        places = Places(self._job, anchors, first, last, end)
        model, target = self._room(anchors.prompt + end, len(self.shape))
        places.read_text(model, target_rows, max(self._rows, _SEGMENT))
        if target is not None:
            # Its rows on the text are at hand; it reads the text for the keys that candidates off it attend to.
            target.read(torch.tensor([anchors.text[: model.length]], device=self.pair.device), rows=1)
        places.grow(model, target, self._rows)
        return gather(places, anchors.anchor - first, self.tree)

    def copies(self, most: int) -> list[Unroller]:
        """Return this unroller and further ones like it, `most` in all, that can unroll texts at the same time.

        There is but one where the memory budget has no room for more, and where the draft's code is not known to bear it.
        """
        if self.pair.device.type != "cpu" or not isinstance(self.pair.draft_model, CompactModel):
            return [self]
        # What each text at work takes: the scores of a forward, and the cache of a chunk's rows.
        scores = max(self._rows, _SEGMENT) * BYTES_PER_SCORE * self.pair.vocabulary
        each = scores + self._rows * len(self.shape) * token_bytes(self.pair.draft_model)
        while len(self._copies) < min(most, self.memory_bytes // each):
            other = copy.copy(self)  # all but the caches is the same, and is not written to
            other._take_caches(0, self._target is not None)
            self._copies.append(other)
        return self._copies[:most]

    def _room(self, tokens: int, nodes: int) -> tuple[CachedModel, CachedModel | None]:
        """Return the draft, and the target if it reads candidates, empty and with room for a text and a forward's rows."""
        # A chunk's rows stay in the cache until its last depth is drafted.
        capacity = tokens + self._rows * nodes
        if self._model.capacity < capacity:
            # Somewhat larger, so that not every longer text takes a cache of its own.
            self._take_caches(capacity + 64, self._target is not None)
        for model in (self._model, self._target):
            if model is not None:
                model.roll_back(0)
        return self._model, self._target


def node_features(tree: Topology, verification: str = "match") -> tuple[str, ...]:
    """Return the names of what is recorded at each node of a tree under a verification."""
    names = CHAIN_FEATURES if tree.is_chain else TREE_FEATURES
    return names if verification == "match" else tuple(name for name in names if not name.startswith("noisy_"))


def closure(tree: Topology) -> Topology:
    """Return the least tree that holds, at its root, `tree` and the sub-tree below each of its nodes."""
    rank = {row: at for below in tree.children for at, row in enumerate(below)}
    paths = set()
    for row in range(1, len(tree)):
        path: tuple[int, ...] = ()
        # The node as seen from each of its ancestors: every suffix of its path of ranks.
        while row > 0:
            path, row = (rank[row], *path), tree.parent[row]
            paths.add(path)
    order = sorted(paths, key=lambda path: (len(path), path))
    index = {path: at for at, path in enumerate(order, 1)}
    return Topology([-1, *(index.get(path[:-1], 0) for path in order)])
