"""Row summaries of logits: by the compiled kernel on the host, by recorded operations on a device.

Reading a row is a dozen small operations. Launched one by one they take longer than a small draft takes for a token, so they
are recorded: a decision takes one launch and one wait.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..policies.contract import Array
from ..policies.errors import PolicyError
from ..policies.features import NO_SCORES, TOP, Columns, DrawnTokens, Needs, RowSummary, summarise as summarise_arrays
from .models.device import Recorded, Recorder, filled_up, fused, upload

LEAST = -87.0
"""As in `kernels.rows`: what a masked token counts as below the largest."""

BLOCKS, LONG = 1024, 1 << 14
"""Blocks that a long row is cut into to find its largest, and from which length on."""

MOST_ROWS, MOST_KEPT = 16, 32
"""Rows of a reading that is recorded, and how many readings of different shapes are kept: 8 MB for 16 rows of 128k tokens.
More rows are those of wide trees and large batches, beside which launches are little."""


@dataclass(frozen=True)
class Reading:
    """What is read of rows, and all that a recording of it depends on.

    Attributes:
        rows, tokens: R and B.
        ranks: how many of the largest logits, 1 at least.
        spread: whether sums, entropies and the probabilities of tokens.
        temperature: of the distribution that is sampled from; 1 where it is told.
        noisy: how many of the largest scores; 0 = none.
    """

    rows: int
    tokens: int
    ranks: int
    spread: bool
    temperature: float
    noisy: int

    def read(self, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, at: Tensor) -> Tensor:
        """Return in one piece: of each row the largest logits, two numbers, and the largest scores; two of each token.

        Args:
            logits: [R, V] float32.
            sampled, scores: [R, V], see `policies.features.summarise`; None = not read.
            at: [B, 2] int64, the row and the id of each token.
        """
        top = largest(logits, self.ranks)
        found, numbers = logits.new_zeros(self.rows, 2), logits.new_zeros(self.tokens, 2)
        if self.spread:
            owner, token = at.unbind(-1)
            found, numbers = _spread(logits, top[:, :1], owner, token, self.temperature)
            if sampled is not None:
                numbers = torch.stack([numbers[:, 0], sampled[owner, token] - sampled.logsumexp(-1)[owner]], -1)
        noisy = logits.new_zeros(self.rows, 0) if scores is None else largest(scores, self.noisy)
        return torch.cat([part.flatten() for part in (top, found, noisy, numbers)])

    def split(self, packed: Array) -> tuple[Array, Array, Array, Array]:
        """Return what `read` has put into one piece."""
        shapes = ((self.rows, self.ranks), (self.rows, 2), (self.rows, self.noisy), (self.tokens, 2))
        parts = np.split(packed, np.cumsum([count * width for count, width in shapes[:-1]]))
        top, found, noisy, numbers = (part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return top, found, noisy, numbers


def largest(rows: Tensor, count: int) -> Tensor:
    """Return [R, count], the largest of each row in falling order.

    They lie in the `count` blocks whose maxima are the largest: a long row is passed over once, and little is sorted.
    """
    if count == 1:
        return rows.amax(-1, keepdim=True)
    if rows.shape[-1] < LONG:
        return rows.topk(count, -1).values
    more = _padded(rows.shape[-1]) - rows.shape[-1]
    blocks = (functional.pad(rows, (0, more), value=-torch.inf) if more else rows).unflatten(-1, (BLOCKS, -1))
    held = blocks.amax(-1).topk(count, -1).indices[..., None].expand(-1, -1, blocks.shape[-1])
    values: Tensor = blocks.gather(1, held).flatten(1).topk(count, -1).values
    return values


def _padded(vocabulary: int) -> int:
    """Return how long rows are to be cut into equal blocks."""
    return -(-vocabulary // BLOCKS) * BLOCKS if vocabulary >= LONG else vocabulary


@fused
def _spread(rows: Tensor, top: Tensor, owner: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [R, 2] what sums and entropies rows have, and [B, 2] the log-probabilities of tokens, also at a temperature.

    Args:
        rows: [R, V] raw logits.
        top: [R, 1] their largest.
        owner, token: [B] rows and ids of the tokens.
        temperature: see `Reading`.
    """
    # With d = logit - largest and Z = sum of e^d: log Z, and the entropy log Z - sum of e^d d / Z.
    below = rows - top
    least = below.clamp_min(LEAST)
    weight = least.exp()
    total = weight.sum(-1)
    entropy = total.log() - (weight * least).sum(-1) / total
    shaped = (below / temperature).exp().sum(-1).log()
    # A token that is masked has probability 0, whatever it counts as in the sums.
    own = rows[owner, token] - top[owner, 0]
    logprob = torch.stack([own - total.log()[owner], own / temperature - shaped[owner]], -1)
    return torch.stack([total.log(), entropy.clamp_min(0.0)], -1), logprob


class Buffers(Recorded[Tensor]):
    """What readings of one shape read, at the addresses that their recording has.

    Args:
        reading: what is read.
        vocabulary: V.
        sampled, scores: whether they are read.
        device: where.
    """

    def __init__(self, reading: Reading, vocabulary: int, sampled: bool, scores: bool, device: torch.device) -> None:
        super().__init__()
        self._reading, wide = reading, _padded(vocabulary)

        def rows() -> Tensor:
            return torch.full((reading.rows, wide), -torch.inf, device=device)

        self._logits, self._sampled, self._scores = rows(), rows() if sampled else None, rows() if scores else None
        at = torch.zeros(reading.tokens, 2, dtype=torch.int64)
        self._said, self._at = at.pin_memory() if device.type == "cuda" else at, at.to(device)

    def read(
        self, recorder: Recorder, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, at: Array
    ) -> Array:
        """Return what `Reading.read` returns; of fewer rows and tokens than there is room for, the first ones count."""
        for own, new in ((self._logits, logits), (self._sampled, sampled), (self._scores, scores)):
            if own is not None and new is not None:
                own[: len(new), : new.shape[1]] = new
        self._said[: len(at)] = torch.from_numpy(at)
        self._at.copy_(self._said, non_blocking=True)  # which nobody writes to before the answer is there
        read = self._reading.read
        packed = self.answer(recorder, lambda: read(self._logits, self._sampled, self._scores, self._at))
        out: Array = packed.cpu().numpy()
        return out


KEPT: OrderedDict[object, Buffers] = OrderedDict()
"""Buffers of the last readings, the latest last."""

recorder = functools.cache(Recorder)
"""Of a device: readings share a pool of memory, as they follow one another."""

_READING = threading.Lock()
"""Held until an answer is on the host: a server's other threads would read into the same memory."""


def _read(
    reading: Reading, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, at: Array
) -> tuple[Array, Array, Array, Array]:
    """Return what is read of R rows and B tokens: [R, ranks], [R, 2], [R, noisy], [B, 2]."""
    count, tokens = len(logits), len(at)
    own = recorder(logits.device)
    if not own.works or count > MOST_ROWS:
        weights, noise = (None if rows is None else rows.float() for rows in (sampled, scores))
        return reading.split(reading.read(logits.float(), weights, noise, upload(at, logits.device)).cpu().numpy())
    reading = replace(reading, rows=filled_up(count), tokens=filled_up(tokens))
    shape = logits.shape[-1], sampled is None, scores is None, logits.device
    # What is made in inference mode cannot be written to outside of it.
    key = reading, *shape, torch.is_inference_mode_enabled()
    told = sampled is not None, scores is not None
    with _READING:
        KEPT[key] = buffers = KEPT.pop(key, None) or Buffers(reading, shape[0], *told, logits.device)
        while len(KEPT) > MOST_KEPT:
            KEPT.popitem(last=False)
        packed = buffers.read(own, logits, sampled, scores, at)
    top, found, noisy, numbers = reading.split(packed)
    return top[:count], found[:count], noisy[:count], numbers[:tokens]


def on_device(
    needs: Needs,
    logits: Tensor,
    drawn: DrawnTokens,
    temperature: float,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Array | None = None,
) -> RowSummary:
    """Return the summary of rows that lie on a device: a few operations there, and one copy to the host.

    Args:
        needs, logits, drawn, temperature, sampled, scores, best: see `policies.features.summarise`.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    count, most = len(logits), 0
    if needs.noisy and best is None:
        if scores is None:
            raise PolicyError(NO_SCORES)
        # One more than the most siblings: margins are to the best score that was not drawn.
        most = min(max(int(drawn.ids[:, 4].max()) + 1, 2), scores.shape[-1])
    ranks, shaped = max(min(needs.ranks, logits.shape[-1]), 1), sampled if needs.sampled else None
    shaping = temperature if needs.sampled and shaped is None and temperature else 1.0
    reading = Reading(count, len(drawn.ids), ranks, needs.spread, shaping, most)
    top, found, noisy, numbers = _read(reading, logits, shaped, scores if most else None, drawn.ids[:, :2])
    if best is None:
        best = _ranks(noisy, max(most, 2))
    logprob = numbers.astype(np.float64)
    path = logprob[:, :1] if drawn.parent_path is None else logprob[:, :1] + drawn.parent_path[:, None]
    lead = np.full_like(path, np.inf) if drawn.lead is None else drawn.lead[:, None]
    return RowSummary(_ranks(top, TOP), found.astype(np.float64), best, np.concatenate([logprob, path, lead], 1))


def _ranks(values: Array, width: int) -> Array:
    """Return [R, width] float32, -inf behind the values."""
    out = np.full((len(values), width), -np.inf, dtype=np.float32)
    out[:, : values.shape[1]] = values
    return out


def summarise(
    needs: Needs,
    logits: Tensor,
    drawn: DrawnTokens,
    temperature: float,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Sequence[Sequence[float]] | Tensor | None = None,
) -> RowSummary:
    """Return the summary of rows of logits [R, V] for these features; see `policies.features.summarise`.

    Args:
        needs, logits, drawn, temperature, sampled, scores: as there.
        best: [R, m] the largest scores in falling order, where they are known.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    arrays = _arrays(needs, logits, sampled, scores, best)
    if arrays is None:
        return on_device(needs, logits, drawn, temperature, sampled, scores, _ranked(needs, best))
    rows, *others = arrays
    return summarise_arrays(needs, rows, drawn, temperature, *others)


def read_columns(
    columns: Columns,
    logits: Tensor,
    drawn: DrawnTokens,
    temperature: float,
    out: Array,
    sampled: Tensor | None = None,
    scores: Tensor | None = None,
    best: Sequence[Sequence[float]] | Tensor | None = None,
) -> Array:
    """Write the columns of drawn tokens to `out` [B, .] float32; return the log-probability of each path (`Columns.read`).

    Args:
        columns: of the features.
        logits, drawn, temperature, sampled, scores, best: see `summarise`.

    Raises:
        PolicyError: noisy scores are needed, and there are none.
    """
    arrays = _arrays(columns.needs, logits, sampled, scores, best)
    if arrays is None:
        ranked = _ranked(columns.needs, best)
        summary = on_device(columns.needs, logits, drawn, temperature, sampled, scores, ranked)
        columns.write(summary, drawn, temperature, out)
        return summary.path
    rows, *others = arrays
    return columns.read(rows, drawn, temperature, out, *others)


def _arrays(
    needs: Needs,
    logits: Tensor,
    sampled: Tensor | None,
    scores: Tensor | None,
    best: Sequence[Sequence[float]] | Tensor | None,
) -> tuple[Array, Array | None, Array | None, Array | None] | None:
    """Return logits on the host, sampled, scores and best as arrays, as far as they are wanted; None on a device."""
    if not logits.is_cpu:
        return None
    rows = _array(logits)
    shaped = None if sampled is None or not needs.sampled else _array(sampled)
    if not needs.noisy:
        return rows, shaped, None, None
    # The very same array where scores are the logits: then one ranking serves both (`features.summary.wanted`).
    noisy = None if scores is None else rows if scores is logits else _array(scores)
    return rows, shaped, noisy, _ranked(needs, best)


def _ranked(needs: Needs, best: Sequence[Sequence[float]] | Tensor | None) -> Array | None:
    if best is None or not needs.noisy:
        return None
    return _array(best) if isinstance(best, Tensor) else np.array(best, dtype=np.float32)


def lead_over_truncated(untruncated: Tensor, sampled: Tensor, drawn: DrawnTokens) -> Array:
    """Return [B] float64, the lead of each drawn token over the likeliest token that was left out; infinite where none was.

    Args:
        untruncated: [R, V] log-weights before tokens were left out for being unlikely.
        sampled: [R, V] after it, -inf where a token was left out.
    """
    best = untruncated.masked_fill(sampled > -torch.inf, -torch.inf).amax(-1)  # [R], -inf where none was left out
    ids = torch.from_numpy(drawn.ids).to(sampled.device)
    lead: Array = (untruncated[ids[:, 0], ids[:, 1]] - best[ids[:, 0]]).double().cpu().numpy()
    return lead


def _array(values: Tensor) -> Array:
    """Return a tensor as float32 numbers in one piece on the host; without a copy where it is that already."""
    if values.dtype is not torch.float32 or not values.is_contiguous() or values.requires_grad:
        values = values.detach().float().cpu().contiguous()
    array: Array = values.numpy()
    return array
