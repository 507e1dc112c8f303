"""Kinds of head by name, each fitted by a module that is imported only when it is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ...policies.arguments import check_limits, check_params
from ...policies.display import Progress, silent
from ...policies.heads.base import Head
from .rows import FitRows


@dataclass(frozen=True)
class FitOptions:
    """How heads are fitted; each kind of head reads what it has a use for.

    Attributes:
        accelerator, devices, precision: of Lightning's Trainer, for networks.
        epochs, batch_size, learning_rate: of networks; epochs are the most, training stops early. None = the head's own.
        checkpoints: a work folder that networks keep `last.ckpt` and their logs in, a search its trials; None keeps nothing.
        resume: go on from the checkpoints there.
        logger: csv, tensorboard, wandb, or any logger of Lightning by its class; None = csv where there is a work folder.
        device: of XGBoost, cpu or cuda.
        out_of_core: whether XGBoost reads its rows in pieces from disk; None = from `kinds.boosted.OUT_OF_CORE` rows on.
        params: hyper-parameters of the head by name, such as `max_depth` of xgboost (`fit.tuning.trials.SPACES`).
    """

    accelerator: str = "cpu"
    devices: str = "1"
    precision: str = "32-true"
    epochs: int | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    checkpoints: Path | None = None
    resume: bool = False
    logger: str | None = None
    device: str = "cpu"
    out_of_core: bool | None = None
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_limits(epochs=self.epochs, batch_size=self.batch_size, learning_rate=self.learning_rate)
        check_params(self.params)

    def below(self, *names: str) -> FitOptions:
        """Return them with a work folder below this one, for one of several fits; without one they are the same."""
        return self if self.checkpoints is None else replace(self, checkpoints=self.checkpoints.joinpath(*names))


@dataclass(frozen=True)
class FitTask:
    """What every fitter is given.

    Attributes:
        rows, held_out: to fit on, and to stop early on.
        names: of the scalar features, in the order of the rows' columns.
        seed: of everything random.
        progress: see `Progress`.
        options: see `FitOptions`.
        of: what tells this fit from another one in the same work folder (`trainer.claim_fit`), beside the options.
    """

    rows: FitRows
    held_out: FitRows
    names: Sequence[str]
    seed: int = 0
    progress: Progress = silent
    options: FitOptions = field(default_factory=FitOptions)
    of: Mapping[str, Any] = field(default_factory=dict)


Fitter = Callable[[FitTask], tuple[Head, dict[str, bytes]]]
"""Returns the head, and files for retraining that the policy folder keeps beside it."""

FITTERS = {
    "logistic": "linear:fit_logistic",
    "mlp": "mlp:fit_network",
    "xgboost": "boosted:fit_trees",
    "resnet": "resnet:fit_resnet",
    "dynasd-soft": "dynasd:fit_soft",
    "dynasd-hard": "dynasd:fit_hard",
    "specdec": "specdec:fit_specdec",
    "specdec-published": "specdec:fit_published",
    "tokens": "tokens:fit_tokens",
}
"""`module:function` of each kind."""

HEAD_KINDS = tuple(FITTERS)


def fitter(kind: str) -> Fitter:
    """Return the function that fits this kind of head."""
    module, _, name = FITTERS[kind].partition(":")
    return cast(Fitter, getattr(import_module(f".kinds.{module}", __package__), name))
