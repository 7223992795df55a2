"""`python -m some_moe` is the command `some`."""

import os
import sys

if __name__ == "__main__":
    # -m puts the current folder first: a file there called queue.py or types.py would be run as the library's.
    here, package = os.path.realpath(os.curdir), os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    sys.path[:] = [place for place in sys.path if package == here or (place and os.path.realpath(place) != here)]

    from some_moe.cli import run

    run()
