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
    from some_moe.data.dataset import prepare
    from some_moe.lab.jobs import hide_place
    from some_moe.lab.lengths import score_lengths
    from some_moe.layout import Style
    from some_moe.training.environment import describe_program
    from some_moe.training.machine import choose_machine
    from some_moe.training.run_folder import drop_nan
    from some_moe.training.runs import load

    run = load(options.run, checkpoint=options.checkpoint)
    config, data, model = run.config, run.config.data, run.model
    machine = choose_machine(config.train.override({"device": options.device}))
    longest = max(data.seq_len, *lengths)
    dataset = prepare(data.override({"seq_len": longest}), config.model.vocab_size, run.tokenizer)
    scores = score_lengths(
        model.to(machine.device),
        dataset.train,
        getattr(dataset, options.split),
        lengths,
        config,
        run.tokenizer,
        machine.device,
        bf16=machine.bf16,
    )
    program = describe_program()
    record = {
        "run": hide_place(str(run.path)),
        "experiment": config.experiment,
        "seed": config.train.seed,
        "step": run.step,
        "split": options.split,
        "stories": {split: len(getattr(dataset, split)) for split in ("train", "valid", "test")},
        "source": hide_place(data.source),
        "trained_seq_len": data.seq_len,
        "loss_on": data.loss_on,
        "middle_layer": len(model.layers) // 2 if model.layers else None,
        "device": machine.describe(),
        "precision": "bf16" if machine.bf16 else "fp32",
        "commit": program["commit"],
        "versions": {name: program[name] for name in ("python", "torch", "some_moe")},
        "lengths": [score.to_dict() for score in scores],
    }
    if options.json:
        return write_json(drop_nan(record))
    return write(format_lengths(record, width=terminal_width(), style=Style(on_terminal())))
