"""One call for posteriors: right numbers, or a warning."""

import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verification.laws import PRIOR, drle, exact

import measureflow as mf
from measureflow.sampling.mixing import drifting, effective_draws, hopeless, nested_r_hat, staying
from measureflow.sampling.run import Run
from measureflow.sampling.trajectories import Target

KEY = jax.random.key(0)
NUMBER = 6


def correlated():
    """N(m, Σ) with Σ of condition 10⁵, far from where particles begin."""
    rng = np.random.default_rng(0)
    root = np.linalg.qr(rng.normal(size=(NUMBER, NUMBER)))[0] * np.logspace(0, -2.5, NUMBER)
    mean = 30 * rng.normal(size=NUMBER)
    precision = jnp.asarray(np.linalg.inv(root @ root.T), jnp.float32)

    def potential(theta):
        away = theta["x"] - jnp.asarray(mean, jnp.float32)
        return 0.5 * away @ jnp.matmul(precision, away, precision="highest")

    return mf.Problem(potential, mf.KL(mf.Flat())), mean, root


@pytest.fixture(scope="module")
def result():
    problem, _, _ = correlated()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        return mf.sample(problem, mf.Gaussian({"x": jnp.zeros(NUMBER)}, 1.0), KEY, particles=400)


def test_an_ill_conditioned_posterior_needs_no_tuning(result):
    _, mean, root = correlated()
    assert result
    assert result.exact
    draws = result.draws["x"]
    assert draws.shape == (400, 10, NUMBER)
    z = (draws.reshape(-1, NUMBER) - mean) @ np.linalg.inv(root).T
    error = 1 / np.sqrt(min(result.effective_draws["x"].min(), len(z)))
    assert np.all(np.abs(z.mean(axis=0)) < 4 * error)
    assert np.all(np.abs(z.var(axis=0) - 1) < 4 * np.sqrt(2) * error)
    assert result.r_hat["x"].shape == (NUMBER,)
    assert np.all(result.r_hat["x"] <= 1.01)
    assert 100 < result.gradients < 5_000
    assert result.measure.particles["x"].shape == (4_000, NUMBER)
    assert "trusted" in repr(result)
    assert set(result.history.phase) == {"descent", "adaptation", "sampling"}


def bent_ridge(theta):
    """θ₁ standard normal, and θ₂ − θ₁² normal with variance ¼: E θ₂ = 1, Var θ₂ = 2¼."""
    return 0.5 * theta[0] ** 2 + 2.0 * (theta[1] - theta[0] ** 2) ** 2


@pytest.mark.slow
def test_a_bent_ridge_is_followed_to_its_ends():
    problem = mf.Problem(bent_ridge, mf.KL(mf.Flat()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = mf.sample(problem, mf.Gaussian(jnp.zeros(2), 2.0), KEY, particles=1_000)
    error = 1 / np.sqrt(result.effective_draws.min())
    height = result.draws[..., 1]
    assert abs(height.mean() - 1) < 4 * 1.5 * error
    # E(θ₂ − 1)⁴ = 60 + 6·2·¼ + 3/16, so that (θ₂ − 1)² has the standard deviation 7.6.
    assert abs(((height - 1) ** 2).mean() - 2.25) < 4 * 7.6 * error
    # Steps of the common size alone never reach the ends.
    assert np.nanmax(result.history.depth) >= 1


def test_particles_that_start_on_one_side_find_the_mass_of_the_other():
    """The paper's Figure 2: started wholly right of 0, where 0.87 of the mass is left of it."""
    prior = mf.Gaussian(jnp.zeros(1), 1.0)
    problem = mf.Problem(
        lambda theta: jnp.sum(1.5 * (theta**4 / 4 + theta**3 / 3 - theta**2) - 3 / 8), mf.KL(prior)
    )
    grid = jnp.linspace(-6, 6, 4_001)
    exact = float(jnp.sum(jnp.where(grid < 0, mf.theory.minimiser(problem, grid), 0.0)) * (grid[1] - grid[0]))
    assert exact == pytest.approx(0.870, abs=1e-3)
    start = 1 + 0.2 * jax.random.normal(jax.random.key(1), (1_000, 1))
    assert jnp.all(start > 0)
    result = mf.sample(problem, start, KEY)
    left = (result.draws < 0).mean(axis=(1, 2))
    assert abs(left.mean() - exact) < 4 * left.std() / np.sqrt(len(left))


@pytest.mark.parametrize(
    "loss", [lambda t: 0.5 * t[0] ** 2, pytest.param(lambda t: -jnp.sum(t), marks=pytest.mark.slow)]
)
def test_improper_posteriors_are_refused(loss):
    problem = mf.Problem(loss, mf.KL(mf.Flat()))
    with pytest.raises(ValueError, match=r"the particles run away: .* give every parameter a proper prior"):
        mf.sample(problem, mf.Gaussian(jnp.zeros(2), 1.0), KEY, particles=100)


def test_arviz_gets_chains(result):
    with warnings.catch_warnings():
        # ArviZ announces its next version.
        warnings.simplefilter("ignore", FutureWarning)
        arviz = pytest.importorskip("arviz")
        found = result.to_arviz()
    posterior = found.posterior["x"]
    assert posterior.dims[:2] == ("chain", "draw")
    assert posterior.shape == (8, 500, NUMBER)
    np.testing.assert_array_equal(posterior.values.reshape(result.draws["x"].shape), result.draws["x"])
    assert float(arviz.rhat(found)["x"].max()) < 1.01
    # What ArviZ makes of them agrees with what the sample says of itself.
    assert float(arviz.ess(found)["x"].min()) > 0.5 * result.effective_draws["x"].min()


@pytest.mark.slow
def test_arviz_gets_what_is_made_of_the_draws(result):
    pytest.importorskip("arviz")
    made = {"length": jnp.linalg.norm(result.draws["x"], axis=-1), "twice": 2 * result.draws["x"]}
    found = result.to_arviz(made, dims={"twice": ["coordinate"]}).posterior
    assert set(found.data_vars) == {"length", "twice"}
    assert found["twice"].dims == ("chain", "draw", "coordinate")
    np.testing.assert_array_equal(found["length"].values.reshape(400, 10), made["length"])
    with pytest.raises(ValueError, match=r"= \(400, 10\), got \(4000, 6\) for 'x'; pass a function of all"):
        result.to_arviz(result.measure.particles)


def test_without_arviz_there_is_a_remedy(result, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="to_arviz needs the package arviz; pip install arviz"):
        result.to_arviz()


def test_ctrl_c_keeps_the_draws_so_far():
    """The first round of draws ends with Ctrl-C; before there are any, there is nothing to return."""
    problem = mf.Problem(bent_ridge, mf.KL(mf.Flat()))

    class Impatient(Run):
        def _round(self, *arguments):
            drawn = super()._round(*arguments)
            signal.raise_signal(signal.SIGINT)
            return drawn

    def run(kind):
        rows = jax.random.normal(KEY, (100, 2))
        return kind(Target(problem, jnp.zeros(2)), rows, KEY, 10, 0.05, progress=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.SamplingWarning)
        result = run(Impatient).result()
    assert result.draws.shape == (100, 10, 2)
    assert result.problems[0] == "sample was interrupted by SIGINT: these are the draws so far."
    assert not result

    class TooSoon(Run):
        def _rescued(self, state):
            signal.raise_signal(signal.SIGINT)
            return super()._rescued(state)

    with pytest.raises(KeyboardInterrupt, match="before there were draws"):
        run(TooSoon).result()


def mixture(distance, number):
    def potential(theta):
        away = jnp.zeros(number).at[0].set(distance / 2)
        left = jnp.log(0.8) - 0.5 * jnp.sum(jnp.square(theta + away))
        return -jnp.logaddexp(left, jnp.log(0.2) - 0.5 * jnp.sum(jnp.square(theta - away)))

    return mf.Problem(potential, mf.KL(mf.Flat()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("distance", "number"),
    [
        (10.0, 2),
        pytest.param(3.0, 2, marks=pytest.mark.slow),
        pytest.param(6.0, 2, marks=pytest.mark.slow),
        pytest.param(3.0, 10, marks=pytest.mark.slow),
        pytest.param(6.0, 10, marks=pytest.mark.slow),
        pytest.param(10.0, 10, marks=pytest.mark.slow),
    ],
)
def test_separated_modes_have_their_masses(distance, number):
    """From a start that gives each half of the mass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mf.SamplingWarning)
        result = mf.sample(
            mixture(distance, number), mf.Gaussian(jnp.zeros(number), 4.0), KEY, particles=1_000
        )
    left = (result.draws[:, :, 0] < 0).mean(axis=1)
    islands = np.array([part.mean() for part in np.array_split(left, 8)])
    error = max(islands.std(ddof=1) / np.sqrt(8), np.sqrt(0.16 / 1_000))
    assert abs(islands.mean() - 0.8) < 4 * error
    if distance == 10:
        assert result.levels > 0
        assert any("masses are those of tempering" in text for text in result.problems)


@pytest.mark.slow
def test_a_funnel_is_not_trusted_silently():
    """Neal's funnel in 10 dimensions: right, or warned of."""

    def potential(theta):
        scale = jnp.exp(theta[0] / 2)
        return theta[0] ** 2 / 18 + 0.5 * jnp.sum(jnp.square(theta[1:] / scale)) + 9 * theta[0] / 2

    problem = mf.Problem(potential, mf.KL(mf.Flat()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = mf.sample(problem, mf.Gaussian(jnp.zeros(10), 1.0), KEY, particles=300)
    first = result.draws[:, :, 0]
    right = abs(first.mean()) < 0.3 and abs(first.std() / 3 - 1) < 0.1
    assert right or caught
    assert bool(result) == (not caught)


def test_interactions_are_sampled_without_adjustment():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = mf.sample(drle(), PRIOR, KEY, particles=400)
    assert not result.exact
    law = exact(drle())
    mean, deviation = law.expected_wasserstein_1(np.random.default_rng(0), 400)
    assert law.wasserstein_1(result.draws[:, -1]) < mean + 4 * deviation


def test_bad_input():
    problem, _, _ = correlated()
    with pytest.raises(ValueError, match=r"initial holds 5 particles; sample learns .* at least 20"):
        mf.sample(problem, {"x": jnp.zeros((5, NUMBER))}, KEY)
    with pytest.raises(ValueError, match="problem without temperature"):
        mf.sample(mf.deep_ensemble(lambda t: jnp.sum(t**2)), jnp.zeros((30, 1)), KEY)
    with pytest.raises(ValueError, match=r"draws=1,000,000,000 of 30 particles take .* GiB are free"):
        mf.sample(problem, {"x": jnp.zeros((30, NUMBER))}, KEY, draws=1_000_000_000)
    nowhere = mf.Problem(lambda t: jnp.sum(t) * jnp.nan, mf.KL(mf.Flat()))
    with pytest.raises(ValueError, match="the potential is not finite at any particle"):
        mf.sample(nowhere, jnp.ones((30, 1)), KEY)


# ---- Mixing. ----


def autoregressive(rho, n=1_000, m=10, seed=0):
    rng = np.random.default_rng(seed)
    path = [rng.normal(size=(n, 1))]
    for _ in range(m):
        path.append(rho * path[-1] + np.sqrt(1 - rho**2) * rng.normal(size=(n, 1)))
    return path[0], np.stack(path[1:], axis=1)


def test_nested_r_hat_is_one_where_particles_forget_and_not_where_they_do_not():
    assert nested_r_hat(*autoregressive(0.2))[0] < 1.01
    assert nested_r_hat(*autoregressive(0.97))[0] > 1.3
    start, draws = autoregressive(0.0)
    # Two modes between which nothing crosses.
    apart = np.where(start > 0, 5.0, -5.0)
    assert nested_r_hat(start + apart, draws + apart[:, None])[0] > 2


def test_drift_is_noticed_and_exact_draws_have_none():
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(1_000, 10, 5))
    assert drifting(draws) < 0
    draws[:, 5:, 2] += 0.2
    assert drifting(draws) > 0


def test_a_few_particles_that_stay_far_out_are_noticed():
    start, draws = autoregressive(0.2)
    assert staying(start, draws) < 0
    few = np.arange(1_000) < 5
    start[few], draws[few] = start[few] + 10, draws[few] + 10
    assert nested_r_hat(start, draws)[0] < 1.01
    assert staying(start, draws) > 0


def test_hopeless_particles_are_far_above_all_others():
    rng = np.random.default_rng(0)
    # U of exact draws in one, ten and a thousand dimensions, and of a law with exponential tails.
    for values in (
        *(rng.chisquare(number, 10_000) / 2 for number in (1, 10, 1_000)),
        rng.gamma(2, size=10_000),
    ):
        assert not hopeless(values).any()
        assert hopeless(np.append(values, values.max() + 500)).sum() == 1


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_effective_draws_of_an_autoregression(rho):
    found = effective_draws(autoregressive(rho, n=2_000, m=40)[1])[0]
    assert found == pytest.approx(80_000 * (1 - rho) / (1 + rho), rel=0.1)
