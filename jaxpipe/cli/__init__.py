from ._emulate import emulate_devices as emulate_devices
from ._emulate import emulation as emulation
from ._main import main as main
from ._main import make_parser as make_parser
from ._main import script as script
