"""Guilds: one that was planted is found and judged by its causal effect; where none was, none is reported."""

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from some_moe.config import ConfigError, DataConfig, GravityConfig, ModelConfig, RunConfig
from some_moe.data.batches import Rows, encode_rows
from some_moe.data.tokenizer import Tokenizer
from some_moe.glass.inspect.collect import collect
from some_moe.glass.inspect.collection import Collection
from some_moe.glass.inspect.forms import GUILDS
from some_moe.glass.inspect.guilds import LEVEL, Effort, Study, analyze_guilds, rows_of, whole_stories
from some_moe.glass.inspect.interventions import Probe
from some_moe.glass.inspect.labels import label_tokens
from some_moe.model.tokens import TokenInfo
from some_moe.model.transformer import SomeLM
from some_moe.stories.generator import tell_many
from some_moe.system.forms import fit
from some_moe.training.checkpoint import name_memory, save_checkpoint
from some_moe.training.loop import Progress
from some_moe.training.runs import Run

DATA = DataConfig(source="stories", seq_len=320, val_subset_size=24, batch_size=8)
MODEL = ModelConfig(
    d_model=32,
    num_layers=2,
    num_heads=2,
    vocab_size=1500,
    num_experts=12,
    d_ffn=16,
    top_k=2,
    query="linear",
    trainability="full",  # so that a checkpoint holds the planted experts
)
LITTLE = Effort(
    key_tokens=2_600,
    trial_tokens=2_600,
    num_shuffles=319,
    num_key_draws=319,
    num_described_draws=3,
    num_key_shuffles=2,
    num_sets=8,
    num_exchanges=1,
    num_community_shuffles=3,
    num_bootstraps=32,
    fewest_knock_outs=0,
)
GUILD = (2, 5, 7)


@cache
def make_tokenizer() -> Tokenizer:
    return Tokenizer.train([story.text for story in tell_many(200, seed=0)], MODEL.vocab_size)


@cache
def read_book() -> Rows:
    return encode_rows([story.text for story in tell_many(24, seed=1)], make_tokenizer(), DATA.seq_len)


def choose_rows(seed: int, count: int) -> Rows:
    """Some stories of the validation book, in order."""
    book = read_book()
    chosen = np.sort(np.random.default_rng(seed).choice(len(book), count, replace=False))
    pieces = [book[int(story)] for story in chosen]
    return Rows(np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]))


def lay_out(rows: Rows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and stories."""
    stories = [rows[i].astype(np.int64) for i in range(len(rows))]
    story = np.repeat(np.arange(len(rows)), rows.lengths)
    return np.concatenate([s[:-1] for s in stories]), np.concatenate([s[1:] for s in stories]), story


@torch.no_grad()
def plant_guild(model: SomeLM, tokens: np.ndarray, story: np.ndarray, seed: int) -> None:
    """Verbs share a direction, three experts of the first layer have keys in it, and each writes the same mark."""
    random = torch.Generator().manual_seed(seed)
    tags = label_tokens(tokens, story, tokenizer=make_tokenizer(), data=DATA, split="valid")[0]
    is_verb = tags.labels == tags.classes.index("verb")
    verbs = [word for word in np.unique(tokens[is_verb]) if is_verb[tokens == word].mean() > 0.6]
    direction = torch.randn(MODEL.d_model, generator=random)
    direction = F.normalize(direction - direction.mean(), dim=0)  # LayerNorm would take a mean away
    model.embedding.weight[verbs] += model.embedding.weight.norm(dim=1).mean() * direction
    layer = model.layers[0]
    (network,) = (module for module in layer.query.modules() if isinstance(module, nn.Linear))
    network.weight.copy_(torch.eye(MODEL.d_model))
    network.bias.zero_()
    mark = layer.library.down_bias[GUILD[0]].clone()
    for expert in GUILD:
        aside = F.normalize(torch.randn(MODEL.d_model, generator=random), dim=0)
        layer.state.keys[expert] = F.normalize(direction + 0.3 * aside, dim=0)
        layer.state.bias[expert] = -1.5  # other words stay away
        layer.library.down_bias[expert] = mark


@torch.no_grad()
def fit_head(model: SomeLM, probe: Probe, targets: np.ndarray) -> None:
    """Set the head to the linear discriminant of the next token, so that the loss depends on what experts write."""
    seen: list[torch.Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    tokens = probe.batch.inputs
    model(tokens, TokenInfo.of(tokens.shape, tokens.device, counted=probe.batch.real, ids=tokens))
    handle.remove()
    x, y = seen[0][probe.batch.real].double(), torch.from_numpy(targets)
    counts, mean = torch.bincount(y, minlength=MODEL.vocab_size), x.mean(0)
    centres = torch.zeros(MODEL.vocab_size, MODEL.d_model).double().index_add_(0, y, x - mean)
    centres /= counts[:, None] + 3
    rest = x - mean - centres[y]
    weight = torch.linalg.solve(rest.T @ rest / len(x) + 0.01 * torch.eye(MODEL.d_model), centres.T).T
    model.head.weight.copy_(weight)
    model.head.bias.copy_((counts + 0.1).log() - 0.5 * (weight * centres).sum(1) - weight @ mean)


def make_run(seed: int, *, planted: bool, num_stories: int = 12, **changes: object) -> tuple[Run, Collection]:
    """A small model that reads stories, with or without a guild for verbs in its first layer."""
    config = RunConfig(name="small", model=MODEL.override(changes), gravity=GravityConfig.off(), data=DATA)
    model = SomeLM(config.model, config.gravity, seed=seed).eval()
    rows = choose_rows(seed, num_stories)
    tokens, targets, story = lay_out(rows)
    with torch.no_grad():
        for layer in model.layers:
            layer.library.down_bias.mul_(4)  # every expert leaves its mark
    if planted:
        plant_guild(model, tokens, story, seed)
    fit_head(model, Probe(tokens, targets, story), targets)
    run = Run(Path("small"), config, tokenizer=make_tokenizer(), model=model, step=0)
    return run, collect(run, rows, split="valid")


def change_run(run: Run, **parts: Any) -> Run:
    """The run with other parts."""
    known = {name: getattr(run, name) for name in ("path", "config", "tokenizer", "model", "step")}
    return Run(**(known | parts))


def save_run(run: Run, folder: Path) -> Path:
    folder.mkdir()
    run.config.save(folder / "config.yaml")
    (folder / "tokenizer.json").write_text(run.tokenizer.to_json(), encoding="utf-8")
    optimizer = torch.optim.SGD(run.model.parameters())
    state = asdict(Progress()) | {"best_step": 0, "libraries": [], "data_digest": ""}
    save_checkpoint(folder / "checkpoints", dict(run.model.state_dict()), name_memory(run.model, optimizer), state)
    return folder


def supported(report: dict[str, Any]) -> list[dict[str, Any]]:
    return [guild for guild in report["guilds"] if guild["verdict"] == "supported"]


def smallest_p(report: dict[str, Any]) -> float:
    """Of the association of all families that could have guilds, corrected."""
    return min(
        layer["p_adjusted"] for family in report["families"] if not family["describes"] for layer in family["layers"]
    )


def find_by_chance(seeds: range) -> tuple[int, int]:
    """In how many models without a planted guild is one supported, and in how many is any layer associated?"""
    reports = []
    for seed in seeds:
        run, collection = make_run(seed, planted=False, num_stories=5)
        reports.append(Study(run, collection, LEVEL, seed, LITTLE).report())
    return sum(bool(supported(one)) for one in reports), sum(smallest_p(one) <= LEVEL for one in reports)


def check_planted(report: dict[str, Any]) -> None:
    """The verb guild is supported, and its knock-out hurts verbs and hardly anything else."""
    (guild,) = supported(report)
    assert (guild["layer"], guild["family"], guild["class"]) == (0, "part of speech", "verb")
    assert set(guild["experts"]) == set(GUILD)
    knockout = guild["knockout"]
    assert knockout["class_change"] > 0.2
    assert abs(knockout["other_change"]) < 0.1
    assert knockout["class_change"] > 3 * abs(knockout["random_class_change"])
    assert knockout["interval"][0] > 0


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Collection, dict[str, Any]]:
    run, collection = make_run(0, planted=True)
    folder = save_run(run, tmp_path_factory.mktemp("runs") / "planted")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    report = analyze_guilds(folder, collection, effort=LITTLE)
    assert {path: path.read_bytes() for path in before} == before
    return folder, collection, report


def test_a_planted_guild_is_found_and_its_knock_out_hurts_its_class_alone(
    planted: tuple[Path, Collection, dict[str, Any]],
) -> None:
    check_planted(planted[2])


def test_the_report_has_the_form_that_pages_ask_for(planted: tuple[Path, Collection, dict[str, Any]]) -> None:
    folder, collection, report = planted
    filed = json.loads(json.dumps(report, allow_nan=False))
    assert filed == report
    assert fit(filed, GUILDS)["guilds"]
    assert report["of"] == collection.digest()
    assert not (folder / "analysis").exists()
    assert report["num_tokens"] == len(collection.tokens)
    assert [family["family"] for family in report["families"]] == [
        *("part of speech", "role", "plot part"),
        *("identity", "frequency"),
    ]
    for family in report["families"]:
        for layer in family["layers"]:
            assert layer["mi_corrected_bits"] == pytest.approx(layer["mi_bits"] - layer["null_mean_bits"])
            assert layer["interval"][0] <= layer["interval"][1]
            assert 0 < layer["p_value"] <= layer["p_adjusted"] <= 1
            assert len(layer["random_keys_nmi"]) == LITTLE.num_described_draws
    assert [one["layer"] for one in report["communities"]] == [0, 1]
    assert [one["layer"] for one in report["swap"]] == [0, 1]
    assert all(one["interval"][0] <= one["loss_change"] <= one["interval"][1] for one in report["swap"])
    assert report["control"] is None
    assert report["notes"]


def test_a_card_quotes_its_words_as_they_stand(planted: tuple[Path, Collection, dict[str, Any]]) -> None:
    (guild,) = supported(planted[2])
    stories = [make_tokenizer().decode(row) for row in rows_of(planted[1]).to_lists()]
    counts = [word["count"] for word in guild["words"]]
    assert counts == sorted(counts, reverse=True)
    assert len(guild["contexts"]) > 1
    for context, word in zip(guild["contexts"], guild["words"], strict=False):
        assert context["word"] == word["text"]
        text = context["before"] + context["word"] + context["after"]
        assert text in stories[context["story"]]


def test_every_card_has_a_verdict_and_one_sentence(planted: tuple[Path, Collection, dict[str, Any]]) -> None:
    for guild in planted[2]["guilds"]:
        assert guild["verdict"] in ("supported", "not supported")
        assert guild["reason"].endswith(".")
        assert guild["q_value"] <= LEVEL
    assert planted[2]["passed"]["knockout"] == len(supported(planted[2]))


@pytest.mark.slow
def test_planted_guilds_are_found_in_most_other_models() -> None:
    """Harm beyond displacement is extrapolated from sets that displace less: with so little text it may be unsure."""
    found = 0
    for seed in range(1, 8):
        run, collection = make_run(seed, planted=True)
        report = Study(run, collection, LEVEL, seed, LITTLE).report()
        if supported(report):
            check_planted(report)
            found += 1
    assert found >= 4


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 6), marks=pytest.mark.slow)], ids=str)
def test_no_guild_is_reported_where_none_was_planted(seeds: range) -> None:
    assert find_by_chance(seeds)[0] == 0


@pytest.mark.slow
def test_of_20_models_without_guilds_at_most_one_reports_one() -> None:
    assert find_by_chance(range(20))[0] <= 1


@pytest.mark.slow
def test_of_200_models_without_guilds_hardly_any_reports_one() -> None:
    guilds, associations = find_by_chance(range(200))
    print(f"{guilds} of 200 report a supported guild; {associations} pass the association test alone")
    assert guilds <= 7  # 2 expected at a level of 1 %; more than 7 has a chance of 0.1 %
    assert associations <= 7


def test_a_control_on_the_same_text_is_stored_beside(
    planted: tuple[Path, Collection, dict[str, Any]], tmp_path: Path
) -> None:
    folder, collection, report = planted
    run, _ = make_run(0, planted=False)
    other = save_run(run, tmp_path / "control")
    found = analyze_guilds(folder, collection, effort=LITTLE, control=other)
    assert found["guilds"] == report["guilds"]
    assert found["control"]["run"] == "control"  # its folder's name: twins often share the name in their config
    assert not supported(found["control"])
    assert found["control"]["num_tokens"] == found["num_tokens"]
    assert not (other / "analysis").exists()


def test_a_control_with_another_tokenizer_is_refused(
    planted: tuple[Path, Collection, dict[str, Any]], tmp_path: Path
) -> None:
    run, _ = make_run(0, planted=False)
    tokenizer = Tokenizer.train(["other text"], 300)
    other = save_run(change_run(run, tokenizer=tokenizer), tmp_path / "control")
    with pytest.raises(ConfigError, match="another tokenizer"):
        analyze_guilds(planted[0], planted[1], control=other, effort=LITTLE)


def test_bad_input_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run, collection = make_run(1, planted=False, num_stories=3)
    folder = save_run(run, tmp_path / "run")
    moved = replace(collection, experts=(collection.experts + 1) % MODEL.num_experts)
    with pytest.raises(ConfigError, match="does not fit the model"):
        analyze_guilds(folder, moved, effort=LITTLE)
    config = run.config.override({"model.ffn": "dense", "model.dense_width": 8})
    dense = change_run(run, config=config, model=SomeLM(config.model))
    with pytest.raises(ConfigError, match="has no SoME layer"):
        analyze_guilds(save_run(dense, tmp_path / "dense"), collection)
    with pytest.raises(ConfigError, match="has no SoME layer"):
        analyze_guilds(folder, collection, control=tmp_path / "dense")
    assert not (folder / "analysis").exists()


@pytest.mark.parametrize(
    "changes", [{"router": "hash"}, {"router": "learned"}, {"top_k": 1}, {"num_layers": 3, "router": "weights"}]
)
def test_every_kind_of_router_is_analysed(changes: dict[str, object]) -> None:
    run, collection = make_run(2, planted=False, num_stories=4, **changes)
    report = Study(run, collection, LEVEL, 0, replace(LITTLE, fewest_knock_outs=1)).report()
    json.dumps(report, allow_nan=False)
    has_keys = changes.get("router") != "hash"
    assert all(bool(layer["random_keys_nmi"]) == has_keys for f in report["families"] for layer in f["layers"])
    assert len(report["communities"]) == (0 if "top_k" in changes else run.config.model.num_layers)
    assert not supported(report)


def test_text_without_tags_is_tagged() -> None:
    run, collection = make_run(3, planted=False, num_stories=4)
    run = change_run(run, config=run.config.override({"data.source": "somewhere.txt"}))
    report = Study(run, collection, LEVEL, 0, LITTLE).report()
    names = [family["family"] for family in report["families"]]
    assert names == ["part of speech", "place in story", "identity", "frequency"]
    assert "tagger" in report["labels"]


def test_the_same_seed_gives_the_same_report() -> None:
    run, collection = make_run(4, planted=False, num_stories=3)
    one, again = (Study(run, collection, LEVEL, 5, LITTLE).report() for _ in range(2))
    assert one == again


def test_stories_are_kept_whole() -> None:
    story = np.repeat([0, 1, 2], [5, 3, 4])
    assert [whole_stories(story, most) for most in (1, 5, 7, 8, 12, 99)] == [5, 5, 5, 8, 12, 12]
