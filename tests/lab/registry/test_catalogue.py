"""An entry becomes an experiment by its base and its changes, and a bad one is refused by its name."""

from decimal import Decimal
from textwrap import dedent, indent

import pytest

from some_moe.config import ConfigError
from some_moe.lab.registry.catalogue import Catalogue
from some_moe.lab.registry.records import Experiment

HEAD = """
sources:
  a report: {report: The report, files: [a.pdf]}
shared:
  slow: &slow {train.learning_rate: 0.0001, train.warmup: 0.5}
bases:
  all: {changes: {model.top_k: 2}, assumed: [train.clip, [model.top_k, gravity.alpha]]}
series:
  First:
    source: a report
    base: all
    notes: [Shared.]
    experiments:
      run:
        title: a run
        published: {val_loss: "1.50"}
        notes: [[Own., Another.]]
"""


def read(entry: str) -> Experiment:
    """The last experiment of a file that ends with this entry."""
    return Catalogue().read("some.yaml", HEAD + indent(dedent(entry), " " * 6))[-1]


def test_a_published_run_says_what_is_assumed_and_a_study_settles_it() -> None:
    run, study, deeper, quiet = Catalogue().read(
        "some.yaml",
        HEAD
        + """
      study: {title: a study, base: run, changes: {model.top_k: 3}, question: What?}
      deeper: {title: on a study, base: study, changes: {<<: *slow, train.warmup: 0.1}, assumed: [train.warmup]}
      quiet: {title: a room, base: run, changes: {gravity: {use_alpha: false}}}
""",
    )
    assert (run.derived_from, study.derived_from, deeper.derived_from) == (None, "run", "study")
    assert run.assumed == ("model.top_k", "gravity.alpha", "train.clip")
    assert study.assumed == ("gravity.alpha", "train.clip")
    assert deeper.assumed == ("gravity.alpha", "train.warmup", "train.clip")
    assert quiet.assumed == ("model.top_k", "train.clip")
    assert (run.config.model.top_k, study.config.model.top_k, deeper.config.model.top_k) == (2, 3, 3)
    assert (deeper.config.train.learning_rate, deeper.config.train.warmup) == (0.0001, 0.1)
    assert run.notes == ("Own.", "Another.", "Shared.")
    assert study.source.files == ("a.pdf",)


def test_the_last_epoch_is_final_unless_other_figures_are_given() -> None:
    published = read(
        """
        printed:
          title: a run
          published:
            gini: "0.3000"
            epochs: |
              1 2.0 1.90 6.69 0.20 -
              2 - 1.50 4.48 0.310 5.10
        """
    ).published
    assert published is not None
    assert str(published.epochs[0].val_loss) == "1.90"
    assert published.epochs[0].entropy_bits is None
    assert (published.train_loss, str(published.val_loss)) == (None, "1.50")
    assert (published.gini, published.entropy_bits) == (Decimal("0.3000"), Decimal("5.10"))


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("bad: {}", "an experiment needs a title"),
        ("bad:", r"experiments\.bad must be a valid dictionary, but it is None"),
        ("bad: {titel: a run}", "titel is not a field; did you mean 'title'?"),
        ("bad: {title: a run, base: rum}", "'rum' is not a base; did you mean 'run'?"),
        ("bad: {title: a run, base: bad}", "'bad' is not a base"),
        ("bad: {title: a run, source: report}", "'report' is not a source; did you mean 'a report'?"),
        ("bad: {title: a run, assumed: [train.klip]}", "'train.klip' is not a field; did you mean 'train.clip'?"),
        ("bad: {title: a run, changes: {model.topk: 2}}", "model.topk is not a field; did you mean 'model.top_k'?"),
        ("bad: {title: a run, changes: {model.top_k: many}}", "model.top_k must be a valid integer"),
        ("bad: {title: a run, published: {ginni: '0.1'}}", r"published\.ginni is not a field; did you mean 'gini'?"),
        ("bad: {title: a run, published: {gini: 0.10}}", "0.1 is not a printed figure; write it in quotes"),
        ("bad: {title: a run, published: {epochs: 1 2.0 3.0}}", "but there is '1 2.0 3.0'"),
        ("bad: {title: a run, published: {traces: [{tokn: a}]}}", r"published\.traces\.0\.token is missing"),
        ("all: {title: a base}", "all: the name is taken"),
    ],
)
def test_a_bad_entry_is_named_with_what_is_wrong(entry: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as raised:
        read(entry)
    assert str(raised.value).startswith("some.yaml: ")
    assert entry.partition(":")[0] in str(raised.value)


def test_a_bad_base_is_named() -> None:
    with pytest.raises(ConfigError, match=r"some.yaml: half: model.topk is not a field"):
        Catalogue().read("some.yaml", "bases: {half: {changes: {model.topk: 1}}}")
