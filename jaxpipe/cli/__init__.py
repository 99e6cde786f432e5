"""The command `jaxpipe`, and emulated devices for trying it."""

from ._emulate import emulate_devices as emulate_devices
from ._main import main as main
from ._main import script as script
