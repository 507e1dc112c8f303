"""Features that a stop policy reads: definitions, and their computation from rows of logits.

| kind | known |
|---|---|
| ANCHOR | before drafting: read from the target's row that the anchor token was drawn from |
| PRE | with q_j: a function of the context and the draft's distribution at depth j |
| POST | with x_j: depends on the drawn token |
| HISTORY | from earlier rounds (`history`); never stored in a trace |

Probability features read the raw logits at temperature 1, whatever the sampling temperature. Only `drawn_prob` reads the
distribution that is sampled from, and the `noisy_*` features read that distribution plus Gumbel noise. At temperature 0
`drawn_prob` reads temperature 1 and the `noisy_*` features read the raw logits.

A filter such as top-k removes other tokens from the draft's distribution than from the target's. A removed token therefore
counts in a noisy margin with its log-weight without noise. Otherwise a nucleus of one token would have an infinite margin,
which predicts acceptance where there is none.

Hidden states are the input of the output layer (transformers' `hidden_states[-1]`), rounded to float16, live as in a trace.
Two forwards of one text differ by about 1e-5, which moves a few numbers to the neighbouring float16.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .arguments import as_list
from .contract import Array, StopPolicy
from .errors import PolicyError, close_match
from .history import History, history_columns
from .kernels import on_first_use

TOP = 10
"""Number of ranked probabilities that are features."""

BOUND = 30.0
"""Noisy margins are clipped to +-BOUND. Where only one token can be drawn the margin is infinite, a value that no head has
seen in training. Under shared noise a margin of 30 occurs once in 1e13 draws."""

MAX_HALF = float(np.finfo(np.float16).max)
NO_SCORES = "noisy_* features need the match verification: choose it, or a policy without them"

kernels = on_first_use("features")

# Definitions


class Code(enum.IntEnum):
    """Formula of a column in `kernels.features.write_columns`; `PROBABILITY + k` is the probability of rank k."""

    MARGIN = 0
    LARGEST = 1
    ENTROPY = 2
    TOKEN_PROBABILITY = 3
    SAMPLED_PROBABILITY = 4
    PATH = 5
    NOISY_MARGIN = 6
    NOISY_SCORE = 7
    NOISY_LEAD = 8
    TOKEN = 9
    PARENT_TOKEN = 10
    DEPTH = 11
    RANK = 12
    TEMPERATURE = 13
    PROBABILITY = 16


class Kind(enum.Enum):
    """When a feature is known."""

    ANCHOR = "anchor"
    PRE = "pre"
    POST = "post"
    HISTORY = "history"


@dataclass(frozen=True, slots=True)
class Needs:
    """What is computed of rows of logits; `a | b` is what both need.

    Attributes:
        ranks: number of largest logits.
        spread: log-sum-exp, entropy, and the log-probabilities of the drawn tokens.
        sampled: log-probabilities in the distribution that is sampled from.
        path: log-probabilities of paths.
        noisy: largest noisy scores.
    """

    ranks: int = 0
    spread: bool = False
    sampled: bool = False
    path: bool = False
    noisy: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(
            max(self.ranks, other.ranks),
            self.spread or other.spread,
            self.sampled or other.sampled,
            self.path or other.path,
            self.noisy or other.noisy,
        )


NOTHING, LARGEST, NOISY = Needs(), Needs(1), Needs(noisy=True)
PROBABILITY = Needs(1, spread=True)  # log-sum-exp is computed relative to the largest logit
SAMPLED, PATH = Needs(1, spread=True, sampled=True), Needs(1, spread=True, path=True)
_SECOND, _TOP = Needs(2, spread=True), Needs(TOP, spread=True)


@dataclass(frozen=True)
class Feature:
    """A named scalar with its definition, its range and how it is computed; HISTORY features have no `code`."""

    name: str
    kind: Kind
    definition: str
    low: float
    high: float
    needs: Needs = NOTHING
    code: int = -1

    @property
    def is_probability(self) -> bool:
        """Whether the range is [0, 1]."""
        return self.low == 0.0 and self.high == 1.0


def _ranked(rank: int) -> Feature:
    needs = PROBABILITY if rank == 1 else _SECOND if rank == 2 else _TOP
    definition = f"probability of the draft's {'best token' if rank == 1 else f'token of rank {rank}'}"
    return Feature(f"top{rank}", Kind.PRE, definition, 0.0, 1.0, needs, Code.PROBABILITY + rank - 1)


_INF = float("inf")
_ALL = (
    Feature("anchor_entropy", Kind.ANCHOR, "entropy of the target's row that the anchor was drawn from, nats", 0.0, _INF,
            PROBABILITY, Code.ENTROPY),
    Feature("anchor_top1", Kind.ANCHOR, "largest probability in that row", 0.0, 1.0, PROBABILITY, Code.PROBABILITY),
    Feature("anchor_margin", Kind.ANCHOR, "largest minus second probability in that row", 0.0, 1.0, _SECOND, Code.MARGIN),
    Feature("anchor_prob", Kind.ANCHOR, "probability of the anchor token in that row", 0.0, 1.0, PROBABILITY,
            Code.TOKEN_PROBABILITY),
    Feature("anchor_token", Kind.ANCHOR, "id of the anchor token", 0.0, _INF, code=Code.TOKEN),
    Feature("before_token", Kind.ANCHOR, "id of the token before the anchor", -1.0, _INF, code=Code.PARENT_TOKEN),
    Feature("temperature", Kind.ANCHOR, "temperature of the sampling, 0 = greedy: the same for a whole run", 0.0, _INF,
            code=Code.TEMPERATURE),
    *(_ranked(rank) for rank in range(1, TOP + 1)),
    Feature("margin", Kind.PRE, "largest minus second probability of q_j", 0.0, 1.0, _SECOND, Code.MARGIN),
    Feature("top1_logit", Kind.PRE, "raw logit of the draft's best token", -_INF, _INF, LARGEST, Code.LARGEST),
    Feature("entropy", Kind.PRE, "entropy of q_j, nats", 0.0, _INF, PROBABILITY, Code.ENTROPY),
    Feature("drawn_prob", Kind.POST, "probability of x_j in the distribution it was drawn from", 0.0, 1.0, SAMPLED,
            Code.SAMPLED_PROBABILITY),
    Feature("path_logprob", Kind.POST, "log-probability of x_1..x_j", -_INF, 0.0, PATH, Code.PATH),
    Feature("noisy_margin", Kind.POST, f"log q / T + g of x_j minus that of the best token not drawn, at most {BOUND:.0f}",
            0.0, BOUND, NOISY, Code.NOISY_MARGIN),
    Feature("noisy_score", Kind.POST, "log q / T + g of x_j", -_INF, _INF, NOISY, Code.NOISY_SCORE),
    Feature("noisy_lead", Kind.POST,
            f"log q / T + g of x_j minus that of the best other token, drawn or not, within +-{BOUND:.0f}", -BOUND, BOUND,
            NOISY, Code.NOISY_LEAD),
    Feature("drawn_token", Kind.POST, "id of x_j", 0.0, _INF, code=Code.TOKEN),
    Feature("above_token", Kind.POST, "id of the token that x_j comes after: x_{j-1}, or the anchor", -1.0, _INF,
            code=Code.PARENT_TOKEN),
    Feature("depth", Kind.POST, "j", 0.0, _INF, code=Code.DEPTH),
    Feature("branch_rank", Kind.POST, "rank of x_j among its siblings, 0 in a chain", 0.0, _INF, code=Code.RANK),
    Feature("mean_accepted", Kind.HISTORY, "running mean of min(A, k), weight 0.8 on the past", 0.0, _INF),
    Feature("mean_full", Kind.HISTORY, "running mean of full acceptance, weight 0.8 on the past", 0.0, 1.0),
    Feature("last_accepted", Kind.HISTORY, "min(A, k) of the last round", 0.0, _INF),
    Feature("last_verified", Kind.HISTORY, "k of the last round", 0.0, _INF),
)  # fmt: skip

FEATURES: dict[str, Feature] = {feature.name: feature for feature in _ALL}

TOKEN_FEATURES = ("before_token", "anchor_token", "drawn_token", "above_token")
"""Token ids, for heads with a table of tokens; float32 holds them exactly up to 2^24."""

TREE_FEATURES = tuple(f.name for f in _ALL if f.kind in (Kind.PRE, Kind.POST) and f.name not in TOKEN_FEATURES)
"""Recorded at each node of a tree; tokens have a column of their own."""

SIBLING_FEATURES = ("noisy_lead", "branch_rank")
"""Distinguish siblings; in a chain they equal `noisy_margin` and 0."""

CHAIN_FEATURES = tuple(name for name in TREE_FEATURES if name not in SIBLING_FEATURES)
"""Recorded at each node of a chain."""

RUN_FEATURES = ("temperature",)
"""Constant in a run; a trace has them in its header."""

ANCHOR_FEATURES = tuple(f.name for f in _ALL if f.kind is Kind.ANCHOR and f.name not in RUN_FEATURES)
"""Recorded once per anchor."""


def feature(name: str) -> Feature:
    """Return the feature called `name`; raise `PolicyError` if there is none."""
    try:
        return FEATURES[name]
    except KeyError:
        raise PolicyError(
            f"unknown feature {name!r}{close_match(name, FEATURES)}; known: {', '.join(FEATURES)}"
        ) from None


@dataclass(frozen=True)
class HiddenState:
    """A named hidden state."""

    name: str
    kind: Kind
    definition: str


DRAFT_HIDDEN, TARGET_HIDDEN = "draft_hidden", "target_hidden"
_DRAFT = "the draft's last hidden state, from which q_j is computed; 0 at depth 0"
_TARGET = "the target's last hidden state of the row that the anchor was drawn from"
HIDDEN_STATES: dict[str, HiddenState] = {
    DRAFT_HIDDEN: HiddenState(DRAFT_HIDDEN, Kind.PRE, _DRAFT),
    TARGET_HIDDEN: HiddenState(TARGET_HIDDEN, Kind.ANCHOR, _TARGET),
}


def check_hidden(names: Iterable[str], who: str = "") -> tuple[str, ...]:
    """Return the names of hidden states, each once, in the order of `HIDDEN_STATES`; raise `PolicyError` if unknown."""
    requested = as_list(names)
    for name in requested:
        if name not in HIDDEN_STATES:
            raise PolicyError(
                f"{who and who + ': '}unknown hidden state {name!r}{close_match(name, HIDDEN_STATES)}; "
                f"known: {', '.join(HIDDEN_STATES)}"
            )
    return tuple(name for name in HIDDEN_STATES if name in requested)


def check_sizes(policy: StopPolicy, widths: Mapping[str, int]) -> None:
    """Raise `PolicyError` if the hidden states of a policy (`sizes`) have another size than `widths`, both by name."""
    for name, size in getattr(policy, "sizes", {}).items():
        if widths.get(name, size) != size:
            raise PolicyError(
                f"{policy.name}: reads {name} of {size} numbers, but here it has {widths[name]}: the policy was made for "
                "another model; use it with its own pair"
            )


def round_to_half(states: Array) -> Array:
    """Return hidden states [..., H] as a policy reads them: float32 rounded to float16, clipped to its range."""
    return np.clip(np.asarray(states, dtype=np.float32), -MAX_HALF, MAX_HALF).astype(np.float16).astype(np.float32)


# Computation


@dataclass(slots=True)
class DrawnTokens:
    """B tokens drawn from R rows of logits. Tokens of one row are adjacent and in the order in which they were drawn.

    Attributes:
        ids: [B, 6] int64: row, token id, id of its parent (-1 = unknown), rank among its siblings, number of siblings, depth.
        parent_path: [B] float64 log-probability of the path to the parent; None = 0.
        lead: [B] float64 log-weight minus that of the likeliest token that a filter (top-k, top-p) removed; None = no filter.
    """

    ids: Array
    parent_path: Array | None = None
    lead: Array | None = None

    @classmethod
    def of(cls, tokens: Sequence[Sequence[int]], parent_path: Array | None = None) -> DrawnTokens:
        """Return the tokens with these rows of `ids`."""
        return cls(np.array(tokens, dtype=np.int64).reshape(len(tokens), 6), parent_path)


@dataclass(slots=True)
class RowSummary:
    """Everything that features need of R rows of logits and B tokens drawn from them.

    Attributes:
        top: [R, TOP] float32, largest raw logits, descending; only the ranks that are needed are set.
        stats: [R, 2] float64, log sum exp(logit - largest), and entropy in nats.
        noisy: [R, m] float32, largest noisy scores, descending; the drawn tokens come first.
        numbers: [B, 4] float64, log-probability of each token at temperature 1 and in the distribution that is sampled from,
            log-probability of its path, and `DrawnTokens.lead`.
    """

    top: Array
    stats: Array
    noisy: Array
    numbers: Array

    @property
    def path(self) -> Array:
        """[B] float64, log-probability of each path."""
        return np.ascontiguousarray(self.numbers[:, 2])


_EMPTY, _NO_COLUMNS = np.zeros(0), np.zeros((0, 2), dtype=np.int64)
_NO_TOP, _NO_STATS, _NO_NUMBERS = np.zeros((0, TOP), dtype=np.float32), np.zeros((0, 2)), np.zeros((0, 4))


def summarise(
    needs: Needs,
    logits: Array,
    drawn: DrawnTokens,
    temperature: float,
    sampled: Array | None = None,
    scores: Array | None = None,
    best: Array | None = None,
) -> RowSummary:
    """Summarise rows of logits on the host in one pass.

    Args:
        needs: of all features that will be computed.
        logits: [R, V] float32, raw.
        drawn: tokens drawn from these rows.
        temperature: of the sampling; 0 = greedy.
        sampled: [R, V] log-weights of the distribution that is sampled from; None = softmax(logits / T).
        scores: [R, V] log q / T + g (the logits if greedy), whose largest entries `match` takes; None in other modes.
        best: [R, m] largest scores, if they are known already.

    Raises:
        PolicyError: noisy scores are needed but missing.
    """
    rows = len(logits)
    arrays = np.empty((rows, TOP), np.float32), np.empty((rows, 2)), np.empty((len(drawn.ids), 4))
    noisy = _read_rows(needs, logits, drawn, temperature, sampled, scores, best, *arrays, _NO_COLUMNS, logits)
    return RowSummary(arrays[0], arrays[1], noisy, arrays[2])


def _read_rows(
    needs: Needs, logits: Array, drawn: DrawnTokens, temperature: float, sampled: Array | None, scores: Array | None,
    best: Array | None, top: Array, stats: Array, numbers: Array, codes: Array, out: Array,
) -> Array:  # fmt: skip
    """Fill the arrays of a `RowSummary`, write columns, and return the noisy scores; the arrays may be empty: not needed."""
    ids, ranks, most, noisy = drawn.ids, needs.ranks, 0, top if best is None else best
    if needs.noisy and best is None:
        if scores is None:
            raise PolicyError(NO_SCORES)
        # Margins are to the best token that was not drawn. A single token has no siblings.
        most = 2 if len(ids) == 1 else max(int(ids[:, 4].max()) + 1, 2)
        if scores is logits and most <= TOP:  # greedy: one ranking for both
            ranks, most = max(ranks, most), 0
        else:
            noisy = np.empty((len(logits), most), np.float32)
    scale = 0.0  # the distribution is softmax(logits)
    if needs.sampled and sampled is not None:
        scale = 1.0
    elif needs.sampled and temperature not in (0.0, 1.0):
        scale = 1.0 / temperature
    # Compiled code takes no None: arrays that stand for nothing are empty or not read.
    kernels().read_rows(
        logits,
        ranks,
        needs.spread,
        logits if scores is None else scores,
        most,
        logits if sampled is None else sampled,
        scale,
        ids,
        _EMPTY if drawn.parent_path is None else drawn.parent_path,
        _EMPTY if drawn.lead is None else drawn.lead,
        top,
        stats,
        noisy,
        numbers,
        codes,
        temperature,
        out,
    )
    return noisy


class Columns:
    """Computes ANCHOR, PRE and POST features of drawn tokens.

    Args:
        names: of F features.
        at: [F] columns that they are written to; default 0..F-1.

    Attributes:
        needs: what is computed of rows of logits.
        codes: [F, 2] int64, `Code` and column of each.
    """

    def __init__(self, names: Sequence[str], at: Sequence[int] | None = None) -> None:
        self.names, self.needs = tuple(names), NOTHING
        for name in names:
            self.needs |= feature(name).needs
        cells = zip([FEATURES[name].code for name in names], range(len(names)) if at is None else at, strict=True)
        self.codes = np.array(list(cells), dtype=np.int64).reshape(-1, 2)

    def read(
        self,
        logits: Array,
        drawn: DrawnTokens,
        temperature: float,
        out: Array,
        sampled: Array | None = None,
        scores: Array | None = None,
        best: Array | None = None,
    ) -> Array:
        """Write the columns to `out` [B, .] float32; arguments as of `summarise`.

        Returns:
            [B] float64 log-probability of each path, empty if no feature needs it.
        """
        # Scratch arrays are allocated in compiled code, which is faster.
        numbers = np.empty((len(drawn.ids), 4)) if self.needs.path else _NO_NUMBERS
        _read_rows(
            self.needs, logits, drawn, temperature, sampled, scores, best, _NO_TOP, _NO_STATS, numbers, self.codes, out
        )  # fmt: skip
        return np.ascontiguousarray(numbers[:, 2])

    def write(self, summary: RowSummary, drawn: DrawnTokens, temperature: float, out: Array) -> None:
        """Write the columns of summarised rows to `out` [B, .] float32."""
        kernels().write_columns(
            self.codes, summary.top, summary.stats, summary.noisy, drawn.ids, summary.numbers, temperature, out
        )

    def __call__(self, summary: RowSummary, drawn: DrawnTokens, temperature: float) -> Array:
        """Return [B, F] float32."""
        out = np.empty((len(drawn.ids), len(self.codes)), dtype=np.float32)
        self.write(summary, drawn, temperature, out)
        return out


class Layout:
    """The features of a policy by kind.

    Attributes:
        names: all of them, in the policy's order.
        anchor, node, history: names of one kind, in the same order (`node` = PRE and POST).
        anchor_at, node_at, history_at: their columns.
        anchor_columns, node_columns: compute them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        kinds = [feature(name).kind for name in names]
        self.names = tuple(names)
        self.node_at = [i for i, kind in enumerate(kinds) if kind in (Kind.PRE, Kind.POST)]
        self.anchor_at = [i for i, kind in enumerate(kinds) if kind is Kind.ANCHOR]
        self.history_at = [i for i, kind in enumerate(kinds) if kind is Kind.HISTORY]
        self.anchor, self.node, self.history = (
            tuple(names[i] for i in at) for at in (self.anchor_at, self.node_at, self.history_at)
        )
        self.anchor_columns, self.node_columns = Columns(self.anchor, self.anchor_at), Columns(self.node, self.node_at)
        self._record_columns = history_columns(self.history)

    def write_history(self, history: History, out: Array) -> None:
        """Write the HISTORY columns of `out` [S, F]."""
        if self.history:
            out[:, self.history_at] = history.record.take(self._record_columns, 1)

    def base(self, anchor: Array, history: Array) -> Array:
        """Return [S, F] float32 with ANCHOR [S, .] and HISTORY [S, .] columns, the others 0, as at depth 0."""
        out = np.zeros((len(anchor), len(self.names)), dtype=np.float32)
        out[:, self.anchor_at], out[:, self.history_at] = anchor, history
        return out
