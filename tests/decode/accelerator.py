"""A simulated accelerator: tensors that say they lie on a device, compute on the CPU, and count what is copied between them.

Code under test takes the branches that it takes on a GPU (`device.type != "cpu"`), an operation that mixes device and host
raises, and every number that the host waits for is counted: what cannot be seen on the CPU, where all of that is free.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
"""The one device beside the CPU that every build of torch knows."""

_aten = torch.ops.aten
READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.nonzero.default, _aten.masked_select.default}
"""Operations with a result or a size that the host waits for."""


CROSSING = {
    _aten._to_copy.default, _aten.copy_.default, _aten.index.Tensor, _aten.index_put_.default,
    _aten._index_put_impl_.default,
}  # fmt: skip
"""Operations that take tensors of both sides: what lies on the host is copied over first."""


class OnDevice(torch.Tensor):
    """A tensor that says it lies on `DEVICE`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnDevice:
        out: Any = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=DEVICE
        )  # fmt: skip
        out.inner = inner
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func}: a tensor of the simulated device outside of it")


class _Literals(TorchFunctionMode):
    """Lists of numbers go to the device and come back as copies, as on a GPU; `meta` itself would forget them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], OnDevice):
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            at = tuple(torch.tensor(one).to(DEVICE) if isinstance(one, list) else one for one in at)
            return func(args[0], at, *args[2:])
        if func is torch.Tensor.tolist and isinstance(args[0], OnDevice):
            return args[0].cpu().tolist()
        return func(*args, **kwargs)


class Accelerator(TorchDispatchMode):
    """While it is entered, `DEVICE` computes.

    Attributes:
        count: of `reads` and `uploads`, for which the host waits; of copies that were `sent` and `fetched` without waiting;
            and of `launches`, all that computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self._literals = _Literals()

    def __enter__(self) -> Accelerator:
        self._literals.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._literals.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        there = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OnDevice)]
        here = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice)
        ]
        target = kwargs.get("device")
        wanted = torch.device(target) if target is not None else None
        if not there and wanted != DEVICE:
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with torch._C.DisableTorchFunction(), self:  # inference mode hands them over whole
                return func.decompose(*args, **kwargs)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        crossing = func in CROSSING
        if any(leaf.is_meta for leaf in here) or (not crossing and any(leaf.dim() for leaf in here)):
            raise RuntimeError(f"{func}: tensors on the device and on the host")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        waits = not (kwargs.get("non_blocking") or any(arg is True for arg in args[2:]))
        to_host = func is _aten._to_copy.default and wanted is not None and wanted != DEVICE
        if to_host or (func is _aten.copy_.default and not isinstance(args[0], OnDevice)):
            self.count["reads" if waits else "fetched"] += 1
            return out
        if (crossing or not there) and here:
            self.count["uploads" if waits else "sent"] += 1
        elif func in READS or _by_mask(func, args):
            self.count["reads"] += 1
        elif not func.is_view:
            self.count["launches"] += 1
        return _wrapped(func, args, out)


def _by_mask(func: Any, args: Any) -> bool:
    """Whether an index picks by truth: how many there are is not known before they are counted."""
    if not func.name().startswith(("aten::index.", "aten::index_put", "aten::_index_put")):
        return False
    return any(isinstance(at, Tensor) and at.dtype == torch.bool for at in args[1])


def _inner(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, OnDevice) else leaf


def _wrapped(func: Any, args: Any, out: Any) -> Any:
    if func._schema.is_mutable and args and isinstance(args[0], OnDevice) and out is args[0].inner:
        return args[0]
    return tree_map(lambda leaf: OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, out)


def to_device(model: nn.Module) -> nn.Module:
    """Move a model's weights to the device, in place."""
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(OnDevice(weight.data), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = OnDevice(buffer)
    return model
