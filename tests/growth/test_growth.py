"""Branches: nothing of the base changes, their order is of no account, and what is taken out leaves no trace."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import some_moe
from some_moe.cli import main
from some_moe.config import ConfigError, TrainingStoppedError
from some_moe.glass.figures.keys import draw_branches
from some_moe.glass.inspect.branches import list_owners, measure_branches
from some_moe.glass.inspect.collection import ARRAYS, Collection
from some_moe.glass.inspect.interventions import exchange_experts, knock_out, stand_in
from some_moe.glass.inspect.projections import KeyMap
from some_moe.growth.api import begin_branch, make_branch
from some_moe.growth.keys import collect_queries
from some_moe.growth.library import BranchedLibrary, widen
from some_moe.growth.opening import read_grown, set_favour
from some_moe.growth.sharing import FAVOURS, score_texts, served
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.sinks.display import Display
from some_moe.training.runs import Run
from tests.shared.tiny import A1, TINY
from tests.shared.typed import listing, refused

KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "full": {"model.trainability": "full", "model.score": "cosine"},
    "lora": {"model.trainability": "lora", "model.lora_rank": 2},
    "odd": {"model.center_queries": True, "gravity.key_ema": 0.5, "model.grounding": 0.1,
            "model.init_method": "orthogonal"},
    "gradient-keys": {"model.router": "learned", "gravity.use_alpha": False, "gravity.use_beta": False,
                      "gravity.use_delta": False},
}  # fmt: skip
EMPTY = ARRAYS.keys() - {"tokens", "experts"}
FEW: dict[str, Any] = {"experts": 3, "steps": 6, "changes": {"data.batch_size": 4}, "display": False}
FEW |= {"looks_back": 0.0, "head_rank": 2}


def write_sums(path: Path, seed: int, sign: str) -> Path:
    draw = Random(seed)
    numbers = [(draw.randrange(99), draw.randrange(99)) for _ in range(60)]
    path.write_text("\n\n".join(f"{a} {sign} {b} is what we are to find; we write {b} below {a}." for a, b in numbers))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of every kind, and a branch on each of two texts for the first of them."""
    path = tmp_path_factory.mktemp("growth")
    os.environ["SOME_CACHE"] = str(tmp_path_factory.getbasetemp() / "cache")
    for kind, changes in KINDS.items():
        some_moe.train(A1.config.override(TINY | changes), out=path / kind, display=False)
    for name, sign in (("plus", "+"), ("minus", "-")):
        write_sums(path / f"{name}.txt", 0, sign)
        trainability = "full" if name == "plus" else "lora"
        some_moe.grow(path / "frozen", path / f"{name}.txt", path / name, trainability=trainability, **FEW)
    return path


def logits_of(run: Run) -> Tensor:
    return logits_of_model(run.model)


def logits_of_model(model: SomeLM) -> Tensor:
    tokens = torch.randint(0, 400, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens).logits


def weights_in(run: Path) -> bytes:
    return (some_moe.load(run).checkpoint / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_base_changes(place: Path, tmp_path: Path, kind: str) -> None:
    before = listing(place / kind)
    grown = some_moe.grow(place / kind, place / "plus.txt", tmp_path / "grown", **FEW)
    assert listing(place / kind) == before
    old, new = some_moe.load(place / kind).model, some_moe.load(grown.path).model
    names = [name for name, _ in old.named_parameters() if ".library." not in name and ".keys" not in name]
    assert len(names) > 20
    for name in names:
        assert torch.equal(old.get_parameter(name), new.get_parameter(name)), name
    for a, b in zip(old.layers, new.layers, strict=True):
        assert isinstance(b.library, BranchedLibrary)
        assert a.state is not None
        assert b.state is not None
        for name, value in a.state.state_dict().items():
            now = getattr(b.state, name)
            assert torch.equal(value, now[: len(value)] if value.dim() else now), name
        joined = b.library.weights()
        if kind != "lora":  # whose update is folded into the matrices
            for name, stack in zip(a.library.matrices(), a.library.stacks(), strict=True):
                assert torch.equal(stack, getattr(joined, name)[:8])
    unused = logits_of(some_moe.load(grown.path, favour=-1e9))
    assert torch.allclose(unused, logits_of(some_moe.load(place / kind)), rtol=0, atol=2e-6)
    assert not torch.equal(unused, logits_of(some_moe.load(grown.path, favour=1e9)))


@pytest.mark.parametrize("trainability", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_begins_as_its_base(place: Path, kind: str, trainability: str) -> None:
    base = some_moe.load(place / kind)
    before, rows = logits_of(base), base.read_data().train
    queries = collect_queries(base.model, rows, base.config)
    model = widen(base.model, [make_branch("new", 3, trainability, 2)])
    reached = begin_branch(model, queries, queries, 0.3, seed=0)
    assert reached > 0.1
    now = logits_of_model(model)
    assert torch.allclose(now, before, rtol=0, atol=2e-6)  # scores are rounded otherwise among more keys
    for favour in (-1e9, 1e9):  # by nobody, and by the branch alone
        set_favour(model, favour)
        assert torch.equal(logits_of_model(model), now)


def test_a_branch_is_added_to_what_the_base_says(place: Path) -> None:
    run = some_moe.load(place / "plus", favour=0.5)
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(0))
    layer, base = run.model.layers[0], some_moe.load(place / "frozen").model.layers[0]
    info = TokenInfo.of((2, 9), "cpu")
    assert layer.query is not None
    assert layer.key_router is not None
    assert base.key_router is not None
    with torch.no_grad():
        gates, routing = layer.key_router(layer.query(x), info, 2)
        old_gates, old = base.key_router(base.query(x), info, 2)  # type: ignore[misc]
        said = layer.run_experts(x, gates, routing) - base.run_experts(x, old_gates, old)
        assert routing.base_experts is not None
        assert routing.experts is not None
        assert torch.equal(routing.base_experts, old.experts)  # type: ignore[arg-type]
        assert torch.equal(routing.base_gates, old_gates)  # type: ignore[arg-type]
        weights = layer.library.weights()
        for row, at in np.ndindex(2, 9):
            expected = torch.zeros(32)
            for gate, expert in zip(gates[row, at], routing.experts[row, at].tolist(), strict=True):
                if expert >= 8:
                    hidden = F.gelu(weights.up[expert] @ x[row, at] + weights.up_bias[expert])
                    expected += gate * (weights.down[expert] @ hidden + weights.down_bias[expert])
            assert torch.allclose(said[row, at], expected, atol=1e-6)
    assert (routing.experts >= 8).any(-1).float().mean() not in (0, 1)


def test_branches_of_the_first_format_are_refused(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(place / "plus", tmp_path / "plus"))
    record = json.loads((copy / "grown.json").read_text())
    assert record["format_version"] == 2
    for version in (1, 3, None):
        old = record | {"format_version": version}
        (copy / "grown.json").write_text(json.dumps({name: value for name, value in old.items() if value is not None}))
        sentence = f"has branches of format {version or 1}, and this program reads format 2; grow them again"
        for words in (("eval", str(copy)), ("merge", str(copy), "--out", str(tmp_path / "out"))):
            assert sentence in refused(capsys, *words)
    assert not (tmp_path / "out").exists()


def test_a_branch_learns_its_text_and_says_so(place: Path) -> None:
    run = some_moe.load(place / "plus")
    base = some_moe.load(place / "frozen").evaluate(data=place / "plus.txt", device="cpu")["loss"]
    assert run.evaluate(data=place / "plus.txt", device="cpu")["loss"] < base
    assert run.result is not None
    new = 3 * (2 * 32 * 32 + 32 + 32) * 2 + 2 * (32 + run.config.model.vocab_size)
    assert run.result["trainable_parameters"] == new
    assert run.result["total_parameters"] == new + sum(some_moe.load(place / "frozen").model.count_parameters()[1:])
    grown = read_grown(run.path)
    assert [branch.name for branch in grown.branches] == ["plus"]
    shares = [point.new_share for point in grown.curve]
    assert shares == sorted(shares)
    assert [point.favour for point in grown.curve] == list(FAVOURS)


def test_what_is_saved_is_the_branch_alone(place: Path) -> None:
    for name, parts in (
        ("plus", {"up", "up_bias", "down", "down_bias"}),
        ("minus", {"up_in", "up_out", "down_in", "down_out"}),
    ):
        saved = load_file(some_moe.load(place / name).checkpoint / "model.safetensors")
        assert {key.rpartition(".")[2] for key in saved if ".library." in key} == parts | {
            "near",
            "head_in",
            "head_out",
        }
        assert not [key for key in saved if ".library." not in key and ".state." not in key]


def test_the_order_of_merging_is_of_no_account(place: Path, tmp_path: Path) -> None:
    one = some_moe.merge([place / "plus", place / "minus"], tmp_path / "one")
    other = some_moe.merge([place / "minus", place / "plus"], tmp_path / "other")
    assert weights_in(one.path) == weights_in(other.path)
    assert torch.equal(logits_of(one), logits_of(other))
    rows = one.read_data().test
    shares = served(one.model, rows, one.config)
    assert len(shares) == 3
    assert sum(shares) == pytest.approx(1)
    first, second = score_texts(one, [place / "plus.txt", place / "minus.txt"], device="cpu")
    assert list(first["shares"]) == ["base", "minus", "plus"]
    assert first["loss"] == one.evaluate(data=place / "plus.txt", device="cpu")["loss"] != second["loss"]


def test_what_is_pruned_leaves_no_trace(place: Path, tmp_path: Path) -> None:
    both = some_moe.merge([place / "plus", place / "minus"], tmp_path / "both")
    left = some_moe.prune(both.path, "minus", tmp_path / "left")
    never = some_moe.merge([place / "plus"], tmp_path / "never")
    assert weights_in(left.path) == weights_in(never.path)
    assert torch.equal(logits_of(left), logits_of(some_moe.load(place / "plus")))
    again = some_moe.merge([left.path, place / "minus"], tmp_path / "again")  # merged ones too
    assert weights_in(again.path) == weights_in(both.path)


class Dying(Display):
    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def advance(self, step: int) -> None:
        if step == self.at:
            raise DiedError


class DiedError(BaseException):
    """Stands for a process that is gone."""


@pytest.mark.parametrize(
    ("trainability", "looks_back"), [pytest.param("full", 0.0, marks=pytest.mark.slow), ("lora", 2.0)]
)
def test_growing_that_was_killed_ends_with_the_same_bits(
    place: Path, tmp_path: Path, trainability: str, looks_back: float
) -> None:
    often = FEW | {"trainability": trainability, "changes": {"data.batch_size": 4, "train.save_every": 2}}
    often["looks_back"] = looks_back
    whole = some_moe.grow(place / "full", place / "plus.txt", tmp_path / "a" / "grown", **often)
    for at in (1, 3, 5):
        with pytest.raises(DiedError):
            some_moe.grow(
                place / "full",
                place / "plus.txt",
                tmp_path / "b" / "grown",
                **often | {"display": Dying(at)},
                resume=True,
            )
    again = some_moe.grow(place / "full", place / "plus.txt", tmp_path / "b" / "grown", **often, resume=True)
    assert weights_in(whole.path) == weights_in(again.path)
    old, new = (json.loads((run.path / "grown.json").read_text()) for run in (whole, again))
    assert {**old, "base": ""} == {**new, "base": ""}


def test_a_base_that_was_moved_is_found_by_name(place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place / "plus", tmp_path / "deep" / "plus"))
    with pytest.raises(ConfigError, match=r"the base of '.*plus' is not at '.*frozen'; give its folder with --base"):
        some_moe.load(copy).model  # noqa: B018
    assert torch.equal(logits_of(some_moe.load(copy, base=place / "frozen")), logits_of(some_moe.load(place / "plus")))


def change_base(place: Path, tmp_path: Path, change: Callable[[Path], object]) -> Run:
    for name in ("frozen", "plus"):
        shutil.copytree(place / name, tmp_path / name)
    change(tmp_path / "frozen")
    return some_moe.load(tmp_path / "plus")


def test_a_base_that_was_changed_is_refused(place: Path, tmp_path: Path) -> None:
    def change_a_weight(path: Path) -> None:
        step = some_moe.load(path).checkpoint
        weights = load_file(step / "model.safetensors")
        save_file(weights | {"head.bias": weights["head.bias"] + 1e-7}, step / "model.safetensors")
        state = json.loads((step / "state.json").read_text())
        digest = hashlib.sha256((step / "model.safetensors").read_bytes()).hexdigest()
        (step / "state.json").write_text(
            json.dumps(state | {"hashes": state["hashes"] | {"model.safetensors": digest}})
        )

    def change_a_word(path: Path) -> None:
        text = (path / "tokenizer.json").read_text()
        (path / "tokenizer.json").write_text(text.replace("the", "teh", 1))

    for number, change in enumerate((change_a_weight, change_a_word)):
        changed = change_base(place, tmp_path / str(number), change)
        with pytest.raises(ConfigError, match=r"is not the base that '.*' was grown on, or was changed since; restore"):
            changed.model  # noqa: B018


def test_bad_input_is_one_sentence_and_touches_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, plus, minus, text = (str(place / name) for name in ("frozen", "plus", "minus", "plus.txt"))
    (tmp_path / "short.txt").write_text("Too short.")
    short = str(tmp_path / "short.txt")
    dense, single = {"model.ffn": "dense", "model.dense_width": 8}, {"model.top_k": 1}
    for name, changes in (("dense", dense), ("single", single)):
        some_moe.train(A1.config.override(TINY | changes | {"gravity.use_alpha": False, "gravity.use_beta": False,
                       "gravity.use_delta": False}), out=tmp_path / name, display=False)  # fmt: skip
    both = str(some_moe.merge([plus, minus], tmp_path / "both").path)
    other = str(some_moe.grow(place / "full", text, tmp_path / "other", **FEW).path)
    twin = str(shutil.copytree(plus, tmp_path / "twin"))
    before, out = listing(tmp_path), str(tmp_path / "out")
    for words, sentence in (
        (("grow", base, "--out", out), "a branch grows on a text; give a file or a folder with --data"),
        (("grow", base, "--data", short, "--out", out), "leaves no valid story"),
        (
            ("grow", base, "--data", text, "--out", out, "--experts", "0"),
            "--experts 0 is out of range; use 1 to 65,536",
        ),
        (("grow", base, "--data", text, "--out", out, "--steps", "0"), "--steps 0 is out of range"),
        (("grow", base, "--data", text, "--out", out, "--trainability", "half"), "--trainability 'half' is unknown"),
        (("grow", base, "--data", text, "--out", out, "--model.top-k", "3"), "model.top_k is the base's and stays"),
        (("grow", base, "--data", text, "--out", out, "--share", "2"), "--share 2.0 is out of range"),
        (("grow", base, "--data", text, "--out", out, "--favour", "nan"), "--favour nan is no number"),
        (("grow", plus, "--data", text, "--out", out), "has branches already; grow its base"),
        (
            ("grow", str(tmp_path / "dense"), "--data", text, "--out", out),
            "has no keys that could be added to (ffn: dense)",
        ),
        (("grow", str(tmp_path / "single"), "--data", text, "--out", out), "has top_k 1"),
        (("grow", base, "--data", text, "--out", plus), "is not empty"),
        (("merge", plus, other, "--out", out), "was grown on another base than"),
        (("merge", plus, plus, "--out", out), "is in"),
        (("merge", plus, twin, "--base", base, "--out", out), "give each branch once"),
        (("merge", both, plus, "--out", out), "the branch 'plus'"),
        (("merge", base, "--out", out), "has no branches; give a run that `some grow` or `some merge` made"),
        (("merge", plus, minus, "--out", plus), "is not empty"),
        (("prune", both, "--branch", "none", "--out", out), "has no branch 'none'; it has minus, plus"),
        (("prune", plus, "--branch", "plus", "--out", out), "is the only branch of"),
        (("train", "--resume", both), "was merged, and is not trained"),
    ):
        assert sentence in refused(capsys, *words), words
    assert listing(tmp_path) == before


def test_the_commands_do_it(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, out = str(place / "frozen"), str(tmp_path / "grown")
    few = ("--experts", "2", "--steps", "3", "--data.batch-size", "4")
    assert main(["grow", base, "--data", str(place / "plus.txt"), "--out", out, *few]) == 0
    said = capsys.readouterr().out
    assert "2 new experts in each of 2 layers" in said
    assert re.search(
        r"^[\d.]+% of the new text's tokens find them, and 2\.0% of the kept text's may$", said, re.MULTILINE
    )
    assert main(["merge", out, str(place / "minus"), "--out", str(tmp_path / "both")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'both'}: grown, minus\n"
    assert main(["prune", str(tmp_path / "both"), "--branch", "grown", "--out", str(tmp_path / "left")]) == 0
    for words in (["eval"], ["generate", "--max-tokens", "3"]):
        assert main([words[0], str(tmp_path / "both"), *words[1:]]) == 0
    assert main(["trace", str(tmp_path / "both"), "3 + 4", "--html", str(tmp_path / "page.html")]) == 0


def test_interrupted_growing_names_the_command_that_goes_on(place: Path, tmp_path: Path) -> None:
    class Stopping(Display):
        def advance(self, step: int) -> None:
            if step == 2:
                os.kill(os.getpid(), 2)

    with pytest.raises(
        TrainingStoppedError, match=r"interrupted at step \d, which is saved; continue with: some train"
    ):
        some_moe.grow(place / "frozen", place / "plus.txt", tmp_path / "g", **FEW | {"display": Stopping()})
    assert some_moe.train(resume=tmp_path / "g", display=False).result is not None


def test_a_page_shows_branches_whatever_is_left_out_of_their_record(place: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(place / "minus", tmp_path / "minus"))
    record = json.loads((copy / "grown.json").read_text())
    for left_out in ("kept", "favour", "curve", "merged", "lora_rank"):
        less = {name: value for name, value in record.items() if name != left_out}
        less["branches"] = [{n: v for n, v in branch.items() if n != left_out} for branch in record["branches"]]
        (copy / "grown.json").write_text(json.dumps(less))
        some_moe.report(copy, analyze=False)
        assert "by a low-rank update of rank 8" in (copy / "report.md").read_text()


def test_trace_takes_a_moved_base_and_another_favour(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = str(shutil.copytree(place / "plus", tmp_path / "deep" / "plus"))
    assert "is not at" in refused(capsys, "trace", copy, "3 + 4", "--json")
    found = {}
    for favour in ("-1e9", "1e9"):
        words = ["trace", copy, "3 + 4", "--base", str(place / "frozen"), "--favour", favour, "--json"]
        assert main(words) == 0
        tokens = json.loads(capsys.readouterr().out)["tokens"]
        found[favour] = {expert for token in tokens for layer in token["experts"] for expert in layer}
    assert max(found["-1e9"]) < 8 <= min(found["1e9"])
    opened = some_moe.load(copy, base=place / "frozen", favour=1e9)
    again = {expert for token in some_moe.trace(opened, "3 + 4").findings["tokens"] for expert in token["experts"][0]}
    assert min(again) >= 8
    assert "--favour nan is no number" in refused(
        capsys, "eval", copy, "--base", str(place / "frozen"), "--favour", "nan"
    )


def test_words_that_a_branch_took_over_are_counted_by_hand(place: Path) -> None:
    tokenizer = some_moe.load(place / "plus").tokenizer
    ids = [tokenizer.encode(word)[0] for word in ("a", "b")]
    meta = {"num_experts": 5, "split": "valid"}
    tokens = np.array([ids[0], ids[1]] * 6, np.int32)
    experts = np.zeros((2, 12, 2), np.int16)  # everything is the base's …
    experts[:, 1::2, 0] = 3  # … but for a half of each b
    experts[1, 0, 1] = 4  # and a quarter of one a, by another branch
    gates = np.full((2, 12, 2), 0.5, np.float32)
    gates[0, 1, 0] = 0.25  # one b leaves the base more
    seen = Collection(
        meta=meta, tokens=tokens, experts=experts, gates=gates, **dict.fromkeys(EMPTY - {"gates"}, np.zeros(0))
    )
    branches = [{"name": "one", "experts": 2}, {"name": "two", "experts": 1}]
    base, one, two = measure_branches({"branches": branches}, seen, tokenizer)
    assert list_owners({"branches": branches}, 5)[1].tolist() == [0, 0, 1, 1, 2]
    assert (base["name"], base["words"]) == ("base", [])
    assert one["share"] == pytest.approx(0.25 - 0.25 / 24, abs=1e-6)
    assert base["share"] == pytest.approx(1 - one["share"] - two["share"], abs=2e-6)
    assert one["words"] == [
        {"text": tokenizer.decode([ids[1]]), "count": 6, "share": pytest.approx(0.5 - 0.25 / 12, abs=1e-4)}
    ]
    assert two["by_layer"] == pytest.approx([0, 1 / 24], abs=1e-6)
    assert two["words"] == [
        {"text": tokenizer.decode([ids[0]]), "count": 6, "share": pytest.approx(0.25 / 6, abs=1e-4)}
    ]


@pytest.mark.slow
def test_the_page_shows_the_keys_and_words_of_each_branch(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = some_moe.merge([place / "plus", place / "minus"], tmp_path / "both").path
    moved = str(shutil.move(both, tmp_path / "deep" / "both"))
    base = ("--base", str(place / "frozen"))
    few = ("--max-tokens", "300", "--no-guilds", "--device", "cpu")
    assert main(["analyze", moved, *few]) == 2
    assert "is not at" in capsys.readouterr().err
    assert main(["analyze", moved, *few, *base, "--favour", "5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in found["branches"]] == ["base", "minus", "plus"]
    assert sum(part["share"] for part in found["branches"]) == pytest.approx(1, abs=1e-5)
    assert found["collected"]["favour"] == 5
    assert "keys_branches" in [figure["name"] for figure in found["figures"]]
    assert main(["report", moved, *base, "--favour", "5"]) == 0  # which is there already
    assert "analysing" not in capsys.readouterr().err
    page = (Path(moved) / "report.md").read_text()
    assert "Words it took over" in page
    assert "at favour +5.0" in page
    assert "keys_branches.png" in page
    assert main(["report", moved, *base, "--favour", "-1e9"]) == 0
    assert "analysing" in capsys.readouterr().err
    assert re.search(r"\| base \| 100\.0% \|", (Path(moved) / "report.md").read_text())
    sentence = "--base and --favour go with one run"
    assert sentence in refused(capsys, "report", moved, str(place / "plus"), *base)


def test_experts_of_branches_are_exchanged_and_taken_away_as_others_are(place: Path) -> None:
    run = some_moe.load(place / "plus", favour=1e9)
    layer = run.model.layers[0]
    x, gates = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)), torch.ones(5, 1)
    order = np.roll(np.arange(11), 1)

    def compute(expert: int, base: int = 2) -> Tensor:
        chosen, beneath = (torch.full((5, 1), one) for one in (expert, base))
        found: Tensor = layer.library(x, chosen, gates, beneath, gates)
        return found

    with torch.no_grad():
        old, new = compute(2), compute(9)
        assert not torch.equal(old, new)
        with stand_in(*exchange_experts(layer, order)):
            assert torch.equal(compute(3, base=3), old)
            assert torch.equal(compute(10, base=3), new)
        assert torch.equal(compute(9), new)
        with stand_in(knock_out(layer, [8, 9])):
            routing = run.model(torch.full((1, 4), 7)).routings[0]
    assert routing.experts is not None
    assert {10} < set(routing.experts.flatten().tolist()) <= {*range(8), 10}


def test_a_map_of_branches_bears_any_name() -> None:
    draw = np.random.default_rng(0)
    maps = [KeyMap(method="pca", points=draw.normal(size=(5, 2)))] * 2
    layers = [SimpleNamespace(layer=number, loads=[0.0, 1, 2, 3, 4]) for number in range(2)]
    names = ["base", "_a$b$^", "x" * 300]
    drawing = draw_branches(maps, layers, names, np.array([0, 0, 1, 1, 2]))  # type: ignore[arg-type]
    drawing.figure.draw_without_rendering()
    legend = [text.get_text() for text in drawing.figure.legends[0].get_texts()]
    assert legend[0] == "base"
    assert legend[1].endswith(r"_a\$b\$^")
    assert len(legend[2]) < 50
