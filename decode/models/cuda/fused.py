"""Functions whose elementwise operations are one kernel on a GPU, compiled by torch the first time.

Between two products of a model's layer lie a dozen small operations, each of which takes a GPU two microseconds whatever its
size: as long as reading the weights of a small draft.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from ....policies.errors import SpecstopWarning

Args = ParamSpec("Args")
Out = TypeVar("Out")


class Compiled:
    """What all fused functions share.

    Attributes:
        works: whether torch could compile so far; it needs Triton and a C compiler.
    """

    works = True


def fused(function: Callable[Args, Out]) -> Callable[Args, Out]:
    """Have a function compiled for CUDA, where its first argument lies there; elsewhere it runs as it is.

    Shapes are not compiled in, so that texts of all lengths and models of all widths share what is compiled.
    """

    @functools.cache
    def compiled() -> Callable[Args, Out]:
        return torch.compile(function, dynamic=True)  # whose import alone takes seconds

    @functools.wraps(function)
    def run(*args: Args.args, **kwargs: Args.kwargs) -> Out:
        first = args[0]
        if not Compiled.works or not isinstance(first, torch.Tensor) or first.device.type != "cuda":
            return function(*args, **kwargs)
        try:
            return compiled()(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # of the compiler, of Triton, or of the compiler that it calls
            out = function(*args, **kwargs)  # else it is no matter of compiling
            Compiled.works = False
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"torch cannot compile for this GPU, and small operations run one by one, which is slower ({reason})",
                SpecstopWarning,
                stacklevel=2,
            )
            return out

    return run
