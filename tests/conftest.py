"""Shared by all rooms: a tiny random pair in float64, its folders, prompts, traces, and a latency profile.

What is slow to import is imported where it is used: pytest's controller reads this file too, and runs no test.
"""

from __future__ import annotations

import atexit
import copy
import importlib
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from specstop.policies.costs import CostTable
from specstop.policies.profile import Profile

if TYPE_CHECKING:
    from specstop.collect.prompts.read import Prompt
    from specstop.collect.store.folder import Trace
    from specstop.decode.models.pair import Pair
    from specstop.policies.learned import LearnedPolicy
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

os.environ["OMP_NUM_THREADS"] = "1"
"""Child processes too: pytest runs a worker a core, and threads that wait for each other spin."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell that puts pytest in the background has that ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """A command ends with signals ignored, which the next test in this process must not inherit."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def pytest_sessionstart() -> None:
    """Every second worker compiles kernels from the last to the first, so that each finds half of them in numba's cache.

    Before collection: test modules import some of them, which both workers would compile at the same time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        from specstop.policies import kernels

        names = sorted(found.name for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."))
        for name in names[:: -1 if int(worker.removeprefix("gw")) % 2 else 1]:
            importlib.import_module(name)


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Thousands of small files are flushed one by one, 4 ms each; no test cuts the power, and killed processes do flush.

    A descriptor that is none is an error still.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        yield


@pytest.fixture(scope="session", autouse=True)
def decisions_timed_briefly() -> None:
    """What a decision costs is measured in many tests that want any price at all, of warm caches too."""
    from specstop.decode.profile import decisions
    from specstop.decode.profile.measuring import Effort
    from specstop.policies.display import silent

    decisions.EFFORT, decisions.ROUNDS, decisions.SCRATCH = Effort(repetitions=2), 2, 64
    decisions.loop_decisions.__defaults__ = (
        None,
        decisions.EFFORT,
        silent,
    )  # a default is read once, with the function


@pytest.fixture(scope="module")
def few_draws() -> Iterator[None]:
    """Reports whose intervals are of few draws of the profile, for tests that want any interval at all."""
    from specstop.train.evaluate.pricing import ProfileBootstrap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProfileBootstrap.__init__, "__defaults__", (0, 4))
        yield


CACHE = tempfile.mkdtemp(prefix="specstop-cache-")
os.environ["SPECSTOP_CACHE"] = CACHE
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
"""What tests leave in the user's cache folder goes with them; read by child processes too."""

VOCABULARY = 48
EOS = 16
PROMPTS = 8
NEW = 26


def build_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Return a random Llama of about 6,000 weights, so large that its text does not repeat itself."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.5,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return LlamaForCausalLM(LlamaConfig(**{**options, **changes})).double().eval()


def build_draft(target: LlamaForCausalLM, noise: float = 0.02) -> LlamaForCausalLM:
    """Return the target with noise on its weights: its proposals are accepted now and then."""
    import torch

    draft = copy.deepcopy(target)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return draft


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {
        "<pad>": 0,
        "<s>": 1,
        "<unk>": 2,
        **{f"w{i}": i for i in range(3, VOCABULARY) if i != EOS},
        "</s>": EOS,
    }
    inner = Tokenizer(WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="<unk>", bos_token="<s>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    target = build_model()
    for name, model in (("target", target), ("draft", build_draft(target))):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def _loaded(folder: Path, **options: str) -> Pair:
    from specstop.decode.models.pair import load_pair

    return load_pair(folder / "target", folder / "draft", dtype="float64", **options)


@pytest.fixture(scope="session")
def plain_pair(pair_folder: Path) -> Pair:
    """The pair as transformers' own modules."""
    return _loaded(pair_folder)


@pytest.fixture(scope="session")
def compact_pair(pair_folder: Path) -> Pair:
    """The pair under its own forward, which takes a fourth of the time."""
    return _loaded(pair_folder, engine="compact")


@pytest.fixture(scope="session")
def pair(compact_pair: Pair) -> Pair:
    """Who looks into the models puts the plain one in its place; what the session shares is made with the compact one."""
    return compact_pair


@pytest.fixture(scope="session")
def eager_pair(pair_folder: Path) -> Pair:
    return _loaded(pair_folder, attention="eager")


@pytest.fixture(scope="session")
def endless_pair(plain_pair: Pair) -> Pair:
    """The pair without an end of text."""
    from specstop.decode.models.pair import join

    target, draft = copy.deepcopy(plain_pair.target), plain_pair.draft
    target.generation_config.eos_token_id = None
    return join(target, draft)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Prompts of 1 to 8 words in two groups."""
    import torch
    from specstop.collect.prompts.read import Prompt

    generator = torch.Generator().manual_seed(3)
    lengths = range(1, PROMPTS + 1)
    texts = [" ".join(f"w{int(w)}" for w in torch.randint(6, VOCABULARY, (n,), generator=generator)) for n in lengths]
    return [Prompt(f"p{i}", text, f"g{i % 2}") for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def prompt_ids(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer(p.text)["input_ids"] for p in prompts]


def collect_traces(pair: Pair, prompts: list[Prompt], folder: Path) -> dict[float, Trace]:
    """Return a trace of depth `DEPTH` and `NEW` tokens by temperature."""
    from contract_policies import DEPTH
    from specstop.collect.run import collect

    options = {"depth": DEPTH, "verification": "match", "max_new_tokens": NEW, "shards": 2}
    return {t: collect(pair, prompts, folder / str(t), temperature=t, **options) for t in (0.0, 0.7)}


@pytest.fixture(scope="session")
def traces(compact_pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Trace]:
    return collect_traces(compact_pair, prompts, tmp_path_factory.mktemp("traces"))


@pytest.fixture
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cache that transformers copies code into, for this test alone."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformers_modules")}
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    sys.modules.update(before)


def make_prompts(count: int, side: str, seed: int) -> list[Prompt]:
    """Return prompts of two to six words with ids of their own."""
    import torch
    from specstop.collect.prompts.read import Prompt

    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(6, VOCABULARY, (count, 6), generator=generator).tolist()
    return [Prompt(f"{side}{i}", " ".join(f"w{w}" for w in row[: 2 + i % 5])) for i, row in enumerate(words)]


@pytest.fixture(scope="session")
def sides(compact_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Traces to train on and to evaluate on, of different prompts, sampled at 0.7."""
    from contract_policies import DEPTH
    from specstop.collect.run import collect

    folder = tmp_path_factory.mktemp("sides")
    options = {"depth": DEPTH, "temperature": 0.7, "verification": "match", "max_new_tokens": NEW, "shards": 2}
    made = ((24, "fit", 21), (12, "held", 22))
    return tuple(collect(compact_pair, make_prompts(*args), folder / args[1], **options) for args in made)


@pytest.fixture(scope="session")
def full_profile(profile: Profile) -> Profile:
    """The profile with the decisions of every head: nothing is measured, so that results are exact."""
    return profile.with_decisions(
        {"logistic": 7.0e-5, "mlp": 9.0e-5, "xgboost": 2.0e-4, "resnet": 1.0e-4, "mine": 7.0e-5}
    )


@pytest.fixture(scope="session")
def learned(sides: tuple[Trace, Trace], full_profile: Profile) -> LearnedPolicy:
    """What `train` makes of the traces and the profile as it stands; `with_rule` is a copy that may be changed."""
    from specstop.train.fit.run import train

    return train(sides[0], full_profile).policy


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Seconds of no machine; verifying 5 tokens is cheaper than 4, as it was measured on one."""
    low = CostTable(8.0, (1.0e-3, 1.1e-3), 2.0e-5, (4.0e-3, 4.1e-3, 4.3e-3, 4.8e-3, 5.4e-3, 4.9e-3, 5.5e-3))
    high = CostTable(40.0, (1.5e-3, 1.7e-3), 3.0e-5, (6.0e-3, 6.2e-3, 6.3e-3, 7.0e-3, 7.6e-3, 7.1e-3, 8.0e-3))
    return Profile(
        low,
        high,
        3.0e-5,
        2.0e-4,
        (5.0e-3, 1.0e-4),
        {"confidence": 6.0e-5, "trimming": 4.0e-5, "adaptive": 1.0e-5},
        0.7,
        {"made": "up"},
    )
