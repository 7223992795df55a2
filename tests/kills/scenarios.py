"""Every command that writes, on every kind of run, small enough to take a fraction of a second."""

from dataclasses import dataclass
from importlib.util import find_spec

from some_moe.lab.jobs import write_flag
from tests.golden.kinds import KINDS as GOLDEN
from tests.shared.tiny import TINY

TINY_RUN = [
    *("--preset", "smoke", "--model.d-model", "16", "--model.num-layers", "2", "--model.num-experts", "6"),
    *("--model.num-heads", "2", "--model.d-ffn", "8", "--model.vocab-size", "300", "--data.seq-len", "24"),
    *("--data.batch-size", "4", "--data.train-subset-size", "12", "--data.val-subset-size", "2"),
    *("--train.epochs", "2", "--train.save-every", "1", "--train.snapshot-every", "2", "--train.log-every", "1"),
    *("--train.sample-tokens", "2", "--train.compile", "false"),
]
# Each kind of model, and those in which much must be remembered.
KINDS: dict[str, list[str]] = GOLDEN | {
    "bucketed-accumulated": ["--train.global-batch-tokens", "192", "--train.top-k-warmup", "0.3"],
    "one-kept": ["--train.keep-last", "1", "--train.eval-every", "1"],
    "moving-keys": [
        *("--gravity.respawn-below", "0.9", "--gravity.respawn-patience", "1", "--gravity.key-ema", "0.5"),
        *("--model.center-queries", "true", "--gravity.beta-schedule", "cosine", "--gravity.beta", "0.1"),
        *("--train.top-k-warmup", "0.3", "--train.top-k-ramp", "0.4"),
    ],
    "theta": [
        *("--gravity.theta", "3", "--gravity.theta-percentile", "null", "--gravity.theta-window", "2"),
        *("--model.dropout", "0.2", "--model.learn-temperature", "true"),
    ],
    "lora-packed": [
        *("--model.trainability", "lora", "--model.lora-rank", "2", "--data.batching", "packed"),
        *("--train.global-batch-tokens", "192", "--train.max-steps", "4", "--model.init-method", "orthogonal"),
        *("--model.shared-expert", "8", "--train.epochs", "4"),
    ],
    "full-learned": [
        *("--model.trainability", "full", "--model.router", "learned", "--model.balance-loss", "0.01"),
        *("--gravity.use-alpha", "false", "--gravity.use-beta", "false", "--gravity.use-delta", "false"),
    ],
    "dense": [
        *("--model.ffn", "dense", "--model.dense-width", "24", "--gravity.use-alpha", "false"),
        *("--gravity.use-beta", "false", "--gravity.use-delta", "false"),
    ],
    "early-stop": ["--train.eval-every", "1", "--train.early-stop", "2", "--train.learning-rate", "0.2"],
}
QUEUE = TINY | {
    "model.d_model": 16, "model.num_experts": 4, "model.d_ffn": 8, "model.vocab_size": 300,
    "data.seq_len": 24, "data.batch_size": 4, "data.train_subset_size": 8, "data.val_subset_size": 2,
    "train.save_every": 1, "train.compile": False,
}  # fmt: skip
BACK_TO = 2  # the step to which a run goes back
DRAWING = ("matplotlib", "sklearn", "networkx", "scipy")


@dataclass(frozen=True)
class Scenario:
    """A command, what it finds, and how it is given again after it was killed."""

    name: str
    words: tuple[str, ...]
    again: tuple[tuple[str, ...], ...] = ()  # one of these; none: the same words
    before: tuple[tuple[str, ...], ...] = ()  # commands that make the folder which it finds
    target: str = "command"  # whose moments are counted
    own_cache: bool = False  # prepared data is not there yet, and is made below the watched folder
    share: float = 1.0  # of the kills, beside the others
    repeats: bool = False  # until the run has begun, it must be given in the same words

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

    @property
    def goes_back(self) -> bool:
        return self.group == "back"


def make_scenarios() -> dict[str, Scenario]:
    found = []
    for kind, flags in KINDS.items():
        words = ("train", *TINY_RUN, *flags, "--out", "run")
        found.append(Scenario(f"train/{kind}", words, ((*words, "--resume", "auto"),)))
    plain = ("train", *TINY_RUN, "--out", "run")
    auto = ("train", "--out", "run", "--resume", "auto")
    for kind in ("plain", "full", "moving-keys", "lora-packed"):
        finished = ("train", *TINY_RUN, *KINDS[kind], "--train.keep-last", "9", "--out", "run")
        back = ("train", "--resume", f"run/checkpoints/step-{BACK_TO}")
        found.append(Scenario(f"back/{kind}", back, (auto, auto, back), (finished,), share=2.0))
    donor = ("train", *TINY_RUN, "--train.seed", "5", "--out", "donor")
    found.append(Scenario("init-from/plain", (*plain, "--init-from", "donor"), (auto,), (donor,), repeats=True))
    found.append(Scenario("cache/plain", plain, (auto, (*plain, "--resume", "auto")), own_cache=True, repeats=True))
    flags = [write_flag(name, value) for name, value in QUEUE.items()]
    queue = ("experiments", "run", "A1", "--seeds", "0,1", "--out", "runs", "--results", "results", *flags)
    found.append(Scenario("queue/itself", queue, share=2.0))
    found.append(Scenario("queue/run", queue, target="run", share=2.0))
    joined = (*queue, "--join", "--dead-after", "10")
    found.append(Scenario("queue/joined", joined, (joined, ("experiments", "run", "--join", "--out", "runs"))))
    found.append(Scenario("queue/joined-run", joined, target="run"))
    found.append(
        Scenario("trace/plain", ("trace", "run", "Once upon a time", "--html", "run/trace.html"), (), (plain,))
    )
    found += grow_scenarios()
    base = ("train", *TINY_RUN, "--out", "base")
    stream = ("--stream", "base/samples.jsonl", "base/samples.jsonl", "--chunk-tokens", "16", "--device", "cpu")
    found.append(Scenario("adapt/keys", ("adapt", "base", *stream, "--out", "run"), (), (base,)))
    if not missing_libraries():
        old = ("analyze", "run", "--checkpoint", f"step-{BACK_TO + 1}", "--max-tokens", "40", "--no-guilds")
        analyze = ("analyze", "run", "--max-tokens", "60")
        kept = (*plain, "--train.keep-last", "9")
        found.append(Scenario("analyze/plain", analyze, (), (kept, old), share=2.0))
        found.append(
            Scenario("report/plain", ("report", "run"), (), (kept, old, ("report", "run", "--no-analyze")), share=2.0)
        )
        found.append(Scenario("report/no-analyze", ("report", "run", "--no-analyze"), (), (plain,)))
    return {scenario.name: scenario for scenario in found}


def grow_scenarios() -> list[Scenario]:
    """Branches on a base, put together and taken out. The text is the base's own: it is the files that are judged."""
    base = ("train", *TINY_RUN, "--out", "base")
    few = ("--experts", "2", "--steps", "4", "--data.train-subset-size", "12", "--data.val-subset-size", "2")
    few = (*few, "--data.batch-size", "4", "--train.save-every", "1", "--train.device", "cpu")
    found, grown = [], {}
    for kind in ("full", "lora"):
        words = ("grow", "base", "--data", "stories", *few, "--trainability", kind)
        grown[kind] = (*words, "--out", kind)
        again = (*words, "--out", "run", "--resume")
        found.append(Scenario(f"grow/{kind}", (*words, "--out", "run"), (again,), (base,)))
    branches = (base, *grown.values())
    merge = ("merge", "full", "lora")
    found.append(Scenario("merge/two", (*merge, "--out", "run"), (), branches))
    prune = ("prune", "both", "--branch", "lora", "--out", "run")
    found.append(Scenario("prune/one", prune, (), (*branches, (*merge, "--out", "both"))))
    return found


def missing_libraries() -> list[str]:
    """What analyze and report need and is not installed."""
    return [name for name in (*DRAWING, "umap") if find_spec(name) is None]
