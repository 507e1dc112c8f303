"""The contract of stop heads as scikit-learn estimators, and what they read.

    head = MLPEstimator(("top1", "entropy", "depth"), width=32)
    head.fit(rows, stop_rows=held_out).export()      # rows of a trace (`rows.fit_rows`): both outputs

    model = XGBoostEstimator(("top1", "entropy", "depth"))
    cross_val_score(model, x, accepted, groups=prompt_ids, cv=GroupKFold(5), scoring="neg_log_loss")

A head has two outputs, `accept` and `next` (`policies.heads.base.Head`). Rows of a trace have a label for each. A matrix has
one label, to which both outputs are fitted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from scipy.special import expit
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from ...collect.store import Trace
from ...decode.engines.settings import is_available_in_engines
from ...policies.arguments import check_params
from ...policies.contract import Array
from ...policies.display import Progress, silent
from ...policies.errors import InputError, PolicyError, TraceError, close_match
from ...policies.features import FEATURES, HIDDEN_STATES, TOKEN_FEATURES, Kind, check_hidden, feature
from ...policies.heads import build_head
from ...policies.heads.base import Basis, Head
from .rows import FitRows

if TYPE_CHECKING:
    import optuna

STOP_SHARE = 0.2
"""Share of the rows for early stopping if `fit` gets no `stop_rows`."""

_UNNAMED = "noisy_score"  # stands for columns without the name of a feature: any real number, read as it is
_FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass(eq=False, repr=False)
class HeadEstimator(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A stop head that is fitted on rows (anchor, depth) and exported to the form that policies run.

    A subclass is a dataclass. Its fields are the hyper-parameters. It sets `form` and implements `_fit`.

    Args:
        features: names of the F scalar features, in the order of the columns; an estimator of columns without names cannot
            be exported.
        random_state: seed of the fit.

    Attributes:
        form: kind of head (`policies.heads.HEADS`) that `export` returns.
        scalar_features: the only scalar features that the head can read; None = any.
        hidden: hidden states that it must read.
        any_hidden: whether it can read further hidden states.
        soft: whether its labels are min(1, p/q), which need `rows.SOFT_COLUMNS` of the trace.
        lag: `accept` at depth j refers to x_{j - lag}; rows pair a label with the state that many depths later.
        calibrated: whether its outputs are calibrated; else they are used as they are, as published.
        rule: that it was published with; None = the derived rule.
        thresholds: of that rule: the published one first, then others that its authors searched.
        space: hyper-parameters to search: a list of values, or (low, high) on a logarithmic scale.
        passes: how often it is fitted, from the second time on the rounds that its own policy visits.
        tensors_: of the fitted head, by name.
        classes_, feature_names_: labels of a matrix, and names of the features.
    """

    features: Sequence[str] | None = None
    _: KW_ONLY
    random_state: int | None = 0

    form: ClassVar[str]
    scalar_features: ClassVar[tuple[str, ...] | None] = None
    hidden: ClassVar[tuple[str, ...]] = ()
    any_hidden: ClassVar[bool] = False
    soft: ClassVar[bool] = False
    lag: ClassVar[int] = 0
    calibrated: ClassVar[bool] = True
    rule: ClassVar[str | None] = None
    thresholds: ClassVar[tuple[float, ...]] = ()
    space: ClassVar[Mapping[str, Any]] = {}
    passes: ClassVar[int] = 1

    @abstractmethod
    def _fit(self, rows: FitRows, stop_rows: FitRows, progress: Progress) -> Mapping[str, Any]:
        """Return the tensors of the head, fitted on `rows` and stopped early on `stop_rows`."""

    @classmethod
    def search_space(cls, trial: optuna.Trial) -> dict[str, Any]:
        """Return the hyper-parameters in `space` that a trial suggests."""

        def suggest(name: str, values: Any) -> Any:
            # Named by head: optuna holds a name to one range, and heads have different ones.
            name = f"{cls.form} {name}"
            if isinstance(values, list):
                return trial.suggest_categorical(name, values)
            return trial.suggest_float(name, *values, log=True)

        return {name: suggest(name, values) for name, values in cls.space.items()}

    @classmethod
    def param_names(cls) -> list[str]:
        """Return the names of the constructor's parameters."""
        names: list[str] = cls._get_param_names()
        return names

    @property
    def seed(self) -> int:
        """The seed of the fit as an integer."""
        return int(self.random_state or 0)

    def fit(self, X: Any, y: Any = None, *, stop_rows: FitRows | None = None, progress: Progress = silent) -> Self:
        """Fit the head.

        Args:
            X: rows of a trace, or a matrix [M, F].
            y: labels [M] of a matrix, of two classes; the second one is "accepted".
            stop_rows: for early stopping, calibration of penalties and the like; None = a fifth of the rows, at random.
            progress: see `Progress`.

        Raises:
            InputError: the names of the features do not fit the columns, or a hyper-parameter is out of range.
            TraceError: the rows lack a hidden state or the labels of the head.
            ValueError: matrix or labels violate scikit-learn's conventions.
        """
        check_params({key: value for key, value in self.get_params().items() if isinstance(value, int | float)})
        if isinstance(X, FitRows):
            self.classes_, self.feature_names_, rows = np.array([False, True]), tuple(self.features or ()), X
        else:
            rows = self._labelled(*validate_data(self, X, y))
        if rows.features.shape[1] != len(self.feature_names_):
            raise InputError(f"features: expected the names of {rows.features.shape[1]} features")
        if stop_rows is None:
            order = torch.from_numpy(np.random.default_rng(self.seed).permutation(len(rows)))
            count = max(1, round(STOP_SHARE * len(rows)))
            stop_rows, rows = rows.subset(order[:count]), rows.subset(order[count:]) if len(rows) > count else rows
        tensors = self._fit(rows, stop_rows, progress)
        self.tensors_: dict[str, Array] = {k: np.ascontiguousarray(np.asarray(v)) for k, v in tensors.items()}
        if self.feature_names_:
            self.tensors_ |= feature_ranges(self.feature_names_, rows)
        return self

    def _labelled(self, X: Array, y: Array) -> FitRows:
        """Return a matrix as rows at depth 1 with one label for both outputs."""
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        if len(self.classes_) > 2:
            raise ValueError(f"Only binary classification is supported. The data has {len(self.classes_)} classes.")
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        names = self.features or (_UNNAMED,) * X.shape[1]
        if len(names) != X.shape[1] or any(name not in FEATURES for name in names):
            raise InputError(f"features: expected the names of {X.shape[1]} features, got {', '.join(map(str, names))}")
        self.feature_names_ = tuple(names)
        depth, labels = torch.ones(len(X), dtype=torch.int64), torch.from_numpy(label).float()[:, None].repeat(1, 2)
        return FitRows(torch.from_numpy(_float32(X)), depth, labels, torch.ones_like(labels).bool())

    def export(self) -> Head:
        """Return the fitted head in the form that policies run.

        Raises:
            PolicyError: the columns that it was fitted on have no names of features.
        """
        check_is_fitted(self)
        if _UNNAMED in self.feature_names_ and not self.features:
            raise PolicyError("export: fit the estimator with the names of its columns (`features=`)")
        return self._head()

    def _head(self) -> Head:
        return build_head(self.form, self.feature_names_, self.tensors_)

    def decision_function(self, X: Any) -> Array:
        """Return [M] logits of `accept`, the second class, of rows [M, F] at depth 1."""
        check_is_fitted(self)
        logits: Array = self._head().scores(_float32(validate_data(self, X, reset=False)), 1)[:, 0]
        return logits

    def predict_proba(self, X: Any) -> Array:
        """Return [M, 2] probabilities of the two classes."""
        chance = expit(self.decision_function(X))
        return np.stack([1.0 - chance, chance], 1)

    def predict(self, X: Any) -> Array:
        """Return [M], the more probable class of each row."""
        accepted = self.decision_function(X) > 0
        classes: Array = self.classes_[accepted.astype(int)]
        return classes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    @classmethod
    def default_features(cls, defaults: Sequence[str]) -> tuple[str, ...]:
        """Return the features that the head reads if none are requested, where `defaults` are those of most heads."""
        return tuple(defaults) if cls.scalar_features is None else cls.scalar_features

    @classmethod
    def hidden_states(cls, traces: Sequence[Trace], requested: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the hidden states that the head reads: the requested ones, those of the head, or all that each trace holds.

        Raises:
            InputError: the head reads no hidden state, or other ones.
            PolicyError: there is no hidden state of a name.
        """
        if requested:
            names = check_hidden(requested)
            if not cls.any_hidden and names != cls.hidden:
                reads = ", ".join(cls.hidden) or "no hidden state"
                raise InputError(f"--hidden: the head {cls.form} reads {reads}, not {', '.join(names)}")
            return names
        if not cls.any_hidden:
            return cls.hidden
        return check_hidden(name for name in HIDDEN_STATES if all(name in trace.header.hidden for trace in traces))


def _float32(x: Array) -> Array:
    # Numbers that float64 holds and float32 does not would become infinite.
    return np.ascontiguousarray(np.clip(np.asarray(x, dtype=np.float64), -1e30, 1e30), dtype=np.float32)


# The basis of linear layers, and the ranges of features


def fit_basis(rows: FitRows, names: Sequence[str]) -> Basis:
    """Return the basis: columns have mean 0 and deviation 1 over rows with a drawn token; constant ones have scale 1."""
    width = len(names) + sum(feature(name).is_probability for name in names)
    plain = Basis(names, np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32))
    columns = plain.expand(rows.features[rows.drawn].contiguous().numpy()).astype(np.float64)
    if not columns.size:
        return plain
    scale = columns.std(0, ddof=1) if len(columns) > 1 else np.zeros(width)
    return Basis(names, columns.mean(0).astype(np.float32), np.where(scale > 1e-6, scale, 1.0).astype(np.float32))


def basis_columns(basis: Basis, features: Tensor, depth: Tensor) -> Array:
    """Return the standardised columns [M, F'] float32 of rows [M, F] at depths [M]; unknown ones are 0 at depth 0."""
    columns: Array = (basis.expand(features.contiguous().numpy()) - basis.mean) / basis.scale
    columns[depth.numpy() == 0] *= basis.first_mask
    return columns


def feature_ranges(names: Sequence[str], rows: FitRows) -> dict[str, Array]:
    """Return `low` and `high` [F] float32 of a head: the smallest and the largest value of each of F features in rows.

    Tokens are ids, not amounts, and heads extrapolate to depths beyond the trace: neither has bounds.
    """
    low, high = (np.full(len(names), bound, dtype=np.float32) for bound in (-_FLOAT_MAX, _FLOAT_MAX))  # no bound
    values, drawn = rows.features.numpy(), rows.drawn.numpy()
    for at, name in enumerate(names):
        # At depth 0 PRE and POST columns hold placeholder zeros, which must not widen a range.
        column = values[drawn, at] if feature(name).kind in (Kind.PRE, Kind.POST) else values[:, at]
        column = column[np.isfinite(column)]
        if name not in (*TOKEN_FEATURES, "depth") and len(column):
            low[at], high[at] = column.min(), column.max()
    return {"low": low, "high": high}


# Engines (`train --for vllm`)

ENGINES = ("vllm",)

_REPLACEMENTS = ("margin", "entropy")  # replace noisy margins, which an engine does not have


def engine_features(
    engine: str,
    traces: Sequence[Trace],
    head: type[HeadEstimator],
    requested: Sequence[str] | None,
    defaults: Sequence[str],
    hidden: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the features that a head reads in a serving engine: the requested ones, or the default ones that the engine has.

    Raises:
        InputError: an unknown engine, or the head reads what the engine does not have.
        TraceError: the labels of the traces differ from acceptance in the engine.
    """
    if engine not in ENGINES:
        raise InputError(f"--for: expected {', '.join(ENGINES)}, not {engine!r}{close_match(engine, ENGINES)}")
    sampled = [trace.header for trace in traces if trace.header.temperature > 0]
    if labels := [header.label for header in sampled if header.label != "point"]:
        raise TraceError(
            f"--for {engine}: expected labels 'point' above temperature 0, because {engine} accepts the draft's likeliest "
            f"token with the target's probability of it, got {labels[0]!r}; collect with --verification point"
        )
    names = tuple(requested) if requested else head.default_features(defaults)
    unknown = [name for name in names if not is_available_in_engines(feature(name).name, not sampled)]
    states = [*hidden, *head.hidden]
    if states or (unknown and (requested or head.scalar_features is not None)):
        raise InputError(
            f"--for {engine}: {', '.join(states or unknown)} cannot be read there; expected features of the draft's rows, "
            "of tokens and of history"
        )
    if not unknown:
        return names
    return tuple(dict.fromkeys([*(name for name in names if name not in unknown), *_REPLACEMENTS]))
