"""What a sweep's file may say, and what is refused in a sentence."""

import math
import re
from pathlib import Path
from random import Random

import pytest

from some_moe.config import ConfigError
from some_moe.lab.registry.presets import find_preset
from some_moe.lab.space import Axis, Sweep

TEXT = """
preset: smoke
settings: {train.epochs: 3}
space:
  train.learning_rate: {low: 3e-4, high: 0.03, log: true}
  model.top_k: {low: 1, high: 3}
  gravity.balance_rate: {low: 0, high: 1}
  model.query: [linear, mlp]
  data.train_subset_size: [null, 24]
trials: 7
"""


def test_ranges_choices_and_whole_numbers_are_told_apart() -> None:
    sweep = Sweep.from_yaml(TEXT)
    base = sweep.base_config(Path())
    assert base == find_preset("smoke").override({"train.epochs": 3})
    assert sweep.axes(base) == [
        Axis("train.learning_rate", "float", 3e-4, 0.03, True),
        Axis("model.top_k", "int", 1, 3),
        Axis("gravity.balance_rate", "float", 0, 1),
        Axis("model.query", "choice", choices=("linear", "mlp")),
        Axis("data.train_subset_size", "choice", choices=(None, 24)),
    ]


def test_the_file_of_the_docs_is_a_sweep() -> None:
    page = (Path(__file__).parents[2] / "docs" / "sweep.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    sweep = Sweep.from_yaml(text)
    assert [axis.kind for axis in sweep.axes(sweep.base_config(Path()))] == ["float", "int", "choice"]
    told = dict(re.findall(r"^\| `(\w+)` \| `?([\w.]+)`? \|", page, re.MULTILINE))
    defaults = {name: str(value).lower() for name, value in Sweep(space={"model.top_k": [1, 2]}).model_dump().items()}
    assert {name: defaults[name] for name in told} == told
    assert len(told) == 5


def test_places_on_an_axis_go_from_0_to_1() -> None:
    log = Axis("train.learning_rate", "float", 1e-4, 1e-2, True)
    assert [round(log.place(value), 9) for value in (1e-4, 1e-3, 1e-2)] == [0, 0.5, 1]
    assert Axis("x", "int", 1, 3).place(2) == 0.5
    assert Axis("x", "choice", choices=("a", None)).place(None) == 1


def test_a_setting_that_is_null_by_default_is_a_whole_number_where_it_counts() -> None:
    space = {"train.max_steps": {"low": 10, "high": 100}, "gravity.max_step": {"low": 1, "high": 2}}
    assert [axis.kind for axis in Sweep(space=space).axes(find_preset("smoke"))] == ["int", "float"]


def test_more_trials_belong_to_the_same_sweep_and_other_ranges_do_not() -> None:
    sweep = Sweep.from_yaml(TEXT)
    base = sweep.base_config(Path())
    assert sweep.digest(base) == sweep.override({"trials": 50}).digest(base)
    assert sweep.digest(base) != sweep.override({"seeds": [1]}).digest(base)
    assert sweep.digest(base) != sweep.digest(base.override({"train.epochs": 4}))


def test_an_end_that_fits_with_another_axis_is_taken() -> None:
    space = {"model.num_experts": {"low": 8, "high": 32}, "model.top_k": {"low": 1, "high": 16}}
    assert len(Sweep(space=space).axes(find_preset("smoke"))) == 2


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("train.learning_rat", [1, 2], "which is no setting; did you mean 'train.learning_rate'?"),
        ("train.seed", [1, 2], "which is not searched; seeds says with which each trial is run"),
        ("model.query", ["linear", "conv"], "space.model.query cannot be conv: model.query must be 'linear' or 'mlp'"),
        ("model.top_k", {"low": 1, "high": 99}, "space.model.top_k cannot be 99: "),
        ("model.query", ["mlp"], "is no list of different choices"),
        ("model.query", ["mlp", "mlp"], "is no list of different choices"),
        ("model.top_k", {"low": 3, "high": 1}, "space.model.top_k from 3 to 1 is no range"),
        ("train.learning_rate", {"low": 0, "high": 1, "log": True}, "above 0 with log"),
        ("train.learning_rate", {"low": "x", "high": 1}, "has the bound 'x', which is no number"),
        ("train.learning_rate", {"low": math.inf, "high": 1}, "which is no number"),
        ("train.learning_rate", {"from": 0, "to": 1}, "cannot be read; write it like {low: 0.001"),
        ("train.learning_rate", 3, "cannot be read; write it like"),
        ("train.learning_rate", {"low": 1, "high": 2, "log": "no way"}, "cannot be read; write it like {low: 0.001"),
        ("gravity.use_beta", {"low": 0, "high": 1}, "the setting is no number; give a list of choices"),
    ],
)
def test_what_cannot_be_searched_is_refused(name: str, given: object, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sweep(space={name: given}).axes(find_preset("smoke"))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("space: {}", "space names 0 settings; name 1 to 40"),
        ("trials: 3", "space is missing; say it, as in `space: …`"),
        ("settings: {model.top_k: 1}\nspace: {model.top_k: [1, 2]}", "settings and space both name model.top_k; leave"),
        ("space: {model.top_k: [1, 2]}\ntrial: 3", "trial is not a field; did you mean 'trials'?"),
        ("space: {model.top_k: [1, 2]}\nseeds: [1, 1]", "seeds [1, 1] are not different numbers"),
        ("space: {model.top_k: [1, 2]}\npreset: a\nconfig: b", "preset a and config b exclude each other"),
        ("space: {model.top_k: [1, 2]}\nmetric: test_loss", "metric must be"),
    ],
)
def test_what_no_sweep_can_be_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sweep.from_yaml(text)
    assert sentence in str(error.value)


def test_damaged_files_get_a_sentence_and_nothing_else() -> None:
    draw, refused = Random(0), []
    signs = "{}[]:,#&*!|>'\"%@`-?\\ \n\t0123456789.eEnul~\u00e9"
    for _ in range(400):
        text = list(TEXT)
        for _ in range(draw.randrange(1, 6)):
            place = draw.randrange(len(text))
            text[place : place + draw.randrange(0, 3)] = draw.choice(signs)
        try:
            sweep = Sweep.from_yaml("".join(text))
            sweep.axes(sweep.base_config(Path()))
        except ConfigError as error:
            refused.append(str(error))
    assert 50 < len(refused) < 400
    assert not [sentence for sentence in refused if "\n" in sentence]
