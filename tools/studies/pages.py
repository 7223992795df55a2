"""docs/studies/*.md, made from the records in results/ alone; what is missing there is said to be missing."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from some_moe.cli import Parser, write
from some_moe.errors import FAILED, ConfigError
from some_moe.glass.page.markdown import plain, sentence
from some_moe.lab.published import compare_results, read_results
from some_moe.lab.registry import find_experiment
from some_moe.memory import format_bytes
from some_moe.system.files import write_whole
from tools.studies.costs import foretell, minutes_of
from tools.studies.drawings import draw_differences, draw_losses
from tools.studies.outcomes import Outcome, Outcomes
from tools.studies.plan import Plan, read_plan
from tools.studies.records import Records, count_with_stories, read_records
from tools.studies.verdicts import NOT_YET, judge, judge_on_laptop

COMMAND = "python -m tools.studies pages"
WORDS = Path(__file__).with_name("words.yaml")
PREDICTIONS = "predictions.md"
ABSENT = "–"
ORIGIN = (
    "Made from `results/` by `python -m tools.studies pages`; what is run is in `tools/studies/plan.yaml`. Change "
    "nothing here by hand."
)
HOW_TO_READ = (
    "Nats per real token on test, at the step that valid chose, settings chosen by valid with the first seed. Behind ± "
    "is half of the 95 % interval over seeds and stories together (`tools/studies/intervals.py`); where it is missing, "
    "one seed was run, and the figure is a lead. *Difference*: from the first row, paired by story. *Stored*: "
    "what a checkpoint of weights holds; frozen experts are a seed. Seconds are of training steps on a chip that other "
    "runs shared, unless the table says alone."
)


def write_pages(arguments: list[str]) -> int:
    parser = Parser(COMMAND, "Make the pages of the studies and their figures from the records.")
    parser.add_argument("--results", default="results", metavar="DIR", help="where records are (results)")
    parser.add_argument("--out", default="docs/studies", metavar="DIR", help="where pages go (docs/studies)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is not up to date")
    options = parser.parse(arguments)
    files = make_pages(Path(options.results), Path(options.out))
    if options.check:
        from tools.documents import find_outdated

        for path, fault in find_outdated(files):
            print(f"studies: {path} {fault}; run `{COMMAND}`", file=sys.stderr)
            return FAILED
        return write(f"{len(files)} files in {options.out} show the results\n")
    for path, contents in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, contents)
    return write(f"{', '.join(str(path) for path in files if path.suffix == '.md')}\n")


def make_pages(results: Path, out: Path) -> dict[Path, bytes]:
    """{path: contents} of every page and figure."""
    plan, records, words = read_plan(), read_records(results), yaml.safe_load(WORDS.read_text(encoding="utf-8"))
    outcomes, files = Outcomes(plan, records), dict[Path, bytes]()
    predictions = read_predictions(out / PREDICTIONS)
    for name, about in words["pages"].items():
        page = Page(name, about, outcomes, out, results)
        parts = page.write(predictions.get(name, ""))
        files |= page.figures
        files[out / f"{name}.md"] = finish(parts)
    files[out / "README.md"] = finish(write_index(plan, records, words, outcomes))
    return files


def finish(parts: Sequence[str]) -> bytes:
    return ("\n\n".join(part for part in parts if part) + "\n").encode()


def read_predictions(file: Path) -> dict[str, str]:
    """The sections of the predictions, by their headings."""
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} is missing; predictions are written before the runs")
    pieces = re.split(r"^## (\w+)\n", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(pieces[1::2], pieces[2::2], strict=True)}


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """Markdown; the first `words` columns are words, the others are numbers."""
    rule = ["---"] * words + ["---:"] * (len(heads) - words)
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, rule, *rows))


class Page:
    """One study's page. figures: what it shows, filled as it is written."""

    def __init__(self, name: str, about: Mapping[str, Any], outcomes: Outcomes, out: Path, results: Path) -> None:
        self.name, self.about, self.outcomes, self.out, self.results = name, about, outcomes, out, results
        self.figures: dict[Path, bytes] = {}

    def write(self, prediction: str) -> list[str]:
        studies = list(self.about["studies"])
        parts = [f"# {self.about['title']}", ORIGIN, self.about["question"]]
        parts += ["## Verdict", self.about["verdict"] or self.describe_open(studies)]
        parts += ["## Prediction", f"Written before the runs ([all of them]({PREDICTIONS})).", prediction]
        parts += ["## Measured", HOW_TO_READ]
        if self.name == "published":
            return [*parts, *self.compare_published()]
        for study in studies:
            parts += self.write_study(study)
        return parts

    def describe_open(self, studies: Sequence[str]) -> str:
        """What stands in the place of a verdict until one is written."""
        total = done = 0
        for study in studies:
            found = foretell(self.outcomes.plan, self.outcomes.plan.studies[study], self.outcomes.records)
            total, done = total + found[0], done + found[1]
        if done == 0:
            return f"{NOT_YET.capitalize()}: {total} runs are planned, none is in."
        return f"Not judged yet: {done} of {total} planned runs are in."

    def write_study(self, study: str) -> list[str]:
        about, arms = self.outcomes.plan.studies[study], self.outcomes.of(study)
        base = self.outcomes.base_of(study, self.about.get("base", ""))
        parts = [f"### {study.replace('-', ' ').capitalize()}", sentence(about.words)]
        measured = [one for one in arms if one.by_seed]
        if base is not None and base.by_seed and base.arm.study != study:
            measured.insert(0, base)
        if not measured:
            return [*parts, f"{NOT_YET.capitalize()}."]
        if study == "timing":
            return [*parts, self.show_times(measured)]
        if study == "lengths":
            return [*parts, self.show_lengths(measured)]
        ordered = ([base] if base in measured else []) + sorted(
            (one for one in measured if one is not base), key=lambda one: one.loss.mean if one.loss else 0.0
        )
        parts.append(self.show_arms(ordered, base if base in measured else None))
        parts += self.show_figures(study, ordered, base if base in measured else None)
        missing = [one.arm.words for one in arms if not one.by_seed]
        if missing:
            parts.append(f"Not measured yet: {'; '.join(map(plain, missing))}.")
        return [*parts, self.show_origin(measured)]

    def show_arms(self, arms: Sequence[Outcome], base: Outcome | None) -> str:
        heads = ["arm", "what", "test", "difference", "seeds", "rate, dropout, decay", "trained M", "stored",
                 "M tokens", "seconds", "gini"]  # fmt: skip
        rows = []
        for one in arms:
            gap = None if base is None or one is base else one.minus(base)
            settings = one.settings
            mark = "" if one.is_whole else " *"
            rows.append([
                f"`{one.arm.name}`{mark}",
                plain(one.arm.words),
                str(one.loss) if one.loss else ABSENT,
                gap.signed() if gap else ABSENT,
                str(len(one.by_seed)),
                f"{settings.rate:g}, {settings.dropout:g}, {settings.decay:g}" if settings else "as registered",
                number(one.average("trainable_parameters"), 1e-6, 1),
                format_bytes(one.stored_bytes),
                number(one.average("tokens"), 1e-6, 1),
                number(one.average("seconds"), 1, 0),
                number(one.middle.get("gini"), 1, 2),
            ])  # fmt: skip
        note = (
            "\n\n\\* Runs of it are open: settings or seeds may change."
            if any(not one.is_whole for one in arms)
            else ""
        )
        return table(heads, rows, words=2) + note

    def show_figures(self, study: str, arms: Sequence[Outcome], base: Outcome | None) -> list[str]:
        title = f"{self.about['title']}: {study.replace('-', ' ')}"
        draws: list[tuple[str, Callable[[], Any]]] = [("loss", lambda: draw_losses(title, arms))]
        if base is not None:
            found = base
            draws = [
                ("difference", lambda: draw_differences(title, found, arms)),
                *draws[: study in ("ladder", "frontier")],
            ]
        parts = []
        for kind, draw in draws:
            drawing = draw()
            if drawing is not None:
                file = self.out.parent / "figures" / f"study-{study}-{kind}.svg"
                self.figures[file] = drawing.to_svg()
                link = os.path.relpath(file, self.out)
                parts += [f"![{plain(drawing.title)}]({link})", plain(drawing.caption)]
        return parts

    def show_times(self, arms: Sequence[Outcome]) -> str:
        rows = [
            [plain(one.arm.words), number(one.step_ms, 1, 2), number(one.average("trainable_parameters"), 1e-6, 1)]
            for one in arms
        ]
        return "Alone on the chip, rows of 384 at most, 32 a step.\n\n" + table(
            ["what", "ms a step", "trained M"], rows
        )

    def show_lengths(self, arms: Sequence[Outcome]) -> str:
        rows = []
        lengths = sorted({length for one in arms for length in one.arm.lengths})
        for one in arms:
            record = next(iter(one.by_seed.values()))
            told = record.get("lengths")
            found = {row.get("seq_len"): row.get("loss") for row in told} if isinstance(told, list) else {}
            rows.append([plain(one.arm.words), *(number(found.get(length), 1, 3) for length in lengths)])
        return table(["trained on", *(f"rows of {length}" for length in lengths)], rows)

    def show_origin(self, arms: Sequence[Outcome]) -> str:
        """Where the figures come from."""
        records = [record for one in arms for record in one.by_seed.values()]
        told = {
            name: sorted({str(record.get(name)) for record in records}) for name in ("device", "commit", "data_digest")
        }
        stories = count_with_stories(records)
        return (
            f"{len(records)} runs on {', '.join(told['device'])}, commit {', '.join(told['commit'])}; data "
            f"{', '.join(told['data_digest'])}; {stories} of them with the loss of every story. Each record has its "
            "command."
        )

    # --- published and measured -------------------------------------------------------------------------------

    def compare_published(self) -> list[str]:
        folder = self.results / "published"
        names = [arm.name for arm in self.outcomes.plan.studies["published"].arms]
        try:
            found = read_results(folder)[0] if folder.is_dir() else []
        except ConfigError:
            found = []
        mine = [result for result in found if result.experiment.name in names]
        if not mine:
            return [f"{NOT_YET.capitalize()}: {', '.join(names)}."]
        rows = []
        for comparison in compare_results(mine):
            experiment = comparison.experiment
            if experiment.name not in names:
                continue
            of = [result for result in mine if result.experiment is experiment]
            told = experiment.published
            one = self.outcomes[f"published/{experiment.name}"]
            respawns = [sum(layer.get("respawns") or 0 for layer in result.record.get("layers") or []) for result in of]
            padded = [value for result in of if (value := result.number("val_loss_padded")) is not None]
            counted = padded or [value for result in of if (value := result.number("val_loss")) is not None]
            trained = [value for result in of if (value := result.number("train_loss")) is not None]
            rows.append([
                experiment.name,
                str(told.val_loss) if told and told.val_loss else ABSENT,
                spread(counted),
                str(told.train_loss) if told and told.train_loss else ABSENT,
                spread(trained),
                str(one.loss) if one.loss else ABSENT,
                str(len(of)),
                str(max(respawns, default=0)),
            ])  # fmt: skip
        heads = ["run", "published valid", "valid, counted so", "published train", "train", "test, real tokens",
                 "seeds", "respawns"]  # fmt: skip
        missing = [name for name in names if not any(result.experiment.name == name for result in mine)]
        note = f"Not measured yet: {', '.join(missing)}." if missing else ""
        halves = self.compare_halves()
        return [table(heads, rows), note, *halves]

    def compare_halves(self) -> list[str]:
        """Whether the reports of v5 are half as long as was assumed: each epoch beside the published end."""
        rows = []
        for name in ("v5-linear", "v5-mlp"):
            told = find_experiment(name).published
            for seed, record in self.outcomes[f"published/{name}"].by_seed.items():
                losses = [number(row.get("val_loss"), 1, 4) for row in record.get("epochs") or []]
                rows.append([name, str(seed), str(told.val_loss) if told else ABSENT, ", ".join(losses)])
        if not rows:
            return []
        return ["### Is v5 half as long?", table(["run", "seed", "published end", "valid after each pass"], rows)]


def number(value: Any, factor: float, digits: int) -> str:
    return f"{value * factor:,.{digits}f}" if isinstance(value, int | float) else ABSENT


def spread(values: Sequence[float]) -> str:
    from statistics import mean, stdev

    if not values:
        return ABSENT
    return f"{mean(values):.4f}" + (f" ± {stdev(values):.4f}" if len(values) > 1 else "")


# --- the index ------------------------------------------------------------------------------------------------

HOW_TO_RUN = """\
```
python -m tools.studies plan                                        # slices by value, what is done, minutes
python -m tools.studies data --from TEXTS --out carry/studies       # 22 MiB: every story, and the novels
python -m tools.studies run --slice timing --data carry/studies --out OUT --minutes 9     # one by one on the chip
python -m tools.studies run --slice ladder --data carry/studies --out OUT --minutes 9 --workers 6
python -m tools.studies run --slice laptop --data carry/studies --out OUT --minutes 120 --workers 2    # on a CPU
python -m tools.studies take OUT/records.jsonl.gz                   # into results/; then the slice goes on
python -m tools.studies pages && make docs-check                    # the pages, from the records
```

Runs share the chip by MPS where it is there; none is begun that would not end in time; no checkpoint stays. What is
chosen by valid is run with two more seeds as soon as it is known. Where the package is not installed, `PYTHONPATH=src`
stands for it; pages alone need matplotlib. Verdicts are written by hand in `tools/studies/words.yaml`."""


def write_index(plan: Plan, records: Records, words: Mapping[str, Any], outcomes: Outcomes) -> list[str]:
    pages = [f"- [{about['title']}]({name}.md): {about['question']}" for name, about in words["pages"].items()]
    pages.append(
        "- Made by tools of their own: [adaptation](adaptation.md), [growing, merging](grow.md), [guilds](guilds.md)."
    )
    rows = []
    for study in plan.studies.values():
        total, done, seconds = foretell(plan, study, records)
        minutes = minutes_of(total - done, seconds, 1 if study.is_alone else 6)
        minutes_open = "a CPU will do" if study.on_cpu else f"{minutes:.0f}"
        rows.append([study.name, sentence(study.words), str(total), str(done), minutes_open])
    parts = [
        "# Studies",
        "What each part of SoME is worth, said so that it stands: three random seeds that also change the frozen "
        "library, settings tuned for every side, intervals over seeds and stories, predictions "
        f"[written before the runs]({PREDICTIONS}).",
        "\n".join(pages),
        "## How to run",
        HOW_TO_RUN,
        table(["slice", "what it asks", "runs", "done", "minutes open, H200"], rows, words=2),
        "## Every statement and its verdict",
        "Statements of our own first measurements (one seed each), and the advice of the published reports. The "
        "figure is the loss of the first thing named minus that of the second. *On a laptop*: what the "
        "[smallest study](laptop.md) says of the same; models a sixth as wide, so a lead for the others.",
    ]
    for source, statements in words["statements"].items():
        lines = [[sentence(one["says"]), *judge(one, outcomes), judge_on_laptop(one, outcomes)] for one in statements]
        heads = ["statement", "measured", "verdict", "on a laptop"]
        parts += [f"### {source[0].upper()}{source[1:]}", table(heads, lines, words=4)]
    left = [f"- `{name}`: {plain(plan.left_out.get(name, ''))}" for name in plan.list_uncovered()]
    parts += ["## Registered runs that nobody measures", "\n".join(left) or "None."]
    return parts
