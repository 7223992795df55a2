"""What training asks of `some_moe.memory`."""

from some_moe.memory import available_bytes, needed_bytes, refuse_too_large

__all__ = ["available_bytes", "needed_bytes", "refuse_too_large"]
