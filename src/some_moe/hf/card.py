"""The model card of an exported run: results, parameters, seed and checksums, and how to load it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from some_moe import __version__
from some_moe.config.parameters import count_parameters
from some_moe.hf.modeling_some import SomeConfig
from some_moe.layout import ABSENT, Column, format_markdown, format_number
from some_moe.system.reading import clean
from some_moe.training.runs import Run

LOADING = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

folder = "."  # this folder, or its name on the Hub
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
write = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(write("Once upon a time", max_new_tokens=50)[0]["generated_text"])
```
"""
SCORES = {
    "test_loss": ("test", "nats per token", ".4f"),
    "test_bits_per_byte": ("test", "bits per byte", ".4f"),
    "best_val_loss": ("validation", "nats per token (best)", ".4f"),
    "val_loss": ("validation", "nats per token (last step)", ".4f"),
    "bits_per_byte": ("validation", "bits per byte (last step)", ".4f"),
}


def write_card(run: Run, config: SomeConfig, *, standalone: bool) -> str:
    """README.md for the folder."""
    name = str(clean(run.config.name))
    needs = (
        "torch and transformers (5.17 or later): the model is in `modeling_some.py`"
        if standalone
        else f"torch, transformers and some-moe ({__version__} wrote it): `pip install 'some-moe[hf]'`"
    )
    sections = [
        f"---\n{yaml.safe_dump(describe(run, name), sort_keys=False, allow_unicode=True)}---",
        f"# {quote(name)}",
        "A SoME language model (Self-Organizing Mixture of Experts): each token's query is compared with the experts' "
        f"keys, and the nearest {config.model['top_k']} experts run."
        if config.model["ffn"] == "some"
        else "A baseline of SoME (Self-Organizing Mixtures of Experts): a dense feed-forward layer in every block.",
        "## How to load it",
        f"It needs {needs}. `trust_remote_code=True` runs `modeling_some.py`.\n{LOADING.rstrip()}",
        "## Parameters",
        format_rows(("", "parameters"), count(run, config), numeric=True),
        *describe_experts(run, config),
        "## Results",
        *describe_results(run),
    ]
    return "\n\n".join(sections) + "\n"


def quote(text: str) -> str:
    """Text of a stranger's config, that Markdown leaves as it is."""
    return f"`{text.replace('`', ' ')}`"


def format_rows(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, numeric: bool = False) -> str:
    columns = [Column(head, numeric=numeric and place > 0) for place, head in enumerate(heads)]
    return "\n".join(format_markdown(columns, rows))


def describe(run: Run, name: str) -> dict[str, Any]:
    """What the Hub reads."""
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["some-moe", "mixture-of-experts", "frozen-experts"],
        "model_name": name,
    }
    found = run.result or {}
    metrics = [
        {"type": "bits_per_byte" if "byte" in what else "loss", "name": f"{split}, {what}", "value": round(value, 4)}
        for key, (split, what, _) in SCORES.items()
        if isinstance(value := found.get(key), int | float)
    ]
    if metrics:
        source = name_source(run)
        task = {"task": {"type": "text-generation"}, "dataset": {"type": "text", "name": source}, "metrics": metrics}
        data["model-index"] = [{"name": name, "results": [task]}]
    return data


def name_source(run: Run) -> str:
    """The data's name, without where it lay."""
    source = str(clean(run.config.data.source))
    return source if source.startswith("hf:") else Path(source).name


def count(run: Run, config: SomeConfig) -> list[tuple[str, ...]]:
    """Rows of numbers: in all, made from the seed, and in the file."""
    model = run.config.model
    total = count_parameters(model).total
    experts, width = (model.num_experts, model.d_ffn) if model.ffn == "some" else (1, model.dense_width)
    made = 0 if model.ffn == "dense" else config.count_made(experts) * model.num_layers
    each = width * (model.d_model + 1) + (0 if model.shared_down else model.d_model * (width + 1))
    rows = {"in all": total, "made from the seed": made * each, "in `model.safetensors`": total - made * each}
    return [(name, f"{number:,}") for name, number in rows.items()]


def describe_experts(run: Run, config: SomeConfig) -> list[str]:
    """Which experts no file holds, and how to tell that they are the right ones."""
    model = run.config.model
    if model.ffn == "dense":
        return []
    facts = f"{model.num_experts} experts in each of {model.num_layers} layers, {model.top_k} of which run for a token"
    if model.ffn != "some":
        facts = f"one frozen expert in each of {model.num_layers} layers"
    if not config.checksums:
        return ["## Experts", f"{facts[0].upper()}{facts[1:]}; all of them are in the file."]
    made = config.made_experts or model.num_experts
    which = f"The first {made} of each layer were" if made < model.num_experts and model.ffn == "some" else "They were"
    told = (
        f"{facts[0].upper()}{facts[1:]}. {which} never trained: each is made from `expert_seed` {model.expert_seed} "
        "when it is first chosen, and compared with its saved checksum. Those of whole layers, as in `config.json`:"
    )
    rows = [(str(layer), f"`{value}`") for layer, value in enumerate(config.checksums)]
    return ["## Experts", told, format_rows(("layer", "checksum"), rows)]


def describe_results(run: Run) -> list[str]:
    """The figures of the finished run."""
    result = run.result
    if result is None:
        return ["The run has no result of its own: it was not trained to its end, or put together from others."]
    scores = [
        (split, what, format_number(result.get(key), form, absent=ABSENT))
        for key, (split, what, form) in SCORES.items()
    ]
    data, steps = quote(name_source(run)), result["steps"]
    said = f"Trained on {data} for {steps:,} steps ({result['tokens']:,} tokens), seed {run.config.train.seed}."
    return [said, format_rows(("split", "", "value"), scores)]
