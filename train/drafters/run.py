"""`train_drafter`: the target's texts, a network fitted to them, its folder."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...collect.facts import facts
from ...collect.prompts.read import Prompt, fit
from ...decode.drafters.folder import TrainedDrafter, save_drafter
from ...decode.drafters.networks import KINDS, MAX_DEPTH, LayerNetwork, Shape, output_scale, scale_output
from ...decode.models.pair import Pair
from ...decode.models.placement import copy_to_host
from ...decode.models.view import hidden_width
from ...policies.arguments import check_limits
from ...policies.display import Progress, silent
from ...policies.errors import InputError, SpecstopWarning, close_match
from ...policies.files import prepare_output_dir
from ..heads.trainer import LAST, fit_module, make_trainer
from .acceptance import acceptance
from .initial import initialize
from .losses import SPARE
from .module import DrafterModule, TextsDataModule
from .texts import Texts, record_texts

DEPTH, BATCH, RATE = 4, 2, 1e-3
EPOCHS = {"medusa": 6, "hydra": 6, "ctc": 3, "layer": 6}
"""At most: what 300 texts of 200 tokens take a few minutes for on two cores; one of CTC costs six times one of Medusa."""

HELD_OUT = 10
"""One in so many files of texts is held out, one at least."""

KEPT_STATES = "texts"
"""The folder of recorded texts in a work folder."""


def train_drafter(
    pair: Pair,
    prompts: Sequence[Prompt],
    out: str | Path,
    kind: str,
    *,
    depth: int = DEPTH,
    max_new_tokens: int = 128,
    temperature: float = 0.7,
    seed: int = 0,
    epochs: int | None = None,
    batch_size: int = BATCH,
    learning_rate: float = RATE,
    trainer: Mapping[str, Any] | None = None,
    work: Path | None = None,
    resume: bool = False,
    long: str = "skip",
    overwrite: bool = False,
    progress: Progress = silent,
) -> TrainedDrafter:
    """Fit a drafter for a target, which stays as it is, and write its folder.

    The target decodes the prompts once, greedily and at a temperature; its texts and last hidden states are kept in files
    and read from there. The network with the least held-out loss is kept.

    Args:
        pair: whose target it is, loaded with `engine="plain"`; a draft is not needed.
        prompts: with unique ids.
        out: the folder to write.
        kind: medusa, hydra, ctc or layer.
        depth: tokens that it learns to propose.
        max_new_tokens: of each text.
        temperature: of half of the texts; 0 = all are greedy.
        seed: of texts, weights and order.
        epochs: maximum; None = `EPOCHS`.
        batch_size: texts in a step.
        learning_rate: its peak.
        trainer: arguments of `lightning.Trainer`.
        work: folder that keeps texts and checkpoints; None = a temporary one.
        resume: continue from the texts and checkpoints in `work`.
        long: what becomes of prompts that are too long; see `collect.prompts.tokens.fit`.
        overwrite: replace an older result there.
        progress: see `Progress`.

    Raises:
        InputError: an option is out of range, there are too few prompts, the engine hides the weights, or see
            `prepare_output_dir`.
    """
    check_asked(out, kind, depth, max_new_tokens, temperature, seed, work, overwrite)
    check_limits(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate)
    if pair.engines[0] != "plain":
        raise InputError("a drafter is trained beside the target's own weights: load the pair with --engine plain")
    _shape(pair, kind, depth)  # told before texts are recorded
    if len(prompts) < 2:
        raise InputError("--prompts: expected two prompts at least, one of them to hold out")
    chosen, ids = fit(list(prompts), pair.tokenizer, pair.readable - max_new_tokens, long)
    if len(chosen) < 2:
        raise InputError("--prompts: fewer than two are short enough for the target; give others, or --long left")
    begun = time.perf_counter()
    if work is not None and (work / LAST).exists() and not resume:
        raise InputError(f"--checkpoints: {work} has those of another run; pass --resume, or choose another folder")
    with tempfile.TemporaryDirectory() as temporary:
        folder = work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        make_trainer(folder, 1, trainer or {}, [])  # refuses wrong arguments before texts are recorded
        texts = record_texts(
            pair, list(zip(chosen, ids, strict=True)), folder / KEPT_STATES,
            max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, progress=progress,
        )  # fmt: skip
        recorded = time.perf_counter()
        deepest = _shape(pair, kind, depth).depth
        fitted, held_out = _long_enough(texts, deepest)
        # The caller may be in inference mode, in which tensors take no gradients.
        with torch.random.fork_rng(), torch.inference_mode(False), torch.enable_grad():
            torch.manual_seed(seed)
            network = new_network(pair, kind, depth)
            data = TextsDataModule(fitted, held_out, batch_size, seed)
            fit_module(
                DrafterModule(network, *_ends(pair), learning_rate), data,
                task=f"train {kind}", epochs=epochs or EPOCHS[kind], trainer=trainer, progress=progress, folder=folder,
                resume=resume,
            )  # fmt: skip
        network = network.cpu().requires_grad_(False).eval()
        accepted = acceptance(network, held_out, *_ends(pair))
    if accepted is None:
        warnings.warn(
            f"--prompts: no greedy text of those held out has {deepest + 1} new tokens, so acceptance is not "
            "measured; give prompts with longer answers",
            SpecstopWarning,
            stacklevel=2,
        )
    measured = {"acceptance": accepted.shares, "tokens per target call": accepted.tokens_a_call} if accepted else {}
    metrics = measured | {
        "seconds to record": round(recorded - begun, 1),
        "seconds to fit": round(time.perf_counter() - recorded, 1),
    }
    told: Mapping[str, Any] = {
        "prompts": len(chosen), "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, **facts(pair),
    }  # fmt: skip
    trained = TrainedDrafter(kind, network, pair.fingerprint["target"], told, metrics)
    save_drafter(trained, out)
    return trained


def check_asked(
    out: str | Path,
    kind: str,
    depth: int,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    work: Path | None,
    overwrite: bool,
) -> None:
    """Refuse what `train_drafter` can refuse before models are loaded; see there."""
    check_limits({"depth": 1}, depth=depth, temperature=temperature, seed=seed)
    check_limits({"max_new_tokens": depth + 3}, max_new_tokens=max_new_tokens)
    if kind not in KINDS:
        raise InputError(f"--kind: expected one of {', '.join(KINDS)}, not {kind!r}{close_match(kind, KINDS)}")
    prepare_output_dir(out, overwrite=overwrite, inputs=[work])


def _long_enough(texts: Texts, depth: int) -> tuple[Texts, Texts]:
    """Return texts to fit on and to hold out, those left out at whose positions not all depths can be compared.

    Raises:
        InputError: on one side there is none.
    """
    least = depth + 3  # at the first position token 0 was read and token 1 drawn; one more position follows it
    held_out = max(1, len(texts.files) // HELD_OUT)
    lengths = [[len(text.tokens) for text in texts.read(number)] for number in range(len(texts.files))]
    every = sum(map(len, lengths))
    found = [sum(n >= least for file in part for n in file) for part in (lengths[:-held_out], lengths[-held_out:])]
    if not all(found):
        raise InputError(
            f"--prompts: {sum(found)} of {every} texts have the {least} tokens, prompt included, that --depth asks for, and "
            "some are wanted to fit on and to hold out; give other prompts or less --depth"
        )
    if sum(found) < every:
        told = f"{every - sum(found)} of {every} texts are shorter than {least} tokens and are left out"
        warnings.warn(told, SpecstopWarning, stacklevel=3)
    return Texts(texts.files, least).divided(held_out)


def _ends(pair: Pair) -> tuple[Any, Any]:
    """Return copies of the target's embeddings and of what makes its logits, float32 on the CPU, where Lightning begins."""
    modules = pair.target.get_input_embeddings(), pair.target.get_output_embeddings()
    embedding, output = (copy_to_host(module).requires_grad_(False) for module in modules)
    return embedding, scale_output(output, pair.target.config)


def new_network(pair: Pair, kind: str, depth: int) -> Any:
    """Return a network that is still to be fitted, of the target's sizes."""
    network: Any = KINDS[kind](_shape(pair, kind, depth))
    # The output layers of heads compute logits without a factor: they begin in the scale of the target's logits.
    weight = copy_to_host(pair.target.get_output_embeddings()).weight.detach()[: pair.vocabulary]
    initialize(network, weight * output_scale(pair.target.config)[0])
    return network


def _shape(pair: Pair, kind: str, depth: int) -> Shape:
    """Return the sizes of a network of the target's; `InputError` where one is out of range."""
    spare = SPARE if kind == "ctc" else 0
    if depth > MAX_DEPTH - spare:
        raise InputError(f"--depth: expected at most {MAX_DEPTH - spare} with --kind {kind}, not {depth}")
    config, hidden = pair.target.config.get_text_config(), hidden_width(pair.target)
    shape = Shape(hidden, pair.vocabulary, depth + spare)
    if not issubclass(_class(kind), LayerNetwork):
        return shape
    inner = int(getattr(config, "intermediate_size", 0) or 4 * hidden)
    return dataclasses.replace(shape, intermediate=inner, attention_heads=_heads(hidden, config))


def _class(kind: str) -> type:
    found: Any = KINDS[kind]
    return found if isinstance(found, type) else object


def _heads(hidden: int, config: Any) -> int:
    """Return the target's number of attention heads, or the next smaller one that divides the width evenly."""
    heads = int(config.num_attention_heads)
    # Twice, since rotary positions turn one half of each head against the other.
    while hidden % (2 * heads):
        heads -= 1
    return heads
