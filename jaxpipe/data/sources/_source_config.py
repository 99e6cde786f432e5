"""A source of documents: which files, in which order, and how they are read."""

import os
import re
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from ..._input import is_file, plain_text

SourceType = Literal["text", "jsonl", "parquet", "arrow", "tokens"]
TokenType = Literal["uint8", "uint16", "uint32", "int32", "int64"]

FIELD_READERS: dict[str, tuple[SourceType, ...]] = {
    "text_separator": ("text",),
    "text_field": ("jsonl", "parquet", "arrow"),
    "token_dtype": ("tokens",),
    "token_eod": ("tokens",),
}
"""The types of files that read a field; all types read the fields that are not listed."""


def _one_or_many(value: Any) -> Any:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _separator(value: str) -> str:
    if re.fullmatch(r"(\\[nrt])+", value):
        raise ValueError(
            f"Input should be a text that is in the files, and {value} is one of backslashes and "
            f'letters: YAML reads escapes in double quotes only, "{value}", and in a shell '
            f"'\"{value}\"'"
        )
    return value


Separator = Annotated[str, Field(max_length=4096), AfterValidator(_separator)]
PathText = Annotated[str, Field(max_length=4096), AfterValidator(plain_text)]
Paths = Annotated[tuple[PathText, ...], BeforeValidator(_one_or_many)]


class Source(BaseModel):
    """A source of documents: files, and how they are read.

    Attributes:
        type: The format of the files: text; jsonl: an object a line; parquet; arrow (IPC files and
            streams, Feather); or tokens: ids, one after the other.
        files: Files, and folders, for all files in them that are named so.
        weight: The share of rows, relative to the other sources of a mixture.
        text_separator: The text between two documents of a text file; "" for one document.
        text_field: The field of an object, or the column of a table, that holds a document.
        token_dtype: The dtype of .bin files, little-endian.
        token_eod: The id that ends each document of tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    type: SourceType
    files: Paths
    weight: Annotated[float, Field(gt=0, le=1e9)] = 1.0
    text_separator: Separator = "\n\n\n"
    text_field: PathText = "text"
    token_dtype: TokenType = "uint16"
    token_eod: Annotated[int, Field(ge=0, lt=2**31)] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> "Source":
        for name, readers in FIELD_READERS.items():
            value, default = getattr(self, name), Source.model_fields[name].default
            if self.type not in readers and value != default:
                raise ValueError(
                    f"`type` is {self.type!r} and `{name}` is {value!r}, which it does not read. "
                    f"Leave it out, or choose {' or '.join(readers)}."
                )
        if not self.files:
            raise ValueError("`files` is empty. Give files or folders.")
        if self.type == "tokens" and self.token_eod is None:
            raise ValueError(
                "`type` is 'tokens' and `token_eod` is not set. Give the id that ends a document: "
                "256 for bytes, 50256 for GPT-2's; `jaxpipe tokenize` prints it."
            )
        return self


BUILTIN = "builtin:"
SUFFIXES: dict[SourceType, tuple[str, ...]] = {
    "text": (".txt",),
    "jsonl": (".jsonl",),
    "parquet": (".parquet",),
    "arrow": (".arrow", ".feather"),
    "tokens": (".bin", ".npy"),
}
"""The suffixes of the files of a type."""


def resolve_files(path: str, kind: SourceType, *, key: str) -> list[Path] | list[Traversable]:
    """Returns the files that a path names: a file, all of a folder, or `builtin:sonnets`."""
    if path.startswith(BUILTIN):
        return [_builtin(path, kind, key)]
    if os.path.isdir(path):
        candidates = (file for file in Path(path).rglob("*") if file.suffix in SUFFIXES[kind])
        files = sorted(file for file in candidates if is_file(file))
        if not files:
            raise ValueError(
                f"`{key}` names {path!r}, a folder without "
                f"{' or '.join('*' + ending for ending in SUFFIXES[kind])} files. Remove it "
                "or give one with such files."
            )
        return files
    if os.path.exists(path) and not is_file(path):
        raise ValueError(f"`{key}` names {path!r}, a device or a pipe. Give a regular file.")
    if not is_file(path):
        also = f" or {BUILTIN}sonnets" if kind == "text" else ""
        raise ValueError(
            f"`{key}` names {path!r}, which does not exist. Give a file, a folder{also}."
        )
    return [Path(path)]


def _builtin(path: str, kind: SourceType, key: str) -> Traversable:
    if kind != "text":
        raise ValueError(f"`{key}` names {path!r}, which is text, not {kind}. Give files.")
    folder = resources.files("jaxpipe.data").joinpath("text")
    names = sorted(file.name.removesuffix(".txt") for file in folder.iterdir())
    name = path.removeprefix(BUILTIN)
    if name not in names:
        valid = ", ".join(BUILTIN + name for name in names)
        raise ValueError(f"`{key}` names {path!r}. Built in: {valid}.")
    return folder.joinpath(f"{name}.txt")
