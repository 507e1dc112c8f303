"""Drafters by spec: built-in ones, folders of trained ones, and those of installed packages; damaged folders are refused."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import tempfile
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from damage import DAMAGES, damage_bytes
from hypothesis import given, settings as hypothesis_settings, strategies as st
from small_drafters import CLASSES, TRAINED, new_round, proposed, small_network
from specstop.decode.drafters import (
    LookupDrafter,
    ModelDrafter,
    SuffixDrafter,
    TrainedDrafter,
    find_drafters,
    save_drafter,
    with_drafter,
)
from specstop.decode.drafters.folder import DRAFTER_FILE, load_drafter
from specstop.decode.drafters.spec import DRAFTERS, change_paths, drafter_names, needs_draft, parse_spec, spec_paths
from specstop.decode.loop import Request, Speculator
from specstop.decode.models.pair import Pair, join, load_pair
from specstop.decode.plain import plain_texts
from specstop.decode.settings import Settings
from specstop.decode.topology import chain
from specstop.policies import registry
from specstop.policies.errors import InputError
from specstop.policies.fixed import FixedLength

PAGE = Path(__file__).parents[3] / "docs" / "drafters.md"


def copycat(pair: Pair, longest: int = 2, share: int = 1) -> LookupDrafter:
    """Return a drafter with options."""
    if longest > 8:
        raise ValueError("too long")
    drafter: Any = LookupDrafter(pair, longest)
    drafter.share = share
    return drafter


def nothing(pair: Pair) -> int:
    """Return no drafter."""
    return 5


POINTS = {
    "copycat": copycat,
    "nothing": nothing,
    "second": type("Second", (ModelDrafter,), {"needs_draft": True}),
    "unsure": type("Unsure", (ModelDrafter,), {"needs_draft": "yes"}),
}


class Point(EntryPoint):
    """An entry point of this module."""

    def load(self) -> Any:
        """Return what the package provides."""
        return POINTS[self.name] if self.name in POINTS else super().load()


@pytest.fixture(autouse=True)
def declare(monkeypatch):
    """Declare entry points by name."""

    def declare(**points: str) -> None:
        entry_points = [Point(name, value, DRAFTERS.group) for name, value in points.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: entry_points if group == DRAFTERS.group else [])

    declare(**dict.fromkeys(POINTS, "package:name"), missing="no_such_module:X")
    return declare


@pytest.fixture(scope="session")
def pair(plain_pair):
    return plain_pair


# Specs


@pytest.mark.parametrize(
    ("spec", "names", "moved"),
    [
        ("lookup+suffix+model", ["lookup", "suffix", "model"], ""),
        ("suffix:a+b.txt?keep=1+hydra:c+v2", ["suffix", "hydra"], "suffix:/x/a+b.txt?keep=1+hydra:/x/c+v2"),
        ("hydra:/a/llama+hydra-v2", ["hydra"], "hydra:/x//a/llama+hydra-v2"),
        ("suffix:a+model", ["suffix", "model"], "suffix:/x/a+model"),
        ("suffix?path=a+b.txt&keep=1", ["suffix"], "suffix:/x/a+b.txt?keep=1"),
    ],
)  # fmt: skip
def test_a_plus_sign_joins_drafters_or_is_part_of_a_path(spec, names, moved):
    assert [part.name for part in parse_spec(spec)] == names
    assert change_paths(spec, lambda path: f"/x/{path}") == (moved or spec)
    assert len(spec_paths(spec)) == moved.count("/x/")


def test_drafters_by_spec(pair, tmp_path):
    (tmp_path / "c++.txt").write_text("w7 w8 w11")
    suffix, lookup, model = find_drafters(f"suffix:{tmp_path}/c++.txt?keep=1+lookup:4+model", pair)
    assert isinstance(suffix, SuffixDrafter) and (suffix.carries, len(suffix._file)) == (True, 3)
    assert isinstance(lookup, LookupDrafter) and isinstance(model, ModelDrafter)
    assert lookup._indexes[0].longest == 4
    assert drafter_names("layer:a+lookup+layer:b+suffix+layer:c") == ("layer", "lookup", "layer2", "suffix", "layer3")


def test_drafters_that_draft_differently_have_different_fingerprints(pair, tmp_path):
    names = ["suffix+model", "model+suffix", "suffix?keep=1+model", "suffix+lookup", "lookup+model", "model"]
    hashes = [with_drafter(pair, name).fingerprint["draft"] for name in names]
    assert len(set(hashes)) == len(names)
    assert [with_drafter(pair, name).draft is None for name in names] == [not needs_draft(name) for name in names]

    def fingerprint(name: str, text: str, spec: str) -> str:
        (tmp_path / name).write_text(text)
        return with_drafter(pair, spec.format(tmp_path / name)).fingerprint["draft"]

    for spec in ("suffix:{}", "suffix?path={}", "suffix:{}+model"):  # a file counts by its contents
        a, b, changed = fingerprint("a", "w7", spec), fingerprint("b", "w7", spec), fingerprint("a", "w9", spec)
        assert a == b != changed


@pytest.mark.parametrize(
    ("spec", "noun"),
    [
        *((spec, "one of model, lookup") for spec in ("lookup:", "model:3", "medusa", "suffix+modle", "")),
        *((spec, "longest") for spec in ("lookup:0", "lookup:x", "lookup?longest=2.5", "lookup:4?longest=4")),
        *((spec, "keep") for spec in ("suffix?keep=false", "suffix?keep=2", "suffix?keep=1&keep=0")),
        ("lookup?length=4", "length"), ("suffix?confidence=0.5", "confidence"), ("suffix:none.txt", "none.txt"),
        ("suffix:~nobody-here/x.txt", "nobody-here"),
        # Of a package
        ("copycat?length=5", "length"), ("copycat?longest=9", "too long"), ("copycat?longest", "key=value"),
        ("copycat:5", "copycat"), ("copycats", "did you mean 'copycat'"), ("missing", "no_such_module"), ("nothing", "int"),
        ("unsure", "needs_draft"),
    ],
)  # fmt: skip
def test_an_invalid_spec_is_refused_with_the_reason(pair, spec, noun):
    with pytest.raises(InputError, match=f"^drafter.*{noun}"):
        find_drafters(spec, pair)


# Drafters of packages


@pytest.mark.parametrize("verification", ["match", "rejection"])
def test_the_drafter_of_the_documentation_works(pair, declare, tmp_path, monkeypatch, verification):
    (code,) = re.findall(r"^`specstop_bigram.py`:\n\n```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "specstop_bigram.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    (entry,) = re.findall(r'^bigram = "(.*)"$', PAGE.read_text(), re.MULTILINE)
    declare(bigram=entry)
    settings = Settings(0.7, max_new_tokens=30, tree="2,2,1", verification=verification)
    prompts = [[7, 8, 7, 8, 7], [9, 9, 9, 9], [3, 4]]
    speculator = Speculator(with_drafter(pair, "bigram?limit=2"), FixedLength(3), settings, batch=2)
    texts = speculator.run([Request(prompt, key) for key, prompt in enumerate(prompts)])
    assert any(record.accepted for text in texts for record in text.rounds)
    if verification == "match":
        assert [list(text.tokens) for text in texts] == plain_texts(pair, prompts, range(3), 30, 0.7).tokens


def test_drafters_of_packages_are_listed_called_with_their_options_and_may_use_the_draft_model(pair):
    listed = {one.name: one for one in DRAFTERS.listed()}
    assert {"model", "lookup", "suffix", "medusa", "hydra", "ctc", "layer"} < set(listed)
    assert "longest, share" in listed["copycat"].what and not listed["copycat"].problem
    assert "no_such_module" in listed["missing"].problem
    drafter: Any = find_drafters("suffix+copycat?longest=5&share=0.5", pair)[1]
    assert (drafter._indexes[0].longest, drafter.share) == (5, 0.5)
    for name, expected in (("copycat", False), ("second", True), ("suffix+second", True), ("suffix+copycat", False)):
        assert needs_draft(name) == expected == (with_drafter(pair, name).draft is not None)
    assert with_drafter(pair, "second").fingerprint["draft"] == f"second+{pair.fingerprint['draft']}"
    with pytest.raises(InputError, match="needs a draft model"):
        find_drafters("second", dataclasses.replace(pair, draft=None))


# Folders of trained drafters


def trained(pair: Pair, kind: str = "medusa") -> TrainedDrafter:
    output = pair.target.get_output_embeddings().weight.float()
    network = small_network(kind, output.shape[1], pair.vocabulary, output, outputs=20 * (kind == "layer"))
    metrics = {"acceptance": [0.5, 0.25, 0.125], "held_out_loss": 2.5}
    return TrainedDrafter(kind, network, pair.fingerprint["target"], {"prompts": 3}, metrics)


@pytest.fixture
def folder(pair, tmp_path):
    return save_drafter(trained(pair), tmp_path / "drafter")


@pytest.mark.parametrize("kind", TRAINED)
def test_a_folder_is_read_as_it_was_written(pair, tmp_path, kind):
    written = trained(pair, kind)
    read = load_drafter(save_drafter(written, tmp_path / "drafter"))
    for name in ("kind", "target", "provenance", "metrics"):
        assert getattr(read, name) == getattr(written, name)
    torch.testing.assert_close(read.network.state_dict(), written.network.state_dict(), rtol=0, atol=0)
    assert type(find_drafters(f"{kind}:{tmp_path / 'drafter'}", pair)[0]) is CLASSES[kind]
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert all(str(each) in card for each in (kind, written.target, "0.5000", "0.2500", "0.1250"))
    (tmp_path / "drafter" / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(InputError, match=r"^drafter: .*pytorch_model\.bin"):
        load_drafter(tmp_path / "drafter")


def test_a_drafter_belongs_to_its_target_in_any_engine(pair_folder, tmp_path):
    """Engines reorder embeddings and output layer; the drafter's weights are reordered too."""
    pairs = [load_pair(pair_folder / "target", engine=engine) for engine in ("plain", "packed", "compact")]
    for kind in TRAINED:
        save_drafter(trained(pairs[0], kind), tmp_path / kind)
        rows = []
        for pair in pairs:
            drafter: Any = find_drafters(f"{kind}:{tmp_path / kind}", pair)[0]
            drafter.reserve(1, 32)
            with torch.inference_mode():
                drafter.committed(0, [5, 6, 7], torch.linspace(-1.0, 1.0, 48).view(3, 16))
                rows.append(proposed(drafter, new_round([9], chain(2)), 0).nan_to_num(neginf=-9.0))
        for row in rows[1:]:
            torch.testing.assert_close(rows[0], row, atol=2e-4, rtol=0)


def test_another_target_kind_or_place_is_refused(pair, folder):
    other = join(pair.draft_model, pair.draft_model)
    for spec, used, noun in (
        (f"medusa:{folder}", other, "target"), (f"hydra:{folder}", pair, "medusa"), (f"hydra:{folder}/none", pair, "none"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"^drafter.*{noun}"):
            find_drafters(spec, used)


# Folders with any damage


@pytest.fixture(scope="module")
def originals(plain_pair, tmp_path_factory):
    """The folder of each kind of drafter by name."""
    root = tmp_path_factory.mktemp("originals")
    return {kind: save_drafter(trained(plain_pair, kind), root / kind) for kind in TRAINED}


@hypothesis_settings(max_examples=60, deadline=None, derandomize=True)
@given(kind=st.sampled_from(sorted(TRAINED)), damage=st.sampled_from(DAMAGES), seed=st.integers(0, 2**32))
def test_any_damage_is_refused_in_one_line_or_the_drafter_drafts(plain_pair, originals, kind, damage, seed):
    """With valid checksums it may draft otherwise, but it must not fail later."""
    drafts = []
    with tempfile.TemporaryDirectory() as root:
        copy = Path(shutil.copytree(originals[kind], Path(root) / kind))
        damage(copy, DRAFTER_FILE, random.Random(seed))
        for folder in (copy, originals[kind]):
            try:
                pair = with_drafter(plain_pair, f"{kind}:{folder}")
                rounds = Speculator(pair, FixedLength(2), Settings(0.0, 6, 2)).generate([3, 20, 4]).rounds
            except InputError as error:
                assert folder == copy and "\n" not in str(error) and len(str(error)) < 1000
                return
            drafts.append([(r.drafted, r.verified, r.accepted) for r in rounds])
    assert damage is not damage_bytes or drafts[0] == drafts[1]
