"""Compiled programs that are kept for the next process."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from measureflow.core import compiled

PROGRAM = """
import jax
import jax.numpy as jnp
from measureflow.core.compiled import keep_programs

folder = keep_programs()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
value = jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x).T)(jnp.ones((20, 30)))
print(folder is not None, "/jax/compilation_cache/cache_hits" in events, float(value[0, 0]))
"""


def run(folder):
    environment = os.environ | {"MEASUREFLOW_CACHE": str(folder), "JAX_PLATFORMS": "cpu"}
    # That of the tests.
    del environment["JAX_COMPILATION_CACHE_DIR"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    kept, found, value = run(tmp_path)
    assert (kept, found) == ("True", "False")
    again, hit, same = run(tmp_path)
    assert (again, hit, same) == ("True", "True", value)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0, "for the user alone"


@pytest.fixture
def told(monkeypatch):
    """What JAX is told, which does not hear it."""
    settings = {}
    quiet = SimpleNamespace(
        jax_compilation_cache_dir=None, jax_enable_compilation_cache=True, update=settings.__setitem__
    )
    monkeypatch.setattr(compiled, "jax", SimpleNamespace(config=quiet))
    compiled.keep_programs.cache_clear()
    yield settings, quiet
    compiled.keep_programs.cache_clear()


def test_programs_are_kept_in_the_users_cache(told, tmp_path, monkeypatch):
    monkeypatch.delenv("MEASUREFLOW_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = compiled.keep_programs()
    assert folder.parent == tmp_path / "measureflow"
    assert told[0]["jax_compilation_cache_dir"] == str(folder)


@pytest.mark.parametrize("word", ["off", "0"])
def test_it_can_be_switched_off(told, word, monkeypatch):
    monkeypatch.setenv("MEASUREFLOW_CACHE", word)
    assert compiled.keep_programs() is None
    assert told[0] == {}


def test_the_cache_of_a_user_is_left_alone(told, tmp_path, monkeypatch):
    monkeypatch.setenv("MEASUREFLOW_CACHE", str(tmp_path / "ours"))
    told[1].jax_compilation_cache_dir = "theirs"
    assert compiled.keep_programs() is None
    assert told[0] == {}
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_cannot_be_made_is_no_error(told, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEASUREFLOW_CACHE", str(tmp_path / "file"))
    assert compiled.keep_programs() is None
    assert told[0] == {}


def test_the_oldest_are_dropped(tmp_path):
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes(100))
        os.utime(tmp_path / str(number), (number, number))
    compiled._drop_oldest(tmp_path, 250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]
