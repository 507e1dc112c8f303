"""Transformers' own decoding as a method to compare with: `generate`, plain or with its assistant."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation import candidate_generator

from ...policies.errors import PairError
from ..hf.stopping import assistant_set
from ..loop import Request
from ..models.attention import without_cudnn
from ..models.pair import Pair
from ..models.view import open_view
from ..plain import cut_at
from ..records import Generation
from ..settings import shaping_of
from ..verify.model_defaults import APPLIED, SAMPLING
from ..verify.processors import PerText
from ..verify.sampling import MODEL_DEFAULTS, Shaping


@dataclass(frozen=True)
class AssistedSetting:
    """One setting of assisted generation.

    Attributes:
        name: as shown.
        tokens: `num_assistant_tokens`; 0 = `generate` without an assistant.
        schedule: `constant` or `heuristic`.
        threshold: `assistant_confidence_threshold`; 0 switches the rule off.
        adapts: let the stock loop fit the threshold anew after each round (it does where scikit-learn is installed).
    """

    name: str
    tokens: int
    schedule: str = "constant"
    threshold: float = 0.0
    adapts: bool = False


PLAIN = AssistedSetting("generate", 0)
DEFAULTS = AssistedSetting("assistant, defaults", 20, "constant", 0.4, adapts=True)
SETTINGS = (
    *(AssistedSetting(f"assistant, constant {k}", k) for k in (2, 4, 6, 8)),
    AssistedSetting("assistant, heuristic 5", 5, "heuristic"),
    *(AssistedSetting(f"assistant, threshold {t:g}", 20, "constant", t) for t in (0.2, 0.4)),
    DEFAULTS,
)
"""What users of assisted generation can set, from fixed lengths to its defaults."""


class Assisted:
    """Decodes with transformers alone.

    Args:
        pair: loaded with `engine="plain"`.
        setting: of its assistant.
        temperature: 0 = greedy.
        max_new_tokens: length limit.
        ignore_eos: go on after the end-of-text token.
        shaping: what else changes the distribution that is sampled from.
        batch: plain texts that are decoded side by side.

    Raises:
        PairError: an assistant whose vocabulary is of another size, which the library refuses.
    """

    def __init__(
        self,
        pair: Pair,
        setting: AssistedSetting,
        temperature: float,
        max_new_tokens: int,
        ignore_eos: bool = False,
        shaping: Shaping = MODEL_DEFAULTS,
        batch: int = 1,
    ) -> None:
        models = (pair.target, pair.draft_model if setting.tokens else pair.target)
        sizes = [model.config.get_text_config().vocab_size for model in models]
        if sizes[0] != sizes[1]:
            raise PairError(
                f"transformers' assisted generation wants vocabularies of one size, but the target scores {sizes[0]} "
                f"tokens and the draft {sizes[1]}; measure with --no-library"
            )
        self.name = setting.name
        self._pair, self._setting, self._batch = pair, setting, batch
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
        shaping = shaping_of(pair, shaping, max_new_tokens)
        # Also what is off: left out, it would be the model's own or the library's default.
        self._options |= {**APPLIED, "min_new_tokens": None, "min_p": None, **shaping.fields()}
        self._options |= {"temperature": temperature} if temperature > 0 else dict.fromkeys(SAMPLING)
        self._processors = shaping.processors
        if ignore_eos:
            self._options["eos_token_id"] = None

    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the texts: plain ones side by side, assisted ones, of which the library takes one, after each other."""
        if not self._setting.tokens:
            parts = [requests[at : at + self._batch] for at in range(0, len(requests), self._batch)]
            return [text for part in parts for text in self._generate([list(r.prompt) for r in part], part[0].key)]
        return [self.generate(request.prompt, request.key) for request in requests]

    def generate(self, prompt: Sequence[int], key: int = 0) -> Generation:
        """Return the text and its seconds; rounds are not reported by the library."""
        return self._generate([list(prompt)], key)[0]

    @torch.inference_mode()
    def _generate(self, prompts: Sequence[list[int]], key: int) -> list[Generation]:
        """Return texts that were generated in one call, padded on the left; each bears its share of the seconds."""
        longest, device = max(map(len, prompts)), self._pair.device
        # Any token serves as padding: the mask hides it.
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        real = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        torch.manual_seed(key % 2**63)
        options = dict(self._options)
        eos = self._pair.eos if "eos_token_id" not in options else ()
        options["logits_processor"] = LogitsProcessorList(
            one.for_text(longest, eos) if isinstance(one, PerText) else one for one in self._processors
        )
        # As our own loops call the models: in evaluation mode, and on a GPU without cuDNN's attention.
        target, guard = open_view(self._pair.target)
        with contextlib.ExitStack() as stack:
            stack.enter_context(guard)
            stack.enter_context(without_cudnn(device))
            if self._setting.tokens:
                options["assistant_model"], guard = open_view(self._pair.draft_model)
                stack.enter_context(guard)
                stack.enter_context(self._set(options["assistant_model"]))
            # Work queued before this text is none of its seconds.
            if self._pair.device.type == "cuda":
                torch.cuda.synchronize(self._pair.device)
            begin = time.perf_counter()
            out: Any = target.generate(ids, attention_mask=real, **options)  # type: ignore[operator]
            texts = out[:, longest:].tolist()  # waits for the device
            seconds = time.perf_counter() - begin
        share = seconds / len(prompts)
        cut = [tuple(cut_at(text, eos)) for text in texts]
        return [Generation(text, (), len(prompt), 0.0, share) for text, prompt in zip(cut, prompts, strict=True)]

    @contextlib.contextmanager
    def _set(self, draft: PreTrainedModel) -> Iterator[None]:
        """Give the assistant its setting for one text, and its own back afterwards."""
        setting = self._setting
        # The stock loop fits the threshold anew wherever it finds scikit-learn; there is no option against it.
        library: Any = candidate_generator
        found = library.is_sklearn_available
        try:
            if not setting.adapts:
                library.is_sklearn_available = lambda: False
            with assistant_set(draft, setting.tokens, setting.schedule, setting.threshold):
                yield
        finally:
            library.is_sklearn_available = found
