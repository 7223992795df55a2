"""Pages as Markdown: the same parts as the HTML, for a repository, a pull request or a notebook."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from some_moe.glass.page import blocks
from some_moe.glass.page.terminal import make_trace_table
from some_moe.layout import Column
from some_moe.system.reading import clean

TRACED_TOKENS = 25
NUMBER_COLUMNS = (Column("figure"), Column("value", numeric=True), Column("note"))


def render_markdown(page: blocks.Page, folder: Path) -> str:
    """The page as Markdown for a file in `folder`, from which the paths of its figures count."""
    parts = [f"# {plain(page.title)}", plain(page.kicker), sentence(page.summary)]
    for section in page.sections:
        parts += [f"## {plain(section.title)}", *_write_all(section.blocks, folder)]
    return str(clean("\n\n".join(part for part in parts if part))) + "\n"


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


def _write_all(several: Sequence[blocks.Block], folder: Path) -> list[str]:
    return [part for block in several for part in _write(block, folder)]


def _write(block: blocks.Block, folder: Path) -> list[str]:
    match block:
        case blocks.Notice(text):
            return ["> " + sentence(text)]
        case blocks.Code(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall(r"`+", text)), default=0))
            return [f"{fence}\n{text.rstrip()}\n{fence}"]
        case blocks.Story(text, note):
            quoted = "\n".join(f"> {plain(line)}" for line in text.splitlines() or [""])
            return [quoted, f"— {plain(note)}" if note else ""]
        case blocks.Text(text):
            return [sentence(text)]
        case blocks.Numbers(items):
            return [write_rows(NUMBER_COLUMNS, items)]
        case blocks.Table(columns, rows, caption):
            return [sentence(caption), write_rows(columns, rows)]
        case blocks.Facts(pairs, title):
            facts = "\n".join(f"- {plain(name)}: {plain(value)}" for name, value in pairs)
            return [f"### {plain(title)}" if title else "", facts]
        case blocks.Figure(file, alt, caption):
            return [f"![{plain(alt)}]({_link(file, folder)})", sentence(caption)]
        case blocks.Gallery(figures):
            return _write_all(figures, folder)
        case blocks.Frame(_, file, title):
            return [f"[{plain(title)}]({_link(file, folder)})"]
        case blocks.TraceView(trace):
            return _write(make_trace_table(trace, TRACED_TOKENS), folder)
        case blocks.Cards(cards):
            return [part for card in cards for part in _write_card(card, folder)]
        case blocks.Fold(summary, inner):
            return [f"### {plain(summary)}", *_write_all(inner, folder)]
    raise AssertionError(block)


def _link(file: Path, folder: Path) -> str:
    """The way from a folder to a file, as a link that no character of it can end."""
    return quote(os.path.relpath(file, folder).replace(os.sep, "/"))


def write_rows(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, name: Callable[[str], str] = plain) -> str:
    """A table's header, rule and rows. name: how the first cell of a row is written."""
    lines = [[plain(column.header) for column in columns]]
    lines.append(["---:" if column.numeric else "---" for column in columns])
    lines += [[name(row[0]), *map(plain, row[1:])] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_card(card: blocks.Card, folder: Path) -> list[str]:
    experts = ", ".join(map(str, card.experts))
    parts = [f"### {plain(card.title)}: {plain(card.verdict)}", f"{plain(card.subtitle)}; experts {experts}."]
    parts += [sentence(card.reason), *_write(card.evidence, folder)]
    if card.words:
        parts.append("Words: " + ", ".join(f"{plain(text)} ({count})" for text, count in card.words))
    if card.excerpts:
        parts.append("\n".join(f"- {plain(a)} **{plain(word)}** {plain(b)}" for a, word, b in card.excerpts))
    return parts
