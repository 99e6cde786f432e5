"""The command `jaxpipe`, and emulated devices for trying it."""

from ._main import main as main
from ._main import script as script
from .process import emulate_devices as emulate_devices
