"""Row summaries of logits: by the compiled kernel on the host, by recorded operations on a device.

A summary is a dozen small operations. Launched one by one they take longer than a small draft model takes for a token. So
they are recorded as a CUDA graph: a decision takes one launch and one wait.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ..policies.contract import Array
from ..policies.errors import PolicyError
from ..policies.features import (
    BOUND,
    NO_SCORES,
    TOP,
    Code,
    Columns,
    DrawnTokens,
    Needs,
    RowSummary,
    summarise as summarise_arrays,
)
from ..policies.heads.base import Reduction
from .models.device import Recorded, Recorder, fused, round_up_size, to_host, upload
from .models.outputs import round_states

MIN_LOGIT = -87.0
"""Logits of masked tokens relative to the largest, as in `policies.kernels.features`: its exponential is a normal float32."""

BLOCKS, LONG_ROW = 1024, 1 << 14
"""Blocks of a long row in the search for its largest values, and the length from which a row is long."""

MAX_RECORDED_ROWS, MAX_RECORDINGS = 16, 32
"""Limits of the rows of a recorded summary, and of the recordings of different shapes. 16 rows of 128k tokens take 8 MB."""

Best = Sequence[Sequence[float]] | Tensor
"""[R, m] largest noisy scores of each row in descending order."""


def summarise(
    needs: Needs, logits: Tensor, drawn: DrawnTokens, temperature: float, sampled: Tensor | None = None,
    scores: Tensor | None = None, best: Best | None = None,
) -> RowSummary:  # fmt: skip
    """Summarise rows of logits on their device; see `policies.features.summarise`.

    Args:
        needs, logits, drawn, temperature, sampled, scores: see there; tensors instead of arrays.
        best: largest noisy scores, if already computed.

    Raises:
        PolicyError: noisy scores are needed but missing.
    """
    if not logits.is_cpu:
        return summarise_on_device(needs, logits, drawn, temperature, sampled, scores, best)
    rows, *others = _host_arrays(needs, logits, sampled, scores, best)
    return summarise_arrays(needs, rows, drawn, temperature, *others)


def read_columns(
    columns: Columns, logits: Tensor, drawn: DrawnTokens, temperature: float, out: Array, sampled: Tensor | None = None,
    scores: Tensor | None = None, best: Best | None = None,
) -> Array:  # fmt: skip
    """Write the columns of drawn tokens to `out` [B, .] float32; return the log-probability of each path (`Columns.read`).

    Other arguments and errors are those of `summarise`.
    """
    if logits.is_cpu:
        rows, *others = _host_arrays(columns.needs, logits, sampled, scores, best)
        return columns.read(rows, drawn, temperature, out, *others)
    summary = summarise_on_device(columns.needs, logits, drawn, temperature, sampled, scores, best)
    columns(summary, drawn, temperature, out)
    return summary.path


def truncation_lead(untruncated: Tensor | None, sampled: Tensor | None, drawn: DrawnTokens) -> Array | None:
    """Return [B] float64, the log-weight of each drawn token minus that of the likeliest token that a filter removed.

    Args:
        untruncated: [R, V] log-weights before a filter (top-k, top-p); None if there is none, for which the result is None.
        sampled: [R, V] after it, -inf for removed tokens.
        drawn: the tokens; the result is infinite for rows from which no token was removed.
    """
    if untruncated is None or sampled is None:
        return None
    lead: Array = lead_of(untruncated, sampled, torch.from_numpy(drawn.ids[:, :2]).to(sampled.device)).cpu().numpy()
    return lead


def lead_of(untruncated: Tensor, sampled: Tensor, at: Tensor) -> Tensor:
    """Return the [B] of `truncation_lead` for the rows and ids `at` [B, 2] of tokens, on their device."""
    row, token = at.unbind(-1)
    best = untruncated.masked_fill(sampled > -torch.inf, -torch.inf).amax(-1)  # [R]
    return (untruncated[row, token] - best[row]).double()


def _host_arrays(
    needs: Needs, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, best: Best | None
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Return logits, sampled, scores and best as arrays, None if they are not needed."""
    rows = _array(logits)
    shaped = None if sampled is None or not needs.sampled else _array(sampled)
    # The same array if the scores are the logits, which are then ranked once.
    noisy = None if scores is None or not needs.noisy else rows if scores is logits else _array(scores)
    return rows, shaped, noisy, _best_array(needs, best)


def _best_array(needs: Needs, best: Best | None) -> Array | None:
    if best is None or not needs.noisy:
        return None
    return _array(best) if isinstance(best, Tensor) else np.array(best, dtype=np.float32)


def _array(values: Tensor) -> Array:
    """Return a tensor as a contiguous float32 array, without a copy if possible."""
    if values.dtype is not torch.float32 or not values.is_contiguous() or values.requires_grad:
        values = values.detach().float().cpu().contiguous()
    array: Array = values.numpy()
    return array


def summarise_on_device(
    needs: Needs, logits: Tensor, drawn: DrawnTokens, temperature: float, sampled: Tensor | None = None,
    scores: Tensor | None = None, best: Best | None = None,
) -> RowSummary:  # fmt: skip
    """Summarise rows of logits by operations on their device and one copy to the host; see `summarise`."""
    noisy_best, at = _best_array(needs, best), upload(drawn.ids[:, :2], logits.device)
    needed = needs if noisy_best is None else replace(needs, noisy=False)
    launched = launch(needed, logits, at, int(drawn.ids[:, 4].max()), temperature, sampled, scores)
    return launched.summary(to_host(launched.values)[0], drawn, noisy_best)


@dataclass(frozen=True)
class Launched:
    """Statistics of rows of logits that a device computes.

    Attributes:
        values: flat float32, to be copied to the host.
        shapes: number of rows computed, number of rows needed, and number of columns of each part of the values.
    """

    values: Tensor
    shapes: Sequence[tuple[int, int, int]]

    def parts(self, values: Tensor) -> list[Tensor]:
        """Return largest logits, sums and entropies, largest scores, and log-probabilities, all float64, from the values."""
        flat = values.double().split([count * width for count, _, width in self.shapes])
        return [part.view(count, width)[:n] for part, (count, n, width) in zip(flat, self.shapes, strict=True)]

    def summary(
        self, values: Tensor, drawn: DrawnTokens, best: Array | None = None, entries: Sequence[int] | None = None
    ) -> RowSummary:
        """Return the summary, given the values on the host.

        Args:
            values: on the host.
            drawn: the tokens.
            best: noisy scores that were not computed.
            entries: those of the rows and their tokens that are needed; None = all.
        """
        top, stats, noisy, logprob = (part.numpy() for part in self.parts(values))
        if entries is not None:
            top, stats, noisy, logprob = (part[list(entries)] for part in (top, stats, noisy, logprob))
        path = logprob[:, :1] if drawn.parent_path is None else logprob[:, :1] + drawn.parent_path[:, None]
        lead = np.full_like(path, np.inf) if drawn.lead is None else drawn.lead[:, None]
        numbers = np.concatenate([logprob, path, lead], 1)
        return RowSummary(
            _padded(top, TOP), stats, _padded(noisy, max(noisy.shape[1], 2)) if best is None else best, numbers
        )


def launch(
    needs: Needs, logits: Tensor, at: Tensor, siblings: int, temperature: float, sampled: Tensor | None = None,
    scores: Tensor | None = None,
) -> Launched:  # fmt: skip
    """Start the statistics of rows of logits on their device, without a wait.

    Args:
        at: [B, 2] int64 on the device, row and id of each token.
        siblings: largest number of tokens drawn from a row.
        needs, logits, temperature, sampled, scores: see `summarise`.

    Raises:
        PolicyError: noisy scores are needed but missing.
    """
    count = 0
    if needs.noisy:
        if scores is None:
            raise PolicyError(NO_SCORES)
        # One more than siblings, because margins are to the best score that was not drawn.
        count = min(max(siblings + 1, 2), scores.shape[-1])
    ranks, shaped = max(min(needs.ranks, logits.shape[-1]), 1), sampled if needs.sampled else None
    scale = temperature if needs.sampled and shaped is None and temperature else 1.0
    return RowStatistics(ranks, needs.spread, scale, count).launch(logits, shaped, scores if count else None, at)


def columns_on_device(
    codes: Sequence[int], parts: Sequence[Tensor], token: Tensor, parent: Tensor, depth: int, path: Tensor, lead: Tensor
) -> Tensor:
    """Return PRE and POST features [B, n] float32 of chains without a wait; see `policies.kernels.features.write_columns`.

    Args:
        codes: of the n features.
        parts: of the statistics of B rows, see `Launched.parts`.
        token, parent: [B] float64, ids of the token drawn from each row and of the token before it.
        depth: of the tokens.
        path, lead: [B] float64, see `RowSummary.numbers`.
    """
    top, stats, noisy, logprob = parts

    def probability(rank: int) -> Tensor:
        return (top[:, rank] - top[:, 0] - stats[:, 0]).exp() if rank < top.shape[1] else torch.zeros_like(token)

    def margin() -> Tensor:
        return torch.minimum(noisy[:, 0] - noisy[:, 1], lead).clamp(-BOUND, BOUND)

    values: dict[int, Callable[[], Tensor]] = {
        Code.MARGIN: lambda: probability(0) - probability(1), Code.LARGEST: lambda: top[:, 0],
        Code.ENTROPY: lambda: stats[:, 1], Code.SAMPLED_PROBABILITY: lambda: logprob[:, 1].exp(), Code.PATH: lambda: path,
        Code.NOISY_MARGIN: margin, Code.NOISY_LEAD: margin, Code.NOISY_SCORE: lambda: noisy[:, 0],
        Code.TOKEN: lambda: token, Code.PARENT_TOKEN: lambda: parent, Code.RANK: lambda: torch.zeros_like(token),
        Code.DEPTH: lambda: torch.full_like(token, depth),
    }  # fmt: skip
    columns = [probability(code - Code.PROBABILITY) if code >= Code.PROBABILITY else values[code]() for code in codes]
    return torch.stack(columns, 1).float()


def _padded(values: Array, width: int) -> Array:
    """Return [R, width] float32, filled up with -inf."""
    padding = ((0, 0), (0, width - values.shape[1]))
    return np.pad(values.astype(np.float32), padding, constant_values=-np.inf)


@dataclass(frozen=True)
class RowStatistics:
    """What is computed of rows of logits on a device.

    Attributes:
        ranks: number of largest logits, at least 1.
        spread: whether sums, entropies and log-probabilities of tokens are computed.
        temperature: of the distribution that is sampled from; 1 if it is given by log-weights.
        noisy: number of largest scores.
    """

    ranks: int
    spread: bool
    temperature: float
    noisy: int

    def launch(self, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, at: Tensor) -> Launched:
        """Start computing the largest logits [R, ranks], sums and entropies [R, 2], largest scores, log-probabilities [B, 2].

        Args:
            logits: [R, V].
            sampled, scores: [R, V], see `policies.features.summarise`; None = not read.
            at: [B, 2] int64, row and id of each token.
        """
        rows, tokens, device = len(logits), len(at), logits.device
        if not recorder(device).works or rows > MAX_RECORDED_ROWS:
            weights, noise = (None if tensor is None else tensor.float() for tensor in (sampled, scores))
            values, size = self.compute(logits.float(), weights, noise, at), (rows, tokens)
        else:
            size, read = (round_up_size(rows), round_up_size(tokens)), (logits, sampled, scores)
            vocabulary, is_read = logits.shape[-1], tuple(part is not None for part in read)
            inference = torch.is_inference_mode_enabled()
            with _LOCK:
                recorded, inputs, fixed_at = recorded_statistics(self, size, vocabulary, is_read, device, inference)
                # Of fewer rows and tokens than R and B the first results count.
                for buffer, part in zip(inputs, read, strict=True):
                    if part is not None:
                        buffer[:rows, :vocabulary] = part
                fixed_at[:tokens] = at
                launched = recorded.run_or_replay(recorder(device), lambda: self.compute(*inputs, fixed_at))
                values = launched.clone()  # the next run overwrites it
        per_row = ((size[0], rows, width) for width in (self.ranks, 2, self.noisy))
        return Launched(values, (*per_row, (size[1], tokens, 2)))

    def compute(self, logits: Tensor, sampled: Tensor | None, scores: Tensor | None, at: Tensor) -> Tensor:
        """Return the results of `launch` as one tensor; logits, sampled and scores are float32."""
        top = largest(logits, self.ranks)
        stats, logprob = logits.new_zeros(len(logits), 2), logits.new_zeros(len(at), 2)
        if self.spread:
            row, token = at.unbind(-1)
            stats, logprob = _spread(logits, top[:, :1], row, token, self.temperature)
            if sampled is not None:
                logprob = torch.stack([logprob[:, 0], sampled[row, token] - sampled.logsumexp(-1)[row]], -1)
        noisy = logits.new_zeros(0) if scores is None else largest(scores, self.noisy)
        return torch.cat([part.flatten() for part in (top, stats, noisy, logprob)])


def largest(rows: Tensor, count: int) -> Tensor:
    """Return [R, count], the largest values of each row in descending order.

    They are in the `count` blocks with the largest maxima: a long row is read once, and few values are sorted.
    """
    if count == 1:
        return rows.amax(-1, keepdim=True)
    if rows.shape[-1] < LONG_ROW:
        return rows.topk(count, -1).values
    rows = functional.pad(rows, (0, _block_padding(rows.shape[-1])), value=-torch.inf)
    blocks = rows.unflatten(-1, (BLOCKS, -1))
    chosen = blocks.amax(-1).topk(count, -1).indices[..., None].expand(-1, -1, blocks.shape[-1])
    values: Tensor = blocks.gather(1, chosen).flatten(1).topk(count, -1).values
    return values


def _block_padding(vocabulary: int) -> int:
    """Return the number of values that a row lacks to be cut into equal blocks."""
    return -vocabulary % BLOCKS if vocabulary >= LONG_ROW else 0


@fused
def _spread(rows: Tensor, top: Tensor, row: Tensor, token: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [R, 2] sums and entropies of rows, and [B, 2] log-probabilities of tokens, also at a temperature.

    Args:
        rows: [R, V] raw logits.
        top: [R, 1] their largest.
        row, token: [B] rows and ids of the tokens.
        temperature: see `RowStatistics`.
    """
    # With d = logit - largest and Z = sum of e^d: log Z, and the entropy log Z - sum of e^d d / Z.
    below = rows - top
    clamped = below.clamp_min(MIN_LOGIT)
    weight = clamped.exp()
    total = weight.sum(-1)
    entropy = total.log() - (weight * clamped).sum(-1) / total
    shaped = (below / temperature).exp().sum(-1).log()
    # Not clamped: a masked token has probability 0.
    difference = rows[row, token] - top[row, 0]
    logprob = torch.stack([difference - total.log()[row], difference / temperature - shaped[row]], -1)
    return torch.stack([total.log(), entropy.clamp_min(0.0)], -1), logprob


@functools.lru_cache(MAX_RECORDINGS)
def recorded_statistics(
    statistics: RowStatistics, size: tuple[int, int], vocabulary: int, is_read: tuple[bool, ...], device: torch.device,
    inference: bool,
) -> tuple[Recorded[Tensor], tuple[Any, Any, Any], Tensor]:  # fmt: skip
    """Return the recording for up to R rows and B tokens as a CUDA graph, and its input buffers.

    Args:
        statistics: what is computed.
        size: R and B.
        vocabulary: V. The buffers are padded with -infinity.
        is_read: whether logits, log-weights and scores are read.
        device: of the buffers.
        inference: whether the buffers are created in inference mode: then they cannot be written to outside of it.
    """
    width = vocabulary + _block_padding(vocabulary)
    logits, weights, scores = (
        torch.full((size[0], width), -torch.inf, device=device) if use else None for use in is_read
    )
    return Recorded(), (logits, weights, scores), torch.zeros(size[1], 2, dtype=torch.int64, device=device)


class StateReducer:
    """Applies the layers of a head that read a hidden state only, on the state's device: few numbers are then copied.

    Args:
        layers: see `policies.heads.base.Reduction`.

    Attributes:
        width: of the output.
    """

    def __init__(self, layers: Reduction) -> None:
        self._layers, self.width = layers, len(layers[-1][2])
        self._weights: list[tuple[str, Tensor, Tensor]] = []
        self._recorded: dict[tuple[int, bool], tuple[Recorded[Tensor], Tensor]] = {}

    def __call__(self, states: Tensor) -> Tensor:
        """Return [R, W] float32 of states [R, H], rounded to float16 as everywhere."""
        rows, device = len(states), states.device
        if not self._weights:
            for kind, *layer in self._layers:
                weight, bias = (upload(part.astype(np.float32), device) for part in layer)
                self._weights.append((kind, weight, bias))
        if not recorder(device).works or rows > MAX_RECORDED_ROWS:
            return self._apply(states)
        key = round_up_size(rows), torch.is_inference_mode_enabled()
        if key not in self._recorded:
            self._recorded[key] = Recorded(), states.new_zeros(key[0], states.shape[1])
        recorded, buffer = self._recorded[key]
        buffer[:rows] = states
        return recorded.run_or_replay(recorder(device), lambda: self._apply(buffer))[:rows].clone()

    def _apply(self, states: Tensor) -> Tensor:
        x = round_states(states)
        for kind, weight, bias in self._weights:
            if kind == "residual":
                x = x + functional.silu(functional.linear(x, weight, bias))
            else:
                x = functional.linear(x.relu() if kind == "relu" else x, weight, bias)
        return x


_LOCK = threading.Lock()
"""Held while a summary is launched, as threads share the buffers."""

recorder = functools.cache(Recorder)
"""Return the recorder of a device. Its recordings share a pool of memory."""
