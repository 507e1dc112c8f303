"""Traces of a serving process: vLLM's drafter writes the rounds of its requests, and `import FOLDER` makes a trace of them.

    vllm serve TARGET --speculative-config '{"method": "custom_class",
        "model": "specstop.collect.engines.serving.RecordingProposer", "num_speculative_tokens": 8}' \\
        --additional-config '{"specstop": {"draft": "DRAFT", "policy": "policy", "traces": "parts", "explore": 0.05}}'

Rounds of finished requests become files in the folder `traces`, each written whole, by any number of processes. A process
that is killed loses what is not in a file yet.
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
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...decode.engines.drafting import EngineDraft, EngineObserver, Options
from ...decode.engines.vllm import Proposer
from ...policies.contract import StopPolicy
from ...policies.errors import InputError, SpecstopWarning
from ...policies.files import disk_text, prepare_output_dir, staged_folder
from ..exploring import exploring
from ..schema import HEADER_KEY, Header, PromptTask, chain
from ..shards import policy_digest
from ..store import Trace, load_trace, open_for_writing, shard_table, staged, write_shard, write_table
from .recorder import RoundRecorder, engine_header, explored_by

TEXTS = 32
"""Requests of a file."""

QUIET_S = 2.0
"""Seconds without a step after which everything is written: vLLM ends its processes without notice."""

IDLE = 64
"""Steps after which a request that is in none of them has ended."""


class PartWriter(RoundRecorder):
    """Writes the rounds of texts that have ended.

    Args:
        folder: of the files.
        header: of each.
        eos: tokens that end a text.
        recorder: arguments of `RoundRecorder`.
    """

    def __init__(self, folder: Path, header: Header, eos: Sequence[int], *recorder: Any) -> None:
        super().__init__(*recorder)
        self._folder, self._header, self._eos = folder, header, set(eos)
        self._begun_ns, self._parts, self._sequences = time.time_ns(), itertools.count(), itertools.count()
        self._chunks: list[Mapping[str, Any]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._step_s = math.inf  # of the last step; infinite if everything was written since
        threading.Thread(target=self._watch, daemon=True).start()

    def on_drafts(self, drafts: Sequence[EngineDraft], draft_s: float) -> None:
        """See `EngineObserver.on_drafts`."""
        with self.lock:
            super().on_drafts(drafts, draft_s)
            self._add_ended(IDLE)
            if len(self._chunks) >= TEXTS:
                self._write()
            self._step_s = time.monotonic()

    def flush(self) -> None:
        """Write all rounds; later ones of a request continue as another text."""
        with self.lock:
            self._add_ended(-1)
            self._write()
            self._step_s = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(QUIET_S / 4)
            if time.monotonic() - self._step_s > QUIET_S:
                self.flush()

    def _add_ended(self, idle: int) -> None:
        for text in self.take(idle):
            prompt, generated = text.tokens[: text.prompt], text.tokens[text.prompt :]
            # An engine may commit tokens after a request's end.
            end = next((at for at, token in enumerate(generated, 1) if token in self._eos), None)
            number = next(self._sequences)
            task = PromptTask(number, text.name or f"{self._begun_ns}-{number}", "", prompt)
            if (rows := self.rows([text], task, generated[:end])) is not None:
                self._chunks.append(rows)

    def _write(self) -> None:
        chunks, self._chunks = self._chunks, []
        if not chunks:
            return
        path = self._folder / f"{self._begun_ns}-{os.getpid()}-{next(self._parts):06d}.parquet"
        try:
            with staged(path) as stage:
                write_table(shard_table(self._header, chunks), stage)
        except OSError as error:  # the server must continue
            warnings.warn(f"--traces: {disk_text(error)}; the rounds are lost", SpecstopWarning, stacklevel=2)


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
        facts = {
            "engine": f"vllm {__version__}", "drafter": settings.drafter, "draft model": settings.draft,
            "policy digest": policy_digest(self._policy),
        }  # fmt: skip
        # `import_parts` sets the number of prompts.
        header = Header(
            target=str(config.model), draft=settings.draft if settings.drafter == "model" else settings.drafter, pair={},
            vocabulary=int(config.get_vocab_size()), eos=tuple(options.eos), temperature=settings.temperature,
            topology=chain(self.depth), max_new_tokens=int(config.max_model_len), seed=0, shards=1, prompts=1,
            prompts_hash="", facts=facts, **engine_header(settings.temperature, self._policy.name, settings.explore),
        )  # fmt: skip
        self.writer = PartWriter(
            Path(settings.traces), header, options.eos, options.rows, options.depth, options.temperature,
            partial(explored_by, self), settings.share,
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
        if names := headers[-1].differences(headers[0]):
            raise InputError(
                f"path: expected files of servers with the same settings, but {path.name} and {paths[0].name} differ in "
                f"{', '.join(names)}; give each server its own folder"
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
