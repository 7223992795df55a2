"""Claims: of all who try one succeeds, who is silent or gone is dead, and what works for an owner ends with it."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from some_moe.system import claims as module
from some_moe.system.claims import OBEYS, Claim, Claims, describe_place
from some_moe.system.files import write_new

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")
WORK = """
import os, sys, time
from some_moe.system.claims import obey
if sys.argv[1] == "orphan":
    child = os.fork()
    if child:
        os.wait() if sys.argv[2] == "stay" else os._exit(0)
obey(os.environ["SOME_CLAIM"])
print("ready", flush=True)
time.sleep(60)
"""


def begin_work(claim: Claim, *words: str) -> subprocess.Popen[str]:
    source = str(Path(module.__file__).parents[2])
    environment = os.environ | {OBEYS: f"{claim.about['token']} {claim.path}", "PYTHONPATH": source}
    command = [sys.executable, "-c", WORK, *words]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def take(folder: Path, name: str = "job", **options: float) -> tuple[Claims, Claim]:
    claims = Claims(folder, **options)
    folder.mkdir(exist_ok=True)
    claim = claims.take(name, claims.read().get(name))
    assert claim is not None
    return claims, claim


@needs_fork
def test_of_all_who_claim_one_succeeds(tmp_path: Path) -> None:
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            taken = [Claims(tmp_path).take(name, None) is not None for name in "abcdefgh"]
            os._exit(sum(bit << place for place, bit in enumerate(taken)))
        children.append(child)
    masks = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert [sum(mask >> place & 1 for mask in masks) for place in range(8)] == [1] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.1.json" for name in "abcdefgh"]


def test_a_new_file_is_made_once_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    assert write_new(path, "mine")
    assert not write_new(path, "yours")
    assert path.read_text() == "mine"
    assert [*tmp_path.iterdir()] == [path]


def test_an_answer_that_the_file_server_has_lost_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)  # NFS asks again where no answer came, and is told that it is there

    monkeypatch.setattr(os, "link", link_twice)
    assert write_new(tmp_path / "file", "mine")


def test_where_there_are_no_hard_links_the_first_one_has_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:  # noqa: ARG001
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert write_new(tmp_path / "file", "mine")
    assert not write_new(tmp_path / "file", "yours")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_living_owner_is_not_dead_and_touches_its_claim(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims", dead_after=0.12)
    claims.open()
    claim = claims.take("job", None)
    assert claim is not None
    os.utime(claim.path, (0, 0))
    while claim.path.stat().st_mtime == 0:
        claims.ended.wait(0.005)
    assert claims.explain_death(claims.read()["job"]) is None or claims.read_clock() - claim.path.stat().st_mtime > 0.12
    assert claims.settle(claim, state="done", seconds=3)
    assert claims.read()["job"].about["seconds"] == 3
    claims.close()
    assert [path.name for path in (tmp_path / "claims").iterdir()] == ["job.1.json"]


def test_a_process_number_tells_nothing_on_another_machine_or_in_another_container(tmp_path: Path) -> None:
    claims, claim = take(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    claim.about["process"] = child.pid  # gone
    claim.touched = claims.read_clock()
    assert claims.explain_death(claim) == f"{claim.owner} is gone"
    claims.place = "another"
    assert claims.explain_death(claim) is None
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    os.symlink("pid:[1]", tmp_path / "proc/self/ns/pid")
    assert describe_place(tmp_path).endswith(" pid:[1]")
    assert describe_place(tmp_path) != describe_place(tmp_path / "nowhere")


def test_a_claim_of_any_content_is_dead_after_silence_and_can_be_taken(tmp_path: Path) -> None:
    claims = Claims(tmp_path)
    for text in ("", "[", "[1]", '{"dead_after": "x", "process": [], "place": {}}', '{"dead_after": -1}', "\x00"):
        (tmp_path / "job.1.json").write_text(text)
        assert claims.explain_death(claims.read()["job"]) is None
        os.utime(tmp_path / "job.1.json", (1, 1))
        assert "was silent for" in str(claims.explain_death(claims.read()["job"]))
    (tmp_path / "notes.json").write_text("mine")
    taken = claims.take("job", claims.read()["job"])
    assert taken is not None
    assert taken.number == 2
    assert taken.is_held()


def test_what_works_for_an_owner_ends_at_once_when_another_owns_the_work(tmp_path: Path) -> None:
    claims, claim = take(tmp_path, dead_after=1.0)
    with begin_work(claim, "alone") as process:
        assert process.poll() is None
        assert claims.take("job", claims.read()["job"]) is not None
        assert process.wait(timeout=60) == 1


@needs_fork
def test_what_works_for_an_owner_is_asked_to_end_when_its_parent_is_gone(tmp_path: Path) -> None:
    _, claim = take(tmp_path, dead_after=1.0)
    process = begin_work(claim, "orphan", "stay")
    assert process.stdout is not None
    os.kill(process.pid, signal.SIGKILL)
    with process.stdout:
        assert process.stdout.read() == ""  # at its end when the orphan, too, has ended
    assert process.wait() == -signal.SIGKILL
