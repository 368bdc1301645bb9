"""Particles on many devices: the same numbers, a share of the memory, and no device that holds them all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from on_devices import CASES, MORE

import measureflow as mf

SCRIPT = Path(__file__).with_name("on_devices.py")
EFFORT = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
pytestmark = pytest.mark.xdist_group("devices")


def start(devices, *arguments):
    flags = f"--xla_force_host_platform_device_count={devices} {EFFORT}"
    source = str(Path(mf.__file__).parents[1])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finished(processes, out):
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    out = tmp_path_factory.mktemp("devices") / "eight.json"
    return finished([start(8, out)], out)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    out = tmp_path_factory.mktemp("devices") / "two.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return finished([start(1, out, address, number) for number in (0, 1)], out)


def assert_equal(found):
    """Up to rounding: sums over particles are made in another order."""
    assert found["particles"] < 1e-5
    assert found["history"] < 1e-4


@pytest.mark.parametrize("mesh", ["8", "4 x 2"])
@pytest.mark.parametrize("name", CASES)
def test_eight_devices_are_as_one(eight, name, mesh):
    assert_equal(eight[name][mesh])
    assert eight[name][mesh]["shard"] == {"8": 2, "4 x 2": 4}[mesh]


@pytest.mark.parametrize("name", MORE)
def test_any_flow_and_kernel(eight, name):
    assert_equal(eight[name]["8"])


@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_as_one(two_processes, name):
    assert_equal(two_processes[name]["2 processes"])
    assert two_processes[name]["2 processes"]["shard"] == 8


def test_memory_per_device_falls_as_one_over_devices(eight):
    memory = eight["memory"]
    for devices in (2, 4, 8):
        share = memory["1"]["state"] / memory[str(devices)]["state"]
        assert abs(share - devices) < 0.05 * devices
        assert memory["1"]["between"] / memory[str(devices)]["between"] > 0.7 * devices
        assert memory[str(devices)]["all-gather"] == 0
        assert memory[str(devices)]["collective-permute"] > 0


def test_estimators(eight):
    assert eight["estimators"] < 1e-4


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("12 particles", ["8 devices", "12 of them", "multiple of 8"]),
        ("a batch of 15", ["over 2 devices", "(15, 3)", "multiple of 2"]),
        ("explicit", ["type Auto", "['particles']", "AxisType.Auto"]),
        ("renamed", ["'particles'", "('data',)", "jax.make_mesh"]),
        ("devices", ["must be a jax.sharding.Mesh", "jax.make_mesh"]),
        ("no particles", ["ParametricFlow", "leave the mesh out"]),
    ],
)
def test_meshes_that_do_not_fit(eight, case, words):
    assert all(word in eight["refusals"][case] for word in words), eight["refusals"][case]


def test_a_mesh_that_fits_is_not_refused(eight):
    assert eight["refusals"]["fine"] is None


def test_one_device_is_a_mesh():
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    problem = mf.deep_ensemble(lambda theta: (theta**2).sum())
    flow, initial = mf.WassersteinFlow(0.1), jax.numpy.ones((3, 2))
    alone, spread = (mf.solve(problem, flow, initial, 5, jax.random.key(0), mesh=m) for m in (None, mesh))
    assert jax.numpy.array_equal(alone.measure.particles, spread.measure.particles)
