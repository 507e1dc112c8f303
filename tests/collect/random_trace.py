"""A made-up trace of two shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from specstop.collect.schema import Header, arrow_schema, chain
from specstop.collect.store import open_for_writing, write_shard

HEADER = Header(
    target="t",
    draft="d",
    pair={"target": "ab", "draft": "cd"},
    vocabulary=48,
    eos=(16, 2),
    temperature=0.7,
    topology=chain(3),
    features=("top1", "entropy"),
    anchor_features=("anchor_top1",),
    max_new_tokens=9,
    seed=4,
    shards=2,
    prompts=5,
    prompts_hash="ef",
    facts={"device": "cpu"},
)


def chunk(rows: int, seed: int, header: Header = HEADER) -> dict[str, Any]:
    """Return the rows of one text, number `seed` of the run: random columns of the types that the schema asks for."""
    generator = np.random.default_rng(seed)

    def column(kind: pa.DataType, shape: tuple[int, ...]) -> Any:
        if pa.types.is_fixed_size_list(kind):
            return column(kind.value_type, (*shape, kind.list_size))
        if pa.types.is_string(kind):
            return [f"row {i} of {seed}" for i in range(shape[0])]
        if pa.types.is_boolean(kind):
            return generator.random(shape) < 0.5
        if pa.types.is_integer(kind):
            return generator.integers(0, 48, shape).astype(np.int32)
        return generator.random(shape).astype(np.float32)

    length = generator.integers(0, header.depth + 1, rows).astype(np.int32)
    return {field.name: column(field.type, (rows,)) for field in arrow_schema(header)} | {
        "sequence": np.full(rows, seed, dtype=np.int32),
        "anchor": np.arange(1, rows + 1, dtype=np.int32),
        "text_tokens": np.full(rows, rows + 1, dtype=np.int32),
        "prompt_tokens": np.full(rows, 7, dtype=np.int32),
        "accepted_length": length,
        "accepted": np.arange(header.depth) < length[:, None],
    }


def write(folder: Path, header: Header = HEADER) -> list[dict[str, Any]]:
    """Write a trace of two shards with 3 + 4 and 2 rows, and return its chunks in order."""
    chunks = [chunk(3, 0, header), chunk(4, 1, header), chunk(2, 2, header)]
    open_for_writing(folder, header)
    write_shard(folder, header, 0, chunks[:2])
    write_shard(folder, header, 1, chunks[2:])
    return chunks
