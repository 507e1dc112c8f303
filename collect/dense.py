"""The dense collector: the target's text once, then the draft unrolled from every position of it at once.

Under every lossless verification the text has the target's distribution whatever the policy, so one plain text contains
every anchor that any policy can visit. Under `match` the labels compare with the text, exact path by path; under `rejection`
and `block` drafts and acceptances are drawn given the text, exact in law (`given_text`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor

from ..decode.models.cache import CachedModel
from ..decode.models.outputs import check_rows, stored
from ..decode.models.pair import Pair
from ..decode.models.view import hidden_width
from ..decode.plain import plain_texts
from ..decode.settings import Settings
from ..decode.summaries import summarise, truncation_lead
from ..decode.topology import Topology
from ..decode.verify.modes import Block, Match, Verification, find_mode, resolve_mode
from ..decode.verify.noise import match_scores
from ..decode.verify.sampler import Sampler
from ..policies.contract import Array
from ..policies.counter_rng import mix as scramble
from ..policies.errors import InputError
from ..policies.features import (
    ANCHOR_FEATURES,
    BOUND,
    CHAIN_FEATURES,
    DRAFT_HIDDEN,
    TARGET_HIDDEN,
    TREE_FEATURES,
    Columns,
    DrawnTokens,
)
from ..policies.fixed import FixedLength
from .completions import CompletionIds, completed_texts
from .given_text import KeyedDraws
from .proposals import Proposals, Shape, TargetText
from .schema import GIVEN_TEXT, PromptTask

MEMORY_BYTES = 1 << 28
"""Default budget for rows as wide as the vocabulary."""

BYTES_PER_SCORE = 48
"""Peak bytes per row and token of vocabulary while features are computed (logits, noise, scores, softmax)."""

_MOST_ROWS = {"cpu": 160, "cuda": 2048}
"""Rows of one forward: more of them attend to more masked columns, fewer need more calls."""

_MIX_SALT = 0x317ED


def memory_budget(device: torch.device) -> int:
    """Return the default budget in MiB: a share of the free memory. Weights and caches, on the CPU other processes too, take
    the rest; beyond the upper limits all texts of a batch are side by side and nothing is gained."""
    if device.type == "cuda":
        return min(max(torch.cuda.mem_get_info(device)[0] >> 22, 64), 16_384)
    return min(max(psutil.virtual_memory().available >> 24, 64), 1_024) if device.type == "cpu" else 256


def node_features(tree: Topology, verification: str = "match") -> tuple[str, ...]:
    """Return the names of the features that are recorded at each node of a tree under a verification."""
    names = CHAIN_FEATURES if tree.is_chain else TREE_FEATURES
    return names if verification == "match" else tuple(name for name in names if not name.startswith("noisy_"))


def anchor_columns(rows: Tensor, anchor: Sequence[int], before: Sequence[int]) -> Array:
    """Return [n, F] float32, the ANCHOR features of n anchors.

    Args:
        rows: [n, V], the target's raw rows from which the anchors were drawn.
        anchor, before: [n] tokens of the anchors and of the positions before them.
    """
    columns = Columns(ANCHOR_FEATURES)
    tokens = enumerate(zip(anchor, before, strict=True))
    drawn = DrawnTokens.of([(row, token, previous, 0, 1, 0) for row, (token, previous) in tokens])
    # Temperature 0 stands for the raw rows: no ANCHOR feature reads the distribution that is sampled from.
    return columns(summarise(columns.needs, rows, drawn, 0.0), drawn, 0.0)


def dense_mode(settings: Settings, draws: int = 1) -> Verification:
    """Return the verification of the rounds in a dense trace; at temperature 0 it is greedy matching for all modes.

    Raises:
        InputError: it is lossy, so that its texts depend on the policy, or it does not support the tree or several draws.
    """
    tree = settings.topology
    # A trace serves any policy: the mode is that of one which reads nothing.
    name = resolve_mode(settings.verification, FixedLength(tree.deepest), tree, settings.temperature)
    mode = find_mode(name, settings.temperature)
    if not mode.lossless:
        raise InputError(
            f"--verification {mode.name}: expected a lossless mode, with texts that do not depend on the policy; or give "
            "--collector live"
        )
    if mode.chains_only and not tree.is_chain:
        raise InputError(f"--verification {mode.name}: expected a chain, not the tree {tree.name}; use rejection")
    if draws > 1 and mode.name not in GIVEN_TEXT:
        raise InputError(
            f"--draws: expected 1 under {mode.name} at temperature {settings.temperature:g}, where nothing is drawn given "
            f"the text; several are for {', '.join(GIVEN_TEXT)}"
        )
    return mode


class DenseCollector:
    """Records what a draft model proposes from every anchor of a text. Keeps its caches between texts.

    Args:
        pair: target and draft.
        settings: temperature, length limit, verification, tree and sampling parameters.
        hidden: names of hidden states to record.
        memory_bytes: budget for rows as wide as the vocabulary.
        draws: number of draws given each text.
        mix: share of the target's tokens in the text that the draft reads (`mixed_columns`); 0 = the text itself.
        completions: the texts; None = they are sampled from the target.
        choices: returns the random choices for (stream key, number of the draw, positions, rows of the tree).

    Attributes:
        mode: the verification.
        given_text, is_block: whether drafts and acceptances are drawn given the text, and under block verification.
        tree: candidates of a round.
        shape: candidates drafted after each place of a text: the closure of `tree`.
        features: names recorded at each node.
        state_width: H of the draft's states; 0 if they are not recorded.
        rows_at_once, most_rows: rows of scores that `memory_bytes` hold, and rows of one forward of the draft.
    """

    def __init__(
        self, pair: Pair, settings: Settings, hidden: Sequence[str] = (), memory_bytes: int = MEMORY_BYTES, *,
        draws: int = 1, mix: float = 0.0, completions: CompletionIds | None = None,
        choices: Callable[[int, int, Tensor, Tensor], KeyedDraws] = KeyedDraws,
    ) -> None:  # fmt: skip
        self.pair, self.settings, self.memory_bytes = pair, settings.for_pair(pair), memory_bytes
        self.tree, self.temperature, self.hidden = settings.topology, settings.temperature, tuple(hidden)
        self.draws, self.mix, self.choices, self._completions = draws, mix, choices, completions
        if max(map(len, self.tree.children)) > pair.vocabulary:
            raise InputError(
                f"--tree: {self.tree.name} has more candidates below one node than the vocabulary has tokens"
            )
        self.mode = dense_mode(self.settings, draws)
        self.given_text, self.is_block = self.mode.name in GIVEN_TEXT, self.mode.name == Block.name
        self.features = node_features(self.tree, self.mode.name)
        self.shape = Shape(self.tree, pair.device)
        self.rows_at_once = max(8, memory_bytes // (BYTES_PER_SCORE * pair.vocabulary))
        self.most_rows = min(_MOST_ROWS.get(pair.device.type, 512), self.rows_at_once)
        # The draft's states after a mixed text replace those after the text.
        self.state_width = hidden_width(pair.draft_model) if DRAFT_HIDDEN in hidden and not mix else 0
        # Off the text only block verification reads p, from the second token of a round on.
        self._reads_target = self.is_block and self.tree.deepest > 1
        if self._reads_target and not pair.readings[0].tree:
            name = type(pair.target).__name__
            raise InputError(
                f"--verification block: expected a target that reads trees, not a {name}; give --collector live"
            )
        self._models: tuple[CachedModel, CachedModel | None] | None = None

    @torch.inference_mode()
    def rows(self, batch: Sequence[PromptTask]) -> list[Mapping[str, Any]]:
        """Return the rows of a batch of prompts, one column chunk per text and draw."""
        if self._completions is None:
            texts = self._sampled_texts(batch)
        else:
            with_noise, with_states = self.mode.name == Match.name, TARGET_HIDDEN in self.hidden
            texts = completed_texts(self.pair, self.settings, batch, self._completions, with_noise, with_states)
        chunks: list[Mapping[str, Any]] = []
        for text in texts:
            for draw in range(self.draws):
                columns = self.columns(text, draw, self.propose(text, draw).trees(text.anchor - text.anchor[0]))
                chunks.append(mixed_columns(self, text, columns) if self.mix else columns)
        return chunks

    def _sampled_texts(self, batch: Sequence[PromptTask]) -> Iterator[TargetText]:
        """Yield texts of the target, K tokens longer than the limit, so that the last anchors have labels."""
        new = self.settings.max_new_tokens
        longest, with_noise = new + self.tree.deepest, self.mode.name == Match.name
        arrays = 2 if with_noise and self.temperature > 0 else 1  # rows, and noise [texts, tokens, V]
        text_bytes = arrays * longest * self.pair.vocabulary * torch.finfo(self.pair.logits_dtype).bits // 8
        at_once = max(1, self.memory_bytes // text_bytes)
        for start in range(0, len(batch), at_once):
            part = batch[start : start + at_once]
            texts = plain_texts(
                self.pair, [one.tokens for one in part], [one.key for one in part], longest, self.temperature,
                hidden=TARGET_HIDDEN in self.hidden, noise=with_noise, sampling=self.settings.sampling,
            )  # fmt: skip
            for at, (prompt, tokens) in enumerate(zip(part, texts.tokens, strict=True)):
                length, used = min(len(tokens), new), slice(len(tokens))
                noise, states = (None if v is None else v[at, used] for v in (texts.noise, texts.states))
                # The first token is drawn before any round, as the prompt is read: a text of one token has no anchor.
                if length > 1:
                    anchor = torch.arange(1, length, device=self.pair.device)
                    yield TargetText(prompt, tokens, texts.logits[at, used], noise, states, length, anchor)

    def propose(self, text: TargetText, draw: int = 0) -> Proposals:
        """Return what is proposed after every prefix that a round from an anchor of a text may reach."""
        pair = self.pair
        capacity = len(text.ids) + self.most_rows * len(self.shape.topology)  # with the branches of a chunk
        if self._models is None or self._models[0].capacity < capacity:
            capacity += 64  # so that not every longer text allocates new caches
            draft = CachedModel(pair.draft_model, capacity, pair.vocabulary, bool(self.state_width))
            target = None
            if self._reads_target:
                target = CachedModel(pair.target, capacity, pair.vocabulary, device=pair.device)
            self._models = draft, target
        for model in self._models:
            if model is not None:
                model.roll_back(0)
        return Proposals(self, text, draw, *self._models)

    def columns(self, text: TargetText, draw: int, trees: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the columns of a text's anchors from their trees (`Proposals.trees`)."""
        prompt, tokens, anchor = text.prompt, text.tokens, text.anchor
        at = anchor.tolist()
        # Anchor a is the token tokens[a - 1], drawn from row a - 1. The prompt's last token comes before the first one.
        tokens_before = [prompt.tokens[-1], *tokens]
        anchors = anchor_columns(text.rows[anchor - 1], [tokens[a - 1] for a in at], [tokens_before[a - 1] for a in at])
        # `trace_arrays` takes the draw from the remainder by `draws`.
        sequence = prompt._replace(sequence=prompt.sequence * self.draws + draw)
        columns: dict[str, Any] = sequence.columns(len(at), text.length) | {
            **{"anchor": anchor, **trees},
            "accepted_length": trees["accepted"].sum(1),  # at most one node of a depth is on the text
            # Only EOS cuts a round: past the limit the text continues for K tokens.
            "cut": (anchor + self.tree.deepest > len(tokens)) & (tokens[-1] in self.pair.eos),
        }
        columns |= zip(ANCHOR_FEATURES, anchors.T, strict=True)
        if text.states is not None:
            columns[TARGET_HIDDEN] = text.states[anchor - 1]
        return {name: v.cpu().numpy() if isinstance(v, Tensor) else v for name, v in columns.items()}


def mixed_columns(of: DenseCollector, text: TargetText, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a text, with features of the draft after a text in which most tokens are its own samples.

    Token mixing (SpecDec++, arXiv 2405.19715): at each position i of the target's text X the draft proposes Y_i after X_<i,
    and its acceptance is the label. Features are recorded after Z_<i, where Z takes X_i with probability `mix` and Y_i
    otherwise, so that a head is trained on states after the draft's own tokens.
    """
    pair, temperature, prompt, device = of.pair, of.temperature, text.prompt.tokens, of.pair.device
    proposed = torch.tensor(columns["tokens"][:, 0], device=device).long()  # Y_1 .. Y_{n}
    position = torch.arange(len(prompt) + 1, len(prompt) + text.length, device=device)
    # 24 bits keyed by stream and position alone: a text is mixed alike in every batch.
    bits = scramble(scramble(position * 2 + 1) ^ (text.prompt.key ^ _MIX_SALT)) & ((1 << 24) - 1)
    from_draft = bits.double() / (1 << 24) >= of.mix
    mixed = torch.where(from_draft, proposed, torch.tensor(text.tokens[1 : text.length], device=device))
    # Nothing was proposed for the first token, which is the target's.
    ids = [*prompt, text.tokens[0], *mixed.tolist()[:-1]]
    keeps_states = DRAFT_HIDDEN in of.hidden
    model = CachedModel(pair.draft_model, len(ids), pair.vocabulary, keeps_states, reading=pair.readings[1])
    logits = model.read(torch.tensor([ids], device=device), rows=len(proposed))[0]
    check_rows(logits, "draft")
    sampler = Sampler(of.settings.sampling.build(temperature, prompt, pair.eos, device), temperature)
    sampled = sampler(logits, lambda: [ids[: len(prompt) + 1 + row] for row in range(len(logits))])
    # The noise that Y was drawn with, at the same positions.
    scores = match_scores(sampled, None if text.noise is None else text.noise[1 : text.length])
    # Y is seldom the best of these rows, so its score is looked up; a filter may remove it. The score 2 BOUND below
    # the best is beyond any bounded margin and replaces -inf in noisy_score.
    top = scores.topk(2, -1).values
    best = torch.cat([scores.gather(-1, proposed[:, None]), top[:, 1:]], -1).maximum(top[:, :1] - 2 * BOUND)
    drawn = DrawnTokens.of([(row, token, -1, 0, 1, 1) for row, token in enumerate(proposed.tolist())])
    drawn.lead = truncation_lead(sampler.untruncated, sampled, drawn)
    features, shaped = Columns(CHAIN_FEATURES), sampled if sampler.reads_prefix and temperature > 0 else None
    values = features(summarise(features.needs, logits, drawn, temperature, shaped, best=best), drawn, temperature)
    out = dict(columns) | {name: values[:, [at]] for at, name in enumerate(CHAIN_FEATURES)}
    if keeps_states and model.states is not None:
        out[DRAFT_HIDDEN] = stored(model.states[0, -len(proposed) :]).cpu().numpy()
    # Whether the last token that the draft read was its own.
    out["mixed"] = torch.cat([torch.zeros_like(from_draft[:1]), from_draft[:-1]]).cpu().numpy()
    return out
