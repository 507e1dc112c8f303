"""The Hugging Face surface: `target.generate(custom_generate=specstop_generate, ...)`, and a policy on the stock path.

Traps of transformers 5.23 behind the names here: for a callable, `generate` drops `assistant_model`, `streamer` and
`tokenizer` without a word, so they are called `draft_model` and `text_streamer`, and stop strings come as
`stopping_criteria=[StopStringCriteria(tokenizer, [...])]`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...policies.checking import check_policy
from ...policies.contract import RoundOutcome, StopPolicy, checked_keep, checked_observe, checked_start
from ...policies.errors import InputError, PolicyError
from ...policies.features import RUN_FEATURES, TOKEN_FEATURES, Columns, Drawn, Layout
from ...policies.features.history import History
from ...policies.features.summary import Array
from ...policies.latency.profile import Profile
from ...policies.storage.registry import load_policy
from ..drafters import find_drafter
from ..loop import Request, Speculator
from ..models.pair import end_tokens, join
from ..reader import draft_step
from ..settings import Settings
from ..summaries import summarise
from ..verify.modes import is_trimming, tell_if_untrained
from ..verify.noise import stream_key
from ..verify.sampling import Shaping


@torch.inference_mode()
def specstop_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: Any = None,
    draft_model: PreTrainedModel | None = None,
    policy: StopPolicy | str = "fixed:4",
    verification: str = "auto",
    tree: str | None = None,
    drafter: str = "model",
    profile: Profile | None = None,
    seed: int | None = None,
    text_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate with a stop policy: the decoding method that `generate(custom_generate=...)` calls.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: what `generate`
            prepares, the attention mask among it. The rows of a batch are decoded side by side.
        draft_model: proposes the tokens; not needed with `drafter="lookup"`.
        policy: a policy, or a spec such as `fixed:4` or the path of a policy folder.
        verification: name of a mode, or `auto`, the fastest lossless one (see `modes.resolve_mode`).
        tree: see `Settings`.
        drafter: `model` or `lookup`.
        profile: see `Speculator`.
        seed: of the noise; None = drawn from torch's generator, so that `torch.manual_seed` makes it reproducible.
        text_streamer: gets the tokens of each round; `generate` itself drops `streamer=`.

    Returns:
        [rows, length] int64 like `generate`, or a `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.

    Raises:
        InputError: no draft model, or something that this loop does not do.
    """
    if draft_model is None and drafter == "model":
        raise InputError("specstop_generate: expected draft_model= (assistant_model= does not reach a callable)")
    if getattr(generation_config, "num_beams", 1) != 1:
        raise InputError("specstop_generate: beam search is not speculative; expected num_beams=1")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, False):
            raise InputError(
                f"specstop_generate: {name}=True is not supported: what a round reads is not a row a token"
            )
    if text_streamer is not None and len(input_ids) > 1:
        raise InputError("specstop_generate: a streamer shows one text; expected a batch of one")
    shaping, temperature = _shaping(logits_processor, bool(generation_config.do_sample))
    settings = Settings(
        temperature,
        generation_config.max_length - input_ids.shape[1],
        verification=verification,
        tree=tree,
        shaping=shaping,
        stops=tuple(c for c in stopping_criteria or () if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)),
    )
    ends = end_tokens(generation_config.eos_token_id)
    pair = dataclasses.replace(join(model, draft_model), eos=ends)
    rule = load_policy(policy) if isinstance(policy, str) else policy
    tell_if_untrained(rule, settings)
    speculator = Speculator(pair, rule, settings, profile, drafter=find_drafter(drafter, pair), batch=len(input_ids))
    attention_mask = model_kwargs.get("attention_mask")  # a parameter of that name would be handed over twice
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())  # as `generate` does: a streamer may be told to skip it
    keys = [_key(seed, row, temperature) for row in range(len(input_ids))]  # before a plugin can seed torch's generator
    requests = []
    for row, ids in enumerate(input_ids.tolist()):
        real = [True] * len(ids) if attention_mask is None else attention_mask[row].bool().tolist()
        start = real.index(True) if True in real else 0
        requests.append(Request(ids[start:], keys[row], ids[:start], _of_row(shaping, row)))
    stream = (lambda _, new: text_streamer.put(torch.tensor(new))) if text_streamer is not None else None
    made = speculator.run(requests, stream)
    texts = [[*ids, *one.tokens] for ids, one in zip(input_ids.tolist(), made, strict=True)]
    if text_streamer is not None:
        text_streamer.end()
    pad = generation_config.pad_token_id
    longest = max(map(len, texts))
    filler = pad if pad is not None else (ends[0] if ends else 0)
    sequences = torch.tensor([[*text, *[filler] * (longest - len(text))] for text in texts], device=input_ids.device)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _shaping(processors: LogitsProcessorList | None, sampling: bool) -> tuple[Shaping, float]:
    """Return the processors, and the temperature beside them: 0, or 1 where it is among them already."""
    made = tuple(processors or ())
    if not sampling:
        return Shaping(processors=made), 0.0
    if len(made) == 1 and isinstance(made[0], TemperatureLogitsWarper):
        return Shaping(), float(made[0].temperature)
    return Shaping(processors=made), 1.0


def _of_row(shaping: Shaping, row: int) -> Shaping:
    """Return the processors as they treat one row of the batch: some hold a value for each, or are told its number."""
    made: list[LogitsProcessor] = []
    for processor in shaping.processors:
        ignored = getattr(processor, "prompt_ignore_length", None)  # a repetition penalty leaves each row's padding out
        if isinstance(ignored, Tensor):
            processor = copy.copy(processor)
            setattr(processor, "prompt_ignore_length", int(ignored[row]))  # noqa: B010 - not every kind has it
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor = PrefixConstrainedLogitsProcessor(_asked(processor._prefix_allowed_tokens_fn, row), num_beams=1)
        made.append(processor)
    return dataclasses.replace(shaping, processors=tuple(made))


def _asked(allowed: Callable[[int, Tensor], list[int]], row: int) -> Callable[[int, Tensor], list[int]]:
    """Return `allowed`, told the row's number in the batch instead of the one it has alone."""
    return lambda _, ids: allowed(row, ids)


def _key(seed: int | None, row: int, temperature: float) -> int:
    """Return the key of one row's stream."""
    if temperature == 0.0:
        return 0
    if seed is None:
        return int(torch.randint(2**62, (), device="cpu"))
    return stream_key(seed, str(row))


class PolicyStoppingCriteria(StoppingCriteria):
    """Lets a policy end the drafts of transformers' own assisted generation.

        with PolicyStoppingCriteria(policy).riding(draft):
            target.generate(**inputs, assistant_model=draft)

    The stock loop asks from depth 1 on, knows nothing of the target's rows, and verifies every drafted token: policies
    that read its distribution or hidden states, or leave drawn tokens out, are refused. Scores reach it processed; they are
    the raw logits under greedy decoding, and times the temperature where that is the only processor.

    Args:
        policy: a policy or a spec.
        temperature: of the sampling; 0 = greedy.
    """

    def __init__(self, policy: StopPolicy | str, temperature: float = 0.0) -> None:
        self.policy = check_policy(load_policy(policy) if isinstance(policy, str) else policy)
        self._layout = Layout(self.policy.features)
        self._anchor, self._columns = Columns(self._layout.anchor), Columns(self._layout.node)
        known = (*RUN_FEATURES, *TOKEN_FEATURES)
        unknown = [*self.policy.hidden, *(name for name in self._layout.anchor if name not in known)]
        if temperature > 0:
            unknown += [name for name in self._layout.node if name.startswith("noisy_")]
        if unknown:
            raise PolicyError(f"{self.policy.name}: reads {', '.join(unknown)}, which the stock assisted loop has not")
        if is_trimming(self.policy):
            raise PolicyError(f"{self.policy.name}: leaves drawn tokens out; the stock assisted loop verifies them all")
        self._temperature = temperature
        self._text: list[int] = []
        self._drafted = 0

    @contextlib.contextmanager
    def riding(self, assistant: PreTrainedModel) -> Iterator[PolicyStoppingCriteria]:
        """Add this criterion to every draft of `assistant` and switch its stock stop rules off, until the block ends."""
        config = assistant.generation_config
        names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
        before = {name: getattr(config, name, None) for name in names}
        stock: Any = assistant.generate

        def generate(*args: Any, **kwargs: Any) -> Any:
            self._begin(kwargs["input_ids"])
            kwargs["stopping_criteria"] = StoppingCriteriaList([*kwargs.get("stopping_criteria", ()), self])
            return stock(*args, **kwargs)

        config.num_assistant_tokens = self.policy.max_depth
        config.num_assistant_tokens_schedule, config.assistant_confidence_threshold = "constant", 0.0
        setattr(assistant, "generate", generate)  # noqa: B010 - the type checker knows no other way
        try:
            yield self
        finally:
            del assistant.generate
            for name, value in before.items():
                setattr(config, name, value)

    def _begin(self, input_ids: Tensor) -> None:
        """Start a round; a text that does not continue the last one is a new sequence."""
        text = input_ids[0].tolist()
        known = len(self._text)
        if not self._text or len(text) <= known or text[:known] != self._text:
            self._state = checked_start(self.policy, 1, np.zeros(1, dtype=np.int64))
            self._history = History.start(1)
        else:
            accepted = min(len(text) - known - 1, self._drafted)
            self._history = self._history.after(np.array([accepted]), np.array([self._drafted]))
            if type(self.policy).observe is not StopPolicy.observe:
                self._state = checked_observe(self.policy, self._outcome(accepted), self._state)
        self._text, self._drafted = text, 0
        self._path: Array | None = None
        anchor = Drawn.of([(0, text[-1], text[-2] if len(text) > 1 else -1, 0, 1, 0)])
        nothing = summarise(self._anchor.plan, torch.zeros(1, 1), anchor, self._temperature)
        self._known = self._anchor(nothing, anchor, self._temperature)

    def _outcome(self, accepted: int) -> RoundOutcome:
        drafted, true = np.array([self._drafted]), np.array([True])
        return RoundOutcome(true, drafted, drafted.copy(), np.array([accepted]), ~true, np.zeros(1))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return [1] bool: stop behind the token just drawn."""
        self._drafted += 1
        device = input_ids.device
        if self._drafted < self.policy.first or self._drafted >= self.policy.max_depth:
            return torch.tensor([self._drafted >= self.policy.max_depth], device=device)
        logits = scores[-1].float() * (self._temperature or 1.0)
        greedy = logits if self._temperature == 0.0 else None
        before, own = input_ids[0, -2:].tolist()
        drawn = Drawn.of([(0, own, before, 0, 1, self._drafted)], self._path)
        summary = summarise(self._columns.plan, logits, drawn, self._temperature, None, greedy)
        self._path = summary.path
        columns = self._columns(summary, drawn, self._temperature)
        past = self._history.values(self._layout.history)
        features = self._layout.step(self._layout.base(self._known, past), columns)
        keep, self._state = checked_keep(self.policy, draft_step(self._drafted, features), self._state)
        return torch.tensor([not keep[0, 0]], device=device)
