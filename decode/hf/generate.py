"""Speculative decoding in transformers: `target.generate(custom_generate=specstop_generate, ...)`.

In transformers 5.23 `generate` does not pass `assistant_model`, `streamer` and `tokenizer` to a callable. Use
`draft_model`, `text_streamer` and `stopping_criteria=[StopStringCriteria(tokenizer, [...])]` instead.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
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

from ...policies.arguments import LIMITS, as_list
from ...policies.host import with_costs
from ...policies.profile import Profile
from ...policies.registry import PolicySpec, as_policy
from ..drafters.spec import check_drafter, needs_draft, routed_drafters
from ..loop import Speculator
from ..models.pair import end_tokens, join
from ..records import Tally
from ..settings import Settings
from ..verify.conditions import warn_if_unmeasured, warn_if_untrained
from ..verify.noise import stream_key
from ..verify.sampling import STATELESS, UNCHANGED, SamplingParams
from .arguments import check_arguments, refuse
from .prefill import Prefill


@dataclasses.dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(return_dict_in_generate=True)`: the sequences and statistics of the rounds.

    Attributes:
        statistics: sums over the rows of the batch (`records.Tally.summary`), `acceptance`: (depth k, P(A >= k), rounds), and
            `rounds_by_drafter` of a policy that routes.
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
    drafter: str | Sequence[str] = "model",
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
        drafter: `model`, `lookup`, `suffix`, `medusa:PATH`, ... (`drafters.find_drafters`). Several, or `suffix+model`, for
            a policy that routes.
        profile: see `Speculator`.
        seed: of the noise; None = drawn from torch's generator, which `torch.manual_seed` seeds.
        text_streamer: receives the tokens of each round.

    Returns:
        [rows, length] int64 like `generate`, or a `SpeculativeOutput` with `return_dict_in_generate`.

    Raises:
        InputError: a draft model is missing or superfluous, or an argument is not supported (`arguments`).
    """
    drafter = "+".join(as_list(drafter))
    check_draft_model(draft_model, drafter, "draft_model= (assistant_model= does not reach a callable)")
    check_arguments(model, generation_config, model_kwargs, input_ids)
    if text_streamer is not None and len(input_ids) > 1:
        raise refuse("text_streamer", "a streamer shows one text; expected a batch of one")
    sampling, temperature = _sampling(logits_processor, bool(generation_config.do_sample))
    max_length, eos, stops = _limits(stopping_criteria or (), generation_config)
    rule, new_tokens = with_costs(as_policy(policy), profile), max_length - input_ids.shape[1]
    settings = Settings(
        temperature, new_tokens, verification=verification, tree=tree, sampling=sampling, stops=stops
    ).for_policy(rule)
    pair = dataclasses.replace(join(model, draft_model), eos=eos, drafter=drafter)
    warn_if_untrained(rule, settings, config=generation_config)
    warn_if_unmeasured(profile, [rule], settings, drafter)
    speculator = Speculator(pair, rule, settings, profile, batch=len(input_ids))
    prefill = Prefill(speculator.target.model, input_ids, model_kwargs, getattr(generation_config, "_mask_length", -1))
    if text_streamer is not None:
        text_streamer.put(input_ids.cpu())  # as `generate` does; a streamer may skip the prompt
    keys = [_key(seed, row, temperature) for row in range(len(input_ids))]  # before a plugin can seed torch's generator
    requests = []
    for row, request in enumerate(prefill.requests(speculator.target, pair.readings[0].padded)):
        row_sampling = sampling.with_processors(_of_row(one, row) for one in sampling.processors)
        row_sampling = row_sampling.checked(pair.vocabulary, pair.device, len(keys))
        requests.append(dataclasses.replace(request, key=keys[row], sampling=row_sampling))
    generations = speculator.run(requests, None if text_streamer is None else partial(_stream, text_streamer))
    if text_streamer is not None:
        text_streamer.end()
    texts = [torch.tensor([*ids, *one.tokens]) for ids, one in zip(input_ids.tolist(), generations, strict=True)]
    filler = generation_config.pad_token_id if generation_config.pad_token_id is not None else (*eos, 0)[0]
    sequences = pad_sequence(texts, batch_first=True, padding_value=filler).to(input_ids.device)
    if generation_config.return_dict_in_generate:
        tally = Tally(generations)
        statistics = tally.summary() | {"acceptance": tally.acceptance()}
        if drafters := tally.by_drafter(routed_drafters(rule, drafter)):
            statistics["rounds_by_drafter"] = drafters
        return SpeculativeOutput(sequences=sequences, statistics=statistics)  # type: ignore[arg-type]
    return sequences


def _stream(streamer: BaseStreamer, _: int, tokens: list[int]) -> None:
    """Pass new tokens to a streamer as an ordinary tensor, although the loop runs in inference mode."""
    with torch.inference_mode(False):
        streamer.put(torch.tensor(tokens))


def check_draft_model(draft: PreTrainedModel | None, drafter: str, argument: str) -> None:
    """Raise `InputError` if there is no such drafter, or if a draft model (an `argument`) is missing or superfluous."""
    check_drafter(drafter)
    needed = needs_draft(drafter)
    if needed and draft is None:
        raise refuse("draft_model", f"expected {argument}, which the drafter {drafter} reads")
    if not needed and draft is not None:
        raise refuse("draft_model", f"the drafter {drafter} takes no draft model; leave {argument} out")


def _limits(
    criteria: Iterable[StoppingCriteria], config: GenerationConfig
) -> tuple[int, tuple[int, ...], tuple[StoppingCriteria, ...]]:
    """Return the maximum length, the end-of-text ids and other criteria. Criteria take precedence over the configuration."""
    lengths, ends, others = [], [], []
    for one in criteria:
        if isinstance(one, MaxLengthCriteria):
            lengths.append(one.max_length)
        elif isinstance(one, EosTokenCriteria):
            ends += one.eos_token_id.view(-1).tolist()
        else:
            others.append(one)
    eos = tuple(dict.fromkeys(ends)) or end_tokens(config.eos_token_id)
    return int(min(lengths, default=config.max_length)), eos, tuple(others)


def _sampling(processors: LogitsProcessorList | None, is_sampling: bool) -> tuple[SamplingParams, float]:
    """Return the processors and the temperature: 0 for greedy decoding, 1 if the processors contain it."""
    match list(processors or ()):
        # A single temperature needs no prefix (`Sampler`). A value that `Settings` does not accept stays a processor, so that
        # the same temperatures are accepted with and without other processors.
        case [TemperatureLogitsWarper(temperature=value)] if is_sampling and not LIMITS["temperature"].requirement(
            value
        ):
            return UNCHANGED, float(value)
        case several:
            return UNCHANGED.with_processors(several), 1.0 if is_sampling else 0.0


@dataclasses.dataclass
class _AllowedInRow:
    """A `prefix_allowed_tokens_fn` called with the batch index of a row instead of 0. A closure could not be copied."""

    allowed: Callable[[int, Tensor], list[int]]
    row: int

    def __call__(self, _: int, ids: Tensor) -> list[int]:
        return self.allowed(self.row, ids)


def _of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """Return a processor for one row of the batch: some hold a value per row or receive the row number."""
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        return PrefixConstrainedLogitsProcessor(_AllowedInRow(processor._prefix_allowed_tokens_fn, row), num_beams=1)
    if not isinstance(processor, STATELESS):
        return processor
    # A repetition penalty ignores the padding of each row; penalties of the encoder hold the prompts of all rows.
    processor = copy.copy(processor)
    values: Any = vars(processor)
    if isinstance(ignored := values.get("prompt_ignore_length"), Tensor):
        values["prompt_ignore_length"] = int(ignored[row])
    if isinstance(prompts := values.get("encoder_input_ids"), Tensor):
        values["encoder_input_ids"] = prompts[row : row + 1]
    if isinstance(ngrams := values.get("generated_ngrams"), list):
        values |= {"generated_ngrams": ngrams[row : row + 1], "batch_size": 1}
    return processor


def _key(seed: int | None, row: int, temperature: float) -> int:
    """Return the key of one row's stream."""
    if temperature == 0.0:
        return 0
    return int(torch.randint(2**62, (), device="cpu")) if seed is None else stream_key(seed, str(row))
