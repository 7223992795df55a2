"""The query network: turns a token's vector into the vector that is compared with the keys."""

import torch.nn.functional as F
from torch import Tensor, nn

from some_moe.config import ModelConfig
from some_moe.model.linear import Linear


class LinearQuery(nn.Module):
    """d → d."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.project = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor = self.project(x)
        return query


class MlpQuery(nn.Module):
    """d → hidden → d, with GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.expand = Linear(config.d_model, config.query_width)
        self.project = Linear(config.query_width, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor = self.project(F.gelu(self.expand(x)))
        return query


def make_query(config: ModelConfig) -> nn.Module:
    return LinearQuery(config) if config.query == "linear" else MlpQuery(config)
