"""Pages say what the run's files say, keep text text, and stand alone."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import some_moe
from some_moe.cli import main
from some_moe.config import RunConfig
from some_moe.config.parameters import count_parameters
from some_moe.glass.inspect.runs import read_run
from some_moe.glass.inspect.traces import Trace, TracedToken
from some_moe.glass.page.blocks import Code, Facts, Fold, Notice, Page, Section, Story, Table, Text, TraceView
from some_moe.glass.page.guild_sections import make_guild_section, show_p
from some_moe.glass.page.inside import describe_analysis, list_missing, read_analysis
from some_moe.glass.page.markdown import plain, render_markdown, sentence
from some_moe.glass.page.pages import headline, make_page
from some_moe.glass.page.render import mark_code, render_page, render_trace, to_json
from some_moe.glass.page.terminal import expert_hue, format_trace, show_token, terminal_color
from some_moe.glass.results import Result
from some_moe.layout import Column, Style
from tests.glass.conftest import GUILDS

NASTY = "<script>alert(1)</script>"


def make_trace(**changes: Any) -> Trace:
    tokens = tuple(
        TracedToken(
            text=text, experts=((1, 0), (2, 1)), gates=((0.7, 0.3), (0.9, 0.1)), next_probability=0.5, next_nats=0.693,
            guess="b", guess_probability=0.6,
        )
        for text in ("<|bos|>", " cat", NASTY)
    )  # fmt: skip
    values = {"run": "mine", "step": 3, "layers": (0, 1), "num_experts": 4, "top_k": 2, "router": "gravity"}
    return Trace(**(values | {"tokens": tokens} | changes))


def sections_of(page: Page) -> dict[str, list[Any]]:
    return {section.title: list(section.blocks) for section in page.sections}


# --- text stays text ----------------------------------------------------------------------------------------


def test_html_escapes_whatever_it_shows() -> None:
    blocks = [Text(NASTY), Notice(NASTY), Story(NASTY, NASTY), Code(NASTY), Facts([(NASTY, NASTY)], NASTY)]
    blocks += [Table([Column(NASTY)], [[NASTY]], NASTY), Fold(NASTY, [Text(NASTY)]), TraceView(make_trace())]
    html = render_page(Page(NASTY, NASTY, NASTY, [Section(NASTY, blocks), Section("two", [])]))
    assert NASTY not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 14


def test_the_data_of_a_trace_cannot_end_its_element() -> None:
    html = render_trace(make_trace())
    assert NASTY not in html
    data = re.search(r'<script type="application/json">(.*?)</script>', html)
    assert data is not None
    assert json.loads(data[1])["tokens"][2]["text"] == NASTY


def test_json_for_a_page_reads_back_the_same() -> None:
    value = {"a": "</script><!--\u2028&'\"", "b": [1, None, 0.5]}
    text = str(to_json(value))
    assert json.loads(text) == value
    assert not set("<>&") & set(text)


def test_backticks_mark_code_and_nothing_else() -> None:
    assert mark_code("run `some <b>` now") == "run <code>some &lt;b&gt;</code> now"
    assert mark_code("one ` alone") == "one ` alone"


def test_markdown_keeps_signs_from_becoming_markup() -> None:
    assert plain("a_b *c* |d| <i> [e](f) #g `h`") == r"a\_b \*c\* \|d\| &lt;i&gt; \[e\](f) \#g \`h\`"
    assert sentence("see `a_b <c>` or d_e") == r"see `a_b <c>` or d\_e"
    assert sentence("one ` alone") == r"one \` alone"


def test_markdown_tables_survive_pipes_and_line_breaks(tmp_path: Path) -> None:
    table = Table([Column("a"), Column("b", numeric=True)], [["x|y", "1"], ["two\nlines", "2"]])
    text = render_markdown(Page("t", "k", "s", [Section("S", [table])]), tmp_path)
    assert "| a | b |\n| --- | ---: |\n| x\\|y | 1 |\n| two lines | 2 |" in text


def test_a_page_allows_only_its_own_script_and_no_request() -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', render_trace(make_trace()))
    assert policy is not None
    assert policy[1].startswith("default-src &#39;none&#39;")
    assert "sha256-" in policy[1]
    plain_page = render_page(Page("t", "k", "s", [Section("S", [Text("x")])]))
    assert "script-src &#39;none&#39;" in plain_page
    assert "<script" not in plain_page


# --- traces in the terminal ---------------------------------------------------------------------------------


def test_terminal_traces_are_plain_unless_colour_is_wanted() -> None:
    without = "\n".join(format_trace(make_trace(), width=None, style=Style(False)))
    assert "\x1b" not in without
    assert "50%   1 0.70  0 0.30   2 0.90  1 0.10" in without
    with_colour = "\n".join(format_trace(make_trace(), width=None, style=Style(True)))
    assert f"\x1b[38;5;{terminal_color(1)}m" in with_colour
    assert re.sub(r"\x1b\[[0-9;]*m", "", with_colour) == without


def test_layers_that_do_not_fit_follow_below() -> None:
    lines = format_trace(make_trace(), width=44, style=Style(False))
    text = "\n".join(lines)
    assert text.index("layer 0") < text.index("layer 1")
    assert text.count("<|bos|>") == 2
    assert max(map(len, lines[1:])) <= 44


def test_what_commands_print_is_no_wider_than_the_terminal(run: Path) -> None:
    shown = [some_moe.trace(run, "The cat sat."), some_moe.report(run, analyze=False)]
    record = json.loads((run / "analysis" / "analysis.json").read_text()) | {"run": "a run with a long name " * 5}
    title, blocks = describe_analysis(record | {"guilds": {"candidates": 0, "supported": [], "level": 0.01}})
    shown.append(Result(title=title, findings={}, paths=(), blocks=blocks))
    for found in shown:
        lines = found.format(width=80).splitlines()
        assert max(len(line) for line in lines if not line.startswith(str(run))) <= 80
    assert "no group of experts is tied to a kind of word beyond chance" in found.format()


def test_tokens_are_shown_on_one_line() -> None:
    assert show_token(" a\n\t\x07") == "·a⏎⇥?"
    assert len(show_token("x" * 50)) == 16


def test_an_expert_keeps_its_colour_and_neighbours_differ() -> None:
    hues = [expert_hue(expert) for expert in range(12)]
    assert len(set(hues)) == 12
    assert all(16 <= terminal_color(expert) <= 231 for expert in range(600))


# --- the report of one run ----------------------------------------------------------------------------------


def test_headline_figures_are_those_of_the_result(analysed: Path) -> None:
    run = read_run(analysed)
    assert run.result is not None
    shown = {item.label: item.value for item in headline(run)}
    assert shown["Test loss"] == f"{run.result['test_loss']:.4f}"
    assert shown["Validation loss"] == f"{run.result['val_loss']:.4f}"
    assert "Padded loss" not in shown
    assert next(iter(shown)) == "Test loss"


def test_the_padded_loss_is_labelled_as_the_old_protocol(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    result |= {"val_loss_padded": 0.7, "text_share": 0.26}
    (run / "result.json").write_text(json.dumps(result))
    items = [item.label for item in headline(read_run(run))]
    assert items.index("Padded loss") > items.index("Validation loss")
    padded = next(item for item in headline(read_run(run)) if item.label == "Padded loss")
    assert padded.note == "old protocol: padding counts as text; 26% of the positions are text"


def page_of(path: Path) -> Page:
    run = read_run(path)
    analysis = read_analysis(run)
    return make_page(run, analysis, [], list_missing(run, analysis))


def test_the_page_counts_the_parameters_of_the_model(analysed: Path) -> None:
    model = read_run(analysed).config.model
    count = count_parameters(model)
    said = sections_of(page_of(analysed))["Configuration"][0].text
    assert said.startswith(f"{count.trainable:,} of {count.total:,} parameters are trained")
    assert f"{model.num_layers * model.num_experts * model.d_model:,} more numbers" in said


def test_the_report_has_every_section_of_the_published_ones(analysed: Path) -> None:
    assert list(sections_of(page_of(analysed))) == [
        "At a glance", "Configuration", "Results", "Utilisation analysis", "Key stores", "Key movement", "A trace",
        "Guilds", "Samples", "Provenance", "What is missing",
    ]  # fmt: skip


def test_report_writes_a_page_and_its_markdown_twin(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    assert f"{run}/report.html" in capsys.readouterr().out
    html, text = (run / "report.html").read_text(encoding="utf-8"), (run / "report.md").read_text(encoding="utf-8")
    assert len(html) < 6_000_000
    assert NASTY not in html
    assert "<script>alert(1)<script>" not in html
    assert NASTY not in re.sub(r"```.*?```", "", text, flags=re.S)  # what is fenced is text anyway
    result = json.loads((run / "result.json").read_text())
    for page in (html, text):
        assert f"{result['test_loss']:.4f}" in page
        assert "Its experts stand out." in page
        assert "not supported" in page
    for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text):
        assert (run / link).is_file(), link


@pytest.fixture
def analyses(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs that are analysed, or would be."""
    calls: list[Path] = []
    monkeypatch.setattr("some_moe.glass.api.analyze", lambda path, *, say: calls.append(path))  # noqa: ARG005
    return calls


def test_whether_an_analysis_is_old_is_told_by_what_it_says_and_not_by_the_clock(
    run: Path, analyses: list[Path], tmp_path: Path
) -> None:
    for file in (run / "analysis").rglob("*"):
        os.utime(file, (1, 1))
    assert main(["report", str(run)]) == 0
    copy = shutil.copytree(run, tmp_path / "copy")
    assert main(["report", str(copy)]) == 0
    assert analyses == []


@pytest.mark.parametrize("change", ["later checkpoint", "other checkpoint", "older version", "damaged"])
def test_an_analysis_of_something_else_is_made_anew_or_marked(run: Path, analyses: list[Path], change: str) -> None:
    found = run / "analysis" / "analysis.json"
    record = json.loads(found.read_text())
    checkpoint = run / "checkpoints" / f"step-{record['of']['step']}"
    os.utime(found, (2**31, 2**31))
    if change == "later checkpoint":
        shutil.copytree(checkpoint, run / "checkpoints" / "step-99")
    elif change == "other checkpoint":
        (checkpoint / "state.json").write_text((checkpoint / "state.json").read_text() + " ")
    else:
        found.write_text(json.dumps(record | {"format_version": 1}) if change == "older version" else "{")
    assert main(["report", str(run), "--no-analyze"]) == 0
    assert analyses == []
    said = {
        "later checkpoint": f"made at step {record['of']['newest']}, and the run is at step 99",
        "other checkpoint": "The analysis is of another checkpoint",
        "older version": "made by another version of this program",
        "damaged": "analysis/analysis.json cannot be used",
    }
    assert said[change] in (run / "report.md").read_text(encoding="utf-8")
    assert main(["report", str(run)]) == 0
    assert analyses == [run]


def test_without_analysis_the_page_says_what_is_missing(run: Path) -> None:
    shutil.rmtree(run / "analysis")
    assert main(["report", str(run), "--no-analyze"]) == 0
    text = (run / "report.md").read_text(encoding="utf-8")
    assert "No analysis: `some analyze RUN`" in text
    assert "Guilds were not looked for" in text
    assert "![Loss during training](report-figures/loss.png)" in text
    assert (run / "report-figures" / "loss.png").is_file()


def test_a_damaged_collection_counts_as_none(run: Path) -> None:
    (run / "analysis" / "collected.safetensors").write_bytes(b"broken")
    assert main(["report", str(run), "--no-analyze"]) == 0
    assert "No text has been replayed" in (run / "report.md").read_text(encoding="utf-8")


def test_a_run_that_cannot_be_analysed_still_gets_its_report(run: Path) -> None:
    shutil.rmtree(run / "analysis")
    config = RunConfig.load(run / "config.yaml").override({"data.source": str(run / "gone.txt")})
    config.save(run / "config.yaml")
    assert main(["report", str(run)]) == 0
    assert "The analysis could not be made:" in (run / "report.md").read_text(encoding="utf-8")


def test_an_unfinished_run_shows_its_last_evaluation(run: Path) -> None:
    (run / "result.json").unlink()
    record = read_run(run)
    shown = {item.label: item.value for item in headline(record)}
    assert "Test loss" not in shown
    assert shown["Validation loss"] == f"{record.evaluations[-1]['val_loss']:.4f}"
    assert main(["report", str(run), "--no-analyze"]) == 0
    assert "Unfinished after" in (run / "report.md").read_text(encoding="utf-8")


def test_a_folder_with_a_config_alone_still_makes_a_page(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "config.yaml", bare)
    assert main(["report", str(bare)]) == 0
    assert "Nothing was recorded yet." in (bare / "report.md").read_text(encoding="utf-8")


def test_a_dense_run_has_no_expert_sections(run: Path, tmp_path: Path) -> None:
    dense = tmp_path / "dense"
    dense.mkdir()
    still = {f"gravity.{name}": False for name in ("use_alpha", "use_beta", "use_delta")}
    config = RunConfig.load(run / "config.yaml")
    config = config.override({"model.ffn": "dense", "model.dense_width": 8, "gravity.balance_rate": 0.0} | still)
    config.save(dense / "config.yaml")
    assert main(["report", str(dense)]) == 0
    text = (dense / "report.md").read_text(encoding="utf-8")
    assert "## Guilds" not in text
    assert "with one dense network each" in text


def test_guilds_say_which_parts_are_missing() -> None:
    assert "were not looked for" in make_guild_section(None).blocks[0].text  # type: ignore[union-attr]
    texts = [block.text for block in make_guild_section({}).blocks if isinstance(block, Notice)]
    assert any("there is no candidate" in text for text in texts)
    assert any("No twin run" in text for text in texts)
    for part in ({"num_tokens": 9}, {"split": "valid"}, {"level": 0.01}, {"control": {"run": "twin"}}, {"depth": {}}):
        assert make_guild_section(part).blocks


def test_the_table_of_families_prints_corrected_p_values() -> None:
    tables = [block for block in make_guild_section(GUILDS).blocks if isinstance(block, Table)]
    (families,) = [one for one in tables if one.columns[0].header == "Kind of class"]
    place = [column.header for column in families.columns].index("Corrected p")
    assert [row[place] for row in families.rows] == ["0.018"]


def test_the_section_says_who_sorted_the_words_and_which_text_it_was() -> None:
    opening = make_guild_section(GUILDS).blocks[0]
    assert isinstance(opening, Text)
    assert "400 tokens of the valid split" in opening.text
    assert "built-in tagger" in opening.text
    other = make_guild_section(GUILDS | {"split": "file book.txt"}).blocks[0]
    assert "tokens of the file book.txt:" in other.text  # type: ignore[union-attr]


def test_small_p_values_are_bounds() -> None:
    assert [show_p(value) for value in (0.0, 0.0009, 0.001, 0.25, None)] == [
        "< 0.001",
        "< 0.001",
        "0.001",
        "0.250",
        "–",
    ]


# --- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report"], "needs RUN"),
        (["report", "nowhere"], "'nowhere' is not a run: it has no config.yaml"),
        (["report", "RUN", "RUN"], "is given twice; name each run once"),
        (["report", "RUN", "--out", "page.txt"], "--out page.txt is not a page; give a name that ends in .html"),
        (["report", "RUN", "--out", "no/such/place.html"], "lies in a folder that does not exist"),
        (["report", "RUN", "--colour"], "--colour is not an option of `some report`"),
        (["trace", "RUN"], "needs TEXT"),
        (["trace", "RUN", " "], "the text ' ' is empty"),
        (["trace", "RUN", "cat", "--layers", "0,x"], "--layers 0,x is not a list of numbers"),
        (["trace", "RUN", "cat", "--layers", "0,7"], "layer 7 is not in"),
        (["trace", "RUN", "cat " * 200], "give a shorter text"),
        (["trace", "RUN", "cat", "--checkpoint", "step-99"], "has no checkpoint 'step-99'"),
        (["trace", "RUN", "cat", "--html", "no/such/place.html"], "cannot be written"),
        (["trace", "nowhere", "cat"], "'nowhere' is not a run"),
    ],
)
def test_bad_input_gets_one_sentence_and_touches_nothing(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert main([str(run) if word == "RUN" else word for word in arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_trace_prints_a_table_and_writes_a_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), f"The cat {NASTY}"]) == 0
    printed = capsys.readouterr().out
    assert "layer 1" in printed
    assert "\x1b" not in printed
    assert printed.endswith(f"\n{run}/trace.html\n")
    assert NASTY not in (run / "trace.html").read_text(encoding="utf-8")


def test_trace_as_json_writes_a_page_only_where_one_is_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run), "The cat", "--json", "--layers", "1"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["layers"] == [1]
    assert record["tokens"][0]["text"] == "<|bos|>"
    assert not (run / "trace.html").exists()
    assert main(["trace", str(run), "The cat", "--json", "--html", str(tmp_path / "t.html")]) == 0
    assert (tmp_path / "t.html").is_file()


def test_guilds_of_another_collection_are_said_to_be_old(run: Path) -> None:
    file = run / "analysis" / "guilds.json"
    guilds = read_analysis(read_run(run)).guilds
    assert guilds is not None
    assert "stale" not in guilds
    file.write_text(file.read_text().replace(guilds["of"], "0" * 64))
    stale = read_analysis(read_run(run)).guilds
    assert stale is not None
    assert make_guild_section(stale).blocks[0] == Notice(stale["stale"])
