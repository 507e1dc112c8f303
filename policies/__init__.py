"""Stop policies: features, rules, heads, baselines, the policy folder, plugins.

Names are imported when they are first used: an error class or a file helper must not cost the import of numba.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import validate_int as validate_int, validate_number as validate_number
    from .batch_rules import Batches as Batches, CostGrid as CostGrid
    from .contract import (
        Array as Array,
        DraftStep as DraftStep,
        DraftTree as DraftTree,
        RoundOutcome as RoundOutcome,
        State as State,
        StopPolicy as StopPolicy,
    )
    from .counter_rng import keyed_normal as keyed_normal, keyed_uniform as keyed_uniform
    from .errors import (
        InputError as InputError,
        PairError as PairError,
        PolicyError as PolicyError,
        SpecstopError as SpecstopError,
        SpecstopWarning as SpecstopWarning,
        TraceError as TraceError,
    )
    from .features import custom_feature as custom_feature
    from .fixed import Confidence as Confidence, FeatureThreshold as FeatureThreshold, FixedLength as FixedLength
    from .kernels.compiled import (
        argsort_desc as argsort_desc,
        copy_row as copy_row,
        kernel as kernel,
        kernel_part as kernel_part,
        known_depths as known_depths,
        sigmoid as sigmoid,
    )
    from .learned import LearnedPolicy as LearnedPolicy
    from .profile import Profile as Profile, load_profile as load_profile
    from .registry import load_policy as load_policy
    from .storage import from_pretrained as from_pretrained, save_policy as save_policy
    from .tree_rules import append_level as append_level, node_values as node_values


class _CallableModule(ModuleType):
    """A package that can be called like the function of the same name in it: `specstop.decode(...)`."""

    @property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(self, self.__name__.rpartition(".")[2])
        return function

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(self._function)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._function(*args, **options)


def attach(
    package: str, modules: Mapping[str, str], is_callable: bool = False
) -> tuple[Callable[[str], Any], list[str]]:
    """Return `__getattr__` and `__all__` of a package from its public names, separated by spaces, by module.

    With EAGER_IMPORT in the environment all names are imported at once, for documentation tools.

    Args:
        package: its full name.
        modules: public names by module.
        is_callable: calling the package calls its function of the same name. Python sets a sub-package as an attribute of
            its parent, so that `specstop.decode` cannot be the function itself.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{module_of[name]}", package), name)

    if is_callable:
        sys.modules[package].__class__ = _CallableModule
    if os.environ.get("EAGER_IMPORT"):
        vars(sys.modules[package]).update({name: load(name) for name in module_of})
    return load, sorted(module_of)


__getattr__, __all__ = attach(
    __name__,
    {
        "arguments": "validate_int validate_number",
        "batch_rules": "Batches CostGrid",
        "contract": "Array DraftStep DraftTree RoundOutcome State StopPolicy",
        "counter_rng": "keyed_normal keyed_uniform",
        "errors": "InputError PairError PolicyError SpecstopError SpecstopWarning TraceError",
        "features": "custom_feature",
        "fixed": "Confidence FeatureThreshold FixedLength",
        "kernels.compiled": "argsort_desc copy_row kernel kernel_part known_depths sigmoid",
        "learned": "LearnedPolicy",
        "profile": "Profile load_profile",
        "registry": "load_policy",
        "storage": "from_pretrained save_policy",
        "tree_rules": "append_level node_values",
    },
)
