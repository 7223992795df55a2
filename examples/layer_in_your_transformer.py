"""A SomeLayer in the place of the feed-forward layer of a transformer of your own.

python examples/layer_in_your_transformer.py --steps 200

The model learns to go on with sequences that repeat themselves. Forward only records which experts were chosen; the
keys move once a step, behind the optimizer.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from some_moe import GravityConfig, ModelConfig, SomeLayer
from some_moe.model.routing import Routing

VOCABULARY, PERIOD = 16, 8


class Block(nn.Module):
    """An ordinary pre-norm block; only its feed-forward layer is a SoME layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.d_model), nn.LayerNorm(config.d_model)
        self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)
        self.ffn = SomeLayer(config, GravityConfig(normalize=True), layer=layer)

    def forward(self, x: Tensor, mask: Tensor, step: int) -> tuple[Tensor, Routing]:
        """x (batch, time, width) → the same shape, and the record of who was chosen."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, need_weights=False)[0]
        y, routing = self.ffn(self.norm2(x), step=step)
        return x + y, routing


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.d_model)
        self.positions = nn.Parameter(0.1 * torch.randn(length, config.d_model))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.head = nn.Linear(config.d_model, VOCABULARY)

    def forward(self, tokens: Tensor, step: int) -> tuple[Tensor, list[Routing]]:
        """tokens (batch, time) → logits (batch, time, VOCABULARY), and one routing a layer."""
        time = tokens.shape[1]
        mask = torch.ones(time, time, dtype=torch.bool, device=tokens.device).triu(1)
        x, routings = self.embedding(tokens) + self.positions[:time], []
        for block in self.blocks:
            x, routing = block(x, mask, step)
            routings.append(routing)
        return self.head(x), routings


def make_sequences(count: int, length: int) -> Tensor:
    """Random tokens (count, length) with the period PERIOD: after the first round each is known."""
    return torch.randint(VOCABULARY, (count, PERIOD)).repeat(1, -(-length // PERIOD))[:, :length]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--experts", type=int, default=16)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = ModelConfig(
        d_model=options.width, num_layers=2, num_heads=4, num_experts=options.experts, d_ffn=2 * options.width, top_k=2
    )
    length = 4 * PERIOD
    model = Transformer(config, length)
    # On a CUDA GPU, with tokens there too (the same parameters by the same names, fused kernels):
    # model = some_moe.accelerate(model.cuda())
    layers = [block.ffn for block in model.blocks]
    first_keys = [layer.state.keys.clone() for layer in layers]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)

    for step in range(options.steps):
        tokens = make_sequences(32, length + 1)
        logits, routings = model(tokens[:, :-1], step)  # changes no state
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer, routing in zip(layers, routings, strict=True):
            layer.gravity_step(routing.detach(), step, options.steps)  # the keys move, without gradients
        if step == 0:
            print(f"loss at the first step  {loss.item():.3f}")
    # The first round is chance, log(16) nats a token; the others can be known.
    chance = torch.log(torch.tensor(float(VOCABULARY))).item() * (PERIOD - 1) / length
    print(f"loss at the last step   {loss.item():.3f} (the best that can be reached is {chance:.3f})")
    for number, (layer, before) in enumerate(zip(layers, first_keys, strict=True)):
        moved = (layer.state.keys - before).norm(dim=-1).mean().item()
        used = int((routings[number].counts > 0).sum())
        print(f"layer {number}: keys moved by {moved:.3f} on average; {used} of {options.experts} experts in use")


if __name__ == "__main__":
    main()
