"""A run as a folder that transformers opens. Experts that were never trained stay what they are: a seed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from some_moe.config import ConfigError
from some_moe.data.tokenizer import BOS, EOS, PAD, SPECIAL_TOKENS, Tokenizer
from some_moe.errors import in_a_sentence
from some_moe.growth.context import Context
from some_moe.growth.library import Voices
from some_moe.hf.card import write_card
from some_moe.hf.modeling import AUTO_MAP, FILE, SHIM, SomeForCausalLM
from some_moe.hf.modeling_some import Library, SomeConfig
from some_moe.model.expert_weights import checksum
from some_moe.model.transformer import SomeLM
from some_moe.system.files import write_tensors, write_whole
from some_moe.system.reading import clean, read_fitting, read_object
from some_moe.system.staging import publish, stage
from some_moe.training.checkpoint import read_state
from some_moe.training.run_folder import CURE
from some_moe.training.runs import Run, load

FILES = ("config.json", "model.safetensors")  # by which an exported folder is known
TAKES_TIME = 1 << 27  # weights; ten million are made and checked in a second
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}  # as `some generate` draws


@in_a_sentence()
def export(
    run: Run | str | Path,
    out: str | Path,
    *,
    standalone: bool = False,
    checkpoint: str = "best",
    base: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write a run as a folder for transformers: AutoModelForCausalLM, AutoTokenizer and pipeline open it.

    run: a run folder, or what `load` gave. out: the new folder. standalone: with the whole model as one file of Python,
    so that nobody needs this package. checkpoint: best, last or step-N. base: where the base of a run with branches is
    now, if it was moved. say: is told what takes time.
    """
    if not str(out):
        raise ConfigError("the folder to write to has no name; give one")
    folder = Path(out)
    refuse_used(folder)
    if not isinstance(run, Run):
        run = load(run, checkpoint=checkpoint, base=base)
    config, tensors = collect(run, say)
    config.auto_map = AUTO_MAP
    with stage(folder, "choose another folder") as scratch:
        config.save_pretrained(scratch)
        write_tensors(scratch / "model.safetensors", tensors, metadata={"format": "pt"})
        make_tokenizer(run.tokenizer, run.config.data.seq_len).save_pretrained(scratch)
        make_generation_config().save_pretrained(scratch)
        write_whole(scratch / f"{FILE}.py", read_modeling() if standalone else SHIM)
        write_whole(scratch / "README.md", write_card(run, config, standalone=standalone))
        with quiet():
            SomeForCausalLM.from_pretrained(scratch)  # what cannot be opened is not handed out
        publish(scratch, folder, last="config.json")
    return folder


@contextmanager
def quiet() -> Iterator[None]:
    """Let transformers draw no progress bars of its own."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def tell(error: object) -> str:
    """What another library says, in one short line."""
    return str(clean(" ".join(str(error).split())))[:200]


def refuse_used(folder: Path) -> None:
    """Refuse to write among files that are none of an export."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is a file; name a folder that is new, empty, or an earlier export")
    is_empty = not folder.exists() or not any(path for path in folder.iterdir() if not path.name.endswith(".tmp"))
    if not is_empty and not is_export(folder):
        raise ConfigError(f"{str(folder)!r} has other files in it; name a folder that is new or empty")


def is_export(folder: Path) -> bool:
    """Whether a folder is one that `export` has written."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    return read_object(folder / "config.json").get("model_type") == SomeConfig.model_type


def read_modeling() -> str:
    """The model in one file."""
    return (resources.files("some_moe.hf") / "modeling_some.py").read_text(encoding="utf-8")


def make_generation_config() -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, **SAMPLING)


def make_tokenizer(tokenizer: Tokenizer, seq_len: int) -> Any:
    """The run's tokenizer for transformers: bos first, padding on the left, and no text that becomes a control id."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Backend.from_str(tokenizer.to_json())
    pad, bos, eos = SPECIAL_TOKENS
    backend.post_processor = TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        model_max_length=seq_len,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_input_names=["input_ids", "attention_mask"],
    )


# --- the weights ----------------------------------------------------------------------------------------------------


def collect(run: Run, say: Callable[[str], None]) -> tuple[SomeConfig, dict[str, Tensor]]:
    """The config, with the experts' checksums, and every tensor that the folder needs."""
    has_branches = (run.path / "grown.json").exists()
    found, num_made, wanted = take_branches(run) if has_branches else take_checkpoint(run)
    config = make_config(run, num_made)
    if has_branches:
        config.num_base = run.model.libraries[0].up.shape[0]
    if has_branches and (context := run.model.context) is not None:
        assert isinstance(context, Context)
        config.looking = [(place.start, place.stop) for place in context.places]
        found |= {"looking_back.words": context.weights * context.words, "looking_back.prior": context.prior}
    if has_branches and run.model.voices is not None:
        assert isinstance(run.model.voices, Voices)
        config.voices = list(run.model.voices.sizes)
        found |= dict(zip(("voices.head_in", "voices.head_out"), run.model.voices.join(), strict=True))
    with torch.device("meta"):
        model = SomeForCausalLM(config)
    libraries = [library for library in model.libraries if library.num_made]
    if len(libraries) != len(wanted):
        raise ConfigError(
            f"{str(run.checkpoint)!r} does not fit this config: it has experts of {len(wanted)} layers, the config of "
            f"{len(libraries)}; use the config that was saved with it"
        )
    for library, expected in zip(libraries, wanted, strict=True):
        made = {"seed": library.seed, "init_method": library.init_method, "dtype": str(library.dtype)[6:]}
        compare(library, {"layer": library.layer} | made, expected)
    count = sum(library.num_made for library in libraries)
    if count * run.config.model.d_ffn * run.config.model.d_model > TAKES_TIME:
        say(f"making {count:,} experts from seed {run.config.model.expert_seed}, one by one, to check them …")
    for library, expected in zip(libraries, wanted, strict=True):
        sum_up(library, expected)
    config.checksums = [expected["checksum"] for expected in wanted]
    own = model.state_dict()
    tensors = {}
    for name, shape in own.items():
        tensor = shape if name.endswith(".library.sums") else found[name.removeprefix("model.")]
        assert tensor.shape == shape.shape, name
        tensors[name] = tensor.detach()
    return config, tensors


def make_config(run: Run, num_made: int | None) -> SomeConfig:
    return SomeConfig(
        run.config.model.model_dump(mode="json"),
        run.config.gravity.model_dump(mode="json"),
        run.config.train.seed,
        num_made,
        max_position_embeddings=run.config.data.seq_len,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        architectures=["SomeForCausalLM"],
        dtype="float32",
    )


def take_checkpoint(run: Run) -> tuple[dict[str, Tensor], int | None, list[dict[str, Any]]]:
    """The tensors of a checkpoint, as many experts as there are, and what it says of those that it does not hold."""
    config = run.config
    state = read_state(run.checkpoint)
    empty = SomeLM(config.model, config.gravity, device="meta").state_dict()
    return read_fitting(run.checkpoint / "model.safetensors", empty, CURE), None, state["libraries"]


def take_branches(run: Run) -> tuple[dict[str, Tensor], int | None, list[dict[str, Any]]]:
    """The same of a base and its branches: all that no seed makes is held."""
    model, config = run.model, run.config.model
    found: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    is_made = config.trainability == "frozen" and config.init_method != "orthogonal"
    num_base, descriptions = model.libraries[0].up.shape[0], []
    for place, library in enumerate(model.libraries):
        weights = library.weights()
        for name in library.matrices():
            whole = getattr(weights, name)
            found[f"blocks.{place}.ffn.library.{name}"] = whole[num_base:] if is_made else whole
        if is_made:
            dtype = str(library.up.dtype).removeprefix("torch.")
            named = {"layer": library.layer, "seed": library.seed, "init_method": library.init_method, "dtype": dtype}
            descriptions.append(named | {"checksum": checksum(library.stacks())})
    return found, num_base if is_made else 0, descriptions


def sum_up(library: Library, expected: dict[str, Any]) -> None:
    """Make each expert of a layer once, and keep its sum."""
    library.sums = torch.zeros(library.num_made, dtype=torch.int64)
    for expert in range(library.num_made):
        library.make(expert, torch.device("cpu"))
    compare(library, {"checksum": f"{int(library.sums.sum()) & 0xFFFFFFFFFFFFFFFF:016x}"}, expected)


def compare(library: Library, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Refuse a layer that the saved model was not made with."""
    for name, value in found.items():
        if expected.get(name) != value:
            raise ConfigError(
                f"the experts of layer {library.layer} have {name} {value!r}, but the saved model was made with "
                f"{expected.get(name)!r}; use the config that was saved with it"
            )
