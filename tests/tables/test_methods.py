"""Methods and likelihoods as objects: by name from one table, or of one's own."""

import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_close
from quick import quickly_compiled  # noqa: F401
from sklearn.base import clone

import measureflow as mf
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.methods import METHODS, Setting
from measureflow.tables.regressor import EnsembleRegressor
from measureflow.tables.targets import LIKELIHOODS

pytestmark = [
    # NumPyro and Optax promote integers and ranks.
    pytest.mark.standard_promotion,
    # Fits are short here; test_fitting.py looks at convergence.
    pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning"),
]

SETTINGS = {
    "hidden": (),
    "encoding": 0,
    "particles": 3,
    "steps": 300,
    "step_size": 0.05,
    "prior_weight": 1.0,
    "random_state": 0,
}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3))
Y = X @ [1.0, 0.5, 0.0] + 0.5 * RNG.normal(size=40)


def regressor(*method, **settings):
    return EnsembleRegressor(*method, **({"likelihood": "heteroscedastic"} | SETTINGS | settings))


def same(mine, others):
    return jax.tree.all(jax.tree.map(np.array_equal, mine.particles_, others.particles_))


# Methods


def log_score(setting):
    return mf.Problem(mf.LogScore(setting.loss), setting.prior_weight * mf.KL(setting.prior))


LOG_SCORE = mf.Method("log score", log_score)


def test_names_are_objects():
    assert list(METHODS) == ["DRLE", "DRE", "DLE", "DE", "FD-GVI", "PrO", "posterior"]
    by_name, by_object = regressor("DE").fit(X, Y), regressor(METHODS["DE"]).fit(X, Y)
    assert same(by_name, by_object)


def test_no_particle_is_thrown_away_by_one_batch():
    """After usual drifts, one of 10¹⁰: no coordinate moves by more than the step size."""
    one = jnp.ones(())
    prior = mf.Gaussian(jnp.zeros(5), 1.0)
    setting = Setting(None, prior, one, one, 0.01 * one, 0.9 * one, 1_000 * one, 3)
    flow = METHODS["DE"].flow(setting)
    problem = mf.deep_ensemble(lambda theta, batch: batch * jnp.sum(theta))
    state = flow.init(problem, jnp.zeros((3, 5)))
    for slope in [1.0, -1.0] * 10 + [1e10]:
        before = state.particles
        state = flow.step(problem, state, jnp.asarray(slope), jax.random.key(0))
    assert 0 < float(jnp.max(jnp.abs(state.particles - before))) < 0.01
    # What all share still knows the usual drifts.
    assert float(jnp.max(flow.preconditioner.scaling(state.memory, state.step).diagonal)) > 0.5


def test_a_method_of_ones_own_is_fitted():
    own = regressor(LOG_SCORE, steps=2_000).fit(X, Y)
    assert own.score(X, Y) > 0.5
    assert not same(own, regressor("DLE", steps=2_000).fit(X, Y))
    labels = EnsembleClassifier(LOG_SCORE, **SETTINGS).fit(X, Y > 0)
    assert labels.score(X, Y > 0) > 0.7


def test_predictively_oriented_is_the_log_score_of_the_mixture(tmp_path):
    """Two groups of rows with opposite slopes: one line through both predicts neither."""
    x = np.linspace(-2, 2, 200)[:, None]
    y = np.where(np.arange(200) % 2, 1.0, -1.0) * x[:, 0] + 0.1 * RNG.normal(size=200)
    fitted = {
        name: regressor(name, likelihood="homoscedastic", particles=8, steps=800).fit(x, y)
        for name in ("PrO", "DLE")
    }
    score = {name: np.mean(one.predict_dist(x).log_prob(y)) for name, one in fitted.items()}
    assert score["PrO"] > score["DLE"] + 0.5
    fitted["PrO"].save(tmp_path / "model")
    assert mf.load(tmp_path / "model").method == "PrO"


def test_a_method_goes_where_its_estimator_goes(tmp_path):
    own = regressor(LOG_SCORE).fit(X, Y)
    assert own.get_params()["method"] is LOG_SCORE
    assert clone(own).method == LOG_SCORE
    assert same(clone(own).fit(X, Y), own)
    back = pickle.loads(pickle.dumps(own))
    assert back.method == LOG_SCORE
    assert np.array_equal(back.predict(X), own.predict(X))
    assert regressor().set_params(method=LOG_SCORE).method is LOG_SCORE
    with pytest.raises(TypeError, match=r"method of your own, 'log score'.* pickle"):
        own.save(tmp_path / "model")
    regressor(METHODS["DE"]).fit(X, Y).save(tmp_path / "model")
    assert mf.load(tmp_path / "model").method == "DE"


def test_a_clone_compiles_nothing(caplog):
    own = regressor(LOG_SCORE).fit(X, Y)
    caplog.clear()
    with jax.log_compiles():
        clone(own).fit(X, Y)
    assert not [record for record in caplog.records if "Compiling" in record.getMessage()]


class Descent(mf.AbstractFlow):
    """Plain gradient descent, whose states do not count their steps, and which nothing anneals."""

    step_size: jax.Array

    def init(self, problem, initial):
        return {"particles": initial}

    def step(self, problem, state, batch, key):
        gradient = problem.free_energy(batch).wasserstein_gradient(state["particles"])
        moved = jax.tree.map(lambda x, g: x - self.step_size * g, state["particles"], gradient)
        return {"particles": moved}

    def measure(self, state):
        return mf.Empirical(state["particles"])


def test_a_flow_and_a_start_of_ones_own():
    """One particle at the origin: on all rows, descent of the mean squared error is known exactly."""
    method = mf.Method(
        "descent",
        lambda setting: mf.Problem(setting.loss),
        flow=lambda setting: Descent(setting.step_size),
        start=lambda setting, key: jax.tree.map(
            lambda leaf: jnp.zeros((setting.particles, *leaf.shape)), setting.prior.mean
        ),
    )
    unit = (lambda outputs: dist.Normal(outputs[..., 0], 1.0), 1)
    own = regressor(method, likelihood=unit, steps=37, batch_size=40, particles=1).fit(X, Y)
    inputs = np.column_stack([np.ones(40), (X - X.mean(axis=0)) / X.std(axis=0)])
    targets, theta = (Y - Y.mean()) / Y.std(), np.zeros(4)
    for _ in range(37):
        theta -= 0.05 * inputs.T @ (inputs @ theta - targets) / 40
    (layer,) = own.particles_
    assert_close(np.concatenate([layer["bias"][0], layer["weight"][0, :, 0]]), theta, 1e-5)
    assert own.n_iter_ == 37, "not a step more, where nothing anneals"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"problem": 3}, "Method problem must be a function of a Setting, got 3"),
        ({"flow": None}, "Method flow must be a function of a Setting, got None"),
        ({"candidates": ()}, r"Method candidates must be a tuple of Candidates, got \(\)"),
        ({"candidates": (1.0,)}, "Method candidates must be a tuple of Candidates"),
    ],
)
def test_wrong_methods_raise(wrong, message, as_a_user_runs_it):
    with pytest.raises(TypeError, match=message):
        mf.Method(**({"name": "mine", "problem": log_score} | wrong))


def test_unknown_methods_are_told_the_known():
    for wrong in ("SVGD", 3, log_score):
        with pytest.raises(
            ValueError, match=r"must be one of DRLE, DRE, DLE, DE, FD-GVI, PrO, posterior, got .*mf.Method"
        ):
            regressor(wrong).fit(X, Y)


# Likelihoods


@pytest.mark.few(2)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_an_object_is_as_good_as_its_name(name):
    # A name has the smallest scale of its targets: 0.001, but for laws of some numbers only, which have none.
    counts, positive = np.round(10 + 3 * Y).clip(0), np.exp(Y)
    some = dict.fromkeys(("poisson", "negative_binomial", "zero_inflated", "hurdle"), counts)
    some |= {"gamma": positive, "beta": positive / (1 + positive)}
    y = some.get(name, Y)
    law = LIKELIHOODS[name](**({} if name in some else {"smallest_scale": 1e-3}))
    by_name, by_object = (regressor("DE", likelihood=likelihood).fit(X, y) for likelihood in (name, law))
    assert same(by_name, by_object)
    assert np.array_equal(by_name.predict(X), by_object.predict(X))


def gamma(outputs):
    return dist.Gamma(jnp.exp(outputs[..., 0]), jnp.exp(outputs[..., 1]))


def test_a_function_is_a_likelihood():
    """Of positive numbers, which are not standardised."""
    positive = np.exp(Y)
    own = regressor("DE", likelihood=(gamma, 2), steps=2_000).fit(X, positive)
    mean, deviation = own.predict(X, return_std=True)
    assert np.all(mean > 0)
    assert np.all(deviation > 0)
    assert np.corrcoef(mean, positive)[0, 1] > 0.7
    assert np.mean(mean) == pytest.approx(np.mean(positive), rel=0.2)
    assert own.spread_ == 1.0
    low, high = own.predict_interval(X)
    assert np.all((low > 0) & (low < mean) & (mean < high))
    with pytest.raises(ValueError, match=r"y must hold numbers > 0 for likelihood=.*got -"):
        regressor("DE", likelihood=(gamma, 2)).fit(X, Y)


def test_a_function_that_is_normal_has_units():
    def unit(outputs):
        return dist.Normal(outputs[..., 0], 0.5)

    own = regressor("DE", likelihood=(unit, 1), steps=2_000).fit(X, 1e6 + 100 * Y)
    assert np.abs(np.mean(own.predict(X)) - 1e6 - 100 * Y.mean()) < 10
    _, deviation = own.predict(X, return_std=True)
    assert np.all(deviation > 0.49 * 100 * Y.std())


def test_a_likelihood_goes_where_its_estimator_goes(tmp_path):
    for likelihood in (mf.likelihoods.StudentT(smallest_scale=0.01), (gamma, 2)):
        own = regressor("DE", likelihood=likelihood).fit(X, np.exp(Y))
        for back in (clone(own).fit(X, np.exp(Y)), pickle.loads(pickle.dumps(own))):
            assert np.array_equal(back.predict(X), own.predict(X))
            assert eqx.tree_equal(back.likelihood, own.likelihood)
    own = regressor("DE", likelihood=mf.likelihoods.StudentT(smallest_scale=0.01)).fit(X, Y)
    own.save(tmp_path / "model")
    back = mf.load(tmp_path / "model")
    assert eqx.tree_equal(back.likelihood, own.likelihood)
    assert np.array_equal(back.predict(X), own.predict(X))
    with pytest.raises(TypeError, match=r"likelihood of your own.* pickle"):
        regressor("DE", likelihood=(gamma, 2)).fit(X, np.exp(Y)).save(tmp_path / "other")


def test_a_likelihood_must_fit_the_targets():
    with pytest.raises(ValueError, match=r"Heteroscedastic\(targets=1\) does not fit y, which has 2 target"):
        regressor(likelihood=mf.likelihoods.Heteroscedastic()).fit(X, np.column_stack([Y, Y]))
    with pytest.raises(
        ValueError, match=r"likelihood must be one of heteroscedastic, .* got 'cauchy'; or pass"
    ):
        regressor(likelihood="cauchy").fit(X, Y)
    with pytest.raises(ValueError, match="likelihood must be one of"):
        regressor(likelihood=gamma).fit(X, np.exp(Y))
    with pytest.raises(ValueError, match="y must hold 0 and 1"):
        regressor(likelihood=mf.likelihoods.Bernoulli()).fit(X, Y)
