"""Particles on many devices: the same numbers, a share of the memory, and no device that holds them all."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from on_devices import CASES, MORE

import measureflow as mf

SCRIPT = Path(__file__).parents[1] / "on_devices.py"
EFFORT = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
EFFORT += " --xla_cpu_use_fusion_emitters=false" if "fusion_emitters" in os.environ["XLA_FLAGS"] else ""


def start(devices, *arguments):
    flags = f"--xla_force_host_platform_device_count={devices} {EFFORT}"
    source = str(Path(mf.__file__).parents[1])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": source, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def result(out, *processes):
    said = [process.communicate(timeout=600)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return json.loads(out.read_text(encoding="utf-8"))


def assert_equal(found, shard):
    """Up to rounding: sums over particles are made in another order."""
    for name, difference in found.items():
        assert difference["particles"] < 1e-5, name
        assert difference["history"] < 1e-4, name
        assert difference["shard"] == (4 if name.endswith("two axes") else shard), name


# Each test has one process of its own, or two: started once, for many cases.


def test_eight_devices_are_as_one(tmp_path):
    out = tmp_path / "out.json"
    found = result(out, start(8, out, "two axes"))
    assert len(found) == 2
    assert_equal(found, shard=4)


def test_sample_on_two_devices_has_the_right_law(tmp_path):
    out = tmp_path / "out.json"
    found = result(out, start(2, out, "sampled"))
    assert found["resumed"] == [True, True]
    assert found["trusted"]
    # 4,000 draws, at worst as good as the 400 particles.
    assert np.all(np.abs(found["mean"]) < 4 / np.sqrt(400))
    assert np.all(np.abs(np.array(found["variance"]) - 1) < 4 * np.sqrt(2 / 400))


def on_two_processes(out, part):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return result(out, *[start(1, out, part, address, number) for number in (0, 1)])


def test_two_processes_are_as_one(tmp_path):
    found = on_two_processes(tmp_path / "out.json", "two processes")
    checkpoints = found.pop("checkpoints")
    assert len(found) == 1
    assert_equal(found, shard=8)
    # Each writes its own particles; a checkpoint that one cannot read is none; one process may go on.
    files = {f"{step}-{i}-of-2.safetensors" for step in (10, 8) for i in (1, 2)}
    assert files <= set(checkpoints["names"])
    assert np.all(checkpoints["same"])
    # Momentum is warned of, too.
    (warned,) = [text for text in checkpoints["warned"] if "cannot be read" in text]
    assert "step 10" in warned
    assert "goes on from step 8" in warned
    parts = [mf.load(tmp_path / "run" / f"12-{i}-of-2.safetensors")["state"][0] for i in (1, 2)]
    assert [begin for begin, _ in parts[0] + parts[1]] == [(0,), (8,)]
    assert result(tmp_path / "alone.json", start(1, tmp_path / "alone.json", "alone")) < 1e-5


@pytest.mark.slow
def test_eight_devices_are_as_one_for_every_algorithm(tmp_path):
    out = tmp_path / "out.json"
    found = result(out, start(8, out, "equality"))
    assert set(found) > {*CASES, *MORE}
    assert_equal(found, shard=2)


@pytest.mark.slow
def test_two_processes_are_as_one_for_every_algorithm(tmp_path):
    found = on_two_processes(tmp_path / "out.json", "processes")
    assert set(found) == set(CASES)
    assert_equal(found, shard=8)


def test_memory_per_device_falls_as_one_over_devices(tmp_path):
    out = tmp_path / "out.json"
    memory = result(out, start(8, out, "memory"))
    for devices in (2, 4, 8):
        share = memory["1"]["state"] / memory[str(devices)]["state"]
        assert abs(share - devices) < 0.05 * devices
        assert memory["1"]["between"] / memory[str(devices)]["between"] > 0.7 * devices
        assert memory[str(devices)]["all-gather"] == 0
        assert memory[str(devices)]["collective-permute"] > 0


def test_estimators(tmp_path):
    out = tmp_path / "out.json"
    assert result(out, start(8, out, "estimators")) < 1e-4


def test_meshes_that_do_not_fit(tmp_path):
    out = tmp_path / "out.json"
    said = result(out, start(8, out, "refusals"))
    expected = {
        "12 particles": ["8 devices", "12 of them", "multiple of 8"],
        "a batch of 15": ["over 2 devices", "(15, 3)", "multiple of 2"],
        "explicit": ["type Auto", "['particles']", "AxisType.Auto"],
        "renamed": ["'particles'", "('data',)", "jax.make_mesh"],
        "devices": ["must be a jax.sharding.Mesh", "jax.make_mesh"],
        "no particles": ["ParametricFlow", "leave the mesh out"],
    }
    for case, words in expected.items():
        assert all(word in said[case] for word in words), said[case]
    assert said["fine"] is None


def test_one_device_is_a_mesh():
    mesh = jax.make_mesh((1,), ("particles",), axis_types=(jax.sharding.AxisType.Auto,))
    problem = mf.deep_ensemble(lambda theta: (theta**2).sum())
    flow, initial = mf.WassersteinFlow(0.1), jax.numpy.ones((3, 2))
    alone, spread = (mf.solve(problem, flow, initial, 5, jax.random.key(0), mesh=m) for m in (None, mesh))
    assert jax.numpy.array_equal(alone.measure.particles, spread.measure.particles)
