"""The table of devices: every kind can be planned for, timed and named, by one row."""

import pytest

from jaxpipe.cost.training_step import efficiency
from jaxpipe.devices import HARDWARE, find_hardware, generation_of, hardware
from jaxpipe.planner._devices import absent_devices, parse_devices


@pytest.mark.parametrize("kind", HARDWARE)
def test_every_kind_has_names_that_lead_to_it_and_can_be_planned_for(kind: str):
    row = HARDWARE[kind]
    assert row.source and efficiency(row, "bf16").products > 0
    assert all(find_hardware(name) is row for name in row.device_kinds)
    assert all(hardware(alias) is row for alias in row.aliases)
    devices = parse_devices(f"{kind}:8" if row.is_gpu else f"{kind}-8")
    assert devices.memory_bytes == row.memory_bytes
    stand_ins = absent_devices(devices)
    assert len(stand_ins) == devices.num_devices
    assert {device.device_kind for device in stand_ins} == {row.device_kinds[0]}


def test_no_name_is_that_of_two_kinds():
    names = [
        name
        for row in HARDWARE.values()
        for name in (row.kind, *row.aliases, *row.device_kinds, *dict(row.peaks_of_boards))
    ]
    assert len(names) == len({*names})
    assert generation_of("v5") is None


def test_nvlink_joins_the_hosts_of_a_rack_and_not_those_of_others():
    assert parse_devices("gb200:72").devices_per_domain == 72
    assert parse_devices("h100:2x4").devices_per_domain == 4
