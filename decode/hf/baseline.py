"""Transformers' `generate`, plain or with an assistant model, as a decoding method for benchmarks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList

from ...policies.errors import PairError
from ..loop import Request
from ..models.attention import attending_packed
from ..models.pair import Pair
from ..models.view import open_view
from ..records import Generation
from ..settings import Settings
from ..verify.processors import PerText
from ..verify.sampling import NEUTRAL, WARPERS
from .stopping import assistant_options


@dataclass(frozen=True)
class AssistedSetting:
    """A setting of transformers' assisted generation.

    Attributes:
        name: as shown.
        tokens: `num_assistant_tokens`; 0 = `generate` without an assistant.
        schedule: `constant` or `heuristic`.
        threshold: `assistant_confidence_threshold`; 0 disables the rule. transformers fits it again after each round.
        is_lookup: candidates come from the text itself (prompt lookup), at most `tokens`, without an assistant model.
    """

    name: str
    tokens: int
    schedule: str = "constant"
    threshold: float = 0.0
    is_lookup: bool = False


PLAIN = AssistedSetting("generate", 0)
SETTINGS = (
    *(AssistedSetting(f"assistant, constant {k}", k) for k in (2, 4, 6, 8)),
    AssistedSetting("assistant, heuristic 5", 5, "heuristic"),
    AssistedSetting("assistant, threshold 0.2", 20, threshold=0.2),
    AssistedSetting("assistant, defaults", 20, threshold=0.4),
)
"""Settings of assisted generation that users choose among, from fixed lengths to its defaults."""

LOOKUP_SETTINGS = tuple(AssistedSetting(f"prompt lookup {k}", k, is_lookup=True) for k in (2, 4, 6, 10))
"""Settings of assisted generation without an assistant model."""


class Assisted:
    """Decodes with transformers' `generate`, plain or with an assistant model.

    Args:
        pair: loaded with `engine="plain"`.
        setting: of the assistant.
        settings: temperature, limit, end of text and `sampling` of the run.
        batch: number of plain texts decoded side by side.

    Raises:
        PairError: the vocabularies differ in size, which assisted generation does not support.
    """

    def __init__(self, pair: Pair, setting: AssistedSetting, settings: Settings, batch: int = 1) -> None:
        self._has_assistant = setting.tokens > 0 and not setting.is_lookup
        models = (pair.target, pair.draft_model if self._has_assistant else pair.target)
        sizes = [model.config.get_text_config().vocab_size for model in models]
        if sizes[0] != sizes[1]:
            raise PairError(
                f"transformers' assisted generation expects vocabularies of one size, but the target scores {sizes[0]} "
                f"tokens and the draft {sizes[1]}; measure with --no-library"
            )
        self._pair, self._setting, self._batch = pair, setting, 1 if setting.tokens else batch
        sampling, temperature = settings.for_pair(pair).sampling, settings.temperature
        # Neutral values are passed too: otherwise defaults of the model or the library would apply.
        self._options: dict[str, Any] = {**NEUTRAL, "min_new_tokens": None, "min_p": None, **sampling.options}
        self._options["no_repeat_ngram_size"] = self._options.pop("no_repeat_ngram")
        self._options |= {"max_new_tokens": settings.max_new_tokens, "do_sample": temperature > 0}
        self._options |= {"prompt_lookup_num_tokens": setting.tokens} if setting.is_lookup else {}
        self._options |= {"temperature": temperature} if temperature > 0 else dict.fromkeys(WARPERS)
        self._processors = sampling.processors
        if settings.ignore_eos:
            self._options["eos_token_id"] = None

    @torch.inference_mode()
    def run(self, requests: Sequence[Request]) -> list[Generation]:
        """Return the texts. Assisted generation decodes them one by one; texts of one call share its seconds."""
        out: list[Generation] = []
        for first in range(0, len(requests), self._batch):
            part = requests[first : first + self._batch]
            out += self._generate([list(request.prompt) for request in part], part[0].key)
        return out

    def _generate(self, prompts: Sequence[list[int]], key: int) -> list[Generation]:
        longest, device = max(map(len, prompts)), self._pair.device
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        torch.manual_seed(key % 2**63)
        eos = self._pair.eos if "eos_token_id" not in self._options else ()
        options = {**self._options, "attention_mask": mask}
        options["logits_processor"] = LogitsProcessorList(
            one.for_text(longest, eos) if isinstance(one, PerText) else one for one in self._processors
        )
        # The models are called as in our loop: in evaluation mode, and on a GPU without cuDNN's attention.
        target, guard = open_view(self._pair.target)
        with contextlib.ExitStack() as stack:
            stack.enter_context(guard())
            stack.enter_context(attending_packed(target, None, target is not self._pair.target))
            if self._has_assistant:
                setting = self._setting
                options["assistant_model"], guard = open_view(self._pair.draft_model)
                stack.enter_context(guard())
                assistant = options["assistant_model"]
                stack.enter_context(attending_packed(assistant, None, assistant is not self._pair.draft_model))
                stack.enter_context(
                    assistant_options(options["assistant_model"], setting.tokens, setting.schedule, setting.threshold)
                )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            texts = target.generate(ids, **options)[:, longest:].tolist()  # waits for the device
            seconds = (time.perf_counter() - begin) / len(prompts)
        ends = [next((n for n, token in enumerate(text, 1) if token in eos), len(text)) for text in texts]
        return [
            Generation(tuple(text[:end]), (), len(prompt), 0.0, seconds)
            for text, end, prompt in zip(texts, ends, prompts, strict=True)
        ]
