"""A SLURM array of workers that join one queue, written and submitted by submitit."""

import io
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError
from some_moe.errors import FailureError
from some_moe.system.processes import quote_command

WARNING_SECONDS = 120  # before its time is over a task is told, by SIGUSR2, to save and end
REQUEUES = 100  # times a task is queued again because its time was over
TIME = re.compile(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?")


def read_minutes(text: str) -> int:
    """A limit as SLURM writes it: minutes, H:MM:SS, D-H, D-H:MM or D-H:MM:SS."""
    match = TIME.fullmatch(text)
    days, first, second, third = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    in_hours = match is not None and (match[1] is not None or match[4] is not None)
    seconds = 3600 * first + 60 * second + third if in_hours else 60 * first + second
    minutes = 1440 * days + -(-seconds // 60)
    if not WARNING_SECONDS < 60 * minutes <= 366 * 86_400:
        raise ConfigError(f"--time {text!r} is no time of 3 minutes to a year; write it like 90, 4:00:00 or 1-12:00:00")
    return minutes


def require_submitit(*, submits: bool) -> None:
    """Refuse what is not there."""
    if find_spec("submitit") is None:
        raise ConfigError("`some experiments submit` needs submitit; run pip install 'submitit>=1.5'")
    missing = [name for name in ("sbatch", "srun") if shutil.which(name) is None]
    if submits and missing:
        raise ConfigError(
            f"there is no {missing[0]} here; submit from a machine of a SLURM cluster, or see the script by --dry-run"
        )


@dataclass(frozen=True)
class Request:
    """What is asked of the cluster. words: of `some`, for each worker; more: anything else that sbatch knows."""

    words: Sequence[str]
    folder: Path  # of submitit's scripts, pickles and logs
    workers: int
    minutes: int
    gpus: int
    partition: str | None
    more: Mapping[str, str]

    @property
    def parameters(self) -> dict[str, Any]:
        asked = {"job_name": "some", "time": self.minutes, "signal_delay_s": WARNING_SECONDS}
        asked |= {"array_parallelism": self.workers, "additional_parameters": {"requeue": True} | dict(self.more)}
        asked |= {"gpus_per_node": self.gpus} if self.gpus else {}
        return asked | ({"partition": self.partition} if self.partition else {})

    @property
    def script(self) -> str:
        """The script as submitit writes it, and what its tasks run."""
        from submitit.slurm.slurm import _make_sbatch_string

        command = quote_command([sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder)])
        parameters = self.parameters | ({"map_count": self.workers} if self.workers > 1 else {})
        text = str(_make_sbatch_string(command=command, folder=self.folder, **parameters))
        return f"{text}\n# each task runs: {quote_command(['some', *self.words])}\n"

    def submit(self, work: Callable[[int], Any]) -> str:
        """Submit it; return the job's number."""
        import submitit

        executor = submitit.SlurmExecutor(self.folder, max_num_timeout=REQUEUES)
        executor.update_parameters(**self.parameters)
        try:
            with redirect_stderr(io.StringIO()):  # it prints what sbatch says, which is told below
                return str(executor.map_array(work, range(self.workers))[0].job_id).partition("_")[0]
        except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedSubmissionError) as error:
            said = (str(error).strip().splitlines() or ["it does not say why"])[-1]
            raise FailureError(f"sbatch refuses it: {said}; mend that, and submit it again") from None
