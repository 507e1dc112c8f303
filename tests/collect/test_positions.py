"""Dense traces of any drafter: what they hold, and that replay of them is what the loop does live."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NEW
from contract_policies import TEST_POLICIES
from small_drafters import TRAINED, output_weight, small_network
from specstop.collect import collectors
from specstop.collect.dense import DenseCollector
from specstop.collect.live import PositionsCollector
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
from specstop.train.replay.log import play
from specstop.train.replay.run import replay
from specstop.train.replay.traces.arrays import trace_arrays
from trace_rows import numpy_rows

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


@pytest.mark.parametrize("tree", [None, "2,2,1"])
def test_with_the_draft_model_the_rows_are_those_of_the_other_dense_collector(
    pair: Pair, prompt_ids: list[list[int]], tree: str | None
) -> None:
    batch = [PromptTask(i, f"p{i}", "g", ids, stream_key(0, f"p{i}")) for i, ids in enumerate(prompt_ids[:3])]
    for temperature in (0.0, 0.7):
        settings = Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
        expected = DenseCollector(pair, settings, (TARGET_HIDDEN,)).rows(batch)
        made = PositionsCollector(pair, settings, (TARGET_HIDDEN,)).rows(batch)
        assert len(made) == len(expected) > 0
        for own, other in zip(made, expected, strict=True):
            assert set(own) == set(other)
            drawable = own["tokens"] >= 0  # what stands below an end of text is never drawn live
            assert drawable.any()
            for name, values in other.items():
                if np.shape(values) == drawable.shape and name != "tokens":
                    assert np.allclose(np.where(drawable, own[name], 0), np.where(drawable, values, 0), atol=1e-5), name
                elif name == "tokens":
                    assert (own[name] == values)[drawable].all()
                elif isinstance(values, np.ndarray) and values.dtype.kind == "f":
                    assert np.allclose(own[name], values, atol=2e-3), name
                else:
                    assert list(own[name]) == list(values), name


@pytest.mark.parametrize(
    ("kind", "temperature", "tree"),
    [
        ("suffix", 0.0, None),
        ("hydra", 0.7, "2,2,1"),
        ("suffix?confidence=0.3+medusa", 0.7, None),
        ("suffix?confidence=0.3+medusa", 0.7, "2,2,1"),
    ],
)
def test_texts_side_by_side_give_the_rows_of_each_alone(
    pair: Pair, folders: Path, prompt_ids: list[list[int]], kind: str, temperature: float, tree: str | None
) -> None:
    trained = kind.rpartition("+")[2]
    alone = with_drafter(pair, f"{kind}:{folders / trained}" if (folders / trained).exists() else kind)
    # Of unlike lengths, so that the places of their rounds never agree.
    work = [PromptTask(i, f"p{i}", "g", ids[i % 3 :], stream_key(0, f"p{i}")) for i, ids in enumerate(prompt_ids[:5])]
    settings = Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
    single, several = (PositionsCollector(alone, settings, (TARGET_HIDDEN,), memory) for memory in (1, 1 << 28))
    assert (single.batch, several.batch) == (1, 16)
    expected, made = single.rows(work), several.rows(work)
    assert len(made) == len(expected) > 0
    for own, other in zip(made, expected, strict=True):
        assert set(own) == set(other)
        for name, values in other.items():
            if isinstance(values, np.ndarray) and values.dtype.kind == "f":
                rounding = 2e-3 if name == TARGET_HIDDEN else 1e-5  # that is kept in half precision
                assert np.allclose(own[name], values, atol=rounding), name
            else:
                assert np.array_equal(own[name], values), name


def test_so_many_texts_are_side_by_side_as_the_memory_holds(
    pair: Pair, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    told = {}
    monkeypatch.setattr(
        collectors, "PositionsCollector", lambda *args: told.update(args=args) or PositionsCollector(*args)
    )
    plan = plan_run(suffix, prompts[:2], depth=2, max_new_tokens=NEW, memory=70)
    assert told["args"][-1] == 70 << 20 and plan.header.facts["memory MiB"] == 70


@pytest.mark.parametrize("spec", ["suffix?keep=1", "lookup+suffix?keep=1"])
def test_a_drafter_that_keeps_texts_meets_them_in_their_order(
    pair: Pair, prompt_ids: list[list[int]], spec: str
) -> None:
    assert PositionsCollector(with_drafter(pair, spec), Settings(0.0, NEW, DEPTH)).batch == 1
    assert PositionsCollector(with_drafter(pair, spec.partition("?")[0]), Settings(0.0, NEW, DEPTH)).batch == 16


@pytest.mark.parametrize(
    ("kind", "tree"), [*((kind, "2,2,1") for kind in SPECS), *((kind, None) for kind in SPECS[::2])]
)
def test_replay_is_what_the_loop_does(
    pair: Pair, folders: Path, prompts: list[Prompt], prompt_ids: list[list[int]], profile: Profile, tmp_path: Path,
    kind: str, tree: str | None,
) -> None:  # fmt: skip
    trained = kind.rpartition("+")[2]
    folder = folders / trained.removesuffix("-released")
    spec = f"{kind}:{folder}" if folder.exists() else kind
    alone, accepted = with_drafter(pair, spec), 0
    assert (alone.draft is None) == (trained != "model") and alone.fingerprint["draft"] != pair.fingerprint["draft"]
    # A chain at one temperature and a tree at the other: `benchmarks/drafters.py` compares both with replay.
    temperature = (0.0, 0.7)[(SPECS.index(kind) + bool(tree)) % 2]
    options = {"depth": DEPTH, "tree": tree, "temperature": temperature, "max_new_tokens": NEW, "draft": spec}
    trace = collect(alone, prompts[1:3], tmp_path / f"{temperature}", **options)
    assert trace.header.has_every_anchor and trace.header.pair == alone.fingerprint
    arrays = trace_arrays(trace)
    for policy in (
        (FixedLength(3), Confidence(0.3)) if tree else (FixedLength(2), Confidence(0.3), TEST_POLICIES["trimming"])
    ):
        speculator = Speculator(
            alone, policy.limited(DEPTH), Settings(temperature, NEW, DEPTH, tree=tree, verification="match")
        )
        live, unread = [], []
        for prompt, ids in zip(prompts[1:3], prompt_ids[1:3], strict=True):
            made = speculator.generate(ids, stream_key(0, prompt.id))
            live.append([[r.anchor, r.drafted, r.verified, r.accepted] for r in made.rounds])
            unread += [r.backlog for r in made.rounds]
        assert play(arrays, policy.limited(DEPTH), profile).rounds.backlog.tolist() == unread, policy.name
        log = replay(arrays, policy.limited(DEPTH), profile).log
        assert [log[log[:, 0] == s, 1:].tolist() for s in range(len(live))] == live, (policy.name, temperature)
        accepted += sum(r[3] for rounds in live for r in rounds)
    assert accepted > 0 or kind in ("lookup", "suffix")


@pytest.mark.parametrize("collector", ["dense", "live"])
def test_the_rows_of_a_shard_depend_on_its_own_texts(pair: Pair, tmp_path: Path, collector: str) -> None:
    """A drafter that keeps texts begins anew with each shard, and has one shard unless it is told otherwise."""
    texts = [Prompt(f"p{i}", "w7 w8 w9 w10 w7 w8", "g") for i in range(6)]
    options = {"depth": DEPTH, "max_new_tokens": NEW, "collector": collector}
    keeping = with_drafter(pair, "suffix?keep=1")
    one = collect(keeping, texts, tmp_path / "one", **options)
    assert one.header.shards == 1
    several = collect(keeping, texts, tmp_path / "several", shards=3, **options)
    for shard in several.shards():
        own = shard["prompt_id"].unique().to_pylist()
        alone = collect(keeping, [p for p in texts if p.id in own], tmp_path / f"alone-{own[0]}", **options)
        kept = ["anchor", "tokens", "accepted_length", "draft_prob"]
        assert shard.select(kept).equals(alone.table(kept))


def test_what_takes_a_draft_model_is_refused(pair: Pair, prompts: list[Prompt], tmp_path: Path) -> None:
    alone = with_drafter(pair, "suffix")
    with pytest.raises(InputError, match="mix: expected a draft model, not `drafter` suffix"):
        collect(alone, prompts, tmp_path / "a", depth=1, mix=0.2, max_new_tokens=NEW)
    with pytest.raises(
        InputError, match="drafter suffix: dense traces of it are of match verification, without `completions`"
    ):
        collect(
            alone, prompts, tmp_path / "b", depth=2, max_new_tokens=NEW, completions={p.id: "w7 w8 w9" for p in prompts}
        )


@pytest.mark.filterwarnings("ignore:.* are left out")
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_prompts_may_be_as_long_as_the_models_can_read(pair: Pair, tmp_path: Path, collector: str) -> None:
    """A prompt is left out if it, the new tokens and the depth are too long: one token more if it stops at every position."""
    room = pair.readable - NEW - DEPTH
    lengths = (room - 1, room, room + 1)
    texts = [Prompt(f"{length}", " ".join(f"w{20 + i % 20}" for i in range(length)), "g") for length in lengths]
    options = {"depth": DEPTH, "max_new_tokens": NEW, "collector": collector}
    suffix = with_drafter(pair, "suffix")
    kept = [max(len(task.tokens) for task in plan_run(who, texts, **options).tasks[0]) for who in (pair, suffix)]
    assert kept == [room, room - (collector == "dense")]
    assert collect(suffix, texts, tmp_path, **options).row_count > 0


@pytest.mark.parametrize("kind", ["medusa", "hydra", "layer"])
def test_the_states_that_a_drafter_scores_by_are_recorded(
    pair: Pair, folders: Path, prompts: list[Prompt], tmp_path: Path, kind: str
) -> None:
    alone = with_drafter(pair, f"{kind}:{folders / kind}")
    options = {"depth": DEPTH, "max_new_tokens": NEW, "hidden": [DRAFT_HIDDEN, TARGET_HIDDEN]}
    rows = {}
    for collector in ("dense", "live"):
        trace = collect(alone, prompts[1:4], tmp_path / collector, collector=collector, **options)
        assert trace.header.hidden == {DRAFT_HIDDEN: 16, TARGET_HIDDEN: 16}
        rows[collector] = {(row["sequence"], row["anchor"]): row for row in numpy_rows(trace)}
    assert len(rows["live"]) > 10
    network = load_drafter(folders / kind).network
    for at, row in rows["live"].items():
        live, dense = (np.asarray(one[DRAFT_HIDDEN], np.float32).reshape(DEPTH, 16) for one in (row, rows["dense"][at]))
        drawn = np.asarray(row["drawn"])
        if not drawn.any():  # no token but the target's is left to decode
            continue
        assert np.abs(live[drawn]).max() > 0
        np.testing.assert_allclose(live[drawn], dense[drawn], rtol=2e-3, atol=1e-5)  # rounded to half precision
        if kind == "medusa":
            known = torch.tensor(np.asarray(row[TARGET_HIDDEN], np.float32))
            heads = [network.state(head, known, None).detach().numpy() for head in np.flatnonzero(drawn)]
            np.testing.assert_allclose(live[drawn], heads, atol=1e-2)


@pytest.mark.parametrize("kind", ["suffix", "ctc", "suffix+model"])
@pytest.mark.parametrize("collector", ["dense", "live"])
def test_a_drafter_without_states_is_named(
    pair: Pair, folders: Path, prompts: list[Prompt], tmp_path: Path, kind: str, collector: str
) -> None:
    alone = with_drafter(pair, f"{kind}:{folders / kind}" if (folders / kind).exists() else kind)
    options = {"depth": 2, "max_new_tokens": NEW, "collector": collector, "hidden": [DRAFT_HIDDEN]}
    with pytest.raises(
        PolicyError, match=r"hidden: reads draft_hidden, which \w+Drafter has not; .* or leave the draft's states out"
    ):
        collect(alone, prompts, tmp_path / "c", **options)
