"""Layouts of weights: the same product in each, the fastest chosen by measurement, remembered, and never in the way."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from specstop.decode.models.cpu import layouts, passes
from specstop.decode.models.cpu.products import BOUNDS, LAYOUTS, Product
from specstop.decode.models.engine import pack
from specstop.policies.errors import InputError

SHAPE = (192, 128)  # 96 KiB


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path))
    return tmp_path / "weight_layouts.json"


def weight(seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


APART = {"reordered": [4.0, 4.0, 4.0, 4.0], "linear": [2.0, 3.0, 5.0, 9.0], "transposed": [1.0, 2.0, 5.0, 9.0]}


def clock(monkeypatch: pytest.MonkeyPatch, costs: dict[str, list[float]], both: float = 1.0) -> list[str]:
    """Have passes take made-up times, in microseconds a product, and note which products were measured.

    Args:
        costs: by layout, by class of rows.
        both: what passes take of that where two layouts of a weight are kept.
    """
    seen: list[str] = []

    def pass_seconds(
        products: Sequence[Product], choices: Sequence[Mapping[str, Sequence[str]]]
    ) -> list[dict[str, list[float]]]:
        seen.append(" ".join(map(passes.shape_of, products)))
        count = Counter(map(passes.shape_of, products))
        return [
            {
                shape: [
                    1e-6 * count[shape] * costs[layout][at] * (both if len(set(kept)) > 1 else 1.0)
                    for at, layout in enumerate(kept)
                ]
                for shape, kept in choice.items()
            }
            for choice in choices
        ]

    monkeypatch.setattr(layouts, "pass_seconds", pass_seconds)
    return seen


@pytest.mark.parametrize("bias", [None, torch.ones(SHAPE[0])])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 9, 24, 25, 70])
def test_every_layout_gives_the_product(rows: int, bias: torch.Tensor | None) -> None:
    product, x = Product(weight(), bias), torch.randn(1, rows, SHAPE[1])
    expected = torch.nn.functional.linear(x, weight(), bias)
    for mixed in [(layout,) * 4 for layout in LAYOUTS] + [("transposed", "linear", "reordered", "reordered")]:
        product.use(mixed)
        torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)
    product.settle(product.layouts)
    torch.testing.assert_close(product(x), expected, atol=1e-4, rtol=1e-4)
    assert product.weight is None


def test_what_is_fastest_for_so_many_rows_is_used_and_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = clock(monkeypatch, APART)
    several = [Product(weight(seed)) for seed in range(3)]
    layouts.choose_layouts(several)
    assert {product.layouts for product in several} == {("transposed", "transposed", "reordered", "reordered")}
    assert seen == ["192x128 float32 192x128 float32 192x128 float32"] * 2, "each alone, then one beside two"
    again = [Product(weight(seed)) for seed in range(3)]
    layouts.choose_layouts(again)
    assert again[0].layouts == several[0].layouts and len(seen) == 2, "known from before"
    layouts.choose_layouts([*again[:1], Product(weight())])
    assert len(seen) == 4, "a model of other weights has other caches"
    known = json.loads(cache.read_text())
    assert list(known) == [layouts.machine()]
    assert list(known[layouts.machine()]) == ["3 of 192x128 float32", "1 of 192x128 float32"]


def test_a_second_layout_is_kept_only_where_passes_with_both_are_faster(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(monkeypatch, APART, both=1.6)
    product = Product(weight())
    layouts.choose_layouts([product])
    assert product.layouts == ("reordered",) * len(BOUNDS), "caches hold one of them"


def test_a_little_faster_is_no_reason_and_a_second_layout_has_a_price(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = {"reordered": [1.0] * 4, "linear": [0.99] * 4, "transposed": [0.98, 1.1, 1.1, 1.1]}
    assert layouts.best_layouts(near, 2) == ("reordered",) * len(BOUNDS)
    apart = {"reordered": [4.0, 4.0, 4.0, 4.0], "linear": [3.0, 3.0, 3.0, 3.0], "transposed": [1.0, 2.0, 5.0, 9.0]}
    assert layouts.best_layouts(apart, 1) == ("linear",) * len(BOUNDS)
    assert layouts.best_layouts(apart, 2) == ("transposed", "transposed", "linear", "linear")
    clock(monkeypatch, apart)
    monkeypatch.setattr(layouts, "EXTRA", weight().nbytes)
    one, other = Product(weight()), Product(weight(1, (256, 128)))
    layouts.choose_layouts([one, other])
    assert [set(product.layouts) for product in (one, other)] == [{"linear"}] * 2, (
        "there is memory for one second layout"
    )


def test_a_sample_has_each_shape_and_as_much_as_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    large, some = Product(weight(1, (256, 128))), [Product(weight(seed)) for seed in range(4)]
    monkeypatch.setattr(passes, "SAMPLE", large.weights.nbytes + 2 * weight().nbytes)
    assert passes.sample([*some, large]) == [*some[:2], large]
    monkeypatch.setattr(passes, "SAMPLE", 0)
    assert passes.sample([*some, large]) == [some[0], large]


def test_small_weights_and_other_types_are_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = clock(monkeypatch, {})
    some = [Product(weight(shape=(16, 16))), Product(weight().double())]
    layouts.choose_layouts(some)
    assert [product.layouts[0] for product in some] == ["reordered", "linear"] and seen == []
    assert not cache.exists()


def test_timings_of_a_machine_that_had_no_time_are_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"reordered": [40.0] * 4, "linear": [20.0] * 4, "transposed": [10.0, 8000.0, 10.0, 10.0]}
    seen = clock(monkeypatch, costs)
    for _ in range(2):
        product = Product(weight())
        layouts.choose_layouts([product])
        assert product.layouts == ("reordered",) * 4
    assert len(seen) == 2 and not cache.exists()


DAMAGED = ("3", '{"192x128 float32": ["linear"]}', '{"192x128 float32": ["linear", "best", "linear", "linear"]}', "{}")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"x": 3}', *(f'{{"x": {{"1 of 192x128 float32": {t}}}}}' for t in DAMAGED)]
)
def test_a_damaged_file_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    cache.write_text(text.replace('"x"', json.dumps(layouts.machine())))
    seen = clock(monkeypatch, {layout: [1.0] * 4 for layout in LAYOUTS})
    layouts.choose_layouts([Product(weight())])
    assert len(seen) == 1 and json.loads(cache.read_text())[layouts.machine()] == {
        "1 of 192x128 float32": {"192x128 float32": ["reordered"] * 4}
    }


def test_what_is_measured_are_the_products_themselves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "STALL_S", 60.0)  # however busy the machine
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    x = torch.randn(1, 2, 256)
    expected = module(x)
    pack(module)
    torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=1e-4)
    ((model, found),) = json.loads(cache.read_text())[layouts.machine()].items()
    assert model == "3 of 256x256 float32" and {*found["256x256 float32"]} <= {*LAYOUTS}
    products = [Product(layer.weight) for layer in torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(3))]
    choices = [{"256x256 float32": (layout,) * 4} for layout in LAYOUTS]
    with torch.inference_mode():
        timed = passes.pass_seconds(products, choices)
    assert all(0.0 < value < 10.0 for times in timed for value in times["256x256 float32"])


def test_steps_of_the_whole_model_decide_where_it_is_small(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = clock(monkeypatch, APART)
    costs = {"reordered": 3.0, "linear": 2.0, "transposed": 2.5}
    products, made = [Product(weight(seed)) for seed in range(2)], []

    def steps() -> Callable[[int], float]:
        made.append(1)
        return lambda rows: costs[products[0].layouts[0]] * rows

    layouts.choose_layouts(products, steps)
    assert {product.layouts for product in products} == {("linear",) * len(BOUNDS)} and made == [1] and seen == []
    again = [Product(weight(seed)) for seed in range(2)]
    layouts.choose_layouts(again, steps)
    assert again[0].layouts == ("linear",) * len(BOUNDS) and made == [1], "known from before"
    monkeypatch.setattr(layouts, "SAMPLE", weight().nbytes)
    large = [Product(weight(seed)) for seed in range(3)]
    layouts.choose_layouts(large, steps)
    assert made == [1] and len(seen) == 2, "a step of a large one takes too long"


def test_steps_that_waited_are_not_kept(cache: Path) -> None:
    products, taken = [Product(weight())], []

    def step(rows: int) -> float:
        taken.append(rows)
        return rows * (1.0 if len(taken) % 3 else 9.0) * (1.0 if len(taken) < 20 else 4.0)

    layouts.choose_layouts(products, lambda: step)
    assert products[0].layouts == ("reordered",) * len(BOUNDS) and taken and not cache.exists()


def test_one_layout_can_be_forced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(layouts.FORCED, "transposed")
    product = Product(weight())
    layouts.choose_layouts([product])
    assert product.layouts == ("transposed",) * 4 and not cache.exists()
    monkeypatch.setenv(layouts.FORCED, "best")
    with pytest.raises(InputError, match="SPECSTOP_LAYOUT: expected one of reordered, linear, transposed, not 'best'"):
        layouts.choose_layouts([Product(weight())])
