"""Plain decoding: one token per step, no draft. Every policy must reproduce its texts under `match`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policies.arguments import check_token_ids
from ..policies.features import TARGET_HIDDEN
from ..policies.fixed import FixedLength
from .drafters import Drafter
from .hooks import Hook
from .loop import Request, Speculator
from .models.outputs import stored
from .models.pair import Pair
from .models.view import hidden_width
from .round_state import RoundState
from .settings import Settings
from .texts import Text
from .verify.sampling import MODEL_DEFAULTS, SamplingParams


@dataclass
class PlainTexts(Hook):
    """Texts of a batch and the target's rows.

    Attributes:
        tokens: generated ids by prompt; a text ends with its EOS or at the limit.
        logits: [B, N, V], the raw row that each generated token was drawn from; 0 after an EOS.
        states: [B, N, H] float16, the last hidden states of these rows (`features.HIDDEN_STATES`), if requested.
        noise: [B, N, V], the noise that each was drawn with, if requested; None at temperature 0.
    """

    tokens: list[list[int]]
    logits: Tensor
    states: Tensor | None = None
    noise: Tensor | None = None

    def on_text_begin(self, stream: int, text: Text) -> None:
        """Store the row of the first token."""
        at, anchor = text.generated - 1, text.anchor
        self.logits[stream, at] = anchor.row[0]
        if self.states is not None and anchor.hidden is not None:
            self.states[stream, at] = stored(anchor.hidden[0])
        if self.noise is not None:
            self.noise[stream, at] = text.source.gumbel(len(text.tokens) - 1, 1)[0]

    def on_round_end(self, round: RoundState) -> None:
        """Store the row of each text's last token."""
        for stream, text in enumerate(round.texts):
            if text is not None:
                self.on_text_begin(stream, text)


@torch.inference_mode()
def plain_texts(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    hidden: bool = False,
    noise: bool = False,
    shaping: SamplingParams = MODEL_DEFAULTS,
) -> PlainTexts:
    """Decode a batch of prompts with the target alone.

    Args:
        pair: only its target is used.
        prompts: B lists of token ids, none empty.
        keys: B stream keys (`noise.stream_key`), without effect at temperature 0.
        max_new_tokens: N, the length limit of each text.
        temperature: 0 = greedy, else sampling with the streams' keyed noise.
        ignore_eos: continue after the end-of-text token.
        hidden: return the hidden states too.
        noise: return the noise too.
        shaping: other sampling parameters.

    Raises:
        PairError: the target's logits are not finite.
        InputError: a processor cannot be called for any prefix, or a grammar and other options leave no token.
    """
    check_token_ids(prompts)
    settings = Settings(temperature, max_new_tokens, ignore_eos=ignore_eos, verification="match", shaping=shaping)
    size = len(prompts), max_new_tokens
    logits = torch.zeros(*size, pair.vocabulary, dtype=pair.logits_dtype, device=pair.device)
    states = torch.zeros(*size, hidden_width(pair.target), dtype=torch.float16, device=pair.device) if hidden else None
    texts = PlainTexts([], logits, states, torch.zeros_like(logits) if noise and temperature > 0 else None)
    names = (TARGET_HIDDEN,) if hidden else ()
    loop = Speculator(
        pair, FixedLength(0), settings, drafter=Drafter(), hooks=[texts], hidden=names, batch=len(prompts)
    )
    requests = [Request(prompt, key) for prompt, key in zip(prompts, keys, strict=True)]
    texts.tokens = [list(text.tokens) for text in loop.run(requests)]
    return texts
