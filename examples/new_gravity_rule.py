"""A new gravity rule, outside the package: a key that was used is pushed away from the key nearest to it.

python examples/new_gravity_rule.py --steps 100

Whether keys crowd together, and whether it helps to keep them apart, is then a matter of two runs: the same model with
the rule and without it. A rule is a pure function of the old keys and of what the step's `Routing` recorded. Forward
changes no state, so the one write is here, behind the optimizer's step and the house's own gravity.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe import DataConfig, ModelConfig, SomeLM
from some_moe.data.batches import Batch, Batches
from some_moe.data.dataset import Dataset, prepare
from some_moe.model.routing import Routing
from some_moe.model.tokens import TokenInfo

# --- the rule ---------------------------------------------------------------------------------------------------


def find_nearest(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The cosine (E,) of each key (E, D) with the key nearest to it, and that key's number (E,)."""
    unit = F.normalize(keys, dim=-1)
    nearest = (unit @ unit.T).fill_diagonal_(-torch.inf).max(dim=-1)
    return nearest.values, nearest.indices


def repel_nearest(keys: Tensor, counts: Tensor, strength: float) -> Tensor:
    """Δᵢ = −ρ·cos(kᵢ, kⱼ)·(kⱼ − kᵢ), kⱼ the nearest key, where nᵢ > 0 and the cosine is positive."""
    cosine, nearest = find_nearest(keys)
    push = -strength * cosine.clamp(min=0)[:, None] * (keys[nearest] - keys)
    return torch.where((counts > 0)[:, None], push, 0.0)


@torch.no_grad()
def gravity_step(model: SomeLM, routings: tuple[Routing, ...], step: int, strength: float) -> None:
    """The house's rules, then ours; strength 0 is the same as its absence."""
    model.gravity_step(routings, step)
    for layer, routing in zip(model.layers, routings, strict=True):
        layer.state.keys += repel_nearest(layer.state.keys, routing.counts, strength)


# --- a small training loop --------------------------------------------------------------------------------------


def find_loss(model: SomeLM, batch: Batch, step: int) -> tuple[Tensor, tuple[Routing, ...]]:
    """The mean cross-entropy of the real tokens, and the record of who was chosen."""
    info = TokenInfo.of(batch.inputs.shape, batch.inputs.device, counted=batch.real, ids=batch.inputs, step=step)
    found = model.loss(batch.inputs, batch.targets, info, weights=batch.real, denominator=batch.real.sum())
    return found.loss, tuple(routing.detach() for routing in found.routings)


def train(config: ModelConfig, dataset: Dataset, data: DataConfig, steps: int, strength: float) -> SomeLM:
    model = SomeLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, step = Batches(dataset.train, data, rows_a_step=data.batch_size, seed=0), 0
    while step < steps:
        for batch in batches.epoch(step // len(batches)):
            loss, routings = find_loss(model, batch, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            gravity_step(model, routings, step, strength)
            step += 1
            if step == steps:
                break
    return model


@torch.no_grad()
def score(model: SomeLM, dataset: Dataset, data: DataConfig) -> float:
    """Nats per real token of the validation split."""
    rows = Batches(dataset.valid, data, rows_a_step=data.batch_size, seed=0, keep_partial=True)
    losses = [(find_loss(model, batch, 0)[0].item(), batch.num_real) for batch in rows.epoch(0, shuffle=False)]
    return sum(loss * tokens for loss, tokens in losses) / sum(tokens for _, tokens in losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stories", type=int, default=400)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--strength", type=float, default=0.05)
    options = parser.parse_args()

    config = ModelConfig(
        d_model=options.width, num_layers=2, num_heads=4, vocab_size=1024, num_experts=16, d_ffn=options.width, top_k=2
    )
    data = DataConfig(seq_len=128, batch_size=8, train_subset_size=options.stories, val_subset_size=32)
    dataset = prepare(data, config.vocab_size)
    for strength in (0.0, options.strength):
        model = train(config, dataset, data, options.steps, strength)
        nearest = torch.stack([find_nearest(layer.state.keys)[0].mean() for layer in model.layers]).mean().item()
        loss = score(model, dataset, data)
        print(f"strength {strength}: val_loss {loss:.4f}, mean cosine of a key with the nearest {nearest:.4f}")
    print("one seed each: a small difference in the loss may be chance")


if __name__ == "__main__":
    main()
