"""How alike the keys are, and what the queries they meet look like.

Shapes: E experts, D model width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from some_moe.metrics.usage import take_counted


def mean_pairwise_cosine(keys: Tensor) -> float:
    """Mean cosine over all pairs of different keys: near 0 for random ones, 1 when they point one way."""
    unit = F.normalize(keys.double(), dim=-1)
    n = len(unit)
    if n < 2:
        return 1.0
    return float((unit.sum(0).pow(2).sum() - unit.pow(2).sum()) / (n * (n - 1)))


def effective_rank(vectors: Tensor, mask: Tensor | None = None) -> float:
    """How many directions the vectors (…, D) really use: the exponential of the entropy of their spectrum."""
    flat = take_counted(vectors, mask).reshape(-1, vectors.shape[-1]).double()
    # The spectrum of the second moments: the squared singular values, at the cost of a D×D problem.
    energy = torch.linalg.eigvalsh(flat.T @ flat).clamp(min=0)
    if float(energy.sum()) == 0:
        return 0.0
    return float(torch.special.entr(energy / energy.sum()).sum().exp())


def query_collinearity(queries: Tensor, mask: Tensor | None = None) -> float:
    """‖E q‖ / E‖q‖ of queries (…, D): 1 when all point one way, near 0 when they cancel out."""
    flat = take_counted(queries, mask).reshape(-1, queries.shape[-1]).double()
    total = float(flat.norm(dim=-1).sum())
    return float(flat.sum(0).norm()) / total if total else 0.0
