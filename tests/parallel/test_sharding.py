"""Models that processes share out: experts, trained parameters and checkpoints are those of one process."""

import json
import runpy
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import some_moe
from some_moe.cli import main
from some_moe.config import ConfigError, GravityConfig, ModelConfig, RunConfig
from some_moe.experts import ExpertWeights, mix_reference
from some_moe.model.expert_weights import checksum
from some_moe.model.layer import SomeLayer
from some_moe.parallel.dispatch import Dispatch
from some_moe.parallel.process_group import ProcessGroup
from some_moe.training.run_folder import RunFolder
from tests.parallel.members import MEMBER, SETTINGS, Members, assert_agree, run_torchrun, said

SMALL = ModelConfig(d_model=16, num_heads=2, num_experts=6, d_ffn=8, top_k=2)
EXPERTS, FSDP = {"expert_parallel": "all"}, {"fsdp": True}
WAYS = {"experts": EXPERTS, "fsdp": FSDP, "both": EXPERTS | FSDP}
STILL = {f"gravity.{name}": value for name, value in GravityConfig.off().flatten().items()}
SHARED_OUT = ["--train.expert-parallel", "all", "--train.fsdp", "--model.trainability", "lora"]


# --- one process ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"trainability": "lora"}, {"init_method": "sparse"}, {"init_method": "orthogonal"}, {"gains": True}]
)
def test_a_share_of_a_library_has_the_bits_of_the_whole_and_its_checksum_adds_up(changes: dict[str, Any]) -> None:
    whole = SomeLayer(SMALL.override(changes), layer=1).library
    shares = [SomeLayer(SMALL.override(changes), layer=1, experts=range(*ends)).library for ends in pairwise((0, 2, 6))]
    for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]:
        assert torch.equal(tensor, torch.cat([getattr(share, name) for share in shares])), name
    total = sum(int(share.checksum(), 16) for share in shares) % 2**64
    assert f"{total:016x}" == whole.checksum() == checksum(whole.stacks())


def make_problem() -> tuple[Tensor, Tensor, Tensor, ExpertWeights]:
    random = torch.Generator().manual_seed(0)
    shapes = {"up": (6, 8, 16), "up_bias": (6, 8), "down": (6, 16, 8), "down_bias": (6, 16)}
    stacks = {name: torch.randn(shape, generator=random, dtype=torch.float64) for name, shape in shapes.items()}
    weights = ExpertWeights(**{name: stack.requires_grad_() for name, stack in stacks.items()})
    x = torch.randn(20, 16, generator=random, dtype=torch.float64).requires_grad_()
    gates = torch.rand(20, 2, generator=random, dtype=torch.float64).requires_grad_()
    experts = torch.stack([torch.randperm(6, generator=random)[:2] for _ in range(20)])
    return x, experts, gates, weights


def stay(out: Tensor, rows: Tensor, taken: list[int] | None, sent: list[int] | None) -> None:  # noqa: ARG001
    out.copy_(rows)


def test_dispatch_within_one_process_is_the_plain_mixture() -> None:
    found = []
    for mix in (mix_reference, Dispatch(mix_reference, 6, 1, stay)):
        x, experts, gates, weights = make_problem()
        y = mix(x, experts, gates, weights)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append([y, x.grad, gates.grad, weights.up.grad, weights.down_bias.grad])  # type: ignore[union-attr]
    for plain, dispatched in zip(*found, strict=True):
        assert plain is not None
        assert dispatched is not None
        # Gradients here reach 3,000, of which 1e-12 is two of the last places: relative, whatever the CPU adds first.
        assert torch.allclose(plain, dispatched, rtol=1e-12, atol=1e-12)


def test_a_process_to_which_no_token_comes_still_has_gradients_which_are_zero() -> None:
    x, _, _, weights = make_problem()
    y = Dispatch(mix_reference, 6, 1, stay).run_here(x[:0], torch.empty(0, dtype=torch.int64), weights)
    assert y.shape == (0, 16)
    y.sum().backward()
    assert weights.up.grad is not None
    assert x.grad is not None
    assert not weights.up.grad.any()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.num_experts": 4}, "model.num_experts 4 cannot be shared equally by 3 of 3 processes; start another"),
        ({"model.router": "weights"} | STILL, "model.router weights needs all experts in every process; set train"),
        ({"train.compile": True}, "train.compile true is not for a model that several processes share out"),
        ({"data.batch_size": 8}, "a step of 8 rows cannot be shared equally by 3 processes"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    config = RunConfig(model=SMALL).override({"train.expert_parallel": "all", "data.batch_size": 6} | changes)
    with pytest.raises(ConfigError, match=sentence):
        ProcessGroup(rank=0, world_size=3, local_world_size=3).refuse_uneven(config)


def test_one_process_shares_nothing_out() -> None:
    config = RunConfig(model=SMALL).override({"train.expert_parallel": "all", "train.fsdp": True})
    group = ProcessGroup()
    group.refuse_uneven(config)
    group.join(torch.device("cpu"), config)
    assert group.sharding is None
    assert group.own_experts() is None


# --- steps ----------------------------------------------------------------------------------------------------


def assert_steps_agree(place: Path, kinds: list[str], ways: dict[str, Any]) -> None:
    """Losses, gradient norms, routing, parameters and keys after five steps, against one process."""
    member = runpy.run_path(str(MEMBER))
    for kind in kinds:
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-6)):
            expected = member["share_out"](kind, dtype, member["SINGLE"])
            for way in ways:
                found = load_file(place / f"{kind} {way} {str(dtype).removeprefix('torch.')}.safetensors")
                assert found.keys() == expected.keys() - {f"{n}.{rows}" for n in range(2) for rows in OF_ROWS}
                for name, value in found.items():
                    if name.endswith("attention.key.bias") and dtype == torch.float32:
                        continue  # softmax does not see it: its gradient is rounding, which AdamW makes large
                    there = found[f"{name}_order"] < torch.iinfo(torch.int64).max if name.endswith(".sample") else ...
                    close = torch.allclose(value[there], expected[name][there], rtol=tolerance, atol=tolerance)
                    assert close, (kind, way, dtype, name)


OF_ROWS = ("experts", "gates", "query")  # what is known of each row where it lives


def test_two_processes_that_share_a_model_out_end_with_what_one_process_finds(members: Members, tmp_path: Path) -> None:
    kinds, ways = ["frozen", "full", "lora"], {name: WAYS[name] for name in ("experts", "fsdp")}
    assert members.run("sharded", tmp_path, kinds=kinds, ways=ways) == [0, 0]
    assert_steps_agree(tmp_path, kinds, ways)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gains", "shared_down", "lora"])
def test_other_kinds_of_models_are_shared_out_as_well(members: Members, tmp_path: Path, kind: str) -> None:
    assert members.run("sharded", tmp_path, kinds=[kind], ways=WAYS) == [0, 0]
    assert_steps_agree(tmp_path, [kind], WAYS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["frozen", "full", "lora"])
def test_four_processes_on_two_machines_share_experts_within_each_or_among_all(
    members: Members, tmp_path: Path, kind: str
) -> None:
    within = {"expert_parallel": "machine"}
    ways = {"all": EXPERTS, "within": within, "fsdp": FSDP, "within and fsdp": within | FSDP}
    assert members.run("sharded", tmp_path, size=4, machines=2, kinds=[kind], ways=ways) == [0] * 4
    assert_steps_agree(tmp_path, [kind], ways)


# --- whole runs -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone_lora(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that those of several are held against."""
    assert alone.is_dir()  # its text is in the cache
    path = tmp_path_factory.mktemp("alone") / "run"
    assert main([*SETTINGS, "--model.trainability", "lora", "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def together(members: Members, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same by two processes, which share out experts and parameters."""
    path = tmp_path_factory.mktemp("together") / "run"
    words = [*SETTINGS, *SHARED_OUT, "--out", str(path)]
    assert members.run("command", path.parent, words=words) == [0, 0], said(path.parent)
    assert said(path.parent) == ["", ""]
    return path


def test_a_run_that_was_shared_out_looks_like_that_of_one_process_and_is_read_by_one(
    alone_lora: Path, together: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_agree(alone_lora, together)
    assert [p.name for p in sorted(together.rglob("*"))] == [p.name for p in sorted(alone_lora.rglob("*"))]
    texts = [(path / "samples.jsonl").read_text() for path in (alone_lora, together)]
    assert texts[0] == texts[1]
    results = [json.loads((path / "result.json").read_text()) for path in (alone_lora, together)]
    assert len({result["total_parameters"] for result in results}) == 1
    assert len({result["trainable_parameters"] for result in results}) == 1
    capsys.readouterr()
    assert main(["eval", str(together), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(results[0]["test_loss"], abs=1e-5)
    assert some_moe.load(together).model.count_parameters()[0] == results[0]["trainable_parameters"]


def test_a_run_that_was_shared_out_goes_on_in_one_process(alone_lora: Path, together: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(together, run)
    assert main(["train", "--resume", str(run / "checkpoints" / "step-10")]) == 0
    assert_agree(alone_lora, run)


@pytest.mark.slow
def test_a_run_that_was_shared_out_goes_on_in_four_processes(
    members: Members, alone_lora: Path, together: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(together, run)
    words = ["train", "--resume", str(run / "checkpoints" / "step-10")]
    assert members.run("command", tmp_path, size=4, words=words) == [0] * 4, said(tmp_path)
    assert "at step 10 of 12" in said(tmp_path, "out")[0]
    assert_agree(alone_lora, run)


@pytest.mark.slow
def test_a_shared_out_run_reports_its_best_checkpoint_and_another_begins_with_it(
    members: Members, alone: Path, tmp_path: Path
) -> None:
    assert alone.is_dir()  # its text is in the cache
    steep = ["--model.trainability", "full", "--train.learning-rate", "0.1", "--train.eval-every", "1"]
    single, several = tmp_path / "single", tmp_path / "several"
    assert main([*SETTINGS, *steep, "--out", str(single)]) == 0
    words = [*SETTINGS, *SHARED_OUT, *steep, "--out", str(several)]
    assert members.run("command", tmp_path, words=words) == [0, 0], said(tmp_path)
    results = [json.loads((path / "result.json").read_text()) for path in (single, several)]
    assert [result["best_step"] for result in results] == [1, 1]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], abs=1e-5)
    assert results[0]["test_loss"] < results[0]["test_loss_last_step"] - 0.1
    begin = ["--model.trainability", "full", "--init-from", str(single / "checkpoints" / "step-1")]
    assert main([*SETTINGS, *begin, "--out", str(tmp_path / "single-2")]) == 0
    words = [*SETTINGS, *SHARED_OUT, *begin, "--out", str(tmp_path / "several-2")]
    assert members.run("command", tmp_path, words=words) == [0, 0], said(tmp_path)
    assert_agree(tmp_path / "single-2", tmp_path / "several-2")


@pytest.mark.slow
def test_a_killed_process_of_a_shared_out_run_is_started_again_to_the_bits_of_an_undisturbed_one(
    members: Members, together: Path, tmp_path: Path
) -> None:
    program, run = [str(MEMBER.with_name("mortal.py"))], tmp_path / "run"
    done = run_torchrun(members, run, ["--max-restarts", "1"], program, *SHARED_OUT, DIES_AT="8")
    assert done.returncode == 0, done.stderr
    assert "at step 6 of 12" in done.stdout
    for file in ("checkpoints/step-12/model.safetensors", "checkpoints/step-12/optimizer.safetensors"):
        assert (run / file).read_bytes() == (together / file).read_bytes()


@pytest.mark.slow
def test_a_disk_that_has_no_room_for_one_part_ends_all_with_a_sentence(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, *SHARED_OUT, "--out", str(tmp_path / "run")]
    assert members.run("command", tmp_path, words=words, deed="have no room", at_step=8, patience=5) == [1, 1]
    sentence = said(tmp_path)[0]
    assert sentence.startswith(f"some: cannot write to {tmp_path / 'run'} (No space left on device); the last whole")
    assert sentence.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-5", "step-6"]


def test_the_others_tell_in_a_sentence_that_a_process_has_died_amid_a_step(members: Members, tmp_path: Path) -> None:
    words = [*SETTINGS, "--train.fsdp", "--out", str(tmp_path / "run")]
    codes = members.run("command", tmp_path, words=words, deed="die in backward", at_step=8, patience=5)
    assert codes == [1, -9]
    assert said(tmp_path)[0].startswith("some: process 0 of 2 lost touch with the others (")
    assert said(tmp_path)[0].endswith("checkpoints/step-6; continue with --resume auto\n")
    assert said(tmp_path)[0].count("\n") == 1


def test_a_process_that_dies_while_parts_are_written_leaves_the_checkpoint_before_and_nothing_half(
    members: Members, alone_lora: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    words = [*SETTINGS, *SHARED_OUT, "--out", str(run)]
    codes = members.run("command", tmp_path, words=words, deed="die when parts are written", at_step=8, patience=5)
    assert codes == [1, -9]
    assert "lost touch with the others" in said(tmp_path)[0]
    assert said(tmp_path)[0].count("\n") == 1
    assert [place.name for place in RunFolder(run).list_checkpoints()] == ["step-5", "step-6"]
    assert main([*words, "--resume", "auto"]) == 0
    assert_agree(alone_lora, run)
    assert not list((run / "checkpoints").glob(".*"))
