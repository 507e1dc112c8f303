"""Recorded calls: the same logits and texts as read one by one; on the CPU a tape does what CUDA graphs do."""

from __future__ import annotations

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import VOCABULARY, build_draft, build_model
from small_models import table
from specstop.decode import (
    Settings,
    Speculator,
    model_source,
    parse_tree,
)
from specstop.decode.drafters import model as drafters_module
from specstop.decode.loop import Request
from specstop.decode.models import cuda as cuda_module
from specstop.decode.models.attention import Part, TreeRows
from specstop.decode.models.cache import CachedModel
from specstop.decode.models.cuda import CudaGraphModel, open_cache
from specstop.decode.models.device import filled_up
from specstop.decode.models.pair import join
from specstop.policies import FixedLength
from specstop.policies.errors import PairError, SpecstopWarning
from specstop.policies.fixed import Confidence
from tape import Graphs, recorder, simulate_graphs
from transformers import PreTrainedModel
from transformers.integrations import sdpa_attention

TREE = parse_tree("2,2,1")


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let texts of dozens of tokens pass through several sizes of attention."""
    monkeypatch.setattr(cuda_module, "MIN_SLOTS", 16)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return simulate_graphs(monkeypatch)


@pytest.fixture
def recording(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> Graphs:
    """Let loops record their calls."""
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    return graphs


@pytest.fixture
def model() -> PreTrainedModel:
    """A model of its own: recordings are kept by model."""
    return build_model()


def chain(cache: CachedModel, tokens: torch.Tensor, rows: int = 0) -> torch.Tensor:
    return cache.read_parts([Part(0, tokens[0], rows)])


def branches(cache: CachedModel, tokens: torch.Tensor, tree: TreeRows) -> torch.Tensor:
    return cache.read_parts([Part(0, tokens, tree=tree)])


def readings(cache: CachedModel, device: str = "cpu") -> list[torch.Tensor]:
    """Return logits of a prompt, single tokens, several, trees, and what follows a compaction; each size several times."""
    generator, out = torch.Generator().manual_seed(4), []

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (1, count), generator=generator).to(device)

    out.append(chain(cache, tokens(5), 1))
    for _ in range(6):
        out += [chain(cache, tokens(1), 1), chain(cache, tokens(3))]
        base = cache.length
        row = tokens(len(TREE))[0]
        out.append(branches(cache, row[:3], TreeRows(TREE, base, [], [0, 1, 2])))
        out.append(branches(cache, row[4:5], TreeRows(TREE, base, [0, 1, 2], [4])))
        if cache.states is not None:
            out.append(cache.states)
        cache.keep(base, [base, base + 2])
    return out


def same(some: list[torch.Tensor], others: list[torch.Tensor], near: float = 1e-10) -> None:
    assert len(some) == len(others)
    for a, b in zip(some, others, strict=True):
        torch.testing.assert_close(b, a, atol=near, rtol=near)


@torch.no_grad()
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_recorded_calls_give_the_same_logits(
    model: PreTrainedModel, graphs: Graphs, attention: str, hidden: bool
) -> None:
    model.set_attn_implementation(attention)
    fixed = CudaGraphModel(model, 120, VOCABULARY, hidden, recorder=recorder)
    near = 1e-10 if attention == "sdpa" else 1e-4  # eager attention takes its softmax in float32
    same(readings(CachedModel(model, 120, VOCABULARY, hidden)), readings(fixed), near)
    assert graphs.played >= graphs.recorded > 4, "and calls of several sizes of attention were recorded"
    assert len(graphs.pools) == 1, "one pool for all of a model"
    assert model.config._attn_implementation == attention


@torch.no_grad()
@pytest.mark.parametrize("name", table.CONFIGS)
def test_every_architecture_can_be_recorded(name: str, graphs: Graphs) -> None:
    attention = "eager" if name in table.EAGER_ONLY else "sdpa"
    model = table.build(name, torch.float64, attention)
    fixed = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
    same(readings(CachedModel(model, 120, VOCABULARY)), readings(fixed), 1e-10 if attention == "sdpa" else 1e-4)
    assert graphs.recorded > 4


@torch.no_grad()
def test_a_call_is_recorded_when_it_comes_again_and_a_prompt_never(model: PreTrainedModel, graphs: Graphs) -> None:
    cache = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
    one = torch.ones(1, 1, dtype=torch.int64)
    for _ in range(3):
        chain(cache, one.repeat(1, 9), 1)
        cache.roll_back(0)
    assert graphs.recorded == 0, "prompts come in all lengths"
    chain(cache, one.repeat(1, 9), 1)
    for count in (0, 1, 1, 1):
        chain(cache, one, 1)
        assert graphs.recorded == count
    assert graphs.played == 3
    for _ in range(10):  # past 16 tokens: attention reads the next size, anew at the second call
        chain(cache, one, 1)
    assert graphs.recorded == 2


@torch.no_grad()
def test_calls_can_be_recorded_before_anything_is_timed(model: PreTrainedModel, graphs: Graphs) -> None:
    cache = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
    cache.prepare([(1, 1), (3, 0)], [10, 12, 40])
    assert (graphs.recorded, cache.length) == (4, 0), "two sizes of attention, two calls"
    reference = CachedModel(model, 120, VOCABULARY)
    prompt, row = torch.full((1, 9), 3), torch.full((1, 3), 5)
    same([chain(reference, prompt), chain(reference, row)], [chain(cache, prompt), chain(cache, row)])
    assert graphs.recorded == 4


def test_texts_from_recorded_calls_are_the_same(
    prompt_ids: list[list[int]], graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build_model()
    pair = join(target, build_draft(target))
    for tree in (None, "2,2,1"):
        settings = Settings(0.7, 20, tree=tree, verification="match")
        texts = [Speculator(pair, FixedLength(3), settings).generate(ids, 5).tokens for ids in prompt_ids[:4]]
        with monkeypatch.context() as patch:
            for module in (model_source, drafters_module):
                patch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
            before = graphs.played
            speculator = Speculator(pair, FixedLength(3), settings)
            assert [speculator.generate(ids, 5).tokens for ids in prompt_ids[:4]] == texts
            assert graphs.played > before + 20


@torch.no_grad()
def test_what_cannot_be_recorded_says_so_once_and_runs_as_it_is(model: PreTrainedModel, graphs: Graphs) -> None:
    def read_back(module: object, inputs: object, output: torch.Tensor) -> None:
        output.sum().item()

    model.lm_head.register_forward_hook(read_back)
    expected = readings(CachedModel(model, 120, VOCABULARY))
    cache = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
    with pytest.warns(
        SpecstopWarning, match=r"cuda:1 cannot be recorded .*not permitted when stream is capturing"
    ) as told:
        same(expected, readings(cache))
    assert len(told) == 1 and graphs.recorded == 0
    assert graphs.stream[1] == "first", "the stream of the recording is left"


@pytest.mark.parametrize("streams", [1, 2])
def test_states_that_are_not_finite_end_with_their_text(
    model: PreTrainedModel, recording: Graphs, streams: int
) -> None:
    """Attention of a recording reads slots behind the text, too, with weight 0: nothing times NaN is NaN."""
    pair = join(model, build_draft(model))
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    good, bad = ([Request(ids, key) for key in range(streams)] for ids in ([3, 4, 5], [3, 4, 5, 6, 8, 9, 10, 7, 7]))
    speculator = Speculator(pair, FixedLength(3), Settings(0.0, 12, ignore_eos=True), batch=streams)
    texts = [text.tokens for text in speculator.run(good)]
    with pytest.raises(PairError):
        speculator.run(bad)
    assert [text.tokens for text in speculator.run(good)] == texts and recording.played
    del speculator  # the next one takes over its memory
    another = Speculator(pair, FixedLength(3), Settings(0.0, 12, ignore_eos=True), batch=streams)
    assert [text.tokens for text in another.run(good)] == texts


def test_what_is_recorded_ahead_serves_later_texts(model: PreTrainedModel, recording: Graphs) -> None:
    pair, settings = join(model, build_draft(model)), Settings(0.0, 20, ignore_eos=True)
    texts = []
    for depth, ahead in ((3, True), (6, False), (6, True)):
        speculator = Speculator(pair, FixedLength(depth), settings)
        if ahead:
            speculator.prepare([10, 30])
        texts.append(speculator.generate([3, 4, 5], 1).tokens)
        buffers = speculator._source.target._kv.shared
        assert buffers and not any(buffer.requires_grad for buffer in buffers)
    assert texts[0] == texts[1] == texts[2]


@torch.no_grad()
def test_recordings_serve_the_next_text_of_a_model_and_go_with_it(model: PreTrainedModel, graphs: Graphs) -> None:
    gc.disable()  # nothing here may wait for the collector: it holds a device's memory
    try:
        cache = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
        expected, gone = readings(cache), weakref.ref(cache)
        cache.roll_back(0)
        same(expected, readings(cache))
        recorded, kept = graphs.recorded, weakref.ref(cache._memory)
        del cache
        assert gone() is None and kept() is not None
        same(expected, readings(CudaGraphModel(model, 60, VOCABULARY, recorder=recorder)))
        assert graphs.recorded == recorded, "a smaller one takes the recordings over"
        CudaGraphModel(model, 1000, VOCABULARY, recorder=recorder)
        assert kept() is None, "a larger one replaces them"
    finally:
        gc.enable()


@torch.no_grad()
def test_recordings_of_a_model_that_has_changed_are_not_played(model: PreTrainedModel, graphs: Graphs) -> None:
    readings(CudaGraphModel(model, 120, VOCABULARY, recorder=recorder))
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: output + inputs[0].sum(-1, keepdim=True))
    expected = readings(CachedModel(model, 120, VOCABULARY))
    same(expected, readings(CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)))
    hook.remove()
    recorded = graphs.recorded
    weight = model.lm_head.weight
    weight.data = weight.data.clone().roll(1, 0)
    expected = readings(CachedModel(model, 120, VOCABULARY))
    same(expected, readings(CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)))
    assert graphs.recorded > recorded


def side_by_side(cache: CachedModel, extra: int = 0) -> list[torch.Tensor]:
    """Return the logits of two streams' steps, each size several times; `extra` single steps first."""
    out = [cache.read_parts([Part(0, [7, 8], 1), Part(1, [9, 8, 7, 6], 1)])]
    out += [cache.read_parts([Part(0, [4]), Part(1, [step])]) for step in range(extra)]
    return out + [cache.read_parts([Part(0, [step, 4], 1), Part(1, [2])]) for step in range(3)]


@torch.no_grad()
@pytest.mark.parametrize("extra", [0, 2])
def test_recordings_of_several_streams_are_not_played_either(
    model: PreTrainedModel, graphs: Graphs, extra: int
) -> None:
    """Nor where calls of another shape are recorded anew before the old ones come again."""
    side_by_side(CudaGraphModel(model, 120, VOCABULARY, False, 2, recorder))
    model.lm_head.register_forward_hook(lambda module, inputs, output: output + inputs[0].sum(-1, keepdim=True))
    expected = side_by_side(CachedModel(model, 120, VOCABULARY, False, 2), extra)
    same(expected, side_by_side(CudaGraphModel(model, 120, VOCABULARY, False, 2, recorder), extra))


def test_texts_of_batches_that_take_turns_keep_their_recordings(
    prompt_ids: list[list[int]], graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, three and two side by side: the smaller batch uses what the larger one has recorded."""
    target = build_model()
    pair = join(target, build_draft(target))
    requests = [Request(ids, key) for key, ids in enumerate(prompt_ids[:4])]
    sizes = (1, 3, 2)

    def texts(size: int, tree: str | None) -> list[tuple[int, ...]]:
        made = Speculator(pair, Confidence(0.2, 3), Settings(0.7, 12, tree=tree, verification="match"), batch=size).run(
            requests
        )
        return [text.tokens for text in made]

    expected = {tree: texts(1, tree) for tree in (None, "2,2,1")}
    for module in (model_source, drafters_module):
        monkeypatch.setattr(module, "open_cache", functools.partial(CudaGraphModel, recorder=recorder))
    made = []
    for _ in range(3):
        before = graphs.recorded
        for tree, own in expected.items():
            assert [texts(size, tree) for size in sizes] == [own] * len(sizes)
        made.append(graphs.recorded - before)
    assert made[0] > made[2] == 0, f"nothing is left to be recorded: {made}"


def test_one_loop_does_not_play_what_another_model_was_recorded_for(
    model: PreTrainedModel, recording: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are replaced between two texts of a loop, and adapters that are added, switched off and scaled."""
    peft = pytest.importorskip("peft")
    pair, settings = join(model, build_draft(model)), Settings(0.0, 20, ignore_eos=True)

    def texts(loop: Speculator) -> list[tuple[int, ...]]:
        return [loop.generate(prompt).tokens for prompt in ([3, 4, 5], [6, 7])]

    loop = Speculator(pair, FixedLength(3), settings)
    made = [texts(loop)]
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().roll(1, 0))
    made.append(texts(loop))
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    made.append(texts(loop))
    model.disable_adapters()
    made.append(texts(loop))
    assert recording.played and made[3] == made[1] and made[0] != made[1] != made[2]
    model.enable_adapters()
    assert texts(loop) == made[2]
    with monkeypatch.context() as patch:
        for module in (model_source, drafters_module):
            patch.setattr(module, "open_cache", CachedModel)
        assert texts(Speculator(pair, FixedLength(3), settings)) == made[2]


def test_loops_in_several_threads_have_recordings_of_their_own(
    model: PreTrainedModel, recording: Graphs, prompt_ids: list[list[int]]
) -> None:
    pair = join(model, build_draft(model))

    def texts(size: int) -> list[tuple[int, ...]]:
        requests = [Request(ids, key) for key, ids in enumerate(prompt_ids[:4])]
        made = Speculator(pair, Confidence(0.2, 3), Settings(0.7, 12, verification="match"), batch=size).run(requests)
        return [text.tokens for text in made]

    expected = texts(1)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(texts, [1, 2, 3, 1] * 6)) == [expected] * 24
    assert recording.played


@torch.no_grad()
def test_a_model_that_answers_with_all_rows_is_filled_up_too(model: PreTrainedModel, graphs: Graphs) -> None:
    """Seven tokens of which six are wanted: both are filled up to eight."""
    whole = model.forward
    model.forward = lambda *args, logits_to_keep=0, **kwargs: whole(*args, **kwargs)  # type: ignore[method-assign]
    grown = CachedModel(model, 120, VOCABULARY, False, 2)
    fixed = CudaGraphModel(model, 120, VOCABULARY, False, 2, recorder)
    parts = [Part(0, [5, 6, 7]), Part(1, [8, 9, 10, 11], 3)]
    for cache in (grown, fixed):
        cache.read_parts([Part(0, [7, 8], 1), Part(1, [9, 8, 7, 6], 1)])
    for _ in range(3):
        same([grown.read_parts(parts)], [fixed.read_parts(parts)])
    assert graphs.played > 0


@torch.no_grad()
def test_grouped_queries_repeat_no_keys(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(num_attention_heads=4, num_key_value_heads=2)
    expected = readings(CachedModel(model, 120, VOCABULARY))
    cache = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder)
    chain(cache, torch.ones(1, 5, dtype=torch.int64), 1)  # a prompt attends as the library does
    with monkeypatch.context() as patch:
        patch.setattr(sdpa_attention, "repeat_kv", None)
        chain(cache, torch.ones(1, 3, dtype=torch.int64))
    cache.roll_back(0)
    same(expected, readings(cache))


@torch.no_grad()
def test_a_prompt_is_read_on_a_device_without_a_mask(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a device takes its flash kernel, and no mask of a prompt squared is made."""
    attend, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(*args: torch.Tensor, **more: object) -> torch.Tensor:
        seen.append((more.get("attn_mask"), more.get("is_causal")))
        return attend(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    masked, cache = (CachedModel(model, 32, VOCABULARY) for _ in range(2))
    prompt = torch.arange(3, 12)[None]
    expected = chain(masked, prompt)
    seen.clear()
    same([expected], [chain(cache, prompt)])
    assert seen == [(None, True)] * model.config.num_hidden_layers


@torch.no_grad()
def test_streams_side_by_side_are_recorded(model: PreTrainedModel, graphs: Graphs) -> None:
    """Calls of one shape are recorded, whatever the lengths of the texts; prompts are read one by one."""
    logits = []
    for cache in (
        CachedModel(model, 60, VOCABULARY, True, 2),
        CudaGraphModel(model, 60, VOCABULARY, True, 2, recorder),
    ):
        out = [cache.read_parts([Part(0, [7, 8], 1), Part(1, [9, 8, 7, 6], 1)])]
        for step in range(6):
            out.append(cache.read_parts([Part(0, [3 + step]), Part(1, [5 + step])]))
            out.append(cache.read_parts([Part(0, [step, 4], 1), Part(1, [2])]))
            tree = [TreeRows(TREE, cache.lengths[stream], [], [0, 1, 2]) for stream in range(2)]
            out.append(cache.read_parts([Part(stream, [1, 2, 3], tree=tree[stream]) for stream in range(2)]))
            cache.keep(tree[0].base, [tree[0].base, tree[0].base + 2], 0)
            cache.keep(tree[1].base, [tree[1].base], 1)
            assert cache.states is not None
            out.append(cache.states)
        logits.append(out)
    same(*logits)
    assert graphs.recorded == 6  # three shapes, and twice as many slots to attend to for the longer texts


@torch.no_grad()
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_long_calls_are_recorded_too(model: PreTrainedModel, graphs: Graphs, rows: int) -> None:
    """Chains and trees of more tokens than are recorded one by one are filled up to a few sizes."""
    tree, generator = parse_tree("6,6,2"), torch.Generator().manual_seed(3)
    counts = (40, 49, 41, 50, 46, 45)
    outs = []
    for cache in (CachedModel(model, 700, VOCABULARY), CudaGraphModel(model, 700, VOCABULARY, recorder=recorder)):
        generator.manual_seed(3)
        out = [chain(cache, torch.randint(1, VOCABULARY, (1, 30), generator=generator), 1)]
        for count in counts:
            base = cache.length
            out.append(chain(cache, torch.randint(1, VOCABULARY, (1, count), generator=generator), rows))
            cache.roll_back(base + 2)
            tokens = torch.randint(1, VOCABULARY, (len(tree),), generator=generator)
            out.append(branches(cache, tokens, TreeRows(tree, base + 2, [], list(range(len(tree))))))
            cache.roll_back(base + 5)
        outs.append(out)
    same(*outs)
    assert len(tree) > 64 and (graphs.recorded, graphs.played) == (1, 5)


def test_sizes_rise_in_few_steps() -> None:
    sizes = [filled_up(count) for count in range(1, 1025)]
    assert sizes == sorted(sizes) and all(size >= count for count, size in enumerate(sizes, 1))
    assert all(size <= 1.25 * count for count, size in enumerate(sizes, 1) if count > 32)
    assert len(set(sizes)) < 32 and sizes[-1] == 1024


@torch.no_grad()
def test_recordings_are_bounded_and_the_least_used_go_first(
    model: PreTrainedModel, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_module, "MAX_CALLS", 4)
    cache, reference = CudaGraphModel(model, 120, VOCABULARY, recorder=recorder), CachedModel(model, 120, VOCABULARY)
    for one in (cache, reference):
        chain(one, torch.full((1, 5), 3), 1)

    def check(count: int) -> int:
        before, tokens = graphs.recorded, torch.full((1, count), 7)
        for _ in range(2):
            torch.testing.assert_close(chain(cache, tokens), chain(reference, tokens))
            for one in (cache, reference):
                one.roll_back(5)
            assert len(cache._memory.calls) <= 4
        return graphs.recorded - before

    assert [check(count) for count in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert check(1) == 0  # the latest used now
    assert check(5) == 1  # in the place of 2
    assert [check(count) for count in (1, 3, 4, 5)] == [0, 0, 0, 0]
    assert check(2) == 1


@torch.no_grad()
def test_recordings_of_batches_are_bounded_by_their_memory(
    model: PreTrainedModel, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, reference = (
        CudaGraphModel(model, 60, VOCABULARY, False, 2, recorder),
        CachedModel(model, 60, VOCABULARY, False, 2),
    )
    row = VOCABULARY * torch.float64.itemsize
    monkeypatch.setattr(cuda_module, "device_bytes", lambda device: 6 * row / cuda_module.RECORDED_SHARE)
    for one in (cache, reference):
        one.read_parts([Part(0, [7, 8], 1), Part(1, [9, 8, 7, 6], 1)])
    for step in range(4):
        for count in (1, 2):
            parts = [Part(0, [3 + step] * count), Part(1, [5 + step] * count)]
            same([cache.read_parts(parts)], [reference.read_parts(parts)])
            assert sum(call.size for call in cache._memory.calls.values()) <= 6 * row
    assert graphs.recorded > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.no_grad()
def test_graphs_give_the_same_logits() -> None:
    model = build_model().cuda()
    grown, fixed = CachedModel(model, 120, VOCABULARY), open_cache(model, 120, VOCABULARY)
    assert isinstance(fixed, CudaGraphModel)
    same(readings(grown, "cuda"), readings(fixed, "cuda"), 1e-9)
    assert any(call.play is not None for call in fixed._memory.calls.values())
