"""The class that drafts in vLLM: for all requests side by side, and the policy chooses their drafters and ends each draft.

    vllm serve TARGET --speculative-config \\
        '{"method": "custom_class", "model": "specstop.decode.engines.vllm.Proposer", "num_speculative_tokens": 8}' \\
        --additional-config '{"specstop": {"draft": "DRAFT", "policy": "policy"}}'

vLLM calls the interface experimental, and Model Runner V2 does not have it: `VLLM_USE_V2_MODEL_RUNNER=0`. vLLM creates the
class with its configuration, calls `load_model` once and `propose` after each step, and verifies the drafts, so the text
is vLLM's. It receives no draft probabilities. Therefore the most likely tokens are drafted, and at a temperature above 0 a
token x is accepted with the target's p(x).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from ...policies import kernels
from ...policies.contract import Array, StopPolicy
from ...policies.host import with_costs
from ...policies.profile import Profile
from ...policies.registry import load_policy
from ..drafters.spec import drafter_index, drafter_names
from ..models.pair import check_dtype, end_tokens
from .drafters import load_engine_drafters
from .drafting import Drafting, EngineObserver, Options
from .settings import check_engine_policy, read_settings


class Proposer:
    """Drafts for vLLM.

    Args:
        vllm_config: vLLM's configuration. Its `additional_config["specstop"]` has the `settings.EngineSettings`.

    Raises:
        InputError, PolicyError: the settings or the policy are wrong, the policy reads what vLLM does not pass on, or it
            lets several drafters draft in one round.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.settings = read_settings(vllm_config.additional_config)
        self._config = vllm_config
        policy = check_engine_policy(load_policy(self.settings.policy))
        self.depth = int(vllm_config.speculative_config.num_speculative_tokens)
        names = drafter_names(self.settings.drafter)
        drafter_index(policy, names)  # raises an error now if the policy names another drafter
        profile = Profile.load(self.settings.profile) if self.settings.profile else None
        self._profile = profile and profile.of_policy(policy, names)
        self._policy = self.prepared(with_costs(policy, self._profile))
        self.drafting: Drafting | None = None

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy to use: this one unless a subclass replaces it."""
        return policy

    def observer(self, options: Options) -> EngineObserver | None:
        """Return the observer of drafts, if any."""
        return None

    def load_model(self, target_model: Any = None) -> None:
        """Load the draft; vLLM calls it after loading the target."""
        config, settings = self._config.model_config, self.settings
        vocabulary = int(config.get_vocab_size())
        dtype = check_dtype(settings.dtype) if settings.dtype else config.dtype
        self.device = torch.device(settings.device or self._config.device_config.device)
        rows = min(settings.rows, int(self._config.scheduler_config.max_num_seqs))
        drafters = load_engine_drafters(
            settings.drafter, self._policy, settings.draft, str(config.model), self.device, dtype, vocabulary
        )
        kernels.load()  # before the first request
        generation = config.try_get_generation_config()
        eos = generation.get("eos_token_id") if isinstance(generation, dict) else None
        eos = end_tokens(getattr(config.hf_text_config, "eos_token_id", None) if eos is None else eos)
        readable = min(int(config.max_model_len), *(drafter.readable for drafter in drafters))
        options = Options(rows, self.depth, readable, vocabulary, settings.temperature, eos, settings.fallback)
        self.drafting = Drafting(drafters, self._policy, options, self._profile, self.observer(options))

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
            num_tokens_no_spec: by place, length of the text.
            token_ids_cpu: [places, .] the texts.
            slot_mappings: not used.
        """
        assert self.drafting is not None
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        at = [i for i, new in enumerate(sampled_token_ids) if len(new)]
        if at:
            texts = [token_ids_cpu[i, : int(num_tokens_no_spec[i])] for i in at]
            names = request_names(token_ids_cpu, len(sampled_token_ids))
            proposed = self.drafting.propose(texts, None if names is None else [names[i] for i in at])
            for place, tokens in zip(at, proposed, strict=True):
                drafts[place] = tokens
        return drafts


def request_names(token_ids: Array, count: int) -> list[str] | None:
    """Return the names of the first `count` requests of a step, or None if they are unknown.

    `propose` does not receive them. Its caller, vLLM's model runner, has them in its `input_batch`, which is recognized by
    the array of texts (0.32.0 and 0.33.0).
    """
    frame = inspect.currentframe()
    while frame is not None and (frame := frame.f_back) is not None:
        batch = getattr(frame.f_locals.get("self"), "input_batch", None)
        if getattr(batch, "token_ids_cpu", None) is token_ids:
            names = getattr(batch, "req_ids", None)
            if isinstance(names, list) and len(names) >= count and all(isinstance(name, str) for name in names[:count]):
                return names[:count]
            return None
    return None
