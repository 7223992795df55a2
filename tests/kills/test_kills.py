"""Real processes, really killed: whatever the moment, the same command given again ends with the same bits.

A bounded share of `python -m tests.kills.campaign`, at chosen moments: no clock decides.
"""

import os
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kills import children
from tests.kills.campaign import Campaign, open_campaign
from tests.kills.cases import Case, Judged, Known, make_case, shuffle_moments
from tests.kills.folders import find_differences, find_torn
from tests.kills.moments import Attack
from tests.kills.scenarios import Scenario, make_scenarios

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")

# Of a run that keeps one checkpoint: begun, logging, saving, showing, pruning, ending.
TELLING = [
    r"rename run/config.yaml",
    r"within tensors run/keys/",
    r"within write run/metrics.jsonl",
    r"within tensors .*model.safetensors",
    r"within write .*state.json",
    r"rename run/checkpoints/step-N$",
    r"(unlink|rename) .*checkpoints/.*step-N\S*/?(state.json)?$",
    r"rmdir run/checkpoints/\S*step-N",
    r"rename run/result.json",
]
KILLS_EACH = 3  # at least, for each scenario


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with open_campaign(1) as opened:
        yield opened


def learn(campaign: Campaign, name: str) -> Known:
    campaign.learn([name])
    return campaign.known[name]


def demand(found: Judged) -> None:
    assert not found.problems, f"{found.case.scenario}, {found.moments}: {found.problems}"


def find_moment(known: Known, pattern: str) -> int:
    """The middle one of all moments of a kind."""
    moments = [moment for moment, label in enumerate(known.labels, 1) if re.search(pattern, label)]
    assert moments, f"no moment is called {pattern}; there are {sorted(set(known.labels))}"
    return moments[len(moments) // 2]


@pytest.mark.parametrize("pattern", TELLING)
def test_a_run_killed_at_a_telling_moment_ends_like_an_undisturbed_one(campaign: Campaign, pattern: str) -> None:
    known = learn(campaign, "train/one-kept")
    attacks = (Attack("kill", find_moment(known, pattern)),)
    found = campaign.judge(Case(0, "train/one-kept", attacks, again=0))
    demand(found)
    assert found.kills == 1


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_going_back_is_done_or_not_begun_wherever_it_is_killed(campaign: Campaign, share: float) -> None:
    known = learn(campaign, "back/plain")
    # Up to the first thing that is made again, it removes.
    removing = next(n for n, label in enumerate(known.labels, 1) if label.startswith("create run/metrics.jsonl"))
    found = campaign.judge(Case(0, "back/plain", (Attack("kill", max(1, round(share * removing))),), again=0))
    demand(found)
    assert found.kills == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", make_scenarios())
def test_every_command_on_every_kind_of_run_survives_kills(campaign: Campaign, name: str) -> None:
    known, chance = learn(campaign, name), random.Random(name)
    moments, kills, number = shuffle_moments(known, chance), 0, 0
    while kills < KILLS_EACH:
        found = campaign.judge(make_case(number, known, moments, chance, "kill"))
        demand(found)
        kills, number = kills + found.kills, number + 1
        assert number < 4 * KILLS_EACH, f"{name} is hardly ever killed"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "readonly"])
@pytest.mark.parametrize("name", ["train/plain", "back/plain", "queue/itself", "trace/plain", "report/no-analyze"])
def test_a_disk_that_refuses_is_told_in_one_sentence_and_mended_by_room(
    campaign: Campaign, name: str, how: str
) -> None:
    if name not in campaign.scenarios:
        pytest.skip("reports need matplotlib, which is not installed")
    known, chance = learn(campaign, name), random.Random(name)
    moments = shuffle_moments(known, chance)
    for number in range(3):
        demand(campaign.judge(make_case(number, known, moments, chance, how)))


@pytest.mark.slow
# A disk that is too small is refused before the first step; one without room for names is found out on the way.
@pytest.mark.parametrize("room", ["size=4k", "size=160k", "size=64m,nr_inodes=6", "size=64m,nr_inodes=14"])
def test_a_run_on_a_disk_that_is_really_full_goes_on_when_there_is_room(
    campaign: Campaign, tmp_path: Path, room: str
) -> None:
    known = learn(campaign, "train/plain")
    scenario: Scenario = known.scenario
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(*words: str) -> int:
        return subprocess.run(["mount", *words, str(disk)], capture_output=True).returncode

    try:
        if mount("-t", "tmpfs", "-o", room, "tmpfs"):
            pytest.skip("needs the right to mount a small disk")
    except FileNotFoundError:
        pytest.skip("needs the command mount")
    try:
        cache = known.base.parent / "cache"
        stopped = campaign.pool.submit(children.run, [*scenario.words], disk, cache).result()
        assert stopped.code in (1, 2), stopped.said
        assert stopped.find_fault((1, 2)) is None
        assert not find_torn(disk)
        assert mount("-o", "remount,size=64m,nr_inodes=10000") == 0
        ended = campaign.pool.submit(children.run, [*scenario.again[0]], disk, cache).result()
        assert ended.code == 0, ended.said
        assert not find_differences(disk, known.ended)
    finally:
        subprocess.run(["umount", str(disk)], check=True)
