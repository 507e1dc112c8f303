"""Policy folders: they load as they were saved or are refused in one line, and nothing in them is executed; the hub."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from damage import DAMAGES, Evil, damage_bytes, read_index, seal
from head_tensors import FACTS, NAMES, RANDOM_HEADS, learned, random_policy
from hypothesis import given, settings, strategies as st
from joint_policies import batch_policy
from specstop.policies import from_pretrained
from specstop.policies.batch_rules import CostGrid, linear_costs
from specstop.policies.contract import StopPolicy
from specstop.policies.errors import PolicyError
from specstop.policies.learned import LearnedPolicy, SurvivalMaps, TrainingMetadata
from specstop.policies.registry import load_policy
from specstop.policies.rules import Derived
from specstop.policies.storage import POLICY_FILE, WEIGHTS_FILE, load_policy_folder, policy_digest, save_policy
from specstop.policies.testing import play, same
from trees import make_tree_policy


def with_survival_tables() -> LearnedPolicy:
    grid = np.linspace(0.0, 1.0, 33, dtype=np.float32)
    tables = np.broadcast_to(grid, (2, 5, 2, 33)).copy()
    tables[:, 2, 1] **= 2
    policy = random_policy("logistic", Derived([0.05, 0.2, 0.1], 1))
    maps = SurvivalMaps(tables)
    parts = policy.head, policy.accept, policy.next, policy.rule, 5, TrainingMetadata(temperature=(0.0, 0.7, 1.0))
    return LearnedPolicy("tables", NAMES, *parts, survival=maps)


POLICIES: dict[str, Callable[[], LearnedPolicy]] = {
    **{name: lambda name=name: random_policy(name) for name in RANDOM_HEADS},  # type: ignore[misc]
    "rule by batch size": lambda: learned(rule=Derived([0.3], 1, [(1, None), (4, 2)], [(1, 1.0), (4, 1.5)])),
    "every fact": learned, "survival tables": with_survival_tables, "tree": make_tree_policy, "batch": batch_policy,
}  # fmt: skip


def decisions(policy: LearnedPolicy) -> Any:
    """Return what determines a policy: its answers, names, limits and metadata."""
    answers, _ = play(policy, range(6), 1, batch=np.zeros(6, dtype=np.int64))
    return answers, policy.name, policy.features, policy.max_depth, policy.first, policy.rule.to_dict(), policy.metadata


@pytest.mark.parametrize("name", POLICIES)
def test_a_folder_returns_the_same_policy(tmp_path, name):
    policy = POLICIES[name]()
    folder = save_policy(policy, tmp_path / "p")
    again = load_policy_folder(folder)
    assert type(again) is type(policy) and same(decisions(again), decisions(policy))
    assert (again.hidden, again.sizes) == (policy.hidden, policy.sizes)


def test_a_folder_from_git_or_the_hub_and_any_order_of_its_json_is_loaded(tmp_path):
    folder = save_policy(learned(), tmp_path / "p")
    card = (folder / "README.md").read_text()
    assert all(word in card for word in ("mine", "logistic", "0.7000", *NAMES))
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / ".cache").mkdir()
    (folder / "README.md").unlink()
    (folder / POLICY_FILE).write_text(json.dumps(dict(sorted(read_index(folder, POLICY_FILE).items(), reverse=True))))
    assert from_pretrained(folder).metadata == FACTS


@dataclass
class Lengths(StopPolicy):
    """A plugin with a field, an attribute beside it, and a table that grows."""

    length: int = 2

    def __post_init__(self) -> None:
        self.costs = CostGrid(linear_costs())


def test_a_digest_depends_on_all_that_a_policy_does_and_on_nothing_else():
    policies = [Lengths(), Lengths(3), Lengths(), Lengths()]
    policies[2].drafter, policies[3].max_depth = "suffix", 9
    digests = [policy_digest(policy) for policy in policies]
    assert len(set(digests)) == 4
    policies[0].label = "mine"
    policies[0].costs.extend_to(8, 16)
    assert policy_digest(policies[0]) == policy_digest(Lengths()) == digests[0]


# Damaged folders


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return a forgery of entries of `policy.json`."""
    return lambda folder: seal(folder, POLICY_FILE, {**read_index(folder, POLICY_FILE), **changes})


def write_weights(folder: Path, raw: bytes) -> None:
    (folder / WEIGHTS_FILE).write_bytes(raw)
    seal(folder, POLICY_FILE, read_index(folder, POLICY_FILE))


def linked(path: Path) -> None:
    outside = path.parent.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


PROOF = Path("/tmp/specstop-was-unpickled")
BAD = pickle.dumps(Evil(PROOF))
ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle as weights": (lambda f: write_weights(f, BAD), "invalid"),
    "pickle as json": (lambda f: (f / POLICY_FILE).write_bytes(BAD), "JSON"),
    "pickle beside": (lambda f: (f / "model.pkl").write_bytes(BAD), "model.pkl"),
    "code beside": (lambda f: (f / "modeling.py").write_text("1/0"), "modeling.py"),
    "a code path": (edit(auto_map={"AutoModel": "modeling.X"}), "auto_map"),
    "an absolute path": (edit(files={WEIGHTS_FILE: "", "/etc/passwd": ""}), "/etc/passwd"),
    "a parent path": (edit(files={WEIGHTS_FILE: "", "../x.ubj": ""}), r"\.\./x\.ubj"),
    "weights behind a link": (lambda f: linked(f / WEIGHTS_FILE), "link"),
    "a pipe for weights": (lambda f: ((f / WEIGHTS_FILE).unlink(), os.mkfifo(f / WEIGHTS_FILE)), "regular file"),
    "weights of 10 GB": (lambda f: os.truncate(f / WEIGHTS_FILE, 10 * 2**30), "10737418240 bytes"),
    "an edit without a checksum": (
        lambda f: (f / POLICY_FILE).write_text((f / POLICY_FILE).read_text().replace("52.5", "99.5")), "checksum"),
    "terminal control codes": (edit(name="\x1b[2J"), "control characters"),
    "deep nesting": (edit(provenance=json.loads('{"x": ' + "[" * 100 + "]" * 100 + "}")), "nested"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_a_malicious_folder_is_refused_and_nothing_is_unpickled(tmp_path, monkeypatch, name):
    attack, noun = ATTACKS[name]
    folder = save_policy(learned(), tmp_path / "p")
    attack(folder)
    monkeypatch.setattr(pickle, "loads", lambda *args: pytest.fail("unpickled"))
    with pytest.raises(PolicyError, match=noun) as error:
        load_policy(folder)
    assert str(error.value).startswith("policy: ") and "\n" not in str(error.value) and len(str(error.value)) < 600
    assert not PROOF.exists()


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """Folders and decisions of all policies."""
    root = tmp_path_factory.mktemp("originals")
    folders = {name: save_policy(make(), root / name) for name, make in POLICIES.items()}
    return {name: (folder, decisions(load_policy_folder(folder))) for name, folder in folders.items()}


@settings(max_examples=100, deadline=None, derandomize=True)
@given(name=st.sampled_from(sorted(POLICIES)), damage=st.sampled_from(DAMAGES), seed=st.integers(0, 2**32))
def test_a_damaged_folder_is_refused_or_decides(originals, name, damage, seed):
    """No checksum distinguishes a forgery from another policy: it may load, but it must not fail later."""
    original, before = originals[name]
    with tempfile.TemporaryDirectory() as root:
        folder = Path(shutil.copytree(original, Path(root) / "p"))
        damage(folder, POLICY_FILE, random.Random(seed))
        try:
            with np.errstate(all="ignore"):
                after = decisions(load_policy_folder(folder))
        except PolicyError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000
        else:
            assert damage is not damage_bytes or same(before, after)


def test_a_policy_comes_from_the_hub(tmp_path, monkeypatch):
    source, revisions = save_policy(learned(), tmp_path / "p"), []

    def fetch(name: str, **options: Any) -> str:
        if name != "owner/policy":
            raise ConnectionError("no\nroute")
        assert not {"*.py", "*.bin"} & set(options["allow_patterns"])
        revisions.append(options["revision"])
        shutil.copytree(source, options["local_dir"], dirs_exist_ok=True)
        return str(options["local_dir"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert from_pretrained("owner/policy", revision="abc").name == load_policy("hub:owner/policy").name == "mine"
    assert revisions == ["abc", None]
    with pytest.raises(PolicyError, match=r"fetched \(ConnectionError\)"):
        load_policy("hub:owner/other")
    for name in ("nowhere", "../up/x", "a/b/c"):
        with pytest.raises(PolicyError, match="hub repository"):
            from_pretrained(name)
