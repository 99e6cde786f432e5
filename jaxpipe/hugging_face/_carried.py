"""Carries what a model has beside its weights: the tokenizer, and how to generate text.

Training reads none of it but the tokenizer. It is copied unchanged into the folder `CARRIED_FOLDER`
of a converted checkpoint, and from there, however many runs later, into a folder of Hugging Face.
"""

import json
from pathlib import Path
from typing import Any

from .._durable import write_file
from .._input import MEGABYTE, is_file, parse_json, read_bytes, read_text
from ..train.config import MAX_YAML_BYTES, parse_yaml

CARRIED_FOLDER = "hugging_face"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
GENERATION_FILES = ("generation_config.json",)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json that no weight depends on, which transformers reads to generate text."""

_IDS_FILE = "token_ids.json"
_MAX_BYTES = 128 * MEGABYTE
_MAX_RUNS = 100
"""How many runs in a row, each with `init_from` of the one before, are followed."""


def copy_from_hugging_face(source: Path, config: dict[str, Any], folder: Path) -> list[str]:
    """Copies the tokenizer and the generation settings of a model into a converted checkpoint."""
    files = {name: source / name for name in (*TOKENIZER_FILES, *GENERATION_FILES)}
    contents = {name: _read(file) for name, file in files.items() if is_file(file)}
    ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
    if not contents and not ids:
        return []
    carried = folder / CARRIED_FOLDER
    carried.mkdir()
    for name, content in contents.items():
        write_file(carried / name, content)
    write_file(carried / _IDS_FILE, json.dumps(ids, indent=2) + "\n")
    return list(contents)


def files_to_hugging_face(source: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Returns the files that belong to the weights of a run or of a converted checkpoint."""
    # They are those of the converted checkpoint that the run began with. If the run has a tokenizer
    # of its own (`tokenizer_path`), that one is returned alone: nothing else fits its ids.
    values = _config_values(source)
    own = Path(str(values.get("tokenizer_path") or ""))
    carried = _find_carried(source)
    files: dict[str, bytes] = {}
    ids: dict[str, Any] = {}
    if carried is not None:
        names = (*TOKENIZER_FILES, *GENERATION_FILES)
        files = {name: _read(carried / name) for name in names if is_file(carried / name)}
        ids = _token_ids(carried / _IDS_FILE)
    if own.name and is_file(own) and (content := _read(own)) not in files.values():
        return {"tokenizer.model" if own.suffix == ".model" else "tokenizer.json": content}, {}
    return files, ids


def carried_tokenizer(source: Path) -> Path | None:
    """Returns the tokenizer of the model that a run began with, or None.

    Args:
        source: The folder of a run, or one that `from_hugging_face` made.

    Returns:
        Its tokenizer.json or, without one, its sentencepiece model.
    """
    carried = _find_carried(source)
    files = [carried / name for name in ("tokenizer.json", "tokenizer.model")] if carried else []
    return next(filter(is_file, files), None)


def _find_carried(source: Path) -> Path | None:
    """Returns the folder with the files of the model that a run began with, or None."""
    for _ in range(_MAX_RUNS):
        if (source / CARRIED_FOLDER).is_dir():
            return source / CARRIED_FOLDER
        before = _config_values(source).get("init_from")
        if not isinstance(before, str) or not before:
            return None
        source = Path(before)
    return None


def _config_values(source: Path) -> dict[str, Any]:
    file = source / "config.yml"
    if not is_file(file):
        return {}
    return parse_yaml(read_text(str(file), most_bytes=MAX_YAML_BYTES), str(file))


def _token_ids(file: Path) -> dict[str, Any]:
    values = parse_json(read_text(file, most_bytes=MEGABYTE), str(file)) if is_file(file) else {}
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object. Remove it, or convert the model again.")
    return {name: values[name] for name in TOKEN_IDS if name in values}


def _read(file: Path) -> bytes:
    return read_bytes(file, most_bytes=_MAX_BYTES)
