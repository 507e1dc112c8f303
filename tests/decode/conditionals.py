"""Whether texts are samples of a model: where each token falls in the distribution after what stands before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.pair import Pair


@torch.inference_mode()
def pit(
    pair: Pair, prompt: Sequence[int], texts: Sequence[Sequence[int]], temperature: float, seed: int = 0
) -> np.ndarray:
    """Return a share in (0, 1) for each token: independent uniforms iff the texts are samples of the target.

    Tokens are ordered by probability, so that texts which are too likely have large shares. A token's share is drawn from
    the stretch that it takes up (Rosenblatt 1952, randomised for discrete outcomes).
    """
    places = torch.from_numpy(np.random.default_rng(seed).random((len(texts), max(map(len, texts)))))
    shares = []
    for text, place in zip(texts, places, strict=True):
        ids = torch.tensor([[*prompt, *text]], device=pair.device)
        logits = CachedModel(pair.target, ids.shape[1], pair.vocabulary).read(ids)[0, len(prompt) - 1 : -1]
        probs = torch.softmax(logits.double() / temperature, -1).cpu()
        prob = probs.gather(-1, torch.tensor(text)[:, None])
        less = torch.where(probs < prob, probs, 0.0).sum(-1)
        shares.append(less + prob[:, 0] * place[: len(text)])
    return torch.cat(shares).numpy()
