"""A stopping criterion that lets a policy end the drafts of transformers' assisted generation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ...policies.contract import RoundOutcome, StopPolicy
from ...policies.errors import PolicyError
from ...policies.features import TOKEN_FEATURES, Layout
from ...policies.host import PolicyHost
from ...policies.registry import as_policy
from ..feature_reader import FeatureReader, set_anchors
from ..round_state import DraftScores, RoundState
from ..topology import chain
from ..verify.modes import is_trimming

_ONE = np.ones((1, 1), dtype=bool)


@contextlib.contextmanager
def assistant_options(
    assistant: PreTrainedModel, tokens: int | None, schedule: str, threshold: float
) -> Iterator[None]:
    """Set the generation options of the assistant of transformers' loop until the block ends."""
    config: Any = assistant.generation_config
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    before = {name: getattr(config, name, None) for name in names}
    vars(config).update(zip(names, (tokens, schedule, threshold), strict=True))
    try:
        yield
    finally:
        vars(config).update(before)


class PolicyStoppingCriteria(StoppingCriteria):
    """Lets a policy end the drafts of transformers' assisted generation.

        with PolicyStoppingCriteria(policy).attached_to(draft):
            target.generate(**inputs, assistant_model=draft)

    transformers calls it from depth 1 on, without the target's logits, and verifies all drafted tokens: policies that read
    these logits or hidden states, or leave out drawn tokens, are refused. Scores are processed: they are raw logits under
    greedy decoding, and raw logits divided by the temperature if there is no other processor.

    Args:
        policy: a policy or a spec.
        temperature: of the sampling; 0 = greedy.

    Attributes:
        rounds: (drafted, accepted) of each round; the last round of a text is missing, as its outcome is unknown.
    """

    def __init__(self, policy: StopPolicy | str, temperature: float = 0.0) -> None:
        self.policy = as_policy(policy)
        self._host, layout = PolicyHost(self.policy), Layout(self.policy.features)
        missing = {*self.policy.hidden, *layout.anchor} - {"temperature", *TOKEN_FEATURES}
        missing |= {name for name in layout.node if temperature > 0 and name.startswith("noisy_")}
        if missing:
            raise PolicyError(
                f"{self.policy.name}: reads {', '.join(sorted(missing))}, which assisted generation has not"
            )
        if is_trimming(self.policy):
            raise PolicyError(f"{self.policy.name}: leaves drawn tokens out; assisted generation verifies all of them")
        self._topology = chain(self.policy.max_depth)
        self._reader = FeatureReader(self.policy, self._topology, temperature)
        self._temperature, self._drafted = temperature, 0
        self._text: list[int] = []
        self.rounds: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def attached_to(self, assistant: PreTrainedModel) -> Iterator[PolicyStoppingCriteria]:
        """Add this criterion to every draft of `assistant`, and disable transformers' stop rules, until the block ends."""
        original: Any = assistant.generate
        instance_generate = vars(assistant).get("generate")  # a model loaded from an exported repository has one

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._begin(kwargs["input_ids"][0].tolist())
            kwargs["stopping_criteria"] = StoppingCriteriaList([*kwargs.get("stopping_criteria", ()), self])
            return original(*args, **kwargs)

        setattr(assistant, "generate", generate)  # noqa: B010 - the type checker refuses an assignment to a method
        try:
            with assistant_options(assistant, self.policy.max_depth, "constant", 0.0):
                yield self
        finally:
            del assistant.generate  # the method of its class is visible again
            vars(assistant).update({"generate": instance_generate} if instance_generate else {})

    def _begin(self, text: list[int]) -> None:
        """Start a round; a text that does not continue the last one is a new sequence."""
        before = len(self._text)
        # A round adds at most what it drafted and one token: a longer text is the next turn of a conversation.
        if before and before < len(text) <= before + self._drafted + 1 and text[:before] == self._text:
            accepted = min(len(text) - before - 1, self._drafted)  # the other new token is the target's
            self.rounds.append((self._drafted, accepted))
            drafted, true = np.array([self._drafted]), np.array([True])
            self._host.observe(RoundOutcome(true, drafted, drafted, np.array([accepted]), ~true, np.zeros(1)))
        else:
            self._host.start(np.zeros(1, dtype=np.int64))
        self._text, self._drafted = text, 0
        none = np.zeros(1, dtype=np.int64)
        self._round = RoundState(self._topology, _ONE[0], none + len(text), none)
        set_anchors(self._round, {0: [-1, *text][-2:]})
        self._reader.begin(self._round)
        if self.policy.first == 0:  # its answer has no effect, since transformers drafts at least one token
            self._host.keep(self._reader.step(0, _ONE, self._host.history))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return [1] bool, whether to stop after the token that was just drawn."""
        self._drafted += 1
        return torch.tensor([self._stops(int(input_ids[0, -1]), scores[-1])], device=input_ids.device)

    def _stops(self, token: int, scores: Tensor) -> bool:
        """Return whether to stop after a token, given the scores [1, V] that it was drawn from."""
        depth, length, longest = self._drafted, self._host.fixed_length(_ONE), self.policy.max_depth
        if length is not None or depth >= longest:
            return depth >= (longest if length is None else min(length, longest))
        self._reader.read_path()
        logits = scores.float() * (self._temperature or 1.0)  # features read raw logits
        self._round.tokens[0, depth] = token
        greedy = logits if self._temperature == 0.0 else None
        self._reader.drawn(depth, [DraftScores([(0, [depth - 1])], [1], logits, scores=greedy)])
        if depth < self.policy.first:
            return False
        return not self._host.keep(self._reader.step(depth, _ONE, self._host.history))[0, 0]
