"""Medusa's released heads as the folder of a drafter: the outputs of the released module, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from commands import cli, model_options
from conftest import NEW
from specstop.decode import Settings, decode, with_drafter
from specstop.decode.drafters.folder import load_drafter
from specstop.decode.models.pair import Pair
from specstop.policies.errors import InputError, PolicyError
from specstop.policies.fixed import FixedLength
from specstop.train.released import PREFIX, import_medusa
from torch import Tensor, nn

HEADS = 3


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def released(pair: Pair, *, outputs: bool = True) -> nn.ModuleList:
    """Return heads as they were released: with output layers, or, later, without, as they share the target's."""
    torch.manual_seed(0)
    size = pair.target.config.hidden_size
    return nn.ModuleList(
        nn.Sequential(Block(size), *([nn.Linear(size, pair.vocabulary, bias=False)] if outputs else []))
        for _ in range(HEADS)
    ).double()


def saved(state: dict[str, Tensor], folder: Path, name: str = "medusa_lm_head.pt") -> Path:
    state = {key: value.float().contiguous() for key, value in state.items()}
    (safetensors.torch.save_file if name.endswith("safetensors") else torch.save)(state, folder / name)
    return folder / name


@pytest.mark.parametrize("outputs", [True, False])
@pytest.mark.parametrize("form", ["file", "folder", "whole"])
def test_the_heads_compute_the_released_outputs(plain_pair: Pair, tmp_path: Path, outputs: bool, form: str) -> None:
    heads = released(plain_pair, outputs=outputs)
    (tmp_path / "released").mkdir()
    if form == "whole":  # a checkpoint of the target and its heads
        state = {PREFIX + key: value for key, value in heads.state_dict().items()}
        weights = saved({**state, "model.norm.weight": torch.ones(4)}, tmp_path / "released", "model.safetensors")
    else:
        file = saved(heads.state_dict(), tmp_path / "released")
        weights = file if form == "file" else file.parent
    imported = import_medusa(weights, plain_pair, tmp_path / "drafter")
    loaded = load_drafter(tmp_path / "drafter")
    assert imported.kind == loaded.kind == "medusa" and "imported from" in loaded.provenance
    network: Any = loaded.network_for(plain_pair)
    hidden = torch.randn(5, plain_pair.target.config.hidden_size, dtype=torch.float64)
    for number, head in enumerate(heads):
        expected = head.float()(hidden.float()).double()
        expected = expected if outputs else plain_pair.target.lm_head(expected)
        output = network.outputs[number](network.state(number, hidden, None))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_imported_heads_draft_and_the_text_is_the_targets(
    pair: Pair, pair_folder: Path, prompt_ids: list[list[int]], tmp_path: Path
) -> None:
    weights, target = saved(released(pair).state_dict(), tmp_path), pair_folder / "target"
    answer = cli("import", weights, "--target", target, "--out", tmp_path / "d", "--json", "--dtype", "float64")
    assert answer.code == 0, answer.err
    facts = json.loads(answer.out)
    assert (facts["network"], facts["depth"], facts["provenance: for the target"]) == ("medusa", HEADS, str(target))
    assert "medusa" in cli("info", tmp_path / "d").out
    drafted = with_drafter(pair, f"medusa:{tmp_path / 'd'}")
    settings = Settings(0.7, NEW, max_depth=HEADS, verification="match")
    drafts = decode(drafted, prompt_ids[:3], FixedLength(HEADS), settings=settings)
    plain = decode(pair, prompt_ids[:3], FixedLength(0), settings=settings)
    assert [one.tokens for one in drafts] == [one.tokens for one in plain]
    assert any(round.drafted == HEADS for one in drafts for round in one.rounds)
    shown = cli("import", weights, "--target", target, "--out", tmp_path / "d", "--overwrite")
    assert f"--drafter medusa:{tmp_path / 'd'} --depth {HEADS}" in shown.out, shown.err
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w6 w7 w8"}\n')
    options = model_options(pair_folder, "--prompts", str(tmp_path / "prompts.jsonl"))
    at = options.index("--draft")
    options[at : at + 2] = ["--drafter", f"medusa:{tmp_path / 'd'}", "--max-new-tokens", "9"]
    answer = cli("decode", *options)
    assert answer.code == 0, answer.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.0.linear.bias": None}, r"missing: '0.0.linear.bias'"),
        ({"1.1.weight": None}, r"missing: '1.1.weight'"),
        ({"7.0.linear.weight": torch.zeros(1)}, r"unknown: '7.0.linear.weight'"),
        ({f"{i}.0.linear.weight": torch.zeros(1) for i in range(3, 70)}, r"unknown: '64.0.linear.weight'"),
        ({"0.1.weight": torch.full((48, 16), torch.inf)}, r"0.1.weight has numbers that are not finite"),
        ({"0.1.linear.weight": torch.zeros(1)}, r"unknown: '0.1.linear.weight'; Medusa's heads have one block"),
        (
            {"2.1.weight": torch.zeros(5, 16)},
            r"2.1.weight has the shape \[5, 16\] where this target's heads have \[48, 16\]",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(
    plain_pair: Pair, tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    state = {**released(plain_pair).state_dict(), **change}
    weights = saved({key: value for key, value in state.items() if value is not None}, tmp_path)
    with pytest.raises((InputError, PolicyError), match=message):
        import_medusa(weights, plain_pair, tmp_path / "d")
    assert not (tmp_path / "d").exists()


def test_an_invalid_command_is_one_line(pair: Pair, pair_folder: Path, tmp_path: Path) -> None:
    weights, target = saved(released(pair).state_dict(), tmp_path), pair_folder / "target"
    for command, noun in [
        ((weights,), "--target"),
        ((weights, "--target", target, "--threshold", "0"), "--threshold"),
        ((weights, "--dtype", "bfloat16"), "--dtype"),
        ((tmp_path / "none", "--target", target), "does not exist"),
        ((pair_folder, "--target", target), "medusa_lm_head.pt"),
    ]:
        answer = cli("import", *command, "--out", tmp_path / "d")
        assert answer.code == 2 and answer.err.count("\n") == 1 and noun in answer.err, answer.err
    assert not (tmp_path / "d").exists()
