"""The class that vLLM drafts with: all requests side by side, the trained policy ends each draft by itself.

    vllm serve TARGET --speculative-config \\
        '{"method": "custom_class", "model": "specstop.decode.engines.vllm.Proposer", "num_speculative_tokens": 8}' \\
        --additional-config '{"specstop": {"draft": "DRAFT", "policy": "policy"}}'

vLLM calls the interface experimental, and Model Runner V2 has none: `VLLM_USE_V2_MODEL_RUNNER=0`. It makes the class with its
configuration, calls `load_model` once and `propose` after every step. What is proposed is verified as any draft: the text is
vLLM's own. No draft probabilities go back, so tokens are the draft's likeliest, and at a temperature above 0 a token x is
accepted with the target's p(x).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...policies import kernels
from ...policies.contract import StopPolicy
from ...policies.errors import InputError
from ...policies.profile import Profile
from ...policies.registry import load_policy
from ...policies.typing import Array
from ...policies.validation import with_costs
from ..models.pair import check_dtype, end_tokens
from .drafters import load_rows
from .drafting import Drafting, Observer, Options
from .settings import EngineSettings, check_engine_policy, read_settings


class Proposer:
    """Drafts for vLLM.

    Args:
        vllm_config: vLLM's configuration; what is ours lies in `additional_config["specstop"]` (`settings.EngineSettings`).

    Raises:
        InputError, PolicyError: the settings or the policy are wrong, or the policy reads what vLLM does not hand over.
    """

    records = False
    """Whether it writes traces."""

    def __init__(self, vllm_config: Any) -> None:
        self.settings: EngineSettings = read_settings(vllm_config.additional_config)
        if bool(self.settings.traces) != self.records:
            raise InputError(
                "additional_config: specstop: traces: expected a folder with the class "
                "specstop.collect.engines.serving.RecordingProposer, and with no other class"
            )
        self._config = vllm_config
        policy = check_engine_policy(load_policy(self.settings.policy), "vllm")
        self.depth = int(vllm_config.speculative_config.num_speculative_tokens)
        self._profile = Profile.load(self.settings.profile) if self.settings.profile else None
        self._policy = self.prepared(with_costs(policy, self._profile))
        self._names: Names | None = None
        self.drafting: Drafting | None = None

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy as it is asked; one that records may explore."""
        return policy

    def observer(self, options: Options) -> Observer | None:
        """Return who looks on, if anybody."""
        return None

    def load_model(self, target_model: Any = None) -> None:
        """Load the draft; vLLM calls it once the target is there."""
        config, settings = self._config.model_config, self.settings
        vocabulary = int(config.get_vocab_size())
        dtype = check_dtype(settings.dtype) if settings.dtype else config.dtype
        self.device = torch.device(settings.device or self._config.device_config.device)
        rows = min(settings.rows, int(self._config.scheduler_config.max_num_seqs))
        drafter, readable = load_rows(
            settings.drafter, settings.draft, str(config.model), self.device, dtype, vocabulary, rows, self.depth
        )
        kernels.load()  # not while requests wait
        options = Options(
            rows, self.depth, min(readable, int(config.max_model_len)), settings.temperature,
            self._eos(), settings.fallback,
        )  # fmt: skip
        self.drafting = Drafting(drafter, self._policy, options, self._profile, self.observer(options))

    def _eos(self) -> tuple[int, ...]:
        """Return the tokens that end a text, as the target's folder says."""
        config = self._config.model_config
        generation = config.try_get_generation_config()
        found = generation.get("eos_token_id") if isinstance(generation, dict) else None
        return end_tokens(getattr(config.hf_text_config, "eos_token_id", None) if found is None else found)

    @torch.inference_mode()
    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Array,
        token_ids_cpu: Array,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return a draft for each request of the step, possibly empty.

        Args:
            sampled_token_ids: by place in the batch, the tokens committed in this step; none while a prompt is read.
            num_tokens_no_spec: by place, tokens of the text.
            token_ids_cpu: [places, .] the texts.
            slot_mappings: of the target's cache; not used.
        """
        assert self.drafting is not None
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        at = [i for i, new in enumerate(sampled_token_ids) if len(new)]
        if at:
            if self._names is None:
                self._names = find_names(token_ids_cpu)
            texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in at]
            names = self._names(len(sampled_token_ids))
            made = self.drafting.propose(texts, None if names is None else [names[i] for i in at])
            for place, tokens in zip(at, made, strict=True):
                drafts[place] = tokens
        return drafts


Names = Callable[[int], list[str] | None]
"""Returns the names of a step's requests by their number; None where they are not what they should be."""


def find_names(token_ids: Array) -> Names:
    """Return what gives the names of a step's requests.

    `propose` is not told them. Its caller, vLLM's model runner, has them in its `input_batch`, which is known by the array
    that it has just handed over (0.32.0 and 0.33.0). Where no caller is like that, there are no names.
    """
    frame = inspect.currentframe()
    while frame is not None:
        batch = getattr(frame.f_locals.get("self"), "input_batch", None)
        if getattr(batch, "token_ids_cpu", None) is token_ids:
            break
        frame = frame.f_back
    else:
        batch = None
    del frame  # frames hold all that their functions do

    def names(count: int) -> list[str] | None:
        found = getattr(batch, "req_ids", None)
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found[:count]):
            return None
        return found[:count] if len(found) >= count else None

    return names
