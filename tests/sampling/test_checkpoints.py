"""A run of `sample` that is cut off goes on as if nothing had happened, and another one is refused."""

import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verification.laws import PRIOR, drle

import measureflow as mf
from measureflow.runs import solve
from measureflow.sampling import run, tempering
from measureflow.sampling.tempering import islands_of

KEY = jax.random.key(0)
# Not a multiple of the islands of tempering.
PARTICLES = 43


def two_modes(theta):
    """0.8 and 0.2 of the mass, ten deviations apart: a run of them goes through all phases."""
    left = jnp.log(0.8) - 0.5 * jnp.sum(jnp.square(theta + 5))
    return -jnp.logaddexp(left, jnp.log(0.2) - 0.5 * jnp.sum(jnp.square(theta - 5)))


PROBLEM = mf.Problem(two_modes, mf.KL(mf.Flat()))
WIDE = mf.Gaussian(jnp.zeros(1), 4.0)


def sample(folder=None, problem=PROBLEM, initial=WIDE, key=KEY, particles=PARTICLES, draws=4, **keywords):
    if folder is not None:
        keywords["checkpoint"] = mf.Checkpoint(folder, every=1, keep=1_000)
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with strict[0], strict[1], warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = mf.sample(problem, initial, key, particles=particles, draws=draws, **keywords)
    return found, [str(warning.message) for warning in caught]


def bits(found):
    sample, warned = found
    numbers = (sample.draws, sample.measure.particles, sample.r_hat, sample.effective_draws)
    counted = (sample.gradients, sample.acceptance, sample.stiff, sample.replaced, sample.levels)
    history = {name: column.tobytes() for name, column in sample.history.items()}
    leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(numbers)]
    return leaves, counted, history, sample.certificate.statistic, sample.problems, warned


@pytest.fixture(scope="module")
def straight():
    """Without a checkpoint."""
    return sample()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run, with all of its checkpoints; not to be written to."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    sample(folder)
    return folder


def file_of(step):
    return f"{step}-1-of-1.safetensors"


def steps_in(folder):
    return sorted(int(path.name.split("-")[0]) for path in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_tempering_keeps_every_particle(straight):
    """They were cut to a multiple of eight."""
    found, _ = straight
    assert found.levels > 0
    assert found.draws.shape == (PARTICLES, 4, 1)
    assert np.ptp(np.bincount(islands_of(PARTICLES))) == 1


def test_it_goes_on_from_every_phase_to_the_same_bits(straight, finished, tmp_path, capsys):
    """From the first and the last checkpoint of each, where there are more."""
    steps, stages = steps_in(finished), set()
    stage_of = {step: mf.load(finished / file_of(step))["notes"]["so_far"]["stage"] for step in steps}
    assert len(steps) > 10
    ends = [{stage: step for step, stage in order} for order in (stage_of.items(), [*stage_of.items()][::-1])]
    for step in sorted({step for end in ends for step in end.values()}):
        folder = shutil.copytree(finished, tmp_path / str(step))
        for later in (each for each in steps if each > step):
            (folder / file_of(later)).unlink()
        capsys.readouterr()
        assert bits(sample(folder)) == bits(straight), f"from gradient {step} on"
        stages.add(capsys.readouterr().err.split(": ")[-1].split(" after ")[0].strip())
        shutil.rmtree(folder)
    assert stages == {"resuming adaptation", "resuming sampling", "resuming tempering", "finished"}


def fails_after(calls, function):
    def counted(*arguments):
        nonlocal calls
        calls -= 1
        if calls < 0:
            raise RuntimeError("killed")
        return function(*arguments)

    return counted


@pytest.mark.parametrize(
    ("module", "name", "calls"), [(run, "adapt", 0), (run, "draw", 1), (tempering, "adapt", 1)]
)
def test_a_run_that_was_killed_goes_on(straight, tmp_path, monkeypatch, module, name, calls):
    """After the descent, after a round of draws, in the midst of tempering; with the usual checkpoints."""
    folder = mf.Checkpoint(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(module, name, fails_after(calls, getattr(module, name)))
        with pytest.raises(RuntimeError, match="killed"):
            sample(checkpoint=folder)
    assert steps_in(tmp_path / "run")
    assert bits(sample(checkpoint=folder)) == bits(straight)


def test_what_is_finished_is_not_computed_again(straight, finished, tmp_path, monkeypatch):
    folder = shutil.copytree(finished, tmp_path / "run")
    for name in ("adapt", "descend", "draw", "temper"):
        monkeypatch.setattr(run, name, None)
    assert bits(sample(folder)) == bits(straight)


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        ({"problem": mf.Problem(two_modes, 2.0 * mf.KL(mf.Flat()))}, "problem.regulariser"),
        ({"initial": mf.Gaussian(jnp.zeros(1), 3.0)}, "initial.scale"),
        ({"key": jax.random.key(1)}, "key"),
        ({"particles": 44}, "particles"),
        ({"draws": 5}, "draws"),
        ({"precision": 0.1}, "precision"),
        ({"problem": drle(), "initial": PRIOR}, "problem"),
    ],
)
def test_another_run_is_refused_and_nothing_touched(finished, tmp_path, differing, named):
    folder = shutil.copytree(finished, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=rf"(?s)holds another run.*What differs:.*\n  {named}"):
        sample(folder, **differing)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_of_the_users_own_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty and holds no run, but files such as thesis\.txt"):
        sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_path_is_no_checkpoint(as_a_user_runs_it):
    with pytest.raises(TypeError, match=r"must be of type Checkpoint, got 'here'; pass mf\.Checkpoint"):
        mf.sample(PROBLEM, WIDE, KEY, checkpoint="here")


def test_ctrl_c_says_where_it_goes_on(finished, straight, tmp_path, monkeypatch):
    class Caught:
        caught = "SIGINT"

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return

    folder = tmp_path / "run"
    kept = mf.Checkpoint(folder)
    with monkeypatch.context() as patch:
        patch.setattr(run, "Signals", Caught)
        with pytest.raises(KeyboardInterrupt, match=r"before there were draws; nothing is kept\."):
            sample(checkpoint=kept)
        copied = shutil.copytree(finished, tmp_path / "copied")
        for step in steps_in(copied)[1:]:
            (copied / file_of(step)).unlink()
        with pytest.raises(KeyboardInterrupt, match=r"draws; the same call goes on from .*copied\."):
            sample(copied)
    assert bits(sample(checkpoint=kept)) == bits(straight)


def test_the_unadjusted_flow_is_saved_by_solve(tmp_path, monkeypatch):
    """Where no density can be accepted by, checkpoints are those of `solve`."""
    problem, kept = drle(), mf.Checkpoint(tmp_path / "run", every=200)
    expected = sample(problem=problem, initial=PRIOR)
    with monkeypatch.context() as patch:
        patch.setattr(solve.SolveRun, "advance", fails_after(4, solve.SolveRun.advance))
        with pytest.raises(RuntimeError, match="killed"):
            sample(problem=problem, initial=PRIOR, checkpoint=kept)
    found = sample(problem=problem, initial=PRIOR, checkpoint=kept)
    assert found[0].draws.tobytes() == expected[0].draws.tobytes()
