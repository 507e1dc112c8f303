"""The demo and its shipped pair."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from conftest import make_prompts
from specstop.decode.profile.measuring import Effort
from specstop.policies.registry import load_policy
from specstop.policies.storage import load_policy_folder
from specstop.train.demo import Sizes, demo
from specstop.train.heads.networks import MLPEstimator
from specstop.train.shipped_pair import expand_weights, quantize_weights
from transformers import AutoModelForCausalLM, AutoTokenizer

from specstop import Profile, load_trace, shipped_pair

EFFORT = Effort(repetitions=1)
SIZES = Sizes(
    train=12, test=4, live=3, routed=10, tokens=12, depth=3, heads=("logistic", "mlp"), effort=EFFORT,
    decision_effort=EFFORT, route_effort=EFFORT,
)  # fmt: skip


@pytest.fixture(scope="module")
def pair_with_prompts(pair_folder, tmp_path_factory, few_draws):
    folder = tmp_path_factory.mktemp("demo") / "pair"
    shutil.copytree(pair_folder, folder)
    for side, seed in (("train", 21), ("test", 22)):
        lines = [json.dumps({"id": p.id, "prompt": p.text}) for p in make_prompts(30, side, seed)]
        (folder / f"prompts-{side}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def result(pair_with_prompts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MLPEstimator.__init__.__kwdefaults__, "epochs", 6)  # its quality does not matter here
        return demo(pair_with_prompts.parent / "out", pair=pair_with_prompts, sizes=SIZES)


def test_the_folder_has_traces_profile_policies_and_report(result):
    for side, count in (("train", SIZES.train), ("test", SIZES.test)):
        header = load_trace(result.folder / f"traces-{side}").header
        assert (header.prompts, header.depth, header.max_new_tokens) == (count, SIZES.depth, SIZES.tokens)
    profile = Profile.load(result.folder / "profile.json")
    assert profile.max_depth == SIZES.depth and {"confidence", *SIZES.heads} <= set(profile.decision_s)
    for kind in SIZES.heads:
        policy = load_policy_folder(result.folder / "policies" / kind)
        # Tuned for the final profile, with the measured price of its decisions.
        assert policy.head.kind == kind and profile.same_costs(policy.metadata.profile) and policy.metadata.rho > 0
        assert policy.metadata.profile["decision_s"][kind] == profile.decision(kind)
    text = (result.folder / "report" / "report.html").read_text()
    assert str(result.folder / "traces-test") in text and ".specstop-" not in text, "names that files have at the end"


def test_every_head_is_in_the_report_and_all_policies_decode_the_same_text(result):
    assert {"plain decoding", "best fixed", *SIZES.heads} <= {line.name for line in result.report.lines}
    assert len(result.live) == 3 and result.live[0].measured == result.live[0].predicted == 1.0
    for line in result.live:
        assert line.same_text == line.tally.texts == SIZES.live
        assert line.measured > 0 < line.predicted and line.miss == line.measured / line.predicted - 1


def test_a_route_among_drafters_is_compared_on_held_out_prompts(result):
    assert result.routes is not None and result.routes.facts["prompts"] == SIZES.test
    (line,) = (line for line in result.routes.lines if line.drafters)
    assert line.tokens_per_s > 0 and line.to_best_fixed.value > 0
    assert load_policy(result.folder / "policies" / "route").name == line.name


@pytest.mark.parametrize("scale", [1e-6, 1.0, 300.0])
def test_expanded_weights_are_near_and_quantize_to_themselves(scale):
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


def test_the_pair_is_expanded_once_and_again_when_damaged(tmp_path, monkeypatch):
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


def test_the_shipped_pair_is_an_ordinary_pair_whose_draft_often_agrees():
    folder = shipped_pair()
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("target", "draft"))
    tokenizer, other = (AutoTokenizer.from_pretrained(folder / name) for name in ("target", "draft"))
    assert tokenizer.get_vocab() == other.get_vocab()
    assert len(tokenizer) <= target.config.vocab_size == draft.config.vocab_size
    assert tokenizer.eos_token_id == target.config.eos_token_id == draft.config.eos_token_id
    counts = {"target": target.num_parameters(), "draft": draft.num_parameters()}
    assert counts == json.loads((folder / "pair.json").read_text())["parameters"]
    assert counts["target"] >= 10 * counts["draft"]
    text = "def name(alpha, gamma):\n\ttabs, é and \U0001f600\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    agreed = []
    for line in (folder / "prompts-test.jsonl").read_text(encoding="utf-8").splitlines()[:4]:
        ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt").input_ids
        with torch.inference_mode():
            text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
            guess = draft(text[:, :-1]).logits[0, ids.shape[1] - 1 :].argmax(-1)
            assert float(target(ids, labels=ids).loss) < 4.0  # a model that has learned nothing has log 2048 = 7.6
        agreed += (guess == text[0, ids.shape[1] :]).tolist()
    assert 0.5 < sum(agreed) / len(agreed) < 0.95
