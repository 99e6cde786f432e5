"""Cases of the campaign: arguments made from the parsers of all commands, and from all keys.

Nothing here names a command's options or a key's type: a new one is covered when it is there.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml
from hypothesis import strategies as st

from jaxpipe.cli.commands import make_parser
from jaxpipe.schedules import FAMILIES
from jaxpipe.train import Config

from .world import members


@dataclass(frozen=True)
class Change:
    """A changed copy of something sound: see `world.realised`."""

    name: str
    inside: str
    change: int | str


@dataclass(frozen=True)
class Case:
    """A command's words, and the changed copies that some of them name."""

    words: tuple[str, ...]
    changes: tuple[Change, ...]


JUNK = (
    *("0", "-1", "1", "2", "3", "4", "8", "1.5", "-5", "1e9", "nan", "inf", "-inf", "1e-320"),
    *("9" * 30, "9" * 5000, "", " ", "x", "none", "null", "true", "[]", "{}", "[1, [2]]", "--x"),
    *("\udcff", "💩", "a\tb", "\x1b[2J", "x" * 5000, "[" * 2000, "*a", "&a [*a, *a]", "!!int x"),
    *(
        "1" + "0" * 18,
        "2147483648",
        "20000",
        "99999999",
        "../..",
        "/proc/x",
        ".",
        "..",
        "10:12",
        "1_0",
    ),
    *("Et*3|t*4|t*4|t*3L", "t*99999999999", "((((t*9)*9)*9)*9)*99999", "1/2,1,1", "1,1", "5GB"),
    *("gs://x/y", "--xla_x=1", "v5p:2x2x1", "v5p:99999x1x1", "%s%n", "2030-01-01", "a=b", "0x10"),
)
STARTS: tuple[tuple[str, ...], ...] = (
    (),
    (),
    ("pipeline_engine=scheduled", "emulate_devices=2", "ici_pipeline_parallelism=2"),
    ("pipeline_engine=mpmd", "emulate_devices=2", "ici_pipeline_parallelism=2"),
    ("pipeline_engine=none", "emulate_devices=4"),
    ("emulate_devices=4", "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4"),
    ("dataset_type=text", "data_files=sound/a.txt", "packing=false"),
    ("dataset_type=jsonl", "data_files=sound/a.jsonl", "eval_interval=2"),
    ("dataset_type=parquet", "data_files=sound/a.parquet"),
    ("dataset_type=arrow", "data_files=sound/a.arrow"),
    ("dataset_type=tokens", "data_files=sound/ids.bin", "token_eod=7"),
    ("dataset_type=tokens", "data_files=sound/ids.npy", "token_eod=7"),
    ("dataset_type=text", "tokenizer_path=sound/tokenizer.json", "max_target_length=8"),
    ("sound/llama2_ours/config.yml", "init_from=sound/llama2_ours", "per_device_batch_size=1"),
    ("model_name=deepseek-tiny", "emulate_devices=2"),
    ("sound/run/config.yml", "output_dir=sound", "run_name=run"),
    ("enable_nnx=true", "pure_nnx_decoder=true", "emulate_devices=2"),
)
"""Settings that are right together. A case adds some of its own."""


@cache
def leaves() -> tuple[tuple[tuple[str, ...], argparse.ArgumentParser], ...]:
    """Returns the words of every command that has no sub-commands, and its parser."""

    def under(
        words: tuple[str, ...], parser: argparse.ArgumentParser
    ) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        for name, child in ((n, c) for action in inner for n, c in action.choices.items()):
            yield from under((*words, name), child)
        if not inner:
            yield words, parser

    return tuple(under((), make_parser()))


def cases(
    world: Path, words: tuple[str, ...], parser: argparse.ArgumentParser
) -> st.SearchStrategy[Case]:
    """Returns what draws a case of a command."""
    hostile = sorted(f"hostile/{file.name}" for file in (world / "hostile").iterdir())
    sound = sorted(file.name for file in (world / "sound").iterdir())

    @st.composite
    def changes(draw: st.DrawFn) -> Change:
        name = draw(st.sampled_from(sound))
        inside = draw(st.sampled_from(members(world, name)))
        kinds = st.one_of(
            st.integers(0, 10**6), st.sampled_from([h.partition("/")[2] for h in hostile])
        )
        return Change(name, inside, draw(kinds))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        made: list[Change] = []

        def path() -> str:
            kind = draw(st.integers(0, 6))
            if kind == 0:
                return draw(st.sampled_from([*hostile, "nowhere", "n" * 300, "/proc/kmsg"]))
            if kind == 1:
                return draw(st.sampled_from(("new", "new.bin", "new/new")))
            if kind <= 3:
                return f"sound/{draw(st.sampled_from(sound))}"
            made.append(draw(changes()))
            return made[-1].name

        def value() -> str:
            kind = draw(st.integers(0, 9))
            if kind == 0:
                return path()
            return draw(st.text(max_size=20) if kind == 1 else st.sampled_from(JUNK))

        arguments = list(words)
        for action in parser._actions:
            arguments += _of_action(draw, action, value, path)
        return Case(tuple(word.replace("\0", "0") for word in arguments), tuple(made))

    return case()


def _of_action(draw: st.DrawFn, action: argparse.Action, value: Any, path: Any) -> list[str]:
    """Draws the words of one argument."""
    if action.dest == "settings":
        return _settings(draw, value, path)
    if not action.option_strings:
        if action.dest == "name":
            return [draw(st.sampled_from([*FAMILIES])) if draw(st.booleans()) else path()]
        return [path() if draw(st.integers(0, 4)) else value()]
    if not action.required and draw(st.integers(0, 3)):
        return []
    option = draw(st.sampled_from(action.option_strings))
    if action.nargs == 0:
        return [] if option in ("-h", "--help") and draw(st.integers(0, 9)) else [option]
    usual = ["2", "4", *(map(str, action.choices) if action.choices else [])]
    chosen = draw(st.sampled_from(usual)) if draw(st.booleans()) else value()
    return [f"{option}={chosen}"] if option.startswith("--") else [option, chosen]


def _settings(draw: st.DrawFn, value: Any, path: Any) -> list[str]:
    """Draws settings: some that are right, then hostile ones, of which a file may have some."""
    words = list(draw(st.sampled_from(STARTS)))
    if not draw(st.integers(0, 5)):
        words.append(path())
    for _ in range(draw(st.sampled_from((0, 1, 1, 1, 2, 3)))):
        key = draw(st.sampled_from([*Config.model_fields]))
        words.append(f"{key}={_of_key(draw, key, value, path)}")
    if not draw(st.integers(0, 9)):
        words.append(value())
    return words


def _of_key(draw: st.DrawFn, key: str, value: Any, path: Any) -> str:
    """Draws a value of a key: a choice, the default, a neighbour of it, or junk."""
    field = Config.model_fields[key]
    choices = [c for c in get_args(field.annotation) if isinstance(c, str | int | float)]
    kind = draw(st.integers(0, 4))
    if kind == 0 and choices:
        return str(draw(st.sampled_from(choices)))
    if kind == 1 and isinstance(field.default, int | float):
        shift = draw(st.sampled_from((-1, 1, 7, 1000, 10**6)))
        return str(field.default * shift if draw(st.booleans()) else field.default + shift)
    if kind == 2 and isinstance(field.default, str | tuple):
        return path()
    if kind == 3:
        return yaml.safe_dump(field.default if not isinstance(field.default, tuple) else [path()],
                              default_flow_style=True).strip().removesuffix("\n...")  # fmt: skip
    return value()
