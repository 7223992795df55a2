"""A sweep: optuna proposes settings, `some train` answers, and each trial is an ordinary run folder.

DIR/space.json says what is searched, DIR/study.journal is optuna's log, DIR/.claims who runs what (see
`system/claims.py`). Any number of workers may be started on one folder, on any machine that sees it; one that dies
leaves a trial that nobody claims, and the next takes it up where its checkpoint is.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, RunConfig
from some_moe.lab.estimate import describe_seconds
from some_moe.lab.published import finite_number
from some_moe.lab.queue import APART, IN_QUEUE, STOPPED, Signals, explain_failure
from some_moe.lab.space import Axis, Sweep
from some_moe.system.claims import DEAD_AFTER, OBEYS, RUNNING, Claim, Claims
from some_moe.system.files import write_new, write_whole
from some_moe.system.processes import python_command, python_environment, take_lock
from some_moe.system.reading import read_object
from some_moe.training.run_folder import LOCK, RunFolder, read_log

SPACE, JOURNAL, OUTCOME = "space.json", "study.journal", "sweep.json"
PATIENCE = 120.0  # seconds for another worker to ask optuna
WEIGH_EVERY = 10  # trials
LOOK_SECONDS = 0.3  # between two looks at a run's losses
STATES = {"COMPLETE": "done", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}


def name_trial(number: int) -> str:
    return f"trial-{number:04}"


class Sweeper:
    """One worker of a sweep, with as many runs at once as it is asked for. Making one writes nothing."""

    def __init__(
        self,
        sweep: Sweep,
        base: RunConfig,
        out: Path,
        say: Callable[[str], None],
        *,
        workers: int = 1,
        dead_after: float = DEAD_AFTER,
        changed: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """changed: is given the outcome so far whenever a trial has ended."""
        self.sweep, self.base, self.out, self.say, self.workers = sweep, base, out, say, workers
        self.axes, self.changed = sweep.axes(base), changed
        self.digest = sweep.digest(base)
        self.claims = Claims(out / ".claims", dead_after)
        self.held: dict[str, Claim] = {}
        self.signals, self.choosing, self.telling = Signals(say), threading.Lock(), threading.Lock()
        self.study: Any = None
        self.weighed: tuple[int, tuple[dict[str, float], str]] = (0, ({}, ""))  # at how many trials, and what was found
        if IN_QUEUE in os.environ:
            raise ConfigError(f"this is a process of a queue already ({IN_QUEUE} is set); a sweep starts no other")
        self.refuse_other()

    def refuse_other(self) -> None:
        """All workers of a folder search the same."""
        if not (self.out / SPACE).is_file():
            if self.out.is_dir() and any(self.out.iterdir()):
                raise ConfigError(f"{str(self.out)!r} is not empty and no sweep; choose another --out")
            return
        there = read_object(self.out / SPACE, "choose another --out")
        if there.get("digest") != self.digest:
            raise ConfigError(
                f"{str(self.out)!r} was begun with another space, base or seeds; restore them, or choose another --out "
                "(trials alone may change)"
            )

    # --- working ----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Work until all trials have ended, or somebody stops it; return the outcome."""
        self.out.mkdir(parents=True, exist_ok=True)
        told = {"format_version": 1, "digest": self.digest, "sweep": self.sweep.model_dump(mode="json")}
        write_new(self.out / SPACE, json.dumps(told | {"base": self.base.flatten()}, indent=1) + "\n")
        self.refuse_other()
        self.claims.open()
        try:
            with self.signals, ThreadPoolExecutor(self.workers) as pool, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of optuna, on what it calls experimental
                self.study = self.open_study()
                list(pool.map(self.serve, range(self.workers)))
        finally:
            self.claims.close()
        return self.tell_outcome(ended=True)

    def open_study(self) -> Any:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        file = str(self.out / JOURNAL)
        backend = JournalFileBackend(file, lock_obj=JournalFileOpenLock(file))
        pruner = optuna.pruners.MedianPruner(n_startup_trials=self.sweep.prune_after)
        return optuna.create_study(
            study_name="sweep",
            storage=optuna.storages.JournalStorage(backend),
            direction="minimize",
            pruner=pruner if self.sweep.prune else optuna.pruners.NopPruner(),
            load_if_exists=True,
        )

    def make_sampler(self, number: int) -> Any:
        """Who proposes trial `number`: what it draws follows from that, however often the sweep was stopped."""
        import optuna

        seed = (self.sweep.sampler_seed * 1_000_003 + number) % 2**32
        if self.sweep.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True)

    def serve(self, _: int) -> None:
        try:
            while not self.signals.count:
                found = self.choose()
                if found is not None:
                    self.do(*found)
                elif self.is_over():
                    return
                else:
                    time.sleep(LOOK_SECONDS)
        except BaseException:  # a full disk, a reader that has gone: what else runs is saved, and stops
            self.signals.count = self.signals.count or 1
            self.signals.pass_on()
            raise

    def is_over(self) -> bool:
        trials = self.study.get_trials(deepcopy=False)
        return len(trials) >= self.sweep.trials and all(trial.state.is_finished() for trial in trials)

    def choose(self) -> tuple[Any, Claim] | None:
        """A trial that a dead worker has left, or a new one; None where there is none at the moment."""
        import optuna

        with self.choosing:
            lock = take_lock(self.out / ".ask.lock", "another worker does not let go of the study", timeout=PATIENCE)
            try:
                claimed, trials = self.claims.read(), self.study.get_trials(deepcopy=False)
                for trial in trials:
                    name, before = name_trial(trial.number), claimed.get(name_trial(trial.number))
                    if trial.state.is_finished() or name in self.held:
                        continue
                    why = "it was stopped" if before is not None else "nobody had begun it"
                    if before is not None and before.state == RUNNING:
                        died = self.claims.explain_death(before)
                        if died is None:
                            continue
                        why = died
                    claim = self.claims.take(name, before)
                    if claim is not None:
                        self.held[name] = claim
                        self.say(f"{name}: taken up again, for {why}")
                        return optuna.trial.Trial(self.study, trial._trial_id), claim
                if len(trials) >= self.sweep.trials:
                    return None
                self.study.sampler = self.make_sampler(len(trials))
                asked = self.study.ask()
                claim = self.claims.take(name_trial(asked.number), None)
                assert claim is not None, "asked for under the lock"
                self.held[claim.name] = claim
                self.propose(asked)
                return asked, claim
            finally:
                lock.release()

    def propose(self, trial: Any) -> dict[str, Any]:
        """The trial's settings; those that it has already stay."""
        values: dict[str, Any] = {}
        for axis in self.axes:
            if axis.kind == "choice":  # by place: optuna's log keeps plain values alone
                values[axis.name] = axis.choices[trial.suggest_categorical(axis.name, list(range(len(axis.choices))))]
            elif axis.kind == "int":
                values[axis.name] = trial.suggest_int(axis.name, int(axis.low), int(axis.high), log=axis.log)
            else:
                values[axis.name] = trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)
        return values

    def do(self, trial: Any, claim: Claim) -> None:
        """Run a trial to its end with every seed, and tell the study how it went."""
        import optuna

        state, begun = optuna.trial.TrialState, time.monotonic()
        values = self.propose(trial)
        shown = ", ".join(f"{name} {format_value(value)}" for name, value in values.items())
        ending, reason, scores = "done", "", []
        for seed in self.sweep.seeds:
            name = claim.name if len(self.sweep.seeds) == 1 else f"{claim.name}-seed-{seed}"
            try:
                config = self.base.override(values | {"train.seed": seed, "name": name})
            except ConfigError as error:
                ending, reason = "failed", str(error)
                break
            ending, reason = self.run_one(trial, config, claim, watched=seed == self.sweep.seeds[0])
            if ending != "done":
                break
            result = RunFolder(self.out / name).read_result() or {}
            score = finite_number(result.get(self.sweep.metric))
            if score is None:
                ending, reason = "failed", f"its result has no {self.sweep.metric}"
                break
            scores.append(score)
        if claim.is_held() and ending != "interrupted":
            if reason:
                trial.set_user_attr("reason", reason)
            told = {"done": state.COMPLETE, "pruned": state.PRUNED, "failed": state.FAIL}[ending]
            self.study.tell(trial.number, statistics.fmean(scores) if ending == "done" else None, state=told)
        self.claims.settle(claim, state=ending)
        self.held.pop(claim.name, None)
        value = f" {self.sweep.metric} {statistics.fmean(scores):.4f}" if ending == "done" else ""
        why = f" ({reason})" if reason else ""
        self.say(f"{claim.name}: {ending}{value}{why} in {describe_seconds(time.monotonic() - begun)}; {shown}")
        if ending != "interrupted":
            self.tell_outcome()

    def run_one(self, trial: Any, config: RunConfig, claim: Claim, *, watched: bool) -> tuple[str, str]:
        """Train one run in a process; how it ended (done, pruned, failed or interrupted), and why.

        watched: its losses are reported, and it may be stopped for them.
        """
        folder = RunFolder(self.out / config.name)
        if folder.result_file.is_file() and folder.read_result() is not None:
            return "done", ""
        if not self.wait_for(folder):
            return "interrupted", ""
        for part in ("configs", "logs"):
            (self.out / part).mkdir(exist_ok=True)
        file, log = self.out / "configs" / f"{config.name}.yaml", self.out / "logs" / f"{config.name}.txt"
        config.save(file)
        words = ["train", "--config", str(file), "--out", str(folder.path), "--resume", "auto"]
        environment = python_environment() | {IN_QUEUE: "1", OBEYS: f"{claim.about['token']} {claim.path.absolute()}"}
        pruned = False
        with log.open("a+b") as written:
            start = written.tell()
            process = subprocess.Popen(
                python_command("-m", "some_moe", *words),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
                **APART,
            )
            self.signals.told[process] = 0
            self.signals.pass_on()
            try:
                while process.poll() is None:
                    time.sleep(LOOK_SECONDS)
                    if watched and not pruned and self.report(trial, folder):
                        pruned = True
                        process.send_signal(signal.SIGTERM)  # it saves, and goes
            finally:
                del self.signals.told[process]
            if watched:
                self.report(trial, folder)
            written.seek(start)
            messages = written.read().decode("utf-8", errors="replace")
        code = process.returncode
        if code == 0:
            return "done", ""
        if pruned:
            return "pruned", ""
        if code in STOPPED or self.signals.count:
            return "interrupted", ""
        return "failed", explain_failure(code, messages)

    def wait_for(self, folder: RunFolder) -> bool:
        """Wait for a run that has outlived its worker, and ends soon; False where this one is stopped meanwhile."""
        while folder.path.is_dir() and not self.signals.count:
            try:
                take_lock(folder.path / LOCK, "").release()
                break
            except ConfigError:
                time.sleep(LOOK_SECONDS)
        return not self.signals.count

    def report(self, trial: Any, folder: RunFolder) -> bool:
        """Tell the study the losses that are new; whether the trial is to be stopped for them."""
        try:
            lines = read_log(folder.path / "metrics.jsonl")
        except (ConfigError, OSError):
            return False  # it is being cut back, or has not begun
        with self.telling:
            known = self.study._storage.get_trial(trial._trial_id).intermediate_values
            fresh = [line for line in lines if "val_loss" in line and line["step"] not in known]
            for line in fresh:
                trial.report(float(line["val_loss"] if line["val_loss"] is not None else math.inf), line["step"])
            return bool(fresh) and self.sweep.prune and bool(trial.should_prune())

    # --- what it tells ----------------------------------------------------------------------------------------

    def tell_outcome(self, *, ended: bool = False) -> dict[str, Any]:
        """Write sweep.json, and hand the same to who draws it. Importances, which take longest, are weighed anew at the
        end and after every few trials."""
        with self.telling:
            found = describe_study(self.study, self.sweep, self.axes)
            num_done = sum(trial["state"] == "done" for trial in found["trials"])
            if ended or num_done >= self.weighed[0] + WEIGH_EVERY:
                self.weighed = num_done, weigh_settings(self.study, num_done, self.axes)
            found["importances"], found["importances_by"] = self.weighed[1]
            write_whole(self.out / OUTCOME, json.dumps(found, indent=1) + "\n")
            self.changed(found)
        return found


def format_value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def describe_study(study: Any, sweep: Sweep, axes: list[Axis]) -> dict[str, Any]:
    """A study as plain data: every trial, and the best."""
    trials = []
    for trial in study.get_trials(deepcopy=False):
        chosen = {axis.name: trial.params[axis.name] for axis in axes if axis.name in trial.params}
        for axis in axes:
            if axis.kind == "choice" and axis.name in chosen:
                chosen[axis.name] = axis.choices[chosen[axis.name]]
        trials.append(
            {"number": trial.number, "name": name_trial(trial.number), "state": STATES[trial.state.name]}
            | {"value": finite_number(trial.value), "settings": chosen, "reason": trial.user_attrs.get("reason", "")}
            | {"curve": [[step, finite_number(loss)] for step, loss in sorted(trial.intermediate_values.items())]}
        )
    done = [trial for trial in trials if trial["state"] == "done" and trial["value"] is not None]
    return {
        "format_version": 1,
        "metric": sweep.metric,
        "seeds": list(sweep.seeds),
        "wanted": sweep.trials,
        "axes": [axis._asdict() for axis in axes],
        "trials": trials,
        "best": min(done, key=lambda trial: trial["value"], default=None),
    }


def weigh_settings(study: Any, num_done: int, axes: list[Axis]) -> tuple[dict[str, float], str]:
    """How much each setting matters, in shares that add up to 1; nothing before four trials are done."""
    import optuna

    if num_done < 4 or len(axes) < 2:
        return {}, ""
    evaluators = {"fANOVA": "FanovaImportanceEvaluator", "PED-ANOVA": "PedAnovaImportanceEvaluator"}
    for method, kind in evaluators.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                options = {"seed": 0} if method == "fANOVA" else {}
                evaluator = getattr(optuna.importance, kind)(**options)
                found = optuna.importance.get_param_importances(study, evaluator=evaluator)
        except (ImportError, RuntimeError, ValueError, ZeroDivisionError):
            continue  # without scikit-learn, or with trials that are all alike
        if all(math.isfinite(share) for share in found.values()):
            return {name: float(share) for name, share in found.items()}, method
    return {}, ""
