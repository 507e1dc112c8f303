"""Pairs and prompts of the benchmarks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from benchmark_scripts import script
from pair_documents import documents
from specstop.collect.prompts.read import Prompt
from specstop.policies.errors import InputError
from specstop.train.demo.pair import make_pair
from specstop.train.demo.pair_recipe import RECIPES
from specstop.train.demo.pair_text import split_documents

unseen_prompts = script("pairs").unseen_prompts


def test_unseen_prompts_are_of_text_that_was_never_learnt(tmp_path: Path) -> None:
    found, recipe = documents(24), dataclasses.replace(RECIPES["tiny"], text_bytes=4000)
    pair = make_pair(found, recipe, tmp_path / "pair")
    split = split_documents(found, recipe.held_out, recipe.seed, recipe.text_bytes)
    assert split.left
    seen = {document.name for document in (*split.learn, *split.spare)}
    sides = unseen_prompts(pair, found, 1000, 1000)
    names = [{prompt.id.rpartition("#")[0] for prompt in side} for side in sides]
    assert not names[0] & names[1] and not seen & (names[0] | names[1])
    assert seen | names[0] | names[1] == {document.name for document in found}
    for side, more in zip(("train", "test"), sides, strict=True):
        own = [json.loads(line) for line in (pair / f"prompts-{side}.jsonl").read_text(encoding="utf-8").splitlines()]
        assert len(more) > len(own)
        assert all(Prompt(prompt["id"], prompt["prompt"], prompt["group"]) in more for prompt in own)
    with pytest.raises(InputError, match="expected the text that"):
        unseen_prompts(pair, documents(23)[::-1], 10, 10)
