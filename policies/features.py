"""Features that a stop policy reads: definitions, and their computation from rows of logits.

| kind | available |
|---|---|
| ANCHOR | before drafting: computed from the target's row that the anchor token was drawn from |
| PRE | once q_j is known: a function of the context and the draft's distribution at depth j |
| POST | once x_j is drawn: depends on the drawn token |
| HISTORY | from earlier rounds (`History`), with several drafters by drafter; never stored in a trace |
| ROUTE | before drafting, by drafter: how well it predicted the text so far |

Probabilities are of the raw logits at temperature 1. Only `drawn_prob` reads the distribution that is sampled from, and the
`noisy_*` features that distribution plus Gumbel noise; at temperature 0 both read the raw logits. A token that a filter such
as top-k removes counts in a noisy margin with its log-weight without noise: otherwise a nucleus of one token would have an
infinite margin, which predicts acceptance where there is none.

Hidden states are the input of the output layer (transformers' `hidden_states[-1]`), rounded to float16, live as in a trace.

A custom feature (`custom_feature`) is a function of these features. It has no column of its own: replay and training compute
it from recorded columns, and `PolicyHost` before each decision.
"""

from __future__ import annotations

import enum
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from .arguments import as_list
from .contract import Array, RoundOutcome, StopPolicy
from .errors import PolicyError, close_match
from .failures import plugin_errors
from .kernels import on_first_use

TOP = 10
"""Number of ranked probabilities that are features."""

BOUND = 30.0
"""Noisy margins are clipped to +-BOUND. Where only one token can be drawn the margin is infinite, a value that no head has
seen in training. Under shared noise a margin of 30 occurs once in 1e13 draws."""

PAST_WEIGHT = 0.8
"""Weight of earlier rounds in the running means."""

AGREEMENT_WEIGHT = 0.9
"""Weight of earlier tokens in the running mean of agreement."""

NO_SCORES = "noisy_* features need the match verification: choose it, or a policy without them"

kernels = on_first_use("features")

# Definitions


# Formula of a column in `kernels.features`; `PROBABILITY + k` is the probability of rank k.
Code = enum.IntEnum(
    "Code",
    "MARGIN LARGEST ENTROPY TOKEN_PROBABILITY SAMPLED_PROBABILITY PATH NOISY_MARGIN NOISY_SCORE NOISY_LEAD TOKEN "
    "PARENT_TOKEN DEPTH RANK TEMPERATURE PROBABILITY",
)


Kind = enum.Enum("Kind", "ANCHOR PRE POST HISTORY ROUTE")
"""When a feature is known."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What is computed of rows of logits; `a | b` is what both need.

    Attributes:
        ranks: number of largest logits.
        spread: log-sum-exp, entropy, and the log-probabilities of the drawn tokens and of their paths.
        sampled: log-probabilities in the distribution that is sampled from.
        noisy: largest noisy scores.
    """

    ranks: int = 0
    spread: bool = False
    sampled: bool = False
    noisy: bool = False

    def __or__(self, other: Needs) -> Needs:
        return Needs(*map(max, astuple(self), astuple(other)))


NOISY, PROBABILITY = Needs(noisy=True), Needs(1, spread=True)  # log-sum-exp is computed relative to the largest logit
SAMPLED = Needs(1, spread=True, sampled=True)
_NEEDS: dict[int, Needs] = {
    **dict.fromkeys((Code.ENTROPY, Code.TOKEN_PROBABILITY, Code.PATH), PROBABILITY),
    **dict.fromkeys((Code.NOISY_MARGIN, Code.NOISY_SCORE, Code.NOISY_LEAD), NOISY),
    **{Code.PROBABILITY + rank: Needs(rank + 1, spread=True) for rank in range(TOP)},
    **{Code.MARGIN: Needs(2, spread=True), Code.LARGEST: Needs(1), Code.SAMPLED_PROBABILITY: SAMPLED},
}


@dataclass(frozen=True)
class Feature:
    """A named scalar.

    Attributes:
        name: unique.
        kind: when it is known.
        definition: one line of text.
        low, high: its range.
        code: its `Code`; 0 for HISTORY and custom features.
        inputs, function: of a custom feature: `function` receives one float32 array for each input and returns an array of
            the same shape.
    """

    name: str
    kind: Kind
    definition: str
    low: float
    high: float
    code: int = 0
    inputs: tuple[str, ...] = ()
    function: Callable[..., Array] | None = None

    @property
    def needs(self) -> Needs:
        """What is computed of rows of logits."""
        return _NEEDS.get(self.code, Needs())

    @property
    def is_probability(self) -> bool:
        """Whether the range is [0, 1]."""
        return self.low == 0.0 and self.high == 1.0


_INF, _BEST = float("inf"), "of the draft's best token"
_NOISE, _PAST = "log q / T + g of x_j", f"weight {PAST_WEIGHT} on the past"
_ANCHOR, _PRE, _POST, _HISTORY, _ROUTE = Kind
_ALL = (
    Feature("anchor_entropy", _ANCHOR, "entropy of the target's row that the anchor was drawn from, nats", 0, _INF,
            Code.ENTROPY),
    Feature("anchor_top1", _ANCHOR, "largest probability in that row", 0, 1, Code.PROBABILITY),
    Feature("anchor_margin", _ANCHOR, "largest minus second probability in that row", 0, 1, Code.MARGIN),
    Feature("anchor_prob", _ANCHOR, "probability of the anchor token in that row", 0, 1, Code.TOKEN_PROBABILITY),
    Feature("anchor_token", _ANCHOR, "id of the anchor token", 0, _INF, Code.TOKEN),
    Feature("before_token", _ANCHOR, "id of the token before the anchor", -1, _INF, Code.PARENT_TOKEN),
    Feature("temperature", _ANCHOR, "sampling temperature, 0 = greedy: constant in a run", 0, _INF, Code.TEMPERATURE),
    Feature("top1", _PRE, f"probability {_BEST}", 0, 1, Code.PROBABILITY),
    *(Feature(f"top{rank + 1}", _PRE, f"probability of the draft's token of rank {rank + 1}", 0, 1, Code.PROBABILITY + rank)
      for rank in range(1, TOP)),
    Feature("margin", _PRE, "largest minus second probability of q_j", 0, 1, Code.MARGIN),
    Feature("top1_logit", _PRE, f"raw logit {_BEST}", -_INF, _INF, Code.LARGEST),
    Feature("entropy", _PRE, "entropy of q_j, nats", 0, _INF, Code.ENTROPY),
    Feature("drawn_prob", _POST, "probability of x_j in the distribution it was drawn from", 0, 1, Code.SAMPLED_PROBABILITY),
    Feature("path_logprob", _POST, "log-probability of x_1..x_j", -_INF, 0, Code.PATH),
    Feature("noisy_margin", _POST, f"{_NOISE} minus that of the best token not drawn, at most {BOUND:.0f}", 0, BOUND,
            Code.NOISY_MARGIN),
    Feature("noisy_score", _POST, _NOISE, -_INF, _INF, Code.NOISY_SCORE),
    Feature("noisy_lead", _POST, f"{_NOISE} minus that of the best other token, drawn or not, within +-{BOUND:.0f}", -BOUND,
            BOUND, Code.NOISY_LEAD),
    Feature("drawn_token", _POST, "id of x_j", 0, _INF, Code.TOKEN),
    Feature("above_token", _POST, "id of the token that x_j follows: x_{j-1}, or the anchor", -1, _INF, Code.PARENT_TOKEN),
    Feature("depth", _POST, "j", 0, _INF, Code.DEPTH),
    Feature("branch_rank", _POST, "rank of x_j among its siblings, 0 in a chain", 0, _INF, Code.RANK),
    # In the order of `History.record`.
    Feature("mean_accepted", _HISTORY, f"running mean of min(A, k), {_PAST}", 0, _INF),
    Feature("mean_full", _HISTORY, f"running mean of full acceptance, {_PAST}", 0, 1),
    Feature("last_accepted", _HISTORY, "min(A, k) of the last round", 0, _INF),
    Feature("last_verified", _HISTORY, "k of the last round", 0, _INF),
    # In the order of `Drafter.signals`, then those that every drafter has.
    Feature("match_length", _ROUTE, "tokens before the draft that the drafter found earlier in the text", 0, _INF),
    Feature("match_prob", _ROUTE, "probability of the best continuation of that match", 0, 1),
    Feature("match_count", _ROUTE, "number of times that match occurs", 0, _INF),
    Feature("agreement_run", _ROUTE, "consecutive last tokens of the text that the drafter would have predicted", 0, _INF),
    Feature("agreement_rate", _ROUTE, f"running mean of such agreement, weight {AGREEMENT_WEIGHT} on the past", 0, 1),
    Feature("idle_tokens", _ROUTE, "tokens committed since the drafter was used, or since the text began", 0, _INF),
    Feature("prompt_tokens", _ROUTE, "tokens of the prompt", 0, _INF),
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

ANCHOR_FEATURES = tuple(f.name for f in _ALL if f.kind is Kind.ANCHOR and f.name != "temperature")
"""Recorded once per anchor; a trace has the temperature in its header."""

HISTORY_FEATURES = tuple(f.name for f in _ALL if f.kind is Kind.HISTORY)

ROUTE_FEATURES = tuple(f.name for f in _ALL if f.kind is Kind.ROUTE)

SIGNALS = ROUTE_FEATURES[:-2]
"""Computed by a drafter (`decode.drafters.Drafter.signals`)."""

DRAFT_HIDDEN, TARGET_HIDDEN = "draft_hidden", "target_hidden"
HIDDEN_STATES = {
    DRAFT_HIDDEN: Kind.PRE,  # the state that q_j is computed from; 0 at depth 0
    TARGET_HIDDEN: Kind.ANCHOR,  # the state of the row that the anchor was drawn from
}
"""The kinds of the last hidden states of the models, by name."""


_CUSTOM: dict[str, Feature] = {}
"""Custom features by name. Names are unique in a process, so that a policy folder can refer to them."""

PLUGIN_SWITCH = "SPECSTOP_PLUGINS"
"""Environment variable; 0 turns the discovery of plugins off."""

ENTRY_POINTS = "specstop.features"
"""Group of the entry points of installed custom features: the name is that of the feature, the object its function."""


def custom_feature(
    *inputs: str, name: str = "", low: float = -np.inf, high: float = np.inf
) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Return a decorator that registers a function as a feature of policies and heads.

    The function receives one float32 array per input, all of one shape, and returns an array of that shape. It must compute
    each entry from the entries at the same place alone: replay passes thousands of branches at once, the live loop one. The
    feature is known as soon as all of its inputs are, and 0 where one of them does not exist yet (PRE and POST at depth 0).
    Entries that are not finite become 0.

    Args:
        inputs: names of the features that it is computed from, token ids included (`TOKEN_FEATURES`).
        name: of the feature; default: that of the function, with - for _.
        low, high: its range.

    Raises:
        PolicyError: an input is unknown or a custom feature, or the name is taken.
    """

    def register(function: Callable[..., Array]) -> Callable[..., Array]:
        label = name or function.__name__.replace("_", "-")
        if not inputs or not all(source in FEATURES for source in inputs):
            unknown = next((source for source in inputs if source not in FEATURES), "none")
            raise PolicyError(f"feature {label!r}: expected built-in features as inputs, got {unknown}; see FEATURES")
        if label in FEATURES:
            raise PolicyError(f"feature {label!r}: expected a name that no built-in feature has; rename it")
        kind = max((FEATURES[source].kind for source in inputs), key=(_ANCHOR, _ROUTE, _HISTORY, _PRE, _POST).index)
        definition = (function.__doc__ or "").strip().partition("\n")[0]
        _CUSTOM[label] = Feature(label, kind, definition, low, high, inputs=inputs, function=function)
        return function

    return register


def all_features() -> dict[str, Feature]:
    """Return built-in and custom features by name, after importing the installed ones.

    Raises:
        PolicyFailure: an installed feature cannot be imported.
    """
    if os.environ.get(PLUGIN_SWITCH) != "0":
        for point in entry_points(group=ENTRY_POINTS):
            if point.name not in _CUSTOM:
                with plugin_errors(f"feature {point.name!r}", f"loading the plugin {point.value}"):
                    point.load()  # the decorator of the function registers it
    return {**FEATURES, **_CUSTOM}


def feature(name: str) -> Feature:
    """Return the built-in or custom feature called `name`; raise `PolicyError` if there is none."""
    definition = FEATURES.get(name) or _CUSTOM.get(name)
    if definition is None:
        features = all_features()
        if name not in features:
            raise PolicyError(f"unknown feature {name!r}{close_match(name, features)}; known: {', '.join(features)}")
        definition = features[name]
    return definition


def base_features(names: Iterable[str]) -> tuple[str, ...]:
    """Return the built-in features that `names` are computed from; `names` themselves if there are no custom features."""
    names = tuple(names)
    inputs = [feature(name).inputs for name in names]
    if not any(inputs):
        return names
    sources = (source for name, of_name in zip(names, inputs, strict=True) for source in of_name or (name,))
    return tuple(dict.fromkeys(sources))


def complete_features(names: Sequence[str], base: Array, at_anchor: bool) -> Array:
    """Return the features `names` [..., F] float32, given `base_features` of these names [..., G] in their order.

    Args:
        names: of F features.
        base: values of the built-in features.
        at_anchor: depth 0, where PRE and POST features are 0.

    Raises:
        PolicyError: a custom feature returned another shape.
    """
    column_of = {name: base[..., at] for at, name in enumerate(base_features(names))}
    columns = []
    for definition in map(feature, names):
        if definition.function is None:
            columns.append(column_of[definition.name])
        elif at_anchor and definition.kind in (Kind.PRE, Kind.POST):
            columns.append(np.zeros(base.shape[:-1], dtype=np.float32))
        else:
            inputs = (column_of[name] for name in definition.inputs)
            values = np.asarray(definition.function(*inputs), dtype=np.float32)
            if values.shape != base.shape[:-1]:
                raise PolicyError(f"feature {definition.name!r}: expected shape {base.shape[:-1]}, got {values.shape}")
            columns.append(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0))
    return np.ascontiguousarray(np.stack(columns, -1)) if columns else base


def check_hidden(names: Iterable[str], where: str = "") -> tuple[str, ...]:
    """Return names of hidden states, each once, in the order of `HIDDEN_STATES`; raise `PolicyError` if one is unknown."""
    requested = as_list(names)
    for name in requested:
        if name not in HIDDEN_STATES:
            raise PolicyError(
                f"{where and where + ': '}unknown hidden state {name!r}{close_match(name, HIDDEN_STATES)}; "
                f"known: {', '.join(HIDDEN_STATES)}"
            )
    return tuple(name for name in HIDDEN_STATES if name in requested)


def check_sizes(policy: StopPolicy, widths: Mapping[str, int]) -> None:
    """Raise `PolicyError` if a policy reads hidden states (`sizes`) of another width than the models' (`widths`)."""
    for name, size in getattr(policy, "sizes", {}).items():
        if widths.get(name, size) != size:
            raise PolicyError(
                f"{policy.name}: reads {name} of {size} numbers, but this model's has {widths[name]}: the policy was trained "
                "for another model; use it with its own pair"
            )


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
    """Everything that features need of R rows of logits and B tokens drawn from them; what is not needed is not set.

    Attributes:
        top: [R, TOP] float32, largest raw logits, descending.
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


_EMPTY, _NO_SCORES = np.zeros(0), np.zeros((0, 1), dtype=np.float32)


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
        temperature: sampling temperature; 0 = greedy.
        sampled: [R, V] log-weights of the distribution that is sampled from; None = softmax(logits / T).
        scores: [R, V] log q / T + g (the logits if greedy); `match` takes the largest. None in other modes.
        best: [R, m] largest scores, if they are already known.

    Raises:
        PolicyError: noisy scores are needed but missing.
    """
    arguments = _kernel_arguments(needs, logits, drawn, temperature, sampled, scores, best)
    return RowSummary(*kernels().summarise_rows(*arguments))


def _kernel_arguments(
    needs: Needs, logits: Array, drawn: DrawnTokens, temperature: float, sampled: Array | None = None,
    scores: Array | None = None, best: Array | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the arguments of `kernels.features.summarise_rows`; arrays that are None become empty or are not read."""
    ids, ranks, noisy_count, scale = drawn.ids, needs.ranks, 0, 0.0
    if needs.noisy and best is None:
        if scores is None:
            raise PolicyError(NO_SCORES)
        # Margins are to the best token that was not drawn. A single token has no siblings.
        noisy_count = 2 if len(ids) == 1 else max(int(ids[:, 4].max()) + 1, 2)
        if scores is logits and noisy_count <= TOP:  # greedy: one ranking for both
            ranks, noisy_count = max(ranks, noisy_count), 0
    if needs.sampled and sampled is not None:
        scale = 1.0
    elif needs.sampled and temperature not in (0.0, 1.0):
        scale = 1.0 / temperature
    return (
        logits, ranks, needs.spread, logits if scores is None else scores, noisy_count, _NO_SCORES if best is None else best,
        logits if sampled is None else sampled, scale, ids, _EMPTY if drawn.parent_path is None else drawn.parent_path,
        _EMPTY if drawn.lead is None else drawn.lead,
    )  # fmt: skip


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
        features = [feature(name) for name in names]
        self.names, self.needs = tuple(names), functools.reduce(operator.or_, (f.needs for f in features), Needs())
        cells = zip([f.code for f in features], range(len(names)) if at is None else at, strict=True)
        self.codes = np.array(list(cells), dtype=np.int64).reshape(-1, 2)

    def read(self, logits: Array, drawn: DrawnTokens, temperature: float, out: Array, *rows: Array | None) -> Array:
        """Write the columns to `out` [B, .] float32 and return the log-probabilities [B] of paths.

        Saves 1 us over `summarise` and `__call__`; `rows` are `sampled`, `scores` and `best` of `summarise`.
        """
        arguments = _kernel_arguments(self.needs, logits, drawn, temperature, *rows)
        path: Array = kernels().read_columns(*arguments, self.codes, temperature, out)
        return path

    def __call__(self, summary: RowSummary, drawn: DrawnTokens, temperature: float, out: Array | None = None) -> Array:
        """Return the columns [B, F] float32 of summarised rows, or write them to `out` [B, .]."""
        out = np.empty((len(drawn.ids), len(self.codes)), dtype=np.float32) if out is None else out
        kernels().write_columns(
            self.codes, summary.top, summary.stats, summary.noisy, drawn.ids, summary.numbers, temperature, out
        )
        return out


class Layout:
    """The built-in features that a policy reads, by kind.

    Args:
        names: features of the policy; custom ones are replaced by their inputs.

    Attributes:
        names: all of them, in the order of `base_features`.
        anchor, node, history, route: names of one kind, in the same order (`node` = PRE and POST).
        anchor_at, node_at, history_at, route_at: their columns.
        route_columns: columns of `ROUTE_FEATURES` that are read.
        anchor_columns, node_columns: compute them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        names = base_features(names)

        def at(*kinds: Kind) -> list[int]:
            return [i for i, name in enumerate(names) if feature(name).kind in kinds]

        self.names = names
        self.anchor_at, self.node_at, self.history_at = at(Kind.ANCHOR), at(Kind.PRE, Kind.POST), at(Kind.HISTORY)
        self.route_at = at(Kind.ROUTE)
        self.anchor, self.node, self.history, self.route = (
            tuple(names[i] for i in places) for places in (self.anchor_at, self.node_at, self.history_at, self.route_at)
        )
        self.route_columns = np.array([ROUTE_FEATURES.index(name) for name in self.route], dtype=np.int64)
        self.anchor_columns, self.node_columns = Columns(self.anchor, self.anchor_at), Columns(self.node, self.node_at)


@dataclass(frozen=True, slots=True)
class History:
    """Running record of earlier rounds of S streams, from which HISTORY features are read.

    Attributes:
        record: [S, 5] float64, `HISTORY_FEATURES`, then the sum of the weights in the means, 1 - 0.8^n after n rounds. With
            several drafters [S, D, 5], of the rounds in which each of them drafted alone.
        idle: [S, D] float64, tokens committed since each drafter was used, or since the text began; None = one drafter.
    """

    record: Array
    idle: Array | None = None

    @staticmethod
    def start(streams: int, drafters: int = 1) -> History:
        """Return the history of fresh sequences."""
        columns = len(HISTORY_FEATURES) + 1
        if drafters == 1:
            return History(np.zeros((streams, columns)))
        return History(np.zeros((streams, drafters, columns)), np.zeros((streams, drafters)))

    def after(self, outcome: RoundOutcome) -> History:
        """Return the history after a round. Rounds that were cut do not count."""
        accepted, verified, active, cut = outcome.accepted, outcome.verified, outcome.active, outcome.cut
        after = np.empty(self.record.shape)
        add_round = kernels().add_round
        if self.idle is None or outcome.drafting is None:
            add_round(self.record, accepted, verified, active, cut, PAST_WEIGHT, after)
            return History(after)
        drafters, columns = self.record.shape[1:]
        alone = outcome.drafting & (active & (outcome.drafting.sum(1) == 1))[:, None]  # [S, D]
        add_round(
            self.record.reshape(-1, columns), accepted.repeat(drafters), verified.repeat(drafters), alone.ravel(),
            cut.repeat(drafters), PAST_WEIGHT, after.reshape(-1, columns),
        )  # fmt: skip
        committed = (accepted + 1)[:, None]
        idle = np.where(outcome.drafting, 0.0, self.idle + committed)
        return History(after, np.where(active[:, None], idle, self.idle))

    def values(self, names: Sequence[str] = HISTORY_FEATURES) -> Array:
        """Return the named features [S, len(names)] float32, with several drafters [S, D, len(names)]."""
        values: Array = self.record.take([HISTORY_FEATURES.index(name) for name in names], -1).astype(np.float32)
        return values
