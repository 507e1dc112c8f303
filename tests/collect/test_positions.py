"""Dense traces of any drafter: what they hold, and that replay of them is what the loop does live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import TEST_POLICIES
from small_drafters import TRAINED, output_weight, small_network
from specstop.collect.dense import DenseCollector
from specstop.collect.positions import PositionsCollector
from specstop.collect.prompts import Prompt
from specstop.collect.run import collect, plan_run
from specstop.collect.schema import PromptTask
from specstop.decode.drafters import TrainedDrafter, load_drafter, save_drafter, with_drafter
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair
from specstop.decode.settings import Settings
from specstop.decode.verify.noise import stream_key
from specstop.decode.verify.sampling import SamplingParams
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.features import DRAFT_HIDDEN, TARGET_HIDDEN
from specstop.policies.fixed import Confidence, FixedLength
from specstop.policies.profile import Profile
from specstop.train.replay.arrays import trace_arrays
from specstop.train.replay.run import replay
from trace_rows import assert_close, by_anchor, tasks

DEPTH = 3
SPECS = (
    *("lookup", "suffix", "medusa", "hydra", "ctc", "ctc-released", "layer"),
    *("suffix?confidence=0.3+model", "lookup?confidence=0.9+medusa"),
)


@pytest.fixture(scope="module")
def folders(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafters")
    output = output_weight(pair).float()
    for kind in TRAINED:
        network = small_network(kind, output.shape[1], pair.vocabulary, output, DEPTH, 0.05)
        save_drafter(TrainedDrafter(kind, network, pair.fingerprint["target"]), folder / kind)
    return folder


def drafting(pair: Pair, folders: Path, kind: str) -> Pair:
    """Return the pair with a drafter, the last one from its folder if it is a trained one."""
    folder = folders / kind.rpartition("+")[2].removesuffix("-released")
    return with_drafter(pair, f"{kind}:{folder}" if folder.exists() else kind)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_with_the_draft_model_the_rows_are_those_of_the_other_dense_collector(
    pair: Pair, prompts: list[Prompt], prompt_ids: list[list[int]], tree: str | None, temperature: float
) -> None:
    settings = Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
    dense, positions = (
        collector(pair, settings, (TARGET_HIDDEN,)).rows(tasks(prompts[:3], prompt_ids))
        for collector in (DenseCollector, PositionsCollector)
    )
    for chunk, other in zip(dense, positions, strict=True):
        drawable = other["tokens"] >= 0  # what stands below an end of text is never drawn live
        assert drawable.any()
        for chunks in (chunk, other):
            for name, values in chunks.items():
                if np.shape(values) == drawable.shape:
                    chunks[name] = np.where(drawable, values, 0)
    assert_close(dense, positions, 1e-5)


@pytest.mark.parametrize(
    ("kind", "temperature", "tree"),
    [("suffix", 0.0, None), ("hydra", 0.7, "2,2,1"), ("suffix?confidence=0.3+medusa", 0.7, None),
     ("suffix?confidence=0.3+medusa", 0.7, "2,2,1")],
)  # fmt: skip
def test_texts_side_by_side_give_the_rows_of_each_alone(
    pair: Pair, folders: Path, prompt_ids: list[list[int]], kind: str, temperature: float, tree: str | None
) -> None:
    # Of unlike lengths, so that the places of their rounds never agree.
    work = [PromptTask(i, f"p{i}", "g", ids[i % 3 :], stream_key(0, f"p{i}")) for i, ids in enumerate(prompt_ids[:5])]
    settings = Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
    single, several = (
        PositionsCollector(drafting(pair, folders, kind), settings, (TARGET_HIDDEN,), memory) for memory in (1, 1 << 28)
    )
    assert (single.batch, several.batch) == (1, 16)
    assert_close(several.rows(work), single.rows(work), 1e-5)


def test_as_many_texts_are_side_by_side_as_the_memory_holds(pair: Pair, prompts: list[Prompt]) -> None:
    suffix = with_drafter(pair, "suffix")

    def batch(temperature: float, tree: str | None, memory: int, **sampling: float) -> int:
        settings = Settings(
            temperature, NEW, DEPTH, tree=tree, sampling=SamplingParams(**sampling), verification="match"
        )
        return PositionsCollector(suffix, settings, (), memory).batch

    row = pair.vocabulary * torch.finfo(pair.logits_dtype).bits // 8
    # Of each of the K + 1 rounds that wait: rows of the nodes that have children, and two of the target's.
    chain, tree = (DEPTH + 1) * row * (3 + 2), (DEPTH + 1) * row * (1 + 2 + 4 + 2)
    assert batch(0.0, None, 5 * chain) == 5 and batch(0.0, None, 5 * chain - 1) == 4
    assert batch(0.0, "2,2,1", 5 * tree) == 5
    assert batch(0.7, None, 5 * chain) < 5 and batch(0.7, None, 5 * chain, top_p=0.9) < batch(0.7, None, 5 * chain)
    assert plan_run(suffix, prompts[:2], depth=2, max_new_tokens=NEW, memory=70).header.facts["memory MiB"] == 70


@pytest.mark.parametrize("spec", ["suffix?keep=1", "lookup+suffix?keep=1"])
def test_a_drafter_that_keeps_texts_reads_them_in_their_order(pair: Pair, spec: str) -> None:
    assert PositionsCollector(with_drafter(pair, spec), Settings(0.0, NEW, DEPTH)).batch == 1
    assert PositionsCollector(with_drafter(pair, spec.partition("?")[0]), Settings(0.0, NEW, DEPTH)).batch == 16


@pytest.mark.parametrize(
    ("kind", "tree"), [*((kind, "2,2,1") for kind in SPECS), *((kind, None) for kind in SPECS[::2])]
)
def test_replay_is_what_the_loop_does(
    pair: Pair, folders: Path, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path,
    kind: str, tree: str | None,
) -> None:  # fmt: skip
    alone, accepted = drafting(pair, folders, kind), 0
    assert (alone.draft is None) == (not kind.endswith("model"))
    assert alone.fingerprint["draft"] != pair.fingerprint["draft"]
    temperature = (0.0, 0.7)[(SPECS.index(kind) + bool(tree)) % 2]  # a chain at one, a tree at the other
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "draft": alone.drafter}
    trace = collect(alone, prompts[1:3], tmp_path / f"{temperature}", **options)
    assert trace.header.has_every_anchor and trace.header.pair == alone.fingerprint
    arrays = trace_arrays(trace)
    for policy in (
        (FixedLength(3), Confidence(0.3)) if tree else (FixedLength(2), Confidence(0.3), TEST_POLICIES["trimming"])
    ):
        policy, settings = policy.limited(DEPTH), Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
        speculator = Speculator(alone, policy, settings)
        live, unread = [], []
        for prompt, ids in zip(prompts[1:3], prompt_ids[1:3], strict=True):
            rounds = speculator.generate(ids, stream_key(0, prompt.id)).rounds
            live.append([[r.anchor, r.drafted, r.verified, r.accepted] for r in rounds])
            unread += [r.backlog for r in rounds]
        assert replay(arrays, policy, profile).backlog.tolist() == unread, policy.name
        log = replay(arrays, policy, profile).log
        assert [log[log[:, 0] == s, 1:].tolist() for s in range(len(live))] == live, policy.name
        accepted += sum(r[3] for rounds in live for r in rounds)
    assert accepted > 0 or kind in ("lookup", "suffix")


@pytest.mark.parametrize("collector", ["dense", "live"])
def test_the_rows_of_a_shard_depend_on_its_own_texts(pair: Pair, tmp_path: Path, collector: str) -> None:
    """A drafter that keeps texts begins anew with each shard, and has one shard by default."""
    texts = [Prompt(f"p{i}", "w7 w8 w9 w10 w7 w8", "g") for i in range(6)]
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "collector": collector}
    keeping = with_drafter(pair, "suffix?keep=1")
    assert plan_run(keeping, texts, **options).header.shards == 1
    for shard in collect(keeping, texts, tmp_path / "several", shards=3, **options).batches():
        names = shard["prompt_id"].unique().to_pylist()
        alone = collect(keeping, [p for p in texts if p.id in names], tmp_path / f"alone-{names[0]}", **options)
        columns = ["anchor", "tokens", "accepted_length", "draft_prob"]
        assert shard.select(columns).to_pydict() == alone.table(columns).to_pydict()


@pytest.mark.parametrize(
    ("options", "noun"),
    [({"depth": 1, "mix": 0.2}, "mix"), ({"completions": {"p0": "w7 w8"}}, "completions"), ({"draws": 2}, "draws"),
     ({"temperature": 0.7, "verification": "rejection"}, "match")],
)  # fmt: skip
def test_what_requires_a_draft_model_is_refused(
    pair: Pair, prompts: list[Prompt], tmp_path: Path, options: dict[str, Any], noun: str
) -> None:
    with pytest.raises(InputError, match=noun):
        collect(with_drafter(pair, "suffix"), prompts, tmp_path / "a", max_new_tokens=NEW, **{"depth": 2, **options})
    assert not (tmp_path / "a").exists()


@pytest.mark.filterwarnings("ignore:.* are left out")
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_prompts_may_be_as_long_as_the_models_can_read(pair: Pair, tmp_path: Path, collector: str) -> None:
    """A prompt is left out if it, the new tokens and the depth are too long: one token more if it stops at every position."""
    most = pair.readable - NEW - DEPTH
    texts = [Prompt(f"{n}", " ".join(f"w{20 + i % 20}" for i in range(n)), "g") for n in (most - 1, most, most + 1)]
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "collector": collector}
    suffix = with_drafter(pair, "suffix")
    kept = [max(len(task.tokens) for task in plan_run(who, texts, **options).tasks[0]) for who in (pair, suffix)]
    assert kept == [most, most - (collector == "dense")]
    assert collect(suffix, texts, tmp_path, **options).row_count > 0


@pytest.mark.parametrize("kind", ["medusa", "hydra", "layer"])
def test_the_states_that_a_drafter_scores_by_are_recorded(
    pair: Pair, folders: Path, prompts: list[Prompt], tmp_path: Path, kind: str
) -> None:
    alone = drafting(pair, folders, kind)
    options: dict[str, Any] = {"depth": DEPTH, "max_new_tokens": NEW, "hidden": [DRAFT_HIDDEN, TARGET_HIDDEN]}
    dense, live = (
        collect(alone, prompts[1:4], tmp_path / collector, collector=collector, **options)
        for collector in ("dense", "live")
    )
    assert dense.header.hidden == live.header.hidden == {DRAFT_HIDDEN: 16, TARGET_HIDDEN: 16}
    rows, network = by_anchor(dense), load_drafter(folders / kind).network
    assert len(rows) > 10
    for at, row in by_anchor(live).items():
        drawn, states = row["drawn"], row[DRAFT_HIDDEN].astype(np.float32)
        if not drawn.any():  # no token but the target's is left to decode
            continue
        assert np.abs(states[drawn]).max() > 0
        np.testing.assert_allclose(states[drawn], rows[at][DRAFT_HIDDEN][drawn], rtol=2e-3, atol=1e-5)  # half precision
        if kind == "medusa":
            known = torch.tensor(row[TARGET_HIDDEN].astype(np.float32))
            heads = [network.state(head, known, None).detach().numpy() for head in np.flatnonzero(drawn)]
            np.testing.assert_allclose(states[drawn], heads, atol=1e-2)


@pytest.mark.parametrize("kind", ["suffix", "ctc", "suffix+model"])
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_a_drafter_without_states_is_named(
    pair: Pair, folders: Path, prompts: list[Prompt], tmp_path: Path, kind: str, collector: str
) -> None:
    options: dict[str, Any] = {"depth": 2, "max_new_tokens": NEW, "collector": collector, "hidden": [DRAFT_HIDDEN]}
    with pytest.raises(PolicyError, match=r"draft_hidden, which \w+Drafter"):
        collect(drafting(pair, folders, kind), prompts, tmp_path / "c", **options)
