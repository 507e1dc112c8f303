"""Models that are a table: their logits depend on the whole prefix, which each row rebuilds through its mask.

A forward pass leaves only token and position in the cache, so a wrong mask, position or compaction changes what a row sees
and with it the distribution.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from specstop.decode.models.pair import Pair
from torch import Tensor

Prefix = tuple[Any, ...]
NOTHING = float("-inf")
WIDTH = 4
"""Of hidden states, which drafters that are heads on them read."""
KINDS = ("dense", "mixed", "sparse")


class Law:
    """Random logits of target and draft after each prefix.

    Args:
        vocabulary: number of tokens.
        seed: of the numbers.
        kind: `dense`: every token has a chance; `mixed`: by prefix also zeros in either, a draft that equals the target,
            and ones that know a single token; `sparse`: both know two tokens.
    """

    def __init__(self, vocabulary: int, seed: int, kind: str = "dense") -> None:
        assert kind in KINDS
        self.vocabulary, self._seed, self._kind = vocabulary, seed, kind
        self._rows: dict[Prefix, tuple[Tensor, Tensor]] = {}

    def rows(self, prefix: Prefix) -> tuple[Tensor, Tensor]:
        """Return the target's and the draft's logits [V]."""
        if prefix not in self._rows:
            p, q = self._made(random.Random(f"{self._seed} {self.vocabulary} {prefix}"))
            self._rows[prefix] = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
        return self._rows[prefix]

    def state(self, prefix: Prefix) -> Tensor:
        """Return the target's hidden state [WIDTH] after a prefix, close to its logits: heads on it are often right."""
        chance = random.Random(f"state {self._seed} {prefix}")
        near = self.rows(prefix)[0].clamp_min(-3.0)[:WIDTH]
        noise = [0.5 * chance.gauss(0.0, 1.0) for _ in range(WIDTH)]
        return torch.tensor(noise, dtype=torch.float64) + torch.nn.functional.pad(near, (0, WIDTH - len(near)))

    def table(self, which: int) -> Tensor:
        """Return [V, WIDTH], the embeddings, or the output layer that drafters borrow."""
        chance = random.Random(f"table {which} {self._seed}")
        noise = [[0.3 * chance.gauss(0.0, 1.0) for _ in range(WIDTH)] for _ in range(self.vocabulary)]
        return torch.eye(self.vocabulary, WIDTH, dtype=torch.float64) + torch.tensor(noise, dtype=torch.float64)

    def _made(self, chance: random.Random) -> tuple[list[float], list[float]]:
        p = [1.2 * chance.gauss(0.0, 1.0) for _ in range(self.vocabulary)]
        q = [logit + 0.8 * chance.gauss(0.0, 1.0) for logit in p]
        tokens = chance.sample(range(self.vocabulary), self.vocabulary)
        sort = {"dense": 0.0, "mixed": chance.random(), "sparse": 0.4}[self._kind]
        if 0.2 <= sort < 0.5:
            few = self.vocabulary - 2 if self._kind == "sparse" else 1
            p = [NOTHING if token in tokens[:few] else logit for token, logit in enumerate(p)]
            q = [NOTHING if token in tokens[1 : 1 + few] else logit for token, logit in enumerate(q)]
        elif 0.5 <= sort < 0.65:
            q = p
        elif 0.65 <= sort < 0.9:
            q = [logit if token == tokens[0] else NOTHING for token, logit in enumerate(q)]
        elif sort >= 0.9:
            p = [logit if token == tokens[0] else NOTHING for token, logit in enumerate(p)]
        return p, q


class Oracle(torch.nn.Module):
    """One side of a law as a causal language model with one layer of cache.

    Args:
        law: of the logits.
        side: 0 = target, 1 = draft.
        attention: backend whose masks are read.
        knows: so many tokens of the law's vocabulary, the first ones; 0 = all.
    """

    def __init__(self, law: Law, side: int, attention: str = "sdpa", knows: int = 0) -> None:
        super().__init__()
        self.law, self.side, self.knows = law, side, knows or law.vocabulary
        self.dtype, self.device = torch.float64, torch.device("cpu")
        text = SimpleNamespace(
            num_hidden_layers=1, max_position_embeddings=None, vocab_size=self.knows, _attn_implementation=attention
        )
        self.config = SimpleNamespace(get_text_config=lambda: text, _attn_implementation=attention)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        past_key_values: Any,
        logits_to_keep: int | Tensor,
        **rest: Any,
    ) -> SimpleNamespace:
        count = input_ids.shape[1]
        assert int(input_ids.max()) < self.knows
        tokens, positions = past_key_values.update(
            input_ids[:, None, :, None].double(), position_ids[:, None, :, None].double(), 0
        )
        texts = [
            list(zip(at.flatten().long().tolist(), text.flatten().long().tolist(), strict=True))
            for at, text in zip(positions, tokens, strict=True)
        ]
        call, mask = past_key_values.layers[0].kv.call, attention_mask
        if mask is None:
            seen = len(texts[0])
            mask = torch.ones(count, seen, dtype=torch.bool).tril_(seen - count)[None, None]
        mask = mask if mask.dtype == torch.bool else mask == 0
        owner, row = [0] * count, list(range(count))
        if call is not None:  # of each token its stream, and its row in that stream's part of the mask
            owner, size = call.line[2].tolist(), call.relation.shape[1]
            row = [at - stream * size for at, stream in zip(call.line[4].tolist(), owner, strict=True)]
        assert mask.shape[0] == len(texts) and mask.shape[3] == len(texts[0])

        def prefix(token: int) -> Prefix:
            of = owner[token]
            sees = mask[of, 0, row[token]].tolist()
            return read_prefix([seen for seen, sees_it in zip(texts[of], sees, strict=True) if sees_it])

        kept = logits_to_keep.tolist() if isinstance(logits_to_keep, Tensor) else range(count)[-logits_to_keep:]
        logits = torch.stack([self.law.rows(prefix(token))[self.side][: self.knows] for token in kept])[None]
        if not rest.get("output_hidden_states"):
            return SimpleNamespace(logits=logits)
        states = torch.stack([self.law.state(prefix(token)) for token in range(count)])[None]
        return SimpleNamespace(logits=logits, hidden_states=(states,))

    def get_input_embeddings(self) -> torch.nn.Module:
        return torch.nn.Embedding.from_pretrained(self.law.table(0))

    def get_output_embeddings(self) -> torch.nn.Module:
        layer = torch.nn.Linear(WIDTH, self.law.vocabulary, bias=False)
        layer.weight = torch.nn.Parameter(self.law.table(1), requires_grad=False)
        return layer


def read_prefix(seen: list[tuple[int, int]]) -> Prefix:
    """Return the tokens of (position, token) pairs, or the pairs where the positions are not those of a text."""
    seen.sort()
    if [position for position, _ in seen] == list(range(len(seen))):
        return tuple(token for _, token in seen)
    return tuple(seen)


def oracle_pair(law: Law, eos: tuple[int, ...] = (), attention: str = "sdpa", draft_knows: int = 0) -> Pair:
    """Return both sides of a law as a pair; with `draft_knows` the draft has so many tokens, the first ones."""
    models = Oracle(law, 0, attention), Oracle(law, 1, attention, draft_knows)
    return Pair(*models, None, law.vocabulary, eos)  # type: ignore[arg-type]
