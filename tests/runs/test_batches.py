"""Which cases the loss sees: every epoch a fresh permutation, computed a batch at a time; and where they come
from, which is never to be seen in a result."""

import contextvars
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import jit
from scipy import stats

import measureflow as mf
from measureflow.core.permutations import permuted
from measureflow.runs import data as data_room
from measureflow.runs import driver, program, sources
from measureflow.runs.batches import STREAMED, Shuffled

KEYS = jax.random.split(jax.random.key(0), 6_000)


def permutations(n, keys=KEYS, rule=permuted):
    return np.asarray(jit(jax.vmap(lambda key: rule(jnp.arange(n), n, key)))(keys))


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 277, 1_000])
def test_it_is_a_permutation(n):
    assert np.array_equal(np.sort(permutations(n, KEYS[:50]), axis=1), np.tile(np.arange(n), (50, 1)))


def test_large_numbers_of_cases_do_not_overflow():
    n = 2_000_000_011
    rows = np.asarray(permuted(jnp.arange(n - 500, n), n, jax.random.key(1)))
    assert rows.min() >= 0
    assert rows.max() < n
    assert len(set(rows.tolist())) == 500
    assert stats.kstest(rows / n, "uniform").pvalue > 1e-3


def test_a_part_is_a_part_of_the_whole():
    whole = permuted(jnp.arange(100), 100, jax.random.key(2))
    assert np.array_equal(permuted(jnp.arange(40, 60), 100, jax.random.key(2)), whole[40:60])


def p_values(found):
    """Of all 120 permutations of five being equally likely, and of the places of the first two of 30."""
    codes = found["five"] @ 5 ** np.arange(5)
    counts = np.unique(codes, return_counts=True)[1]
    counts = np.concatenate([counts, np.zeros(120 - len(counts), int)])
    pairs = np.bincount(found["thirty"][:, 0] * 30 + found["thirty"][:, 1], minlength=900).reshape(30, 30)
    return stats.chisquare(counts).pvalue, stats.chisquare(pairs[~np.eye(30, dtype=bool)]).pvalue


def test_all_permutations_are_equally_likely():
    assert min(p_values({"five": permutations(5), "thirty": permutations(30)})) > 1e-4


def test_that_test_has_power():
    """A permutation of few rounds, and a shift, which is one too, are not random enough."""

    def shifted(positions, n, key):
        return (positions + jax.random.randint(key, (), 0, n)) % n

    assert min(p_values({"five": permutations(5), "thirty": permutations(30, rule=shifted)})) < 1e-10
    biased = permutations(5).copy()
    biased[:150] = np.arange(5)
    assert min(p_values({"five": biased, "thirty": permutations(30)})) < 1e-10


def test_an_epoch_shows_every_case_once_and_the_next_in_another_order():
    batches, key = Shuffled(jnp.arange(23), 5), jax.random.key(3)
    seen = [np.concatenate([batches.at(jnp.asarray(4 * e + b), key) for b in range(4)]) for e in range(3)]
    assert all(len(set(epoch.tolist())) == 20 for epoch in seen)
    assert not np.array_equal(seen[0], seen[1])
    assert len(set(np.concatenate(seen).tolist())) == 23  # what is left out is not always the same


def test_rows_that_fill_a_table_up_are_in_no_batch():
    """Of 32 rows the first 23 are cases, a number that the program learns when it runs."""
    at = jax.jit(lambda cases, step: Shuffled(jnp.arange(32), 5, cases).at(step, jax.random.key(3)))
    exact = Shuffled(jnp.arange(23), 5)
    for step in range(12):
        found = at(jnp.asarray(23), jnp.asarray(step))
        assert np.array_equal(found, exact.at(jnp.asarray(step), jax.random.key(3)))
    mutant = np.concatenate(
        [Shuffled(jnp.arange(32), 5).at(jnp.asarray(b), jax.random.key(3)) for b in range(6)]
    )
    assert mutant.max() >= 23
    few = np.asarray(at(jnp.asarray(3), jnp.asarray(0)))
    assert np.array_equal(np.unique(few), np.arange(3)), "all of them, some twice"
    assert len(few) == 5


# --- made on the host, while the device computes


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    """These programs are small and run briefly: most of their time would be the compiler's."""
    effort = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_call", "_finite", "_losses"):
            compiled = eqx.filter_jit(getattr(program, name).__wrapped__, compiler_options=effort)
            patch.setattr(program, name, compiled)
        rows = jax.jit(data_room._rows.__wrapped__, static_argnums=(2, 3, 4), compiler_options=effort)
        patch.setattr(data_room, "_rows", rows)
        yield


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not working()


def working():
    return [thread for thread in threading.enumerate() if thread.name == "measureflow-background"]


WEIGHTS = 1 + np.arange(400) * 7 % 5  # small integers: all sums are exact
LINEAR = mf.deep_ensemble(lambda theta, batch: jnp.sum(theta * batch))


def solve(data, steps=150, **options):
    """Gradient descent with η = 1 on b·θ from 0: after k steps, θ is −Σ b of the batches that were used."""
    options = {"initial": jnp.zeros((2, 1)), "record_every": 1} | options
    return mf.solve(LINEAR, mf.WassersteinFlow(1.0), steps=steps, key=KEYS[0], data=data, **options)


def batches(weights=WEIGHTS):
    return (np.full(1, weight, np.float32) for weight in weights)


def assert_used(solution, weights=WEIGHTS, steps=150):
    """These weights, in this order: at step k the loss is −b_k Σ_{j<k} b_j. The last record sees the last
    batch again."""
    weights = np.resize(weights, steps)
    before = np.concatenate([[0], np.cumsum(weights)])
    every = solution.history.step
    np.testing.assert_array_equal(solution.history.loss, -(before * np.append(weights, weights[-1]))[every])
    np.testing.assert_array_equal(solution.measure.particles, np.full((2, 1), -before[-1]))


def counting(calls):
    """`_call`, that adds the steps of each call to `calls`."""
    chunk = program._call

    def counted(*arguments):
        calls.append(int(arguments[5]) * int(arguments[6]))
        return chunk(*arguments)

    return counted


@pytest.mark.parametrize("stack_bytes", [12, 2**28])
@pytest.mark.parametrize(("seconds", "record_every"), [(0.0, 1), (0.003, 7), (100.0, 7), (100.0, 70)])
def test_a_run_uses_one_batch_a_step_and_asks_for_no_more(seconds, record_every, stack_bytes, monkeypatch):
    monkeypatch.setattr(driver.AbstractRun, "seconds", seconds)
    monkeypatch.setattr(sources, "_STACK_BYTES", stack_bytes)
    assert sources.Stream(batches()).most == min(STREAMED, stack_bytes // 4)
    data = batches()
    assert_used(solve(data, record_every=record_every))
    assert next(data) == WEIGHTS[150]


def test_the_next_batches_are_asked_for_during_a_call(monkeypatch):
    asked, chunk, seen = threading.Condition(), program._call, []
    count = 0

    def watched():
        nonlocal count
        for batch in batches():
            with asked:
                count += 1
                asked.notify_all()
            yield batch

    def slow(problem, flow, state, stacked, key, records, steps, *more):
        end = int(state.step) + int(records) * int(steps)
        if end < 150 and int(steps) and all(seen):
            with asked:
                seen.append(asked.wait_for(lambda: count > end, timeout=20))
        return chunk(problem, flow, state, stacked, key, records, steps, *more)

    monkeypatch.setattr(program, "_call", slow)
    assert_used(solve(watched()))
    assert len(seen) >= 2
    assert all(seen)


def test_what_an_iterator_raises_is_raised_by_the_run(monkeypatch):
    def unlucky():
        yield from batches(WEIGHTS[:70])
        raise LookupError("no such file")

    monkeypatch.setattr(program, "_call", counting(calls := []))
    with pytest.raises(LookupError, match="no such file") as caught:
        solve(unlucky())
    assert "unlucky" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert sum(calls) == 70, "the steps before are taken"


def test_an_iterator_that_ends_is_used_to_its_end():
    with pytest.raises(mf.DataExhaustedError, match="ended at step 70") as caught:
        solve(batches(WEIGHTS[:70]))
    np.testing.assert_array_equal(caught.value.state.particles, np.full((2, 1), -WEIGHTS[:70].sum()))


@pytest.fixture
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt():
    """Ctrl-C, and wait until it was noticed."""
    before = signal.getsignal(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) == before:
        time.sleep(1e-3)


def test_an_interrupted_run_does_not_leave_its_thread_behind(usual_handler):
    def interrupting():
        for k, batch in enumerate(batches()):
            if k == 40:
                interrupt()
            yield batch

    with pytest.raises(mf.Interrupted) as caught:
        solve(interrupting())
    solution = caught.value.solution
    assert 0 < int(solution.state.step) < 150
    np.testing.assert_array_equal(
        solution.measure.particles, np.full((2, 1), -WEIGHTS[: int(solution.state.step)].sum())
    )


def test_an_iterator_that_does_not_answer_can_be_left(usual_handler, monkeypatch):
    """The first Ctrl-C lets the steps under way end; the second does not wait for the iterator."""
    monkeypatch.setattr(sources, "_PATIENCE", 0.05)
    answer = threading.Event()

    def stuck():
        yield from batches(WEIGHTS[:40])
        interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        answer.wait()
        yield from batches(WEIGHTS[40:])

    data = stuck()
    with pytest.raises(KeyboardInterrupt):
        solve(data)
    (thread,) = working()
    assert thread.daemon, "nor does the interpreter"
    answer.set()
    thread.join(20)
    assert next(data) == WEIGHTS[41], "it stopped at the batch that it had asked for"


COLOUR = contextvars.ContextVar("colour", default="none")


def test_the_iterator_is_asked_under_the_settings_of_the_caller():
    seen = set()

    def looking():
        for batch in batches():
            seen.add((COLOUR.get(), jnp.ones(()).dtype.name, jax.config.jax_numpy_dtype_promotion))
            yield np.float64(batch) + 2.0**-40

    token = COLOUR.set("blue")
    with jax.enable_x64(True):
        start = jnp.zeros((2, 1), jnp.float64)
        solution = solve(looking(), initial=start)
    COLOUR.reset(token)
    ((colour, dtype, promotion),) = seen
    assert (colour, dtype) == ("blue", "float64")
    assert promotion == jax.config.jax_numpy_dtype_promotion
    expected = -WEIGHTS[:150].sum() - 150 * 2.0**-40
    np.testing.assert_array_equal(np.asarray(solution.measure.particles), np.full((2, 1), expected))


def test_an_iterator_may_fill_the_same_array_again():
    def refilled():
        batch = np.empty(1, np.float32)
        for weight in WEIGHTS:
            batch[:] = weight
            yield batch

    assert_used(solve(refilled()))


# --- batches of any library


class TorchLike:
    """Like a tensor of PyTorch or TensorFlow: it becomes NumPy by a method, and only by that."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.shape, self.dtype = self.values.shape, str(self.values.dtype)

    def numpy(self):
        return self.values

    def __array__(self, *arguments, **keywords):
        raise TypeError

    def __getitem__(self, index):
        raise TypeError("as TensorFlow's does for rows")


class LoaderLike:
    """It has a length, starts over, and collates to lists."""

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 60

    def __iter__(self):
        return (self.kind(batch) for batch in batches(WEIGHTS[:60]))


KINDS = {
    "tensor": (TorchLike, lambda batch: batch),
    "list": (lambda batch: [TorchLike(batch), {"unused": TorchLike([1])}], lambda batch: batch[0]),
    "tuple": (lambda batch: (batch, TorchLike(batch)), lambda batch: (batch[0] + batch[1]) / 2),
    "dictionary": (lambda batch: {"x": {"y": TorchLike(batch)}}, lambda batch: batch["x"]["y"]),
    "JAX": (jnp.asarray, lambda batch: batch),
    "float": (lambda batch: float(batch[0]), lambda batch: batch[None]),
    "big-endian": (lambda batch: batch.astype(">f4"), lambda batch: batch),
}


@pytest.mark.parametrize("name", KINDS)
def test_batches_may_be_of_any_library(name):
    kind, read = KINDS[name]
    problem = mf.deep_ensemble(lambda theta, batch: jnp.sum(theta * read(batch)))
    solution = mf.solve(
        problem,
        mf.WassersteinFlow(1.0),
        jnp.zeros((2, 1)),
        150,
        KEYS[0],
        data=LoaderLike(kind),
        record_every=1,
    )
    assert_used(solution, WEIGHTS[:60])


def test_tensors_may_be_the_data():
    assert batch_of(TorchLike(np.arange(6.0)), None).tolist() == list(range(6))


def batch_of(data, batch_size):
    source = data_room.batch_source(data, batch_size, KEYS[0])
    return np.asarray(source.take(0, 0).at(jnp.asarray(0), KEYS[0]))


BAD = {
    "shape": (np.ones(2, np.float32), r"different shapes, got \[\(1,\)\] and \[\(2,\)\]; drop the short one"),
    "structure": (
        [np.ones(1, np.float32)],
        r"different structures, got PyTreeDef\(\*\) and PyTreeDef\(\[\*\]",
    ),
    "dtype": (np.ones(1, np.complex64), "different dtypes, got float32 and then complex64; yield the same"),
    "words": ("seven", "data must hold numbers, got 'seven' of type str; leave it out"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("place", [1, 30])
def test_a_batch_unlike_the_others_is_refused_when_it_is_due(name, place, monkeypatch):
    bad, message = BAD[name]
    monkeypatch.setattr(program, "_call", counting(calls := []))
    with pytest.raises(TypeError if name == "words" else ValueError, match=message):
        solve(iter([*batches(WEIGHTS[:place]), bad, *batches()]))
    assert sum(calls) == place


# --- arrays on a disk

CASES = 230
INPUTS, TARGETS = np.random.default_rng(0).normal(size=(CASES, 3)), np.arange(CASES) % 7


class Disk:
    """Like a dataset of h5py: rows can be had in increasing order only, and are counted."""

    def __init__(self, values, shape=None):
        self.values, self.shape, self.dtype, self.read = values, shape or values.shape, values.dtype, 0

    def __getitem__(self, rows):
        if isinstance(rows, np.ndarray):
            assert np.all(np.diff(rows) > 0)
        found = self.values[rows]
        self.read += len(found)
        return found


@pytest.fixture
def mapped(tmp_path):
    def write(name, values):
        np.save(tmp_path / name, values)
        return np.load(tmp_path / f"{name}.npy", mmap_mode="r")

    return write("inputs", INPUTS), write("targets", TARGETS)


def squared_error(theta, batch):
    x, y = batch
    return jnp.mean((x @ theta - y.astype(theta.dtype)) ** 2)


PRIOR = mf.Gaussian(jnp.zeros(3), 1.0)
LANGEVIN = mf.deep_langevin_ensemble(squared_error, PRIOR, kl=0.01)


def fit(data=(INPUTS, TARGETS), steps=150, initial=None, **options):
    initial = PRIOR.sample(KEYS[1], 4) if initial is None else initial
    options = {"batch_size": 20, "record_every": 7} | options
    return mf.solve(LANGEVIN, mf.WassersteinFlow(1e-2), initial, steps, KEYS[2], data=data, **options)


def assert_identical(found, expected):
    """To the bit, the history included."""
    np.testing.assert_array_equal(found.measure.particles, expected.measure.particles)
    assert list(found.history) == list(expected.history)
    for name in expected.history:
        np.testing.assert_array_equal(found.history[name], expected.history[name], err_msg=name)


@pytest.fixture(scope="module")
def in_memory():
    return fit()


def test_arrays_on_a_disk_give_the_same_result_to_the_bit(mapped, in_memory, monkeypatch):
    assert_identical(fit(mapped), in_memory)
    assert_identical(fit((Disk(INPUTS.astype(">f8")), jnp.asarray(TARGETS))), in_memory)
    monkeypatch.setattr(sources, "_STACK_BYTES", 2000)
    assert_identical(fit(mapped), in_memory)


@pytest.mark.slow
def test_a_run_in_parts_goes_on_with_the_rows_on_the_disk(mapped, tmp_path, in_memory):
    half = fit(mapped, 71)
    np.testing.assert_array_equal(fit(mapped, 79, half.state).measure.particles, in_memory.measure.particles)
    for steps in (71, 150):
        resumed = fit(mapped, steps, checkpoint=mf.Checkpoint(tmp_path / "run", 50))
    assert_identical(resumed, in_memory)
    other = (mapped[0], np.where(np.arange(CASES) == 100, 0, TARGETS))
    with pytest.raises(ValueError, match=r"data.rows.1: was 'int64\[230\] sha256 of 230 rows"):
        fit(other, checkpoint=mf.Checkpoint(tmp_path / "run", 50))


def test_only_the_rows_of_the_batches_are_read():
    inputs, targets = Disk(INPUTS), Disk(TARGETS)
    fit((inputs, targets))
    # One for its dtype, and the batches of the first and of the last record.
    assert inputs.read == targets.read == 1 + (150 + 2) * 20


def test_all_rows_are_loaded_if_all_are_used(mapped):
    assert_identical(fit(mapped, batch_size=None), fit(batch_size=None))
    assert batch_of(Disk(TARGETS), None).tolist() == TARGETS.tolist()


def test_what_a_checkpoint_compares_of_a_disk_is_bounded(monkeypatch):
    monkeypatch.setattr(data_room, "_HASHED_BYTES", 50 * 3 * 8)
    monkeypatch.setattr(data_room, "_HASHED_ROWS", 60)

    def compared(values):
        return data_room.OnDisk(values, 20, KEYS[0]).made_of()["rows"]

    disk = Disk(INPUTS)
    found = compared(disk)
    assert found.startswith("float64[230, 3] sha256 of 50 rows ")
    assert disk.read <= 50 + 2
    other = INPUTS.copy()
    other[-1] += 1
    assert compared(Disk(other)) != found
    monkeypatch.setattr(data_room, "_HASHED_ROWS", 40)
    assert " 40 rows " in compared(disk)
    monkeypatch.setattr(data_room, "_HASHED_BYTES", INPUTS.nbytes)
    assert " 230 rows " in compared(disk)


def test_bad_arrays_on_a_disk_are_refused(mapped):
    with pytest.raises(ValueError, match="batch_size=300 exceeds the 230 cases of data"):
        fit(mapped, batch_size=300)
    with pytest.raises(ValueError, match="disagree in their leading axis"):
        fit((mapped[0], TARGETS[:-1]))
    with pytest.raises(ValueError, match=r"data has 2147483648 cases.*pass an iterator"):
        fit((Disk(INPUTS, shape=(2**31, 3)), Disk(TARGETS, shape=(2**31,))))
    with pytest.raises(TypeError, match=r"data\[1\] must hold numbers"):
        fit((mapped[0], Disk(np.array(["a"] * CASES))))


# --- numbers that 32 bits cannot hold

WIDE = {
    "int64": (np.array([1, 2**40 + 7]), r"1099511627783 in int64.* int32, in which it would wrap around"),
    "negative": (np.array([1, -(2**31) - 1]), "-2147483649 in int64"),
    "uint64": (np.array([1, 2**32], np.uint64), "4294967296 in uint64.* uint32"),
    "float64": (np.array([1.0, -1e39]), r"-1e\+39 in float64.* float32, in which it would be infinite"),
    "big-endian": (np.array([1, 2**40], ">i8"), "1099511627776 in >i8"),
}


def steps_on(data, batch_size=None):
    def loss(theta, batch):
        return jnp.sum(theta) * jnp.sum(batch["x"][0].astype(jnp.float32))

    flow = mf.WassersteinFlow(1e-3)
    mf.solve(mf.deep_ensemble(loss), flow, jnp.ones((2, 1)), 4, KEYS[0], data=data, batch_size=batch_size)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("way", ["whole", "batches", "iterator", "late", "disk"])
def test_numbers_that_do_not_fit_are_refused(name, way):
    """Before, 2⁴⁰ + 7 was 7."""
    wide, message = WIDE[name]
    fine = np.ones_like(wide)
    data, batch_size = {
        "whole": ({"x": [wide]}, None),
        "batches": ({"x": [wide]}, 1),
        "iterator": (iter([{"x": [wide]}]), None),
        "late": (iter([{"x": [fine]}, {"x": [fine]}, {"x": [wide]}]), None),
        "disk": ({"x": [Disk(wide)]}, 2),
    }[way]
    with pytest.raises(ValueError, match=rf"data\['x'\]\[0\] holds .*{message}.*jax_enable_x64"):
        steps_on(data, batch_size)


@pytest.mark.parametrize("batch_size", [None, 1])
def test_data_that_would_all_be_0_are_refused(batch_size):
    with pytest.raises(
        ValueError, match=r"data\['x'\]\[0\] holds numbers up to 1e-60, all of .* to 0; scale"
    ):
        steps_on({"x": [np.array([0.0, 1e-60])]}, batch_size)
    # One batch of some may be.
    steps_on(iter([{"x": [np.array([0.0, 1e-60])]}, {"x": [np.ones(2)]}, *[{"x": [np.zeros(2)]}] * 2]))


def test_variation_that_rounding_takes_away_is_warned_of():
    """Seconds since 1970, give or take a minute, are all the same but for multiples of 128."""
    minutes = np.random.default_rng(0).normal(0, [1.0, 60.0], size=(50, 2))
    seconds = minutes + np.array([0.0, 1.7e9])
    with pytest.warns(UserWarning, match=r"\['x'\]\[0\], column 1, varies by .* about 1.7e\+09.* subtract"):
        steps_on({"x": [seconds]})
    # Neither what is constant, nor a year, nor what was rounded before.
    for fine in (np.full((50, 1), 0.1), 2000 + minutes, np.full(50, 1e9), seconds.astype(np.float32)):
        steps_on({"x": [fine]})


def test_numbers_that_fit_are_kept():
    """64 bits by themselves are no reason to refuse; nor are NaN and infinities, which a loss may know."""
    for values in (
        np.array([-(2**31), 2**31 - 1]),
        np.array([0, 2**32 - 1], np.uint64),
        np.array([np.nan, np.inf, -np.inf, 3e38]),
        np.array([1e-60, 1.0]),
    ):
        np.testing.assert_array_equal(batch_of(values, None), values.astype(f"{values.dtype.kind}4"))


@pytest.mark.parametrize(
    ("first", "then"), [(np.int8, np.int64(300)), (np.int8, np.uint8(200)), (np.float16, np.float64(1e6))]
)
def test_batches_of_a_smaller_type_do_not_wrap(first, then):
    """A batch is kept in the type of the first one."""
    with pytest.raises(ValueError, match=f"different dtypes, got {np.dtype(first)} and then {then.dtype}"):
        steps_on(iter([{"x": [np.ones(1, first)]}, {"x": [then[None]]}]))


MEMORY = """
import sys, jax, jax.numpy as jnp, numpy as np, measureflow as mf

def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) / 1000

def solve(data):
    problem = mf.deep_ensemble(lambda theta, x: jnp.mean((x @ theta) ** 2))
    start = jnp.ones((2, 1000))
    mf.solve(problem, mf.WassersteinFlow(1e-3), start, 40, jax.random.key(0), data=data, batch_size=10)
    return peak()

big = np.lib.format.open_memmap(sys.argv[1], "w+", np.float32, (80_000, 1000))
before = solve(big[:100])
print(solve(big) - before, len(np.array(big)), peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_data_may_be_larger_than_memory(tmp_path):
    """320 MB on the disk, in a file of holes."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "big.npy")],
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
        capture_output=True,
        text=True,
        check=True,
    )
    mapped, _, loaded = map(float, done.stdout.split())
    assert mapped < 100
    assert loaded > 300, "the test sees memory"
