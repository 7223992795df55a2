"""Uploads to a hub of our own: all files arrive, and what goes wrong is one sentence."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from some_moe.cli import main
from some_moe.errors import ConfigError, FailureError
from some_moe.hf import SomeForCausalLM, export, push
from tests.hf.hub import TOKEN, Hub, running_hub
from tests.hf.test_models import small_config
from tests.shared.untrained import write_run

# huggingface_hub's own, of the library that it speaks HTTP with.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as running:
        yield running


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run") / "small", small_config("plain"))


def test_a_run_arrives_whole_and_opens(hub: Hub, run: Path, tmp_path: Path) -> None:
    address = push(run, "me/small", private=True, endpoint=hub.address, token=TOKEN)
    assert address == f"{hub.address}/me/small"
    assert hub.private == {"me/small": True}
    export(run, tmp_path / "out")
    wanted = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert hub.repositories["me/small"] == wanted
    for name, contents in hub.repositories["me/small"].items():
        (tmp_path / name).write_bytes(contents)
    SomeForCausalLM.from_pretrained(tmp_path)


def test_an_exported_folder_is_sent_as_it_is_and_may_be_sent_again(hub: Hub, run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", standalone=True)
    (tmp_path / "out" / "README.md").write_text("# my own words")
    for _ in range(2):
        push(tmp_path / "out", "me/small", endpoint=hub.address, token=TOKEN)
    assert hub.repositories["me/small"]["README.md"] == b"# my own words"
    assert b"class Library" in hub.repositories["me/small"]["modeling_some.py"]


def test_the_command_prints_the_address(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main(["push", str(run), "me/other"]) == 0
    assert capsys.readouterr().out == f"{hub.address}/me/other\n"
    assert not hub.private["me/other"]


def test_a_wrong_token_is_refused_before_anything_is_made(hub: Hub, run: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not let this token write to 'me/small' \(401\); log in by"):
        push(run, "me/small", endpoint=hub.address, token="hf_wrong")
    assert not hub.repositories


def test_a_bad_name_and_a_hub_that_is_not_there_are_told(run: Path, hub: Hub) -> None:
    with pytest.raises(ConfigError, match="'me/small/er' is no name of a repository; write it as OWNER/NAME"):
        push(run, "me/small/er", endpoint=hub.address, token=TOKEN)
    with pytest.raises(ConfigError, match="is not a run"):
        push(run.parent, "me/small", endpoint=hub.address, token=TOKEN)
    assert not hub.repositories
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(FailureError, match="cannot be reached"):
            push(run, "me/small", endpoint=nobody, token=TOKEN)


def test_offline_is_told(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        push(run, "me/small", endpoint=hub.address, token=TOKEN)
