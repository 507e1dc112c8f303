"""Traces of a serving process: `vllm serve` drafts with `RecordingProposer`, which writes the rounds of finished requests.

    vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "specstop.collect.engines.serving.RecordingProposer", "num_speculative_tokens": 8}' \\
        --additional-config '{"specstop": {"draft": "DRAFT", "policy": "policy", "traces": "parts", "explore": 0.05}}'

Every so many requests, and whenever there is nothing to do, their rounds become a file of the folder `traces`, there whole or
not at all; any number of processes may write into it. A process that is killed loses what is not in a file yet.
`specstop import FOLDER` makes one live trace of all files.
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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...decode.engines.drafting import EngineDraft, EngineObserver, Options
from ...decode.engines.vllm import Proposer
from ...policies.contract import Array, StopPolicy
from ...policies.counter_rng import mix
from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import disk_text, prepare_output_dir, staged_folder
from ..digests import policy_digest
from ..explore import exploring
from ..schema import HEADER_KEY, Header, chain
from ..store.folder import Trace, open_for_writing, open_trace, shard_table, write_shard_table, write_table
from ..store.staging import staged
from ..work import Work
from .rounds import ANCHORS, RecordedText, RoundRecorder, engine_features, explored_by

TEXTS = 32
"""Requests of a file."""

KEPT = 8 * TEXTS
"""Requests that are kept while files cannot be written."""

QUIET_S = 2.0
"""Seconds without a step after which all that is there is written: vLLM ends its processes as it likes."""

IDLE = 64
"""Steps after which a request that is in none of them has ended."""

_SHARE = 1 << 24


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
        # By a hash of the text's number: the share is spread over all texts.
        least = round(share * _SHARE)
        super().__init__(
            rows, depth, temperature, explored, lambda number: bool(mix(np.array([number]))[0] & (_SHARE - 1) < least)
        )
        self._folder, self._header, self._eos = folder, header, set(eos)
        self._begun_ns, self._parts, self._sequences = time.time_ns(), itertools.count(), itertools.count()
        self._chunks: list[Mapping[str, Any]] = []
        self._new, self._told = 0, False  # texts since the last try to write them; whether a failure was told
        folder.mkdir(parents=True, exist_ok=True)
        # `_watch` writes from a thread of its own; infinity = no step since the last writing.
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
            self._add(self.take_ended(IDLE))
            if self._new >= TEXTS:
                self._write()
            self._step_s = time.monotonic()

    def flush(self) -> None:
        """Write all that is there; what comes later of a request goes on as another text."""
        with self._lock:
            self._add(self.take_ended(-1))  # of any that has rounds
            self._write()
            self._step_s = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(QUIET_S / 4)
            if time.monotonic() - self._step_s > QUIET_S:
                self.flush()

    def _write(self) -> None:
        self._new = 0  # a disk that is full is not asked again at every step
        if not self._chunks:
            return
        path = self._folder / f"{self._begun_ns}-{os.getpid()}-{next(self._parts):06d}.parquet"
        try:
            with staged(path) as stage:
                write_table(shard_table(self._header, self._chunks), stage)
            self._chunks = []
        except OSError as error:  # the server's requests are worth more than its traces
            del self._chunks[:-KEPT]
            if not self._told:
                text = f"--traces: {disk_text(error)}; the last {KEPT} texts are kept until they can be written"
                warnings.warn(text, SpecstopWarning, stacklevel=2)
            self._told = True

    def _add(self, texts: Sequence[RecordedText]) -> None:
        for text in texts:
            prompt, made = text.tokens[: text.prompt], text.tokens[text.prompt :]
            # An engine may commit tokens after a request's end.
            ends = next((at for at, token in enumerate(made) if token in self._eos), len(made))
            number = next(self._sequences)
            work = Work(number, text.name or f"{self._begun_ns}-{number}", "", prompt)
            rows = self.rows([text], work, made[: ends + 1])
            if rows is not None:
                self._chunks.append(rows)
                self._new += 1


class RecordingProposer(Proposer):
    """Drafts for vLLM and writes traces; see `decode.engines.settings.EngineSettings` for what it is told."""

    records = True
    writer: PartWriter

    def prepared(self, policy: StopPolicy) -> StopPolicy:
        """Return the policy, which explores where the settings say so."""
        told = self.settings
        return exploring(policy, told.explore, self.depth) if told.explore else policy.limited(self.depth)

    def observer(self, options: Options) -> EngineObserver:
        """Return what writes the traces."""
        told, config = self.settings, self._config.model_config
        mode = "match" if told.temperature == 0.0 else "point"
        from vllm import __version__

        facts = {
            "engine": f"vllm {__version__}", "drafter": told.drafter, "draft model": told.draft,
            "digests": {"policy": policy_digest(self._policy)},
        }  # fmt: skip
        # The number of prompts is known once the files are put together (`import_parts`).
        header = Header(
            target=str(config.model), draft=told.draft if told.drafter == "model" else told.drafter, pair={},
            vocabulary=int(config.get_vocab_size()),
            eos=tuple(options.eos), temperature=told.temperature, topology=chain(self.depth),
            features=engine_features(told.temperature), anchor_features=ANCHORS, max_new_tokens=int(config.max_model_len),
            seed=0, shards=1, prompts=1, prompts_hash="", verification=mode, label=mode, collector="live",
            policy=self._policy.name, explore=told.explore, facts=facts,
        )  # fmt: skip
        self.writer = PartWriter(
            Path(told.traces), header, options.eos, told.share, options.rows, options.depth, options.temperature,
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
        InputError: there are none, one is no such file, or they are of different runs; or as `prepare_output_dir`.
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
        # Each file counts its texts by itself.
        _, numbers = np.unique(table.column("sequence").to_numpy(), return_inverse=True)
        at = table.schema.get_field_index("sequence")
        tables.append(table.set_column(at, table.schema.field(at), pa.array(numbers + count, pa.int32())))
        count += int(numbers.max()) + 1
    header = dataclasses.replace(headers[0], prompts=count)
    with staged_folder(out) as stage:
        open_for_writing(stage, header)
        write_shard_table(
            stage, header, 0, pa.concat_tables(tables).replace_schema_metadata({HEADER_KEY: header.to_json()})
        )
    return open_trace(out)
