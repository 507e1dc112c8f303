"""A stopping criterion that lets a policy end the drafts of transformers' own assisted generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ...policies.contract import Array, RoundOutcome, StopPolicy
from ...policies.errors import PolicyError
from ...policies.features import RUN_FEATURES, TOKEN_FEATURES, DrawnTokens, Layout
from ...policies.host import PolicyHost, validate_policy
from ...policies.registry import load_policy
from ..feature_reader import read_anchors, single_step
from ..summaries import read_columns
from ..verify.modes import is_trimming


@contextlib.contextmanager
def assistant_set(assistant: PreTrainedModel, tokens: int | None, schedule: str, threshold: float) -> Iterator[None]:
    """Set the generation options of the assistant of the stock loop until the block ends."""
    config: Any = assistant.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    before = {name: getattr(config, name, None) for name in names}
    vars(config).update(zip(names, (tokens, schedule, threshold), strict=True))
    try:
        yield
    finally:
        vars(config).update(before)


class PolicyStoppingCriteria(StoppingCriteria):
    """Lets a policy end the drafts of transformers' own assisted generation.

        with PolicyStoppingCriteria(policy).riding(draft):
            target.generate(**inputs, assistant_model=draft)

    The stock loop calls it from depth 1 on, does not pass on rows of the target, and verifies every drafted token: policies
    that read these rows or hidden states, or leave out drawn tokens, are refused. Scores are processed: they are raw logits
    under greedy decoding, and raw logits divided by the temperature if there is no other processor.

    Args:
        policy: a policy or a spec.
        temperature: of the sampling; 0 = greedy.

    Attributes:
        rounds: (drafted, accepted) of each round; what followed the last draft of a text is not known.
    """

    def __init__(self, policy: StopPolicy | str, temperature: float = 0.0) -> None:
        self.policy = validate_policy(load_policy(policy) if isinstance(policy, str) else policy)
        self._host, self._layout = PolicyHost(self.policy), Layout(self.policy.features)
        known = (*RUN_FEATURES, *TOKEN_FEATURES)
        unknown = [*self.policy.hidden, *(name for name in self._layout.anchor if name not in known)]
        if temperature > 0:
            unknown += [name for name in self._layout.node if name.startswith("noisy_")]
        if unknown:
            raise PolicyError(f"{self.policy.name}: reads {', '.join(unknown)}, which the stock assisted loop has not")
        if is_trimming(self.policy):
            raise PolicyError(f"{self.policy.name}: leaves drawn tokens out; the stock assisted loop verifies them all")
        self._temperature, self._drafted = temperature, 0
        self._text: list[int] = []
        self.rounds: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def riding(self, assistant: PreTrainedModel) -> Iterator[PolicyStoppingCriteria]:
        """Add this criterion to every draft of `assistant` and switch its stock stop rules off, until the block ends."""
        stock: Any = assistant.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._begin(kwargs["input_ids"])
            kwargs["stopping_criteria"] = StoppingCriteriaList([*kwargs.get("stopping_criteria", ()), self])
            return stock(*args, **kwargs)

        setattr(assistant, "generate", generate)  # noqa: B010 - the type checker knows no other way
        try:
            with assistant_set(assistant, self.policy.max_depth, "constant", 0.0):
                yield self
        finally:
            del assistant.generate  # the method of its class shows again

    def _begin(self, input_ids: Tensor) -> None:
        """Start a round; a text that does not continue the last one is a new sequence."""
        text = input_ids[0].tolist()
        known = len(self._text)
        # A round adds what it drafted and one token at most: a longer text is the next turn of a conversation.
        if known and known < len(text) <= known + self._drafted + 1 and text[:known] == self._text:
            accepted = min(len(text) - known - 1, self._drafted)  # the other new token is the target's
            self.rounds.append((self._drafted, accepted))
            drafted, true = np.array([self._drafted]), np.array([True])
            self._host.observe(RoundOutcome(true, drafted, drafted, np.array([accepted]), ~true, np.zeros(1)))
        else:
            self._host.start(np.zeros(1, dtype=np.int64))
        self._text, self._drafted = text, 0
        anchor = text[-1], text[-2] if len(text) > 1 else -1
        # No row of the target is read: the ANCHOR features that are allowed are of tokens and of the run.
        self._base = np.zeros((1, len(self._layout.names)), dtype=np.float32)
        read_anchors(self._layout, torch.zeros(1, 1), [anchor], self._temperature, self._base)
        self._layout.write_history(self._host.history, self._base)
        self._path: Array | None = None
        if self.policy.first == 0:  # its answer is void, since the stock loop drafts one token at least
            self._host.keep(single_step(0, self._base.copy()))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return [1] bool: stop after the token just drawn."""
        self._drafted += 1
        device = input_ids.device
        length = self._host.fixed_length(np.ones((1, 1), dtype=bool))
        deepest = self.policy.max_depth if length is None else min(length, self.policy.max_depth)
        if length is not None or self._drafted >= deepest:
            return torch.tensor([self._drafted >= deepest], device=device)
        # Features read raw logits; scores come divided by the temperature.
        logits = scores[-1].float() * (self._temperature or 1.0)
        greedy = logits if self._temperature == 0.0 else None
        before, own = input_ids[0, -2:].tolist()
        drawn = DrawnTokens.of([(0, own, before, 0, 1, self._drafted)], self._path)
        features = self._base.copy()
        self._path = read_columns(self._layout.node_columns, logits, drawn, self._temperature, features, scores=greedy)
        if self._drafted < self.policy.first:
            return torch.tensor([False], device=device)
        keep = self._host.keep(single_step(self._drafted, features))
        return torch.tensor([not keep[0, 0]], device=device)
