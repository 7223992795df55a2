"""What each command of `some` does; `some_moe.cli` imports a module of this room when one of its commands runs."""
