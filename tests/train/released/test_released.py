"""Released heads as policy folders: every published layout, and nothing but tensors out of an untrusted file."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from specstop.policies.contract import DraftStep
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.heads.layers import HARD_FEATURES
from specstop.policies.storage import load_policy_folder
from specstop.train.released import import_weights
from torch import Tensor, nn


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
def _seed() -> None:
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
def test_dynasds_models_answer_as_before(tmp_path: Path, sizes: tuple[int, ...], legacy: bool) -> None:
    model = DecisionModel(*sizes)
    path = saved(model, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    done = import_weights(path, tmp_path / "p")
    assert done.head.kind == done.name == ("dynasd-hard" if sizes[0] == 11 else "dynasd-soft")
    x = torch.rand(6, sizes[0])
    with torch.no_grad():
        torch.testing.assert_close(accept(tmp_path / "p", x), model(x)[:, 0])
    policy = load_policy_folder(tmp_path / "p")
    assert policy.features == (HARD_FEATURES if sizes[0] == 11 else ())
    assert policy.sizes == ({} if sizes[0] == 11 else {"draft_hidden": sizes[0]})
    assert policy.rule.to_dict() == {"kind": "any", "threshold": 0.4}
    assert (policy.first, policy.max_depth, policy.metadata.provenance["imported from"]) == (1, 5, "w.pt")


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("form", ["bin", "safetensors"])
def test_specdecs_head_answers_as_before(tmp_path: Path, shared: bool, form: str) -> None:
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


def test_the_rejection_weight_can_be_taken_out(tmp_path: Path) -> None:
    path = saved(AcceptanceHead(12, 2), tmp_path / "w.pt")
    import_weights(path, tmp_path / "a")
    import_weights(path, tmp_path / "b", rejection_weight=6.0, threshold=0.5, depth=9)
    x = torch.randn(6, 12)
    published = accept(tmp_path / "a", x)
    torch.testing.assert_close(accept(tmp_path / "b", x), 6 * published / (1 - published + 6 * published))
    policy = load_policy_folder(tmp_path / "b")
    assert (policy.max_depth, policy.rule.to_dict()["threshold"]) == (9, 0.5)
    assert policy.metadata.provenance["rejection weight taken out"] == 6.0
    with pytest.raises(InputError, match=r"rejection_weight: d.pt is of the layout dynasd-hard"):
        import_weights(saved(DecisionModel(11, 4, 1), tmp_path / "d.pt"), tmp_path / "c", rejection_weight=6.0)


# What is refused


class Evil:
    """Makes the file `mark` when it is unpickled by a loader that calls what it is told to."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def evil_dict(path: Path, mark: Path) -> None:
    torch.save({"layers.0.weight": Evil(mark)}, path)


def evil_pickle(path: Path, mark: Path) -> None:
    path.write_bytes(pickle.dumps(Evil(mark), protocol=2))


def evil_legacy(path: Path, mark: Path) -> None:
    torch.save({"layers.0.weight": Evil(mark)}, path, _use_new_zipfile_serialization=False)


def whole_module(path: Path, mark: Path) -> None:
    torch.save(DecisionModel(11, 4, 1), path)


@pytest.mark.parametrize("make", [evil_dict, evil_pickle, evil_legacy, whole_module])
def test_a_pickle_of_more_than_tensors_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    path, mark = tmp_path / "w.pt", tmp_path / "mark"
    make(path, mark)
    if make is not whole_module:
        with_care = pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))  # the file does what it is made for
        assert with_care is None and (tmp_path / "proof").is_dir()
    with pytest.raises(PolicyError, match=r"w.pt holds more than tensors.*nothing of it was run") as caught:
        import_weights(path, tmp_path / "p")
    assert "\n" not in str(caught.value)
    assert not mark.exists() and not (tmp_path / "p").exists()


def state(**changes: Any) -> dict[str, Any]:
    return {**DecisionModel(11, 4, 1).state_dict(), **{k.replace("__", "."): v for k, v in changes.items()}}


STATES: dict[str, tuple[Any, str]] = {
    "batch norm": (state(layers__1__running_mean=torch.zeros(4)), "unknown: .*'layers.1.running_mean'"),
    "a convolution": ({"layer1.0.weight": torch.zeros(2, 2)}, "not known, for 'layer1.0.weight'"),
    "both papers": (state(model__0__linear__weight=torch.zeros(2, 2)), "the layout is not known"),
    "weights of an activation": (state(layers__1__weight=torch.zeros(4)), "weights: unknown: 'layers.1.weight'"),
    "a layer left out": ({k: v for k, v in state().items() if k != "layers.2.bias"}, "missing: 'layers.2.bias'"),
    "a wrong width": (state(layers__2__weight=torch.zeros(1, 5)), "expected weight.1"),
    "not finite": (state(layers__0__bias=torch.full((4,), float("nan"))), "finite numbers in bias.0"),
    "a list": ([torch.zeros(2)], "holds a list; expected a state dict"),
    "a tensor": (torch.zeros(2), "holds a Tensor; expected a state dict"),
    "numbers as names": ({0: torch.zeros(2)}, "expected a state dict"),
    "nothing": ({}, "expected a state dict"),
    "a number": (state(layers__0__bias=3.0), "'layers.0.bias' is no plain tensor"),
    "whole numbers": (state(layers__0__bias=torch.zeros(4, dtype=torch.int64)), "no plain tensor"),
    "a sparse tensor": (state(layers__0__weight=torch.zeros(4, 11).to_sparse()), "is no plain tensor"),
    "a giant from one number": (state(layers__0__weight=torch.zeros(1).expand(1 << 20, 1 << 20)), "no plain tensor"),
    "specdec blocks apart": (
        {f"model.{i}.linear.{p}": torch.zeros(s) for i, n in enumerate((3, 4)) for p, s in (("weight", (n, n)), ("bias", n))}
        | {"model.2.weight": torch.zeros(2, 3), "model.2.bias": torch.zeros(2)},
        "blocks of different shapes",
    ),
    "a specdec block left out": (
        {k: v for k, v in AcceptanceHead(3, 3, False).state_dict().items() if "model.1" not in k},
        "missing: 'model.1.linear.bias'",
    ),
    "no last layer": (
        {k: v for k, v in AcceptanceHead(3, 2).state_dict().items() if "model.2" not in k},
        "unknown: 'model.0.linear.bias'|missing: 'model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STATES)
def test_another_state_dict_is_refused_by_the_names_in_it(tmp_path: Path, case: str) -> None:
    value, message = STATES[case]
    torch.save(value, tmp_path / "w.pt")
    with pytest.raises(PolicyError, match=message) as caught:
        import_weights(tmp_path / "w.pt", tmp_path / "p")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("raw", [b"", b"\x80", b"PK\x03\x04 no", b"{" * 100, b"\x00" * 64], ids=repr)
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(PolicyError, match=name) as caught:
        import_weights(tmp_path / name, tmp_path / "p")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth: expected 1 to 1024, not 0"),
        ({"threshold": 1.5}, "threshold"),
        ({"rejection_weight": 0.0}, "rejection_weight"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = saved(DecisionModel(11, 4, 1), tmp_path / "w.pt")
    with pytest.raises((InputError, PolicyError), match=message):
        import_weights(path, tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


def test_missing_files_and_full_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        import_weights(tmp_path / "w.pt", tmp_path / "p")
    (tmp_path / "hub").mkdir()
    with pytest.raises(InputError, match=r"expected model.safetensors or pytorch_model.bin in the folder"):
        import_weights(tmp_path / "hub", tmp_path / "p")
    path = saved(DecisionModel(11, 4, 1), tmp_path / "w.pt")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "mine").write_text("keep")
    with pytest.raises(InputError, match=r"not empty.*`overwrite`"):
        import_weights(path, tmp_path / "p")
    with pytest.raises(InputError, match="mine is not among the files that specstop wrote there"):
        import_weights(path, tmp_path / "p", overwrite=True)
    assert [p.name for p in (tmp_path / "p").iterdir()] == ["mine"]
    (tmp_path / "p" / "mine").unlink()
    import_weights(path, tmp_path / "p")
    import_weights(path, tmp_path / "p", overwrite=True, threshold=0.25)
    assert load_policy_folder(tmp_path / "p").rule.to_dict()["threshold"] == 0.25


def test_weights_are_never_replaced_by_the_policy_made_of_them(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    path = saved(DecisionModel(11, 4, 1), tmp_path / "hub" / "pytorch_model.bin")
    before = path.read_bytes()
    for given, out, message in (
        (path, path.parent, "which the command reads"),
        (path, path, "which the command reads"),
        (path.parent, path.parent, "which the command reads"),
        (path.parent, path.parent / "new", "which the command reads"),
    ):
        with pytest.raises(InputError, match=message):
            import_weights(given, out, overwrite=True)
    assert ([p.name for p in path.parent.iterdir()], path.read_bytes()) == ([path.name], before)


def test_an_imported_policy_decides_by_forks(tmp_path: Path) -> None:
    """The published rule on a fork of three: any score above the threshold keeps all of it."""
    model = DecisionModel(11, 44, 1)
    import_weights(saved(model, tmp_path / "w.pt"), tmp_path / "p", threshold=0.5)
    policy = load_policy_folder(tmp_path / "p")
    x = torch.rand(50, 3, 11) * torch.tensor([6.0] + [1.0] * 10)
    with torch.no_grad():
        expected = (model(x)[..., 0] > 0.5).any(1, keepdim=True).expand(-1, 3)
    alive, parent = np.ones((50, 3), dtype=bool), np.zeros((50, 3), dtype=np.int64)
    kept, _ = policy.keep(DraftStep(1, alive, parent, x.numpy(), {}, np.arange(50)), None)
    assert np.array_equal(kept, expected.numpy())
    assert 0 < int(kept[:, 0].sum()) < 50
