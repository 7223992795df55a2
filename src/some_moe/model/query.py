"""The query network: turns a token's vector into the vector that is compared with the keys."""

from torch import Tensor, nn

from some_moe.config import ModelConfig
from some_moe.model.linear import DenseFFN, Linear


class LinearQuery(nn.Module):
    """d → d."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.project = Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        query: Tensor = self.project(x)
        return query


class MlpQuery(DenseFFN):
    """d → hidden → d, with GELU."""


def make_query(config: ModelConfig) -> nn.Module:
    return LinearQuery(config) if config.query == "linear" else MlpQuery(config.d_model, config.query_width)
