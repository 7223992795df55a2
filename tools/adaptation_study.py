"""Study C, from texts to page: do keys that keep moving after training help on a text of another kind?

    python -m tools.adaptation_study texts --from DIR --out DIR          the texts: stories, Shakespeare, other stories
    python -m tools.adaptation_study run --texts DIR --out DIR           trains what is missing, reads, a record each
    python -m tools.adaptation_study page [--check]                      docs/studies/adaptation.md from results/

Records that are there are not measured again. `--size mini` proves on a CPU that it runs.
"""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from some_moe.cli import Parser, read_numbers, write
from some_moe.config import RunConfig
from some_moe.errors import BAD_INPUT, FAILED, ConfigError, UsageError
from some_moe.lab.adaptation import CONTROLS
from some_moe.layout import Column, format_markdown
from some_moe.system.files import write_whole

COMMAND = "python -m tools.adaptation_study"
STREAM, VALID = ("stories-1", "shakespeare", "stories-2"), ("stories-valid", "shakespeare-valid")
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
# A1's shape, honest: a loss on text, rows as long as they must be, six passes at a rate that was good there.
TRAINED: dict[str, Any] = {
    "data.seq_len": 384, "data.batching": "bucketed", "data.loss_on": "text", "data.count_padding": False,
    "data.train_subset_size": None, "data.val_subset_size": None, "train.epochs": 6, "train.sample_tokens": 0,
    "train.checkpoints": "best", "train.snapshot_every": 0,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "frozen": {},
    "trained": {"model.trainability": "full", "model.d_ffn": 256, "model.dropout": 0.1, "train.epochs": 4},
}
MINI: dict[str, Any] = {
    "model.d_model": 16, "model.num_layers": 2, "model.num_heads": 2, "model.num_experts": 6, "model.d_ffn": 8,
    "model.top_k": 2, "model.vocab_size": 300, "data.seq_len": 32, "data.batch_size": 4, "train.epochs": 1,
    "train.max_steps": 3, "train.device": "cpu", "train.compile": False,
}  # fmt: skip
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # two-sided 95 %, by the number of seeds
WORDS = {
    "still": "still keys", "gravity": "keys by gravity", "random": "keys at random, as far",
    "bias": "biases by gradient", "dynamic": "all parameters by gradient", "trigram": "a trigram that counts on",
}  # fmt: skip
Records = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by base and seed


# --- texts and runs -----------------------------------------------------------------------------------------


def make_texts(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} texts", "Lay out the texts: stories to learn, and the streams.")
    parser.add_argument("--from", dest="source", required=True, metavar="DIR", help="where the measuring texts lie")
    parser.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    options = parser.parse(arguments)
    source, out = Path(options.source), Path(options.out)
    from some_moe.config import DataConfig
    from some_moe.data.sources import read_texts

    def read(name: str) -> list[str]:
        return list(read_texts(source / name, DataConfig()))

    learned = {split: read(f"tinystories_{split}.jsonl") for split in ("train", "valid", "test")}
    learned["train"] += read("tinystories_more_train.jsonl.gz")
    new, other = read("tinystories_more_test.jsonl.gz"), read("tinystories_more_valid.jsonl.gz")
    speeches = read("ood_shakespeare.txt")
    part = len(speeches) // 5
    streams = {
        "stories-1": new[: len(new) // 2],
        "stories-2": new[len(new) // 2 :],
        "shakespeare": speeches[2 * part :],
        "stories-valid": other[:200],
        "shakespeare-valid": speeches[:part],
    }
    for name, documents in ({f"stories/{split}": many for split, many in learned.items()} | streams).items():
        path = out / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(json.dumps({"text": text}) + "\n" for text in documents))
    return write(f"{out}: {len(learned['train']):,} stories to learn; {', '.join(streams)}\n")


def run_study(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} run", "Train every base that is missing, let it read, and write a record.")
    parser.add_argument("--texts", required=True, metavar="DIR", help="the folder that `texts` made")
    parser.add_argument("--out", required=True, metavar="DIR", help="where records go, and runs/ below it")
    parser.add_argument("--bases", default=",".join(BASES), metavar="A,B", help="which (frozen,trained)")
    parser.add_argument("--seeds", default="0,1,2", metavar="0,1,2", help="random seeds, of the library too")
    parser.add_argument("--size", default="full", choices=("full", "mini"), help="mini proves that it runs")
    options = parser.parse(arguments)
    import some_moe
    from some_moe.lab.registry import find_experiment

    texts, out = Path(options.texts), Path(options.out)
    for base in options.bases.split(","):
        if base not in BASES:
            raise UsageError(f"--bases {base!r} is unknown; use {', '.join(BASES)}")
        for seed in read_numbers("--seeds", options.seeds, what="seed", example="0,1,2"):
            name = f"{base}-seed{seed}"
            if (out / f"{name}.json").exists():
                continue
            own = {"name": name, "data.source": str(texts / "stories"), "train.seed": seed, "model.expert_seed": seed}
            small = MINI if options.size == "mini" else {}
            config: RunConfig = find_experiment("A1").config.override(TRAINED | BASES[base] | small | own)
            run = some_moe.train(config, out=out / "runs" / name, resume="auto")
            found = some_moe.adapt(
                run.path,
                [texts / f"{one}.jsonl" for one in STREAM],
                controls=["all"],
                rates=RATES if options.size == "full" else RATES[:2],
                valid=[texts / f"{one}.jsonl" for one in VALID],
                say=lambda text: print(text, flush=True),
            )
            record = {"base": base, "test_loss": (run.result or {}).get("test_loss")} | found.to_dict()
            write_whole(out / f"{name}.json", json.dumps(record))
            print(found, flush=True)
    return 0


# --- the page -----------------------------------------------------------------------------------------------


def write_page(arguments: list[str]) -> int:
    parser = Parser(f"{COMMAND} page", "Write the study's page and its figure from the results.")
    parser.add_argument("--results", default="results/adaptation", metavar="DIR", help="records (results/adaptation)")
    parser.add_argument("--out", default="docs/studies/adaptation.md", metavar="F.md", help="the page")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not up to date")
    options = parser.parse(arguments)
    files = make_page(Path(options.results), Path(options.out))
    if options.check:
        from tools.documents import find_outdated

        for path, fault in find_outdated(files):
            print(f"adaptation_study: {path} {fault}; run `{COMMAND} page`", file=sys.stderr)
            return FAILED
        return write(f"{options.out} shows the results\n")
    for path, contents in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents)
    return write(f"{', '.join(map(str, files))}\n")


def read_records(folder: Path) -> dict[str, dict[int, dict[str, Any]]]:
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*-seed*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["base"], {})[record["seed"]] = record
    return {base: found[base] for base in BASES if base in found}


def make_page(results: Path, out: Path) -> dict[Path, bytes]:
    """{path: contents} of the page and, where there are records, of its figure."""
    records = read_records(results)
    parts = [
        "# Adaptation: keys that move while they read",
        f"Made from `{results}` by `{COMMAND} page`. Change nothing here by hand. How it is used: "
        "[adaptation](../adaptation.md).",
        "Do keys that keep moving after training help on a text of another kind (study C of the published plan)?",
        "## Verdict",
        judge(records),
        "## Prediction",
        "[Written before the runs](adaptation-predictions.md).",
        "## Runs",
        f"Bases of A1's shape learn stories (`{COMMAND} run`): *frozen* experts as published, *trained* ones 256 wide. "
        "Then each reads stories that it has not seen, three fifths of Shakespeare, and other stories; every chunk of "
        "about 2,048 tokens is scored before anything moves. Rates are chosen for each reader on other stories and "
        "another fifth of Shakespeare. Random seeds change the frozen library too.",
        "## Measured",
    ]
    files: dict[Path, bytes] = {}
    if not records:
        parts.append("Not measured yet.")
    for base, seeds in records.items():
        any_of = next(iter(seeds.values()))
        from tools.adaptation_figure import draw_gains

        torch, commit = any_of["versions"]["torch"], str(any_of["commit"])[:12]
        told = f"Random seeds {', '.join(map(str, seeds))}; {any_of['device']}, torch {torch}, commit {commit}."
        parts += [f"### {base.capitalize()} experts", told, "\n".join(tabulate(seeds))]
        figure = out.parent.parent / "figures" / f"study-adaptation-{base}.svg"
        drawing = draw_gains(base, seeds)
        files[figure] = drawing.to_svg()
        parts += [f"![{drawing.title}]({os.path.relpath(figure, out.parent)})", drawing.caption]
    if records:
        parts.append(
            "Nats a token. *Ahead* is against still keys, on Shakespeare and back on stories; *lost* what the stories' "
            "valid split lost by then. Behind ± is half of the 95 % interval over seeds; where it is missing, one seed "
            "was run, and the figure is a lead."
        )
    return {out: ("\n\n".join(parts) + "\n").encode()} | files


def gather(seeds: Mapping[int, Mapping[str, Any]], who: str) -> list[Mapping[str, Any]]:
    """One reader's figures in every seed that has them."""
    return [one for record in seeds.values() for one in record["readers"] if one["who"] == who]


def spread(values: list[float | None], form: str = "+.4f") -> str:
    """Mean and half of the 95 % interval over seeds."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "no number"
    within = f" ± {half_width(known):.4f}" if len(known) > 1 else ""
    return f"{round(mean(known), 4) + 0.0:{form}}{within}"


def half_width(values: list[float]) -> float:
    count = len(values)
    return STUDENT.get(count, 2.0) * stdev(values) / count**0.5 if count > 1 else float("inf")


def lost(one: Mapping[str, Any], place: int) -> float | None:
    before, after = one["kept"][0], one["kept"][place]
    return None if before is None or after is None else after - before


def tabulate(seeds: Mapping[int, Mapping[str, Any]]) -> list[str]:
    heads = ("reader", "rate", "Shakespeare", "ahead there", "ahead back on stories", "lost after Shakespeare",
             "lost at the end", "drift at the end")  # fmt: skip
    rows = []
    for who in ("still", "gravity", *CONTROLS[1:]):
        many = gather(seeds, who)
        if many:
            rates = ", ".join(dict.fromkeys(f"{one['rate']:g}" for one in many if one["rate"] is not None)) or "–"
            rows.append(
                [
                    WORDS[who],
                    rates,
                    spread([one["texts"][1]["loss"] for one in many], ".4f"),
                    spread([one["texts"][1]["ahead"] for one in many]),
                    spread([one["texts"][2]["ahead"] for one in many]),
                    spread([lost(one, 2) for one in many]),
                    spread([lost(one, -1) for one in many]),
                    spread([one["drift"][-1] for one in many], ".3f") if many[0]["drift"] else "–",
                ]
            )
    return format_markdown([Column(head, numeric=place > 0) for place, head in enumerate(heads)], rows)


def judge(records: Records) -> str:
    """Two sentences: what moving keys give on the other text, and beside what."""
    if "frozen" not in records:
        return f"Not measured yet: {len(BASES)} bases with three random seeds each are planned. None is in."
    seeds = records["frozen"]
    gravity, random = ([one["texts"][1]["ahead"] for one in gather(seeds, who)] for who in ("gravity", "random"))
    best = {who: spread([one["texts"][1]["ahead"] for one in gather(seeds, who)]) for who in ("bias", "dynamic")}
    if None in gravity:
        return "With frozen experts, gravity gave no number on Shakespeare. Lower rates are needed."
    gain = mean(gravity)
    sure = abs(gain) > half_width(gravity)
    word = "no measurable change" if not sure else "a gain" if gain > 0 else "a loss"
    if len(gravity) < 2:
        word = "(one random seed, a lead)"
    return (
        f"Keys that move on by gravity while the model reads Shakespeare are {word}: {spread(gravity)} nats a token "
        f"ahead of still keys, where random drift as far gives {spread(random)}. One gradient step a chunk gives "
        f"{best['bias']} on biases alone and {best['dynamic']} on all parameters."
    )


VERBS = {"texts": make_texts, "run": run_study, "page": write_page}


def main(arguments: list[str]) -> int:
    """Run a verb and return the exit code."""
    verb, words = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        if verb in VERBS:
            return VERBS[verb](words)
        if verb in ("-h", "--help"):
            return write(f"{__doc__}\nEach verb has --help.\n")
        raise UsageError(f"{verb!r} is no verb of the study; use one of {', '.join(VERBS)}")
    except ConfigError as error:
        print(f"adaptation_study: {error}", file=sys.stderr)
        return BAD_INPUT


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
