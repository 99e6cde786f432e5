"""Whether a run that goes on reads the data it has read before."""

from collections.abc import Iterator, Mapping
from typing import Any


def data_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs between `Batches.decided_by` of a checkpoint and of this run; "" if nothing."""
    if "tokenizer" not in before or "tokenizer" not in now:  # files of tokens need none
        before, now = ({k: v for k, v in x.items() if k != "tokenizer"} for x in (before, now))
    was, found = dict(_flat(before)), dict(_flat(now))
    names = [*found, *(name for name in was if name not in found)]
    changes = [
        f"{name} was {was.get(name, 'not there')} and is {found.get(name, 'not there')}"
        for name in names
        if was.get(name) != found.get(name)
    ]
    if not changes:
        return ""
    return (
        f"warning: the data is not that of the checkpoint: {'; '.join(changes)}. The run goes on "
        "with the rows that this data has at the next step: some may come again, others never."
    )


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers and words by their paths, such as `sources[0].tokens`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{name}[{i}]")
    else:
        yield name, value
