"""`some eval RUN --seq-lens`: one model at several row lengths, as tables or one object."""

from argparse import Namespace

from some_moe.cli import UsageError, on_terminal, read_numbers, terminal_width, write, write_json

SHORTEST_ROW = 2


def evaluate_lengths(options: Namespace) -> int:
    """Score a run with its rows cut or padded to each length of --seq-lens (options: those of `some eval`)."""
    lengths = read_numbers("--seq-lens", options.seq_lens, what="length", example="256,512,1024", least=SHORTEST_ROW)
    for flag, value in (("--data", options.data), ("--adapt", options.adapt), ("--trigram", options.trigram)):
        if value:
            raise UsageError(f"--seq-lens {options.seq_lens} and {flag} exclude each other; give one of them")

    from some_moe.commands.tables import format_lengths
    from some_moe.lab.lengths import score_run
    from some_moe.layout import Style
    from some_moe.training.run_folder import drop_nan

    record = score_run(options.run, lengths, split=options.split, checkpoint=options.checkpoint, device=options.device)
    if options.json:
        return write_json(drop_nan(record))
    return write(format_lengths(record, width=terminal_width(), style=Style(on_terminal())))
