"""The Lightning modules that fit a drafter's network to recorded texts. They work with a Trainer of your own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from ..heads.trainer import MONITOR
from .losses import loss_of
from .texts import Batch, Text, Texts

WARM_UP, DECAY, CLIP = 0.05, 0.01, 1.0


class DrafterModule(lightning.LightningModule):
    """A network, fitted; the target's embeddings and output layer stay as they are and out of checkpoints.

    Args:
        network: of a drafter.
        embedding, output: of the target.
        rate: peak learning rate of AdamW, reached after a short warm-up and left along a cosine.
    """

    def __init__(self, network: nn.Module, embedding: nn.Module, output: nn.Module, rate: float) -> None:
        super().__init__()
        self.network, self.rate = network, rate
        self._loss = loss_of(network)
        self._target = [embedding, output]  # a list hides them from Lightning

    def on_fit_start(self) -> None:
        """Have the target's layers where the network is."""
        for module in self._target:
            module.to(self.device)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """Return the loss of a batch."""
        loss: Tensor = self._loss(batch, *self._target)
        self.log("loss", loss, batch_size=len(batch.tokens))
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        """Log the held-out loss."""
        self.log(MONITOR, self._loss(batch, *self._target), batch_size=len(batch.tokens))

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Return the batch where the network is."""
        return Batch(batch.tokens.to(device), batch.states.to(device), batch.length.to(device))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return AdamW under a warm-up and a cosine over all steps."""
        adam = torch.optim.AdamW(self.network.parameters(), self.rate, (0.9, 0.95), weight_decay=DECAY)
        steps = max(2, int(self.trainer.estimated_stepping_batches))

        def share(step: int) -> float:
            warm = max(1, int(WARM_UP * steps))
            # The lower of the two: a line up, and a cosine over all steps, which is near 1 during the warm-up.
            return min((step + 1) / warm, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

        schedule = torch.optim.lr_scheduler.LambdaLR(adam, share)
        return {"optimizer": adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Hold the norm of the gradient."""
        self.clip_gradients(optimizer, CLIP, "norm")


class TextsDataModule(lightning.LightningDataModule):
    """Batches of recorded texts; a file at a time is in memory.

    Args:
        texts, held_out: to fit on, and to stop early on.
        batch: texts in a step.
        seed: of the order.
    """

    def __init__(self, texts: Texts, held_out: Texts, batch: int, seed: int = 0) -> None:
        super().__init__()
        self.parts, self.batch, self.seed = (texts, held_out), batch, seed

    def train_dataloader(self) -> DataLoader[Batch]:
        """Return shuffled batches."""
        return DataLoader(_Batches(self.parts[0], self.batch, self), batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Return the held-out texts in order."""
        return DataLoader(_Batches(self.parts[1], self.batch, None), batch_size=None)


class _Batches(IterableDataset[Batch]):
    """Files and the texts of each in an order that depends on seed and epoch alone, so that a run that is resumed goes on."""

    def __init__(self, texts: Texts, batch: int, shuffle: TextsDataModule | None) -> None:
        self.texts, self.batch, self.shuffle = texts, batch, shuffle
        # The schedule of the learning rate wants to know the number of steps beforehand.
        self._count = [len(texts.read(number)) for number in range(len(texts.files))]

    def __len__(self) -> int:
        return sum(-(-count // self.batch) for count in self._count)

    def __iter__(self) -> Iterator[Batch]:
        trainer = None if self.shuffle is None else self.shuffle.trainer
        epoch = 0 if trainer is None else trainer.current_epoch
        # Whole numbers hash alike in every process, whatever PYTHONHASHSEED is.
        seed = hash((0 if self.shuffle is None else self.shuffle.seed, epoch)) % 2**63
        generator = torch.Generator().manual_seed(seed)

        def order(count: int) -> list[int]:
            numbers: list[int] = torch.randperm(count, generator=generator).tolist()
            return numbers if self.shuffle is not None else list(range(count))

        for file in order(len(self._count)):
            texts: list[Text] = self.texts.read(file)
            numbers = order(len(texts))
            for at in range(0, len(numbers), self.batch):
                yield Batch.of([texts[number] for number in numbers[at : at + self.batch]])
