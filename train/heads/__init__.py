"""Stop heads as scikit-learn estimators, one class per head (`base.HeadEstimator`), and their registry.

A plugin adds a head by an entry point of the group `specstop.heads` that names a subclass of `HeadEstimator`. It can export
any form of head that `policies.heads` runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ...policies.arguments import check_params
from ...policies.errors import InputError, close_match
from ...policies.registry import Registry

if TYPE_CHECKING:
    from .base import HeadEstimator

NO_PARAMS: Mapping[str, Any] = MappingProxyType({})


def _usage(name: str, build: Any) -> str:
    return f"{name}. {(build.__doc__ or '').strip().partition(chr(10))[0]}"


HEADS = Registry(
    "specstop.heads",
    "head",
    __package__,
    {
        "logistic": "linear:LogisticEstimator",
        "mlp": "networks:MLPEstimator",
        "xgboost": "boosted:XGBoostEstimator",
        "resnet": "networks:ResNetEstimator",
        "dynasd-soft": "published:DynaSDSoftEstimator",
        "dynasd-hard": "published:DynaSDHardEstimator",
        "specdec": "published:SpecDecEstimator",
        "specdec-published": "published:SpecDecPublishedEstimator",
        "tokens": "linear:TokensEstimator",
    },
    _usage,
)
"""All heads by name. A class is imported when it is used, because some import xgboost or lightning."""


def head_class(name: str) -> type[HeadEstimator]:
    """Return the estimator class of a head.

    Raises:
        InputError: there is no head of this name, or a plugin is not an estimator of heads.
    """
    loaded: Any = HEADS.load(name)
    if loaded is None:
        names = HEADS.names()
        raise InputError(f"--head: unknown head {name!r}{close_match(name, names)}; expected {', '.join(names)}")
    from .base import HeadEstimator

    if not (isinstance(loaded, type) and issubclass(loaded, HeadEstimator)):
        raise InputError(f"--head: the plugin {name!r} is not a subclass of specstop.train.heads.base.HeadEstimator")
    return loaded


def make_head(
    name: str, params: Mapping[str, Any] = NO_PARAMS, trainer: Mapping[str, Any] = NO_PARAMS
) -> HeadEstimator:
    """Return an estimator that is not fitted yet.

    Args:
        name: of the head.
        params: hyper-parameters, such as `max_depth` of xgboost.
        trainer: arguments of `lightning.Trainer`, for networks.

    Raises:
        InputError: an unknown head or hyper-parameter, or a value out of range.
    """
    build = head_class(name)
    names = [key for key in build.param_names() if key not in ("features", "random_state", "trainer")]
    for key in params:
        if key not in names:
            raise InputError(
                f"--param: unknown hyper-parameter {key!r}{close_match(key, names)} of the head {name}; "
                f"expected {', '.join(names)}"
            )
    if trainer and "trainer" not in build.param_names():
        raise InputError(f"--trainer: the head {name} is not a network and is not fitted by lightning; leave it out")
    check_params(params)
    arguments = {**params, "trainer": dict(trainer)} if trainer else params
    return build(**arguments)
