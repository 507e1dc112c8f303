"""Heads fitted on rounds drawn given the text: chances as labels, and policies that run under that verification."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW, make_prompts
from contract_policies import DEPTH
from specstop.collect.run import collect
from specstop.collect.store import Trace
from specstop.decode.hf import generate
from specstop.decode.loop import Settings, Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.verify.modes import resolve_mode
from specstop.policies.errors import SpecstopWarning
from specstop.policies.profile import Profile
from specstop.policies.storage import load_policy_folder
from specstop.train.evaluate.evaluate import evaluate
from specstop.train.export.deploy import deploy
from specstop.train.fit.plan import without_noise
from specstop.train.fit.run import train
from specstop.train.heads.calibration import fit_kind, log_loss
from specstop.train.heads.linear import as_classes, is_constant
from specstop.train.heads.rows import CHANCE_COLUMNS, Visits, fit_rows, label_columns
from specstop.train.replay.traces.arrays import trace_arrays
from specstop.train.replay.traces.checking import tell_other_rounds

OPTIONS: dict[str, Any] = {"depth": DEPTH, "temperature": 0.7, "max_new_tokens": NEW, "shards": 1}


@pytest.fixture(scope="module")
def block(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, Trace]:
    """Traces of block verification to train on and to evaluate on, of two draws each."""
    folder = tmp_path_factory.mktemp("block")
    made = ((24, "fit", 21), (12, "held", 22))
    return tuple(
        collect(pair, make_prompts(*args), folder / args[1], verification="block", draws=2, **OPTIONS) for args in made
    )


def rows_of(trace: Trace, chances: bool) -> Any:
    arrays = trace_arrays(trace, ("top1", "drawn_prob"), CHANCE_COLUMNS if chances else ())
    row = (~arrays.cut).nonzero()[:, 0]
    return fit_rows(arrays, ("top1", "drawn_prob"), Visits(row, torch.zeros(len(row), 4)))


def test_labels_are_chances_with_the_same_means_and_less_variance(block: tuple[Trace, Trace]) -> None:
    assert label_columns([block[0].header], False) == CHANCE_COLUMNS
    soft, hard = rows_of(block[0], True), rows_of(block[0], False)
    assert torch.equal(soft.features, hard.features) and torch.equal(soft.depth, hard.depth)
    assert hard.chances is None and hard.labels.dtype == torch.float32
    for column, use in ((0, soft.drawn), (1, soft.followed_known)):
        chance, bit = soft.labels[use, column], hard.labels[use, column]
        assert abs(float(chance.mean() - bit.mean())) < 4 * float(bit.std()) / len(bit) ** 0.5
        assert float(chance.std()) < float(bit.std())
        assert float(np.corrcoef(chance, bit)[0, 1]) > 0.2


def test_match_traces_keep_bits(traces: dict[float, Trace], block: tuple[Trace, Trace]) -> None:
    assert label_columns([traces[0.7].header], False) == ()
    assert label_columns([traces[0.7].header, block[0].header], True) == ("draft_prob", "target_prob")
    assert without_noise(("top1", "noisy_margin"), traces[0.7].header) == ("top1", "noisy_margin")
    assert without_noise(("top1", "noisy_margin", "noisy_score"), block[0].header) == ("top1", "drawn_prob")


def test_as_classes_weigh_rows_by_their_chance() -> None:
    x, y = np.arange(6.0).reshape(3, 2), np.array([0.25, 1.0, 0.0], dtype=np.float32)
    rows, classes, weights = as_classes(x, y)
    assert rows.tolist() == [*x.tolist(), *x.tolist()] and classes.tolist() == [True] * 3 + [False] * 3
    assert weights is not None and weights.tolist() == [0.25, 1.0, 0.0, 0.75, 0.0, 1.0]
    assert as_classes(x, y > 0.5)[2] is None
    assert is_constant(np.ones(3)) and is_constant(np.zeros(3, dtype=bool)) and not is_constant(np.array([0.5, 1.0]))


def test_calibrators_and_losses_take_chances() -> None:
    logits, chances = np.linspace(-3, 3, 400), 1.0 / (1.0 + np.exp(-np.linspace(-3, 3, 400) / 2.0))
    assert fit_kind("temperature", logits, chances).temperature == pytest.approx(2.0, rel=0.05)
    bits = chances > 0.5
    assert log_loss(chances, bits) == pytest.approx(float(-np.where(bits, np.log(chances), np.log1p(-chances)).mean()))
    assert log_loss(chances, chances) < log_loss(np.full(400, 0.5), chances)


@pytest.mark.usefixtures("module_cache")
@pytest.mark.parametrize("head", ["logistic", "mlp", "xgboost"])
def test_a_head_is_fitted_settled_and_runs_under_its_verification(
    plain_pair: Pair, block: tuple[Trace, Trace], full_profile: Profile, tmp_path: Path, head: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    made = train(block[0], full_profile, head=head, out=tmp_path / head, params={"epochs": 10} if head == "mlp" else {})
    policy = load_policy_folder(tmp_path / head)
    assert (policy.metadata.verification, policy.metadata.label) == ("block", "block")
    assert "noisy_margin" not in policy.features and "drawn_prob" in policy.features
    assert made.metrics["accept_log_loss"] < 1.1 * made.metrics["accept_log_loss_constant"], "few rows, weak features"
    report = evaluate(block[1], full_profile, [policy], train_traces=block[0])
    assert report.facts["exactness"] == "exact in law, 2 draws of each text" and 8 < report.facts["prompts"] <= 12
    assert report[policy.name].tokens_per_s > 0
    if head == "logistic":
        settings = Settings(0.7, NEW, verification="auto")
        assert resolve_mode("auto", policy, settings.topology, 0.7) == "block"
        assert len(Speculator(plain_pair, policy, settings).generate([5, 6, 7], 1).rounds) > 1
        deploy("hf", tmp_path / "hf", tmp_path / head)
        ran = []
        monkeypatch.setattr(generate, "Speculator", lambda *a, **more: ran.append(Speculator(*a, **more)) or ran[-1])
        asked = {"do_sample": True, "temperature": 0.7, "max_new_tokens": 8, "assistant_model": plain_pair.draft}
        folder = str(tmp_path / "hf")
        plain_pair.target.generate(torch.tensor([[5, 6, 7]]), custom_generate=folder, trust_remote_code=True, **asked)
        assert [speculator.mode.name for speculator in ran] == ["block"], "an exported policy, too"


def test_a_profile_of_another_verification_is_told_of(block: tuple[Trace, Trace], profile: Profile) -> None:
    header = block[0].header
    for quiet in (profile, replace(profile, verification="block")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tell_other_rounds(quiet, header)
    told = replace(
        profile, facts={**profile.facts, "device": "cpu", "drafter": "suffix?confidence=0.6+medusa:here/heads"}
    )
    with pytest.warns(SpecstopWarning, match=r"of the drafter suffix\+medusa, the trace holds those of model"):
        tell_other_rounds(told, header)
    moved = replace(header, facts={**header.facts, "drafter": "suffix?confidence=0.6+medusa:there/heads"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tell_other_rounds(told, moved)
    with pytest.warns(SpecstopWarning, match="of the verification match, .* those of block"):
        tell_other_rounds(replace(profile, verification="match"), header)
