"""Branches that look back: what came before a token has a say, what comes after has none; a cache changes nothing."""

import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import some_moe
from some_moe.config import ConfigError, GravityConfig, ModelConfig
from some_moe.growth.context import FADES, FLOOR, Context, let_speak, set_prior, sum_rows
from some_moe.growth.library import BranchRouter, widen
from some_moe.growth.opening import read_grown, set_favour
from some_moe.model.attention import Cache
from some_moe.model.transformer import SomeLM
from some_moe.system.records import Branch
from some_moe.training.runs import Run
from tests.shared.tiny import A1, TINY
from tests.shared.typed import refused

FEW: dict[str, Any] = {
    "experts": 3,
    "steps": 4,
    "changes": {"data.batch_size": 4, "train.learning_rate": 3e-3},
    "display": False,
}
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


def make_model(*weights: float) -> SomeLM:
    """A base of six experts, and branches of two and one, whose words say what was drawn."""
    config = ModelConfig(
        d_model=16, num_heads=2, num_experts=6, num_layers=2, d_ffn=8, top_k=TOP_K, vocab_size=300, score="cosine"
    )
    how: dict[str, Any] = {"trainability": "full"}
    branches = [
        Branch(name=str(n), experts=size, looks_back=weight, **how)
        for n, (size, weight) in enumerate(zip(SIZES, weights, strict=True))
    ]
    model = widen(SomeLM(config, GravityConfig.off()), branches)
    for number, words in enumerate(words_of(model)):
        words.copy_(torch.randn(300, generator=torch.Generator().manual_seed(number)))
    return model


def words_of(model: SomeLM) -> list[Tensor]:
    return [value for name, value in model.named_buffers() if ".branches." in name and name.endswith(".words")]


def context_of(model: SomeLM) -> Context:
    assert isinstance(model.context, Context)
    return model.context


def set_priors(model: SomeLM, prior: float) -> None:
    for branch in context_of(model).speaking:
        branch.get_buffer("prior").fill_(prior)


def draw_tokens(*shape: int) -> Tensor:
    return torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(1))


def add_up_by_hand(words: Tensor, weight: float, ids: Tensor) -> list[float]:
    total, sums = 0.0, []
    for word in ids.tolist():
        total = max(FADES * total + weight * float(words[word]), FLOOR)
        sums.append(total)
    return sums


@pytest.mark.parametrize("length", [1, 2, 3, 8, 37])
def test_sums_are_what_a_loop_over_tokens_finds(length: int) -> None:
    model = make_model(3.0, 2.0)
    ids = draw_tokens(2, length)
    sums = context_of(model).add_up(ids)
    assert sums.shape == (2, length, 2)
    lowest = 0.0
    for row, (number, weight) in product(range(2), enumerate((3.0, 2.0))):
        by_hand = add_up_by_hand(words_of(model)[number], weight, ids[row])
        assert sums[row, :, number].tolist() == pytest.approx(by_hand, rel=1e-5, abs=1e-5)
        lowest = min(lowest, *by_hand)
    assert lowest == FLOOR or length < 37


def test_what_came_before_a_token_has_a_say_and_what_comes_after_has_none() -> None:
    context, ids = context_of(make_model(3.0, 2.0)), draw_tokens(2, 8)
    later = ids.clone()
    later[:, 5:] = 3 + (later[:, 5:] + 1) % 297
    assert torch.equal(context.add_up(later)[:, :5], context.add_up(ids)[:, :5])
    assert not torch.equal(context.add_up(later)[:, 5:], context.add_up(ids)[:, 5:])


def test_the_branch_with_the_largest_share_counts_as_much_as_it() -> None:
    model = make_model(3.0, 2.0)
    context = context_of(model)
    odds = torch.tensor([[2.0, 1.0], [-1.0, 0.0], [-9.0, -9.0], [40.0, -40.0]])
    for number, branch in enumerate(context.speaking):
        branch.get_buffer("prior").fill_(number - 0.5)
    shares = context.share((odds - context.prior)[None])[0]
    wanted = torch.cat([torch.zeros(4, 1), odds], 1).softmax(1)[:, 1:]
    assert (shares[:, :6] == 1).all(), "the base is not asked"
    assert torch.allclose(shares[:, 6:8], torch.stack([wanted[0, :1], *torch.zeros(2, 1), wanted[3, :1]]).expand(4, 2))
    assert torch.allclose(shares[:, 8], torch.stack([torch.zeros(()), wanted[1, 1], *torch.zeros(2)]))


def test_shares_are_what_gates_are_scaled_by() -> None:
    model, ids = make_model(3.0, 2.0), draw_tokens(2, 8)
    router, query = model.layers[0].key_router, torch.randn(2, 8, 16)
    assert router is not None
    set_priors(model, -6.0)
    shares = context_of(model).share(context_of(model).add_up(ids))
    found, scores = router.choose(query, TOP_K, shares), router.score(query)
    served = shares[..., 6:].amax(-1)
    assert 0.2 < float((served > 0).double().mean()) < 1
    for row, place in product(range(2), range(8)):
        experts, gates = found.experts[row, place].tolist(), found.gates[row, place]
        if served[row, place] == 0:
            assert max(experts) < 6
            assert float(gates.sum()) == pytest.approx(1)
        elif shares[row, place, 8]:  # a branch of one expert: the base has the other place
            assert experts[0] == 8
            assert experts[1] == int(scores[row, place, :6].argmax())
        else:
            assert set(experts) == {6, 7}
            assert float(gates.sum()) == pytest.approx(float(served[row, place]))
            own = scores[row, place, experts].softmax(-1) * served[row, place]
            assert torch.allclose(gates, own)


def test_a_branch_that_learns_has_every_token() -> None:
    model, ids = make_model(3.0, 0.0), draw_tokens(2, 8)
    set_priors(model, -1e3)
    for learning, training, grad in ((True, True, True), (False, False, True), (False, True, False)):
        model.train(training)
        with torch.set_grad_enabled(grad):
            routings = model(ids).routings
        for routing in routings:
            assert routing.experts is not None
            assert ((routing.experts == 6) | (routing.experts == 7)).all() == learning


def test_a_word_says_how_much_likelier_it_is_in_the_branchs_text() -> None:
    model = make_model(3.0, 0.0)
    new, old = torch.zeros(300, dtype=torch.int64), torch.zeros(300, dtype=torch.int64)
    new[:6], old[:6] = torch.tensor([9, 9, 0, 40, 0, 10]), torch.tensor([1, 1, 0, 0, 40, 10])
    let_speak(context_of(model), new, old)
    (words,) = words_of(model)
    assert not words[:3].any()  # marks
    longer = math.log((new.sum() + 150) / (old.sum() + 150))
    for number, times in ((3, 40.5 / 0.5), (4, 0.5 / 40.5), (5, 1.0), (6, 1.0)):
        assert words[number].item() == pytest.approx(math.log(times) - longer, rel=1e-4)


def test_every_layer_has_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(3.0, 2.0).eval(), draw_tokens(2, 8)
    met: list[Tensor | None] = []
    choose = BranchRouter.choose

    def listen(self: BranchRouter, query: Tensor, top_k: int, shares: Tensor | None = None) -> Any:
        met.append(shares)
        return choose(self, query, top_k, shares)

    monkeypatch.setattr(BranchRouter, "choose", listen)
    model(ids)
    first, last = met
    assert first is not None
    assert last is not None
    assert torch.equal(first, last)
    context = context_of(model)
    assert torch.equal(first, context.share(context.add_up(ids)))


def test_documents_of_one_row_are_strangers() -> None:
    context, ids = context_of(make_model(3.0, 2.0)), draw_tokens(2, 8)
    apart = context.add_up(ids, torch.tensor([[0] * 3 + [1] * 5] * 2))
    for part in (slice(3), slice(3, None)):
        assert torch.allclose(apart[:, part], context.add_up(ids[:, part]), atol=1e-5)


def test_weight_zero_chooses_as_if_nothing_looked_back() -> None:
    assert make_model(0.0, 0.0).context is None
    model = make_model(0.0, 2.0)
    set_priors(model, -1e3)  # what looks back is never chosen, and moves nothing else
    router, query = model.layers[-1].key_router, torch.randn(2, 8, 16)
    assert router is not None
    context = context_of(model)
    found = router.choose(query, TOP_K, context.share(context.add_up(draw_tokens(2, 8))))
    router.state.bias[8] = -1e4
    plain = router.choose(query, TOP_K)
    assert torch.equal(found.experts, plain.experts)
    assert torch.equal(found.gates, plain.gates)


@pytest.mark.parametrize("share", [0.02, 0.2])
def test_the_prior_gives_a_branch_its_share_of_the_kept_text(share: float) -> None:
    context = context_of(make_model(3.0, 0.0))
    lengths = [20, 50, 30] * 40
    ids = draw_tokens(sum(lengths))
    sums = sum_rows(context, ids, lengths)
    rows = list(ids.split(lengths))
    assert torch.allclose(sums[20:70], context.add_up(rows[1][None])[0], atol=1e-5)
    set_prior(context, sums, share)
    assert float((sums + context.prior).sigmoid().mean()) == pytest.approx(share, abs=1e-4)


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
    assert isinstance(run.model.context, Context)
    assert run.config.train.fast == "off"
    base = some_moe.load(place / "base").evaluate(data=place / "plus.txt", device="cpu")["loss"]
    assert run.evaluate(data=place / "plus.txt", device="cpu")["loss"] < base
    assert some_moe.load(place / "plain").model.context is None


def test_branches_that_look_back_are_merged_in_any_order_and_leave_no_trace(place: Path, tmp_path: Path) -> None:
    paths = [place / name for name in ("plus", "minus", "plain")]
    one, other = some_moe.merge(paths, tmp_path / "one"), some_moe.merge(paths[::-1], tmp_path / "other")
    assert [branch.looks_back for branch in read_grown(one.path).branches] == [1.0, 0.0, 3.0]
    assert torch.equal(logits_of(one), logits_of(other))
    left = some_moe.prune(some_moe.prune(one.path, "plain", tmp_path / "two").path, "minus", tmp_path / "left")
    assert torch.equal(logits_of(left), logits_of(some_moe.load(place / "plus")))
    alone = some_moe.prune(some_moe.prune(one.path, "plus", tmp_path / "b").path, "minus", tmp_path / "c")
    assert alone.model.context is None
    assert torch.equal(logits_of(alone), logits_of(some_moe.load(place / "plain")))


def test_the_fast_model_is_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match="a library with branches has no fast form"):
        some_moe.accelerate(some_moe.load(place / "plus").model)


def test_bad_weights_are_refused_in_one_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("grow", str(place / "base"), "--data", str(place / "plus.txt"), "--out", str(tmp_path / "out"))
    for value in ("-1", "nan", "1e9"):
        said = refused(capsys, *words, "--looks-back", value)
        assert "is out of range; use 0 (not at all) to 1,000" in said
    assert not (tmp_path / "out").exists()


def test_experts_can_be_forbidden_where_branches_look_back() -> None:
    model, ids = make_model(3.0, 2.0), draw_tokens(2, 8)
    set_priors(model, 4.0)
    barred = [1, 6, 8]  # of the base, and of both branches
    for layer in model.layers:
        assert layer.state is not None
        layer.state.bias[barred] = -math.inf
    output = model(ids)
    assert bool(output.logits.isfinite().all())
    chosen: set[int] = set()
    for routing in output.routings:
        assert routing.experts is not None
        assert routing.base_experts is not None
        chosen |= {*routing.experts.flatten().tolist(), *routing.base_experts.flatten().tolist()}
    assert not chosen & set(barred)
    assert 7 in chosen


def test_favour_moves_the_prior_of_branches_that_look_back_and_the_bias_of_others() -> None:
    model = make_model(3.0, 0.0)
    set_favour(model, 2.0)
    for layer in model.layers:
        assert layer.state is not None
        assert layer.state.bias.tolist() == [0.0] * 8 + [2.0]
    assert context_of(model).prior.tolist() == [2.0]
