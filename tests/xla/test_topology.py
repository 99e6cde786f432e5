"""Topologies of TPUs and GPUs: wrong ones are refused in words, with and without compilers."""

import importlib.util

import jax
import pytest

from jaxpipe.sharding import make_mesh
from jaxpipe.xla import audit, topology_devices
from jaxpipe.xla.hlo import gpu_hosts


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs libtpu.*pip install "jaxpipe\[aot\]"'):
        topology_devices("v5p:2x2x1")


def test_there_is_at_least_one_slice():
    with pytest.raises(ValueError, match=r"`num_slices` is 0\. Give at least 1\."):
        topology_devices("v5p:2x2x1", 0)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'needs XLA:GPU.*pip install "jaxpipe\[aot-gpu\]"'):
        topology_devices("h100:4x8")


@pytest.mark.parametrize("name", ["h100", "h100:", "h100:0", "h100:8x", "h100:2x2x2", "a100:x8"])
def test_a_topology_of_gpus_is_hosts_and_devices(name):
    with pytest.raises(ValueError, match=r"Give a generation of .*h100:8, or hosts"):
        topology_devices(name)


def test_gpus_have_no_slices():
    with pytest.raises(ValueError, match=r"`num_slices` is 2 .* GPUs have no slices"):
        topology_devices("h100:8", 2)


HLO = """\
HloModule m

ENTRY %main (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %all-gather.1 = f32[8]{{0}} all-gather(%p), replica_groups={groups}, dimensions={{0}}
}}
"""


@pytest.mark.parametrize(
    ("groups", "crosses"),
    [
        ("{{0,1},{2,3}}", False),
        ("{{0,2},{1,3}}", True),
        ("[2,2]<=[4]", False),
        ("[2,2]<=[2,2]T(1,0)", True),
        ("mesh['stage'=2,'fsdp'=2] {'fsdp'}", False),
        ("mesh['stage'=2,'fsdp'=2] {'stage'}", True),
        ("mesh['stage'=2,'fsdp'=2] {'stage','fsdp'}", True),
    ],
)
def test_hosts_of_gpus_are_told_apart(groups, crosses):
    text = HLO.format(groups=groups)
    (site,) = audit(text, hosts=(0, 0, 1, 1)).sites
    assert site.across_slices is crosses
    (site,) = audit(text).sites
    assert not site.across_slices


gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="needs jaxpipe[aot-gpu]"
)


@gpu_compiler
@pytest.mark.parametrize("generation", ["a100-40gb", "a100", "h100", "h200", "b200"])
def test_programs_compile_for_gpus_that_are_not_there(generation):
    devices = topology_devices(f"{generation}:2x4")
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert all(device.platform == "gpu" for device in devices)
    mesh = make_mesh({"stage": 2, "fsdp": 4}, devices=devices)
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stage", "fsdp"))
    x = jax.ShapeDtypeStruct((256, 256), "bfloat16", sharding=spec)
    text = jax.jit(lambda x: x @ x.T).lower(x).compile().as_text() or ""
    assert any(site.across_slices for site in audit(text, gpu_hosts(mesh.devices.flat)).sites)
