"""Prompts as lists, tensors and arrays are the same prompts, for all drafters and entry points."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specstop.decode.benchmark import bench
from specstop.decode.drafters import find_drafters
from specstop.decode.loop import Request, Speculator
from specstop.decode.plain import plain_texts
from specstop.decode.prompts import encode_prompts
from specstop.decode.run import decode
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

TYPES = {
    "list": list, "tuple": tuple, "tensor": torch.tensor, "int32 tensor": lambda ids: torch.tensor(ids, dtype=torch.int32),
    "list of 0-d tensors": lambda ids: list(torch.tensor(ids)), "array": np.array,
    "uint16 array": lambda ids: np.array(ids, dtype=np.uint16), "list of numpy integers": lambda ids: list(np.array(ids)),
}  # fmt: skip
OTHERS = {
    "text": "w7 w8", "bytes": b"ab", "floats": [7.0, 8.0], "float tensor": torch.tensor([7.0, 8.0]),
    "batch": torch.tensor([[7, 8]]), "nested list": [[7, 8]], "mapping": {7: 1, 8: 1}, "one id": 7,
    "0-d tensor": torch.tensor(7), "nothing": None,
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_the_type_of_a_prompt_changes_neither_text_nor_rounds(pair, kind):
    """The prompts repeat themselves, so that drafters that search the text find candidates in it."""
    settings, policy = Settings(0.7, 10, verification="match", ignore_eos=True), FixedLength(3)
    prompts = [[7, 9, 11, 8, 7, 9, 11, 8, 7, 9], [8, 20, 21, 8, 20, 21, 8]]
    converted = [TYPES[kind](ids) for ids in prompts]

    def counted(texts):
        return [(text.tokens, [(one.drafted, one.accepted) for one in text.rounds]) for text in texts]

    for drafter in ("lookup", "suffix+model"):
        speculator = Speculator(pair, policy, settings, drafters=find_drafters(drafter, pair))
        expected = counted(speculator.run([Request(ids) for ids in prompts]))
        assert sum(drafted for _, rounds in expected for drafted, _ in rounds)
        assert counted(speculator.run([Request(ids) for ids in converted])) == expected
        assert counted([speculator.generate(ids) for ids in converted]) == expected
        options = {"settings": settings, "drafter": drafter}
        assert counted(decode(pair, converted, policy, **options)) == counted(decode(pair, prompts, policy, **options))
    assert plain_texts(pair, converted, [1, 2], 6).tokens == plain_texts(pair, prompts, [1, 2], 6).tokens
    assert bench(pair, converted, "fixed:2", settings=Settings(0.0, 4))
    encoded = [ids for _, ids in encode_prompts(pair, converted)]
    assert encoded == prompts and all(type(token) is int for ids in encoded for token in ids)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_prompts_are_refused(pair, kind):
    prompt = OTHERS[kind]
    speculator = Speculator(pair, FixedLength(2), Settings(0.0, 4))
    functions = [Request, speculator.generate, lambda one: plain_texts(pair, [one], [0], 4)]
    if kind != "text":
        functions.append(lambda one: encode_prompts(pair, [one]))
    if kind not in ("text", "batch", "nested list"):
        functions.append(lambda one: decode(pair, one, FixedLength(2)))
    for function in functions:
        with pytest.raises(InputError, match=r"^prompts: expected"):
            function(prompt)
