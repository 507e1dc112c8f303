"""Training drafters: recorded texts, the losses, that a drafter learns, resumption, and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_prompts
from small_drafters import TRAINED, new_round, proposed, small_drafter, small_network
from specstop.decode import find_drafters, load_drafter
from specstop.decode.drafters.ctc import Prefixes
from specstop.decode.topology import chain
from specstop.policies import FixedLength, InputError
from specstop.train.drafters.fit import acceptance, new_network
from specstop.train.drafters.proposals import drafter_loss, position_log_probs, proposals
from specstop.train.drafters.texts import Batch, Text, Texts, record_texts

from specstop import Pair, Prompt, Settings, Speculator, load_pair, train_drafter

DEPTH, NEW = 3, 16


@pytest.fixture(scope="session")
def pair(plain_pair):
    return plain_pair


@pytest.fixture(scope="module")
def target(pair_folder):
    return load_pair(pair_folder / "target", engine="plain")


@pytest.fixture(scope="module")
def items(tokenizer):
    return [(p, tokenizer(p.text)["input_ids"]) for p in make_prompts(10, "fit", 5)]


def ends(pair: Pair) -> tuple[Any, Any]:
    return pair.target.get_input_embeddings(), pair.target.get_output_embeddings()


def test_texts_are_recorded_once(target, items, tmp_path):
    def record(**changes: Any) -> list[Text]:
        options = {"max_new_tokens": NEW, "temperature": 0.7, **changes}
        recorded = record_texts(target, items, tmp_path / "texts", **options)
        return [recorded[at] for at in range(len(recorded))]

    texts, prompt = record(), items[0][1]
    assert len(texts) == 2 * len(items)
    for text in texts[::5]:
        states = target.target(text.tokens[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(text.states, states, atol=2e-3, rtol=2e-3)  # kept in half precision
    greedy = target.target(texts[0].tokens[None]).logits[0].argmax(-1)
    assert texts[0].tokens[: len(prompt)].tolist() == prompt
    assert texts[0].tokens[len(prompt) :].tolist() == greedy[len(prompt) - 1 : -1].tolist()
    files = sorted((tmp_path / "texts").glob("*.safetensors"))
    assert len(Texts(files, 10**6)) == 0 < len(Texts(files, max(len(text.tokens) for text in texts))) < len(texts)
    files[0].unlink()
    kept = files[1].stat().st_mtime_ns
    again = record()
    assert files[1].stat().st_mtime_ns == kept, "existing files are not recorded again"
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(texts, again, strict=True))
    with pytest.raises(InputError, match="another target, prompts or settings"):
        record(max_new_tokens=8)
    files[0].write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read"):
        record()


@pytest.mark.parametrize("kind", TRAINED)
@torch.inference_mode()
def test_proposals_at_all_positions_are_those_of_the_live_drafter(pair, kind):
    """Compared with the drafter that stands at one position and is fed the text's own tokens."""
    text = [5, 8, 9, 7, 11, 30, 12, 4, 6]
    states = pair.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
    batch = Batch(torch.tensor([text]), states, torch.tensor([len(text)]))
    drafter = small_drafter(kind, pair, DEPTH)
    if kind == "ctc":
        symbols = position_log_probs(drafter._network, batch, *ends(pair))[0]
    else:
        rows = list(proposals(drafter._network, batch, *ends(pair)))
    for at in (1, 3, 5):  # the target has read so many tokens and one more
        drafter.reserve(1, 32)
        drafter.committed(0, text[: at + 1], states[0, : at + 1])
        round_ = new_round([text[at + 1]], chain(DEPTH))
        for depth in range(min(DEPTH, len(text) - at - 2)):
            round_.tokens[0, depth] = text[at + 1 + depth]
            row = proposed(drafter, round_, depth)[0]
            if kind == "ctc":
                live = torch.stack([position.probs for position in drafter._positions[0]]).log()
                torch.testing.assert_close(live, symbols[at, : len(live)], atol=1e-9, rtol=0)
            else:
                torch.testing.assert_close(row, rows[depth][0, at], atol=1e-9, rtol=0)


@torch.inference_mode()
def test_losses_are_those_of_a_slow_reference(pair):
    """Cross-entropy of the target's distributions position by position; CTC by the forward algorithm."""
    texts = [[5, 8, 9, 7, 11, 30], [12, 4, 6, 40]]
    outputs = [pair.target(torch.tensor([t]), output_hidden_states=True) for t in texts]
    batch = Batch.of([Text(torch.tensor(t), o.hidden_states[-1][0]) for t, o in zip(texts, outputs, strict=True)])
    weights = pair.target.get_output_embeddings().weight.float()
    for kind in ("medusa", "layer"):
        network = small_network(kind, 16, 48, weights, 2).double()
        rows = list(proposals(network, batch, *ends(pair)))
        nats: list[list[float]] = [[], []]
        for which, (text, output) in enumerate(zip(texts, outputs, strict=True)):
            for depth in range(2):
                for at in range(len(text) - 2 - depth):
                    p = output.logits[0, at + 1 + depth].softmax(-1)
                    nats[depth].append(float(-(p * rows[depth][which, at].log_softmax(-1)).sum()))
        means = [sum(values) / len(values) for values in nats]
        loss = drafter_loss(network, batch, *ends(pair))
        assert float(loss) == pytest.approx((means[0] + 0.8 * means[1]) / 1.8)
    network = small_network("ctc", 16, 48, weights, 4).double()
    symbols, nats = position_log_probs(network, batch, *ends(pair)).exp(), [[], []]
    for which, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        for at in range(len(text) - 2):
            p = output.logits[0, at + 1].softmax(-1)
            nats[1].append(float(-(p * symbols[which, at, 0, :-1].log()).sum()))
        for at in range(len(text) - 3):
            row = symbols[which, at : at + 1]
            prefix = Prefixes.empty(row)
            for token in text[at + 2 : at + 4]:
                prefix = prefix.extended(torch.tensor([token]), row)
            nats[0].append(-float((prefix.blank + prefix.token)[0, -1].log()) / 2)
    expected = sum(sum(values) / len(values) for values in nats)
    assert float(drafter_loss(network, batch, *ends(pair))) == pytest.approx(expected)


@pytest.mark.parametrize(("kind", "outputs"), [*((kind, 0) for kind in TRAINED), ("layer", 30)])
def test_a_drafter_learns_its_target(target, items, tmp_path, kind, outputs):
    """On the texts that it is fitted to: its loss falls, and its folder drafts in the loop as its metrics say."""
    greedy = record_texts(target, items, tmp_path / "one", max_new_tokens=NEW, temperature=0.0)
    lengths = [len(greedy[at].tokens) for at in range(len(items))]
    items = [items[at] for at in np.argsort(lengths)]  # the longest text is held out
    drafter = train_drafter(
        target, [prompt for prompt, _ in items], tmp_path / "drafter", kind, depth=DEPTH, outputs=outputs,
        max_new_tokens=NEW, epochs=4, learning_rate=1e-2, work=tmp_path / "work",
    )  # fmt: skip
    recorded = record_texts(target, items, tmp_path / "work" / "texts", max_new_tokens=NEW, temperature=0.7)
    batch = Batch.of([recorded[at] for at in range(len(recorded) - 2)])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        kept = drafter.network.kept if outputs else None
        before = drafter_loss(new_network(target, kind, DEPTH, kept), batch, *ends(target))
        assert float(drafter_loss(drafter.network, batch, *ends(target))) < 0.95 * float(before)
    loaded = load_drafter(tmp_path / "drafter")
    live = find_drafters(f"{kind}:{tmp_path / 'drafter'}", target)
    settings = Settings(0.0, NEW, max_depth=DEPTH)
    rounds = Speculator(target, FixedLength(DEPTH), settings, drafters=live).generate(items[-1][1]).rounds
    accepted = np.array([r.accepted for r in rounds if r.drafted == DEPTH])
    shares = [float((accepted >= depth).mean()) for depth in range(1, DEPTH + 1)]
    assert loaded.metrics["acceptance"] == pytest.approx(shares) and drafter.metrics == loaded.metrics
    assert loaded.metrics["tokens per target call"] == pytest.approx(accepted.mean() + 1)
    assert acceptance(target, kind, drafter.network, [], DEPTH, NEW) == {}
    if outputs:  # the most frequent tokens of the texts, and no others
        times = torch.bincount(torch.cat([recorded[at].tokens for at in range(len(recorded) - 2)]), minlength=48)
        others = np.setdiff1d(np.arange(48), kept)
        assert len(kept) == outputs and times[kept].min() >= times[others].max()
        live[0].reserve(1, 32)
        live[0].committed(0, [5, 8], torch.randn(2, 16))
        with torch.no_grad():
            scores = proposed(live[0], new_round([9], chain(DEPTH)), 0)[0]
        assert scores.isfinite().nonzero()[:, 0].tolist() == kept.tolist()


def test_a_resumed_run_continues_with_its_texts_and_epochs(target, items, tmp_path):
    def run(out: str, work: str, epochs: int, kind: str = "medusa") -> dict[str, torch.Tensor]:
        train_drafter(
            target, [p for p, _ in items], tmp_path / out, kind, depth=2, max_new_tokens=8, epochs=epochs,
            work=tmp_path / work, overwrite=True,
        )  # fmt: skip
        return load_drafter(tmp_path / out).network.state_dict()

    with torch.inference_mode():
        run("first", "work", 1)
    checkpoint = torch.load(tmp_path / "work" / "last.ckpt", weights_only=True)
    assert {name.partition(".")[0] for name in checkpoint["state_dict"]} == {"network"}, "not the target's layers"
    resumed = run("second", "work", 2)
    assert all(bool(tensor.isfinite().all()) for tensor in resumed.values())
    assert torch.load(tmp_path / "work" / "last.ckpt", weights_only=True)["epoch"] == 1 + checkpoint["epoch"] == 1
    with pytest.raises(InputError, match="not a checkpoint of this network"):
        run("third", "work", 2, kind="layer")


@pytest.mark.parametrize(
    ("changes", "noun"),
    [
        ({"kind": "medusas"}, "did you mean 'medusa'"),
        ({"outputs": 5}, "only `kind` layer"),
        ({"kind": "layer", "outputs": 48}, "expected fewer than the 48 tokens"),
        ({"kind": "ctc", "depth": 63, "max_new_tokens": 80}, "depth"),
        ({"prompts": [Prompt("p", "w9")]}, "prompts"),
        ({"engine": "compact"}, "engine"),
        # Texts of one and five tokens: a CTC-drafter of depth 2 has four positions, which need seven tokens.
        ({"kind": "ctc", "depth": 2, "max_new_tokens": 5, "epochs": 1}, "0 of 8 texts"),
    ],
)
def test_an_invalid_argument_is_refused(target, tmp_path, changes, noun):
    options = {"kind": "medusa", "prompts": [Prompt(f"p{n}", f"w{n + 9}") for n in range(4)], **changes}
    pair = dataclasses.replace(target, engines=(options.pop("engine", "plain"), "plain"))
    with pytest.raises(InputError, match=noun):
        train_drafter(pair, out=tmp_path / "drafter", **options)
    assert not (tmp_path / "drafter").exists()
