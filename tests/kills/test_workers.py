"""Ten workers on one queue, half of them killed: every job is done once, and no record is lost or doubled."""

import json
import os
import random
import re
from collections import Counter
from pathlib import Path

import pytest

from some_moe.lab.jobs import write_flag
from tests.kills import children
from tests.kills.campaign import open_campaign
from tests.kills.folders import describe, find_torn
from tests.kills.moments import Attack
from tests.kills.scenarios import QUEUE

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, which this system does not have")
FLAGS = [write_flag(name, value) for name, value in QUEUE.items()]


def queue_words(seeds: range, out: str = "runs") -> list[str]:
    named = ["A1", "--seeds", ",".join(map(str, seeds)), "--out", out, "--results", f"{out}-results"]
    return ["experiments", "run", *named, *FLAGS]


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "jobs", "kills"), [(10, 60, 5)])
def test_every_job_is_done_once_though_half_of_the_workers_are_killed(workers: int, jobs: int, kills: int) -> None:
    chance = random.Random(0)
    attacks = [Attack() for _ in range(workers)]
    for victim in chance.sample(range(workers), kills):
        target = chance.choice(["command", "command", "run"])  # a worker alone, or with its run
        attacks[victim] = Attack("kill", chance.randint(1, 150), target)
    with open_campaign(1) as campaign:
        cwd, cache = campaign.base / "shared", campaign.base / "cache"
        cwd.mkdir()
        words = [*queue_words(range(jobs)), "--join", "--dead-after", "20"]
        ended = campaign.pool.submit(children.run_together, words, cwd, cache, attacks).result()
        judge(cwd, ended, attacks, jobs)
        taken_up = [name for name, states in read_claims(cwd).items() if len(states) > 1]
        assert taken_up, "no worker was killed while it held a job"
        # What was taken up ends with the same bits as what nobody disturbed.
        seeds = sorted(int(name.removeprefix("A1-seed")) for name in taken_up)[:5]
        for seed in seeds:
            plain = queue_words(range(seed, seed + 1), "plain")
            assert campaign.pool.submit(children.run, plain, cwd, cache).result().code == 0
            here, there = (cwd / f"{out}-results/A1-seed{seed}.json" for out in ("runs", "plain"))
            assert describe(here) == describe(there)


def read_claims(cwd: Path) -> dict[str, list[str]]:
    """The states of the claims to each job, in order."""
    found: dict[str, dict[int, str]] = {}
    for path in (cwd / "runs" / ".claims").glob("*.json"):
        name, number, _ = path.name.rsplit(".", 2)
        found.setdefault(name, {})[int(number)] = json.loads(path.read_text())["state"]
    return {name: [states[number] for number in sorted(states)] for name, states in found.items()}


def judge(cwd: Path, ended: list[children.Ended], attacks: list[Attack], jobs: int) -> None:
    said = "\n".join(one.said for one in ended)
    for one, attack in zip(ended, attacks, strict=True):
        assert one.code == (-9 if attack.how == "kill" else 0), one.said
    assert "Traceback" not in said
    names = {f"A1-seed{seed}" for seed in range(jobs)}
    assert {path.stem for path in (cwd / "runs-results").iterdir()} == names
    assert not find_torn(cwd)
    claims = read_claims(cwd)
    assert claims.keys() == names
    for name, states in claims.items():
        assert states[-1] == "done", (name, states)
        assert set(states[:-1]) <= {"lost", "interrupted"}, (name, states)
        log = [json.loads(line) for line in (cwd / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        trained = Counter(line["step"] for line in log if "train_loss" in line)
        assert set(trained.values()) == {1}, f"{name} has steps that were logged twice"
        # A run that had ended is not run again: what it says of its end it says once.
        printed = (cwd / "runs" / "logs" / f"{name}.txt").read_text()
        assert "is finished already" not in printed, name
        record, result = (json.loads(path.read_text()) for path in record_and_result(cwd, name))
        assert {field: record[field] for field in result} == result
    done = Counter(re.findall(r"seed (\d+): done in", said))
    assert max(done.values()) == 1


def record_and_result(cwd: Path, name: str) -> tuple[Path, Path]:
    return cwd / "runs-results" / f"{name}.json", cwd / "runs" / name / "result.json"
