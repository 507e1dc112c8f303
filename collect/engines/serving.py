"""Records the rounds of vLLM as rows of a trace, and writes the traces of a serving process.

vLLM passes texts to its drafter, not what was accepted. It trims drafts silently and commits tokens after a request's end. So
labels compare a draft with the tokens that follow it in the finished text. What depends on the target's logits
(probabilities, the overlap) is not known and stays 0.

    vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "specstop.collect.engines.serving.RecordingProposer", "num_speculative_tokens": 8}' \\
        --additional-config '{"specstop": {"draft": "DRAFT", "policy": "policy", "traces": "parts", "explore": 0.05}}'

Rounds of finished requests become files in the folder `traces`, each written whole, by any number of processes. A process
that is killed loses what is not in a file yet. `import FOLDER` makes one live trace of all files.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ...decode.engines.drafting import EngineDraft, EngineObserver, Options
from ...decode.engines.vllm import Proposer
from ...decode.summaries import summarise
from ...policies.contract import Array, StopPolicy
from ...policies.counter_rng import mix
from ...policies.errors import InputError, SpecstopWarning
from ...policies.features import CHAIN_FEATURES, SAMPLED, Columns, DrawnTokens
from ...policies.files import disk_text, prepare_output_dir, staged_folder
from ..live import Exploring, exploring
from ..schema import HEADER_KEY, READS, TIMES, Header, PromptTask, chain
from ..shards import policy_digest
from ..store import Trace, load_trace, open_for_writing, shard_table, staged, write_shard, write_table

ANCHORS = ("anchor_token", "before_token")
"""ANCHOR features that need no row of the target's."""

TEXTS = 32
"""Requests of a file."""

KEPT = 8 * TEXTS
"""Requests that are kept while files cannot be written."""

QUIET_S = 2.0
"""Seconds without a step after which everything is written: vLLM ends its processes without notice."""

IDLE = 64
"""Steps after which a request that is in none of them has ended."""

_SHARE = 1 << 24


def engine_features(temperature: float) -> tuple[str, ...]:
    """Return the features that an engine's drafter can record at each token; for sampled texts none that read noise."""
    return tuple(name for name in CHAIN_FEATURES if temperature == 0.0 or not name.startswith("noisy_"))


def explored_by(proposer: Proposer, rows: Array) -> Array:
    """Return [n] bool, whether the drafts of these rows have full length whatever the policy decides."""
    assert proposer.drafting is not None
    host = proposer.drafting.host
    if not isinstance(host.policy, Exploring):
        return np.zeros(len(rows), dtype=bool)
    explored: Array = host.policy.explores(host.state)[rows]
    return explored


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
        last_step: number of the last step that drafted for it.
    """

    name: str | None
    tokens: list[int]
    prompt: int = 0
    rounds: list[_Round] = field(default_factory=list)
    last_step: int = 0


class RoundRecorder:
    """Records the drafts of all requests; see `decode.engines.drafting.EngineObserver`.

    Args:
        rows: maximum number of requests with drafts.
        depth: K.
        temperature: of the sampling.
        explored: returns [n] bool for rows, whether their drafts of this step explore.
        keep: whether a text is recorded, by the number of texts before it.
    """

    def __init__(
        self, rows: int, depth: int, temperature: float, explored: Callable[[Array], Array],
        keep: Callable[[int], bool] = lambda number: True,
    ) -> None:  # fmt: skip
        self.depth, self.temperature, self._explored, self._keep = depth, temperature, explored, keep
        self._columns = Columns(engine_features(temperature))
        self._texts: list[RecordedText | None] = [None] * rows
        self._ended: list[RecordedText] = []
        self._tokens, self._path = np.zeros((rows, depth), dtype=np.int32), np.zeros(rows)
        self._features = np.zeros((rows, depth, len(self._columns.names)), dtype=np.float32)
        self._draft_prob = np.zeros((rows, depth), dtype=np.float32)
        self._begun = self._step = 0

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        if (ended := self._texts[row]) is not None:
            self._ended.append(ended)
        # A text begins with the token that reading its prompt committed: all but the last one are the prompt.
        new = RecordedText(name, text.tolist(), len(text) - 1, last_step=self._step)
        self._texts[row] = new if self._keep(self._begun) else None
        self._begun += 1

    def on_draft_step(self, depth: int, rows: Array, logits: Tensor, drawn: DrawnTokens) -> None:
        """See `EngineObserver.on_draft_step`."""
        if depth == 1:
            for values in (self._tokens, self._features, self._draft_prob, self._path):
                values[rows] = 0
        drawn = DrawnTokens(drawn.ids, self._path[rows])
        # Engines draft greedily: at temperature 0 the noisy features are those of the logits; above it there are none.
        summary = summarise(self._columns.needs | SAMPLED, logits, drawn, self.temperature, scores=logits)
        self._path[rows] = summary.path
        self._tokens[rows, depth - 1] = drawn.ids[:, 1]
        self._features[rows, depth - 1] = self._columns(summary, drawn, self.temperature)
        self._draft_prob[rows, depth - 1] = np.exp(summary.numbers[:, 1])

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        self._step += 1
        explored = self._explored(np.array([draft.row for draft in drafts], dtype=np.int64))
        for draft, full in zip(drafts, explored.tolist(), strict=True):
            text = self._texts[draft.row]
            if text is not None:
                text.last_step, arrays = self._step, (self._tokens, self._features, self._draft_prob)
                # The arrays of a row without a new draft hold an earlier one.
                tokens, features, draft_prob = (
                    v[draft.row].copy() if draft.drafted else np.zeros_like(v[draft.row]) for v in arrays
                )
                before = text.tokens[-1], text.tokens[-2]
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

    def take_ended(self, idle: int) -> list[RecordedText]:
        """Return and forget the texts that have ended: others took their rows, or more than `idle` steps omitted them.

        If one of the latter returns, after long preemption, it continues as another text.
        """
        ended, self._ended = self._ended, []
        for row, text in enumerate(self._texts):
            if text is not None and text.rounds and self._step - text.last_step > idle:
                ended.append(text)
                # A draft with unknown outcome stays with the request.
                waiting = [one for one in text.rounds[-1:] if one.context == len(text.tokens)]
                self._texts[row] = RecordedText(text.name, list(text.tokens), len(text.tokens) - 1, waiting, self._step)
        return ended

    def rows(
        self, parts: Sequence[RecordedText], work: PromptTask, generated: Sequence[int]
    ) -> Mapping[str, Any] | None:
        """Return the rows of a text, one per round; None without rounds.

        Args:
            parts: its records: a request may continue as another text after preemption.
            work: the prompt.
            generated: everything that the engine returned for it.
        """
        tokens = [*work.tokens, *generated]
        rounds = [one for part in parts for one in part.rounds if one.context < len(tokens)]
        rounds.sort(key=lambda one: one.context)
        if not rounds:
            return None

        def column(value: Callable[[_Round], Any], dtype: Any = None) -> Array:
            return np.array([value(one) for one in rounds], dtype=dtype)

        context, ids = column(lambda one: one.context), column(lambda one: one.tokens)
        end, node, count = np.append(context[1:], len(tokens)), np.arange(self.depth), len(rounds)
        padded = np.array([*tokens, *[-1] * self.depth])
        follows = padded[context[:, None] + node]  # [rounds, K] the text, -1 after its end
        drawn = node < column(lambda one: one.sent.drafted)[:, None]
        accepted = ((ids == follows) & drawn).cumprod(1).astype(bool)
        zeros, features = np.zeros(ids.shape, dtype=np.float32), column(lambda one: one.features)
        draft_s, seconds = column(lambda one: one.draft_s), column(lambda one: one.seconds)
        spent = (np.zeros(count), draft_s, np.maximum(seconds - draft_s, 0.0), np.zeros(count), seconds)
        return work.columns(count, len(generated)) | {
            "anchor": context - len(work.tokens),
            "tokens": ids,
            "draft_prob": column(lambda one: one.draft_prob),
            "target_prob": zeros,
            "overlap": zeros,
            "accepted": accepted,
            "observed": drawn & (follows >= 0) & (node <= accepted.sum(1, keepdims=True)),
            "accepted_length": accepted.sum(1),
            "cut": (end == len(tokens)) | column(lambda one: one.sent.hit_limit),
            "drawn": drawn,
            "sent": node < column(lambda one: len(one.sent.tokens))[:, None],
            "explored": column(lambda one: one.explored),
            "committed": end - context,
            "decisions": column(lambda one: one.sent.decisions),
            "backlog": column(lambda one: one.sent.backlog),
            READS: np.ones(count, dtype=bool),  # an engine does not say which drafter drafted
            **dict(zip(ANCHORS, column(lambda one: one.before, np.float32).T, strict=True)),
            **{name: features[:, :, at] for at, name in enumerate(self._columns.names)},
            **dict(zip(TIMES, spent, strict=True)),
        }


class PartWriter(RoundRecorder):
    """Writes the rounds of texts that have ended.

    Args:
        folder: of the files.
        header: of each.
        eos: tokens that end a text.
        share: of the texts that are recorded.
        rows, depth, temperature, explored: of `RoundRecorder`.
    """

    def __init__(
        self, folder: Path, header: Header, eos: Sequence[int], share: float, rows: int, depth: int, temperature: float,
        explored: Callable[[Array], Array],
    ) -> None:  # fmt: skip
        limit = round(share * _SHARE)
        # By a hash of the text's number, so that the share is spread evenly.
        super().__init__(
            rows, depth, temperature, explored, lambda number: bool(mix(np.array([number]))[0] & (_SHARE - 1) < limit)
        )
        self._folder, self._header, self._eos = folder, header, set(eos)
        self._begun_ns, self._parts, self._sequences = time.time_ns(), itertools.count(), itertools.count()
        self._chunks: list[Mapping[str, Any]] = []
        self._new, self._warned = 0, False  # texts since the last attempt to write
        folder.mkdir(parents=True, exist_ok=True)
        # `_watch` writes from its own thread; infinity = no step since the last write.
        self._lock, self._step_s = threading.Lock(), math.inf
        threading.Thread(target=self._watch, daemon=True).start()

    def on_begin(self, row: int, text: Array, name: str | None) -> None:
        """See `EngineObserver.on_begin`."""
        with self._lock:
            super().on_begin(row, text, name)

    def on_outcomes(self, drafts: Sequence[EngineDraft], step_s: Sequence[float]) -> None:
        """See `EngineObserver.on_outcomes`."""
        with self._lock:
            super().on_outcomes(drafts, step_s)

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        with self._lock:
            super().on_drafts(drafts, draft_s)
            self._add_ended(IDLE)
            if self._new >= TEXTS:
                self._write()
            self._step_s = time.monotonic()

    def flush(self) -> None:
        """Write all rounds; later ones of a request continue as another text."""
        with self._lock:
            self._add_ended(-1)
            self._write()
            self._step_s = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(QUIET_S / 4)
            if time.monotonic() - self._step_s > QUIET_S:
                self.flush()

    def _write(self) -> None:
        self._new = 0  # so that a full disk is not tried at every step
        if not self._chunks:
            return
        path = self._folder / f"{self._begun_ns}-{os.getpid()}-{next(self._parts):06d}.parquet"
        try:
            with staged(path) as stage:
                write_table(shard_table(self._header, self._chunks), stage)
            self._chunks = []
        except OSError as error:  # the server must continue
            del self._chunks[:-KEPT]
            if not self._warned:
                text = f"--traces: {disk_text(error)}; the last {KEPT} texts are kept until they can be written"
                warnings.warn(text, SpecstopWarning, stacklevel=2)
            self._warned = True

    def _add_ended(self, idle: int) -> None:
        for text in self.take_ended(idle):
            prompt, generated = text.tokens[: text.prompt], text.tokens[text.prompt :]
            # An engine may commit tokens after a request's end.
            end = next((at for at, token in enumerate(generated, 1) if token in self._eos), None)
            number = next(self._sequences)
            work = PromptTask(number, text.name or f"{self._begun_ns}-{number}", "", prompt)
            rows = self.rows([text], work, generated[:end])
            if rows is not None:
                self._chunks.append(rows)
                self._new += 1


class RecordingProposer(Proposer):
    """Drafts for vLLM and writes traces; its settings are `decode.engines.settings.EngineSettings`."""

    records = True
    writer: PartWriter

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy, which explores if the settings say so."""
        explore = self.settings.explore
        return exploring(policy, explore, self.depth) if explore else policy.limited(self.depth)

    def observer(self, options: Options) -> EngineObserver:
        """Return the writer of the traces."""
        from vllm import __version__

        settings, config = self.settings, self._config.model_config
        mode = "match" if settings.temperature == 0.0 else "point"
        facts = {
            "engine": f"vllm {__version__}", "drafter": settings.drafter, "draft model": settings.draft,
            "digests": {"policy": policy_digest(self._policy)},
        }  # fmt: skip
        # `import_parts` sets the number of prompts.
        header = Header(
            target=str(config.model), draft=settings.draft if settings.drafter == "model" else settings.drafter, pair={},
            vocabulary=int(config.get_vocab_size()), eos=tuple(options.eos), temperature=settings.temperature,
            topology=chain(self.depth), features=engine_features(settings.temperature), anchor_features=ANCHORS,
            max_new_tokens=int(config.max_model_len), seed=0, shards=1, prompts=1, prompts_hash="", verification=mode,
            label=mode, collector="live", policy=self._policy.name, explore=settings.explore, facts=facts,
        )  # fmt: skip
        self.writer = PartWriter(
            Path(settings.traces), header, options.eos, settings.share, options.rows, options.depth, options.temperature,
            partial(explored_by, self),
        )  # fmt: skip
        atexit.register(self.writer.flush)
        return self.writer


def import_parts(folder: Path, out: str | Path, *, overwrite: bool = False) -> Trace:
    """Make one live trace of the files that serving processes wrote.

    Args:
        folder: of the files.
        out: folder of the trace.
        overwrite: replace an older result there.

    Raises:
        InputError: there are no files, one is not of this kind, or they are of different runs; or as `prepare_output_dir`.
    """
    prepare_output_dir(out, overwrite=overwrite, inputs=[folder])
    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise InputError(f"path: expected files that RecordingProposer wrote in {folder}, but there are none")
    tables, headers, count = [], [], 0
    for path in paths:
        try:
            table = pq.read_table(path)
            headers.append(Header.from_json((table.schema.metadata or {})[HEADER_KEY], str(path)))
        except (OSError, KeyError, pa.ArrowException) as error:
            raise InputError(f"path: {path} is no file of rounds: {type(error).__name__}: {error}") from None
        if headers[-1].differences(headers[0]):
            raise InputError(
                f"path: {path.name} and {paths[0].name} are of servers that were told different things; give each "
                "a folder of its own"
            )
        # Each file numbers its texts separately.
        _, numbers = np.unique(table.column("sequence").to_numpy(), return_inverse=True)
        at = table.schema.get_field_index("sequence")
        tables.append(table.set_column(at, table.schema.field(at), pa.array(numbers + count, pa.int32())))
        count += int(numbers.max()) + 1
    header = dataclasses.replace(headers[0], prompts=count)
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        write_shard(stage, header, 0, pa.concat_tables(tables))
    return load_trace(out)
