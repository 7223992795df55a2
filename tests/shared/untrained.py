"""A run folder of any config that was never trained: its weights and keys are as they began, but shaken."""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random

import torch

from some_moe.config import RunConfig
from some_moe.data.tokenizer import Tokenizer
from some_moe.model.transformer import SomeLM
from some_moe.training import loop
from some_moe.training.checkpoint import describe_libraries, save_checkpoint
from some_moe.training.run_folder import RunFolder

VOCABULARY = 300


@cache
def make_tokenizer() -> Tokenizer:
    draw = Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    return Tokenizer.train([" ".join(draw.choices(words, k=200))], VOCABULARY)


@torch.no_grad()
def shake(model: SomeLM) -> SomeLM:
    """Move whatever begins at a neutral value, so that what ignores it is found out."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not name.endswith((".up", ".down", ".usage")):
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator) * (1 if tensor.dim() < 2 else 0.3)
    return model


def write_run(path: Path, config: RunConfig, *, shaken: bool = True) -> Path:
    """Write a run as `some train` would have left it after no step."""
    folder, tokenizer = RunFolder(path), make_tokenizer()
    model = SomeLM(config.model, config.gravity, seed=config.train.seed)
    shake(model) if shaken else None
    about = {"libraries": describe_libraries(model), "data_digest": "", "config": config.flatten()}
    with folder.claim():
        folder.create(tokenizer.to_json(), "cpu")
        save_checkpoint(folder.checkpoints, dict(model.state_dict()), {}, asdict(loop.Progress()) | about)
        folder.write_config(config)
        folder.release()
    return path
