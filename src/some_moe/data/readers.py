"""Files of documents: text, JSON, Parquet, text packed by gzip. Whatever is in them, it is read or named."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from some_moe.config import ConfigError, DataConfig
from some_moe.system.reading import (
    clean,
    parse_json,
    read_text,
    refuse_bomb,
    refuse_irregular,
    refuse_unprintable,
    unpack,
)

END_OF_TEXT = "<|endoftext|>"


def kind_of(path: Path) -> str:
    """What a file's name says it is: ".txt" and so on, in small letters; ".gz" is left out where text is packed."""
    *_, before, last = ["", "", *(suffix.lower() for suffix in path.suffixes)]
    return before if last == ".gz" and before in PACKABLE else last


def read_documents(path: Path, config: DataConfig) -> list[str]:
    """Read one file's documents, stripped of outer white space; empty ones are left out."""
    refuse_unprintable(str(path), "data.source")
    refuse_irregular(path)
    reader = READERS.get(kind_of(path))
    if reader is None:
        ends, kinds = "".join(path.suffixes[-2:]), ", ".join(READERS)
        raise ConfigError(f"data.source {str(path)!r} ends in {ends!r}; supported are {kinds}, and all but that as .gz")
    documents = strip(reader(path, config))
    if not documents:
        raise ConfigError(f"data.source {str(path)!r} holds no text; give a file with at least one document")
    return documents


def strip(documents: Iterable[str]) -> list[str]:
    return [text for text in (document.strip() for document in documents) if text]


def _read_text(path: Path) -> str:
    if path.suffix.lower() != ".gz":
        text = read_text(path, sys.maxsize)
    else:
        try:
            text = unpack(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{str(path)!r} holds no UTF-8 text (byte {error.start}); convert it") from None
    if "\0" in text:
        raise ConfigError(f"data.source {str(path)!r} is binary, not text; give a text file")
    return text


def _read_txt(path: Path, config: DataConfig) -> Iterator[str]:
    """Documents end at data.separator; by default at <|endoftext|> where that occurs, else at blank lines."""
    text = _read_text(path)
    if config.separator:
        yield from text.split(config.separator.replace("\\n", "\n").replace("\\t", "\t"))  # as a shell leaves them
    elif END_OF_TEXT in text:
        yield from text.split(END_OF_TEXT)
    else:
        yield from re.split(r"\n\s*\n", text)


def _read_json(path: Path, config: DataConfig) -> Iterator[str]:
    """A list of records or of texts, or one of them a line."""
    text = _read_text(path)
    if kind_of(path) == ".json" and text.lstrip().startswith("["):
        for number, record in enumerate(_parse(text, repr(str(path)), "mend it"), 1):
            yield text_of(record, f"{str(path)!r}, record {number},", config.text_field)
        return
    for number, line in enumerate(text.split("\n"), 1):
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
