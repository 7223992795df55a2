"""SoME layers in other people's models: they save, load, generate and learn, and resume to the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Trainer, TrainingArguments

import some_moe
from some_moe.config import ConfigError, GravityConfig
from some_moe.hf import GravityCallback
from some_moe.hf.grafting import describe_experts
from some_moe.hf.recording import find_recorders

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Any] = {
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **TOKENS),
    "llama": LlamaConfig(**SMALL, num_key_value_heads=2, **TOKENS),
    "qwen2": Qwen2Config(**SMALL, num_key_value_heads=2, **TOKENS),
}
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
# transformers 5.23 has another name for it.
NEW, OLD = "activation_checkpointing", "gradient_checkpointing"
CHECKPOINTING = NEW if NEW in TrainingArguments.__dataclass_fields__ else OLD


def make(family: str = "gpt2", **settings: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(type(CONFIGS[family])(**CONFIGS[family].to_dict()))
    return some_moe.graft(model, **({"num_experts": 8, "d_ffn": 16, "top_k": 2} | settings))


def keys_of(model: Any) -> list[Tensor]:
    return [layer.state.keys.clone() for recorder in find_recorders(model) for layer in recorder.layers]


def texts(count: int = 48) -> list[dict[str, Tensor]]:
    """Rows in which each token follows from the one before, but for a few."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        row = [int(torch.randint(3, 96, (1,), generator=generator))]
        for _ in range(15):
            jump = int(torch.randint(0, 10, (1,), generator=generator)) == 0
            row.append(3 + (row[-1] * 7 + (11 if jump else 5)) % 93)
        rows.append({"input_ids": torch.tensor(row), "labels": torch.tensor(row)})
    return rows


def train(model: Any, out: Path, resume: str | None = None, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(out),
        **{"max_steps": 50, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 5}
        | {"save_steps": 25, "report_to": "none", "use_cpu": True, "disable_tqdm": True, "seed": 5}
        | options,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=texts(), callbacks=[GravityCallback()])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("family", CONFIGS)
def test_a_grafted_model_is_saved_loaded_and_generates(family: str, tmp_path: Path) -> None:
    model = make(family).eval()
    with torch.no_grad():
        before = model(IDS).logits
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, before)
    assert again.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0).shape == (2, 12)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for keys, old in zip(keys_of(half), keys_of(model), strict=True):
        assert keys.dtype == torch.float32
        assert torch.equal(keys, old)


@pytest.mark.parametrize("family", CONFIGS)
def test_only_the_chosen_blocks_change(family: str) -> None:
    """All of a block's own feed-forward layer goes, its gate too; the other blocks keep theirs."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(CONFIGS[family]).state_dict()
    found = make(family, layers=[1]).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in found.items() if ".mlp.some." not in name)
    gone = sorted(name.split(".1.")[1] for name in plain.keys() - found.keys())
    assert gone == sorted(name.split(".1.")[1] for name in plain if ".1.mlp." in name)
    assert {name.split(".mlp.")[0][-1] for name in found if ".mlp.some." in name} == {"1"}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_cache_and_padding_on_the_left_change_no_token(family: str) -> None:
    model = make(family).eval()
    wide = torch.cat((torch.zeros(2, 3, dtype=torch.int64), IDS), 1)
    found = []
    for ids, options in ((IDS, {}), (IDS, {"use_cache": False}), (wide, {})):
        options |= {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "attention_mask": (ids > 0).long()}
        found.append(model.generate(ids, **options)[:, ids.shape[1] :])
    assert found[0].shape == (2, 6)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"trainability": "lora", "lora_rank": 2},
    "full": {"trainability": "full"},
    "orthogonal": {"init_method": "orthogonal"},
    "half": {"expert_dtype": "bfloat16"},
    "gated": {"activation": "swiglu"},
    "smoothed": {"gravity": GravityConfig(key_ema=0.5)},
    "weights": {"router": "weights"},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_kind_of_layer_opens_again(kind: str, tmp_path: Path) -> None:
    model = make(**SETTINGS[kind]).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, atol=1e-6, rtol=0)


def test_a_model_that_was_cast_opens_again(tmp_path: Path) -> None:
    make().to(torch.bfloat16).save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert opened.lm_head.weight.dtype == torch.bfloat16


def test_a_changed_seed_is_refused(tmp_path: Path) -> None:
    make().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["some"]["model"]["expert_seed"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"layer 0 have the checksum .*, but config.json says"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_what_cannot_be_grafted_is_refused() -> None:
    with pytest.raises(ConfigError, match="Linear cannot be grafted"):
        some_moe.graft(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="already"):
        some_moe.graft(make())
    with pytest.raises(ConfigError, match="layer 7 is not there"):
        make(layers=[7])
    with pytest.raises(ConfigError, match="names no block"):
        make(layers=[])
    with pytest.raises(ConfigError, match="top_k 9 is more than num_experts 8"):
        make(top_k=9)
    with pytest.raises(ConfigError, match="balance_loss is of a whole SoME model"):
        make(balance_loss=0.1)


def test_gradient_checkpointing_counts_no_token_twice(tmp_path: Path) -> None:
    found = []
    for reentrant in (None, False, True):
        model = make(gravity=GravityConfig(alpha=0.1))
        options: dict[str, Any] = {"max_steps": 2, "save_strategy": "no"}
        if reentrant is not None:
            kwargs = {"use_reentrant": reentrant}
            options |= {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": kwargs}
        train(model, tmp_path, **options)
        layer = next(find_recorders(model)).layers[0]
        assert layer.state is not None
        found.append((int(layer.state.total.sum()), layer.state.keys.clone()))
    assert [total for total, _ in found] == [2 * 4 * 16 * 2] * 3
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


def test_padding_counts_in_no_sum() -> None:
    model = make().train()
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    model(input_ids=IDS, attention_mask=mask)
    for recorder in find_recorders(model):
        assert int(recorder.pending[0].num_tokens) == IDS.numel() - 4


def test_micro_batches_move_the_keys_as_one_batch_does(tmp_path: Path) -> None:
    moved = []
    for rows, accumulated in ((8, 1), (2, 4)):
        model = make(gravity=GravityConfig(alpha=0.1, delta=0.05)).train()
        for dropout in (m for m in model.modules() if isinstance(m, torch.nn.Dropout)):
            dropout.p = 0.0
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulated}
        train(model, tmp_path, max_steps=2, save_strategy="no", **sizes)
        moved.append(keys_of(model))
    for whole, parts in zip(*moved, strict=True):
        torch.testing.assert_close(whole, parts, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "qwen2"))]
)
def test_it_learns_its_keys_move_its_experts_stay_and_it_resumes_to_the_same_bits(family: str, tmp_path: Path) -> None:
    model = make(family)
    keys, experts = keys_of(model), describe_experts(model)
    trainer = train(model, tmp_path / "whole")
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]
    assert all(not torch.equal(old, new) for old, new in zip(keys, keys_of(model), strict=True))
    assert describe_experts(model) == experts
    again = make(family)
    train(again, tmp_path / "again", resume=str(tmp_path / "whole" / "checkpoint-25"))
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert describe_experts(again) == experts
