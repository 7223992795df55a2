"""A run that reads a stream: scored first, then moved; controls move what they say; the run itself stays as it is."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from some_moe.config import ConfigError, GravityConfig, RunConfig
from some_moe.data.batches import encode_rows
from some_moe.lab import adaptation
from some_moe.lab.adaptation import Reader, adapt, cut_chunks, open_run, read_text, score_moving
from some_moe.model import gravity as rules
from some_moe.model.gravity import beta_now
from some_moe.model.keystore import KeyState
from some_moe.model.transformer import SomeLM
from some_moe.training.runs import Run, load
from tests.shared.typed import listing
from tests.shared.untrained import make_tokenizer, write_run

BASE = RunConfig.model_validate(
    {
        "model": {"d_model": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 300, "num_experts": 6, "d_ffn": 12,
                  "top_k": 2},
        "gravity": {"alpha": 0.3, "beta": 0.05},
        "data": {"seq_len": 24, "batch_size": 4},
        "train": {"device": "cpu", "threads": 1},
    }
)  # fmt: skip
OFF = dict.fromkeys(("gravity.use_alpha", "gravity.use_beta", "gravity.use_delta"), False)
SIZE = 32  # tokens a chunk


def write_text(path: Path, seed: int, words: int = 64) -> Path:
    draw = Random(seed)
    known = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(20)]
    lines = [" ".join(draw.choices(known, k=8)) for _ in range(words // 8)]
    path.write_text("\n\n".join(lines))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "base", BASE)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return {name: write_text(folder / f"{name}.txt", seed) for seed, name in enumerate(("a", "b", "keep", "valid"))}


def read(run: Path, texts: dict[str, Path], stream: str = "ab", **options: Any) -> dict[str, Any]:
    sources = [texts[name] for name in stream]
    return adapt(run, sources, **({"keep": texts["keep"], "chunk_tokens": SIZE, "device": "cpu"} | options))


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["who"]: one for one in found["readers"]}


def test_the_first_chunk_costs_every_reader_what_still_keys_pay(run: Path, texts: dict[str, Path]) -> None:
    readers = by_name(read(run, texts, controls=["random", "bias", "dynamic"]))
    assert list(readers) == ["still", "gravity", "random", "bias", "dynamic"]
    still = readers.pop("still")
    for who, one in readers.items():
        assert one["losses"][0] == still["losses"][0], who
        assert one["losses"][1:] != still["losses"][1:], who


def test_what_comes_later_changes_no_earlier_score(run: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    documents = texts["a"].read_text().split("\n\n")
    other = tmp_path / "other.txt"
    other.write_text("\n\n".join([*documents[:6], *documents[:5:-1]]))
    first, second = (by_name(adapt(run, [text], keep=texts["keep"], chunk_tokens=SIZE)) for text in (texts["a"], other))
    opened = load(run)
    known = sum(len(chunk) for chunk in read_text(other, opened, SIZE).chunks[:3])
    assert known <= 6  # the chunks that are all of the part that stayed
    for who in ("still", "gravity"):
        assert first[who]["losses"][:3] == second[who]["losses"][:3]
        assert first[who]["losses"] != second[who]["losses"]


def test_the_same_stream_gives_the_same_bits(run: Path, texts: dict[str, Path]) -> None:
    found = [read(run, texts, controls=["random", "bias", "dynamic"])["readers"] for _ in range(2)]
    for left, right in zip(*found, strict=True):
        assert left | {"seconds": 0} == right | {"seconds": 0}


def test_still_keys_lose_what_an_evaluation_says(run: Path, texts: dict[str, Path]) -> None:
    found = read(run, texts)
    for name, part in zip("ab", by_name(found)["still"]["texts"], strict=True):
        assert part["loss"] == pytest.approx(load(run).evaluate(data=texts[name], device="cpu")["loss"], abs=1e-5)
    assert by_name(found)["still"]["kept"] == [found["readers"][0]["kept"][0]] * 3


def test_a_control_moves_what_it_names_and_nothing_else(run: Path, texts: dict[str, Path]) -> None:
    opened = open_run(run, {})
    reader = Reader(opened, "cpu")
    text = read_text(texts["a"], opened, SIZE)
    stores = {name for name in reader.begun if ".state." in name}
    for who, may_move in (
        ("still", set()),
        ("gravity", stores),
        ("random", stores),
        ("bias", {name for name in reader.trained if name.endswith("bias")}),
        ("dynamic", reader.trained),
    ):
        found = reader.read([text], who)
        now = reader.model.state_dict()
        moved = {name for name, value in reader.begun.items() if not torch.equal(value, now[name])}
        assert moved <= may_move, who
        assert bool(moved) == (who != "still"), who
        assert any(found.drift) == (who in ("gravity", "random")), who
    assert "head.bias" in moved


def test_random_keys_go_as_far_as_gravity_moved_them_key_by_key(
    run: Path, texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    made: list[torch.Tensor] = []
    plain = rules.displace

    def watch(state: KeyState, old: Any, lengths: torch.Tensor, *rest: Any) -> None:
        plain(state, old, lengths, *rest)
        asked.append(lengths)
        made.append((state.keys - old["keys"]).norm(dim=-1))

    monkeypatch.setattr(adaptation.rules, "displace", watch)
    reader, opened = Reader(open_run(run, {}), "cpu"), load(run)
    stream = [read_text(texts["a"], opened, SIZE)]
    reader.read(stream, "gravity")
    steps = [length for one in reader.steps for length in one]
    reader.read(stream, "random")
    assert len(asked) == len(steps) == 2 * len(stream[0].chunks)
    for wanted, found, length in zip(steps, made, asked, strict=True):
        assert torch.equal(wanted, length)
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


def test_displaced_unit_keys_stay_unit_keys_and_the_chord_is_kept() -> None:
    config = GravityConfig(normalize=True, key_ema=0.5)
    state = KeyState(BASE.model, config, 0, 3)
    old = {name: value.clone() for name, value in state.named_buffers()}
    lengths = torch.linspace(0, 1.2, len(state.keys))
    rules.displace(
        state, old, lengths, torch.randn(state.keys.shape, generator=torch.Generator().manual_seed(0)), config
    )
    torch.testing.assert_close(state.keys.norm(dim=-1), torch.ones(len(lengths)))
    torch.testing.assert_close((state.keys - old["keys"]).norm(dim=-1), lengths, atol=1e-5, rtol=1e-5)
    assert state.smoothed is not None
    torch.testing.assert_close(state.smoothed, (old["smoothed"] + state.keys) / 2)


def test_a_rate_is_chosen_on_valid_and_by_each_reader_for_itself(run: Path, texts: dict[str, Path]) -> None:
    rates = [0.01, 1.0]
    options = {"rates": rates, "valid": [texts["valid"]], "controls": ["random", "dynamic"]}
    found = read(run, texts, "a", **options)
    readers = by_name(found)
    for who in ("gravity", "dynamic"):
        tried = {one["rate"]: one["loss"] for one in found["tried"][who]}
        assert list(tried) == rates
        finite = {rate: loss for rate, loss in tried.items() if loss is not None}
        assert readers[who]["rate"] == min(finite, key=lambda rate: finite[rate])
        alone = by_name(read(run, {**texts, "a": texts["valid"]}, "a", controls=["dynamic"]))[who]
        assert alone["loss"] == pytest.approx(tried[1.0], rel=1e-12)
    assert readers["random"]["rate"] == readers["gravity"]["rate"]
    assert "random" not in found["tried"]


def test_rules_pull_as_they_did_at_the_end_of_the_run(
    run: Path, texts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gravity = GravityConfig(beta=0.003, beta_end=0.0005, beta_schedule="cosine")
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(SomeLM, "gravity_step", lambda _, __, step, total_steps: steps.append((step, total_steps)))
    opened = open_run(run, {})
    opened.step = 7
    Reader(opened, "cpu").read([read_text(texts["a"], opened, SIZE)], "gravity")
    assert [step for step, _ in steps] == [*range(7, 7 + len(steps))]
    assert all(beta_now(gravity, 0, *one) == pytest.approx(0.0005) for one in steps)


def test_rules_given_by_name_are_those_that_move(run: Path, texts: dict[str, Path]) -> None:
    plain, strong = (read(run, texts, changes=changes) for changes in ({}, {"gravity.alpha": 0.9}))
    assert strong["gravity"]["alpha"] == 0.9
    assert by_name(strong)["gravity"]["drift"][-1] > by_name(plain)["gravity"]["drift"][-1]
    assert by_name(strong)["still"]["losses"] == by_name(plain)["still"]["losses"]


def test_moved_keys_are_saved_as_a_run_and_the_run_stays_as_it_was(
    run: Path, texts: dict[str, Path], tmp_path: Path
) -> None:
    before = listing(run)
    found = read(run, texts, controls=["dynamic"], out=tmp_path / "moved")
    assert listing(run) == before
    moved, old = load(tmp_path / "moved"), load(run)
    assert moved.config.name == "moved"
    assert moved.step == old.step
    loss = moved.evaluate(data=texts["keep"], device="cpu")["loss"]
    assert loss == pytest.approx(by_name(found)["gravity"]["kept"][-1], abs=1e-5)
    differs = {
        name for name, value in old.model.state_dict().items() if not torch.equal(value, moved.model.state_dict()[name])
    }
    assert differs
    assert all(".state." in name for name in differs)
    with pytest.raises(ConfigError, match="is not empty"):
        read(run, texts, out=tmp_path / "moved")


def test_the_trigram_counts_what_it_has_scored(
    texts: dict[str, Path], run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = load(run)
    rows = {name: read_text(path, opened, SIZE).rows for name, path in texts.items()}
    own = type("Own", (), {"train": rows["keep"], "valid": rows["valid"]})
    monkeypatch.setattr(Run, "read_data", lambda _: own)
    found = by_name(read(run, texts, "aa", controls=["trigram"]))["trigram"]
    first, second = found["texts"]
    assert second["loss"] < first["loss"] - 0.5  # it has read that text before
    assert len(found["kept"]) == 3


def test_an_evaluation_with_moving_keys_is_one_text_of_a_stream(run: Path, texts: dict[str, Path]) -> None:
    opened = load(run)
    record = score_moving(opened, data=str(texts["a"]), device="cpu")
    size = BASE.data.seq_len * BASE.data.batch_size
    alone = by_name(adapt(run, [texts["a"]], keep=texts["keep"], device="cpu"))["gravity"]
    assert record["adapt"]
    assert record["loss"] == pytest.approx(alone["loss"])
    assert len(alone["losses"]) == len(cut_chunks(read_text(texts["a"], opened, size).rows, size))


def test_chunks_hold_every_row_once_in_order_and_no_more_tokens_than_asked_for() -> None:
    rows = encode_rows(["abc " * count for count in (1, 9, 2, 30, 1, 1, 4)], make_tokenizer(), 24, split=True)
    chunks = cut_chunks(rows, 20)
    assert [row for chunk in chunks for row in chunk.to_lists()] == rows.to_lists()
    assert all(len(chunk) == 1 or chunk.lengths.sum() <= 20 for chunk in chunks)
    assert any(len(chunk) > 1 for chunk in chunks)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"controls": ["nobody"]}, "--controls 'nobody' is unknown; use all, or some of still,"),
        ({"rates": [1.0, 2.0]}, "--rate has 2 values, and what is reported must not choose: give texts by --valid"),
        ({"valid": ["a"]}, "--valid chooses among rates"),
        ({"rates": [0.0]}, "--rate 0.0 is out of range"),
        ({"chunk_tokens": 3}, "--chunk-tokens 3 is out of range; use 16 to 65,536"),
        ({"chunk_tokens": 9_999, "stream": "a"}, "one chunk: nothing is read after keys have moved"),
        ({"changes": {"model.top_k": 1}}, "model.top_k is the run's and stays as it is"),
        ({"changes": OFF}, "is off, and its keys would stay; switch a rule on"),
        ({"changes": {"gravity.key_ema": 0.5}}, "does not fit"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_in_a_sentence(
    run: Path, texts: dict[str, Path], options: dict[str, Any], sentence: str
) -> None:
    if "valid" in options:
        options = options | {"valid": [texts["valid"]]}
    with pytest.raises(ConfigError) as caught:
        read(run, texts, **options)
    assert sentence in str(caught.value)


def test_what_is_reported_chooses_no_rate(run: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(texts["b"].read_text())
    with pytest.raises(ConfigError, match=r"copy\.txt is in --valid and in --stream"):
        read(run, texts, rates=[1.0, 2.0], valid=[texts["valid"], copy])


def test_texts_that_hold_nothing_are_refused(run: Path, texts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no text"):
        adapt(run, [texts["a"], tmp_path / "empty.txt"])
    with pytest.raises(ConfigError, match=r"--stream .*absent\.txt' does not exist"):
        adapt(run, [tmp_path / "absent.txt"])
    with pytest.raises(ConfigError, match="names no text"):
        adapt(run, [])


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ({"router": "hash"}, "router: hash"),
        ({"router": "learned"}, "router: learned"),
        ({"ffn": "dense", "dense_width": 8}, "ffn: dense"),
    ],
)
def test_models_without_keys_that_move_are_refused(
    tmp_path: Path, texts: dict[str, Path], model: dict[str, Any], word: str
) -> None:
    config = BASE.override({f"model.{name}": value for name, value in model.items()} | OFF)
    path = write_run(tmp_path / "other", config)
    with pytest.raises(ConfigError, match=f"has no keys that gravity moves .{word}"):
        adapt(path, [texts["a"]])
    with pytest.raises(ConfigError, match="has no keys that gravity moves"):
        score_moving(load(path), data=str(texts["a"]))


def test_branches_are_refused(texts: dict[str, Path], tmp_path: Path) -> None:
    path = write_run(tmp_path / "grown", BASE)
    (path / "grown.json").write_text("{}")
    with pytest.raises(ConfigError, match="has branches, whose keys stay"):
        adapt(path, [texts["a"]])
