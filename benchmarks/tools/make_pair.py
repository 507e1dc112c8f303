"""Train a target and a draft on Python source text, and write the pair as the package ships it.

    python benchmarks/tools/make_pair.py --out pairs/large
    python benchmarks/tools/make_pair.py --out pairs/large --ship train/shipped

The target learns the next token of the text, the draft the target's distribution. All weights are rounded to int8
with one scale per row before they are measured. Prompts come from files that neither model has seen. The table has
the acceptance by depth on the test prompts. The last line is one JSON object. `--smoke` trains for two steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from safetensors.torch import save_file
from specstop.collect import collect, read_prompts
from specstop.decode import load_pair
from specstop.policies.errors import SpecstopError
from specstop.policies.files import prepare_output_dir, staged_folder, write_manifest
from specstop.train.shipped_pair import WEIGHTS, expand_weights, quantize_weights
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
MAX_DEPTH = 8
"""The largest depth at which acceptance is measured."""

# Folders of the standard library without library text: tests, installed packages, generated tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
SKIPPED_PREFIXES = ("config-", "python")


@dataclass(frozen=True)
class ModelShape:
    """Widths of one Llama model."""

    hidden: int
    layers: int
    heads: int
    intermediate: int

    def build(self, vocabulary: int, positions: int) -> LlamaForCausalLM:
        """Return a freshly initialised model with tied embeddings."""
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            # The library's default of 0.02 suits wide models.
            initializer_range=self.hidden**-0.5,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Recipe:
    """Settings that decide the weights.

    Attributes:
        target: Shape of the target.
        draft: Shape of the draft.
        shallow_layers: Layers of the network that is trained first and then stacked to the target's depth.
        shallow_steps: Steps of that network, on windows of `shallow_length` tokens.
        steps: Steps of the whole target, on windows of `length` tokens.
        draft_steps: Steps of the draft.
        generated_rows: Texts that the target generates for the draft to learn from.
        vocabulary: Entries of the tokenizer.
        positions: `max_position_embeddings` of both models.
        tokens_per_step: Tokens of one training step.
        rate: Peak learning rate of matrices (Muon).
        other_rate: Peak learning rate of embeddings and norms (AdamW).
        held_out: Share of the files held out for prompts.
        prompts: Training and test prompts.
        prompt_tokens: Least and most tokens of a prompt.
        seed: Decides split, weights, batches and prompts.
    """

    target: ModelShape
    draft: ModelShape
    shallow_layers: int
    shallow_steps: int
    steps: int
    draft_steps: int
    generated_rows: int
    vocabulary: int = 2048
    positions: int = 2048
    shallow_length: int = 256
    length: int = 512
    tokens_per_step: int = 4096
    rate: float = 0.02
    other_rate: float = 3e-3
    held_out: float = 0.12
    prompts: tuple[int, int] = (800, 800)
    prompt_tokens: tuple[int, int] = (64, 160)
    seed: int = 0


RECIPE = Recipe(
    target=ModelShape(hidden=256, layers=12, heads=4, intermediate=704),
    draft=ModelShape(hidden=128, layers=2, heads=2, intermediate=352),
    shallow_layers=4,
    shallow_steps=1600,
    steps=1700,
    draft_steps=2200,
    generated_rows=3072,
)


# Text


@dataclass(frozen=True)
class Document:
    """One file; `group` is the first part of its path."""

    name: str
    text: str
    group: str


def stdlib_documents() -> list[Document]:
    """Return the source files of the running Python's standard library, tests excluded, in a fixed order."""
    root, documents = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        skipped = any(part in SKIPPED_FOLDERS or part.startswith(SKIPPED_PREFIXES) for part in parts[:-1])
        if skipped or path.suffix != ".py" or not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            documents.append(Document("/".join(parts), text, Path(parts[0]).stem))
    return documents


def split_documents(
    documents: Sequence[Document], recipe: Recipe
) -> tuple[list[Document], list[Document], list[Document]]:
    """Return the documents to learn from, those of training prompts and those of test prompts; the sets are disjoint."""
    order = list(documents)
    random.Random(recipe.seed).shuffle(order)
    held_out = max(2, round(recipe.held_out * len(order)))
    train_prompts = max(1, round(0.6 * held_out))
    return order[held_out:], order[:train_prompts], order[train_prompts:held_out]


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with `vocabulary` entries, the end-of-text token included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, bos_token=END_OF_TEXT
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document]) -> torch.Tensor:
    """Return all documents as one stream of token ids, each followed by the end-of-text token."""  # [tokens]
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch([document.text for document in documents]):
        stream.extend(encoding.ids)
        stream.append(tokenizer.eos_token_id)
    return torch.tensor(stream)


def cut_prompts(
    tokenizer: PreTrainedTokenizerFast, documents: Sequence[Document], count: int, recipe: Recipe
) -> list[dict[str, str]]:
    """Return up to `count` prompts, from all documents in turn; pieces of one document do not overlap."""
    rng = random.Random(recipe.seed)
    pieces = [_pieces(tokenizer, document, recipe.prompt_tokens, rng) for document in documents]
    prompts: list[dict[str, str]] = []
    for turn in range(max(map(len, pieces))):
        for document, texts in zip(documents, pieces, strict=True):
            if turn < len(texts) and len(prompts) < count:
                prompts.append({"id": f"{document.name}#{turn}", "prompt": texts[turn], "group": document.group})
    return prompts


def _pieces(
    tokenizer: PreTrainedTokenizerFast, document: Document, tokens: tuple[int, int], rng: random.Random
) -> list[str]:
    """Cut one document into pieces that start at a line, in a seeded order."""
    text, pieces, begin = document.text, [], 0
    while begin < len(text):
        length = rng.randint(*tokens)
        # Tokens rarely exceed 16 characters.
        encoding = tokenizer.backend_tokenizer.encode(text[begin : begin + 16 * length])
        if len(encoding.ids) < length:
            break
        end = begin + encoding.offsets[length - 1][1]
        pieces.append(text[begin:end])
        begin = text.find("\n", end) + 1 or len(text)
    rng.shuffle(pieces)
    return pieces


# Training


class LanguageModelTraining(lightning.LightningModule):
    """Train `student` on the next token, or on the distribution of `teacher` if there is one."""

    def __init__(
        self, student: LlamaForCausalLM, recipe: Recipe, steps: int, teacher: LlamaForCausalLM | None = None
    ) -> None:
        super().__init__()
        self.automatic_optimization = False  # two optimizers
        self.student, self.recipe, self.steps = student, recipe, steps
        self._teacher = [teacher]  # in a list: its weights are not part of this module
        self.losses: list[float] = []

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[Any]]:
        """Return Muon for the matrices of the layers, AdamW for the rest, and their schedules."""
        matrices = [w for name, w in self.student.named_parameters() if w.ndim == 2 and "embed" not in name]
        others = [w for name, w in self.student.named_parameters() if w.ndim != 2 or "embed" in name]
        optimizers = [
            torch.optim.Muon(matrices, lr=self.recipe.rate, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(others, lr=self.recipe.other_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        ]
        warmup_steps = max(1, self.steps // 20)

        def share(step: int) -> float:
            return max(0.0, min((step + 1) / warmup_steps, (self.steps - step) / (self.steps - warmup_steps)))

        return optimizers, [torch.optim.lr_scheduler.LambdaLR(optimizer, share) for optimizer in optimizers]

    def training_step(self, batch: list[torch.Tensor], _: int) -> None:
        """Take one step on windows of tokens [batch, length + 1]."""
        (tokens,) = batch
        inputs, (teacher,) = tokens[:, :-1], self._teacher
        logits = self.student(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
        if teacher is None:
            loss = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        else:
            with torch.no_grad():
                teacher_logits = teacher(input_ids=inputs, use_cache=False).logits.float().flatten(0, 1)
            loss = functional.kl_div(
                logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="batchmean", log_target=True
            )
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, self.lr_schedulers(), strict=True):  # type: ignore[arg-type]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        self.losses.append(float(loss.detach()))
        if len(self.losses) % 50 == 0:
            print(f"step {len(self.losses)} of {self.steps}: loss {tail_mean(self.losses):.3f}", flush=True)


def fit(module: LanguageModelTraining, windows: torch.Tensor) -> float:
    """Run the steps of `module` on shuffled windows [n, length + 1] and return the last mean loss."""
    batch = max(1, module.recipe.tokens_per_step // (windows.shape[1] - 1))
    module.student.train()
    module.student.compile()
    loader = DataLoader(TensorDataset(windows), batch_size=min(batch, len(windows)), shuffle=True, drop_last=True)
    lightning.Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_steps=2 * module.steps,  # Lightning counts each optimizer's steps
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, loader)
    module.student.train(False)
    return tail_mean(module.losses)


def tail_mean(losses: Sequence[float]) -> float:
    """Return the mean of the last twentieth."""
    last = losses[-max(1, len(losses) // 20) :]
    return sum(last) / len(last)


def windows_of(stream: torch.Tensor, length: int) -> torch.Tensor:
    """Return the stream as windows that share one token with the next."""  # [n, length + 1]
    return stream.unfold(0, length + 1, length)


def train_target(stream: torch.Tensor, recipe: Recipe) -> tuple[LlamaForCausalLM, float]:
    """Train a shallow network, stack copies of it to the target's depth, and train the whole; return it and its loss."""
    shallow = dataclasses.replace(recipe.target, layers=recipe.shallow_layers).build(
        recipe.vocabulary, recipe.positions
    )
    fit(LanguageModelTraining(shallow, recipe, recipe.shallow_steps), windows_of(stream, recipe.shallow_length))
    target = recipe.target.build(recipe.vocabulary, recipe.positions)
    target.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    target.model.norm.load_state_dict(shallow.model.norm.state_dict())
    # Repeating the trained blocks is a better start for a deep network than new layers (Du et al. 2024, G_stack).
    for index, layer in enumerate(target.model.layers):
        layer.load_state_dict(shallow.model.layers[index % recipe.shallow_layers].state_dict())
    return target, fit(LanguageModelTraining(target, recipe, recipe.steps), windows_of(stream, recipe.length))


def train_draft(target: LlamaForCausalLM, stream: torch.Tensor, recipe: Recipe) -> tuple[LlamaForCausalLM, float]:
    """Train the draft on the text `stream` and continuations of it by the target; return it with its last mean loss."""
    draft = recipe.draft.build(recipe.vocabulary, recipe.positions)
    windows = windows_of(stream, recipe.shallow_length)
    generated = generate_text(target, windows, recipe.generated_rows)
    target.compile()  # now that all text is generated: `generate` would compile it for every length
    # Twice as much text of the target as of the standard library: what is drafted later is text of the target.
    repeated = generated.repeat(max(1, 2 * len(windows) // len(generated)), 1)
    module = LanguageModelTraining(draft, recipe, recipe.draft_steps, teacher=target)
    return draft, fit(module, torch.cat([windows, repeated]))


def generate_text(target: LlamaForCausalLM, windows: torch.Tensor, rows: int, batch: int = 128) -> torch.Tensor:
    """Let the target continue the first half of `rows` windows, greedily and sampled in turn."""  # [rows, length + 1]
    half = windows.shape[1] // 2
    chosen = windows[torch.randperm(len(windows))[:rows]]
    texts = []
    for turn, part in enumerate(chosen.split(batch)):
        temperature = (0.0, 0.5, 0.0, 1.0)[turn % 4]
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        prompt = part[:, :half]
        with torch.autocast("cpu", torch.bfloat16):
            text = target.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                min_length=windows.shape[1],
                max_length=windows.shape[1],
                **sampling,
            )
        texts.append(text)
        print(f"text of the target: {sum(map(len, texts))} of {len(chosen)}", flush=True)
    return torch.cat(texts)


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return the model with the weights that its shipped form expands to."""
    rounded = type(model)(model.config)
    rounded.load_state_dict(expand_weights(quantize_weights(model.state_dict())))
    return rounded.train(False)


def make_pair(documents: Sequence[Document], recipe: Recipe, out: Path) -> None:
    """Train tokenizer, target and draft and write the pair's folder, whole or not at all.

    Args:
        documents: The text; a seeded share of it is held out for prompts.
        recipe: Settings that decide the weights.
        out: The folder to write: `target/`, `draft/`, `prompts-train.jsonl`, `prompts-test.jsonl` and `pair.json`.
    """
    started = time.perf_counter()
    learn, train_documents, test_documents = split_documents(documents, recipe)
    lightning.seed_everything(recipe.seed, verbose=False)
    tokenizer = train_tokenizer((document.text for document in learn), recipe.vocabulary)
    stream = encode(tokenizer, learn)
    network, loss = train_target(stream, recipe)
    network = round_weights(network)
    draft, draft_loss = train_draft(network, stream, recipe)
    with staged_folder(out) as stage:
        for name, model in (("target", network), ("draft", round_weights(draft))):
            model.save_pretrained(stage / name)
            tokenizer.save_pretrained(stage / name)
        for name, sources, count in zip(
            ("train", "test"), (train_documents, test_documents), recipe.prompts, strict=True
        ):
            prompts = cut_prompts(tokenizer, sources, count, recipe)
            lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts)
            (stage / f"prompts-{name}.jsonl").write_text(lines, encoding="utf-8")
        described = {
            "recipe": dataclasses.asdict(recipe),
            "parameters": {"target": network.num_parameters(), "draft": draft.num_parameters()},
            "text_tokens": len(stream),
            "losses": {"target_cross_entropy": loss, "draft_divergence": draft_loss},
            "seconds": round(time.perf_counter() - started),
            "versions": {
                "python": platform.python_version(),
                **{library.__name__: str(library.__version__) for library in (torch, transformers, lightning)},
            },
        }
        (stage / "pair.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


# Measuring


def acceptance(pair: Path, prompts: int, tokens: int) -> list[dict[str, Any]]:
    """Measure greedy acceptance by depth on test prompts, with a round from every position of the target's text.

    Returns:
        A row per depth k: P(A >= k), P(A >= k | A >= k - 1), and the number of rounds.
    """
    models = load_pair(pair / "target", pair / "draft")
    with tempfile.TemporaryDirectory() as folder:
        texts = read_prompts(pair / "prompts-test.jsonl", prompts)
        trace = collect(models, texts, Path(folder) / "trace", depth=MAX_DEPTH, max_new_tokens=tokens)
        return list(trace.acceptance_by_depth())


# Shipping


def ship(pair: Path, out: Path, command: str, rates: Sequence[dict[str, Any]]) -> None:
    """Write a pair as package data: int8 weights, one tokenizer, prompts and a model card."""
    with staged_folder(out) as stage:
        for name in ("target", "draft"):
            (stage / name).mkdir()
            weights = AutoModelForCausalLM.from_pretrained(pair / name).state_dict()
            save_file(quantize_weights(weights), stage / name / WEIGHTS)
            for file in ("config.json", "generation_config.json"):
                (stage / name / file).write_bytes((pair / name / file).read_bytes())
        tokenizer = ("target/tokenizer.json", "target/tokenizer_config.json")
        for file in (*tokenizer, "prompts-train.jsonl", "prompts-test.jsonl", "pair.json"):
            (stage / Path(file).name).write_bytes((pair / file).read_bytes())
        (stage / "README.md").write_text(card(json.loads((pair / "pair.json").read_text()), command, rates))


CARD = """---
license: apache-2.0
library_name: transformers
tags: [speculative-decoding]
---

# The pair that ships with specstop

Two Llama models with one byte-level BPE tokenizer of {0[recipe][vocabulary]} entries, for demonstrations, tests and
benchmarks of speculative decoding. They continue Python source text and have no other use.

- Target: {0[recipe][target][layers]} layers of width {0[recipe][target][hidden]}, {0[parameters][target]:,} parameters.
- Draft: {0[recipe][draft][layers]} layers of width {0[recipe][draft][hidden]}, {0[parameters][draft]:,} parameters,
  distilled.
- Weights: int8 with one bfloat16 scale per row. `specstop.shipped_pair()` expands them to float32 in two
  folders that `from_pretrained` loads.

## Training data

The source files of the standard library of Python without its tests: {0[text_tokens]:,} tokens, PSF License Version 2,
copyright Python Software Foundation. The prompts are pieces of files of that library that neither model was trained on.
Training and test prompts come from different files.

## Recipe

    {command}

Seed {0[recipe][seed]}; {versions}; {0[seconds]} s on two CPU cores. Final losses (nats per token): {losses}.

## Greedy acceptance on the test prompts

{rounds:,} rounds, one from every position of the target's text.

| depth j | P(A >= j) | P(A >= j given A >= j - 1) |
|---|---|---|
{rows}"""


def card(described: dict[str, Any], command: str, rates: Sequence[dict[str, Any]]) -> str:
    """Return the model card of a pair."""
    rows = "".join(f"| {row['depth']} | {row['accepted']:.3f} | {row['conditional']:.3f} |\n" for row in rates)
    versions, losses = (
        ", ".join(f"{name} {value}" for name, value in described[key].items()) for key in ("versions", "losses")
    )
    return CARD.format(
        described, command=command, versions=versions, losses=losses, rounds=rates[0]["rounds"], rows=rows
    )


def main() -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pair; an existing pair is measured")
    parser.add_argument("--seed", type=int, default=0, help="seed of split, weights and batches")
    parser.add_argument("--ship", type=Path, help="folder to write the package data to")
    parser.add_argument("--smoke", action="store_true", help="train for two steps, to see that the script runs")
    options = parser.parse_args()
    recipe = dataclasses.replace(RECIPE, seed=options.seed)
    if options.smoke:
        few = {"shallow_steps": 2, "steps": 2, "draft_steps": 2, "generated_rows": 8}
        recipe = dataclasses.replace(recipe, **few)
    transformers.logging.disable_progress_bar()
    try:
        if not (options.out / "pair.json").is_file():
            prepare_output_dir(options.out, overwrite=False, inputs=[])
            make_pair(stdlib_documents()[: 60 if options.smoke else None], recipe, options.out)
    except SpecstopError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rates = acceptance(options.out, prompts=4 if options.smoke else 100, tokens=32 if options.smoke else 160)
    print(f"{'depth':>5} {'P(A >= depth)':>14} {'given the depth before':>23}")
    for row in rates:
        print(f"{row['depth']:>5} {row['accepted']:>14.3f} {row['conditional'] or 0.0:>23.3f}")
    files = [path.relative_to(options.out).as_posix() for path in options.out.rglob("*") if path.is_file()]
    write_manifest(options.out, files)
    if options.ship is not None:
        ship(options.out, options.ship, f"python benchmarks/tools/make_pair.py --seed {recipe.seed} --out pair", rates)
    print(json.dumps({"out": str(options.out), "acceptance": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
