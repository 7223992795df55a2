"""A collection holds what the model did with every real token, and leaves the model as it was."""

from pathlib import Path

import numpy as np
import pytest
import torch

from some_moe.config import ConfigError, DataConfig, RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.collect import NO_KEYS, NO_LAYERS, collect, collect_run
from some_moe.glass.inspect.collection import Collection
from some_moe.model.transformer import SomeLM
from some_moe.training.evaluate import evaluate
from some_moe.training.runs import Run
from tests.shared.variants import MODELS, make_config, make_gravity

STORIES = [
    "the cat sat",
    "a dog ran far away and never came back",
    "one",
    "the end of the tale of the cat",
    "so it was",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(STORIES, 280)


@pytest.fixture(scope="module")
def rows(tokenizer: Tokenizer) -> Rows:
    return encode_rows(STORIES, tokenizer, 24)


def make_run(tokenizer: Tokenizer, kind: str = "plain") -> Run:
    config = RunConfig(
        name=kind,
        model=make_config(kind).override({"vocab_size": 300}),
        gravity=make_gravity(kind),
        data=DataConfig(seq_len=24, batch_size=2, batching="bucketed"),
    )
    return Run(
        Path("runs/tiny"),
        config,
        tokenizer=tokenizer,
        model=SomeLM(config.model, config.gravity, seed=3).eval(),
        step=7,
    )


def test_the_loss_is_that_of_an_evaluation(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    seen = collect(run, rows, split="valid")
    found = evaluate(run.model, rows, run.config, tokenizer.token_bytes(), torch.device("cpu"))
    assert len(seen.loss) == found.num_tokens == seen.meta["num_tokens"]
    assert seen.loss.mean() == pytest.approx(found.loss, rel=1e-5)
    assert seen.meta["loss"] == pytest.approx(found.loss, rel=1e-5)


def test_runs_that_count_padding_are_collected_as_all_others(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    changes = {"data.batching": "padded", "data.loss_on": "all_positions", "data.count_padding": True}
    padded = Run(run.path, run.config.override(changes), tokenizer=tokenizer, model=run.model, step=run.step)
    np.testing.assert_array_equal(collect(padded, rows, split="valid").loss, collect(run, rows, split="valid").loss)


def test_tokens_come_story_by_story_with_their_experts(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    seen = collect(run, rows, split="valid")
    for number in range(len(rows)):
        ids = rows[number]
        own = seen.story == number
        assert seen.tokens[own].tolist() == ids[:-1].tolist()
        assert seen.targets[own].tolist() == ids[1:].tolist()
        assert seen.position[own].tolist() == list(range(len(ids) - 1))
        with torch.no_grad():
            output = run.model(torch.from_numpy(ids[:-1].astype(np.int64))[None])
        for layer, routing in enumerate(output.routings):
            assert np.array_equal(np.sort(seen.experts[layer, own]), np.sort(routing.experts[0].numpy()))
            np.testing.assert_allclose(np.sort(seen.gates[layer, own]), np.sort(routing.gates[0]), rtol=1e-4)
    assert np.all(np.diff(seen.story) >= 0)


def test_the_strongest_gate_comes_first_even_against_the_bias(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    for layer in run.model.layers:
        assert layer.state is not None
        layer.state.bias.copy_(torch.linspace(-2, 2, 6))
    seen = collect(run, rows, split="valid")
    assert np.all(np.diff(seen.gates, axis=-1) <= 0)
    keys, query = seen.keys[0], seen.queries[0]
    assert keys.shape == (6, 24)
    np.testing.assert_allclose(np.linalg.norm(query, axis=-1), 1, rtol=1e-5)


def test_only_whole_stories_are_taken_and_at_least_one(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    first, second = rows.lengths[:2]
    assert len(collect(run, rows, split="valid", max_tokens=1).tokens) == first
    assert len(collect(run, rows, split="valid", max_tokens=int(first + second)).tokens) == first + second
    assert len(collect(run, rows, split="valid", max_tokens=int(first + second) - 1).tokens) == first


def test_collecting_moves_no_key(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    collect(run, rows, split="valid")
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_queries_are_those_of_the_same_tokens_in_every_layer(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer, "centred")
    state = run.model.layers[1].state
    assert state is not None
    assert state.query_mean is not None
    plain = collect(run, rows, split="valid").queries
    assert plain.shape == (3, rows.lengths.sum(), 24)  # fewer tokens than would be sampled: all of them
    state.query_mean.copy_(torch.ones(24))
    centred = collect(run, rows, split="valid").queries
    assert np.array_equal(plain[0], centred[0])
    assert not np.allclose(plain[1], centred[1])


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_every_kind_of_model_can_be_collected_and_read_back(
    tokenizer: Tokenizer, rows: Rows, kind: str, tmp_path: Path
) -> None:
    seen = collect(make_run(tokenizer, kind), rows, split="test")
    seen.save(tmp_path / "analysis" / "collected.safetensors")
    again = Collection.load(tmp_path / "analysis" / "collected.safetensors")
    assert again.meta == seen.meta
    for name in ("tokens", "loss", "experts", "gates", "keys", "usage", "respawns", "queries"):
        assert np.array_equal(getattr(again, name), getattr(seen, name))
    dense = "dense" in kind
    assert len(seen.experts) == (0 if dense else 3)
    assert seen.meta["notes"] == ([NO_LAYERS] if dense else [NO_KEYS] if kind == "hash" else [])


def test_hash_routing_gives_zero_width_keys_and_the_load_of_the_pass(tokenizer: Tokenizer, rows: Rows) -> None:
    seen = collect(make_run(tokenizer, "hash"), rows, split="valid")
    assert seen.keys.shape == (3, 6, 0)
    assert seen.queries.shape[2] == 0
    np.testing.assert_allclose(seen.usage.sum(1), 6, rtol=1e-5)
    counts = np.bincount(seen.experts[0].reshape(-1), minlength=6)
    np.testing.assert_allclose(seen.usage[0], counts * 6 / counts.sum(), rtol=1e-5)


def test_bad_input_is_one_sentence(tokenizer: Tokenizer, rows: Rows) -> None:
    run = make_run(tokenizer)
    with pytest.raises(ConfigError, match="max_tokens 0 is too few; use 1 or more"):
        collect(run, rows, split="valid", max_tokens=0)
    with pytest.raises(ConfigError, match="the valid split has no stories"):
        collect(run, Rows(np.zeros(0, np.uint16), np.zeros(1, np.int64)), split="valid")
    with pytest.raises(ConfigError, match="split 'dev' is not known; use one of train, valid, test"):
        collect_run("nowhere", split="dev")
