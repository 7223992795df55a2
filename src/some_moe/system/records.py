"""What the JSON files and logs of a run hold. Anybody may have written them: what does not fit is damage. No torch."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from some_moe.errors import ConfigError
from some_moe.system.files import inside, write_whole
from some_moe.system.reading import RESTORE, clean, parse_json, read_bytes, read_object

Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Figure = Number | None  # null where it is not a number
LARGEST_LOG, MOST_LINES = 1 << 28, 1 << 21  # bytes and lines


class Record(BaseModel):
    """Fields that some reader uses, with their types; those with a default may be missing, and others may be there."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class Layer(Record):
    layer: Count
    gini: Number
    entropy_bits: Number
    experts_used: Count
    num_experts: Count
    max_entropy_bits: Number
    max_load: Number = 0.0
    gate_entropy_nats: Figure = None
    gini_real: Number = 0.0
    entropy_bits_real: Number = 0.0
    respawns: Count = 0


class Scores(Record):
    """What an evaluation, an epoch and a result have in common."""

    tokens: Count = 0
    val_loss: Figure = None
    val_loss_padded: Figure = None
    val_loss_on_padding: Figure = None
    perplexity: Figure = None
    bits_per_byte: Figure = None
    text_share: Figure = None
    tokens_per_second: Figure = None
    layers: list[Layer] = []


class Epoch(Scores):
    epoch: Count
    step: Count
    train_loss: Figure = None
    gini: Figure = None
    entropy_bits: Figure = None
    experts_used: Figure = None
    train_gini: Figure = None


class Change(Record):
    """A setting that was changed when a run had come to some step."""

    step: Count
    field: str
    before: Any
    after: Any


class Metrics(Scores):
    """A line of metrics.jsonl: of a training step or an evaluation."""

    step: Count
    epoch: Count = 0
    train_loss: Number = 0.0
    gradient_norm: Number = 0.0
    learning_rate: Number = 0.0
    top_k: Count = 0
    gini_middle: Figure = None


class Sample(Record):
    """A line of samples.jsonl."""

    step: Count
    text: str


class Result(Scores):
    """result.json."""

    name: str = ""
    experiment: str | None = None
    status: str = ""
    steps: Count = 0
    seconds: Figure = None
    compile_seconds: Figure = None
    train_loss: Figure = None
    best_val_loss: Figure = None
    best_step: Count | None = None
    test_loss: Figure = None
    test_loss_last_step: Figure = None
    test_bits_per_byte: Figure = None
    total_parameters: Annotated[int, Field(ge=1, lt=2**63)] = 1
    trainable_parameters: Count = 0
    middle_layer: Count | None = None
    seed: Count = 0
    device: str = ""
    data_digest: str | None = None
    epochs: list[Epoch] = []
    changes: list[Change] = []
    phases: dict[str, Number] = {}


WHOLE_RESULT = (
    "name", "status", "steps", "tokens", "seconds", "tokens_per_second", "val_loss", "best_val_loss", "best_step",
    "test_loss", "test_bits_per_byte", "val_loss_padded", "text_share", "total_parameters", "trainable_parameters",
    "middle_layer", "layers", "device", "epochs",
)  # fmt: skip


class Environment(Record):
    """env.json."""

    some_moe: str = ""
    commit: str | None = None
    python: str = ""
    torch: str = ""
    device: str = ""
    command: str = ""


class Branch(Record):
    """Experts that were grown on one text: so many in every layer."""

    name: str
    experts: Annotated[int, Field(ge=1, le=1 << 20)]
    trainability: Literal["full", "lora"]
    lora_rank: Annotated[int, Field(ge=1, le=1 << 16)] = 8
    looks_back: Annotated[float, Field(ge=0, le=1e6)] = 0.0  # weight of the text before a token in who serves it
    head_rank: Annotated[int, Field(ge=0, le=1 << 16)] = 0  # of the branch's update of the head; 0: none


class Favour(Record):
    """What a favour would give: losses on the new text and on the kept one, and the shares that branches serve."""

    favour: Number
    new_loss: Number
    kept_loss: Number
    new_share: Number
    kept_share: Number


class Grown(Record):
    """grown.json: what a run with branches takes from its base."""

    format_version: Count = 1
    base: str  # the base's folder, seen from this one
    base_step: Count
    base_digest: str
    branches: list[Branch]
    favour: Number = 0.0  # added to the selection bias of every branch
    merged: bool = False  # put together from other runs, and not trained
    kept: str = ""  # what the sharing was set on
    curve: list[Favour] = []


class State(Record):
    """state.json of a checkpoint: how far the run had come."""

    hashes: dict[str, str]
    step: Count
    tokens: Count
    seconds: Number
    compile_seconds: Number
    epoch_loss: Number
    epoch_steps: Count
    best_val_loss: Figure
    best_step: Count | None
    stale: Count
    stopped_early: bool
    epochs: list[Epoch]
    libraries: list[dict[str, Any]]
    data_digest: str
    without_optimizer: bool = False
    config: dict[str, Any] = {}
    changes: list[Change] = []
    phases: dict[str, Number] = {}


class Decision(Record):
    """.resume.json: to which step a run is being taken back, and what is then written anew."""

    step: Annotated[int, Field(ge=-1, lt=2**63)]
    config: str | None  # config.yaml
    state: State | None  # state.json of that step


SCHEMAS: dict[str, type[Record]] = {
    "result.json": Result, "env.json": Environment, "state.json": State, "metrics.jsonl": Metrics,
    "samples.jsonl": Sample, ".resume.json": Decision, "grown.json": Grown,
}  # fmt: skip


def find_misfit(value: Any, schema: type[Record]) -> str:
    """What does not fit, in a few words; empty where all does."""
    try:
        found = schema.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = clean(".".join(map(str, first["loc"]))) or "the whole"
        missing = first["type"] == "missing"
        return f"{where} is missing" if missing else f"{where} must be {first['msg'].removeprefix('Input should be ')}"
    middle = getattr(found, "middle_layer", None)
    if isinstance(found, Result) and middle is not None and middle >= len(found.layers):
        return f"middle_layer {middle} is none of its {len(found.layers)} layers"
    return ""


def read_record(path: Path, cure: str = RESTORE, needed: tuple[str, ...] = ()) -> dict[str, Any]:
    """A file of SCHEMAS; needed: fields that must be there."""
    found = read_object(inside(path.parent, path.name), cure)
    misfit = find_misfit(found, SCHEMAS[path.name]) or next((f"{n} is missing" for n in needed if n not in found), "")
    if misfit:
        raise ConfigError(f"{str(path)!r} is damaged: {misfit}; {cure}")
    return found


# --- logs -------------------------------------------------------------------------------------------------


def read_log(path: Path, damaged: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of a .jsonl log. Lines that cannot be read are left out; `damaged` takes a sentence on them."""
    records = [record for _, record in _parse_log(path)]
    bad = [number for number, record in enumerate(records, 1) if record is None]
    if damaged is not None and bad == [len(records)]:
        damaged.append(f"The last line of {path.name} is unfinished and left out, as when a run is killed in writing.")
    elif damaged is not None and bad:
        listed = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        damaged.append(f"{path.name} cannot be read at line {listed}: what stood there is left out.")
    return [record for record in records if record is not None]


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of later steps. A damaged line between good ones stays, so that readers still hear of it."""
    parsed = _parse_log(path)
    good = [number for number, (_, record) in enumerate(parsed, 1) if record is not None and record["step"] <= step]
    kept = [line for line, record in parsed[: max(good, default=0)] if record is None or record["step"] <= step]
    whole = b"".join(line + b"\n" for line in kept)
    if path.is_file() and path.read_bytes() != whole:
        write_whole(path, whole)


def _parse_log(path: Path) -> list[tuple[bytes, dict[str, Any] | None]]:
    """Each line with its record; None where it is no record of a step."""
    if not path.exists():
        return []
    schema, text = SCHEMAS[path.name], read_bytes(inside(path.parent, path.name), LARGEST_LOG)
    if text.count(b"\n") > MOST_LINES:
        raise ConfigError(f"{str(path)!r} has more than the {MOST_LINES:,} lines that are read; {RESTORE}")
    return [(line, _parse_line(line, schema)) for line in text.splitlines()]


def _parse_line(line: bytes, schema: type[Record]) -> dict[str, Any] | None:
    try:
        record = clean(parse_json(line))
    except (ValueError, RecursionError):
        return None
    return None if find_misfit(record, schema) else record


def drop_nan(value: Any) -> Any:
    """Turn NaN and infinities into null: JSON has no word for them."""
    if isinstance(value, dict):
        return {name: drop_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [drop_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
