"""Branches that look back: what came before a token has a say, what comes after has none; a cache changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import some_moe
from some_moe.config import ConfigError, GravityConfig, ModelConfig
from some_moe.growth.context import FADES, ContextRouter
from some_moe.growth.keys import calibrate, score_margins
from some_moe.growth.opening import read_grown
from some_moe.model.attention import Cache
from some_moe.model.layer import SomeLayer
from some_moe.model.router import KeyRouter
from some_moe.model.tokens import TokenInfo
from some_moe.training.runs import Run
from tests.shared.tiny import A1, TINY
from tests.shared.typed import refused

FEW: dict[str, Any] = {"experts": 3, "steps": 4, "changes": {"data.batch_size": 4}, "display": False}
COSINE = {"model.trainability": "full", "model.score": "cosine", "model.center_queries": True}
SIZES, TOP_K = (2, 1), 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base; two branches that look back, and one that does not."""
    path = tmp_path_factory.mktemp("context")
    some_moe.train(A1.config.override(TINY | COSINE), out=path / "base", display=False)
    for name, sign, weight in (("plus", "+", 3.0), ("minus", "-", 1.0), ("plain", "*", 0.0)):
        text = path / f"{name}.txt"
        text.write_text(
            "\n\n".join(f"{number} {sign} {number + 2} is to be found; what is it?" for number in range(60))
        )
        some_moe.grow(path / "base", text, path / name, looks_back=weight, **FEW)
    return path


def make_layer(*weights: float) -> tuple[SomeLayer, ContextRouter]:
    """Six experts of a base, and branches of two and one."""
    config = ModelConfig(d_model=16, num_heads=2, num_experts=9, d_ffn=8, top_k=TOP_K, score="cosine")
    layer = SomeLayer(config, GravityConfig.off())
    router = layer.key_router
    assert router is not None
    router.__class__ = ContextRouter
    assert isinstance(router, ContextRouter)
    router.sizes, router.weights, router.layer, router.info = SIZES, weights, 0, None
    return layer, router


def draw_queries(*shape: int) -> Tensor:
    return torch.randn(*shape, 16, generator=torch.Generator().manual_seed(1))


def test_what_came_before_a_token_has_a_say_and_what_comes_after_has_none() -> None:
    _, router = make_layer(3.0, 2.0)
    query = draw_queries(2, 8)
    scores = router.score(query)
    leaning = router.lean(scores, TOP_K)
    assert not leaning[..., :6].any()
    assert torch.equal(leaning[..., 6], leaning[..., 7])
    spoke = scores[0, :3, 8] - scores[0, :3, :6].topk(TOP_K, dim=-1).values[:, -1]
    weights = torch.tensor([FADES**2, FADES, 1.0])
    assert leaning[0, 2, 8].item() == pytest.approx(2 * float((weights * spoke).sum() / weights.sum()), rel=1e-5)
    later = query.clone()
    later[:, 5:] += 1
    assert torch.equal(router.lean(router.score(later), TOP_K)[:, :5], leaning[:, :5])
    assert not torch.equal(router.lean(router.score(later), TOP_K)[:, 5:], leaning[:, 5:])


def test_documents_of_one_row_are_strangers() -> None:
    _, router = make_layer(3.0, 2.0)
    scores = router.score(draw_queries(2, 8))
    segments = torch.tensor([[0] * 3 + [1] * 5] * 2)
    router.info = TokenInfo.of((2, 8), torch.device("cpu"), segments=segments)
    apart = router.lean(scores, TOP_K)
    router.info = None
    for part in (slice(3), slice(3, None)):
        assert torch.allclose(apart[:, part], router.lean(scores[:, part], TOP_K), atol=1e-5)


def test_weight_zero_chooses_as_if_nothing_looked_back() -> None:
    _, router = make_layer(0.0, 0.0)
    query = draw_queries(2, 8)
    assert all(
        torch.equal(a, b) for a, b in zip(router.choose(query, 2), KeyRouter.choose(router, query, 2), strict=True)
    )


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_the_bias_is_set_by_what_is_chosen_in_context(share: float) -> None:
    layer, router = make_layer(3.0, 2.0)
    lengths = [20, 50, 30] * 40
    queries = draw_queries(sum(lengths))
    router.state.bias[6:] = calibrate(layer, queries, 6, share, lengths)
    chosen = score_margins(layer, queries, 6, lengths) + router.state.bias[6:] > 0
    assert chosen.double().mean(0).tolist() == pytest.approx([share / 3] * 3, abs=1e-3)
    used = torch.cat([(router.choose(row[None], TOP_K)[0][0] >= 6).any(-1) for row in queries.split(lengths)])
    assert int((used != chosen.any(1)).sum()) <= 3  # each expert's last token lies on the border


def logits_of(run: Run) -> Tensor:
    tokens = torch.randint(0, 400, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return run.model(tokens).logits


def test_a_cache_changes_nothing(place: Path) -> None:
    merged = some_moe.merge([place / "plus", place / "plain"], place / "cached")
    tokens = torch.randint(0, 400, (3, 24), generator=torch.Generator().manual_seed(2))
    shares = []
    for favour, pieces in ((0.0, [1] * 24), (1.0, [9, 1, 1, 5, 8]), (2.0, [23, 1]), (4.0, [9, 1, 1, 5, 8])):
        model, cache = some_moe.load(merged.path, favour=favour).model, Cache(24)
        with torch.no_grad():
            whole = model(tokens)
            found = [model(piece, cache=cache).logits for piece in tokens.split(pieces, dim=1)]
        assert torch.allclose(torch.cat(found, 1), whole.logits, atol=1e-5)
        chosen = [routing.experts >= 8 for routing in whole.routings if routing.experts is not None]
        shares.append(float(torch.stack(chosen).double().mean()))
    assert any(0.1 < share < 0.9 for share in shares), shares  # where base and branches take turns


def test_a_run_says_that_its_branch_looks_back_and_the_branch_learns(place: Path) -> None:
    run = some_moe.load(place / "plus")
    assert [branch.looks_back for branch in read_grown(run.path).branches] == [3.0]
    assert all(isinstance(layer.key_router, ContextRouter) for layer in run.model.layers)
    assert run.config.train.fast == "off"
    base = some_moe.load(place / "base").evaluate(data=place / "plus.txt", device="cpu")["loss"]
    assert run.evaluate(data=place / "plus.txt", device="cpu")["loss"] < base
    assert type(some_moe.load(place / "plain").model.layers[0].key_router) is KeyRouter


def test_branches_that_look_back_are_merged_in_any_order_and_leave_no_trace(place: Path, tmp_path: Path) -> None:
    paths = [place / name for name in ("plus", "minus", "plain")]
    one, other = some_moe.merge(paths, tmp_path / "one"), some_moe.merge(paths[::-1], tmp_path / "other")
    assert [branch.looks_back for branch in read_grown(one.path).branches] == [1.0, 0.0, 3.0]
    assert torch.equal(logits_of(one), logits_of(other))
    left = some_moe.prune(some_moe.prune(one.path, "plain", tmp_path / "two").path, "minus", tmp_path / "left")
    assert torch.equal(logits_of(left), logits_of(some_moe.load(place / "plus")))
    alone = some_moe.prune(some_moe.prune(one.path, "plus", tmp_path / "b").path, "minus", tmp_path / "c")
    assert type(alone.model.layers[0].key_router) is KeyRouter
    assert torch.equal(logits_of(alone), logits_of(some_moe.load(place / "plain")))


def test_the_fast_model_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="a library that looks back has no fast form"):
        some_moe.accelerate(some_moe.load(place / "plus").model)


def test_an_export_is_refused_in_one_sentence(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "export", str(place / "plus"), str(tmp_path / "out"))
    assert "looks back, which exported models cannot; grow it with --looks-back 0" in said
    assert not (tmp_path / "out").exists()


def test_bad_weights_are_refused_in_one_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("grow", str(place / "base"), "--data", str(place / "plus.txt"), "--out", str(tmp_path / "out"))
    for value in ("-1", "nan", "1e9"):
        said = refused(capsys, *words, "--looks-back", value)
        assert "is out of range; use 0 (not at all) to 1,000" in said
    assert not (tmp_path / "out").exists()
