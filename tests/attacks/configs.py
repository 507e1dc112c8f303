"""Damaged model folders: each is refused in one line, or decodes exactly as transformers decodes the same folder.

Configs get odd values, lose entries and gain others; weight files lose, rename, reshape and spoil tensors, become pickles or
shards; files are cut and their bits flipped. Nothing may take longer than `SECONDS` of the processor or `BYTES` of memory,
whatever size a config claims.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import resource
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from random_models import TIE, margin, plain
from safetensors.torch import load_file, save_file
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import load_pair
from specstop.decode.settings import Settings
from specstop.policies.errors import InputError, PairError
from specstop.policies.fixed import FixedLength
from transformers import AutoModelForCausalLM

from .random_pair import END, prompt_ids, save_pair

COUNT, QUICK = 300, 20
"""Damaged folders in a full run, and in a quick one."""

KINDS = ("llama", "qwen2-window", "mistral-window", "gemma2", "gpt2", "gpt-neox", "opt")
NEW = 10
SECONDS, BYTES = 30.0, 6 << 30
ODD_VALUES = (
    None, True, False, 0, -1, 1, 2, 3.5, 10**6, 10**12, 2**70, -(10**9), 1e308, math.nan, math.inf, "", "32", "nonsense",
    "\ud800", "\x1b[2J", [], [4], ["full_attention"], {}, {"a": {}}, "float16", "int8", 0.0,
)  # fmt: skip
SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "intermediate_size", "max_position_embeddings", "sliding_window", "n_positions", "n_embd", "n_head", "n_layer", "ffn_dim",
    "eos_token_id", "pad_token_id", "max_window_layers", "rms_norm_eps", "query_pre_attn_scalar",
)  # fmt: skip
EXTRA: dict[str, tuple[Any, ...]] = {
    "_attn_implementation": ("flash_attention_2", "eager", "flex_attention", "nonsense", 3),
    "attn_implementation": ("flash_attention_2", {"": "sdpa"}),
    "quantization_config": ({}, {"quant_method": "gptq", "bits": 4}, {"quant_method": "nonsense"}, "int8"),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},),
    "model_type": ("t5", "bert", "mamba", "mixtral", "llava", "evil"),
    "rope_parameters": (None, [], {}, {"rope_type": "yarn"}, {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}),
    "rope_scaling": ({"type": "dynamic", "factor": 2.0}, {"rope_type": "nonsense"}),
    "layer_types": (["full_attention"] * 3, ["sliding_attention"] * 3, ["linear_attention"] * 3, []),
    "tie_word_embeddings": (True, "yes"),
    "attention_bias": (True,),
    "is_encoder_decoder": (True,),
    "add_cross_attention": (True,),
    "use_cache": (False,),
    "text_config": ({}, {"num_hidden_layers": 10**9}),
    "transformers_weights": ("../draft/model.safetensors", "/dev/zero"),
}
Damage = Callable[[Path, random.Random], None]


def _edit(path: Path, change: Callable[[Any], None]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


# Damages: each changes a model folder, with a random generator.


def odd_value(folder: Path, chance: random.Random) -> None:
    """Write an odd value over an entry of the config."""
    _edit(folder / "config.json", lambda raw: raw.update({chance.choice(sorted(raw)): chance.choice(ODD_VALUES)}))


def odd_size(folder: Path, chance: random.Random) -> None:
    """Write an odd value, or another size, for one of the sizes that the config has."""

    def change(raw: Any) -> None:
        name = chance.choice([name for name in SIZES if name in raw])
        raw[name] = chance.choice([*ODD_VALUES, *range(2, 9), 16, 64, 65, 1024])

    _edit(folder / "config.json", change)


def lose_entry(folder: Path, chance: random.Random) -> None:
    """Leave one or several entries of the config out."""

    def change(raw: Any) -> None:
        for name in chance.sample(sorted(raw), chance.choice([1, 1, 4])):
            del raw[name]

    _edit(folder / "config.json", change)


def extra_entry(folder: Path, chance: random.Random) -> None:
    """Ask for what no folder should ask for."""
    name = chance.choice(sorted(EXTRA))
    _edit(folder / "config.json", lambda raw: raw.update({name: chance.choice(EXTRA[name])}))


def generation(folder: Path, chance: random.Random) -> None:
    """Change what the folder says of generation."""
    values = [*ODD_VALUES, [2, "a"], "</s>", [[2]], 40, [40, 41]]
    change = {chance.choice(["eos_token_id", "eos_token_id", "pad_token_id"]): chance.choice(values)}
    _edit(folder / "generation_config.json", lambda raw: raw.update(change))


def flip_bits(folder: Path, chance: random.Random) -> None:
    """Flip bits of any file."""
    path = chance.choice(sorted(folder.iterdir()))
    raw = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        at = chance.randrange(min(len(raw), 4096) if chance.random() < 0.5 else len(raw))
        raw[at] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def cut(folder: Path, chance: random.Random) -> None:
    """Cut a file short, or remove it."""
    path = chance.choice(sorted(folder.iterdir()))
    if chance.random() < 0.3:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def tensors(folder: Path, chance: random.Random) -> None:
    """Lose, rename, reshape or spoil a tensor, or add one."""
    weights = load_file(folder / "model.safetensors")
    name = chance.choice(sorted(weights))
    tensor = weights[name]
    how = chance.randrange(8)
    if how == 0:
        del weights[name]
    elif how == 1:
        weights[chance.choice([name.replace("0", "7"), f"{name}x", "head.weight", ""])] = weights.pop(name)
    elif how == 2:
        weights[name] = chance.choice([tensor[:1], tensor.flatten(), tensor[None], tensor.new_zeros(0)]).clone()
    elif how == 3:
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice([math.nan, math.inf, -math.inf, 3e38])
    elif how == 4:
        tensor.fill_(chance.choice([math.nan, math.inf, 0.0, 1e30]))
    elif how == 5:
        weights[name] = tensor.to(
            chance.choice([torch.float16, torch.int64, torch.bool, torch.float64, torch.bfloat16])
        )
    elif how == 6:
        weights[chance.choice(["extra", "v_head.weight", f"{name}.bias", name.replace("1", "8")])] = tensor.clone()
    else:
        for other in sorted(weights)[:: chance.randint(1, 3)]:
            del weights[other]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


class Crafted:
    """Would leave a file behind if its pickle were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch '{self.path}'",)


def pickled(folder: Path, chance: random.Random) -> None:
    """Have a pickle in the place of the weights, honest or not."""
    weights: Any = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    trap = Crafted(folder.parent / "ran")
    path, how = folder / "pytorch_model.bin", chance.randrange(6)
    if how == 0:
        path.write_bytes(pickle.dumps(trap))
    elif how == 1:
        path.write_bytes(chance.randbytes(100))
    else:
        made = [weights, {**weights, "x": trap}, [1, 2], {"a": 3}][how - 2]
        torch.save(made, path, _use_new_zipfile_serialization=chance.random() < 0.5)


def sharded(folder: Path, chance: random.Random) -> None:
    """Deal the weights to shards, with an index that is right or not."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"part-{chance.randrange(3)}.safetensors" for name in weights}
    for part in set(places.values()):
        save_file({n: w for n, w in weights.items() if places[n] == part}, folder / part, metadata={"format": "pt"})
    index: dict[str, Any] = {"metadata": {"total_size": 1}, "weight_map": places}
    how, name = chance.randrange(6), chance.choice(sorted(places))
    if how == 1:
        (folder / places[name]).unlink()
    elif how == 2:
        del places[name]
    elif how == 3:
        places[name] = chance.choice(["../../../etc/passwd", "/etc/passwd", "", "config.json", "\ud800"])
    elif how == 4:
        index["weight_map"] = chance.choice([None, [], 3, {}, {name: 4}])
    elif how == 5:
        del index["metadata"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: tuple[Damage, ...] = (
    odd_value, odd_size, odd_size, odd_size, lose_entry, extra_entry, extra_entry, generation, flip_bits, cut, tensors,
    tensors, pickled, sharded,
)  # fmt: skip


def check(pair: Path, dtype: str, tree: str | None) -> str:
    """Load and decode, and hold the text against the library's own; return what happened.

    Raises:
        AssertionError: another text than the library's, or a refusal of more than a line.
    """
    try:
        loaded = load_pair(pair / "target", pair / "draft", dtype=dtype)
        speculator = Speculator(loaded, FixedLength(3), Settings(0.0, NEW, tree=tree))
        made = [list(speculator.generate(prompt).tokens) for prompt in prompt_ids()]
    except (PairError, InputError) as error:
        line = str(error)
        line.encode()
        assert line.isprintable() and len(line) < 700, f"not one line: {line[:200]!r}"
        return "refused"
    target = AutoModelForCausalLM.from_pretrained(pair / "target", dtype=getattr(torch, dtype))
    if target.generation_config.eos_token_id is None:
        target.generation_config.eos_token_id = END
    for prompt, text in zip(prompt_ids(), made, strict=True):
        alone = plain(target, prompt, NEW)
        if text != alone:
            first = next(
                (i for i, (a, b) in enumerate(zip(text, alone, strict=False)) if a != b), min(len(text), len(alone))
            )
            assert dtype == "float32" and margin(target, [*prompt, *alone[:first]]) < TIE, f"{text} instead of {alone}"
            return "decodes as the library does, up to a tie"
    return "decodes as the library does"


def attack(count: int, seed: int, room: Path) -> tuple[Counter[str], list[str]]:
    """Damage `count` folders; return how often what happened, and the faults found."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    pairs = [save_pair(room / kind, kind) for kind in KINDS]
    seen: Counter[str] = Counter()
    faults = []
    for number in range(count):
        chance = random.Random(f"{seed}-{number}")
        good, damage, role = chance.choice(pairs), chance.choice(DAMAGES), chance.choice(["target", "target", "draft"])
        shutil.rmtree(room / "bad", ignore_errors=True)
        shutil.copytree(good, room / "bad")
        damage(room / "bad" / role, chance)
        began, case = time.process_time(), f"{number} {damage.__name__} of the {role}, {good.name}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                outcome = check(room / "bad", chance.choice(["float32", "float64"]), chance.choice([None, "2,1"]))
        except Exception as error:  # whatever it is, it is a fault
            outcome = "fault"
            faults.append(f"{case}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        if (spent := time.process_time() - began) > SECONDS:
            faults.append(f"{case}: took {spent:.0f} s")
        if (room / "bad" / "ran").exists():
            faults.append(f"{case}: code ran")
        seen[f"{damage.__name__}: {outcome}"] += 1
    if (peak := resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) > BYTES:
        faults.append(f"{peak >> 20} MiB of memory were taken")
    return seen, faults
