from ._emulate import emulate_devices as emulate_devices
from ._main import main as main
