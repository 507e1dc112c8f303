"""XGBoost out of core: pieces on disk give what rows in memory give, and settings reach it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost as xgb
from scipy.special import expit
from specstop.policies.errors import InputError
from specstop.train.heads.calibration.logits import log_loss
from specstop.train.heads.fitting import FitOptions, FitTask
from specstop.train.heads.kinds.boosted import fit_trees, flatten
from specstop.train.heads.matrices import Pieces, matrices
from specstop.train.heads.rows import FitRows
from synthetic import NAMES, synthetic_rows

CLOSE = 0.003  # nats: quantiles of pieces are merged, so a split may lie a rank beside


@pytest.fixture(scope="module")
def parts() -> tuple[FitRows, FitRows]:
    return synthetic_rows(6000, 1), synthetic_rows(3000, 2)


def _put(found: list[dict[str, Any]], **piece: Any) -> None:
    found.append(piece)


def test_pieces_hold_each_labelled_row_once(parts: tuple[FitRows, FitRows], tmp_path: Path) -> None:
    rows = parts[0]
    pieces = Pieces(rows, rows.drawn, "accepted", NAMES, tmp_path / "c", piece=1000)
    for _ in range(2):
        found: list[dict[str, Any]] = []
        take = functools.partial(_put, found)
        while pieces.next(take):
            pass
        assert len(found) == -(-int(rows.drawn.sum()) // 1000) > 3
        np.testing.assert_array_equal(np.concatenate([p["data"] for p in found]), rows.features[rows.drawn].numpy())
        labels = np.concatenate([p["label"] for p in found])
        np.testing.assert_array_equal(labels, rows.accepted[rows.drawn].numpy().astype(np.float32))
        pieces.reset()


@pytest.mark.parametrize("label", ["accepted", "followed"])
def test_matrices_outside_have_the_same_rows(parts: tuple[FitRows, FitRows], label: str) -> None:
    with matrices(parts, label, NAMES, False) as inside:
        sizes = [(m.num_row(), m.num_col()) for m in inside]
        labels = inside[0].get_label()
    with matrices(parts, label, NAMES, True, piece=700) as outside:
        assert all(isinstance(m, xgb.ExtMemQuantileDMatrix) for m in outside)
        assert [(m.num_row(), m.num_col()) for m in outside] == sizes
        np.testing.assert_array_equal(outside[0].get_label(), labels)


def test_a_head_fitted_outside_is_as_good(parts: tuple[FitRows, FitRows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specstop.train.heads.matrices.matrices.__defaults__", (900,))
    heads = [fit_trees(FitTask(*parts, NAMES, options=FitOptions(out_of_core=outside)))[0] for outside in (False, True)]
    rows = parts[1]
    drawn, features = rows.drawn.numpy(), rows.features.numpy()
    labels = rows.accepted.numpy()[drawn]
    losses = [log_loss(expit(head.scores(features, 1)[drawn, 0]), labels) for head in heads]
    assert losses[1] == pytest.approx(losses[0], abs=CLOSE)
    assert losses[1] < log_loss(np.full(len(labels), labels.mean()), labels) - 0.05


def test_params_reach_the_booster_and_deeper_trees_are_flattened(parts: tuple[FitRows, FitRows]) -> None:
    options = FitOptions(params={"max_depth": 6, "trees": 7, "eta": 0.3, "min_child_weight": 1})
    head, files = fit_trees(FitTask(*parts, NAMES, options=options))
    booster = xgb.Booster()
    booster.load_model(bytearray(files["accept.ubj"]))
    assert head.tensors()["leaf"].shape[-1] == 2**6
    assert booster.num_boosted_rounds() <= 7
    features = np.clip(parts[1].features.numpy(), *(head.tensors()[side] for side in ("low", "high")))
    expected = booster.predict(xgb.DMatrix(features, feature_names=list(NAMES)), output_margin=True)
    np.testing.assert_allclose(head.scores(features, 1)[:, 0], expected, atol=2e-5)
    assert flatten(booster, 8)["leaf"].shape[1] == 2**8


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_one_line(parts: tuple[FitRows, FitRows]) -> None:
    with pytest.raises(InputError, match="device warp: XGBoost cannot use it here") as caught:
        fit_trees(FitTask(*parts, NAMES, options=FitOptions(device="warp")))
    assert "\n" not in str(caught.value)


def test_an_old_library_is_named(parts: tuple[FitRows, FitRows], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(xgb, "ExtMemQuantileDMatrix")
    with pytest.raises(InputError, match=r"out_of_core: expected xgboost 3\.0 or later"):
        fit_trees(FitTask(*parts, NAMES, options=FitOptions(out_of_core=True)))
