"""`train_drafter`: the target's texts, a network fitted to them, its folder."""

from __future__ import annotations

import copy
import dataclasses
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from ...collect.prompts import Prompt, tokenize_prompts
from ...collect.run import environment_facts
from ...decode.drafters.folder import TrainedDrafter, save_drafter
from ...decode.drafters.networks import (
    KINDS,
    MAX_DEPTH,
    HydraHeads,
    LayerNetwork,
    MedusaHeads,
    Shape,
    output_scale,
    scale_output,
)
from ...decode.drafters.spec import DRAFTERS
from ...decode.loop import Speculator
from ...decode.models.pair import Pair
from ...decode.models.placement import copy_to_host
from ...decode.models.view import hidden_width
from ...decode.settings import Settings
from ...policies.arguments import check_limits
from ...policies.display import Progress, silent
from ...policies.errors import InputError, close_match
from ...policies.files import prepare_output_dir
from ...policies.fixed import FixedLength
from ..heads.trainer import FitModule, fit_module, make_trainer
from .proposals import SPARE, drafter_loss
from .texts import Batch, Item, Texts, prompts_by_file, record_texts

DEPTH, BATCH, RATE = 4, 2, 1e-3
EPOCHS = {"medusa": 6, "hydra": 6, "ctc": 3, "layer": 6}
"""Maxima: a few minutes for 300 texts of 200 tokens on two cores; an epoch of CTC costs six times one of Medusa."""

HELD_OUT = 10
"""One of this number of text files is held out, at least one."""

KEPT_STATES = "texts"
"""The folder of recorded texts in a work folder."""

WARM_UP, DECAY, CLIP = 0.05, 0.01, 1.0


def train_drafter(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    kind: str,
    *,
    depth: int = DEPTH,
    outputs: int = 0,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    seed: int = 0,
    epochs: int | None = None,
    batch_size: int = BATCH,
    learning_rate: float = RATE,
    trainer: Mapping[str, Any] | None = None,
    work: Path | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> TrainedDrafter:
    """Fit a drafter for a target, which does not change, and write its folder.

    The target decodes the prompts once, greedily and at a temperature; its texts and last hidden states are kept in files
    and read from there. The network with the least held-out loss is kept. Its metrics are the acceptance by depth and the
    tokens per target call of greedy drafts on the held-out prompts, in the loop.

    Args:
        pair: with the target, loaded with `engine="plain"`; a draft is not needed.
        prompts: with unique ids; those that are too long for the target are left out.
        out: the folder to write.
        kind: medusa, hydra, ctc or layer.
        depth: tokens that it learns to propose.
        outputs: a layer proposes this number of tokens only, the most frequent ones of the texts; 0 = all tokens.
        max_new_tokens: of each text.
        temperature: of half of the texts; 0 = all are greedy.
        seed: of texts, weights and order.
        epochs: maximum; None = `EPOCHS`.
        batch_size: texts in a step.
        learning_rate: its peak, after a short warm-up and before a cosine decay.
        trainer: arguments of `lightning.Trainer`.
        work: folder that keeps texts and checkpoints, from which an interrupted run continues; None = a temporary one.
        overwrite: replace an older result there.
        progress: see `Progress`.

    Raises:
        InputError: an option is out of range, there are too few prompts, the engine hides the weights, or see
            `prepare_output_dir`.
    """
    check_arguments(out, kind, depth, outputs, max_new_tokens, temperature, seed, work, overwrite)
    check_limits(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    if pair.engines[0] != "plain":
        raise InputError("a drafter is trained with the weights of the target: load the pair with --engine plain")
    deepest = _shape(pair, kind, depth, outputs).depth
    items = _readable_prompts(pair, prompts, max_new_tokens)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_trainer(folder, 1, trainer or {}, [])  # refuses wrong arguments before texts are recorded
        texts = record_texts(
            pair, items, folder / KEPT_STATES, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed,
            progress=progress,
        )  # fmt: skip
        recorded = time.perf_counter()
        training, held_out = _split(texts, deepest)
        network = _fit_network(
            pair, kind, depth, outputs, training, held_out, seed, batch_size, learning_rate, epochs=epochs or EPOCHS[kind],
            trainer={"gradient_clip_val": CLIP, **(trainer or {})}, progress=progress, folder=folder,
        )  # fmt: skip
    fitted = time.perf_counter()
    unseen = [ids for group in prompts_by_file(items)[-len(held_out.files) :] for _, ids in group]
    seconds = {"seconds to record": round(recorded - begun, 1), "seconds to fit": round(fitted - recorded, 1)}
    metrics = acceptance(pair, kind, network, unseen, depth, max_new_tokens) | seconds
    provenance: Mapping[str, Any] = {
        "prompts": len(items), "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed,
        **environment_facts(pair),
    }  # fmt: skip
    trained = TrainedDrafter(kind, network, pair.fingerprint["target"], provenance, metrics)
    save_drafter(trained, out)
    return trained


def check_arguments(
    out: str | Path,
    kind: str,
    depth: int,
    outputs: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    work: Path | None,
    overwrite: bool,
) -> None:
    """Raise the errors of `train_drafter` that need no model."""
    check_limits({"depth": 1, "outputs": 0}, depth=depth, outputs=outputs, temperature=temperature, seed=seed)
    check_limits({"max_new_tokens": depth + 3}, max_new_tokens=max_new_tokens)
    if kind not in KINDS:
        raise InputError(f"--kind: expected one of {', '.join(KINDS)}, not {kind!r}{close_match(kind, KINDS)}")
    if outputs and kind != "layer":
        raise InputError(f"--outputs: only --kind layer proposes a part of the tokens, not {kind}; leave it out")
    prepare_output_dir(out, overwrite=overwrite, inputs=[work])


def _readable_prompts(pair: Pair, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Item]:
    """Return the prompts that the target can read, with their tokens; raise `InputError` for fewer than two."""
    if len(prompts) < 2:
        raise InputError("--prompts: expected two prompts at least, one of them to hold out")
    fitting, ids = tokenize_prompts(list(prompts), pair.tokenizer, pair.readable - max_new_tokens)
    if len(fitting) < 2:
        raise InputError("--prompts: fewer than two are short enough for the target; use shorter prompts")
    return list(zip(fitting, ids, strict=True))


def _split(texts: Texts, depth: int) -> tuple[Texts, Texts]:
    """Return texts to fit on and to hold out, without those that are too short to compare all depths at some position.

    Raises:
        InputError: one of the two would be empty.
    """
    shortest = depth + 3  # at the first position token 0 was read and token 1 drawn; one more position follows it
    held_out = max(1, len(texts.files) // HELD_OUT)
    parts = Texts(texts.files[:-held_out], shortest), Texts(texts.files[-held_out:], shortest)
    if not all(map(len, parts)):
        raise InputError(
            f"--prompts: {sum(map(len, parts))} of {len(texts)} texts have the {shortest} tokens, prompt included, that "
            "--depth requires; use longer prompts or a smaller --depth"
        )
    return parts


def _fit_network(
    pair: Pair, kind: str, depth: int, outputs: int, training: Texts, held_out: Texts, seed: int, batch_size: int,
    learning_rate: float, **options: Any,
) -> Any:  # fmt: skip
    """Return a network fitted to texts, on the CPU; `options` are those of `fit_module`."""

    def loss(network: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        # Lightning moves network and batches to its device. The target's layers are not in the module, nor in checkpoints.
        for end in ends:
            end.to(batch.tokens.device)
        return drafter_loss(network, batch, *ends), len(batch.tokens)

    # The caller may be in inference mode, in which tensors take no gradients.
    with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        kept = training.frequent_tokens(outputs, pair.vocabulary) if outputs else None
        network, ends = new_network(pair, kind, depth, kept), target_ends(pair)
        order = torch.Generator().manual_seed(seed)
        fit_module(
            FitModule(network, loss, warm_up_and_decay, lr=learning_rate, betas=(0.9, 0.95), weight_decay=DECAY),
            DataLoader(training, batch_size, shuffle=True, collate_fn=Batch.of, generator=order),
            DataLoader(held_out, batch_size, collate_fn=Batch.of),
            task=f"train {kind}",
            **options,
        )
    return network.cpu().requires_grad_(False).eval()


def warm_up_and_decay(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Return the lower of a line up and a cosine over all steps. `OneCycleLR` could not be resumed with more epochs."""
    warm_up = max(1, int(WARM_UP * steps))

    def factor(step: int) -> float:
        return min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

    return LambdaLR(optimizer, factor)


def acceptance(
    pair: Pair, kind: str, network: Any, prompts: Sequence[Sequence[int]], depth: int, max_new_tokens: int
) -> dict[str, Any]:
    """Return the acceptance of a drafter in greedy decoding, from rounds of full depth; empty if there are none.

    `acceptance` is by depth the share of rounds that accept so many tokens or more, and `tokens per target call` their
    mean number of committed tokens.
    """
    drafting = TrainedDrafter(kind, copy.deepcopy(network), pair.fingerprint["target"]).network_for(pair)
    build: Any = DRAFTERS.load(kind)
    settings = Settings(0.0, max_new_tokens, max_depth=depth)
    speculator = Speculator(pair, FixedLength(depth), settings, drafters=[build(pair, drafting)])
    rounds = [one for prompt in prompts for one in speculator.generate(prompt).rounds if one.drafted == depth]
    if not rounds:
        return {}
    accepted = np.array([one.accepted for one in rounds])
    shares = [float((accepted >= j).mean()) for j in range(1, depth + 1)]
    return {"acceptance": shares, "tokens per target call": float(accepted.mean()) + 1.0}


def target_ends(pair: Pair) -> tuple[Any, Any]:
    """Return copies of the target's embeddings and of the module that computes its logits, float32 on the CPU."""
    modules = pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    embedding, output = (copy_to_host(module).requires_grad_(False) for module in modules)
    return embedding, scale_output(output, pair.target.config)


def new_network(pair: Pair, kind: str, depth: int, kept: Tensor | None = None) -> Any:
    """Return a network with the sizes of the target, before training; a layer that can only propose `kept`, if given."""
    network: Any = KINDS[kind](_shape(pair, kind, depth, 0 if kept is None else len(kept)))
    if kept is not None:
        network.kept.copy_(kept)
    # The output layers of heads compute logits without a factor: they begin in the scale of the target's logits.
    weight = copy_to_host(pair.target.get_output_embeddings()).weight.detach()[: pair.vocabulary]
    initialize(network, weight * output_scale(pair.target.config)[0])
    return network


def _shape(pair: Pair, kind: str, depth: int, outputs: int) -> Shape:
    """Return the sizes of a network for a target; raise `InputError` if one is out of range."""
    spare = SPARE if kind == "ctc" else 0
    if depth > MAX_DEPTH - spare:
        raise InputError(f"--depth: expected at most {MAX_DEPTH - spare} with --kind {kind}, not {depth}")
    if outputs >= pair.vocabulary:
        raise InputError(f"--outputs: expected fewer than the {pair.vocabulary} tokens of the target, not {outputs}")
    config, hidden = pair.target.config.get_text_config(), hidden_width(pair.target)
    shape = Shape(hidden, pair.vocabulary, depth + spare)
    network: Any = KINDS[kind]
    if not (isinstance(network, type) and issubclass(network, LayerNetwork)):
        return shape
    heads = int(config.num_attention_heads)
    # A divisor of the width, twice: rotary positions rotate one half of each head against the other.
    while hidden % (2 * heads):
        heads -= 1
    inner = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    return dataclasses.replace(shape, intermediate=inner, attention_heads=heads, outputs=outputs)


@torch.no_grad()
def initialize(network: MedusaHeads | LayerNetwork, output: Tensor) -> None:
    """Initialize a network near the best prediction without training.

    The output layers of heads are the target's, after blocks that pass the state. A layer is near the identity of the state.

    Args:
        network: with random weights.
        output: [V, H] weights of the target's output layer.
    """
    width = network.shape.hidden
    if isinstance(network, LayerNetwork):
        network.enter.weight[:, width:] *= 0.1  # the columns that read the state
        network.enter.weight[:, width:].diagonal().add_(1.0)
        for layer in (network.leave, network.down):
            layer.weight.mul_(0.1)
        if network.shape.outputs:
            network.output.weight.copy_(output[network.kept])
        return
    for weight in network.blocks.parameters():
        weight.zero_()
    for weight in network.outputs.parameters():
        weight.copy_(output)
    if isinstance(network, HydraHeads):
        for weight in network.residuals.parameters():
            weight.zero_()
            weight[:, :width].fill_diagonal_(1.0)
