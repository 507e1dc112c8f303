"""Training drafters: what they are fitted to, that they learn it, what is kept, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_prompts
from scaled_models import SCALED, scaled_model
from small_drafters import TRAINED, new_round, proposed, small_drafter, small_network
from specstop.collect.prompts import Prompt
from specstop.decode.drafters import find_drafter, load_drafter
from specstop.decode.drafters.ctc import Prefixes
from specstop.decode.loop import Speculator
from specstop.decode.models.pair import Pair, join, load_pair
from specstop.decode.settings import Settings
from specstop.decode.topology import chain
from specstop.policies.errors import InputError, SpecstopWarning
from specstop.policies.fixed import FixedLength
from specstop.train.drafters.fit import _split, acceptance, new_network, target_ends, train_drafter
from specstop.train.drafters.proposals import drafter_loss, positions, proposals
from specstop.train.drafters.texts import Batch, Text, Texts, record_texts

DEPTH, NEW = 3, 16


@pytest.fixture(scope="session")
def pair(plain_pair: Pair) -> Pair:
    return plain_pair


@pytest.fixture(scope="module")
def alone(pair_folder: Path) -> Pair:
    return load_pair(pair_folder / "target", engine="plain")


@pytest.fixture(scope="module")
def few(tokenizer: Any) -> list[tuple[Prompt, list[int]]]:
    return [(p, tokenizer(p.text)["input_ids"]) for p in make_prompts(10, "fit", 5)]


def ends(pair: Pair) -> tuple[Any, Any]:
    return pair.target.get_input_embeddings(), pair.target.get_output_embeddings()


def test_texts_are_recorded_once(alone: Pair, few: list[tuple[Prompt, list[int]]], tmp_path: Path) -> None:
    def record(**changes: Any) -> list[Text]:
        options = {"max_new_tokens": NEW, "temperature": 0.7, **changes}
        return list(record_texts(alone, few, tmp_path / "texts", **options))

    texts = record()
    assert len(texts) == 2 * len(few) and sum(text.greedy for text in texts) == len(few)
    for text in texts[::5]:
        states = alone.target(text.tokens[None], output_hidden_states=True).hidden_states[-1][0]
        torch.testing.assert_close(text.states, states, atol=2e-3, rtol=2e-3)  # kept in half precision
    greedy = next(text for text in texts if text.greedy)
    own = alone.target(greedy.tokens[None]).logits[0].argmax(-1)
    assert greedy.tokens[greedy.prompt :].tolist() == own[greedy.prompt - 1 : -1].tolist()
    files = sorted((tmp_path / "texts").glob("*.safetensors"))
    files[0].unlink()
    kept = files[1].stat().st_mtime_ns
    again = record()
    assert files[1].stat().st_mtime_ns == kept, "what is there is not made again"
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(texts, again, strict=True))
    with pytest.raises(InputError, match=r"checkpoints: .* has texts of another target, prompts or settings"):
        record(max_new_tokens=8)
    files[0].write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"cannot be read .*; remove it and record it again"):
        record()


@pytest.mark.parametrize("kind", TRAINED)
@torch.inference_mode()
def test_positions_of_a_text_are_asked_what_they_would_be_asked_live(pair: Pair, kind: str) -> None:
    """All positions at once, beside the drafter that stands at one of them and is fed the text's own tokens."""
    text = [5, 8, 9, 7, 11, 30, 12, 4, 6]
    states = pair.target(torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
    batch = Batch(torch.tensor([text]), states, torch.tensor([len(text)]))
    drafter = small_drafter(kind, pair, DEPTH)
    if kind == "ctc":
        symbols = positions(drafter._network, batch, *ends(pair))[0]
    else:
        rows = list(proposals(drafter._network, batch, *ends(pair)))
    for at in (1, 3, 5):  # the target has read so many tokens and one more
        drafter.reserve(1, 32)
        drafter.committed(0, text[: at + 1], states[0, : at + 1])
        round = new_round([text[at + 1]], chain(DEPTH))
        for depth in range(DEPTH):
            if at + 2 + depth == len(text):
                break
            round.tokens[0, depth] = text[at + 1 + depth]
            row = proposed(drafter, round, depth)[0]
            if kind == "ctc":
                known = torch.stack([position.probs for position in drafter._positions[0]]).log()
                torch.testing.assert_close(known, symbols[at, : len(known)], atol=1e-9, rtol=0)
            else:
                torch.testing.assert_close(row, rows[depth][0, at], atol=1e-9, rtol=0)


@torch.inference_mode()
def test_the_loss_is_what_it_says(pair: Pair) -> None:
    """Cross-entropy of the target's distributions, worked out position by position; CTC as the forward algorithm has it."""
    texts = [[5, 8, 9, 7, 11, 30], [12, 4, 6, 40]]
    whole = [pair.target(torch.tensor([t]), output_hidden_states=True) for t in texts]
    batch = Batch.of(
        [Text(torch.tensor(t), 1, True, w.hidden_states[-1][0]) for t, w in zip(texts, whole, strict=True)]
    )
    output = pair.target.get_output_embeddings().weight.float()
    for kind in ("medusa", "layer"):
        network = small_network(kind, 16, 48, output, 2).double()
        rows = list(proposals(network, batch, *ends(pair)))
        nats: list[list[float]] = [[], []]
        for which, (text, made) in enumerate(zip(texts, whole, strict=True)):
            for depth in range(2):
                for at in range(len(text) - 2 - depth):
                    p = made.logits[0, at + 1 + depth].softmax(-1)
                    nats[depth].append(float(-(p * rows[depth][which, at].log_softmax(-1)).sum()))
        means = [sum(some) / len(some) for some in nats]
        loss = drafter_loss(network, batch, *ends(pair))
        assert float(loss) == pytest.approx((means[0] + 0.8 * means[1]) / 1.8)
    network = small_network("ctc", 16, 48, output, 4).double()
    symbols, nats = positions(network, batch, *ends(pair)).exp(), [[], []]
    for which, (text, made) in enumerate(zip(texts, whole, strict=True)):
        for at in range(len(text) - 2):
            p = made.logits[0, at + 1].softmax(-1)
            nats[1].append(float(-(p * symbols[which, at, 0, :-1].log()).sum()))
        for at in range(len(text) - 3):
            said = symbols[which, at : at + 1]
            prefix = Prefixes.empty(said)
            for token in text[at + 2 : at + 4]:
                prefix = prefix.extended(torch.tensor([token]), said)
            nats[0].append(-float((prefix.blank + prefix.token)[0, -1].log()) / 2)
    assert float(drafter_loss(network, batch, *ends(pair))) == pytest.approx(
        sum(sum(some) / len(some) for some in nats)
    )


@pytest.mark.parametrize("name", SCALED)
@torch.no_grad()
def test_a_target_that_scales_or_caps_is_learned_as_it_is(name: str) -> None:
    """What is fitted to is the model's own distribution; heads begin with it where it is only scaled."""
    pair, text = join(scaled_model(name), None), torch.tensor([[5, 8, 9, 7, 11]])
    made = pair.target(text, output_hidden_states=True)
    states, logits = made.hidden_states[-1].float(), made.logits.float()
    torch.testing.assert_close(target_ends(pair)[1](states), logits, atol=1e-4, rtol=1e-4)
    heads = new_network(pair, "medusa", 2)
    first = heads.outputs[0](heads.state(0, states, None))
    assert torch.allclose(first, logits, atol=1e-4, rtol=1e-4) == (name != "gemma2")


@pytest.mark.parametrize("kind", TRAINED)
def test_a_drafter_learns_its_target(
    alone: Pair, few: list[tuple[Prompt, list[int]]], tmp_path: Path, kind: str
) -> None:
    """On the texts that it is fitted to: it proposes better than it did, and its folder drafts in the loop."""
    told: list[str] = []
    lengths = [len(t.tokens) for t in record_texts(alone, few, tmp_path / "one", max_new_tokens=NEW, temperature=0.0)]
    few = [few[at] for at in np.argsort(lengths)]  # the longest text is held out
    prompts = [prompt for prompt, _ in few]
    made = train_drafter(
        alone, prompts, tmp_path / "drafter", kind, depth=DEPTH, max_new_tokens=NEW, epochs=4,
        learning_rate=1e-2, work=tmp_path / "work",
        progress=lambda task, done, total: told.append(task),
    )  # fmt: skip
    assert f"train {kind}" in told and "texts of the target" in told
    texts = list(record_texts(alone, few, tmp_path / "work" / "texts", max_new_tokens=NEW, temperature=0.7))
    batch = Batch.of(texts[:-2])
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        before = drafter_loss(new_network(alone, kind, DEPTH), batch, *ends(alone))
        assert float(drafter_loss(made.network, batch, *ends(alone))) < 0.95 * float(before)
    shares, tokens = acceptance(made.network, texts[-2:], *ends(alone))
    assert made.metrics["tokens per target call"] == pytest.approx(tokens) and tokens >= 1.0
    assert made.metrics["acceptance"] == pytest.approx(shares) and shares == sorted(shares, reverse=True)
    drafter = find_drafter(f"{kind}:{tmp_path / 'drafter'}", alone)
    text = Speculator(alone, FixedLength(2), Settings(0.0, 8), drafter=drafter).generate(few[0][1])
    assert sum(r.drafted for r in text.rounds) > 0


def test_acceptance_is_what_the_loop_accepts(alone: Pair, few: list[tuple[Prompt, list[int]]], tmp_path: Path) -> None:
    """At every position of a greedy text: the round that begins there accepts as many tokens as the table counts."""
    texts = list(record_texts(alone, few[:2], tmp_path / "texts", max_new_tokens=NEW, temperature=0.0))
    for kind in TRAINED:
        drafter = small_drafter(kind, alone, DEPTH, noise=0.02)
        accepted: list[int] = []
        rounds: list[int] = []
        deepest = drafter._network.shape.depth
        for text in texts:
            tokens, last = text.tokens.tolist(), len(text.tokens) - 1 - deepest
            next_round = text.prompt  # where one begins after the one before
            for at in range(text.prompt, last + 1):
                run = Speculator(alone, FixedLength(deepest), Settings(0.0, deepest + 2), drafter=drafter)
                run._source.eos = frozenset()
                accepted.append(run.generate(tokens[:at]).rounds[0].accepted)
                if at == next_round:
                    rounds.append(accepted[-1] + 1)
                    next_round += rounds[-1]
        expected = [sum(a >= depth for a in accepted) / len(accepted) for depth in range(1, deepest + 1)]
        found = acceptance(drafter._network, texts, *ends(alone))
        assert found.shares == pytest.approx(expected), kind
        assert found.tokens_per_call == pytest.approx(sum(rounds) / len(rounds)), kind
        assert expected[0] > 0


@pytest.mark.parametrize("kind", TRAINED)
def test_texts_too_short_to_compare_all_depths_are_left_out(
    alone: Pair, few: list[tuple[Prompt, list[int]]], tmp_path: Path, kind: str
) -> None:
    network = small_drafter(kind, alone, DEPTH)._network
    least = network.shape.depth + 3
    texts = list(record_texts(alone, few, tmp_path / "texts", max_new_tokens=NEW, temperature=0.0))
    whole = acceptance(network, texts, *ends(alone))
    for size in range(3, least + 1):
        cut = Text(texts[0].tokens[:size], 1, True, texts[0].states[:size])
        found = acceptance(network, [cut], *ends(alone))
        assert len(found.shares if found else []) == (0 if size < least else network.shape.depth), size
        if size < least:
            assert found is None and acceptance(network, [*texts, cut], *ends(alone)) == whole
        else:
            assert bool(torch.isfinite(drafter_loss(network, Batch.of([cut]), *ends(alone))))
    lengths = sorted(len(text.tokens) for text in texts)
    short = Texts(sorted((tmp_path / "texts").glob("*.safetensors")), lengths[-1])
    assert 0 < len(list(short)) < len(texts) and all(len(text.tokens) == lengths[-1] for text in short)
    with pytest.raises(InputError, match=r"0 of \d+ texts have the \d+ tokens, prompt included, that `depth` requires"):
        _split(Texts(short.files), lengths[-1])
    with pytest.warns(SpecstopWarning, match=r"\d+ of \d+ texts are shorter than"):
        sides = _split(Texts(short.files), lengths[1] - 3)
    assert all(len(text.tokens) >= lengths[1] for side in sides for text in side)


def test_what_no_text_is_long_enough_to_show_is_not_reported(
    alone: Pair, few: list[tuple[Prompt, list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("specstop.train.drafters.fit.acceptance", lambda *given: None)
    with pytest.warns(SpecstopWarning, match="no greedy text of those held out has 3 new tokens, so acceptance is not"):
        made = train_drafter(alone, [p for p, _ in few], tmp_path / "d", "medusa", depth=2, max_new_tokens=8, epochs=1)
    assert set(made.metrics) == {"seconds to record", "seconds to fit"}
    assert load_drafter(tmp_path / "d").metrics == made.metrics


def test_a_run_that_is_resumed_ends_as_one_that_was_not(alone: Pair, few: list[Any], tmp_path: Path) -> None:
    def run(out: str, work: str, epochs: int, resume: bool) -> dict[str, torch.Tensor]:
        train_drafter(
            alone, [p for p, _ in few], tmp_path / out, "medusa", depth=2, max_new_tokens=8, epochs=epochs,
            work=tmp_path / work, resume=resume, overwrite=True,
        )  # fmt: skip
        return load_drafter(tmp_path / out).network.state_dict()

    run("first", "work", 1, False)
    with pytest.raises(InputError, match=r"checkpoints: .* has those of another run; pass `resume`"):
        run("second", "work", 2, False)
    texts = {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "texts").iterdir()}
    resumed = run("second", "work", 2, True)
    assert texts == {path: path.stat().st_mtime_ns for path in (tmp_path / "work" / "texts").iterdir()}
    assert all(bool(tensor.isfinite().all()) for tensor in resumed.values())
    checkpoint = torch.load(tmp_path / "work" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 1
    assert {name.partition(".")[0] for name in checkpoint["state_dict"]} == {"network"}, "not the target's layers"


def test_a_run_is_not_resumed_as_another(alone: Pair, few: list[Any], tmp_path: Path) -> None:
    def run(kind: str, resume: bool) -> None:
        train_drafter(
            alone, [p for p, _ in few], tmp_path / "out", kind, depth=2, max_new_tokens=8, epochs=1,
            work=tmp_path / "work", resume=resume, overwrite=True,
        )  # fmt: skip

    run("layer", False)
    with pytest.raises(InputError, match=r"resume: .*last\.ckpt is not a checkpoint of this network"):
        run("medusa", True)
    run("layer", True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "medusas"}, r"kind: expected one of medusa, hydra, ctc, layer, not 'medusas' \(did you mean"),
        ({"depth": 0}, "depth: expected a whole number"),
        ({"max_new_tokens": 4}, "max_new_tokens: expected a whole number from 7"),
        ({"prompts": 1}, "prompts: expected two prompts at least"),
        ({"temperature": -1.0}, "temperature: expected 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(
    alone: Pair, few: list[Any], tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    options = {"kind": "medusa", "prompts": 4, **changes}
    prompts = [p for p, _ in few[: options.pop("prompts")]]
    kind = options.pop("kind")
    with pytest.raises(InputError, match=why):
        train_drafter(alone, prompts, tmp_path / "drafter", kind, **options)
    assert not list(tmp_path.iterdir())


def test_an_engine_that_hides_the_weights_is_refused(alone: Pair, few: list[Any], tmp_path: Path) -> None:
    fast = dataclasses.replace(alone, engines=("compact", "plain"))
    with pytest.raises(InputError, match="load the pair with `engine` plain"):
        train_drafter(fast, [p for p, _ in few], tmp_path / "drafter", "medusa")
    assert json.loads("[]") == list(tmp_path.iterdir())
