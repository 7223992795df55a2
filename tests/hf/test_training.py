"""An exported model goes on learning: its passes and its keys' steps are those of `SomeLM`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import some_moe
from some_moe.config import RunConfig
from some_moe.hf import GravityCallback, SomeForCausalLM, export
from some_moe.hf.recording import join_group
from some_moe.model.tokens import TokenInfo
from some_moe.parallel.process_group import ProcessGroup
from tests.hf.test_grafting import CHECKPOINTING
from tests.hf.test_models import IDS, small_config
from tests.shared.untrained import write_run


def write(kind: str, place: Path) -> RunConfig:
    config = small_config(kind).override({"model.dropout": 0.2})
    export(write_run(place / "run", config), place / "out")
    return config


@pytest.mark.parametrize("kind", ["plain", "lora", "balance-loss"])
def test_a_step_is_our_step(kind: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    ours, theirs = (
        some_moe.load(tmp_path / "run").model.train(),
        SomeForCausalLM.from_pretrained(tmp_path / "out").train(),
    )
    theirs.recorder.begin(4)
    found = theirs(IDS, labels=IDS)
    wanted = ours(IDS, TokenInfo.of(IDS.shape, IDS.device, seed=ours.seed, step=4))
    torch.testing.assert_close(found.logits, wanted.logits, atol=1e-5, rtol=0)
    loss = torch.nn.functional.cross_entropy(wanted.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    loss = loss + (wanted.aux_loss if wanted.aux_loss is not None else 0)
    torch.testing.assert_close(found.loss, loss, atol=1e-5, rtol=0)
    loss.backward()
    found.loss.backward()
    gradients = {name: p.grad for name, p in theirs.model.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=0)
    before = theirs.model.layers[0].state.keys.clone()
    ours.gravity_step(wanted.routings, 4)
    theirs.recorder.move_keys(4, None, ProcessGroup())
    assert not torch.equal(theirs.model.layers[0].state.keys, before)
    for a, b in zip(ours.layers, theirs.model.layers, strict=True):
        assert a.state is not None
        torch.testing.assert_close(a.state.keys, b.state.keys, atol=1e-5, rtol=0)
        assert torch.equal(a.state.total, b.state.total)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_loses_no_share_of_the_gradient(reentrant: bool, tmp_path: Path) -> None:
    """A loss of the routing, and a query that the next layer takes over, lie beside what a block hands on."""
    config = small_config("grounded").override({"model.balance_loss": 0.1})
    export(write_run(tmp_path / "run", config), tmp_path / "out")
    found = []
    for is_lean in (False, True):
        model = SomeForCausalLM.from_pretrained(tmp_path / "out").train()
        if is_lean:
            getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
        model(IDS, labels=IDS).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=1e-6, rtol=0)


def move_in_a_process(rank: int, place: Path, out: Path) -> None:
    """One of two processes that have half of the rows each."""
    torch.set_num_threads(1)
    if rank >= 0:
        dist.init_process_group("gloo", init_method=f"file://{place / 'meeting'}", rank=rank, world_size=2)
    model = SomeForCausalLM.from_pretrained(place / "out").train()
    model.recorder.begin(4)
    model(IDS if rank < 0 else IDS[rank : rank + 1])
    model.recorder.move_keys(4, None, join_group())
    torch.save([layer.state.state_dict() for layer in model.model.layers], out)
    if rank >= 0:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_move_the_keys_as_one_does(tmp_path: Path) -> None:
    export(write_run(tmp_path / "run", small_config("plain")), tmp_path / "out")
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(move_in_a_process, (0, 1), (tmp_path,) * 2, (tmp_path / "0", tmp_path / "1")))
    move_in_a_process(-1, tmp_path, tmp_path / "whole")
    whole, *parts = (torch.load(tmp_path / name, weights_only=True) for name in ("whole", "0", "1"))
    for part in parts:
        for a, b in zip(whole, part, strict=True):
            for name, value in a.items():
                torch.testing.assert_close(value, b[name], atol=1e-5, rtol=0)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(*parts, strict=True) for n in a)


def test_it_learns_under_the_trainer_and_what_it_learned_opens_again(tmp_path: Path) -> None:
    write("plain", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    keys = model.model.layers[1].state.keys.clone()
    rows = [{"input_ids": (row := (torch.arange(12) * 5 + n) % 200 + 3), "labels": row} for n in range(16)]
    options = TrainingArguments(
        str(tmp_path / "train"),
        **{"max_steps": 12, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 4},
        **{"save_steps": 12, "report_to": "none", "use_cpu": True, "disable_tqdm": True, CHECKPOINTING: True},
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows, callbacks=[GravityCallback()])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]
    assert not torch.equal(model.model.layers[1].state.keys, keys)
    assert int(model.model.layers[1].state.total.sum()) > 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "train" / "checkpoint-12")
    assert again.config.checksums == model.config.checksums
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits, atol=1e-5, rtol=0)
