"""Exported models give the logits and tokens of their runs: every kind of model, with the package and without it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import some_moe
from some_moe.config import RunConfig
from some_moe.hf import SomeForCausalLM, export, modeling_some
from some_moe.lab.registry import EXPERIMENTS
from some_moe.model.transformer import SomeLM
from some_moe.training.generation import generate_tokens
from tests.shared.untrained import VOCABULARY, write_run
from tests.shared.variants import BASE, MODELS, make_gravity

CLASSES = {"package": SomeForCausalLM, "standalone": modeling_some.SomeForCausalLM}
IDS = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(0))
SMALL = {"d_model": 24, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}


def small_config(kind: str) -> RunConfig:
    model = BASE.override(MODELS[kind] | {"vocab_size": VOCABULARY, "expert_seed": 7})
    return RunConfig(model=model, gravity=make_gravity(kind)).override({"train.seed": 3})


def registry_shapes() -> dict[str, RunConfig]:
    """Every registered model, made small: one of each that then differ, by the name of the first."""
    found: dict[str, RunConfig] = {}
    seen = set()
    for experiment in EXPERIMENTS:
        model = experiment.config.model
        less: dict[str, Any] = {f"model.{name}": value for name, value in SMALL.items()}
        less |= {"model.num_experts": min(model.num_experts, 8), "model.d_ffn": min(model.d_ffn, 20)}
        less |= {"model.dense_width": 40 if model.dense_width else 0, "model.top_k": min(model.top_k, 4)}
        less |= {"model.shared_expert": 12 if model.shared_expert else 0, "model.lora_rank": 3}
        less |= {"model.query_hidden": 30 if model.query_hidden else 0, "train.device": "cpu"}
        less |= {"gravity.beta_layer_scale": [], "gravity.frozen_layers": []}
        config = experiment.config.override(less)
        if (key := (config.model.model_dump_json(), config.gravity.key_ema)) not in seen:
            seen.add(key)
            found[experiment.name] = config
    return found


REGISTRY = registry_shapes()


def quiet_generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    mask = options.pop("attention_mask", torch.ones_like(ids))
    found: Tensor = model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=8, eos_token_id=None, **options
    )
    return found[:, ids.shape[1] :]


def our_logits(model: SomeLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def compare_logits(folder: Path, wanted: Tensor) -> None:
    for kind in CLASSES.values():
        with torch.no_grad():
            torch.testing.assert_close(kind.from_pretrained(folder)(IDS).logits, wanted, rtol=0, atol=1e-5)


def compare(config: RunConfig, place: Path) -> None:
    """All that must hold of one kind of model."""
    run = some_moe.load(write_run(place / "run", config))
    export(run, place / "out")
    compare_everything(run.model, place / "out", place / "again")


def compare_everything(own: SomeLM, folder: Path, again: Path) -> None:
    """An exported folder is our model: logits, tokens with every kind of cache, padding, and saved once more."""
    wanted = our_logits(own, IDS)
    tokens = torch.stack(list(generate_tokens(own, IDS, 8)), 1)
    padded = torch.cat((torch.zeros(2, 3, dtype=torch.int64), IDS), 1)
    mask = (padded > 0).long()
    for kind in CLASSES.values():
        model = kind.from_pretrained(folder)
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, wanted, rtol=0, atol=1e-5)
            found = model(padded, attention_mask=mask).logits[:, 3:]
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert torch.equal(quiet_generate(model, IDS), tokens)
        assert torch.equal(quiet_generate(model, IDS, use_cache=False), tokens)
        assert torch.equal(quiet_generate(model, padded, attention_mask=mask), tokens)
        static = {"attention_mask": mask, "cache_implementation": "static"}
        assert torch.equal(quiet_generate(model, padded, **static), tokens)
        model.save_pretrained(again)
        loaded, half = kind.from_pretrained(again), kind.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=0, atol=1e-6)
        compare_halves(half, model, wanted)


def compare_halves(half: Any, whole: Any, wanted: Tensor) -> None:
    """In half precision the keys and what gravity remembers keep every bit; the logits are nearly those of float32."""
    assert half.dtype in (torch.bfloat16, torch.float16)
    kept = {name: tensor for name, tensor in half.state_dict().items() if ".state." in name}
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in kept.items())
    with torch.no_grad():
        found = half(IDS).logits.float()
    assert float((found - wanted).abs().median()) < 0.05 * float(wanted.std())


@pytest.mark.parametrize("kind", ["plain", "every-study"])
def test_an_exported_model_is_the_run(kind: str, tmp_path: Path) -> None:
    compare(small_config(kind), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_every_kind_of_model_is_the_run(kind: str, tmp_path: Path) -> None:
    compare(small_config(kind), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGISTRY)
def test_every_shape_of_the_registry_is_the_run(name: str, tmp_path: Path) -> None:
    compare(REGISTRY[name], tmp_path)
