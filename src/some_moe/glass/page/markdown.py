"""Pages as Markdown: the same parts as the HTML, for a repository, a pull request or a notebook."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from some_moe.glass.page import blocks
from some_moe.glass.page.trace_text import make_trace_table
from some_moe.layout import Column

TRACED_TOKENS = 25


def render_markdown(page: blocks.Page, folder: Path) -> str:
    """The page as Markdown for a file in `folder`, from which the paths of its figures count."""
    parts = [f"# {plain(page.title)}", plain(page.kicker), sentence(page.summary)]
    for section in page.sections:
        parts.append(f"## {plain(section.title)}")
        for block in section.blocks:
            parts += _write(block, folder)
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Text that stays text: no character of it starts markup or HTML."""
    text = re.sub(r"\s+", " ", text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")).strip()
    return re.sub(r"([\\`*_\[\]|#~])", r"\\\1", text)


def sentence(text: str) -> str:
    """A sentence whose code stays between backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a backtick without its twin is only a character
        return plain(text)
    return "".join(f"`{piece}`" if number % 2 else _keep_ends(piece) for number, piece in enumerate(pieces))


def _keep_ends(text: str) -> str:
    """`plain`, with the spaces next to code kept."""
    return (" " if text[:1] == " " else "") + plain(text) + (" " if text[-1:] == " " and text.strip() else "")


def _write(block: blocks.Block, folder: Path) -> list[str]:
    if isinstance(block, blocks.Text):
        return [sentence(block.text)]
    if isinstance(block, blocks.Notice):
        return ["> " + sentence(block.text)]
    if isinstance(block, blocks.Numbers):
        columns = (Column("figure"), Column("value", numeric=True), Column("note"))
        return _write_table(blocks.Table(columns, [(n.label, n.value, n.note) for n in block.items]))
    if isinstance(block, blocks.Table):
        return _write_table(block)
    if isinstance(block, blocks.Facts):
        title = [f"### {plain(block.title)}"] if block.title else []
        return [*title, "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in block.pairs)]
    if isinstance(block, blocks.Figure):
        return [f"![{plain(block.alt)}]({_link(block.file, folder)})", sentence(block.caption)]
    if isinstance(block, blocks.Gallery):
        return [part for figure in block.figures for part in _write(figure, folder)]
    if isinstance(block, blocks.Frame):
        return [f"[{plain(block.title)}]({_link(block.file, folder)})"]
    if isinstance(block, blocks.Story):
        quoted = "\n".join(f"> {plain(line)}" for line in block.text.splitlines() or [""])
        return [quoted, f"— {plain(block.note)}" if block.note else ""]
    if isinstance(block, blocks.Code):
        fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", block.text)), default=0))
        return [f"{fence}\n{block.text.rstrip()}\n{fence}"]
    if isinstance(block, blocks.TraceView):
        return _write_table(make_trace_table(block.trace, TRACED_TOKENS))
    if isinstance(block, blocks.Cards):
        return [part for card in block.items for part in _write_card(card)]
    assert isinstance(block, blocks.Fold)
    return [f"### {plain(block.summary)}", *(part for inner in block.blocks for part in _write(inner, folder))]


def _link(file: Path, folder: Path) -> str:
    """The way from a folder to a file, as a link that no character of it can end."""
    return quote(os.path.relpath(file, folder).replace(os.sep, "/"))


def _write_table(table: blocks.Table) -> list[str]:
    return [sentence(table.caption), write_rows(table.columns, table.rows)]


def write_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, name: Callable[[str], str] = plain) -> str:
    """A table's header, rule and rows. name: how the first cell of a row is written."""
    lines = [[plain(column.header) for column in columns]]
    lines.append(["---:" if column.numeric else "---" for column in columns])
    lines += [[name(row[0]), *map(plain, row[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_card(card: blocks.Card) -> list[str]:
    experts = ", ".join(map(str, card.experts))
    parts = [f"### {plain(card.title)}: {plain(card.verdict)}", f"{plain(card.subtitle)}; experts {experts}."]
    parts.append(sentence(card.reason))
    parts += _write_table(card.evidence)
    if card.words:
        parts.append("Words: " + ", ".join(f"{plain(text)} ({count})" for text, count in card.words))
    if card.excerpts:
        parts.append("\n".join(f"- {plain(a)} **{plain(word)}** {plain(b)}" for a, word, b in card.excerpts))
    return parts
