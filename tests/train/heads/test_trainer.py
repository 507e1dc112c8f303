"""Networks: module and data module by themselves, early stopping, resuming, loggers, and what a Trainer refuses."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from specstop.policies.display import Progress, silent
from specstop.policies.errors import InputError
from specstop.policies.heads.layers import MLPHead
from specstop.train import StopHeadModule, TraceDataModule
from specstop.train.heads.basis import basis_columns, fit_basis
from specstop.train.heads.fitting import FitOptions, FitTask, fitter
from specstop.train.heads.kinds.resnet import ResNet
from specstop.train.heads.networks import Recipe, seeded, train_network
from specstop.train.heads.rows import FitRows
from specstop.train.heads.trainer import find_logger, make_trainer
from synthetic import NAMES, synthetic_rows

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def parts() -> tuple[FitRows, FitRows]:
    return synthetic_rows(1500, 1), synthetic_rows(600, 2)


def fit_network(rows: FitRows, held_out: FitRows, options: FitOptions, progress: Progress = silent) -> Any:
    """Return the head `mlp`."""
    head, _ = fitter("mlp")(FitTask(rows, held_out, NAMES, progress=progress, options=options))
    return head


def columns_of(rows: FitRows) -> tuple[torch.Tensor, ...]:
    """Columns as they come with the flag of depth 0, labels, and which are known."""
    return torch.cat([rows.features, (rows.depth == 0).float()[:, None]], 1), rows.labels, rows.known


def same(first: MLPHead, second: MLPHead) -> bool:
    mine, theirs = first.tensors(), second.tensors()
    return set(mine) == set(theirs) and all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_the_example_of_the_docstring(parts: tuple[FitRows, FitRows]) -> None:
    rows, held_out = parts
    basis = fit_basis(rows, NAMES)
    module = StopHeadModule(basis.width + 1, hidden=(8, 8))
    data = TraceDataModule(rows, held_out, basis)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(module, datamodule=data)
    head = module.to_head(NAMES, basis, rows)
    x = rows.features[:5].numpy()
    columns = torch.cat(
        [torch.from_numpy(basis_columns(basis, torch.from_numpy(x), torch.ones(5))), torch.zeros(5, 1)], 1
    )
    np.testing.assert_allclose(head.scores(x, 1), module(columns).detach().numpy(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("caught", [True, False], ids=["handled by the caller", "not handled"])
def test_a_request_to_terminate_reaches_the_caller(
    caught: bool, parts: tuple[FitRows, FitRows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would end the process with exit code 0."""
    calls, sent = [], signal.raise_signal
    monkeypatch.setattr("specstop.train.heads.trainer.signal.raise_signal", calls.append)

    def terminate(task: str, done: int, total: int) -> None:
        if done == 1:
            sent(signal.SIGTERM)

    kept = signal.signal(signal.SIGTERM, (lambda number, frame: calls.append("caught")) if caught else signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt):
            fit_network(*parts, FitOptions(epochs=3), terminate)
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert calls == (["caught"] if caught else [signal.SIGTERM])


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(parts: tuple[FitRows, FitRows], tmp_path: Path) -> None:
    """Killed after the third of five epochs; a schedule that began anew, or another order of the rows, would show."""
    whole = fit_network(*parts, FitOptions(epochs=5, checkpoints=tmp_path / "whole", batch_size=256))
    told: list[tuple[int, int]] = []

    def killed(task: str, done: int, total: int) -> None:
        if done == total * 4 // 5:  # before that epoch is saved
            raise KeyboardInterrupt

    options = FitOptions(epochs=5, checkpoints=tmp_path / "cut", batch_size=256)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt):  # where Lightning would end the process
        fit_network(*parts, options, killed)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (tmp_path / "cut" / "last.ckpt").exists()
    resumed = FitOptions(epochs=5, checkpoints=tmp_path / "cut", batch_size=256, resume=True)
    again = fit_network(*parts, resumed, lambda task, *done: told.append(done))
    assert told[0] == (told[0][1] * 3 // 5, told[0][1]), "it went on where it was"
    assert same(again, whole)


def test_a_run_that_had_stopped_early_is_not_trained_on(
    parts: tuple[FitRows, FitRows], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another fold of it was cut off: going on must leave this one as it is."""
    monkeypatch.setattr("specstop.train.heads.trainer.PATIENCE", 1)
    options = FitOptions(epochs=40, checkpoints=tmp_path, learning_rate=0.1)
    stopped = fit_network(*parts, options)
    epochs = []
    for _ in range(3):
        again = fit_network(*parts, dataclasses.replace(options, resume=True))
        assert same(again, stopped)
        epochs.append(torch.load(tmp_path / "last.ckpt", weights_only=True)["epoch"])
    assert epochs[0] == epochs[1] == epochs[2] < 38


def test_what_is_left_out_in_an_epoch_is_the_same_in_a_resumed_run(
    parts: tuple[FitRows, FitRows], tmp_path: Path
) -> None:
    class Noisy(ResNet):
        def forward(self, columns: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
            return super().forward(self.dropout(columns), *states)

    def killed(task: str, done: int, total: int) -> None:
        if done == total * 4 // 5:
            raise KeyboardInterrupt

    def fit(folder: str, progress: Progress = silent, resume: bool = False) -> dict[str, torch.Tensor]:
        options = FitOptions(epochs=5, checkpoints=tmp_path / folder, batch_size=256, resume=resume)
        network, (fit, held) = seeded(Noisy, 0, [4], 8, 1, 0.5), map(columns_of, parts)
        task = FitTask(*parts, NAMES, progress=progress, options=options)
        return dict(train_network(network, fit, held, task, Recipe(), "noisy"))

    whole = fit("whole")
    with pytest.raises(KeyboardInterrupt):
        fit("cut", killed)
    again = fit("cut", resume=True)
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_a_run_is_not_gone_on_from_as_another(parts: tuple[FitRows, FitRows], tmp_path: Path) -> None:
    """Weights of the same shapes may know the prompts that are held out now."""
    options = FitOptions(epochs=1, checkpoints=tmp_path, batch_size=512)
    task = FitTask(*parts, NAMES, options=options, of={"prompts held out": "a"})
    fitter("mlp")(task)
    resumed = dataclasses.replace(task, options=dataclasses.replace(options, resume=True))
    for change, why in (
        ({"seed": 1}, "seed 0, not 1"),
        ({"of": {"prompts held out": "b"}}, "prompts held out a, not b"),
        ({"options": dataclasses.replace(resumed.options, epochs=2)}, "epochs 1, not 2"),
        (
            {"options": dataclasses.replace(resumed.options, params={"weight_decay": 0.1})},
            "hyper-parameters {}, not {'weight_decay': 0.1}",
        ),
    ):
        with pytest.raises(InputError, match=f"resume: the checkpoint in .* is of a run with {why}; give the same"):
            fitter("mlp")(dataclasses.replace(resumed, **change))
    fitter("mlp")(resumed)


def test_a_work_folder_in_use_is_not_mixed_up(parts: tuple[FitRows, FitRows], tmp_path: Path) -> None:
    options = FitOptions(epochs=1, checkpoints=tmp_path, batch_size=512)
    fit_network(*parts, options)
    assert (tmp_path / "logs" / "version_0" / "metrics.csv").exists(), "csv unless told otherwise"
    with pytest.raises(InputError, match="those of another run; pass `resume`"):
        fit_network(*parts, options)
    wider = FitOptions(epochs=1, checkpoints=tmp_path, batch_size=512, resume=True, params={"width": 8})
    with pytest.raises(InputError, match=r"a run with hyper-parameters {}, not {'width': 8}; give the same"):
        fit_network(*parts, wider)
    (tmp_path / "last.ckpt").write_bytes(b"cut off")
    with pytest.raises(InputError, match="is not a checkpoint of such a run: it is damaged; remove it"):
        fit_network(*parts, FitOptions(epochs=1, checkpoints=tmp_path, batch_size=512, resume=True))


def test_training_stops_early(tmp_path: Path) -> None:
    """Labels are noise: the held-out loss rises once the network learns them by heart."""
    generator = torch.Generator().manual_seed(0)
    noise = []
    for count in (60, 60):
        rows = synthetic_rows(count)
        labels = torch.rand(count, generator=generator) < 0.5
        noise.append(FitRows(rows.features, rows.depth.clamp_min(1), labels, labels, labels))
    told = []
    options = FitOptions(epochs=100, learning_rate=0.05, batch_size=16)
    fit_network(*noise, options, lambda task, *done: told.append(done))
    done, total = told[-1]
    assert done == total < told[0][1] / 2, "the task ends there"


def test_params_shape_the_network(parts: tuple[FitRows, FitRows]) -> None:
    options = FitOptions(epochs=1, params={"width": 5, "layers": 3, "learning_rate": 0.01, "weight_decay": 0.1})
    tensors = fit_network(*parts, options).tensors()
    assert [tensors[f"weight.{i}"].shape[0] for i in range(4)] == [5, 5, 5, 2]
    assert not same(
        fit_network(*parts, FitOptions(epochs=1)), fit_network(*parts, FitOptions(epochs=1, learning_rate=0.1))
    )


def test_loggers_by_name(tmp_path: Path) -> None:
    assert find_logger(None, None) is False
    assert find_logger("none", tmp_path) is False
    assert type(find_logger(None, tmp_path)).__name__ == "CSVLogger"
    assert type(find_logger("CSVLogger", tmp_path)).__name__ == "CSVLogger"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logger": "cvs", "checkpoints": True}, r"unknown logger 'cvs' \(did you mean 'csv'\?\)"),
        ({"logger": "csv"}, "give a work folder with `checkpoints`"),
        ({"logger": "wandb", "checkpoints": True}, "logger wandb: "),
        ({"accelerator": "gpuu"}, "accelerator, devices, precision: .*gpuu"),
        ({"devices": "0,x"}, "devices: expected 1, or which one"),
        ({"devices": "2"}, "devices: expected one device, not 2"),
        ({"precision": "17"}, "accelerator, devices, precision: .*17"),
    ],
    ids=["typo", "no folder", "not installed", "accelerator", "devices", "two devices", "precision"],
)
def test_what_a_trainer_cannot_have_is_one_line(options: dict[str, object], message: str, tmp_path: Path) -> None:
    if options.get("logger") == "wandb":
        pytest.importorskip("lightning")
        try:
            import wandb  # noqa: F401
        except ImportError:
            pass
        else:
            pytest.skip("wandb is installed")
    work = tmp_path if options.pop("checkpoints", False) else None
    with pytest.raises(InputError, match=message) as caught:
        make_trainer(FitOptions(checkpoints=work, **options), tmp_path, 1)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
