from ._emulate import emulate_devices as emulate_devices
