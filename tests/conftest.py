"""Fixtures of all tests: a tiny random pair in float64, its folders, prompts, traces and a latency profile.

Large libraries are imported inside the functions: the controller of pytest-xdist imports this file but runs no test.
"""

from __future__ import annotations

import atexit
import copy
import functools
import gc
import importlib
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from specstop.policies.costs import CostTable
from specstop.policies.profile import Profile

if TYPE_CHECKING:
    from specstop.collect.prompts import Prompt
    from specstop.collect.store import Trace
    from specstop.decode.models.pair import Pair
    from specstop.policies.learned import LearnedPolicy
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

os.environ["OMP_NUM_THREADS"] = "1"
"""Also for child processes: pytest runs one worker per core."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell ignores it for background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the signal handlers: a command ends with signals ignored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def fast() -> Iterator[None]:
    """Use one thread, only check the descriptor in `fsync` (4 ms per file), and time decisions with 2 repetitions.

    Entry points are read once for each search path, because reading them takes 10 ms for each spec of a policy or drafter.
    """
    import torch
    from specstop.decode.profile import decisions
    from specstop.decode.profile.measuring import Effort
    from specstop.policies import features, registry
    from specstop.policies.display import silent

    @functools.cache
    def read_entry_points(group: str, path: tuple[str, ...]) -> Any:
        return metadata.entry_points(group=group)

    torch.set_num_threads(1)
    decisions.EFFORT, decisions.ROUNDS, decisions.SCRATCH = Effort(repetitions=2), 2, 64
    decisions.loop_decisions.__defaults__ = (None, decisions.EFFORT, silent)  # defaults are bound at definition
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.fstat(descriptor) and None)
        for module in (features, registry):
            patch.setattr(module, "entry_points", lambda group: read_entry_points(group, tuple(sys.path)))
        yield


def pytest_sessionstart() -> None:
    """Compile the numba kernels before collection, in opposite order in odd workers.

    Two workers then compile half of the kernels each and read the other half from numba's cache. Without workers a test
    compiles what it calls. Garbage is not collected while modules are imported: pytest would spend a tenth of its time there.
    """
    gc.disable()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker:
        from specstop.policies import kernels
        from specstop.policies.kernels.compiled import Kernel

        names = sorted(module.name for module in pkgutil.iter_modules(kernels.__path__, f"{kernels.__name__}."))
        values = [value for name in names for value in vars(importlib.import_module(name)).values()]
        for value in values[:: -1 if int(worker.removeprefix("gw")) % 2 else 1]:
            if isinstance(value, Kernel):
                value.compiled  # noqa: B018


def pytest_collection_finish() -> None:
    """Exclude the imported modules from garbage collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def few_draws() -> Iterator[None]:
    """Compute the intervals of reports from 4 draws of the profile."""
    from specstop.train.evaluate.pricing import ProfileBootstrap

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProfileBootstrap.__init__, "__defaults__", (0, 4))
        yield


CACHE = tempfile.mkdtemp(prefix="specstop-cache-")
os.environ["SPECSTOP_CACHE"] = CACHE
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
"""The cache folder of the tests and of their child processes; removed at exit."""

VOCABULARY = 48
EOS = 16
NEW = 18


def build_model(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    """Return a random Llama of about 6,000 weights, enough for text without repetition."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}  # fmt: skip
    tokens = {"bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **tokens, "initializer_range": 0.5, **changes})).double().eval()


def build_draft(target: LlamaForCausalLM, noise: float = 0.02) -> LlamaForCausalLM:
    """Return the target with noise on its weights: the target accepts a part of its drafts."""
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

    special = {"<pad>": 0, "<s>": 1, "<unk>": 2, "</s>": EOS}
    words = special | {f"w{i}": i for i in range(3, VOCABULARY) if i != EOS}
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
    """The pair with the modules of transformers."""
    return _loaded(pair_folder)


@pytest.fixture(scope="session")
def compact_pair(pair_folder: Path) -> Pair:
    """The pair with the compact engine, which takes a quarter of the time."""
    return _loaded(pair_folder, engine="compact")


@pytest.fixture(scope="session")
def pair(compact_pair: Pair) -> Pair:
    """The default pair; tests of the modules of transformers override it with `plain_pair`."""
    return compact_pair


@pytest.fixture(scope="session")
def eager_pair(pair_folder: Path) -> Pair:
    return _loaded(pair_folder, attention="eager")


@pytest.fixture(scope="session")
def endless_pair(plain_pair: Pair) -> Pair:
    """The pair without an end-of-text token."""
    from specstop.decode.models.pair import join

    target, draft = copy.deepcopy(plain_pair.target), plain_pair.draft
    target.generation_config.eos_token_id = None
    return join(target, draft)


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    """Prompts of 1 to 8 words in two groups."""
    import torch
    from specstop.collect.prompts import Prompt

    generator = torch.Generator().manual_seed(3)
    lengths = range(1, 9)
    texts = [" ".join(f"w{int(w)}" for w in torch.randint(6, VOCABULARY, (n,), generator=generator)) for n in lengths]
    return [Prompt(f"p{i}", text, f"g{i % 2}") for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def prompt_ids(prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    return [tokenizer(p.text)["input_ids"] for p in prompts]


def collect_trace(pair: Pair, prompts: list[Prompt], folder: Path, temperature: float) -> Trace:
    from contract_policies import DEPTH
    from specstop.collect.run import collect

    options = {"depth": DEPTH, "verification": "match", "max_new_tokens": NEW, "shards": 2}
    return collect(pair, prompts, folder, temperature=temperature, **options)


@pytest.fixture(scope="session")
def traces(compact_pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Trace]:
    """A trace by temperature."""
    folder = tmp_path_factory.mktemp("traces")
    return {t: collect_trace(compact_pair, prompts, folder / str(t), t) for t in (0.0, 0.7)}


@pytest.fixture(scope="session")
def forest(compact_pair: Pair, prompts: list[Prompt], tmp_path_factory: pytest.TempPathFactory) -> dict[float, Trace]:
    """A trace of a tree by temperature."""
    from specstop.collect.run import collect

    folder = tmp_path_factory.mktemp("forest")
    options = {"tree": "3,2,1,1,1", "max_new_tokens": NEW}
    return {t: collect(compact_pair, prompts, folder / str(t), temperature=t, **options) for t in (0.0, 0.7)}


@pytest.fixture
def module_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test a separate cache for the remote code of transformers."""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("transformers_modules")}
    yield
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    sys.modules.update(before)


def make_prompts(count: int, side: str, seed: int) -> list[Prompt]:
    """Return prompts of two to six words with distinct ids."""
    import torch
    from specstop.collect.prompts import Prompt

    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(6, VOCABULARY, (count, 6), generator=generator).tolist()
    return [Prompt(f"{side}{i}", " ".join(f"w{w}" for w in row[: 2 + i % 5])) for i, row in enumerate(words)]


@pytest.fixture(scope="session")
def sides(compact_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Traces to train on and to evaluate on, of different prompts, sampled at 0.7."""
    folder = tmp_path_factory.mktemp("sides")
    fit, held = make_prompts(24, "fit", 21), make_prompts(12, "held", 22)
    return collect_trace(compact_pair, fit, folder / "fit", 0.7), collect_trace(
        compact_pair, held, folder / "held", 0.7
    )


@pytest.fixture(scope="session")
def full_profile(profile: Profile) -> Profile:
    """The profile with a decision cost for each head, which makes reports deterministic."""
    decisions = {"logistic": 7.0e-5, "mlp": 9.0e-5, "xgboost": 2.0e-4, "resnet": 1.0e-4, "mine": 7.0e-5}
    return profile.with_decisions(decisions)


@pytest.fixture(scope="session")
def learned(sides: tuple[Trace, Trace], full_profile: Profile) -> LearnedPolicy:
    """The result of `train`, shared by tests; call `with_rule` for a copy that may be changed."""
    from specstop.train.fit.run import train

    return train(sides[0], full_profile).policy


@pytest.fixture(scope="session")
def profile() -> Profile:
    """A synthetic profile; verifying 5 tokens is cheaper than 4, as measured on one machine."""
    low = CostTable(8.0, (1.0e-3, 1.1e-3), 2.0e-5, (4.0e-3, 4.1e-3, 4.3e-3, 4.8e-3, 5.4e-3, 4.9e-3, 5.5e-3))
    high = CostTable(40.0, (1.5e-3, 1.7e-3), 3.0e-5, (6.0e-3, 6.2e-3, 6.3e-3, 7.0e-3, 7.6e-3, 7.1e-3, 8.0e-3))
    decisions = {"confidence": 6.0e-5, "trimming": 4.0e-5, "adaptive": 1.0e-5}
    return Profile(low, high, 3.0e-5, 2.0e-4, (5.0e-3, 1.0e-4), decisions, 0.7, {"made": "up"})
