"""What the sections run on, as files in a folder: small random models, drafters, policies, profiles, prompts."""

from __future__ import annotations

import copy
import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import access
import torch
from specstop.collect import Prompt
from specstop.decode import Pair, join, load_pair
from specstop.policies import CostTable, Profile
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, EOS, HIDDEN = 48, 16, 16
PROMPTS = 8
DRAFTERS = ("medusa", "hydra", "ctc", "layer")


def build_target(seed: int = 0, vocabulary: int = VOCABULARY, eos: int = EOS) -> LlamaForCausalLM:
    """Return a random Llama of about 6,000 weights whose texts do not repeat themselves."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).double().eval()


def build_draft(target: LlamaForCausalLM, noise: float = 0.02) -> LlamaForCausalLM:
    """Return the target with noise on its weights: its proposals are accepted now and then."""
    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return draft


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words: token i is `wi`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {"<pad>": 0, "<s>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY) if i != EOS}, "</s>": EOS}
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", bos_token="<s>", pad_token="<pad>"
    )


def byte_pair() -> Pair:
    """Return a random pair whose tokenizer has a token for each byte, as grammars need it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", pad_token="<pad>")
    target = build_target(3, len(letters) + 6, 1)
    return join(target, build_draft(target, 0.05), tokenizer)


def build_profile() -> Profile:
    """Return costs of no machine; verifying 5 tokens is cheaper than 4, as it was measured on one."""
    low = CostTable(8.0, (1.0e-3, 1.1e-3), 2.0e-5, (4.0e-3, 4.1e-3, 4.3e-3, 4.8e-3, 5.4e-3, 4.9e-3, 5.5e-3))
    high = CostTable(40.0, (1.5e-3, 1.7e-3), 3.0e-5, (6.0e-3, 6.2e-3, 6.3e-3, 7.0e-3, 7.6e-3, 7.1e-3, 8.0e-3))
    decisions = {"confidence": 6.0e-5, "heuristic": 1.0e-5}
    # The costs of the decisions of a policy that a profile does not name would be measured, differently each time.
    decisions |= {name: 7.0e-5 for name in ("logistic-derived", "logistic-derived?rule=batch", "fixed")}
    return Profile(low, high, 3.0e-5, 2.0e-4, (5.0e-3, 1.0e-4), decisions, 0.8, {"made": "up"})


def build_profiles(folder: Path) -> None:
    """Write the profile, one with costs of trees, and one with batches."""
    plain = build_profile()
    plain.save(folder / "plain.json")
    # Costs that fall with the context, so that the line through both sides reaches the least that is believed.
    falling = {
        "low": dataclasses.replace(plain.high, context=8.0),
        "high": dataclasses.replace(plain.low, context=40.0),
    }
    dataclasses.replace(plain, **falling).save(folder / "falling.json")
    tree = {"tree_verify_s": ((0, 4e-3), (6, 5e-3), (20, 9e-3))}
    sides = (
        dataclasses.replace(table, later_draft_s=8e-4 + 1e-4 * at, **tree)
        for at, table in enumerate((plain.low, plain.high))
    )
    low, high = sides
    more = {"tree_outside_s": (2e-4, 3e-5, 4e-6)}
    dataclasses.replace(plain, low=low, high=high, **more).save(folder / "trees.json")
    profile = json.loads((folder / "plain.json").read_text(encoding="utf-8"))
    verify = {
        "2": [[2, 4.1e-3], [6, 4.6e-3], [12, 6e-3]],
        "4": [[4, 5e-3], [16, 5e-3], [17, 8e-3], [24, 8e-3]],
        "8": [[8, 6e-3], [48, 1.4e-2]],
    }
    table = {
        "context": 8.0,
        "draft_s": [[1, 8e-4], [4, 1.5e-3], [8, 1.9e-3]],
        "verify_s": verify,
    }
    later = {**table, "context": 40.0, "draft_s": [[1, 9e-4], [4, 1.7e-3], [8, 2.1e-3]]}
    profile["batch"] = {"low": table, "high": later}
    (folder / "batches.json").write_text(json.dumps(profile), encoding="utf-8")


def build_inputs(folder: Path, small: bool = False) -> None:
    """Write all inputs into a folder; a small set lacks the profile that is measured on this machine."""
    for name in ("models", "drafters", "policies", "profiles"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    target = build_target()
    tokenizer = build_tokenizer()
    for name, model in (("target", target), ("draft", build_draft(target))):
        model.save_pretrained(folder / "models" / name)
        tokenizer.save_pretrained(folder / "models" / name)
    build_profiles(folder / "profiles")
    inputs = Inputs(folder)
    access.make_timed_profile(inputs.profile()).save(folder / "profiles" / "timed.json")
    if not small:
        access.measure(inputs.compact, inputs.prompt_ids).save(folder / "profiles" / "measured.json")
    access.make_drafters(inputs.plain, folder / "drafters")
    widths = {"draft_hidden": HIDDEN, "target_hidden": HIDDEN}
    access.make_policies(folder / "policies", inputs.profile("batches"), widths)
    lines = [" ".join(f"w{6 + (7 * i + 3 * k * k) % 41}" for k in range(12)) for i in range(4)]
    (folder / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [json.dumps({"id": p.id, "prompt": p.text, "group": p.group}) for p in inputs.prompts]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


class Inputs:
    """The inputs in a folder, loaded when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pair(self, **options: Any) -> Pair:
        """Return the pair, loaded with these options."""
        models = self.folder / "models"
        return load_pair(models / "target", models / "draft", **{"dtype": "float64", **options})

    @cached_property
    def plain(self) -> Pair:
        """The pair as transformers' own modules."""
        return self.pair()

    @cached_property
    def compact(self) -> Pair:
        """The pair under its own forward, which takes less time."""
        return self.pair(engine="compact")

    def profile(self, name: str = "plain") -> Profile:
        """Return a profile by its name."""
        return Profile.load(self.folder / "profiles" / f"{name}.json")

    def policy(self, name: str) -> str:
        """Return the path of a policy folder."""
        return str(self.folder / "policies" / name)

    @cached_property
    def policies(self) -> list[str]:
        """The names of the policy folders."""
        return sorted(path.name for path in (self.folder / "policies").iterdir())

    def drafter(self, spec: str) -> str:
        """Return the spec of a drafter with the names of files and folders in it replaced by their paths."""
        for kind in DRAFTERS:
            spec = spec.replace(f":{kind}", f":{self.folder / 'drafters' / kind}")
        return spec.replace(":corpus", f":{self.folder / 'corpus.txt'}")

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts of 1 to 8 words in two groups."""
        return self.made_prompts(PROMPTS, "p", 3)

    def made_prompts(self, count: int, side: str, seed: int) -> list[Prompt]:
        """Return prompts of 1 to 8 words with ids of their own."""
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(6, VOCABULARY, (count, 8), generator=generator).tolist()
        texts = [" ".join(f"w{w if w != EOS else 17}" for w in row[: 1 + i % 8]) for i, row in enumerate(words)]
        return [Prompt(f"{side}{i}", text, f"g{i % 2}") for i, text in enumerate(texts)]

    @cached_property
    def prompt_ids(self) -> list[list[int]]:
        """The token ids of the prompts; the last ones repeat themselves, so that a lookup finds something."""
        ids = [[int(word[1:]) for word in prompt.text.split()] for prompt in self.prompts]
        return [[*one, *one] if at % 2 else one for at, one in enumerate(ids)]
