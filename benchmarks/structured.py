"""Structured output: validity of texts for random JSON schemas, and equality to plain constrained decoding.

    python benchmarks/structured.py --check
    python benchmarks/structured.py --quick

Each schema has one prompt. It is decoded with plain decoding and with each drafter, greedy and at temperature 0.7. The
drafters use a chain and a tree with `match` verification, which must give the text of plain decoding, and, when sampling with
the draft model, a chain with `block` verification. The validity of a text is tested by a schema checker that does not depend
on the grammar library. Without `--pair` the shipped pair is used.
The last line of the output is a JSON object. With `--check` the exit code is 1 if a bar is not met.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from typing import Any

import torch
from bars import Bars, arguments
from pairs import pair_folder, prompts_of
from specstop.collect.prompts import encode
from specstop.decode import (
    Grammar,
    Pair,
    SamplingParams,
    Settings,
    Speculator,
    load_pair,
    plain_texts,
    stream_key,
    with_drafter,
)
from specstop.decode.loop import Request
from specstop.policies import FixedLength

SCHEMAS, QUICK = 50, 4
DRAFTERS = ("model", "lookup", "suffix")
TEMPERATURES = (0.0, 0.7)
TREE, DEPTH, NEW = "2,2,1", 4, 400


def main() -> int:
    """Run the command line and return its exit code."""
    options = arguments(__doc__).parse_args()
    torch.set_num_threads(1)
    count = QUICK if options.quick else SCHEMAS
    folder = pair_folder(options)
    pair = load_pair(folder / "target", folder / "draft", dtype="float64")
    prompts = prompts_of(folder, 1, count)[1]
    ids = [tokens[-40:] for tokens in encode(prompts, pair.tokenizer, pair.readable)]
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    for number in range(count):
        schema = random_object(random.Random(number), 2)
        compared(pair, ids[number % len(ids)], number, schema, counts)
    bars = Bars()
    bars.figures |= {"texts": counts["texts"], "seconds": round(time.monotonic() - begin)}
    for name in ("invalid", "greedy other", "sampled other"):
        bars.add(name, counts[name], counts[name] == 0, f"{counts[name]} texts")
    rate = counts["accepted"] / max(counts["drafted"], 1)
    bars.figures["accepted of drafted, draft model"] = round(rate, 3)
    return bars.finish(options, f"{counts['texts']} texts of {count} schemas")


def compared(pair: Pair, prompt: list[int], number: int, schema: dict[str, Any], counts: Counter[str]) -> None:
    """Decode one prompt with a schema, each drafter and each mode, and count different and invalid texts."""
    assert pair.tokenizer is not None
    sampling = SamplingParams(processors=(Grammar.from_json_schema(schema, pair.tokenizer),))
    request = Request(prompt, stream_key(number, "structured"))
    for temperature in TEMPERATURES:
        plain = plain_texts(pair, [prompt], [request.key], NEW, temperature, sampling=sampling).tokens[0]
        count_validity(pair, plain, schema, counts)
        for drafter in DRAFTERS:
            drafter_pair = with_drafter(pair, drafter)
            modes = [
                ("match", None),
                ("match", TREE),
                *([("block", None)] if temperature and drafter == "model" else []),
            ]
            for mode, tree in modes:
                settings = Settings(temperature, NEW, verification=mode, tree=tree, sampling=sampling)
                result = Speculator(drafter_pair, FixedLength(DEPTH), settings).run([request])[0]
                count_validity(pair, list(result.tokens), schema, counts)
                if mode == "match":
                    counts["sampled other" if temperature else "greedy other"] += list(result.tokens) != plain
                if drafter == "model":
                    counts["drafted"] += sum(step.verified for step in result.rounds)
                    counts["accepted"] += sum(step.accepted for step in result.rounds)


def count_validity(pair: Pair, tokens: list[int], schema: dict[str, Any], counts: Counter[str]) -> None:
    """Count a text, and count it as invalid if it is not JSON that matches the schema."""
    counts["texts"] += 1
    text = pair.tokenizer.decode(tokens, skip_special_tokens=True)  # type: ignore[union-attr]
    try:
        valid = obeys(json.loads(text), schema)
    except ValueError:
        valid = False
    if not valid:
        print(f"invalid: {text[:200]!r} for {json.dumps(schema)[:200]}", flush=True)
    counts["invalid"] += not valid


def random_object(chance: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema of an object with bounded size; objects and arrays are nested up to `depth` levels."""
    names = chance.sample(
        ["name", "age", "items", "ok", "id", "x", "type", "a b", "ключ", "value"], chance.randint(1, 4)
    )
    return {
        "type": "object",
        "properties": {name: random_value(chance, depth) for name in names},
        "required": names[: chance.randint(1, len(names))],
        "additionalProperties": False,
    }


def random_value(chance: random.Random, depth: int) -> dict[str, Any]:
    """Return a random schema of a value."""
    kinds = ["string", "integer", "boolean", "null", "enum", *(["object", "array"] if depth else [])]
    kind = chance.choice(kinds)
    if kind == "object":
        return random_object(chance, depth - 1)
    if kind == "array":
        most = chance.randint(1, 3)
        return {
            "type": "array", "items": random_value(chance, depth - 1), "minItems": chance.randint(0, most), "maxItems": most,
        }  # fmt: skip
    if kind == "string":
        return {"type": "string", "maxLength": chance.randint(1, 6)}
    if kind == "integer":
        least = chance.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + chance.randint(0, 1000)}
    if kind == "enum":
        return {"enum": chance.sample(["red", "green", 'a "quote"', 1, 22, -3, True, None, "é"], chance.randint(1, 4))}
    return {"type": kind}


def obeys(value: Any, schema: dict[str, Any]) -> bool:
    """Return whether a value matches a schema of `random_value`."""
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        properties = schema["properties"]
        return (
            isinstance(value, dict)
            and set(schema["required"]) <= set(value) <= set(properties)
            and all(obeys(inner, properties[name]) for name, inner in value.items())
        )
    if kind == "array":
        sized = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return sized and all(obeys(inner, schema["items"]) for inner in value)
    if kind == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    return isinstance(value, bool) if kind == "boolean" else value is None


if __name__ == "__main__":
    sys.exit(main())
