"""A trace says what the model did: the same experts, gates and losses as a plain forward pass."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from some_moe.config import ConfigError, DataConfig, GravityConfig, ModelConfig, RunConfig
from some_moe.data.tokenizer import BOS, Tokenizer
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.traces import (
    Trace,
    choose_layers,
    encode_text,
    name_tokens,
    sort_by_gate,
    trace,
    trace_collected,
)
from some_moe.model.transformer import SomeLM
from some_moe.training.runs import Run

TEXT = "The cat sat on the mat."
SMALL = {"d_model": 16, "num_layers": 3, "num_heads": 2, "num_experts": 6, "d_ffn": 8, "top_k": 3, "query": "linear"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT, "The dog sat on the cat."], 280)


def make_run(tokenizer: Tokenizer, **model: object) -> Run:
    settings = SMALL | {"vocab_size": 300} | model
    has_keys = settings.get("ffn", "some") == "some" and settings.get("router", "gravity") == "gravity"
    config = RunConfig(
        name="tiny",
        model=ModelConfig(**settings),
        gravity=GravityConfig() if has_keys else GravityConfig.off(),
        data=DataConfig(seq_len=32),
    )
    return Run(
        Path("runs/tiny"),
        config,
        tokenizer=tokenizer,
        model=SomeLM(config.model, config.gravity, seed=3).eval(),
        step=7,
    )


def test_a_trace_has_the_experts_and_gates_of_a_forward_pass(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer)
    found = trace(run, TEXT)
    with torch.no_grad():
        output = run.model(torch.tensor([[BOS, *tokenizer.encode(TEXT)]]))
    assert found.layers == (0, 1, 2)
    assert len(found.tokens) == output.logits.shape[1]
    for layer, routing in enumerate(output.routings):
        for place, token in enumerate(found.tokens):
            expected = dict(zip(routing.experts[0, place].tolist(), routing.gates[0, place].tolist(), strict=True))
            assert dict(zip(token.experts[layer], token.gates[layer], strict=True)) == pytest.approx(expected, abs=1e-4)
            assert list(token.gates[layer]) == sorted(token.gates[layer], reverse=True)


def test_losses_are_those_of_the_following_tokens(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer)
    found = trace(run, TEXT)
    ids = torch.tensor([[BOS, *tokenizer.encode(TEXT)]])
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(run.model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    assert [token.next_nats for token in found.tokens[:-1]] == pytest.approx(expected.tolist(), abs=1e-4)
    assert found.tokens[-1].next_nats is None
    assert found.tokens[-1].next_probability is None
    assert found.loss == pytest.approx(float(expected.mean()), abs=1e-4)
    first = found.tokens[0]
    assert first.next_nats is not None
    assert first.next_probability == pytest.approx(math.exp(-first.next_nats))
    assert first.guess_probability is not None
    assert first.guess_probability >= first.next_probability  # the likeliest is at least as likely


def test_the_tokens_spell_the_text(tokenizer: Tokenizer) -> None:
    found = trace(make_run(tokenizer), TEXT)
    assert found.tokens[0].text == "<|bos|>"
    assert "".join(token.text for token in found.tokens[1:]) == TEXT


def test_a_written_out_special_token_is_text(tokenizer: Tokenizer) -> None:
    found = trace(make_run(tokenizer), "a<|eos|>b")
    assert "".join(token.text for token in found.tokens[1:]) == "a<|eos|>b"
    assert len(found.tokens) > 4


def test_a_trace_is_plain_json(tokenizer: Tokenizer) -> None:
    record = json.loads(json.dumps(trace(make_run(tokenizer), TEXT).to_dict()))
    assert record["run"] == "tiny"
    assert record["step"] == 7
    assert record["tokens"][0]["text"] == "<|bos|>"


def test_layers_can_be_chosen(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer)
    whole, part = trace(run, TEXT), trace(run, TEXT, layers=[2, 0])
    assert part.layers == (0, 2)
    assert [token.experts for token in part.tokens] == [(t.experts[0], t.experts[2]) for t in whole.tokens]


def test_hash_routing_can_be_traced_and_goes_by_token(tokenizer: Tokenizer) -> None:
    found = trace(make_run(tokenizer, router="hash"), "the the the")
    paths = {token.text: token.experts for token in found.tokens}
    assert all(token.experts == paths[token.text] for token in found.tokens)
    assert all(gate == pytest.approx(1 / 3, abs=1e-4) for token in found.tokens for gate in token.gates[0])


def test_dense_models_have_nothing_to_trace(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer, ffn="dense", dense_width=8)
    with pytest.raises(ConfigError, match=r"no experts to trace \(model.ffn is dense\)"):
        trace(run, TEXT)


@pytest.mark.parametrize("text", ["", "  \n"])
def test_empty_text_is_refused(tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(ConfigError, match="is empty; give at least one word"):
        encode_text(make_run(tokenizer), text)


def test_text_up_to_seq_len_is_read_and_longer_text_refused(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer)
    assert len(encode_text(run, "x" * 31)) == 32
    with pytest.raises(ConfigError, match=r"has 32 tokens, but this run read at most 31 \(data.seq_len 32\)"):
        encode_text(run, "x" * 32)


def test_broken_unicode_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="not valid UTF-8"):
        encode_text(make_run(tokenizer), "bad \udcff byte")


@pytest.mark.parametrize("layers", [[3], [-1], [0, 9]])
def test_unknown_layers_are_refused(tokenizer: Tokenizer, layers: list[int]) -> None:
    with pytest.raises(ConfigError, match="its layers are 0 to 2"):
        choose_layers(make_run(tokenizer), layers)


def test_sorting_puts_the_strongest_gate_first() -> None:
    experts, gates = sort_by_gate(np.array([[[4, 2, 9]]]), np.array([[[0.2, 0.5, 0.3]]]))
    assert experts.tolist() == [[[2, 9, 4]]]
    assert gates.tolist() == [[[0.5, 0.3, 0.2]]]


def test_half_a_character_is_named_visibly(tokenizer: Tokenizer) -> None:
    names = name_tokens(tokenizer.encode("é"), tokenizer)
    assert names
    assert all(names)


def test_a_collected_story_gives_the_trace_that_the_model_gives(tokenizer: Tokenizer) -> None:
    run = make_run(tokenizer)
    whole = trace(run, TEXT)
    collection = collect_by_hand(whole, tokenizer)
    found = trace_collected(collection, tokenizer, num_tokens=5)
    assert found.run == "tiny"
    assert found.layers == (0, 1, 2)
    assert len(found.tokens) == 5
    for ours, theirs in zip(found.tokens, whole.tokens, strict=False):
        assert (ours.text, ours.experts, ours.gates) == (theirs.text, theirs.experts, theirs.gates)
        assert ours.next_nats == pytest.approx(theirs.next_nats, abs=1e-6)
        assert ours.guess is None


def collect_by_hand(whole: Trace, tokenizer: Tokenizer) -> Collection:
    """A collection of two stories; the traced one is the first."""
    n = len(whole.tokens) - 1
    ids = [BOS, *tokenizer.encode(TEXT)]
    tokens = whole.tokens[:-1]
    twice = np.arange(2).repeat(n)
    return Collection(
        meta={"run": "tiny", "step": 7, "num_experts": 6, "top_k": 3, "router": "gravity", "depths": [0, 1, 2]},
        tokens=np.tile(np.array(ids[:-1], np.int32), 2),
        targets=np.tile(np.array(ids[1:], np.int32), 2),
        story=twice.astype(np.int32),
        position=np.tile(np.arange(n, dtype=np.int32), 2),
        loss=np.tile(np.array([t.next_nats for t in tokens], np.float32), 2),
        experts=np.tile(np.array([t.experts for t in tokens], np.int16).transpose(1, 0, 2), (1, 2, 1)),
        gates=np.tile(np.array([t.gates for t in tokens], np.float32).transpose(1, 0, 2), (1, 2, 1)),
        keys=np.zeros((3, 6, 16), np.float32),
        usage=np.ones((3, 6), np.float32),
        respawns=np.zeros((3, 6), np.int64),
        queries=np.zeros((3, 4, 16), np.float32),
    )
