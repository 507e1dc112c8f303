"""`collect --through vllm`: prompts are decoded by vLLM in this process, and its drafter records the rounds.

vLLM writes the texts; what its drafter drew and when goes into a live trace. A shard is written once all its texts are done,
as everywhere: a run that is killed loses the shard that it was at.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...decode.engines.drafting import EngineObserver, Options
from ...decode.engines.settings import check_engine_drafter, check_engine_policy
from ...decode.engines.vllm import Proposer
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ..live import exploring
from ..work import Work
from .rounds import ANCHORS, RecordedText, RoundRecorder, engine_features, explored_by

CLASS = f"{__name__}.TracingProposer"
REQUESTS = 8
"""Decoded side by side, unless a run says otherwise."""


@dataclass
class _Handed:
    """What the class that vLLM makes is handed in this process, and what it hands back."""

    policy: StopPolicy | None = None
    proposer: TracingProposer | None = None


_HANDED = _Handed()


class TracingProposer(Proposer):
    """Drafts for vLLM and records the rounds.

    Attributes:
        recorder: of the rounds.
    """

    recorder: RoundRecorder

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy that this process was asked for."""
        _HANDED.proposer = self
        return policy if _HANDED.policy is None else _HANDED.policy

    def observer(self, options: Options) -> EngineObserver:
        """Return the recorder."""
        self.recorder = RoundRecorder(options.rows, options.depth, options.temperature, partial(explored_by, self))
        return self.recorder


class ThroughVLLM:
    """Collects through vLLM.

    Args:
        target, draft: folders or hub names; "" where the drafter takes no draft model.
        drafter: as of `--drafter`.
        policy: any that vLLM can run.
        depth: K.
        temperature, max_new_tokens: of the texts.
        explore: share of the rounds that are drafted to full depth whatever the policy says.
        requests: decoded side by side.
        dtype: of both models.

    Attributes:
        features: recorded at each token.

    Raises:
        PolicyError: the policy reads what vLLM does not hand to a drafter.
        InputError: vLLM is not installed, or the drafter reads the target's hidden states.
    """

    def __init__(
        self,
        target: str,
        draft: str,
        drafter: str,
        policy: StopPolicy,
        depth: int,
        temperature: float = 0.0,
        max_new_tokens: int = 128,
        explore: float = 0.0,
        requests: int = REQUESTS,
        dtype: str = "float32",
    ) -> None:
        check_engine_policy(policy)
        self._drafts = {"draft": draft, "drafter": check_engine_drafter(drafter)}
        self._policy = exploring(policy, explore, depth) if explore else policy.limited(depth)
        self._target, self._depth, self._requests, self._dtype = target, depth, requests, dtype
        self._temperature, self._tokens = temperature, max_new_tokens
        self.features, self._engine = engine_features(temperature), None
        self.header = {
            "collector": "live",
            "policy": policy.name,
            "explore": explore,
            "verification": "match" if temperature == 0.0 else "point",
            "label": "match" if temperature == 0.0 else "point",
            "anchor_features": ANCHORS,
        }

    def _start(self) -> Any:
        """Return vLLM, started when the first texts are wanted."""
        if self._engine is None:
            _HANDED.policy = self._policy
            told = {**self._drafts, "temperature": self._temperature, "rows": self._requests}
            self._engine = start_vllm(self._target, CLASS, self._depth, told, self._dtype)
            if self._temperature > 0 and str(_HANDED.proposer and _HANDED.proposer.device) == "cpu":
                warnings.warn(
                    "on a CPU vLLM 0.32 does not sample rightly with drafts at temperatures above 0: these texts are not the "
                    "target's",
                    SpecstopWarning,
                    stacklevel=2,
                )
        return self._engine

    def rows(self, batch: Sequence[Work]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text.

        Args:
            batch: the prompts.

        Raises:
            InputError: the drafter has failed.
        """
        engine = self._start()
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=self._temperature, max_tokens=self._tokens, seed=one.key % (1 << 31), detokenize=False
            )
            for one in batch
        ]
        prompts = [{"prompt_token_ids": one.tokens} for one in batch]
        outputs = engine.generate(prompts, params, use_tqdm=False)
        assert _HANDED.proposer is not None and _HANDED.proposer.drafting is not None
        _HANDED.proposer.drafting.check_failed()
        recorder = _HANDED.proposer.recorder
        texts = recorder.take()
        chunks = []
        for one, output in zip(batch, outputs, strict=True):
            generated = list(output.outputs[0].token_ids)
            parts = parts_of(texts, [*one.tokens, *generated], len(one.tokens))
            texts = [text for text in texts if not any(text is part for part in parts)]
            made = recorder.rows(parts, one, generated)
            chunks += [made] if made is not None else []
        return chunks


def start_vllm(target: str, drafts: str, depth: int, told: Mapping[str, Any], dtype: str, **more: Any) -> Any:
    """Return vLLM in this process, with a class that drafts for it.

    Args:
        target: folder or hub name.
        drafts: the dotted name of the class; `told` is what it is told (`settings.EngineSettings`).
        depth: K.
        dtype: of the target.
        more: of `vllm.LLM`.

    Raises:
        InputError: vLLM is not installed.
    """
    # In this process, where the class that vLLM makes is handed its policy, and hands back what it has seen.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # Model Runner V2 takes no such class
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # where output goes is for ours
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        from vllm import LLM
    except ImportError as error:
        raise InputError(
            f"--through vllm: vLLM cannot be imported ({str(error).splitlines()[0]}); install it beside specstop "
            "(docs/vllm.md)"
        ) from None
    with _unseen("llvmlite.binding.ffi"):
        return LLM(
            model=target,
            dtype=dtype,
            enforce_eager=True,
            max_num_seqs=told["rows"],
            speculative_config={"method": "custom_class", "model": drafts, "num_speculative_tokens": depth},
            additional_config={"specstop": dict(told)},
            **more,
        )


@contextlib.contextmanager
def _unseen(name: str) -> Iterator[None]:
    """Keep a module out of the list of modules.

    vLLM 0.32 looks through all that are loaded for kernels of its own, and falls over an object of llvmlite's, which numba
    brings, that answers to every name.
    """
    module = sys.modules.pop(name, None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules[name] = module


def parts_of(texts: Sequence[RecordedText], tokens: list[int], prompt: int) -> list[RecordedText]:
    """Return what was recorded of the request with this text: all that has its name.

    Args:
        texts: recorded.
        tokens: of the text, `prompt` of them the prompt's. What was recorded of it may be shorter, or go on past its end.
    """
    alike = [
        one for one in texts if one.prompt == prompt and all(a == b for a, b in zip(one.tokens, tokens, strict=False))
    ]
    if not alike:
        return []
    # Of two samples of a prompt that agree so far, the one that ends about where this text does.
    first = min(alike, key=lambda one: abs(len(one.tokens) - len(tokens)))
    return [first] if first.name is None else [text for text in texts if text.name == first.name]
