"""vLLM in this process: it decodes prompts, and its drafter records the rounds as a live trace."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from ...decode.drafters.spec import drafter_names
from ...decode.engines.drafting import EngineDraft, EngineObserver, Options
from ...decode.engines.settings import check_engine_drafter, check_engine_policy
from ...decode.engines.vllm import Proposer
from ...decode.models.pair import Pair
from ...decode.settings import Settings
from ...decode.summaries import summarise
from ...policies.contract import Array, StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.features import CHAIN_FEATURES, SAMPLED, SIGNALS, Columns, DrawnTokens, base_features
from ..exploring import Exploring, exploring
from ..schema import NO_TOKEN, TIMES, PromptTask

REQUESTS = 8
"""Default number of requests that are decoded side by side."""


ANCHORS = ("anchor_token", "before_token")
"""ANCHOR features that need no row of the target's."""


def engine_features(temperature: float) -> tuple[str, ...]:
    """Return the features that an engine's drafter can record at each token; for sampled texts none that read noise."""
    return tuple(name for name in CHAIN_FEATURES if temperature == 0.0 or not name.startswith("noisy_"))


@dataclass
class _Round:
    """A draft after `context` tokens of a text, the last two of which are `before`; [K] tokens, features and q of each."""

    context: int
    before: tuple[int, int]
    tokens: Array
    features: Array
    draft_prob: Array
    sent: EngineDraft
    explored: bool
    draft_s: float
    seconds: float = 0.0


@dataclass
class RecordedText:
    """A request and its rounds.

    Attributes:
        name: the engine's, if it is known.
        tokens: latest text, including the prompt.
        prompt: number of tokens before the first one that the engine committed.
        rounds: in order.
    """

    name: str | None
    tokens: list[int]
    prompt: int = 0
    rounds: list[_Round] = field(default_factory=list)


class RoundRecorder:
    """Records the drafts of all requests; see `decode.engines.drafting.EngineObserver`.

    Labels compare a draft with the tokens that follow it in the finished text, because an engine passes texts to its drafter,
    not what was accepted: it trims drafts silently and commits tokens after a request's end. What depends on the target's
    logits (probabilities, the overlap) is not known and stays 0.

    Args:
        proposer: drafts; provides the policy's state.
        options: limits of drafting.
        drafters: number of drafters, D.
        signals: names of the ROUTE features to record (`policies.features.SIGNALS`).
    """

    def __init__(self, proposer: Proposer, options: Options, drafters: int = 1, signals: Sequence[str] = ()) -> None:
        self._proposer, self.depth, self.temperature = proposer, options.depth, options.temperature
        rows, depth, temperature = options.rows, options.depth, options.temperature
        self._drafters, self._signals = drafters, tuple(signals)
        self._columns = Columns(engine_features(temperature))
        self._texts: list[RecordedText | None] = [None] * rows
        self._ended: list[RecordedText] = []
        self._tokens, self._path = np.zeros((rows, depth, drafters), dtype=np.int32), np.zeros((rows, drafters))
        self._features = np.zeros((rows, depth, drafters, len(self._columns.names)), dtype=np.float32)
        self._draft_prob = np.zeros((rows, depth, drafters), dtype=np.float32)

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        if (ended := self._texts[row]) is not None:
            self._ended.append(ended)
        # A text begins with the token that reading its prompt committed: all but the last one are the prompt.
        self._texts[row] = RecordedText(name, text.tolist(), len(text) - 1)

    def on_draft_step(self, depth: int, drafter: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            for values in (self._tokens, self._features, self._draft_prob):
                values[rows, :, drafter] = 0
            self._path[rows, drafter] = 0.0
        drawn = DrawnTokens(drawn.ids, self._path[rows, drafter])
        # Engines draft greedily: at temperature 0 the noisy features are those of the logits; above it there are none.
        summary = summarise(self._columns.needs | SAMPLED, logits, drawn, self.temperature, scores=logits)
        self._path[rows, drafter] = summary.path
        self._tokens[rows, depth - 1, drafter] = drawn.ids[:, 1]
        self._features[rows, depth - 1, drafter] = self._columns(summary, drawn, self.temperature)
        self._draft_prob[rows, depth - 1, drafter] = np.exp(summary.numbers[:, 1])

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        assert self._proposer.drafting is not None
        host = self._proposer.drafting.host
        explored = host.policy.explores(host.state) if isinstance(host.policy, Exploring) else None  # [rows]
        for draft in drafts:
            text = self._texts[draft.row]
            if text is None:
                continue
            full = explored is not None and bool(explored[draft.row])
            before = text.tokens[-1], text.tokens[-2]
            # The arrays of a row without a new draft hold an earlier one.
            tokens, features, draft_prob = (
                values[draft.row, :, draft.drafter] * (draft.drafted > 0)
                for values in (self._tokens, self._features, self._draft_prob)
            )
            text.rounds.append(_Round(draft.context, before, tokens, features, draft_prob, draft, full, draft_s))

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        for draft, seconds in zip(drafts, step_s, strict=True):
            text = self._texts[draft.row]
            if text is not None:
                text.tokens[draft.context :] = draft.new
                if text.rounds and text.rounds[-1].sent is draft:
                    text.rounds[-1].seconds = seconds

    def take(self) -> list[RecordedText]:
        """Return and forget all texts, also those that have not ended."""
        texts = self._ended + [text for text in self._texts if text is not None]
        self._ended, self._texts = [], [None] * len(self._texts)
        return texts

    def rows(
        self, parts: Sequence[RecordedText], task: PromptTask, generated: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Return the rows of a text, one per round; None without rounds.

        Args:
            parts: its records: a request may continue as another text after preemption.
            task: the prompt.
            generated: everything that the engine returned for it.
        """
        tokens = [*task.tokens, *generated]
        rounds = [one for part in parts for one in part.rounds if one.context < len(tokens)]
        rounds.sort(key=lambda one: one.context)
        if not rounds:
            return None

        def column(value: Callable[[_Round], Any], dtype: Any = None) -> Array:
            return np.array([value(one) for one in rounds], dtype=dtype)

        context, ids = column(lambda one: one.context), column(lambda one: one.tokens)
        end, depth, count = np.append(context[1:], len(tokens)), np.arange(self.depth), len(rounds)
        drafter, drafted = column(lambda one: one.sent.drafter), column(lambda one: one.sent.drafted)
        follows = np.array([*tokens, *[-1] * self.depth])[context[:, None] + depth]  # [rounds, K], -1 after the end
        drawn = depth < drafted[:, None]
        accepted = ((ids == follows) & drawn).cumprod(1).astype(bool)
        has_none = (depth == drafted[:, None]) & column(lambda one: one.sent.ran_out)[:, None]

        def nodes(values: Array) -> Array:
            """Return values [rounds, K] of the drafters that drafted by node of the trace's tree, [rounds, K * D]."""
            by_drafter = np.zeros((*values.shape, self._drafters), values.dtype)
            by_drafter[np.arange(count), :, drafter] = values  # without a drafter they are 0
            return by_drafter.reshape(count, -1)

        features, zeros = column(lambda one: one.features), np.zeros((count, self.depth * self._drafters), np.float32)
        no_signals = np.zeros((self._drafters, len(SIGNALS)), np.float32)  # the policy was not called
        signals = column(lambda one: no_signals if one.sent.signals is None else one.sent.signals[:, : len(SIGNALS)])
        draft_s, seconds = column(lambda one: one.draft_s), column(lambda one: one.seconds)
        spent = (np.zeros(count), draft_s, np.maximum(seconds - draft_s, 0.0), np.zeros(count), seconds)
        return task.columns(count, len(generated)) | {
            "anchor": context - len(task.tokens),
            "tokens": nodes(np.where(has_none, NO_TOKEN, ids)),
            "draft_prob": nodes(column(lambda one: one.draft_prob)),
            "target_prob": zeros,
            "overlap": zeros,
            "accepted": nodes(accepted),
            "observed": nodes(drawn & (follows >= 0) & (depth <= accepted.sum(1, keepdims=True))),
            "accepted_length": accepted.sum(1),
            "cut": (end == len(tokens)) | column(lambda one: one.sent.hit_limit),
            "drawn": nodes(drawn),
            "sent": nodes(depth < column(lambda one: len(one.sent.tokens))[:, None]),
            "explored": column(lambda one: one.explored),
            "committed": end - context,
            "decisions": column(lambda one: one.sent.decisions),
            "backlog": column(lambda one: one.sent.backlog),
            **dict(zip(ANCHORS, column(lambda one: one.before, np.float32).T, strict=True)),
            **{name: nodes(features[:, :, at]) for at, name in enumerate(self._columns.names)},
            **{name: signals[:, :, SIGNALS.index(name)] for name in self._signals},
            **dict(zip(TIMES, spent, strict=True)),
        }


class InProcessProposer(Proposer):
    """Drafts for vLLM in this process. vLLM creates it by its name, so objects are passed in class attributes.

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


class ThroughVLLM:
    """Collects through vLLM.

    Args:
        pair: provides drafter and precision; the models are loaded again by their names.
        options: `CollectOptions`: names of the models, share of rounds that explore, and number of requests that are decoded
            side by side.
        policy: any that vLLM can run.
        settings: temperature, length limit and depth.

    Attributes:
        header: fields of the header.

    Raises:
        PolicyError: the policy reads what vLLM does not pass to a drafter, or lets several drafters draft in one round.
        InputError: vLLM is not installed, or a drafter reads hidden states of the target.
    """

    def __init__(self, pair: Pair, options: Any, policy: StopPolicy, settings: Settings) -> None:
        check_engine_policy(policy)
        depth, explore, requests = settings.topology.deepest, options.explore, options.batch or REQUESTS
        drafters = len(drafter_names(pair.drafter))
        if explore and drafters > 1:
            raise InputError(
                f"--explore: expected 0 with several drafters, not {explore}: all of them draft in rounds that explore, but "
                "vllm verifies chains"
            )
        self._options = {
            "draft": options.draft if pair.drafter == "model" else pair.draft_name, "rows": requests,
            "drafter": check_engine_drafter(pair.drafter), "temperature": settings.temperature,
        }  # fmt: skip
        self._policy = exploring(policy, explore, depth) if explore else policy.limited(depth)
        self._target, self._depth, self._settings = options.target, depth, settings
        self._dtype = str(pair.target.dtype).removeprefix("torch.")
        self._engine: Any = None
        self._proposer: InProcessProposer
        mode = "match" if settings.temperature == 0.0 else "point"
        signals = tuple(name for name in base_features(policy.features) if name in SIGNALS)
        self._create_recorder = partial(RoundRecorder, drafters=drafters, signals=signals)
        self.header = {
            "collector": "live", "policy": policy.name, "explore": explore, "verification": mode, "label": mode,
            "features": engine_features(settings.temperature), "anchor_features": ANCHORS, "batch": requests,
            "signals": signals,
        }  # fmt: skip

    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text.

        Raises:
            InputError: a drafter has failed.
        """
        temperature = self._settings.temperature
        if self._engine is None:  # started with the first texts
            self._engine, self._proposer = start_vllm(
                self._create_recorder, self._policy, self._target, self._depth, self._options, self._dtype
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
            f"vLLM cannot be imported ({str(error).splitlines()[0]}); install it beside specstop (docs/engines.md)"
        ) from None
    proposer = InProcessProposer
    proposer.chosen, proposer.create_observer = policy, staticmethod(create_observer)
    with hidden_module("llvmlite.binding.ffi"):
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
def hidden_module(name: str) -> Iterator[None]:
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
