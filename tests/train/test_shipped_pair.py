"""The shipped pair: exact quantization, expanded once and again when damaged, ordinary Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specstop.train import shipped_pair as module
from specstop.train.shipped_pair import expand_weights, quantize_weights, shipped_pair
from transformers import AutoModelForCausalLM, AutoTokenizer


def lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_expanded_weights_are_near_and_quantize_to_themselves(scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "model.embed_tokens.weight": scale * torch.randn(40, 33, generator=generator),
        "model.norm.weight": torch.randn(33, generator=generator),
    }
    weights["model.embed_tokens.weight"][3] = 0.0
    expanded = expand_weights(quantize_weights(weights))
    again = expand_weights(quantize_weights(expanded))
    matrix = weights["model.embed_tokens.weight"]
    step = matrix.abs().amax(1, keepdim=True) / 127
    # Half a step of rounding, and the rounding of the scale to 8 bits.
    assert bool(((expanded["model.embed_tokens.weight"] - matrix).abs() <= step).all())
    assert torch.equal(expanded["model.norm.weight"], weights["model.norm.weight"])
    assert expanded["lm_head.weight"] is expanded["model.embed_tokens.weight"]
    assert all(torch.equal(again[name], expanded[name]) for name in expanded)


def test_the_shipped_pair_is_an_ordinary_pair() -> None:
    folder = shipped_pair()
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    tokenizers = [AutoTokenizer.from_pretrained(folder / name) for name in ("target", "draft")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    assert len(tokenizers[0]) <= target.config.vocab_size == draft.config.vocab_size
    assert tokenizers[0].eos_token_id == target.config.eos_token_id == draft.config.eos_token_id
    described = json.loads((folder / "pair.json").read_text())
    counts = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    assert counts == described["parameters"]
    assert counts["target"] >= 10 * counts["draft"]
    text = "def name(alpha, gamma):\n\ttabs, é and \U0001f600\n"
    assert tokenizers[0].decode(tokenizers[0](text).input_ids) == text


def test_the_target_continues_source_text_and_the_draft_often_agrees() -> None:
    folder = shipped_pair()
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    agreed = []
    for record in lines(folder / "prompts-test.jsonl")[:6]:
        ids = tokenizer(record["prompt"], return_tensors="pt").input_ids
        with torch.inference_mode():
            text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, do_sample=False)
            guess = draft(text[:, :-1]).logits[0, ids.shape[1] - 1 :].argmax(-1)
            loss = target(ids, labels=ids).loss
        assert float(loss) < 4.0  # a model that has learnt nothing has log 2048 = 7.6
        agreed += (guess == text[0, ids.shape[1] :]).tolist()
    assert 0.5 < sum(agreed) / len(agreed) < 0.95


def test_the_pair_is_expanded_once_and_again_when_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECSTOP_CACHE", str(tmp_path / "cache"))
    folder = shipped_pair()
    assert folder.parent == tmp_path / "cache"
    weights = folder / "draft" / "model.safetensors"
    whole, written = weights.read_bytes(), weights.stat().st_mtime_ns
    assert shipped_pair() == folder and weights.stat().st_mtime_ns == written
    weights.write_bytes(whole[:-4])
    assert shipped_pair() == folder and weights.read_bytes() == whole
    (folder / "target" / "config.json").unlink()
    assert (shipped_pair() / "target" / "config.json").is_file()
    (folder / module._CHECKSUMS).write_text("[]")
    assert shipped_pair() == folder and (folder / module._CHECKSUMS).read_text() != "[]"
