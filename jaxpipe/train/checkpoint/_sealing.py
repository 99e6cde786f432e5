"""Names the folder of a step only while it is complete: a kill leaves no part under that name.

A step is written to `<step>.unsealed.orbax-checkpoint-tmp`, which orbax renames to
`<step>.unsealed`; it gets its digests there, is forced onto the disk, and is renamed to `<step>`.
An old one is renamed into `.removed` before its files are deleted.
"""

import inspect
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from ..._durable import rename
from ..runtime._reading import list_names
from ._digests import write_digests

_Temporary = ocp.path.atomicity.AtomicRenameTemporaryPath

REMOVED_FOLDER = ".removed"
"""The folder, among the checkpoints, to which a step is moved before its files are deleted."""

UNSEALED_SUFFIX = "unsealed"
"""The suffix of the folder of a step that is written and has no digests yet."""

_TEMPORARY = ".orbax-checkpoint-tmp"
"""A part of the name of every folder that Orbax is writing."""


def sealed_path_class(on_saved: Callable[[int], None]) -> type[_Temporary]:
    """Returns a class of folders for Orbax that writes digests before a step is named."""

    class Sealing(_Temporary):
        @classmethod
        def from_final(cls, final_path: Any, **options: Any) -> Any:
            if not final_path.name.isdigit():  # a part of a step
                return _Temporary.from_final(final_path, **options)
            unsealed = final_path.with_name(f"{final_path.name}.{UNSEALED_SUFFIX}")
            return super().from_final(unsealed, **options)

        def get_final(self) -> Any:
            unsealed = super().get_final()
            return unsealed.with_name(unsealed.name.removesuffix(f".{UNSEALED_SUFFIX}"))

        def finalize(self) -> Any:
            renamed = super().finalize()  # from orbax's temporary name
            return self._later(renamed) if inspect.isawaitable(renamed) else self._seal()

        async def _later(self, renamed: Any) -> None:
            await renamed
            self._seal()

        def _seal(self) -> None:
            step, unsealed = Path(self.get_final()), Path(super().get_final())
            write_digests(unsealed, int(step.name))
            rename(unsealed, step)
            on_saved(int(step.name))

    return Sealing


def leftovers(folder: Path) -> list[Path]:
    """Returns the partial folders that killed runs have left in a folder of checkpoints."""
    names = (
        name for name in list_names(folder) if _TEMPORARY in name or name.endswith(UNSEALED_SUFFIX)
    )
    return [*map(folder.joinpath, names), *_removed(folder)]


def _removed(folder: Path) -> list[Path]:
    return [folder / REMOVED_FOLDER / name for name in list_names(folder / REMOVED_FOLDER)]


def empty_removed(folder: Path) -> None:
    """Deletes the old steps in `.removed` of a folder of checkpoints, while no save is running."""
    for step in _removed(folder):
        shutil.rmtree(step, ignore_errors=True)
    with suppress(OSError):
        (folder / REMOVED_FOLDER).rmdir()
