"""What `run.trace`, `run.keys` and `run.usage` give, and how they show themselves in a notebook."""

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest

import some_moe
from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS
from some_moe.glass.notebook import draw_trace
from some_moe.lab.registry.presets import find_preset
from some_moe.training.runs import Run

TEXT = "Once upon a time & <b>more</b>"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    config = find_preset("smoke").override({"name": "<b>run", "train.epochs": 1, "train.sample_tokens": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOME_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield some_moe.train(config, out=tmp_path_factory.mktemp("notebook") / "run", display=False)


def test_a_printed_trace_is_a_short_table(opened: Run) -> None:
    trace = opened.trace(TEXT)
    lines = repr(trace).split("\n")
    assert lines[0] == f"{opened.config.name}, step {opened.step:,}"
    assert lines[-1] == f"The first {min(20, len(trace.tokens))} of {len(trace.tokens)} tokens."
    assert "<|bos|>" in repr(trace)
    assert max(map(len, lines)) <= 100


def test_a_trace_shows_its_text_escaped_in_the_colours_of_its_experts(opened: Run) -> None:
    trace = opened.trace(TEXT)
    html = trace._repr_html_()
    assert html.count("<span") == len(trace.tokens)
    assert "<b>more" not in html
    assert "<b>run" not in html
    assert "<script" not in html
    assert "hsl(" in html
    assert draw_trace(trace, 0) != draw_trace(trace, 1)
    with pytest.raises(ConfigError, match="layer 7 was not traced; those that were are 0, 1"):
        draw_trace(trace, 7)


def test_its_page_stands_in_a_frame_that_reaches_nothing(opened: Run) -> None:
    html = opened.trace(TEXT, layers=[1]).page(300)._repr_html_()
    assert html.startswith('<iframe sandbox="allow-scripts" style="width:100%;height:300px;border:0" srcdoc="')
    assert html.count("<") == 2  # all of the page is escaped


def test_keys_are_the_models_and_cannot_be_written_through(opened: Run) -> None:
    found = opened.keys(1)
    state = opened.model.layers[1].state
    assert state is not None
    assert np.array_equal(found.keys, state.keys.numpy())
    found.keys[:] = 0
    assert state.keys.any()
    assert found.to_dict()["layer"] == 1
    json.dumps(found.to_dict())


def test_keys_show_a_map_of_one_point_an_expert(opened: Run) -> None:
    found = opened.keys(0)
    html = found._repr_html_()
    assert html.count("<circle") == len(found.keys)
    assert "<script" not in html
    nearest = found.nearest(0, 3)
    assert len(nearest) == 3
    assert 0 not in [expert for expert, _ in nearest]
    assert sorted((cosine for _, cosine in nearest), reverse=True) == [cosine for _, cosine in nearest]
    with pytest.raises(ConfigError, match="expert 99 is not in this layer"):
        found.nearest(99)
    with pytest.raises(ConfigError, match="layer 9 is not in"):
        opened.keys(9)


def test_usage_counts_every_selection_of_the_text(opened: Run) -> None:
    usage = opened.usage("A dog ran. " * 40)  # longer than a row
    top_k = opened.config.model.top_k
    assert (usage.counts.sum(1) == usage.num_tokens * top_k).all()
    assert [layer["layer"] for layer in usage.layers] == [0, 1]
    assert usage._repr_html_().count("<rect") == usage.counts.size
    json.dumps(usage.to_dict())
    trace = opened.trace("A dog")
    counts = opened.usage("A dog").counts
    chosen = np.array([token.experts for token in trace.tokens])  # bos is read too, and foresees the first word
    for layer in range(2):
        assert np.array_equal(np.bincount(chosen[:, layer].ravel(), minlength=counts.shape[1]), counts[layer])


def test_usage_of_the_runs_own_split_is_the_evaluations(opened: Run) -> None:
    usage = opened.usage(max_tokens=10**6)
    evaluated = opened.evaluate("valid", device="cpu")["layers"]
    assert [round(layer["gini"], 9) for layer in usage.layers] == [round(layer["gini"], 9) for layer in evaluated]
    assert re.search(r"usage on [\d,]+ tokens of the valid split", repr(usage))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [({"text": " "}, "is empty"), ({"split": "all"}, "split 'all' is not known"), ({"max_tokens": 0}, "too few")],
)
def test_usage_refuses_what_it_cannot_read(opened: Run, given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        opened.usage(**given)  # type: ignore[arg-type]


def test_tokens_are_what_the_model_takes(opened: Run) -> None:
    tokens = opened.tokens("A dog")
    assert opened.model(tokens).logits.shape[:2] == tokens.shape
    assert int(tokens[0, 0]) == BOS
