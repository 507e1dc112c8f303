"""vLLM in this process: it decodes prompts, and its drafter records the rounds as a live trace."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from ...decode.engines.drafting import EngineObserver, Options
from ...decode.engines.settings import check_engine_drafter, check_engine_policy
from ...decode.engines.vllm import Proposer
from ...decode.models.pair import Pair
from ...decode.settings import Settings
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ..exploring import exploring
from ..schema import PromptTask
from .recorder import RecordedText, RoundRecorder, engine_header, explored_by

if TYPE_CHECKING:
    from ..run import CollectOptions

REQUESTS = 8
"""Default number of requests that are decoded side by side."""


class InProcessProposer(Proposer):
    """Drafts for vLLM in this process. vLLM creates it by its name, so class attributes pass objects to and fro.

    Attributes:
        chosen: policy of the next proposer.
        create_observer: returns the observer of the next proposer.
        latest: the proposer that was created last.
        observed: its observer.
    """

    chosen: ClassVar[StopPolicy]
    create_observer: ClassVar[Callable[[Proposer, Options], EngineObserver]]
    latest: ClassVar[InProcessProposer]
    observed: Any

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy that `start_vllm` was called with."""
        type(self).latest = self
        return type(self).chosen

    def observer(self, options: Options) -> EngineObserver:
        """Return the observer that `start_vllm` was called with."""
        self.observed = type(self).create_observer(self, options)
        return self.observed  # type: ignore[no-any-return]


def create_recorder(proposer: Proposer, options: Options) -> RoundRecorder:
    """Return a recorder of a proposer's rounds."""
    return RoundRecorder(options.rows, options.depth, options.temperature, partial(explored_by, proposer))


class ThroughVLLM:
    """Collects through vLLM.

    Args:
        pair: provides drafter and precision; the models are loaded again by their names.
        options: names of the models, share of rounds that explore, and number of requests that are decoded side by side.
        policy: any that vLLM can run.
        settings: temperature, length limit and depth.

    Attributes:
        header: fields of the header.

    Raises:
        PolicyError: the policy reads what vLLM does not pass to a drafter.
        InputError: vLLM is not installed, or the drafter reads hidden states of the target.
    """

    def __init__(self, pair: Pair, options: CollectOptions, policy: StopPolicy, settings: Settings) -> None:
        check_engine_policy(policy)
        depth, explore, requests = settings.topology.deepest, options.explore, options.batch or REQUESTS
        self._options = {
            "draft": options.draft if pair.drafter == "model" else pair.draft_name, "rows": requests,
            "drafter": check_engine_drafter(pair.drafter), "temperature": settings.temperature,
        }  # fmt: skip
        self._policy = exploring(policy, explore, depth) if explore else policy.limited(depth)
        self._target, self._depth, self._settings = options.target, depth, settings
        self._dtype = str(pair.target.dtype).removeprefix("torch.")
        self._engine: Any = None
        self._proposer: InProcessProposer
        self.header = engine_header(settings.temperature, policy.name, explore) | {"batch": requests}

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text.

        Raises:
            InputError: the drafter has failed.
        """
        temperature = self._settings.temperature
        if self._engine is None:  # started with the first texts
            self._engine, self._proposer = start_vllm(
                create_recorder, self._policy, self._target, self._depth, self._options, self._dtype
            )
            if temperature > 0 and str(self._proposer.device) == "cpu":
                warnings.warn(
                    "on a CPU vLLM 0.32 samples incorrectly with drafts at temperatures above 0: these texts are not the "
                    "target's",
                    SpecstopWarning,
                    stacklevel=2,
                )
        from vllm import SamplingParams

        limits = {"temperature": temperature, "max_tokens": self._settings.max_new_tokens, "detokenize": False}
        params = [SamplingParams(seed=one.key % (1 << 31), **limits) for one in batch]
        outputs = self._engine.generate([{"prompt_token_ids": one.tokens} for one in batch], params, use_tqdm=False)
        assert self._proposer.drafting is not None
        self._proposer.drafting.check_failed()
        recorder: RoundRecorder = self._proposer.observed
        texts, chunks = recorder.take(), []
        for one, output in zip(batch, outputs, strict=True):
            generated = list(output.outputs[0].token_ids)
            parts = parts_of(texts, [*one.tokens, *generated], len(one.tokens))
            texts = [text for text in texts if not any(text is part for part in parts)]
            rows = recorder.rows(parts, one, generated)
            chunks += [rows] if rows is not None else []
        return chunks


def start_vllm(
    create_observer: Callable[[Proposer, Options], EngineObserver], policy: StopPolicy, target: str, depth: int,
    options: Mapping[str, Any], dtype: str, **arguments: Any,
) -> tuple[Any, InProcessProposer]:  # fmt: skip
    """Start vLLM in this process and return the `vllm.LLM` and its proposer.

    Args:
        create_observer: returns the observer of the drafts.
        policy: of the proposer.
        target: folder or hub name.
        depth: K.
        options: fields of `settings.EngineSettings`.
        dtype: of the target.
        arguments: of `vllm.LLM`.

    Raises:
        InputError: vLLM is not installed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # otherwise the proposer is created in another process
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # Model Runner V2 has no custom proposers
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the command's output
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(
            f"--through vllm: vLLM cannot be imported ({str(error).splitlines()[0]}); install it beside specstop "
            "(docs/vllm.md)"
        ) from None
    proposer = InProcessProposer
    proposer.chosen, proposer.create_observer = policy, staticmethod(create_observer)
    with _hidden_module("llvmlite.binding.ffi"):
        engine = LLM(
            model=target,
            dtype=dtype,
            enforce_eager=True,
            max_num_seqs=options["rows"],
            speculative_config={
                "method": "custom_class",
                "model": f"{proposer.__module__}.{proposer.__qualname__}",
                "num_speculative_tokens": depth,
            },
            additional_config={"specstop": dict(options)},
            **arguments,
        )
    return engine, proposer.latest


@contextlib.contextmanager
def _hidden_module(name: str) -> Iterator[None]:
    """Remove a module from `sys.modules` for a while.

    vLLM 0.32 searches all loaded modules for its kernels and fails on an object of llvmlite, loaded by numba, that has every
    attribute.
    """
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def parts_of(texts: Sequence[RecordedText], tokens: list[int], prompt: int) -> list[RecordedText]:
    """Return the records of the request with this text: all that have its name.

    Args:
        texts: all records.
        tokens: the text, beginning with `prompt` tokens of the prompt. A record may be shorter, or extend past its end.
    """
    alike = [one for one in texts if one.prompt == prompt and all(map(int.__eq__, one.tokens, tokens))]
    if not alike:
        return []
    # If two samples of a prompt agree so far, the one with the most similar length.
    first = min(alike, key=lambda one: abs(len(one.tokens) - len(tokens)))
    return [first] if first.name is None else [text for text in texts if text.name == first.name]
