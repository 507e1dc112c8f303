"""Batches of training rows, in an order that a resumed run takes up again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import lightning
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset


class Shuffled(Protocol):
    """A data module that says how its rows are shuffled."""

    seed: int
    trainer: lightning.Trainer | None


class Batches(IterableDataset[tuple[Tensor, ...]]):
    """Whole batches by index: a row at a time would spend the epoch in Python.

    The order depends on seed and epoch alone, so that a resumed run goes on as it would have.
    """

    def __init__(self, data: TensorDataset, batch: int, shuffle: Shuffled | None) -> None:
        self.data, self.batch, self.shuffle = data, batch, shuffle
        self._passes = 0

    def __len__(self) -> int:
        return -(-len(self.data) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        count = len(self.data)
        order = torch.arange(count)
        if self.shuffle is not None:
            trainer = self.shuffle.trainer
            epoch = self._passes if trainer is None else trainer.current_epoch
            self._passes += 1
            # A hash of numbers is the same in every process, unlike one of texts.
            generator = torch.Generator().manual_seed(hash((self.shuffle.seed, epoch)) % 2**63)
            order = torch.randperm(count, generator=generator)
        for at in order.split(self.batch):
            yield self.data[at]
