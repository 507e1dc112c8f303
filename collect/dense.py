"""The dense collector: the target's text once, then the draft unrolled from every position at once.

Under `match` the committed text does not depend on the policy, so one plain text holds every anchor that any policy can
visit. From each anchor the draft is unrolled to depth K: one forward per depth, the anchors as rows under a mask that lets
each see its prefix and its own branch only. Labels compare with the text and cost no further target call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..decode.cache import CachedModel, backend_mask
from ..decode.noise import gumbel, match_scores
from ..decode.pair import Pair
from ..decode.plain import plain_texts
from ..policies.features import ANCHOR_FEATURES, CHAIN_FEATURES, Rows, compute

_BYTES_PER_SCORE = 48
"""Peak bytes per anchor and token of vocabulary while features are computed (logits, noise, scores, softmax)."""


@dataclass(frozen=True)
class Unrolled:
    """Draft chains from n anchors to depth K.

    Attributes:
        tokens: [n, K].
        features: [n, K, F] in the order of `CHAIN_FEATURES`.
        draft_prob, target_prob: [n, K], q and p of the token in the sampled distributions.
        overlap: [n, K], sum over tokens of min(p, q).
    """

    tokens: Tensor
    features: Tensor
    draft_prob: Tensor
    overlap: Tensor
    target_prob: Tensor


@dataclass(frozen=True)
class Anchors:
    """The anchors of one text: `anchor` tokens of it are committed when the round starts.

    Attributes:
        text: prompt and generated ids.
        prompt: length of the prompt.
        anchor: [n] int64, from 1 on.
        key: of the stream.
    """

    text: list[int]
    prompt: int
    anchor: Tensor
    key: int


class Unroller:
    """Unrolls one draft; keeps its cache between texts.

    Args:
        pair: whose draft is unrolled.
        depth: K.
        temperature: of the sampling.
        memory_bytes: budget for a chunk of anchors.
    """

    def __init__(self, pair: Pair, depth: int, temperature: float, memory_bytes: int = 1 << 28) -> None:
        self.pair, self.depth, self.temperature = pair, depth, temperature
        self._chunk = max(8, min(256, memory_bytes // (_BYTES_PER_SCORE * pair.vocabulary)))
        self._model = CachedModel(pair.draft, 0, pair.vocabulary)

    @torch.inference_mode()
    def unroll(self, anchors: Anchors, target_rows: Tensor) -> Unrolled:
        """Draft K tokens from every anchor.

        Args:
            anchors: of one text.
            target_rows: [N, V] logits, row i the one that generated token i was drawn from.
        """
        last = anchors.prompt + int(anchors.anchor.max())
        chunk = min(self._chunk, len(anchors.anchor))
        if self._model.capacity < last + chunk * self.depth:
            capacity = last + chunk * self.depth + 64
            self._model = CachedModel(self.pair.draft, capacity, self.pair.vocabulary)
        self._model.roll_back(0)
        first = int(anchors.anchor.min())
        prefix = torch.tensor([anchors.text[:last]], device=self.pair.device)
        logits = self._model.read(prefix, rows=last - (anchors.prompt + first) + 1)[0]
        scale = self.temperature or 1.0
        target = torch.softmax(target_rows / scale, -1)
        noise = None
        if self.temperature > 0:
            positions = torch.arange(anchors.prompt + first, last + self.depth, device=self.pair.device)
            noise = gumbel(anchors.key, positions, self.pair.vocabulary, self.pair.logits_dtype)
        parts = []
        for at in torch.arange(len(anchors.anchor), device=self.pair.device).split(chunk):
            self._model.roll_back(last)
            anchor = anchors.anchor[at]
            parts.append(self._chain(anchors.prompt, anchor, logits[anchor - first], target, noise, first))
        return Unrolled(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _chain(
        self, prompt: int, anchor: Tensor, logits: Tensor, target: Tensor, noise: Tensor | None, first: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Draw depth by depth for one chunk of anchors.

        Args:
            prompt: its length.
            anchor: [n].
            logits: [n, V], the draft's first rows.
            target: [N, V], the target's probabilities by generated token.
            noise: [., V], row i for the token behind anchor `first` + i; None at temperature 0.
            first: the first anchor of the text.
        """
        prefix = self._model.length
        position = prompt + anchor - 1  # of the anchor token
        sees_prefix = torch.arange(prefix, device=anchor.device) <= position[:, None]
        own = torch.eye(len(anchor), dtype=torch.bool, device=anchor.device)
        logprob = logits.new_zeros(len(anchor))
        out: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        mask = sees_prefix
        for depth in range(1, self.depth + 1):
            drawn = None if noise is None else noise[anchor - first + depth - 1]
            scores = match_scores(logits, self.temperature, drawn)
            token = scores.argmax(-1)
            rows = Rows(logits, self.temperature, scores, token, logprob, depth)
            row = (anchor + depth - 1).clamp_max(len(target) - 1)
            out.append((token, compute(CHAIN_FEATURES, rows), *self._compare(rows, target[row])))
            logprob = rows.path_logprob
            if depth < self.depth:
                mask = torch.cat([mask, own], 1)
                logits = self._model.read(
                    token[None], 0, backend_mask(mask[None, None], self.pair.draft), (position + depth)[None]
                )[0]
        tokens, features, q, p, overlap = zip(*out, strict=True)
        return (
            torch.stack(tokens, 1),
            torch.stack(features, 1),
            torch.stack(q, 1),
            torch.stack(overlap, 1),
            torch.stack(p, 1),
        )

    def _compare(self, rows: Rows, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q(x), p(x) and sum min(p, q), each [n], in the sampled distributions (T = 0: at temperature 1)."""
        scale = self.temperature or 1.0
        q = rows.probs if scale == 1.0 else torch.softmax(rows.logits / scale, -1)
        return rows.of_drawn(q), rows.of_drawn(p), torch.minimum(p, q).sum(-1)


def dense_rows(
    pair: Pair,
    unroller: Unroller,
    batch: Sequence[tuple[int, str, str, list[int], int]],
    max_new_tokens: int,
) -> list[Mapping[str, Any]]:
    """Return the rows of a batch of prompts, one column chunk per text.

    Args:
        pair: target and draft.
        unroller: of the pair's draft.
        batch: (sequence, prompt id, group, token ids, stream key) of each prompt.
        max_new_tokens: limit of each text; it is read K tokens further so that the last anchors have labels.
    """
    texts = plain_texts(
        pair,
        [b[3] for b in batch],
        [b[4] for b in batch],
        max_new_tokens + unroller.depth,
        unroller.temperature,
    )
    chunks = []
    for (sequence, name, group, prompt, key), text, rows in zip(batch, texts.tokens, texts.logits, strict=True):
        last = min(len(text), max_new_tokens)
        if last > 1:
            chunks.append(
                _text_rows(
                    unroller,
                    sequence,
                    name,
                    group,
                    prompt,
                    key,
                    text,
                    rows[: len(text)],
                    last,
                    ended=text[-1] in pair.eos,
                )
            )
    return chunks


def _text_rows(
    unroller: Unroller,
    sequence: int,
    name: str,
    group: str,
    prompt: list[int],
    key: int,
    text: list[int],
    target_rows: Tensor,
    last: int,
    ended: bool,
) -> Mapping[str, Any]:
    """Return the columns of one text: anchors 1 .. last - 1."""
    device = target_rows.device
    anchor = torch.arange(1, last, device=device)
    chains = unroller.unroll(Anchors(prompt + text, len(prompt), anchor, key), target_rows)
    depth = chains.tokens.shape[1]
    at = anchor[:, None] + torch.arange(depth, device=device)  # index of the text token each node stands for
    own = torch.tensor([*text, *[-1] * depth], device=device)
    matches = chains.tokens == own[at]
    alive = torch.cat([torch.ones_like(matches[:, :1]), matches[:, :-1]], 1).cumprod(1).bool()
    labelled = alive & (at < len(text))
    accepted = matches & labelled
    anchor_rows = Rows(target_rows[: last - 1], tokens=own[: last - 1])
    columns: dict[str, Any] = {
        "prompt_id": [name] * (last - 1),
        "group": [group] * (last - 1),
        "sequence": [sequence] * (last - 1),
        "prompt_tokens": [len(prompt)] * (last - 1),
        "text_tokens": [last] * (last - 1),
        "anchor": anchor,
        "tokens": chains.tokens,
        "draft_prob": chains.draft_prob.float(),
        "target_prob": (chains.target_prob * labelled).float(),
        "overlap": (chains.overlap * labelled).float(),
        "accepted": accepted,
        "labelled": labelled,
        "accepted_length": accepted.sum(1),
        "cut": (at[:, -1] >= len(text)) & ended,
    }
    columns.update(zip(ANCHOR_FEATURES, compute(ANCHOR_FEATURES, anchor_rows).unbind(1), strict=True))
    columns.update(zip(CHAIN_FEATURES, chains.features.unbind(2), strict=True))
    return {name: v.cpu().numpy() if isinstance(v, Tensor) else v for name, v in columns.items()}
