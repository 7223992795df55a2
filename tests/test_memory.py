"""What does not fit is refused with both numbers, before any of it is taken; what fits never is."""

from pathlib import Path

import pytest

import some_moe
from some_moe import memory
from some_moe.config import ConfigError, RunConfig
from some_moe.lab.registry.presets import find_preset

GIB = 1 << 30


def test_the_formula_agrees_with_what_was_measured_of_a1() -> None:
    """Peaks of a step on a CPU, less what torch itself takes: 2,666 MiB with 2 rows, 5,164 with 8."""
    for rows, measured in ((2, 2666), (8, 5164)):
        config = find_preset("A1").override({"data.batch_size": rows, "model.expert_dtype": "float32"})
        assert memory.needed_bytes(config, training=True) / (1 << 20) == pytest.approx(measured, rel=0.1)


def test_a_model_in_use_needs_less_than_one_in_training() -> None:
    config = find_preset("A1")
    assert memory.needed_bytes(config, training=False) < memory.needed_bytes(config, training=True) / 2


@pytest.mark.parametrize(("trainability", "shares"), [("frozen", (1, 8)), ("full", (1, 8)), ("full", (8, 1))])
def test_what_processes_share_out_counts_by_its_share(trainability: str, shares: tuple[int, int]) -> None:
    config = RunConfig().override({"model.num_experts": 2048, "model.trainability": trainability})
    whole, part = (memory.needed_bytes(config, training=False, shares=each) for each in ((1, 1), shares))
    assert 7 * part < whole


def test_too_much_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 10 * GIB)
    large = RunConfig(name="large").override({"model.num_experts": 100_000, "data.batching": "padded"})
    with pytest.raises(
        ConfigError, match=r"^'large' needs about \d\.\d TiB, and 10.0 GiB are free; lower model\.num_l"
    ):
        some_moe.train(large.override({"train.device": "cpu"}), display=False)
    with pytest.raises(ConfigError, match=r"are free; use a larger machine$"):
        memory.refuse_too_large(large, "cpu", training=False)
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    memory.refuse_too_large(large, "cpu", training=True)


def test_long_rows_count_where_rows_are_that_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 4 * GIB)
    config = find_preset("demo").override({"data.seq_len": 65_536})
    memory.refuse_too_large(config, "cpu", training=True)
    memory.refuse_too_large(config, "cpu", training=True, longest=300)
    with pytest.raises(ConfigError, match="lower"):
        memory.refuse_too_large(config, "cpu", training=True, longest=65_536)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0 MiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB"), (1 << 70, "1,048,576.0 PiB")]
)
def test_bytes_are_said_in_the_unit_that_suits(count: int, text: str) -> None:
    assert memory.format_bytes(count) == text


MEMINFO = "MemTotal:  24000000 kB\nMemAvailable:   1000000 kB\nSwapFree:   24 kB\nHugepagesize:\n"


def make(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_limits_it_is_what_the_machine_has(tmp_path: Path) -> None:
    groups = "12:memory:/here\n0::/\n"
    limits = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert memory.free_memory(make(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups})) == 1000024 * 1024
    assert memory.free_memory(make(tmp_path, limits)) == 1000024 * 1024


def test_a_container_leaves_its_limit_without_what_is_used_but_for_cached_files(tmp_path: Path) -> None:
    second = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": "5000\n",
        "sys/fs/cgroup/pod/memory.current": "4500\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 4000\ninactive_file 300\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/pod/box/memory.current": "100\n",
    }
    assert memory.free_memory(make(tmp_path / "2", second)) == 800
    first = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/not/seen/here\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "9000\n",
    }
    assert memory.free_memory(make(tmp_path / "1", first)) == 0


def test_this_machine_tells() -> None:
    free = memory.free_memory()
    assert free is None or free > 1 << 20
