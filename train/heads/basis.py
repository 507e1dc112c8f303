"""The basis of linear layers, fitted: what standardises the scalars of training rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ...policies.contract import Array
from ...policies.features import feature
from ...policies.heads.base import Basis
from .rows import FitRows


def fit_basis(rows: FitRows, names: Sequence[str]) -> Basis:
    """Return the basis of these features whose columns have mean 0 and deviation 1 over rows with a drawn token.

    Constant columns get scale 1.
    """
    bare = plain_basis(names)
    columns = bare.expand(rows.features[rows.drawn].contiguous().numpy()).astype(np.float64)
    if not columns.size:
        return bare
    scale = columns.std(0, ddof=1) if len(columns) > 1 else np.zeros(bare.width)
    return Basis(names, columns.mean(0).astype(np.float32), np.where(scale > 1e-6, scale, 1.0).astype(np.float32))


def plain_basis(names: Sequence[str]) -> Basis:
    """Return the basis of these features that standardises nothing."""
    width = len(names) + sum(feature(name).is_probability for name in names)
    return Basis(names, np.zeros(width, dtype=np.float32), np.ones(width, dtype=np.float32))


def basis_columns(basis: Basis, features: Tensor, depth: Tensor) -> Array:
    """Return [M, F'] float32 of rows [M, F] at depths [M]."""
    columns: Array = (basis.expand(features.contiguous().numpy()) - basis.mean) / basis.scale
    columns[depth.numpy() == 0] *= basis.first_mask
    return columns


def flagged_columns(basis: Basis, features: Tensor, depth: Tensor) -> Tensor:
    """Return [M, F' + 1] float32, the columns of `basis_columns`, and after them whether the depth is 0."""
    # Columns that are not known at depth 0 are 0 there, which elsewhere is their mean: the flag tells the two apart.
    columns = torch.from_numpy(basis_columns(basis, features, depth))
    return torch.cat([columns, (depth == 0)[:, None].float()], 1)
