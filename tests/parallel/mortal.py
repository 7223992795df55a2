"""`some`, started by torchrun in the tests: the second process dies after step DIES_AT, once; then DIED is there."""

import os
import sys
from pathlib import Path

import torch

from some_moe import cli
from some_moe.commands import training
from some_moe.training.loop import Trainer
from tests.parallel.group_member import befall, die

died = Path(os.environ["DIED"])


def die_once(trainer: Trainer) -> None:
    died.touch()
    die(trainer)


if __name__ == "__main__":
    torch.set_num_threads(1)
    training.FAREWELL_SECONDS = 0.0
    if os.environ["RANK"] == "1" and not died.exists():
        befall(die_once, int(os.environ["DIES_AT"]))
    sys.exit(cli.main(sys.argv[1:]))
