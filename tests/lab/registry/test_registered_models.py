"""Every registered experiment is a model that runs: shrunk to a few units, forward, backward and one gravity step."""

import pytest
import torch
import torch.nn.functional as F

from some_moe import RunConfig, SomeLM
from some_moe.lab.registry import EXPERIMENTS


def shrink(config: RunConfig) -> RunConfig:
    """The same kind of model, tiny: options, layers, heads and top_k stay; widths and the library shrink."""
    model = config.model
    width = 4 * model.num_heads
    return config.override(
        {
            "model.d_model": width,
            "model.d_ffn": 6,
            "model.vocab_size": 40,
            "model.num_experts": max(6, model.top_k + 1),
            "model.lora_rank": min(model.lora_rank, 4),
            "model.dense_width": min(model.dense_width, 10),
            "model.shared_expert": min(model.shared_expert, 5),
            "gravity.theta_window": 1,
        }
    )


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda experiment: experiment.name)
def test_a_shrunk_model_of_every_experiment_learns(experiment) -> None:  # type: ignore[no-untyped-def]
    config = shrink(experiment.config)
    model = SomeLM(config.model, config.gravity, seed=config.train.seed)
    tokens = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(0))
    output = model(tokens)
    loss = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    if output.aux_loss is not None:
        loss = loss + output.aux_loss
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    before = [layer.state.keys.detach().clone() for layer in model.layers if layer.state is not None]
    model.gravity_step([routing.detach() for routing in output.routings], step=0, total_steps=10)
    after = [layer.state.keys for layer in model.layers if layer.state is not None]
    moved = [not torch.equal(a, b) for a, b in zip(after, before, strict=True)]
    expected = [config.gravity.moves_keys and layer not in config.gravity.frozen_layers for layer in range(len(moved))]
    assert moved == expected
