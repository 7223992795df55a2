"""Configs are frozen, validated in one sentence, documented field by field, and survive a YAML round trip."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.config import Config, ConfigError, DataConfig, GravityConfig, ModelConfig, RunConfig, TrainConfig
from some_moe.config.base import did_you_mean, field_docs

ROOMS = (ModelConfig, GravityConfig, DataConfig, TrainConfig)


def test_importing_config_imports_no_torch() -> None:
    code = "import sys, some_moe.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().model.top_k = 3  # type: ignore[misc]


def test_every_field_is_documented() -> None:
    for room in ROOMS:
        assert set(field_docs(room)) == set(room.model_fields), room
    assert set(field_docs(RunConfig)) == {"name", "experiment", "format_version"}


def test_yaml_round_trip_keeps_every_field(tmp_path: Path) -> None:
    config = RunConfig(
        name="x",
        model=ModelConfig(entropy_band=(1.5, 2.5), learn_temperature=True),
        gravity=GravityConfig(theta=200, theta_percentile=None, frozen_layers=(1, 2), beta_layer_scale=(0.5,) * 8),
        train=TrainConfig(learning_rate=8e-4),
    )
    config.save(tmp_path / "config.yaml")
    assert RunConfig.load(tmp_path / "config.yaml") == config


def test_a_config_is_saved_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "config.yaml"
    RunConfig(name="first").save(place)

    def fill_up(descriptor: int) -> None:
        raise OSError(28, f"No space left for {descriptor}")

    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(OSError, match="No space left"):
        RunConfig(name="second").save(place)
    assert RunConfig.load(place).name == "first"


def test_numbers_that_yaml_reads_as_text_are_understood() -> None:
    assert RunConfig.from_yaml("train: {learning_rate: 8e-4}").train.learning_rate == 8e-4


def test_override_validates_and_leaves_the_original() -> None:
    base = RunConfig()
    changed = base.override({"model.top_k": 2, "train.seed": 7, "name": "y"})
    assert (changed.model.top_k, changed.train.seed, changed.name) == (2, 7, "y")
    assert base == RunConfig()
    with pytest.raises(ConfigError, match=r"model\.top_k 99 is more than num_experts 64"):
        base.override({"model.top_k": 99})
    with pytest.raises(ConfigError, match=r"model\.topk is not a field; did you mean 'model\.top_k'\?"):
        base.override({"model.topk": 2})


def test_off_switches_all_key_movement_off() -> None:
    assert GravityConfig().moves_keys
    assert not GravityConfig.off(balance_rate=0.01).moves_keys


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (ModelConfig, {"num_heads": 7}, "num_heads 7 does not divide d_model 384"),
        (ModelConfig, {"num_heads": 128}, "odd width 3"),
        (ModelConfig, {"d_model": 9, "num_heads": 3, "positions": "sinusoidal"}, "d_model 9 is odd"),
        (ModelConfig, {"top_k": 65}, "top_k 65 is more than num_experts 64"),
        (ModelConfig, {"vocab_size": 70000}, "vocab_size 70000 does not fit the 16-bit token type"),
        (ModelConfig, {"d_model": 0}, "d_model must be greater than or equal to 1, but it is 0"),
        (ModelConfig, {"temperature": float("nan")}, "temperature must be a finite number"),
        (ModelConfig, {"query": "cnn"}, "query must be 'linear' or 'mlp', but it is 'cnn'"),
        (ModelConfig, {"num_expert": 3}, "num_expert is not a field; did you mean 'num_experts'?"),
        (ModelConfig, {"ffn": "dense"}, "dense_width must be set with ffn: dense"),
        (ModelConfig, {"dense_width": 5}, "dense_width 5 has no meaning with ffn: some"),
        (ModelConfig, {"query": "linear", "query_hidden": 5}, "query_hidden 5 has no meaning"),
        (ModelConfig, {"trainability": "lora", "lora_rank": 999}, "lora_rank 999 exceeds"),
        (ModelConfig, {"trainability": "full", "gains": True}, "gains is a study of frozen experts"),
        (ModelConfig, {"gains": True, "shared_down": True}, "gains and shared_down cannot be combined"),
        (
            ModelConfig,
            {"trainability": "full", "expert_dtype": "bfloat16"},
            "expert_dtype bfloat16 is for frozen",
        ),
        (ModelConfig, {"learn_temperature": True, "temperature": 50}, "temperature 50.0 must lie inside"),
        (ModelConfig, {"entropy_band": (2.0, 1.0)}, "is empty"),
        (ModelConfig, {"entropy_band": (1.5, 2.5), "num_experts": 4}, "4 experts have at most 1.386 nats"),
        (
            ModelConfig,
            {"router": "hash", "grounding": 0.1},
            "grounding needs queries, and router: hash has none",
        ),
        (ModelConfig, {"ffn": "dense", "dense_width": 8, "gains": True}, "gains belongs to a SoME layer"),
        (GravityConfig, {"alpha": 0.01, "alpha_floor": 0.02}, "alpha_floor 0.02 is above alpha 0.01"),
        (GravityConfig, {"inertia": False, "inertia_by": "count"}, "inertia_by count needs inertia: true"),
        (GravityConfig, {"beta": -0.001}, "beta -0.001 repels without bound"),
        (GravityConfig, {"beta_end": 1e-3}, "beta_end 0.001 needs beta_schedule"),
        (GravityConfig, {"decay_mode": "shrink", "normalize": True}, "shrink does nothing to unit keys"),
        (GravityConfig, {"theta": 200}, "set one of them"),
        (GravityConfig, {"theta_percentile": None}, "set one of them"),
        (GravityConfig, {"respawn_max": 99}, "respawn_max 99 is more than num_samples 32"),
        (GravityConfig, {"token_fraction": 0}, "token_fraction must be greater than 0"),
        (DataConfig, {"loss_on": "all_positions"}, "needs rows of one length; set batching: padded"),
        (DataConfig, {"count_padding": True}, "count_padding needs rows of one length"),
        (TrainConfig, {"top_k_warmup": 0.8, "top_k_ramp": 0.3}, "together exceed the whole run"),
        (TrainConfig, {"seed": -1}, "seed must be greater than or equal to 0, but it is -1"),
        (TrainConfig, {"seed": 2**63}, f"seed must be less than {2**63}, but it is {2**63}"),
        (RunConfig, {"model": {"top_k": 0}}, "model.top_k must be greater than or equal to 1, but it is 0"),
        (RunConfig, {"modle": {}}, "modle is not a field; did you mean 'model'?"),
        (RunConfig, {"format_version": 99}, "format_version 99 is newer than this program's 1"),
        (RunConfig, {"model": {"router": "hash"}}, "model.router: hash has no keys that gravity moves"),
        (RunConfig, {"model": {"router": "learned"}}, "model.router: learned has no keys that gravity moves"),
        (
            RunConfig,
            {"model": {"score": "cosine"}, "gravity": {"decay_mode": "shrink"}},
            "does nothing under",
        ),
        (RunConfig, {"gravity": {"frozen_layers": (8,)}}, "names layer 8, but the last of 8 is 7"),
        (RunConfig, {"gravity": {"beta_layer_scale": (1.0,)}}, "has 1 factors for 8 layers"),
        (
            RunConfig,
            {"model": {"router": "hash"}, "gravity": GravityConfig.off(balance_rate=0.1)},
            "gravity.balance_rate needs scores",
        ),
        (
            RunConfig,
            {"model": {"router": "learned"}, "gravity": GravityConfig.off(key_ema=0.9)},
            "gravity.key_ema 0.9 smooths moving keys",
        ),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(config: type[Config], values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["a: [1", "- 1", "1: 2", "just words", "model: {0: 1}"])
def test_a_file_that_is_no_config_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_yaml(text)
    assert "\n" not in str(error.value)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml.*No such file"):
        RunConfig.load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml.*not UTF-8"):
        RunConfig.load(tmp_path / "binary.yaml")


def test_neutral_rooms_have_defaults() -> None:
    assert all(isinstance(room(), Config) for room in ROOMS)
    assert len(RunConfig.field_names()) == len(RunConfig().flatten())


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (ModelConfig, {"num_layers": 10**9}, "num_layers must be less than or equal to 1000, but it is 1000000000"),
        (ModelConfig, {"d_model": 2**21}, "d_model must be less than or equal to 1048576"),
        (ModelConfig, {"num_experts": 10**12}, "num_experts must be less than or equal to 1048576"),
        (ModelConfig, {"expert_seed": 10**40}, f"expert_seed must be less than {2**63}"),
        (ModelConfig, {"expert_seed": 16**5000}, "but it is a number of many digits"),
        (TrainConfig, {"epochs": 10**7}, "epochs must be less than or equal to 1000000"),
        (TrainConfig, {"sample_prompt": "\x1b[2J"}, "sample_prompt '\ufffd[2J' has '\\x1b' in it"),
        (TrainConfig, {"threads": 0}, "threads must be greater than or equal to 1"),
        (RunConfig, {"train": {"device": "\ud800"}}, "train.device '\ufffd' has '\\ud800' in it"),
        *[(RunConfig, {"name": name}, "cannot be a folder's") for name in ("", ".", "..", "a/b", "a\\b", "a\nb")],
        (RunConfig, {"name": "ü" * 101}, "use 1 to 200 letters"),
        (RunConfig, {"name": "\x1b]0;x\x07"}, "which is no printable sign; leave it out"),
        (RunConfig, {"\x1b[2J": 1}, "\ufffd[2J is not a field"),
    ],
)
def test_what_would_run_away_is_refused_in_one_sentence(
    config: type[Config], values: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        config(**values)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_separator_may_be_any_sign() -> None:
    assert RunConfig(data={"separator": "\x0c\r\n"}).data.separator == "\x0c\r\n"


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 60))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: " + "[" * 5000, "nested too deeply"),
        ("model: " + "{a: " * 5000 + "}" * 5000, "nested too deeply"),
        ("train: {seed: " + "1" * 5000 + "}", "not valid YAML"),
        ("train: {seed: 0x" + "f" * 5000 + "}", "a number of many digits"),
        ("name: 2020-99-99", "not valid YAML"),
        ("name: !!python/object/apply:os.system [ls]", "not valid YAML (line 1)"),
        ("name: \x00", "not valid YAML"),
        (BOMB, "a0 is not a field"),
        (BOMB + "name: *a59", "name must be a valid string"),
        (BOMB + "gravity: {frozen_layers: *a59}", "gravity.frozen_layers.0 must be"),
    ],
)
def test_yaml_beyond_all_measure_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig.from_yaml(text)
    assert words in str(error.value)
    assert len(str(error.value)) < 300


def test_a_file_larger_than_any_config_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("#" * (1 << 17))
    with pytest.raises(ConfigError, match="131,072 bytes, more than the 65,536 that are read"):
        RunConfig.load(tmp_path / "large.yaml")


@pytest.mark.parametrize(
    ("word", "choices", "near"),
    [
        ("evla", ["eval", "train"], "eval"),
        ("topk", ["top_k"], "top_k"),
        ("help", ["eval", "report"], ""),
        ("export", ["report", "experiments"], ""),
        ("nope", ["no-decay"], ""),
        ("--json", ["--count", "--seed"], ""),
    ],
)
def test_only_what_is_near_is_suggested(word: str, choices: list[str], near: str) -> None:
    assert did_you_mean(word, choices) == (f"; did you mean {near!r}?" if near else "")
