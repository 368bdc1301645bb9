"""Shapes and types are checked at run time, and nothing is promoted silently."""

import atexit
import collections
import gc
import os

# Programs of the tests are not kept for the user.
os.environ["MEASUREFLOW_CACHE"] = "off"
import shutil
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

# Tests spend most of their time compiling programs, each for a few calls: with these flags half of it, and
# what is compiled runs a seventh slower.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=1"
if version("jaxlib").startswith("0.10."):
    # XLA ends the process at a flag that it does not know: these may go.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
# Tests run side by side: one thread each, instead of all of them on all cores.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["XLA_FLAGS"] += " --xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
# What one process has compiled, another finds; and so does the same one, after it has let its programs go.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="measureflow-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import effort
import equinox as eqx
import jax
import jaxtyping
import pytest
from jaxtyping import install_import_hook

# A plugin may have imported JAX before.
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

effort.spare()

# Every name is imported here, so that its shapes are checked; but not the estimators: scikit-learn wants a
# constructor that takes anything.
with install_import_hook("measureflow", "beartype.beartype"):
    import measureflow

    for name, place in measureflow._PLACES.items():
        if not place.startswith(("measureflow.tables", "measureflow.study")) and name != "plots":
            getattr(measureflow, name)

# Tests press Ctrl-C; shells start what runs in the background with that ignored, and children inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What takes longest begins first, so that in the end no worker waits for another.
LONGEST = (
    "test_docs.py",
    "test_notebooks.py",
    "test_site.py",
    "runs/test_devices.py",
    "tables",
    "runs",
    "sampling",
    "test_properties.py",
)
# Each of these tests is long, and shares nothing with the others of its file.
ALONE = (
    "test_pages_run",
    "test_notebooks_run",
    "test_eight_devices",
    "test_two_processes",
    "test_sample_on_two",
    "test_killed",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """A file's tests go to one worker, since they share programs and fixtures; the longest begin first. Of
    the cases of a test that is marked `few(n)`, the others are slow."""
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") is not None and item.get_closest_marker("slow") is None:
            cases[item.path, item.originalname].append(item)
    for of_test in cases.values():
        number = of_test[0].get_closest_marker("few").args[0]
        kept = {round((i + 1) * len(of_test) / number) - 1 for i in range(number)}
        for index in set(range(len(of_test))) - kept:
            of_test[index].add_marker(pytest.mark.slow)

    def place(item):
        name = item.path.relative_to(Path(__file__).parent).as_posix()
        return next((i for i, start in enumerate(LONGEST) if name.startswith(start)), len(LONGEST))

    for item in items:
        if item.get_closest_marker("xdist_group") is None and not item.name.startswith(ALONE):
            # Those of the commands share a fitted model.
            together = item.path.parent if item.path.parent.name == "commands" else item.path
            item.add_marker(pytest.mark.xdist_group(together.stem))
    items.sort(key=place)


def pytest_collection_finish():
    """What is there now stays there: the collector of garbage need not look at it again and again."""
    gc.freeze()


# A process with tens of thousands of compiled programs crashes while it compiles another. Linux counts its
# pages of memory here.
STATE, MOST_PAGES = Path("/proc/self/statm"), 2**19


@pytest.fixture(autouse=True, scope="module")
def programs_are_let_go():
    """After a file of tests, where the process has grown to 2 GiB."""
    yield
    if STATE.exists() and int(STATE.read_text(encoding="utf-8").split()[1]) > MOST_PAGES:
        jax.clear_caches()
        eqx.clear_caches()


@pytest.fixture
def as_a_user_runs_it(strict_promotion):
    """No type checker, and JAX's own rules of promotion: nothing but our messages stands in the way."""
    jaxtyping.config.update("jaxtyping_disable", True)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def strict_promotion(request):
    """Strict, but for tests that call Optax or NumPyro, which are not written for it."""
    lenient = request.node.get_closest_marker("standard_promotion")
    dtype, rank = ("standard", "allow") if lenient else ("strict", "raise")
    with jax.numpy_dtype_promotion(dtype), jax.numpy_rank_promotion(rank):
        yield


@pytest.fixture(autouse=True)
def nothing_is_certified(request, monkeypatch):
    """Most tests take a few steps and claim no posterior: what `solve` would say of that, after compiling a
    gradient for it, is tested where it is marked."""
    if request.node.get_closest_marker("certifies") is None:
        module = sys.modules["measureflow.runs.solve"]
        monkeypatch.setattr(module, "_warn_of_what_is_not_stationary", lambda *arguments: None)
