"""A folder with everything that commands read, results of earlier runs, and a user's own files.

pair/ prompts.jsonl data/ fit/ held/ live/ records.jsonl profile.json policy/ weights.pt a/ b/ collect.yaml    inputs
old/                                                                               results that may be replaced
mixed/                                                                             a result with a file of the user's in it
mine/ mine.txt home/ here/                                                         the user's own; `here` is worked in
link alias.jsonl linked/                                                           other names of inputs
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect
from specstop.decode.models.pair import load_pair
from specstop.policies.fixed import FixedLength
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.fit.run import train

from .profiles import chain_profile
from .random_pair import save_pair

DEPTH, NEW = 3, 8
FIT_PROMPTS, HELD_PROMPTS = 16, 9
RECORD = {"metrics": {"speculative_decoding": {"num_spec_tokens": 3, "per_step_accepted": [0, 2, 3, 1]}}}

Contents = dict[str, bytes | str | None]


def furnish(place: Path) -> Path:
    """Make the folder `place` with all inputs and old results."""
    folder = save_pair(place / "pair")
    pair = load_pair(folder / "target", folder / "draft", dtype="float64")
    sides = {"fit": prompts("f", FIT_PROMPTS), "held": prompts("h", HELD_PROMPTS), "live": prompts("l", HELD_PROMPTS)}
    for name, path in (("fit", folder / "prompts-train.jsonl"), ("held", folder / "prompts-test.jsonl")):
        write_prompts(path, sides[name])
    write_prompts(place / "prompts.jsonl", sides["live"])
    (place / "data").mkdir()
    write_prompts(place / "data" / "train.jsonl", sides["live"])
    profile = chain_profile()
    profile.save(place / "profile.json")
    traces = {
        name: collect(
            pair, some, place / name, depth=DEPTH, max_new_tokens=NEW, temperature=0.7, verification="match", shards=2,
            **({"collector": "live", "policy": FixedLength(1), "explore": 0.5} if name == "live" else {}),
        )
        for name, some in sides.items()
    }  # fmt: skip
    (place / "records.jsonl").write_text("".join(json.dumps(RECORD) + "\n" for _ in range(4)))
    train(traces["fit"], profile, out=place / "policy", rule="step", threshold=0.5, cross_fit=False, passes=1)
    layers = {"layers.0": (4, 11), "layers.2": (1, 4)}
    tensors = {f"{name}.weight": torch.ones(shape) for name, shape in layers.items()}
    tensors |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in layers.items()}
    torch.save(tensors, place / "weights.pt")
    for name, length in (("a", 1), ("b", 2)):
        evaluate(traces["held"], profile, [FixedLength(length)], out=place / name, sweep=False)
    for name, source in (("trace", "held"), ("policy", "policy"), ("report", "a")):
        shutil.copytree(place / source, place / "old" / name)
    shutil.copytree(place / "b", place / "mixed")
    shutil.copy(place / "profile.json", place / "old" / "profile.json")
    (place / "mixed" / "notes.txt").write_text("mine")
    for name in ("mine/notes.txt", "mine/data/train-00000-of-00001.parquet", "mine/README.md", "mine.txt", "home/letter.txt",
                 "here/thesis.txt"):  # fmt: skip
        (place / name).parent.mkdir(exist_ok=True, parents=True)
        (place / name).write_text(f"mine: {name}")
    (place / "empty").mkdir()
    (place / "collect.yaml").write_text("command: collect\ndepth: 2\n")
    alias(place)
    return place


def alias(place: Path) -> None:
    """Give inputs other names."""
    (place / "link").symlink_to("fit", target_is_directory=True)
    (place / "alias.jsonl").hardlink_to(place / "prompts.jsonl")
    (place / "linked").mkdir()
    for name in os.listdir(place / "held"):
        (place / "linked" / name).symlink_to(place / "held" / name)
    (place / "old" / "link").symlink_to("report", target_is_directory=True)
    (place / "gone").symlink_to("nowhere/yet")


def prompts(side: str, count: int) -> list[Prompt]:
    """Return prompts of two to six words with ids of their own."""
    return [
        Prompt(f"{side}{i}", " ".join(f"w{3 + (7 * i + 11 * j) % 60}" for j in range(2 + i % 5))) for i in range(count)
    ]


def write_prompts(path: Path, some: list[Prompt]) -> None:
    """Write prompts as JSON Lines, with an answer each."""
    path.write_text(
        "".join(json.dumps({"id": p.id, "prompt": p.text, "answer": "w5 w6 w7 w8 w9"}) + "\n" for p in some)
    )


def contents(place: Path) -> Contents:
    """Return what is at each name below a folder: the bytes of a file, where a link leads, None for a folder."""
    found: Contents = {}
    for parent, folders, names in os.walk(place):
        for name in (*folders, *names):
            path = Path(parent, name)
            value = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
            found[path.relative_to(place).as_posix()] = value
    return found


def renew(place: Path, first: Path) -> None:
    """Make `place` again as `first`, a copy of its beginning, is."""
    shutil.rmtree(place)
    shutil.copytree(first, place, symlinks=True)
    (place / "alias.jsonl").unlink()
    (place / "alias.jsonl").hardlink_to(place / "prompts.jsonl")
