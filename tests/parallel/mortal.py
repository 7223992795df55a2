"""`some`, started by torchrun in the tests: the second process dies after step DIES_AT of the first attempt."""

import os
import sys

import torch

from some_moe import cli
from some_moe.commands import training
from tests.parallel.group_member import befall, die

if __name__ == "__main__":
    torch.set_num_threads(1)
    training.FAREWELL_SECONDS = 0.0
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        befall(die, int(os.environ["DIES_AT"]))
    sys.exit(cli.main(sys.argv[1:]))
