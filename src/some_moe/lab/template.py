"""A config.yaml to begin with: every setting with its meaning, and a schema by which editors complete and check it."""

import json
import textwrap
from pathlib import Path
from typing import Any, get_args

import yaml

from some_moe.config import Config, ConfigError, RunConfig
from some_moe.config.base import field_docs
from some_moe.system.files import write_whole

DIALECT = "https://json-schema.org/draft/2020-12/schema"
WIDTH = 108  # of comments, within a room
# Set in every file, whether at its default or not: what most runs change, and at least one of every room.
ALWAYS = {
    "name", "d_model", "num_layers", "num_heads", "num_experts", "d_ffn", "top_k", "alpha", "beta", "delta", "source",
    "seq_len", "batch_size", "learning_rate", "epochs", "seed",
}  # fmt: skip


def make_schema() -> dict[str, Any]:
    """The JSON schema of config.yaml: names, kinds, bounds, choices and meanings."""
    schema = RunConfig.model_json_schema()
    for room in (RunConfig, *map(type, vars(RunConfig()).values())):
        part = schema if room is RunConfig else schema["$defs"].get(room.__name__)  # a room, or a plain value
        for name, text in field_docs(room).items() if part else ():
            part["properties"][name]["description"] = text
    return {"$schema": DIALECT} | schema


def write_config(path: Path, config: RunConfig, *, force: bool = False) -> Path:
    """Write `config` with every setting's meaning, and beside it the schema; return the schema's place."""
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"{str(path)!r} is not a config file; give a name that ends in .yaml")
    schema = path.with_suffix(".schema.json")
    for place in (path, schema):
        if place.is_dir() or (place.exists() and not force and place == path):
            raise ConfigError(f"{str(place)!r} is there already; choose another name, or add --force")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {str(path.parent)!r} does not exist; make it, or choose another place")
    write_whole(schema, json.dumps(make_schema(), indent=1, ensure_ascii=False) + "\n")
    write_whole(path, format_config(config, schema.name))
    return schema


def format_config(config: RunConfig, schema: str) -> str:
    """The file's text: what differs from the defaults, and the main settings, are set; the others stand as comments."""
    lines = [
        f"# yaml-language-server: $schema=./{schema}",
        "# Settings of a run, for `some train --config`. What stands behind a # without a space is at its default:",
        "# take the # away to change it. Every setting is a flag, too: --model.top-k 2.",
        "",
    ]
    values, defaults = config.model_dump(mode="json"), RunConfig().model_dump(mode="json")
    for name, field in RunConfig.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Config):
            about = " ".join((inner.__doc__ or "").split())
            lines += ["", f"# {about}", f"{name}:"]
            for one, value in values[name].items():
                lines += format_field(inner, one, value, defaults[name][one], "  ")
        elif name != "format_version":
            lines += format_field(RunConfig, name, values[name], defaults[name], "")
    return "\n".join([*lines, "", f"format_version: {values['format_version']}", ""])


def format_field(room: type[Config], name: str, value: Any, default: Any, indent: str) -> list[str]:
    """A field's meaning and choices as a comment, and its line: a comment too, where it is at its default."""
    words = [word for word in get_args(room.model_fields[name].annotation) if isinstance(word, str)]
    about = field_docs(room)[name] + (f" One of {', '.join(words)}." if words else "")
    wrapped = textwrap.wrap(about, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    shown = yaml.safe_dump({name: value}, default_flow_style=True, width=10_000).strip()[1:-1]
    is_set = value != default or name in ALWAYS
    return [*wrapped, f"{indent}{'' if is_set else '#'}{shown}"]
