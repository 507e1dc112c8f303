"""Released heads as policy folders and drafters: every published layout, and nothing but tensors of an untrusted file."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from commands import cli
from conftest import NEW
from damage import Evil
from specstop.decode import decode, load_drafter, with_drafter
from specstop.policies import FixedLength, InputError, PolicyError
from specstop.policies.storage import load_policy_folder
from specstop.train.released import PREFIX, import_medusa, import_weights
from torch import Tensor, nn

from specstop import Pair, Settings


class DecisionModel(nn.Module):
    """The published decision models: linear layers with ReLU between and a sigmoid behind, as `layers`."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
            parts += [nn.Linear(inputs, outputs), nn.ReLU() if i < len(sizes) - 2 else nn.Sigmoid()]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class AcceptanceHead(nn.Module):
    """The published acceptance head; `shared` as it was released."""

    def __init__(self, size: int, blocks: int, shared: bool = True) -> None:
        super().__init__()
        middle = [Block(size)] * blocks if shared else [Block(size) for _ in range(blocks)]
        self.model = nn.Sequential(*middle, nn.Linear(size, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def saved(module: nn.Module, path: Path, **options: Any) -> Path:
    torch.save(module.state_dict(), path, **options)
    return path


def accept(folder: Path, x: Tensor, depth: int = 2) -> Tensor:
    """Return the policy's `accept` of rows [R, .], scalars or hidden states."""
    policy = load_policy_folder(folder)
    hidden = {name: x.numpy() for name in policy.hidden}
    rows = x.numpy() if policy.features else np.zeros((len(x), 0), dtype=np.float32)
    return torch.from_numpy(policy.probabilities(rows, depth, hidden)[0]).float()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("sizes", [(768, 512, 256, 1), (2048, 1024, 512, 1), (11, 44, 1)], ids=str)
def test_dynasds_models_answer_as_before(tmp_path, sizes, legacy):
    model = DecisionModel(*sizes)
    path = saved(model, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    done = import_weights(path, tmp_path / "p")
    assert done.head.kind == done.name == ("dynasd-hard" if sizes[0] == 11 else "dynasd-soft")
    x = torch.rand(6, sizes[0])
    with torch.no_grad():
        torch.testing.assert_close(accept(tmp_path / "p", x), model(x)[:, 0])
    policy = load_policy_folder(tmp_path / "p")
    assert policy.rule.to_dict() == {"kind": "any", "threshold": 0.4}
    assert (policy.first, policy.max_depth, policy.metadata.provenance["imported from"]) == (1, 5, "w.pt")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_specdecs_head_answers_as_before(tmp_path, shared, form):
    """A shared block stands D times in a pickle and once in safetensors."""
    head = AcceptanceHead(12, 3, shared)
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "config.json").write_text('{"hidden_size": 12, "num_layers": 3}')
    if form == "bin":
        saved(head, hub / "pytorch_model.bin")
    else:
        safetensors.torch.save_model(head, str(hub / "model.safetensors"))
    done = import_weights(hub, tmp_path / "p")
    assert done.head.kind == "specdec"
    assert (len(done.head.tensors()["block.weight"]) == 1) == shared
    x = torch.randn(6, 12)
    with torch.no_grad():
        torch.testing.assert_close(accept(tmp_path / "p", x), head(x).softmax(-1)[:, 1])
    assert bool((accept(tmp_path / "p", x, depth=1) == 1).all()), "nothing drawn is scored at the first step"
    assert done.rule.to_dict() == {"kind": "survival", "threshold": 0.3}
    assert done.max_depth == 20


def test_the_rejection_weight_can_be_taken_out(tmp_path):
    path = saved(AcceptanceHead(12, 2), tmp_path / "w.pt")
    import_weights(path, tmp_path / "a")
    import_weights(path, tmp_path / "b", rejection_weight=6.0, threshold=0.5, depth=9)
    x = torch.randn(6, 12)
    published = accept(tmp_path / "a", x)
    torch.testing.assert_close(accept(tmp_path / "b", x), 6 * published / (1 - published + 6 * published))
    policy = load_policy_folder(tmp_path / "b")
    assert (policy.max_depth, policy.rule.to_dict()["threshold"]) == (9, 0.5)
    assert policy.metadata.provenance["rejection weight taken out"] == 6.0


# What is refused


@pytest.mark.parametrize("form", ["state dict", "pickle", "module"])
def test_a_pickle_of_more_than_tensors_is_refused_and_nothing_of_it_runs(tmp_path, form):
    path, mark = tmp_path / "w.pt", tmp_path / "mark"
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").is_dir(), "the object does what it is made for"
    if form == "pickle":
        path.write_bytes(pickle.dumps(Evil(mark), protocol=2))
    else:
        torch.save({"layers.0.weight": Evil(mark)} if form == "state dict" else DecisionModel(11, 4, 1), path)
    with pytest.raises(PolicyError, match=r"w.pt holds more than tensors.*nothing of it was run"):
        import_weights(path, tmp_path / "p")
    assert not mark.exists() and not (tmp_path / "p").exists()


def state(**changes: Any) -> dict[str, Any]:
    return {**DecisionModel(11, 4, 1).state_dict(), **{k.replace("__", "."): v for k, v in changes.items()}}


STATES: dict[str, tuple[Any, str]] = {
    "batch norm": (state(layers__1__running_mean=torch.zeros(4)), "unknown: .*'layers.1.running_mean'"),
    "a layer left out": ({k: v for k, v in state().items() if k != "layers.2.bias"}, "missing: 'layers.2.bias'"),
    "not finite": (state(layers__0__bias=torch.full((4,), float("nan"))), "finite numbers in bias.0"),
    "a giant from one number": (state(layers__0__weight=torch.zeros(1).expand(1 << 20, 1 << 20)), "no plain tensor"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_another_state_dict_is_refused_by_the_names_in_it(tmp_path, case):
    value, message = STATES[case]
    torch.save(value, tmp_path / "w.pt")
    with pytest.raises(PolicyError, match=message) as caught:
        import_weights(tmp_path / "w.pt", tmp_path / "p")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not (tmp_path / "p").exists()


HEADS = 3


def released(pair: Pair, *, outputs: bool = True) -> nn.ModuleList:
    """Return heads as they were released: with output layers, or, later, without, as they share the target's."""
    torch.manual_seed(0)
    size = pair.target.config.hidden_size
    return nn.ModuleList(
        nn.Sequential(Block(size), *([nn.Linear(size, pair.vocabulary, bias=False)] if outputs else []))
        for _ in range(HEADS)
    ).double()


def saved_heads(state: dict[str, Tensor], folder: Path, name: str = "medusa_lm_head.pt") -> Path:
    state = {key: value.float().contiguous() for key, value in state.items()}
    (safetensors.torch.save_file if name.endswith("safetensors") else torch.save)(state, folder / name)
    return folder / name


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("form", ["file", "folder", "whole"])
def test_the_heads_compute_the_released_outputs(plain_pair, tmp_path, outputs, form):
    heads = released(plain_pair, outputs=outputs)
    (tmp_path / "released").mkdir()
    if form == "whole":  # a checkpoint of the target and its heads
        state = {PREFIX + key: value for key, value in heads.state_dict().items()}
        weights = saved_heads({**state, "model.norm.weight": torch.ones(4)}, tmp_path / "released", "model.safetensors")
    else:
        file = saved_heads(heads.state_dict(), tmp_path / "released")
        weights = file if form == "file" else file.parent
    import_medusa(weights, plain_pair, tmp_path / "drafter")
    network: Any = load_drafter(tmp_path / "drafter").network_for(plain_pair)
    hidden = torch.randn(5, plain_pair.target.config.hidden_size, dtype=torch.float64)
    for number, head in enumerate(heads):
        expected = head.float()(hidden.float()).double()
        expected = expected if outputs else plain_pair.target.lm_head(expected)
        output = network.outputs[number](network.state(number, hidden, None))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_imported_heads_draft(pair, pair_folder, prompt_ids, tmp_path):
    weights, target = saved_heads(released(pair).state_dict(), tmp_path), pair_folder / "target"
    shown = cli("import", weights, "--target", target, "--out", tmp_path / "d", "--dtype", "float64")
    assert f"--drafter medusa:{tmp_path / 'd'} --depth {HEADS}" in shown.out, shown.err
    drafted = with_drafter(pair, f"medusa:{tmp_path / 'd'}")
    settings = Settings(0.7, NEW, max_depth=HEADS, verification="match")
    drafts = decode(drafted, prompt_ids[:3], FixedLength(HEADS), settings=settings)
    plain = decode(pair, prompt_ids[:3], FixedLength(0), settings=settings)
    assert [one.tokens for one in drafts] == [one.tokens for one in plain]
    assert any(round.drafted == HEADS for one in drafts for round in one.rounds)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"1.1.weight": None}, r"missing: '1.1.weight'"),
        ({"7.0.linear.weight": torch.zeros(1)}, r"unknown: '7.0.linear.weight'"),
        ({"0.1.weight": torch.full((48, 16), torch.inf)}, r"0.1.weight has numbers that are not finite"),
        (
            {"2.1.weight": torch.zeros(5, 16)},
            r"2.1.weight has the shape \[5, 16\] where this target's heads have \[48, 16\]",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(plain_pair, tmp_path, change, message):
    state = {**released(plain_pair).state_dict(), **change}
    weights = saved_heads({key: value for key, value in state.items() if value is not None}, tmp_path)
    with pytest.raises((InputError, PolicyError), match=message):
        import_medusa(weights, plain_pair, tmp_path / "d")
    assert not (tmp_path / "d").exists()
