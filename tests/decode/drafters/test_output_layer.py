"""What makes logits of last hidden states: the output layer, and what a model does to its numbers."""

from __future__ import annotations

import pytest
import torch
from conftest import build_model
from scaled_models import CAP, FACTOR, SCALED, scaled_model
from small_drafters import small_drafter
from specstop.decode.drafters.networks import ScaledOutput, output_layer, output_scale
from specstop.decode.models.pair import join
from transformers import GPT2Config, PreTrainedConfig

TEXT = torch.tensor([[5, 8, 9, 7, 11, 30]])
SAME = {"atol": 1e-12, "rtol": 0.0}  # float64: a quotient is a product with the inverse here


@pytest.mark.parametrize("name", SCALED)
@torch.inference_mode()
def test_the_last_states_become_the_models_own_logits(name: str) -> None:
    model = scaled_model(name)
    made = model(TEXT, output_hidden_states=True)
    states, layer = made.hidden_states[-1], model.get_output_embeddings()
    torch.testing.assert_close(output_layer(model)(states), made.logits, **SAME)
    assert float((layer(states) - made.logits).abs().max()) > 0.1, "the bare layer says something else"


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("kind", ["layer", "ctc"])
@torch.inference_mode()
def test_a_drafter_scores_its_states_as_the_target_would(name: str, kind: str) -> None:
    model = scaled_model(name)
    made = model(TEXT, output_hidden_states=True)
    drafter = small_drafter(kind, join(model, None))
    torch.testing.assert_close(drafter._output(made.hidden_states[-1]), made.logits, **SAME)


def test_a_model_that_changes_nothing_keeps_its_layer() -> None:
    model = build_model()
    assert type(output_layer(model)) is torch.nn.Linear
    assert output_scale(GPT2Config()) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"logits_scaling": 4.0}, (0.25, 0.0)),
        ({"model_type": "hyperclovax", "logits_scaling": 4.0}, (4.0, 0.0)),
        ({"logits_scaling": None, "logit_scale": None}, (1.0, 0.0)),
        ({"output_multiplier": FACTOR, "final_logit_softcapping": CAP}, (FACTOR, CAP)),
        ({"logits_soft_cap": 30.0}, (1.0, 30.0)),
    ],
)
def test_names_of_other_families_are_known(said: dict[str, object], expected: tuple[float, float]) -> None:
    config = PreTrainedConfig()
    for name, value in said.items():
        setattr(config, name, value)
    assert output_scale(config) == expected
    numbers = torch.linspace(-50.0, 50.0, 11)
    factor, cap = expected
    scaled = factor * numbers
    logits = ScaledOutput(torch.nn.Identity(), factor, cap)(numbers)
    assert torch.allclose(logits, cap * torch.tanh(scaled / cap) if cap else scaled)
