"""What every scheduler is told of a run: its settings, its hosts, and when it starts again."""

import json
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from ...planner import Devices, absent_devices
from .._options import read_settings, read_values

GRACE_SECONDS = 300
"""How long a run has for its last checkpoint after SIGTERM."""

_SHARED = "Give the path at which all hosts see their shared storage, such as output_dir=/shared."


@dataclass(frozen=True)
class ClusterJob:
    """A run on the hosts of a cluster, with one process on each.

    Attributes:
        name: The name of the run.
        settings: `key=value` for all that is not a default; no file of settings is needed.
        output_dir: The folder of runs, which all hosts see.
        devices: The devices of all hosts.
        max_restarts: How often the job starts again from its newest checkpoint after a failure.
        image: The container image; "" if there is none.
        storage: The volume that holds `output_dir`; "" if hosts have mounted it.
    """

    name: str
    settings: tuple[str, ...]
    output_dir: str
    devices: Devices
    max_restarts: int
    image: str
    storage: str


def cluster_job(
    settings: list[str], devices: Devices, *, max_restarts: int, image: str, storage: str
) -> ClusterJob:
    """Returns the job of a run, after checking that its settings suit the devices.

    Compiled programs are kept beside the runs, where a restart finds them on every host, unless the
    settings name a folder.
    """
    from ...train import set_up

    config, values = read_settings(settings), read_values(settings)
    if not PurePosixPath(config.output_dir).is_absolute():
        raise ValueError(f"`output_dir` is {config.output_dir!r}. {_SHARED}")
    for key in ("emulate_devices", "distributed"):
        if values.pop(key, None):
            raise ValueError(f"`{key}` is given, which `--print` decides. Leave it out.")
    if devices.are_here:
        raise ValueError("`--devices` is here, and the file is for a cluster. Name its devices.")
    set_up(config, absent_devices(devices))
    if config.jax_cache_dir == "auto":
        values["jax_cache_dir"] = str(PurePosixPath(config.output_dir) / ".compiled")
    words = tuple(_setting(key, value) for key, value in values.items())
    return ClusterJob(
        name=config.run_name,
        settings=words,
        output_dir=config.output_dir,
        devices=devices,
        max_restarts=max_restarts,
        image=image,
        storage=storage,
    )


def check_has_volume(job: ClusterJob, printed: str, storage: str) -> None:
    """Checks that a job of containers has an image, and a volume, which `storage` describes."""
    for option, what in {"image": "a container image with jaxpipe", "storage": storage}.items():
        if not getattr(job, option):
            raise ValueError(f"`--print {printed}` needs `--{option}`, {what}.")


def _setting(key: str, value: Any) -> str:
    """Returns `key=value` as a command line has it: text without quotes if YAML reads it so."""
    from ...train.config import parse_override

    plain = f"{key}={value}"
    is_plain = isinstance(value, str) and value and parse_override(plain) == {key: value}
    return plain if is_plain else f"{key}={json.dumps(value)}"
