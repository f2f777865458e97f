"""Records of .txt, .jsonl and .parquet files.

Protocol: `records(files, sample_by, read)` yields a `Record` for each document, in the order of the files.
Fields are TRL's. The first of these rows that a record has all fields of is its kind:

  preference          chosen, rejected, and prompt where it is not the beginning that both share
  prompt-completion   prompt, completion
  messages            messages
  text                text

Texts are strings; conversations are lists of messages with a role. `tools` and `chat_template_kwargs` go to
the chat template. Further fields are ignored. All records of a data set are of one kind.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tinygrad_nv.errors import DataError
from tinygrad_nv.files import parse_json, read_bytes
from tinygrad_nv.train.data.files import unreadable

Kind = Literal["preference", "prompt-completion", "messages", "text"]
SampleBy = Literal["document", "paragraph", "line"]     # as the argument of datasets' loader of text
Read = Callable[[int], None]                            # told how many bytes more were read
FIELDS: dict[Kind, tuple[str, ...]] = {"preference": ("chosen", "rejected"),
                                       "prompt-completion": ("prompt", "completion"),
                                       "messages": ("messages",), "text": ("text",)}
WANTED = ('"text"; "prompt" and "completion"; "messages"; or "chosen" and "rejected", with or without '
          '"prompt"')
PARQUET_ROWS = 16       # read at a time: a dictionary makes each as long as the longest
MAX_DOCUMENT_BYTES = 256 << 20  # limit: bytes of a document of training data
MAX_TEXT_BYTES = 4 << 30        # limit: bytes of a .txt file of lines or paragraphs


@dataclass(frozen=True)
class Record:
    """A document: its kind, its fields, and where it is, for messages."""
    kind: Kind
    fields: Mapping[str, Any]
    place: str

    @property
    def is_chat(self) -> bool:
        """Whether its texts are lists of messages."""
        return not isinstance(self.fields[FIELDS[self.kind][0]], str)

    def wrong(self, found: str, expected: str, fix: str) -> DataError:
        """An error that begins with the record's place."""
        return DataError(f"{self.place}: {found}", expected, fix)


def records(files: Iterable[Path], sample_by: SampleBy = "document", read: Read = lambda count: None
            ) -> Iterator[Record]:
    """The records of all files. Raises `DataError`, with file and line, for what is no record, and for one of
    another kind than the first."""
    first: Record | None = None
    for file in files:
        for record in _of(file, sample_by, read):
            first = first or record
            if (record.kind, record.is_chat) != (first.kind, first.is_chat):
                raise record.wrong(f"the record is {_words(record)}, and {first.place} is {_words(first)}",
                                   "records of one kind", "train on the one or the other")
            yield record
    if first is None: raise DataError("the training data has no records", WANTED, "name other files")


def _words(record: Record) -> str:
    return f"{record.kind} of messages" if record.is_chat and record.kind != "messages" else record.kind


def _type(value: object) -> str:
    """Returns JSON's name of a value's type."""
    return {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number",
            float: "a number", type(None): "null"}.get(type(value), f"a {type(value).__name__}")


def _of(file: Path, sample_by: SampleBy, read: Read) -> Iterator[Record]:
    read_file = {".txt": lambda: _text(file, sample_by, read), ".jsonl": lambda: _lines(file, read),
                 ".parquet": lambda: _parquet(file, read)}[file.suffix.lower()]
    try: yield from read_file()
    except OSError as error: raise unreadable(file, error) from error


# **** .txt ****

def _text(file: Path, sample_by: SampleBy, read: Read) -> Iterator[Record]:
    """A file is one document, or one for each paragraph (between empty lines) or line that is not empty."""
    assert sample_by in get_args(SampleBy), sample_by
    content = read_bytes(file, MAX_DOCUMENT_BYTES if sample_by == "document" else MAX_TEXT_BYTES)
    text = _utf8(content, str(file)).removeprefix("\ufeff")
    if not text.strip(): raise DataError(f"{file} has only white space", "a text", "name another file")
    if sample_by == "document":
        yield Record("text", {"text": text}, str(file))
        read(len(content))
        return
    begin = 1
    for part in text.split("\n\n" if sample_by == "paragraph" else "\n"):
        if part.strip():
            yield Record("text", {"text": part.strip("\r\n")}, f"{file}, line {begin}")
        begin += part.count("\n") + (2 if sample_by == "paragraph" else 1)
        read(len(part.encode()) + (2 if sample_by == "paragraph" else 1))


def _utf8(content: bytes, place: str) -> str:
    try: return content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not UTF-8, at byte {error.start}", "UTF-8 text",
                        "convert the file to UTF-8") from error


# **** .jsonl ****

def _lines(file: Path, read: Read) -> Iterator[Record]:
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_DOCUMENT_BYTES + 1), b""), 1):
            place = f"{file}, line {number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{place} has more than {MAX_DOCUMENT_BYTES} bytes",
                                "one document in each line", "cut it into several")
            text = _utf8(line, place).removeprefix("\ufeff")
            if text.strip():
                try: data = parse_json(text)
                except ValueError as error:
                    raise DataError(f"{place} is not JSON: {error}", "a JSON object in each line",
                                    "correct or remove the line") from error
                yield record(data, place)
            read(len(line))


# **** .parquet ****

def _parquet(file: Path, read: Read) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{file} is Parquet, and pyarrow is not installed", "the package pyarrow",
                        "pip install 'tinygrad-nv[train]' or pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            rows, size, number = table.metadata.num_rows, file.stat().st_size, 0
            for group in table.iter_batches(PARQUET_ROWS):
                for row in group.to_pylist():
                    number += 1
                    yield record(_without_nulls(row), f"{file}, row {number}")
                read(size * number // rows - size * (number - len(group)) // rows)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file} is not Parquet: {error}", "a Parquet file that is whole",
                        "download or write the file again") from error


def _without_nulls(value: Any) -> Any:
    """Columns and fields of messages that other rows have are null here: no field."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


# **** what a record is ****

def record(data: Any, place: str) -> Record:
    """The record of a JSON value. Raises `DataError`."""
    if not isinstance(data, dict):
        raise DataError(f"{place} holds {_type(data)}", f"an object with {WANTED}",
                        "correct or remove it")
    kind = next((kind for kind, names in FIELDS.items() if all(name in data for name in names)), None)
    if kind is None:
        names = ", ".join(map(repr, list(data)[:8])) or "no fields"
        raise DataError(f"{place} has {names}", WANTED, "rename the fields, or remove the record")
    made = Record(kind, _with_prompt(data, place) if kind == "preference" else data, place)
    texts = ("prompt", *FIELDS[kind]) if kind == "preference" else FIELDS[kind]
    for name in texts: _require_text(made, name)
    if len({isinstance(made.fields[name], str) for name in texts}) > 1:
        raise made.wrong("texts beside lists of messages", "all strings, or all lists of messages",
                         "write all of them the same way")
    return made


def _require_text(record: Record, name: str) -> None:
    value, chat = record.fields[name], "a list of messages, each with a role"
    if isinstance(value, str) and name != "messages": return
    if name == "text" or not isinstance(value, list):
        expected = {"text": "a string", "messages": chat}.get(name, f"a string, or {chat}")
        raise record.wrong(f'"{name}" holds {_type(value)}', expected, "correct the record")
    if not value and name != "prompt":
        raise record.wrong(f'"{name}" has no messages', "one or more", "remove the record")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise record.wrong(f'"{name}"[{number}] is no message', 'an object with "role" and "content"',
                               "correct the record")


def _with_prompt(data: dict[str, Any], place: str) -> dict[str, Any]:
    """A preference with its prompt: where it has none, what chosen and rejected begin with in common, without
    a space at its end, as TRL's `extract_prompt`."""
    if "prompt" in data: return data
    chosen, rejected = data["chosen"], data["rejected"]
    if not (isinstance(chosen, str | list) and type(chosen) is type(rejected)):
        raise DataError(f'{place}: "chosen" holds {_type(chosen)}, "rejected" '
                        f"{_type(rejected)}", "two strings, or two lists of messages",
                        "correct the record")
    pairs = enumerate(zip(chosen, rejected, strict=False))
    cut = next((number for number, (one, other) in pairs if one != other), min(len(chosen), len(rejected)))
    if chosen == rejected:
        raise DataError(f"{place}: chosen and rejected are equal", "two answers that differ",
                        "remove the record")
    if cut and chosen[cut - 1] == " ": cut -= 1
    return {**data, "prompt": chosen[:cut], "chosen": chosen[cut:], "rejected": rejected[cut:]}
