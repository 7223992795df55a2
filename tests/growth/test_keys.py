"""Keys among queries: clusters are found, and the share that new experts take of a text is the one asked for."""

import pytest
import torch
import torch.nn.functional as F

from some_moe.config import GravityConfig, ModelConfig
from some_moe.growth.keys import calibrate, score_margins, spread_keys
from some_moe.model.layer import SomeLayer


def test_keys_are_the_middles_of_clusters() -> None:
    generator = torch.Generator().manual_seed(0)
    middles = F.normalize(torch.randn(5, 32, generator=generator), dim=-1)
    points = (middles[:, None] + 0.05 * torch.randn(5, 200, 32, generator=generator)).flatten(0, 1) * 3
    keys = spread_keys(points, 5, generator)
    assert torch.allclose(keys.norm(dim=-1), torch.ones(5))
    nearest = (keys @ middles.T).max(0).values
    assert nearest.min() > 0.99  # every cluster has a key in its middle


def test_keys_of_one_point_are_that_point() -> None:
    keys = spread_keys(torch.ones(4, 8), 3, torch.Generator().manual_seed(0))
    assert torch.allclose(keys, F.normalize(torch.ones(3, 8), dim=-1))


@pytest.mark.parametrize("score", ["dot", "cosine"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_bias_gives_new_experts_the_share_that_was_asked_for(score: str, share: float) -> None:
    config = ModelConfig(d_model=16, num_heads=2, num_experts=12, d_ffn=8, top_k=2, score=score)  # type: ignore[arg-type]
    layer = SomeLayer(config, GravityConfig.off())
    queries = torch.randn(4000, 16, generator=torch.Generator().manual_seed(1))
    chosen = score_margins(layer, queries, 8) + calibrate(layer, queries, 8, share) > 0
    assert chosen.double().mean(0).tolist() == pytest.approx([share / 4] * 4, abs=1e-3)  # an equal part each
    assert 0.6 * share < float(chosen.any(1).double().mean()) <= share + 1e-3
