"""Exported folders: what is in them, what opens them, and what is refused."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import some_moe
from some_moe.cli import main
from some_moe.config import ConfigError, RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.hf import SomeConfig, SomeForCausalLM, export, modeling_some
from some_moe.model.expert_weights import checksum
from some_moe.training.generation import generate_tokens
from tests.hf.test_models import (
    CLASSES,
    IDS,
    compare_everything,
    compare_halves,
    compare_logits,
    quiet_generate,
    small_config,
)
from tests.shared.typed import refused
from tests.shared.untrained import make_tokenizer, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "small", small_config("plain"))


@pytest.fixture(scope="module")
def folder(run: Path) -> Path:
    assert main(["export", str(run), str(run.parent / "out")]) == 0
    return run.parent / "out"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """An exported folder to change."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


# --- what is in it --------------------------------------------------------------------------------------------------


def test_no_frozen_expert_is_in_the_file_and_the_config_knows_their_seed(run: Path, folder: Path) -> None:
    names = load_file(folder / "model.safetensors").keys()
    assert not [name for name in names if name.endswith((".up", ".down"))]
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["expert_seed"] == 7
    wanted = [library.checksum() for library in some_moe.load(run).model.libraries]
    assert config["checksums"] == wanted


def test_the_sums_of_experts_are_parts_of_their_layers_checksum(run: Path) -> None:
    library = some_moe.load(run).model.libraries[1]
    parts = [modeling_some.add_bits([stack[e] for stack in library.stacks()], e) for e in library.experts]
    assert f"{sum(parts) & 0xFFFFFFFFFFFFFFFF:016x}" == checksum(library.stacks())


def test_the_card_tells_parameters_seed_checksums_and_how_to_load(run: Path, folder: Path) -> None:
    card = (folder / "README.md").read_text()
    config = some_moe.load(run).config
    assert f"| in all | {count_parameters(config.model).total:,} |" in card
    assert "`expert_seed` 7" in card
    assert all(value in card for value in json.loads((folder / "config.json").read_text())["checksums"])
    assert "trust_remote_code=True" in card
    from huggingface_hub import ModelCard

    assert ModelCard(card).data.library_name == "transformers"


def test_the_same_run_gives_the_same_bytes(run: Path, folder: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "again")
    assert {f.name: f.read_bytes() for f in folder.iterdir()} == {
        f.name: f.read_bytes() for f in (tmp_path / "again").iterdir()
    }


# --- what opens it --------------------------------------------------------------------------------------------------


def test_the_tokenizer_gives_our_ids_and_pads_on_the_left(folder: Path) -> None:
    ours, theirs = make_tokenizer(), AutoTokenizer.from_pretrained(folder)
    for text in ("abc defg", "  two  spaces\n", "naïve ☃", "a <|eos|> in the text", ""):
        assert theirs(text).input_ids == [1, *ours.encode(text)]
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    batch = theirs(["abc", "abc defg abc"], padding=True, return_tensors="pt")
    assert set(batch) == {"input_ids", "attention_mask"}
    assert int(batch.input_ids[0, 0]) == theirs.pad_token_id == 0


def test_a_pipeline_writes_a_batch_as_it_writes_each_text(folder: Path) -> None:
    write = pipeline("text-generation", model=str(folder))
    texts, options = ["abc", "defg hab abc"], {"max_new_tokens": 4, "do_sample": False}
    each = [write(text, **options)[0]["generated_text"] for text in texts]
    assert all(found.startswith(text) and found != text for found, text in zip(each, texts, strict=True))
    assert [found[0]["generated_text"] for found in write(texts, batch_size=2, **options)] == each


def test_the_same_seed_draws_the_same_text(folder: Path) -> None:
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(folder)
        drawn.append(model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("kind", CLASSES)
def test_every_way_to_generate_gives_our_tokens(run: Path, folder: Path, kind: str) -> None:
    model = CLASSES[kind].from_pretrained(folder)
    tokens = torch.stack(list(generate_tokens(some_moe.load(run).model, IDS[:1], 8)), 1)
    for options in ({"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 3}, {"num_beams": 1}):
        assert torch.equal(quiet_generate(model, IDS[:1], **options), tokens)
    assert quiet_generate(model, IDS, num_beams=3).shape == (2, 8)


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_saved_again_is_the_same(folder: Path, kind: str, tmp_path: Path) -> None:
    model = CLASSES[kind].from_pretrained(folder)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists(), "in several files"
    again = CLASSES[kind].from_pretrained(tmp_path)
    assert again.config.checksums == model.config.checksums
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_is_cast_keeps_its_keys_and_writes(folder: Path, kind: str, dtype: torch.dtype) -> None:
    whole, model = CLASSES[kind].from_pretrained(folder), CLASSES[kind].from_pretrained(folder).to(dtype)
    with torch.no_grad():
        compare_halves(model, whole, whole(IDS).logits)
    assert quiet_generate(model, IDS).shape == (2, 8)


def test_few_experts_can_be_kept_and_the_rest_made_again(folder: Path) -> None:
    for kind in CLASSES.values():
        model = kind.from_pretrained(folder)
        lean = kind.from_pretrained(folder, kept_experts=2)
        assert all(not library.made for library in lean.libraries), "nothing is made before it is chosen"
        with torch.no_grad():
            torch.testing.assert_close(lean(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
        assert all(1 <= len(library.made) <= 2 for library in lean.libraries)


def test_all_experts_at_once_are_the_same_experts(folder: Path) -> None:
    model = SomeForCausalLM.from_pretrained(folder)
    assert all(len(library.made) == library.num_made for library in model.make_experts().libraries)
    with torch.no_grad():
        whole = model(IDS).logits
        assert torch.equal(model(IDS).logits, whole)
        assert all(library.stacks is not None for library in model.libraries)  # type: ignore[attr-defined]
        torch.testing.assert_close(whole, SomeForCausalLM.from_pretrained(folder)(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CLASSES)
def test_more_tokens_leave_the_old_ones_as_they_were(folder: Path, kind: str, tmp_path: Path) -> None:
    model = CLASSES[kind].from_pretrained(folder)
    with torch.no_grad():
        before = model(IDS).logits
        model.resize_token_embeddings(before.shape[-1] + 8, mean_resizing=False)
        torch.testing.assert_close(model(IDS).logits[..., :-8], before, rtol=0, atol=1e-5)
        model.save_pretrained(tmp_path)
        assert torch.equal(CLASSES[kind].from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)


def test_hidden_states_and_embeddings_go_in_and_out(folder: Path) -> None:
    for kind in CLASSES.values():
        model = kind.from_pretrained(folder)
        with torch.no_grad():
            found = model(IDS, output_hidden_states=True)
            other = model(inputs_embeds=model.get_input_embeddings()(IDS), return_dict=False)
        assert len(found.hidden_states) == model.config.num_hidden_layers + 1
        assert torch.equal(model.model.head(found.hidden_states[-1]), found.logits)
        assert torch.equal(other[0], found.logits)


def test_a_model_made_anew_is_saved_with_its_checksums(tmp_path: Path) -> None:
    config = small_config("sparse")
    values = config.model.model_dump(mode="json"), config.gravity.model_dump(mode="json")
    for name, kind in CLASSES.items():
        model = kind(SomeConfig(*values, seed=3)).eval()
        model.save_pretrained(tmp_path / name)
        again = kind.from_pretrained(tmp_path / name)
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_a_config_may_leave_out_what_has_a_default(tmp_path: Path) -> None:
    small = {
        "d_model": 16,
        "num_layers": 1,
        "num_heads": 2,
        "vocab_size": 300,
        "num_experts": 4,
        "d_ffn": 8,
        "top_k": 2,
    }
    model = AutoModelForCausalLM.from_config(SomeConfig(small)).eval()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)
    with pytest.raises(ConfigError, match="top_k 5 is more than num_experts 4"):
        SomeForCausalLM(SomeConfig(small | {"top_k": 5}))


# --- grown and merged runs ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "lora", "full", "orthogonal", "bfloat16-experts"])
def test_branches_travel_without_their_base(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    base = write_run(tmp_path / "base", small_config(kind).override({"data.seq_len": 32}))
    options: dict[str, Any] = {"experts": 2, "steps": 2, "display": False, "changes": {"data.batch_size": 4}}
    for name, how in (("one", "full"), ("two", "lora")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} abc {n} defg {n * n} hab" for n in range(60)))
        some_moe.grow(base, tmp_path / f"{name}.txt", tmp_path / name, trainability=how, **options)
    merged = some_moe.merge([tmp_path / "one", tmp_path / "two"], tmp_path / "both", favour=2.0)
    for name, loaded in (("one", some_moe.load(tmp_path / "one")), ("both", merged)):
        with torch.no_grad():
            wanted, model = loaded.model(IDS).logits, loaded.model
        export(tmp_path / name, tmp_path / "out" / name)
        compare_logits(tmp_path / "out" / name, wanted)
        chosen = torch.cat([routing.experts.flatten() for routing in model(IDS).routings])  # type: ignore[union-attr]
        assert name == "one" or bool((chosen >= 6).any()), "the branches are used"


@pytest.mark.slow
def test_branches_that_look_back_travel_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_CACHE", str(tmp_path / "cache"))
    base = write_run(tmp_path / "base", small_config("centred").override({"data.seq_len": 32}))
    options: dict[str, Any] = {"experts": 2, "steps": 2, "display": False, "changes": {"data.batch_size": 4}}
    for name, looks_back in (("one", 3.0), ("two", 0.0), ("three", 1.0)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"{name} abc {n} defg {n * n} hab" for n in range(60)))
        some_moe.grow(base, tmp_path / f"{name}.txt", tmp_path / name, looks_back=looks_back, **options)
    merged = some_moe.merge([tmp_path / name for name in ("one", "two", "three")], tmp_path / "all", favour=1.0)
    with torch.no_grad():
        output = merged.model(IDS)
    shares = [routing.gates[routing.experts >= 6] for routing in output.routings]
    assert any(bool(((share > 0.05) & (share < 0.5)).any()) for share in shares), "base and branches share tokens"
    export(merged, tmp_path / "out")
    compare_everything(merged.model, tmp_path / "out", tmp_path / "again")
    model = SomeForCausalLM.from_pretrained(tmp_path / "out")
    beams = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6, "eos_token_id": None}
    with_cache, without = (model.generate(IDS, use_cache=use, **beams) for use in (True, False))
    assert torch.equal(with_cache, without), "what was said is put in the order of the beams"
    with pytest.raises(ValueError, match="by the words before, too; give input_ids"):
        model(inputs_embeds=torch.zeros(1, 3, model.config.hidden_size))


# --- what is refused ------------------------------------------------------------------------------------------------


def wrong_seed(config: dict[str, Any]) -> None:
    config["model"]["expert_seed"] = 8


def wrong_checksum(config: dict[str, Any]) -> None:
    config["checksums"][1] = "0" * 16


def no_checksums(config: dict[str, Any]) -> None:
    config["checksums"] = None


def other_init(config: dict[str, Any]) -> None:
    config["model"]["init_method"] = "sparse"


def one_layer_less(config: dict[str, Any]) -> None:
    config["model"]["num_layers"] = 2


def one_checksum_more(config: dict[str, Any]) -> None:
    config["checksums"].append("0" * 16)


def keep_none(config: dict[str, Any]) -> None:
    config["kept_experts"] = 0


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_seed, "expert 0 of layer 0, made from expert_seed 8, is not the one"),
        (wrong_checksum, "layer 1 have the checksum 0000000000000000 in config.json, but"),
        (no_checksums, "layer 0 have the checksum None in config.json"),
        (other_init, "expert 0 of layer 0, made from expert_seed 7, is not the one"),
        (one_layer_less, "has model.blocks.2.attention.key.bias, which the config does not"),
        (one_checksum_more, "has the checksums of 4 layers, which is too many"),
        (keep_none, "kept_experts 0 is no number of experts; use 1 or more"),
    ],
)
def test_a_changed_config_is_refused(copy: Path, kind: str, change: Any, words: str) -> None:
    change_config(copy, change)
    with pytest.raises(ValueError, match=words) as caught:
        CLASSES[kind].from_pretrained(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", ["model.blocks.0.ffn.key_router.state.keys", "model.blocks.1.ffn.library.sums"])
def test_a_tensor_that_is_missing_is_refused(copy: Path, kind: str, name: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"has no {name}"):
        CLASSES[kind].from_pretrained(copy)


@pytest.mark.parametrize("kind", CLASSES)
def test_an_expert_that_is_not_the_saved_one_is_refused_when_it_is_chosen(copy: Path, kind: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(".library.sums"):  # the layer's sum stays as it was
            tensor[4] += 1
            tensor[5] -= 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    model = CLASSES[kind].from_pretrained(copy)
    with pytest.raises(ValueError, match=r"expert [45] of layer 0"):
        model(torch.arange(3, 203).view(4, 50))


def test_bad_input_is_one_sentence(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a run" in refused(capsys, "export", str(tmp_path / "none"), str(tmp_path / "out"))
    assert "has other files" in refused(capsys, "export", str(run), str(run))
    assert "is a file" in refused(capsys, "export", str(run), str(run / "config.yaml"))
    assert "no checkpoint 'step-9'" in refused(
        capsys, "export", str(run), str(tmp_path / "o"), "--checkpoint", "step-9"
    )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "o").exists()


def test_a_run_whose_seed_was_changed_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", small_config("plain"))
    RunConfig.load(run / "config.yaml").override({"model.expert_seed": 8}).save(run / "config.yaml")
    assert "the saved model was made with 7;" in refused(capsys, "export", str(run), str(tmp_path / "out"))
    assert not [*(tmp_path / "out").glob("*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "words", "sentence"),
    [
        (
            "transformers",
            ["export", "{run}", "{run}-out"],
            "some_moe.hf needs transformers; run pip install 'some-moe[hf]'",
        ),
        (
            "lm_eval",
            ["eval", "{run}", "--tasks", "some_bytes"],
            "--tasks needs lm-eval; run pip install 'some-moe[eval]'",
        ),
    ],
)
def test_a_missing_package_is_one_sentence(run: Path, package: str, words: list[str], sentence: str) -> None:
    given = [word.format(run=run) for word in words]
    program = f"import sys; sys.modules[{package!r}] = None; from some_moe.cli import main; sys.exit(main({given!r}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"some: {sentence}\n"


def test_a_transformers_too_old_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")  # a lazy module, not what import names
    with pytest.raises(ConfigError, match=r"transformers 4.57.1 is too old for some_moe.hf; run pip install"):
        importlib.reload(some_moe.hf)


# --- what the page says ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of whatever transformers thinks of a program without a __main__
def test_the_pages_python_runs_as_it_is_printed(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "huggingface.md"
    blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    export(run, "hf/smoke")
    names: dict[str, Any] = {}
    for block, kind in zip(blocks, ("SomeForCausalLM", "SomeForCausalLM", "SomeGPT2LMHeadModel"), strict=True):
        exec(block, names)
        assert type(names["model"]).__name__ == kind


# --- in another process -----------------------------------------------------------------------------------------------

PROGRAM = """
import sys
if {without}:
    sys.modules["some_moe"] = None  # to import it fails
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
import torch
folder = {folder!r}
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
pipeline("text-generation", model=model, tokenizer=tokenizer)("abc", max_new_tokens=3)
model.save_pretrained(folder + "-again")
again = AutoModelForCausalLM.from_pretrained(folder + "-again", trust_remote_code=True)
ids = torch.tensor({ids})
with torch.no_grad():
    assert torch.equal(model(ids).logits, again(ids).logits)
    torch.save(model(ids).logits, folder + ".pt")
print(type(model).__module__, "some_moe" in sys.modules and sys.modules["some_moe"] is not None)
"""


@pytest.mark.slow
@pytest.mark.parametrize("standalone", [True, False])
def test_a_fresh_process_opens_it_with_the_package_or_without(run: Path, tmp_path: Path, standalone: bool) -> None:
    folder = tmp_path / "out"
    export(run, folder, standalone=standalone)
    program = PROGRAM.format(without=standalone, folder=str(folder), ids=IDS.tolist())
    environment = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    module, has_package = done.stdout.split()[-2:]
    assert has_package == str(not standalone)
    assert module.startswith("transformers_modules." if standalone else "some_moe.hf")
    found: Tensor = torch.load(tmp_path / "out.pt", weights_only=True)
    with torch.no_grad():
        torch.testing.assert_close(found, some_moe.load(run).model(IDS).logits, rtol=0, atol=1e-5)
