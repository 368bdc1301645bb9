"""Networks drawn from the posterior: a linear one against its closed form, and what becomes of a verdict."""

import pickle
import warnings

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from sklearn.exceptions import ConvergenceWarning

import measureflow as mf
from measureflow.sampling.result import Sample
from measureflow.spaces.empirical import Empirical
from measureflow.statement.certificate import Certificate
from measureflow.tables import posterior
from measureflow.tables.posterior import MOST_ROWS_TIMES_PARAMETERS, Verdict

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 2))
Y = X[:, 0] + 0.3 * RNG.normal(size=40)
SETTINGS = {"hidden": (), "encoding": 0, "random_state": 0}


def known_noise(outputs):
    return dist.Normal(outputs[..., 0], 0.5)


def exact(weight, points):
    """Mean and deviation of the posterior's line at some points, and its noise, in the units of Y."""
    z, unit = (X - X.mean(axis=0)) / X.std(axis=0), Y.std()
    features = np.concatenate([z, np.ones((40, 1))], axis=1)
    prior = mf.Network.mlp(2, (), 1).prior()
    deviations = jax.tree.leaves(prior.deviations())
    # Biases come before weights in the order of their names.
    spread = np.concatenate([np.full(2, np.ravel(deviations[1])[0]), np.full(1, np.ravel(deviations[0])[0])])
    precision = features.T @ features / 0.25 / weight + np.diag(1 / spread**2)
    line = np.linalg.solve(precision, features.T @ (Y - Y.mean()) / unit / 0.25 / weight)
    there = np.concatenate([(points - X.mean(axis=0)) / X.std(axis=0), np.ones((len(points), 1))], axis=1)
    variances = np.sum(there * np.linalg.solve(precision, there.T).T, axis=1)
    return Y.mean() + unit * there @ line, unit * np.sqrt(variances)


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, 9.0])
def test_a_linear_network_has_its_closed_form(weight):
    settings = SETTINGS | {"particles": 200, "prior_weight": weight, "likelihood": (known_noise, 1)}
    model = mf.EnsembleRegressor("posterior", **settings).fit(X, Y)
    assert model.certificate_, str(model.certificate_)
    points = np.array([[0.0, 0.0], [2.0, -1.0], [-3.0, 3.0]])
    mean, deviation = exact(weight, points)
    law = model.predict_dist(points)
    assert np.all(np.abs(law.mean - mean) < 4 * deviation / np.sqrt(200))
    # The standard error of a deviation is 1/√(2n) of it.
    assert np.all(np.abs(np.sqrt(law.epistemic_variance) / deviation - 1) < 4 / np.sqrt(400))
    # Mutant: a weight that is not that of the prior.
    assert np.all(np.abs(exact(10 - weight, points)[1] / deviation - 1) > 0.5)


def drawn(problems=(), statistic=1.0, interrupted=None):
    """A sampler that draws from the prior."""

    def sample(problem, initial, key, *, particles, data, **others):
        assert data[0].shape[1] == X.shape[1]
        draws = initial.sample(key, 4 * particles)
        table = mf.History({"phase": np.array(["sampling"]), "gradients": np.array([7]), "r_hat": np.ones(1)})
        one = jax.tree.map(lambda leaf: np.ones(leaf.shape[1:]), draws)
        return Sample(
            jax.tree.map(lambda leaf: np.asarray(leaf).reshape(particles, 4, *leaf.shape[1:]), draws),
            Empirical(draws),
            Certificate(statistic, 4.0, "the mean of b", 0.5, particles),
            one,
            jax.tree.map(lambda leaf: 500 * leaf, one),
            7,
            table,
            acceptance=0.9,
            stiff=0.0,
            replaced=0,
            levels=0,
            exact=True,
            problems=tuple(problems),
            interrupted=interrupted,
        )

    return sample


def test_the_verdict_is_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(posterior, "sample", drawn())
    model = mf.EnsembleRegressor("posterior", **SETTINGS).fit(X, Y)
    assert model.certificate_
    assert model.certificate_ == Verdict(1.0, 4.0, 1.0, 500.0, 7, ())
    assert model.prior_weight_ == 1.0
    assert model.shape_.likelihood == "heteroscedastic"
    assert len(jax.tree.leaves(model.particles_)[0]) == 20
    model.save(tmp_path / "model")
    for back in (mf.load(tmp_path / "model"), pickle.loads(pickle.dumps(model))):
        assert back.certificate_ == model.certificate_
        assert np.array_equal(back.predict(X), model.predict(X))
    classes = mf.EnsembleClassifier("posterior", **SETTINGS).fit(X, Y > 0)
    assert classes.certificate_
    assert classes.predict_proba(X).shape == (40, 2)
    scores = mf.cross_validate(model, X, Y, cv=2, return_estimator=True)
    assert all(one.certificate_ for one in scores["estimator"])


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        (drawn(["nested R̂ is 2, above 1.01."]), "not certified as draws of the posterior: nested R̂ is 2"),
        (drawn(statistic=9.0), "not certified as draws of the posterior: the particles are not stationary"),
    ],
)
def test_draws_that_are_not_certified_are_told(sampler, said, monkeypatch):
    monkeypatch.setattr(posterior, "sample", sampler)
    model = mf.EnsembleRegressor("posterior", **SETTINGS)
    with pytest.warns(ConvergenceWarning, match=said):
        model.fit(X, Y)
    assert not model.certificate_
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        assert model.set_params(method="DE", steps=20).fit(X, Y).certificate_ is None


def test_an_interrupted_cross_validation_ends(monkeypatch):
    """All of it, not the split that was drawn when the signal came."""
    calls, sampler = [], drawn(["sample was interrupted by SIGINT."], interrupted="SIGINT")
    monkeypatch.setattr(
        posterior, "sample", lambda *given, **named: calls.append(0) or sampler(*given, **named)
    )
    model = mf.EnsembleRegressor("posterior", **SETTINGS)
    with pytest.raises(KeyboardInterrupt, match="SIGINT while the splits were fitted"):
        mf.cross_validate(model, X, Y, cv=3)
    assert len(calls) == 1
    with pytest.warns(ConvergenceWarning, match="interrupted by SIGINT"):
        model.fit(X, Y)
    assert len(model.predict(X)) == 40


def test_large_tables_are_refused():
    rows = MOST_ROWS_TIMES_PARAMETERS // 100
    with pytest.raises(ValueError, match=r"5,000 rows × 252 parameters are more than 500,000; use a smaller"):
        mf.EnsembleRegressor("posterior").fit(np.zeros((rows, 2)) + np.arange(rows)[:, None], np.arange(rows))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"steps": 100}, "has no steps, got 100"),
        ({"batch_size": 10}, "has no batch_size, got 10"),
        ({"early_stopping": True}, "knows no early_stopping"),
        ({"warm_start": True}, "knows no warm_start"),
    ],
)
def test_settings_of_training_are_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        mf.EnsembleRegressor("posterior", **SETTINGS, **settings).fit(X, Y)
    with pytest.raises(ValueError, match="calls no callback"):
        mf.EnsembleRegressor("posterior", **SETTINGS).fit(X, Y, callback=print)
