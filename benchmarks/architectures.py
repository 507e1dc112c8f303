"""Greedy speculative text against the target's own `generate`, for every kind of model and engine: is it the same?

    python benchmarks/architectures.py --check
    python benchmarks/architectures.py --quick

First every causal language model class of transformers that can be built small (`causal_lms`), in float64: its texts alone,
side by side, as chains and as trees are those of `generate`, or it is refused by name; nothing else is accepted.

Then random models of a few thousand weights, the draft a noisy copy of the target. In float64 every text must be equal; in
float32 a text may leave the plain one at a tie (the two best logits closer than 1e-4); bfloat16 is reported with the
margins at which its texts part. Each kind runs on transformers' modules (`plain`) and, but for float64, on the fast engine
that `auto` chooses for it (`packed`, or `compact` for the Llama family); the texts expected come from the untouched model.
The last line is one JSON object; with `--check` the exit code is 1 where a bar falls short.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import causal_lms
import torch
from bars import Bars, arguments
from specstop.decode import Pair, Settings, Speculator, Tally, join, load_pair, with_engine
from specstop.policies import Confidence, FixedLength, StopPolicy
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging

TIE = 1e-4
VOCABULARY = 64
WINDOW = 6  # shorter than every text and than some trees
IDS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
NARROW = {**IDS, "hidden_size": 32, "num_attention_heads": 2, "tie_word_embeddings": False}
WIDE = {
    **NARROW,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "max_position_embeddings": 160,
    "initializer_range": 0.4,
}
GROUPED = {**WIDE, "num_key_value_heads": 1, "head_dim": 16}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA = {**GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING}

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in GROUPED.items() if k != "head_dim"}),
    "qwen2-window": lambda: Qwen2Config(
        **{k: v for k, v in GROUPED.items() if k != "head_dim"},
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1,
    ),
    "qwen3": lambda: Qwen3Config(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(**GEMMA),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "gpt2": lambda: GPT2Config(
        **IDS, n_embd=32, n_layer=3, n_head=2, n_positions=160, initializer_range=0.4, tie_word_embeddings=False
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**WIDE),
    "opt": lambda: OPTConfig(
        **NARROW, ffn_dim=48, num_hidden_layers=3, max_position_embeddings=160, init_std=0.4, word_embed_proj_dim=32
    ),
}  # fmt: skip
"""Small configurations by name; those with a window have layers that see `WINDOW` tokens."""

QUICK = ("llama", "mistral-window", "gpt2")
"""The kinds of a quick run: a model of three engines, one of windows, one of learned positions."""

EAGER_ONLY = ("gemma2",)  # transformers has no other attention for its soft-capped scores
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SHAPES = (None, "3,2,1", "fork:4x4", "parents:-1,-1,0,0,1,2,5")
POLICIES: tuple[StopPolicy, ...] = (FixedLength(4), Confidence(0.2))


def build(name: str, dtype: torch.dtype, attention: str = "sdpa", seed: int = 0) -> PreTrainedModel:
    """Return a random model of one kind, whose text does not repeat itself at once."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.to(dtype).eval()


def noisy(model: PreTrainedModel, share: float = 0.02) -> PreTrainedModel:
    """Return a copy with noise on its matrices, `share` of their own spread: accepted now and then."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight.add_((share * weight.double().std() * noise).to(weight.dtype))
    return draft


def prompts(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Return random prompts of 1 to 20 tokens, and one that is longer than a slice of the causal mask."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [70 if i == 1 else 1 + 7 * i % 20 for i in range(count)]
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@torch.inference_mode()
def plain(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """Return what the model's own `generate` adds to a prompt."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out: Any = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
    return [int(token) for token in out[0, len(prompt) :]]


@torch.inference_mode()
def margin(model: PreTrainedModel, prefix: Sequence[int]) -> float:
    """Return the difference of the two best logits after a prefix."""
    best = model(torch.tensor([list(prefix)], device=model.device)).logits[0, -1].double().topk(2).values
    return float(best[0] - best[1])


@dataclass
class Compared:
    """Texts of one cell of the table against the plain ones.

    Attributes:
        margins: of the target's two best logits, where a text first differs.
        accepted: of the tokens verified, the share accepted.
    """

    texts: int = 0
    equal: int = 0
    margins: list[float] = field(default_factory=list)
    accepted: float = 0.0

    @property
    def ties(self) -> int:
        """Texts that differ from a tie on."""
        return sum(m < TIE for m in self.margins)

    @property
    def wrong(self) -> int:
        """Texts that differ for no such reason."""
        return len(self.margins) - self.ties


def compare(
    target: PreTrainedModel,
    pair: Pair,
    policy: StopPolicy,
    tree: str | None,
    texts: Sequence[list[int]],
    expected: Sequence[list[int]],
    new: int,
) -> Compared:
    """Decode `texts` with one policy and tree, and hold the result against `expected`, the text of `target`."""
    speculator = Speculator(pair, policy, Settings(0.0, new, tree=tree))
    made = [speculator.generate(prompt) for prompt in texts]
    out = Compared(len(made))
    for prompt, generation, right in zip(texts, made, expected, strict=True):
        got = list(generation.tokens)
        if got == right:
            out.equal += 1
            continue
        first = next((i for i, (a, b) in enumerate(zip(got, right, strict=False)) if a != b), min(len(got), len(right)))
        out.margins.append(margin(target, [*prompt, *right[:first]]))
    facts = Tally(made).summary()
    out.accepted = facts["accepted"] / max(1, facts["verified"])
    return out


def pairs(
    names: Iterable[str], dtypes: Iterable[str], folder: Path | None
) -> Iterable[tuple[str, str, str, PreTrainedModel, Pair]]:
    """Yield (kind, attention, dtype, untouched target, pair) by engine; a pair from a folder comes last."""
    for name in names:
        for attention in ("eager",) if name in EAGER_ONLY else ("sdpa", "eager"):
            for dtype in dtypes:
                target = build(name, DTYPES[dtype], attention)
                draft = noisy(target)
                yield name, attention, dtype, target, join(target, draft)
                if dtype != "float64":  # no engine but the plain one multiplies it
                    yield name, attention, dtype, target, with_engine(join(copy.deepcopy(target), draft))
    if folder:
        for dtype in dtypes:
            plain_pair = load_pair(folder / "target", folder / "draft", dtype=dtype, engine="plain")
            for engine in ("plain", "auto") if dtype != "float64" else ("plain",):
                pair = load_pair(folder / "target", folder / "draft", dtype=dtype, engine=engine)
                yield "pair", "sdpa", dtype, plain_pair.target, pair


def sweep(names: Sequence[str] | None, quick: bool) -> list[causal_lms.Row]:
    """Print the table of the classes of transformers and return its rows."""
    logging.set_verbosity_error()  # of configurations that are no checkpoint's
    rows = []
    print(f"{'type':26} {'class':40} " + " ".join(f"{method:12}" for method in causal_lms.METHODS))
    for name in (causal_lms.QUICK if quick else causal_lms.names()) if names is None else names:
        row = causal_lms.sweep_class(name, noisy)
        rows.append(row)
        cells = " ".join(f"{row.cells.get(method, ''):12}" for method in causal_lms.METHODS)
        print(f"{row.name:26} {row.cls:40} {cells} {row.note}", flush=True)
    return rows


def main() -> int:
    """Run the command line and return its exit code."""
    parser = arguments(__doc__, "folder of a pair made by make_pair.py, compared as well")
    parser.add_argument("--only", nargs="+", choices=CONFIGS, help="kinds of model; default: all, three with --quick")
    parser.add_argument("--classes", nargs="*", metavar="TYPE", help="model types of the first table; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count, new = (2, 12) if options.quick else (8, 48)
    begin, rows = time.perf_counter(), []
    classes = sweep(options.classes, options.quick)
    print(
        f"{'kind':15} {'attention':9} {'dtype':8} {'engine':7} {'tree':25} {'policy':15} "
        f"{'equal':>7} {'ties':>4} {'accepted':>8}  margins"
    )
    kinds = options.only or (QUICK if options.quick else CONFIGS)
    for name, attention, dtype, target, pair in pairs(kinds, DTYPES, options.pair):
        texts = prompts(count, vocabulary=pair.vocabulary)
        expected = [plain(target, prompt, new) for prompt in texts]
        engine = pair.engines[0]
        for tree in SHAPES:
            for policy in POLICIES:
                cell = compare(target, pair, policy, tree, texts, expected, new)
                where = {"kind": name, "attention": attention, "dtype": dtype, "engine": engine}
                where |= {"tree": tree, "policy": policy.name}
                rows.append({**where, **asdict(cell), "ties": cell.ties, "wrong": cell.wrong})
                print(
                    f"{name:15} {attention:9} {dtype:8} {engine:7} {tree or 'chain':25} {policy.name:15} "
                    f"{cell.equal:3}/{cell.texts:3} {cell.ties:4} {cell.accepted:8.2f}  "
                    + " ".join(f"{m:.2g}" for m in cell.margins),
                    flush=True,
                )
    bars = Bars()
    bars.figures |= {"seconds": round(time.perf_counter() - begin, 1), "cells": len(rows)}
    for dtype, engine in sorted({(row["dtype"], row["engine"]) for row in rows}):
        some = [row for row in rows if (row["dtype"], row["engine"]) == (dtype, engine)]
        apart = [m for row in some for m in row["margins"]]
        bars.figures[f"{dtype} {engine}"] = {
            "texts": sum(row["texts"] for row in some),
            "equal": sum(row["equal"] for row in some),
            "ties": sum(row["ties"] for row in some),
            "largest_margin": max(apart, default=0.0),
        }
    built = [row for row in classes if row.cells]
    faults = sum(row.faults for row in classes)
    equal = sum(set(row.cells.values()) == {"equal"} for row in built)
    bars.figures |= {"classes": len(built), "equal in every way": equal, "not built": len(classes) - len(built)}
    bars.add("texts of classes that are wrong or end in an exception", faults, faults == 0, f"{faults}; none")
    wrong = sum(row["wrong"] for row in rows if row["dtype"] == "float32")
    wrong += sum(row["texts"] - row["equal"] for row in rows if row["dtype"] == "float64")
    bars.add("texts that differ without a tie", wrong, wrong == 0, f"{wrong}; none")
    compared = f"{len(built)} classes, and {len(rows)} cells of {count} texts of {new} tokens"
    details = {"rows": rows, "classes": [asdict(row) for row in classes]}
    return bars.finish(options, compared, whole=not options.only and options.classes is None, details=details)


if __name__ == "__main__":
    raise SystemExit(main())
