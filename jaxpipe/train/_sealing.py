"""How the folder of a step gets its name, and loses it: no kill leaves a part of a step under it.

A step is written to `<step>.unsealed.orbax-checkpoint-tmp`, which orbax renames to
`<step>.unsealed`; it gets its digests there, is forced onto the disk, and is renamed to `<step>`.
An old one is renamed into `.removed` before its files go.
"""

import inspect
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from .._durable import rename
from ._digests import write_digests
from ._reading import names_in

_Temporary = ocp.path.atomicity.AtomicRenameTemporaryPath

REMOVED = ".removed"
"""In a folder of checkpoints: where a step goes at once, before its files go one by one."""

UNSEALED = "unsealed"
"""Behind the number of a step whose folder is written and has no digests yet."""

_TEMPORARY = ".orbax-checkpoint-tmp"
"""In the name of a folder that orbax is writing."""


def sealing(on_saved: Callable[[int], None]) -> type[_Temporary]:
    """Orbax's temporary folders, of which a step's gets its digests before its name.

    Args:
        on_saved: Is told every step that has its name.
    """

    class Sealing(_Temporary):
        @classmethod
        def from_final(cls, final_path: Any, **options: Any) -> Any:
            if not final_path.name.isdigit():  # a part of a step
                return _Temporary.from_final(final_path, **options)
            unsealed = final_path.with_name(f"{final_path.name}.{UNSEALED}")
            return super().from_final(unsealed, **options)

        def get_final(self) -> Any:
            unsealed = super().get_final()
            return unsealed.with_name(unsealed.name.removesuffix(f".{UNSEALED}"))

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
    """What killed runs have left of saves and of removals in a folder of checkpoints."""
    names = (name for name in names_in(folder) if _TEMPORARY in name or name.endswith(UNSEALED))
    return [*map(folder.joinpath, names), *_removed(folder)]


def _removed(folder: Path) -> list[Path]:
    return [folder / REMOVED / name for name in names_in(folder / REMOVED)]


def empty_removed(folder: Path) -> None:
    """Removes the files of old steps in a folder of checkpoints, where nothing is being saved."""
    for step in _removed(folder):
        shutil.rmtree(step, ignore_errors=True)
    with suppress(OSError):
        (folder / REMOVED).rmdir()
