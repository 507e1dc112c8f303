"""Layouts of weights: the same product in each, the fastest chosen by measurement, remembered, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specstop.decode.models.cpu import layouts
from specstop.decode.models.cpu.products import BOUNDS, LAYOUTS, Product
from specstop.decode.models.engine import pack
from specstop.policies.errors import InputError

SHAPE = (192, 128)  # 96 KiB


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path))
    return tmp_path / "layouts.json"


def weight(seed: int = 0, shape: tuple[int, int] = SHAPE) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clock(monkeypatch: pytest.MonkeyPatch, costs: dict[str, list[float]]) -> list[str]:
    """Have products take made-up times, in microseconds, and note which shapes were measured."""
    seen: list[str] = []

    def measured(products: list[Product]) -> dict[str, list[float]]:
        seen.append("x".join(map(str, products[0].weight.shape)))
        return {layout: [1e-6 * value for value in values] for layout, values in costs.items()}

    monkeypatch.setattr(layouts, "measured", measured)
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
    costs = {"reordered": [4.0, 4.0, 4.0, 4.0], "linear": [2.0, 3.0, 5.0, 9.0], "transposed": [1.0, 2.0, 5.0, 9.0]}
    seen = clock(monkeypatch, costs)
    several = [Product(weight(seed)) for seed in range(3)]
    layouts.choose_layouts(several)
    assert {product.layouts for product in several} == {("transposed", "transposed", "reordered", "reordered")}
    assert seen == ["192x128"]
    again = Product(weight(9))
    layouts.choose_layouts([again])
    assert again.layouts == several[0].layouts and seen == ["192x128"], "known from before"
    assert list(json.loads(cache.read_text())) == [layouts.machine()]


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
    assert [len(set(product.layouts)) for product in (one, other)] == [2, 1], "there is memory for one second layout"


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
    assert seen == ["192x128"] * 2 and not cache.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"x": 3}', '{"x": {"192x128 torch.float32": {"linear": [1]}}}'])
def test_a_damaged_file_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    cache.write_text(text.replace('"x"', json.dumps(layouts.machine())))
    seen = clock(monkeypatch, {layout: [1.0] * 4 for layout in LAYOUTS})
    layouts.choose_layouts([Product(weight())])
    assert seen == ["192x128"] and "192x128 torch.float32" in cache.read_text()


def test_what_is_measured_are_the_products_themselves(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "STALL_S", 60.0)  # however busy the machine
    module = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    x = torch.randn(1, 2, 256)
    expected = module(x)
    pack(module)
    torch.testing.assert_close(module(x), expected, atol=1e-4, rtol=1e-4)
    (found,) = json.loads(cache.read_text())[layouts.machine()].values()
    assert set(found) == set(LAYOUTS) and all(0.0 < value < 1.0 for times in found.values() for value in times)


def test_one_layout_can_be_forced(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(layouts.FORCED, "transposed")
    product = Product(weight())
    layouts.choose_layouts([product])
    assert product.layouts == ("transposed",) * 4 and not cache.exists()
    monkeypatch.setenv(layouts.FORCED, "best")
    with pytest.raises(InputError, match="SPECSTOP_LAYOUT: expected one of reordered, linear, transposed, not 'best'"):
        layouts.choose_layouts([Product(weight())])
