"""Speculative decoding in transformers: `target.generate(custom_generate=specstop_generate, ...)`.

In transformers 5.23 `generate` does not pass `assistant_model`, `streamer` and `tokenizer` to a callable. Use
`draft_model`, `text_streamer` and `stopping_criteria=[StopStringCriteria(tokenizer, [...])]` instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor, TemperatureLogitsWarper
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...policies.errors import InputError
from ...policies.host import with_costs
from ...policies.limits import LIMITS
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policy
from ..drafters.spec import check_drafter, find_drafter, needs_draft
from ..loop import Request, Speculator
from ..models.pair import end_tokens, join
from ..records import Tally
from ..settings import Settings
from ..verify.conditions import warn_if_unmeasured, warn_if_untrained
from ..verify.grammar import XGrammarProcessor, is_xgrammar
from ..verify.noise import stream_key
from ..verify.sampling import STATELESS, UNCHANGED, SamplingParams
from .arguments import check_adapters, check_config, check_dropped, check_inputs
from .prefill import Prefill


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(return_dict_in_generate=True)`: the sequences and statistics of the rounds.

    Attributes:
        statistics: sums over the rows of the batch (`records.Tally.summary`), and `acceptance`: (depth k, P(A >= k), rounds).
    """

    statistics: dict[str, Any] | None = None


def specstop_generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: Any = None,
    draft_model: PreTrainedModel | None = None,
    policy: PolicySpec = "fixed:4",
    verification: str = "auto",
    tree: str | None = None,
    drafter: str = "model",
    profile: Profile | None = None,
    seed: int | None = None,
    text_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """Generate with a stop policy. This is the decoding method for `generate(custom_generate=...)`.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs: prepared by `generate`. The
            rows of a batch are decoded side by side. `past_key_values` is read and not extended.
        draft_model: proposes the tokens; an error if `drafter` does not need one.
        policy: a policy, or a spec such as `fixed:4` or the path of a policy folder.
        verification: name of a mode, or `auto`, the fastest lossless one (see `modes.resolve_mode`).
        tree: see `Settings`.
        drafter: `model`, `lookup`, `suffix`, `medusa:PATH`, `suffix+model`, ... (`drafters.find_drafter`).
        profile: see `Speculator`.
        seed: of the noise; None = drawn from torch's generator, which `torch.manual_seed` seeds.
        text_streamer: receives the tokens of each round.

    Returns:
        [rows, length] int64 like `generate`, or a `SpeculativeOutput` with `return_dict_in_generate`.

    Raises:
        InputError: a draft model is missing or superfluous, or an argument is not supported (`arguments`).
    """
    check_draft_model(draft_model, drafter)
    check_dropped()
    check_config(generation_config, model.generation_config)
    check_adapters(model)
    if text_streamer is not None and len(input_ids) > 1:
        raise InputError("specstop_generate: a streamer shows one text; expected a batch of one")
    shaping, temperature = _shaping(logits_processor, bool(generation_config.do_sample))
    if not model.config.is_encoder_decoder:  # `join` raises an error for these
        check_inputs(model_kwargs, input_ids)
    limit, ends = _limits(stopping_criteria or (), generation_config)
    settings = Settings(
        temperature,
        limit - input_ids.shape[1],
        verification=verification,
        tree=tree,
        shaping=shaping,
        stops=tuple(c for c in stopping_criteria or () if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)),
    )
    pair = dataclasses.replace(join(model, draft_model), eos=ends)
    rule = with_costs(as_policy(policy), profile)
    settings = settings.for_policy(rule)
    warn_if_untrained(rule, settings, config=generation_config)
    warn_if_unmeasured(profile, [rule], settings, drafter)
    speculator = Speculator(pair, rule, settings, profile, drafter=find_drafter(drafter, pair), batch=len(input_ids))
    mask_length = getattr(generation_config, "_mask_length", -1)
    prefill = Prefill(speculator.target.model, input_ids, model_kwargs, mask_length)
    padding = prefill.left_padding(pair.readings[0].padded)
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())  # as `generate` does; a streamer may skip the prompt
    keys = [_key(seed, row, temperature) for row in range(len(input_ids))]  # before a plugin can seed torch's generator
    read = [None] * len(input_ids) if padding is not None else prefill.read(speculator.target)
    requests = []
    for row, ids in enumerate(input_ids.tolist()):
        start = padding[row] if padding is not None else 0
        own = _of_row(shaping, row).checked(pair.vocabulary, pair.device, len(input_ids))
        requests.append(Request(ids[start:], keys[row], ids[:start], own, read[row]))
    stream = (lambda _, new: text_streamer.put(_ordinary_tensor(new))) if text_streamer is not None else None
    made = speculator.run(requests, stream)
    texts = [[*ids, *one.tokens] for ids, one in zip(input_ids.tolist(), made, strict=True)]
    if text_streamer is not None:
        text_streamer.end()
    pad = generation_config.pad_token_id
    longest = max(map(len, texts))
    filler = pad if pad is not None else (ends[0] if ends else 0)
    sequences = torch.tensor([[*text, *[filler] * (longest - len(text))] for text in texts], device=input_ids.device)
    if generation_config.return_dict_in_generate:
        tally = Tally.of(made)
        statistics = tally.summary() | {"acceptance": tally.acceptance()}
        return SpeculativeOutput(sequences=sequences, statistics=statistics)  # type: ignore[arg-type]
    return sequences


def _ordinary_tensor(tokens: list[int]) -> Tensor:
    """Return tokens as an ordinary tensor, although the loop runs in inference mode."""
    with torch.inference_mode(False):
        return torch.tensor(tokens)


def check_draft_model(
    draft: PreTrainedModel | None,
    drafter: str,
    expected: str = "draft_model= (assistant_model= does not reach a callable)",
) -> None:
    """Raise an error if the draft model is missing, or if the drafter does not use one.

    Args:
        draft: the draft model.
        drafter: as of `find_drafter`.
        expected: the arguments that reach the caller, for the message.

    Raises:
        InputError: as above, or there is no such drafter.
    """
    check_drafter(drafter)
    needed = needs_draft(drafter)
    if needed and draft is None:
        raise InputError(f"specstop_generate: expected {expected}")
    if not needed and draft is not None:
        raise InputError(
            f"specstop_generate: the drafter {drafter} takes no draft model; leave draft_model= or assistant_model= out"
        )


def _limits(criteria: Iterable[StoppingCriteria], config: GenerationConfig) -> tuple[int, tuple[int, ...]]:
    """Return the maximum length and the end-of-text ids. Criteria of the call take precedence over the configuration."""
    limit = min((one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)), default=config.max_length)
    ends = [
        token for one in criteria if isinstance(one, EosTokenCriteria) for token in one.eos_token_id.view(-1).tolist()
    ]
    return int(limit), tuple(dict.fromkeys(ends)) or end_tokens(config.eos_token_id)


def _shaping(processors: LogitsProcessorList | None, sampling: bool) -> tuple[SamplingParams, float]:
    """Return the processors and the temperature: 0 for greedy decoding, 1 if the processors contain it."""
    made = tuple(processors or ())
    if not sampling:
        return UNCHANGED.with_processors(made), 0.0
    # A single temperature needs no prefix (`Sampler`). A value that `Settings` does not accept stays a processor, so that the
    # same temperatures are accepted with and without other processors.
    if (
        len(made) == 1
        and isinstance(made[0], TemperatureLogitsWarper)
        and not LIMITS["temperature"].requirement(made[0].temperature)
    ):
        return UNCHANGED, float(made[0].temperature)
    return UNCHANGED.with_processors(made), 1.0


def _of_row(shaping: SamplingParams, row: int) -> SamplingParams:
    """Return the processors for one row of the batch: some hold a value per row or receive the row number."""
    made: list[LogitsProcessor] = []
    for processor in shaping.processors:
        if isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor = PrefixConstrainedLogitsProcessor(
                _AllowedInRow(processor._prefix_allowed_tokens_fn, row), num_beams=1
            )
        elif is_xgrammar(processor):
            processor = XGrammarProcessor(processor, row)
        elif isinstance(processor, STATELESS):
            # A repetition penalty ignores the padding of each row; penalties of the encoder hold the prompts of all rows.
            processor = copy.copy(processor)
            held: Any = vars(processor)
            if isinstance(ignored := held.get("prompt_ignore_length"), Tensor):
                held["prompt_ignore_length"] = int(ignored[row])
            if isinstance(prompts := held.get("encoder_input_ids"), Tensor):
                held["encoder_input_ids"] = prompts[row : row + 1]
            if isinstance(ngrams := held.get("generated_ngrams"), list):
                held |= {"generated_ngrams": ngrams[row : row + 1], "batch_size": 1}
        made.append(processor)
    return shaping.with_processors(made)


@dataclasses.dataclass
class _AllowedInRow:
    """A `prefix_allowed_tokens_fn` called with the number of the row in the batch instead of 0."""

    allowed: Callable[[int, Tensor], list[int]]
    row: int

    def __call__(self, _: int, ids: Tensor) -> list[int]:
        return self.allowed(self.row, ids)


def _key(seed: int | None, row: int, temperature: float) -> int:
    """Return the key of one row's stream."""
    if temperature == 0.0:
        return 0
    if seed is None:
        return int(torch.randint(2**62, (), device="cpu"))
    return stream_key(seed, str(row))
