"""Files of documents: text, JSON, Parquet, text packed by gzip or zstd. Whatever is in them, it is read or named.

Of a file of any size no more is in memory than some pieces and one document.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, DataConfig
from some_moe.system.reading import clean, parse_json, refuse_bomb, refuse_irregular, refuse_unprintable
from some_moe.system.streams import PACKINGS, cut, occurs, read_list, read_text

END_OF_TEXT = "<|endoftext|>"


def kind_of(path: Path) -> str:
    """What a file's name says it is: ".txt" and so on, in small letters; ".gz" is left out where text is packed."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before if last in PACKINGS and before in PACKABLE else last


def read_documents(path: Path, config: DataConfig) -> Iterator[str]:
    """One file's documents, stripped of outer white space; empty ones are left out."""
    refuse_unprintable(str(path), "data.source")
    refuse_irregular(path)
    reader = READERS.get(kind_of(path))
    if reader is None:
        ends, kinds, packed = "".join(path.suffixes[-2:]), ", ".join(READERS), " or ".join(PACKINGS)
        raise ConfigError(
            f"data.source {str(path)!r} ends in {ends!r}; supported are {kinds}, and all but that as {packed}"
        )
    documents = strip(reader(path, config))
    first = next(documents, None)
    if first is None:
        raise ConfigError(f"data.source {str(path)!r} holds no text; give a file with at least one document")
    yield first
    yield from documents


def strip(documents: Iterable[str]) -> Iterator[str]:
    return (text for text in (document.strip() for document in documents) if text)


def _read_txt(path: Path, config: DataConfig) -> Iterator[str]:
    """Documents end at data.separator; by default at <|endoftext|> where that occurs, else at blank lines."""
    separator = config.separator.replace("\\n", "\n").replace("\\t", "\t")  # as a shell leaves them
    return cut(read_text(path), separator or (END_OF_TEXT if occurs(END_OF_TEXT.encode(), path) else None))


def _read_json(path: Path, config: DataConfig) -> Iterator[str]:
    """A list of records or of texts, or one of them a line."""
    pieces, begin = read_text(path), ""
    while not begin.strip() and (piece := next(pieces, None)) is not None:
        begin += piece
    if kind_of(path) == ".json" and begin.lstrip().startswith("["):
        for number, record in enumerate(read_list(begin, pieces, repr(str(path))), 1):
            yield text_of(record, f"{str(path)!r}, record {number},", config.text_field)
        return
    for number, line in enumerate(cut(chain([begin], pieces), "\n"), 1):
        if line.strip():
            where = f"{str(path)!r}, line {number},"
            yield text_of(_parse(line, where, "mend or remove that line"), where, config.text_field)


def _parse(text: str, where: str, cure: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        place = f" (its line {error.lineno})" if error.lineno > 1 else ""
        raise ConfigError(f"{where} is not JSON{place}; {cure}") from None
    except ValueError:
        raise ConfigError(f"{where} has numbers or nesting beyond all measure; {cure}") from None


def text_of(record: Any, where: str, field: str) -> str:
    """The text of a record: its field of that name, or the record itself where it is a string."""
    text = record.get(field) if isinstance(record, dict) else record
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])
            raise ConfigError(f"{where} has half a character, {half}, in its text; mend or remove it") from None
        return text
    if not isinstance(record, dict):
        raise ConfigError(f"{where} has no text: it is no object; each record needs a {field!r} field with a string")
    chat = next((name for name in (field, "messages", "conversations") if isinstance(record.get(name), list)), None)
    if chat is not None:
        raise ConfigError(
            f"{where} holds a list of messages, {clean(chat)!r}, not a text; write each conversation as one string, in "
            f"a {field!r} field"
        )
    raise ConfigError(
        f"{where} has no text: it has the fields {name_some(record)}; each record needs a {field!r} field with a "
        "string, or name another by data.text_field"
    )


def name_some(names: Iterable[str]) -> str:
    """The names of fields or columns, as many as a sentence can bear."""
    found = sorted(map(str, names))
    return f"{clean([name[:40] for name in found[:10]])}{f' and {len(found) - 10} more' if len(found) > 10 else ''}"


def _read_parquet(path: Path, config: DataConfig) -> Iterator[str]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise ConfigError("reading .parquet needs pyarrow; run pip install pyarrow") from None
    field, row, unpacked = config.text_field, 0, 0
    try:
        with open(path, "rb") as opened, parquet.ParquetFile(opened) as file:
            refuse_absent(field, file.schema_arrow.names, repr(str(path)))
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                unpacked += batch.nbytes
                refuse_bomb(path, unpacked)
                for text in batch.column(0).to_pylist():
                    yield text_of({field: text}, f"{str(path)!r}, row {row},", field)
                    row += 1
    except (ConfigError, MemoryError, PermissionError):
        raise
    except UnicodeDecodeError:
        raise ConfigError(f"{str(path)!r} has text that is not UTF-8, from row {row} on; mend it") from None
    except Exception as error:
        raise ConfigError(f"{str(path)!r} is not a parquet file ({type(error).__name__}); give another file") from None


def refuse_absent(field: str, columns: list[str], where: str) -> None:
    """Refuse a table that has no column for the text."""
    if field not in columns:
        cure = f"it needs a {field!r} column, or name another by data.text_field"
        raise ConfigError(f"{where} has the columns {name_some(columns)}; {cure}")


READERS: dict[str, Callable[[Path, DataConfig], Iterable[str]]] = {
    ".txt": _read_txt,
    ".md": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_json,
    ".parquet": _read_parquet,
}
PACKABLE = [kind for kind in READERS if kind != ".parquet"]
