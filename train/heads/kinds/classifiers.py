"""Heads as scikit-learn classifiers: is the token accepted, given the features of its depth?

    model = StopClassifier("xgboost", features=("top1", "entropy", "depth"))
    cross_val_score(model, x, accepted, groups=prompt_ids, cv=GroupKFold(5), scoring="neg_log_loss")
    policy = model.fit(x, accepted).to_policy(Threshold("survival", 0.4), max_depth=8)

A head has two outputs; a classifier is given one label and fits both to it, so `next` repeats `accept`. For the derived rule,
which wants both, train with `train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from ....policies.contract import Array
from ....policies.errors import InputError, PolicyError
from ....policies.features import FEATURES
from ....policies.heads import build_head
from ....policies.heads.base import Head
from ....policies.learned import Calibrator, LearnedPolicy
from ....policies.rules import Rule
from ..fitting import FitOptions, FitTask, fitter
from ..head_specs import SCALAR_KINDS
from ..rows import FitRows

HELD_OUT = 0.2
_PLAIN = "noisy_score"
"""Stands for columns that have no feature's name: a real number that is taken as it is."""


class StopClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Any kind of head of scalar features behind `fit`, `predict_proba` and `predict`.

    Args:
        kind: of head, see `fitting.FITTERS`.
        features: names of the columns; None = those of a data frame where all are features, else an array of numbers. Only a
            classifier with names can become a policy.
        params: hyper-parameters of the head.
        epochs: of networks, at most.
        random_state: seed of split and fit.

    Attributes:
        classes_: the two labels; the second is "accepted".
        head_: the fitted head.
        feature_names_: of the head's columns.
    """

    def __init__(
        self,
        kind: str = "logistic",
        features: Sequence[str] | None = None,
        params: dict[str, Any] | None = None,
        epochs: int = 20,
        random_state: int | None = 0,
    ) -> None:
        self.kind = kind
        self.features = features
        self.params = params
        self.epochs = epochs
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = dict(super().__getstate__())
        if "head_" in state:  # whose packed arrays may come back read-only, which compiled code refuses
            state["head_"] = (self.head_.kind, self.head_.tensors())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "head_" in state:
            kind, tensors = state["head_"]
            self.head_ = build_head(kind, self.feature_names_, tensors)

    def fit(self, X: Any, y: Any) -> StopClassifier:
        """Fit the head on rows [M, F] and their labels [M]; a fifth of the rows is left out to stop early on.

        Raises:
            InputError: an unknown kind of head, or names that do not fit the columns.
            ValueError: rows or labels are not what scikit-learn's conventions ask for.
        """
        if self.kind not in SCALAR_KINDS:
            raise InputError(f"kind: expected one of {', '.join(SCALAR_KINDS)}, not {self.kind!r}")
        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, label = np.unique(y, return_inverse=True)
        if len(self.classes_) > 2:
            raise ValueError(f"Only binary classification is supported. The data has {len(self.classes_)} classes.")
        if len(self.classes_) < 2:
            raise ValueError("Classifier can't train when only one class is present.")
        self.feature_names_ = self._names(X.shape[1])
        shuffled = np.random.default_rng(self.random_state).permutation(len(X))
        out = shuffled[: max(1, round(HELD_OUT * len(X)))]
        rest = shuffled[len(out) :] if len(X) > len(out) else out
        seed = int(self.random_state or 0)
        options = FitOptions(epochs=self.epochs, params=self.params or {})
        rows, held = rows_of(X[rest], label[rest]), rows_of(X[out], label[out])
        self.head_, _ = fitter(self.kind)(FitTask(rows, held, self.feature_names_, seed, options=options))
        return self

    def _names(self, width: int) -> tuple[str, ...]:
        names = self.features
        if names is None:
            given = tuple(getattr(self, "feature_names_in_", ()))
            names = given if given and all(name in FEATURES for name in given) else (_PLAIN,) * width
        if len(names) != width or any(name not in FEATURES for name in names):
            raise InputError(f"features: expected the names of {width} features, got {', '.join(map(str, names))}")
        return tuple(str(name) for name in names)

    def decision_function(self, X: Any) -> Array:
        """Return [M] logits of the second class."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False)
        found: Array = self.head_.scores(_float32(X), 1)[:, 0]  # all rows are fitted at depth 1
        return found

    def predict_proba(self, X: Any) -> Array:
        """Return [M, 2] probabilities of the two classes."""
        chance = 1.0 / (1.0 + np.exp(-np.clip(self.decision_function(X), -500, 500)))
        return np.stack([1.0 - chance, chance], 1)

    def predict(self, X: Any) -> Array:
        """Return [M], the likelier class of each row."""
        positive = self.decision_function(X) > 0
        found: Array = self.classes_[positive.astype(int)]
        return found

    def to_head(self) -> Head:
        """Return the fitted head, whose outputs both are the classifier's.

        Raises:
            PolicyError: the columns have no names of features.
        """
        check_is_fitted(self)
        if _PLAIN in self.feature_names_ and self.features is None and not self._has_named_columns():
            raise PolicyError("to_head: give the classifier the names of its columns (`features=`) before it is fitted")
        head: Head = self.head_
        return head

    def _has_named_columns(self) -> bool:
        return tuple(getattr(self, "feature_names_in_", ())) == self.feature_names_

    def to_policy(self, rule: Rule, max_depth: int, name: str | None = None) -> LearnedPolicy:
        """Return a policy under a rule of thresholds on `accept`, such as `Threshold("survival", 0.4)`.

        Raises:
            PolicyError: the columns have no names, or the rule reads `next`.
        """
        if rule.kind == "derived":
            raise PolicyError(
                "to_policy: the derived rule wants the output `next`, which a classifier has not; use `train`"
            )
        exact = Calibrator()
        return LearnedPolicy(name or self.kind, self.feature_names_, self.to_head(), exact, exact, rule, max_depth)


def rows_of(x: Array, label: Array) -> FitRows:
    """Return rows at depth 1 whose labels for both outputs are `label` [M] of 0 and 1."""
    truth = torch.from_numpy(np.asarray(label)).bool()
    one = torch.ones(len(x), dtype=torch.int64)
    return FitRows(torch.from_numpy(_float32(x)), one, truth, truth, one.bool())


def _float32(x: Array) -> Array:
    # Numbers that float64 holds and float32 does not would become infinite.
    return np.ascontiguousarray(np.clip(np.asarray(x, dtype=np.float64), -1e30, 1e30), dtype=np.float32)
