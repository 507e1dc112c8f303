"""Learned policies and their folder: S_j along parents, and a folder that loads as it was or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from feature_head import feature_policy
from head_tensors import NAMES, TENSORS, features, knots
from learned_policies import FACTS, learned
from specstop.policies.contract import Array, DraftStep
from specstop.policies.errors import PolicyError
from specstop.policies.files import STAGE_PREFIX, digest, sha256
from specstop.policies.heads import build_head
from specstop.policies.learned import Calibrator, LearnedPolicy
from specstop.policies.rules import Derived, Rule, Threshold
from specstop.policies.storage import POLICY_FILE, WEIGHTS_FILE, load_policy_folder, save_policy


def asked(depth: int, x: Array, alive: Array | None = None, parent: Array | None = None) -> DraftStep:
    """Return the step of branches with these features [S, B, F]."""
    shape = x.shape[:2]
    alive = np.ones(shape, dtype=bool) if alive is None else alive
    parent = np.zeros(shape, dtype=np.int64) if parent is None else parent
    return DraftStep(depth, alive, parent, np.ascontiguousarray(x, dtype=np.float32), {}, np.arange(len(x)))


def survivals(first: int, accepts: Sequence[Sequence[float]], parents: list[list[int]]) -> list[Array]:
    """Return S_1, S_2, ... by branch of one stream whose branches at each depth have these parents."""
    rule = Rule()
    rule.first = first
    policy = feature_policy(rule, 4)
    state, found = policy.start(1, np.zeros(1, dtype=np.int64)), []
    for depth in range(first, len(accepts) + 1):
        accept = np.array([1.0] if depth == 0 else accepts[depth - 1])
        parent = np.array([[0]] if depth == 0 else [parents[depth - 1]])
        shown = np.stack([accept, np.full_like(accept, 0.5)], -1)[None]
        keep, state = policy.keep(asked(depth, shown, parent=parent), state)
        assert keep.all()
        found.append(state[0])
    return found[1 - first :]


@pytest.mark.parametrize("first", [0, 1])
def test_survival_is_the_product_along_a_chain(first: int) -> None:
    values = [0.9, 0.5, 0.8, 0.25]
    found = survivals(first, [[v] for v in values], [[0]] * 4)
    assert np.concatenate(found).tolist() == pytest.approx(np.cumprod(values).tolist())


@pytest.mark.parametrize("first", [0, 1])
def test_survival_follows_the_parents_of_a_tree(first: int) -> None:
    accepts = [[0.9, 0.5, 0.25], [0.5, 1.0, 0.5], [0.5, 0.25, 1.0]]
    parents = [[0, 0, 0], [2, 0, 0], [1, 1, 0]]
    expected = [[0.9, 0.5, 0.25], [0.125, 0.9, 0.45], [0.45, 0.225, 0.125]]
    np.testing.assert_allclose(survivals(first, accepts, parents), expected, rtol=1e-6)


def test_streams_side_by_side_are_each_alone() -> None:
    policy = learned()
    x = features(5, 1)
    state = policy.keep(asked(0, x), None)[1]
    keep, survival = policy.keep(asked(1, x), state)
    for s in range(5):
        one = slice(s, s + 1)
        alone = policy.keep(asked(1, x[one]), state[one])
        assert np.array_equal(alone[0], keep[one])
        assert np.array_equal(alone[1], survival[one])
    dead = np.zeros((5, 1), dtype=bool)
    assert not policy.keep(asked(1, x, dead), state)[0].any(), "dead branches are not kept"


@pytest.mark.parametrize("kind", list(TENSORS))
def test_what_is_dead_changes_nothing_for_the_others(kind: str) -> None:
    """Only live branches are scored; each has the same bits as if all were."""
    policy = learned(kind)
    x, parent = features(40, 3), np.random.default_rng(1).integers(0, 3, (40, 3))
    alive = np.random.default_rng(2).random((40, 3)) < 0.6
    state = policy.keep(asked(1, x), policy.keep(asked(0, x[:, :1]), None)[1])[1]
    found, _ = policy.survive(asked(2, x, parent=parent), state)
    middle = float(np.median(found[0] * found[2]))
    policy = policy.with_rule(Derived([middle] * 4))
    whole, survival = policy.keep(asked(2, x, parent=parent), state)
    kept, partial = policy.keep(asked(2, x * alive[..., None], alive, parent), state)
    assert np.array_equal(kept, whole & alive)
    np.testing.assert_allclose(partial, survival * alive, rtol=1e-6 if kind == "resnet" else 0)
    assert 0 < kept.sum() < alive.sum()


@pytest.mark.parametrize(
    "rule", [Derived([0.1, 0.2]), Derived([0.1], 1), Threshold("step", 0.4), Threshold("survival", 0.2)]
)
@pytest.mark.parametrize("kind", list(TENSORS))
def test_a_folder_gives_back_the_same_decisions_and_facts(tmp_path: Path, kind: str, rule: Rule) -> None:
    policy = learned(kind, rule)
    again = load_policy_folder(save_policy(policy, tmp_path / "p", {"booster.ubj": b"{xyz"}))
    x = features(50, 1)
    states: list[Any] = [None, None]
    for depth in range(policy.first, 4):
        step = asked(depth, x + 0.01 * depth)
        answers = [p.keep(step, state) for p, state in zip((policy, again), states, strict=True)]
        assert np.array_equal(answers[0][0], answers[1][0])
        assert np.array_equal(answers[0][1], answers[1][1])
        states = [a[1] for a in answers]
    assert again.metadata == FACTS
    for name in ("name", "features", "max_depth", "first"):
        assert getattr(again, name) == getattr(policy, name)
    assert (tmp_path / "p" / "booster.ubj").read_bytes() == b"{xyz"


def test_the_card_names_what_matters(tmp_path: Path) -> None:
    text = (save_policy(learned(), tmp_path / "p") / "README.md").read_text()
    for word in ("mine", "logistic", "derived", "temperature 0.7", "52.5 tokens/s", "0.2500", *NAMES):
        assert word in text


@pytest.mark.parametrize("maps", [("temperature", "identity"), ("identity", "isotonic"), ("isotonic", "identity")])
def test_probabilities_are_the_calibrated_logits(maps: tuple[str, str]) -> None:
    accept, next_ = (Calibrator(k, 1.7 if k == "temperature" else 1.0, knots() if k == "isotonic" else None)
                         for k in maps)  # fmt: skip
    head = build_head("mlp", NAMES, TENSORS["mlp"]())
    policy = LearnedPolicy("mine", NAMES, head, accept, next_, Derived([0.1]), 4)
    x = features(9, 2)
    for depth in (0, 1):
        scores = head.scores(x.reshape(-1, x.shape[-1]), depth).reshape(9, 2, 2)
        found = policy.probabilities(x, depth)
        assert np.array_equal(found[0], accept(scores[..., 0]))
        assert np.array_equal(found[1], next_(scores[..., 1]))


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a damage that changes `policy.json`; None takes an entry out."""

    def damage(folder: Path) -> None:
        raw = {**json.loads((folder / POLICY_FILE).read_text()), **changes}
        raw = {k: v for k, v in raw.items() if v is not None}
        (folder / POLICY_FILE).write_text(json.dumps({**raw, "sha256": digest(raw)}))

    return damage


def reweigh(change: Callable[[dict[str, Array]], object]) -> Callable[[Path], None]:
    """Return a damage that changes the tensors and mends the checksum."""

    def damage(folder: Path) -> None:
        tensors = safetensors.numpy.load_file(folder / WEIGHTS_FILE)
        change(tensors)
        safetensors.numpy.save_file(tensors, folder / WEIGHTS_FILE)
        edit(files={WEIGHTS_FILE: sha256(folder / WEIGHTS_FILE)})(folder)

    return damage


def flip(folder: Path) -> None:
    raw = bytearray((folder / WEIGHTS_FILE).read_bytes())
    raw[-1] ^= 1
    (folder / WEIGHTS_FILE).write_bytes(raw)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS_FILE).write_bytes(pickle.dumps({"head.bias": 1}))
    edit(files={WEIGHTS_FILE: sha256(folder / WEIGHTS_FILE)})(folder)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a changed byte": (flip, "checksum differs"),
    "no weights": (lambda f: (f / WEIGHTS_FILE).unlink(), WEIGHTS_FILE),
    "no json": (lambda f: (f / POLICY_FILE).unlink(), "policy.json"),
    "broken json": (lambda f: (f / POLICY_FILE).write_text("{"), "expected JSON"),
    "json list": (lambda f: (f / POLICY_FILE).write_text("[]"), "expected a JSON object"),
    "another schema": (edit(schema=3), "has schema 3, but this specstop reads 2"),
    "pickled weights": (pickled, "is invalid"),
    "no head": (edit(head=None), "'head'"),
    "unknown head": (edit(head="forest"), "unknown head 'forest'"),
    "unhashable head": (edit(head=["mlp"]), "head"),
    "unknown feature": (edit(features=["top1", "tpo2"]), "unknown feature 'tpo2'"),
    "fewer features": (edit(features=list(NAMES[:4])), "weights: expected mean"),
    "unknown rule": (edit(rule={"kind": "guess"}), "unknown rule 'guess'"),
    "no threshold": (edit(rule={"kind": "step"}), "'threshold'"),
    "rule of text": (edit(rule="derived"), "rule"),
    "one calibration": (edit(calibration=[{"kind": "identity", "temperature": 1.0}]), "calibration"),
    "unknown calibration": (
        edit(calibration=[{"kind": "x", "temperature": 1.0}] * 2),
        "not x",
    ),
    "depth 0": (edit(max_depth=0), "max_depth: "),
    "depth of text": (edit(max_depth="4"), "max_depth: "),
    "no facts": (edit(pair=None), "'pair'"),
    "a temperature of text": (edit(temperature="warm"), "temperature"),
    "a rate of text": (edit(rho="fast"), "rho"),
    "a mangled acceptance": (edit(acceptance=3), "acceptance"),
    "a wrong shape": (
        reweigh(lambda t: t.update({"head.bias": np.zeros(5, dtype=np.float32)})),
        "expected bias",
    ),
    "a missing tensor": (reweigh(lambda t: t.pop("head.scale")), "missing or unknown: scale"),
    "an extra tensor": (
        reweigh(lambda t: t.update({"head.more": np.zeros(1, dtype=np.float32)})),
        "missing or unknown: more",
    ),
    "NaN weights": (reweigh(lambda t: t["head.bias"].fill(np.nan)), "finite numbers in bias"),
    "no knots": (reweigh(lambda t: t.pop("calibration.next")), "calibration.next"),
    "falling knots": (
        reweigh(lambda t: t.update({"calibration.accept": t["calibration.accept"][:, ::-1].copy()})),
        "increasing, the second row",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    save_policy(learned(), tmp_path / "p")
    load_policy_folder(tmp_path / "p")
    damage(tmp_path / "p")
    with pytest.raises(PolicyError, match=message) as caught:
        load_policy_folder(tmp_path / "p")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("policy")


def test_a_pickle_or_an_empty_folder_is_no_policy(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "run",))

    (tmp_path / "policy.pkl").write_bytes(pickle.dumps(Evil()))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / POLICY_FILE).write_bytes(pickle.dumps(Evil()))
    for path in (tmp_path / "policy.pkl", tmp_path / "folder", tmp_path / "nowhere"):
        with pytest.raises(PolicyError, match="policy"):
            load_policy_folder(path)
    assert not (tmp_path / "run").exists()


class Unwritable(Derived):
    """Fails when it is written, after the weights."""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "derived", "thresholds": [float("inf")]}


def test_a_save_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_policy(learned(rule=Unwritable([0.1])), tmp_path / "p")
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_keeps_the_old_policy(tmp_path: Path) -> None:
    save_policy(learned(), tmp_path / "p")
    with pytest.raises(ValueError, match="not JSON compliant"):
        save_policy(learned(rule=Unwritable([0.1])), tmp_path / "p")
    assert load_policy_folder(tmp_path / "p").rule.to_dict() == learned().rule.to_dict()
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
    assert not list(tmp_path.glob(f"{STAGE_PREFIX}*"))


def test_a_save_replaces_the_old_policy_whole(tmp_path: Path) -> None:
    save_policy(learned(), tmp_path / "p", {"old.ubj": b"x"})
    save_policy(learned("mlp"), tmp_path / "p")
    assert load_policy_folder(tmp_path / "p").head.kind == "mlp"
    assert not (tmp_path / "p" / "old.ubj").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["p"]
