"""`python -m some_moe` is the command `some`."""

from some_moe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
