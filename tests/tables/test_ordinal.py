"""Classes in an order: their law against NumPyro's, and fits."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers import assert_close
from sklearn.base import clone

import measureflow as mf
from measureflow.networks.likelihoods import Ordinal

pytestmark = pytest.mark.standard_promotion

RNG = np.random.default_rng(0)
OUTPUTS = jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)


def cutpoints(outputs, classes):
    """By hand: the first, and the gaps between them."""
    equal = np.log(np.arange(1, classes) / np.arange(classes - 1, 0, -1))
    begun = np.log(np.expm1(np.diff(equal)))
    constants = np.asarray(outputs, np.float64)[:, 1:]
    gaps = np.logaddexp(constants[:, 1:] + begun, 0) + 1e-3
    return np.cumsum(np.concatenate([constants[:, :1] + equal[0], gaps], axis=1), axis=1)


def test_the_law_is_that_of_numpyro():
    law, cuts = Ordinal(4)(OUTPUTS), cutpoints(OUTPUTS, 4)
    exact = dist.OrderedLogistic(OUTPUTS[:, 0], jnp.asarray(cuts, jnp.float32))
    assert_close(jax.nn.softmax(law.logits), exact.probs, 1e-6)
    y = jnp.array([0, 1, 2, 3, 0, 3])
    assert_close(law.log_prob(y), exact.log_prob(y), 1e-5)
    # Mutants: the score with the other sign, and chances of all classes up to one for its own.
    mutants = (dist.OrderedLogistic(-OUTPUTS[:, 0], exact.cutpoints).probs, jnp.cumsum(exact.probs, axis=-1))
    assert all(float(jnp.max(jnp.abs(mutant - exact.probs))) > 0.1 for mutant in mutants)
    assert np.all(np.diff(cuts, axis=1) > 0)


def test_without_outputs_classes_are_equally_frequent():
    for classes in (2, 3, 7):
        shares = jax.nn.softmax(Ordinal(classes)(jnp.zeros((1, classes))).logits)
        assert_close(shares[0], np.full(classes, 1 / classes), 1e-2)


def test_an_order_moves_the_classes():
    plain, moved = Ordinal(4)(OUTPUTS), Ordinal(4, order=(2, 0, 3, 1))(OUTPUTS)
    # Class 2 is the lowest, class 1 the highest.
    assert_close(moved.logits[:, jnp.array([2, 0, 3, 1])], plain.logits, 1e-7)
    assert np.max(np.abs(np.asarray(moved.logits - plain.logits))) > 0.1


def test_chances_and_gradients_are_numbers_far_away():
    law = Ordinal(4)

    def total(outputs):
        return jnp.sum(law(outputs).logits)

    for size in (-60.0, 60.0):
        outputs = jnp.full((1, 4), size).at[0, 2:].set(-60.0)
        assert np.all(np.isfinite(law(outputs).logits))
        assert np.all(np.isfinite(jax.grad(total)(outputs)))
    # Not 1 − 1: chances of 10⁻²⁰ have a logarithm.
    far = law(jnp.array([[50.0, 0.0, 0.0, 0.0]])).logits[0]
    exact = cutpoints(np.zeros((1, 4)), 4)[0] - 50.0
    assert_close(far[:2], [exact[0], np.log(np.exp(exact[1]) - np.exp(exact[0]))], 1e-4)


# Fits: five grades of a score.

ROWS = 300
X = RNG.normal(size=(ROWS, 2))
SCORE = 2 * X[:, 0] + RNG.logistic(size=ROWS)
GRADES = np.searchsorted([-3.0, -1.0, 1.0, 3.0], SCORE)
NAMES = np.array(["poor", "fair", "good", "very good", "excellent"])
SETTINGS = {
    "hidden": (),
    "encoding": 0,
    "prior_weight": 1.0,
    "particles": 4,
    "steps": 4_000,
    "random_state": 0,
}


@pytest.fixture(scope="module")
def grades():
    return mf.EnsembleClassifier(ordinal=NAMES.tolist(), **SETTINGS).fit(X, NAMES[GRADES])


def test_a_fit_finds_the_cutpoints(grades):
    """Those of the data: chances of all grades are within five standard errors of the truth."""
    points = np.array([[-1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    below = 1 / (1 + np.exp(2 * points[:, :1] - np.array([[-3.0, -1.0, 1.0, 3.0]])))
    exact = np.diff(np.concatenate([np.zeros((3, 1)), below, np.ones((3, 1))], axis=1), axis=1)
    # Columns are those of classes_, which are sorted.
    columns = np.searchsorted(grades.classes_, NAMES)
    found = grades.predict_proba(points)[:, columns]
    # Five shares of a hundred rows or so near each point.
    assert np.all(np.abs(found - exact) < 5 * np.sqrt(0.25 / 100))
    assert grades.predict(points).tolist() == NAMES[np.argmax(found, axis=1)].tolist()
    # In the wrong order it knows much less.
    wrong = mf.EnsembleClassifier(ordinal=True, **SETTINGS).fit(X, NAMES[GRADES])
    scores = [mf.metrics.log_loss(one.predict_proba(X), NAMES[GRADES]) for one in (grades, wrong)]
    assert scores[0] < scores[1] - 0.2
    # One score for five classes.
    assert grades.particles_["network"][0]["weight"].shape[1:] == (2, 1)


def test_sets_and_entropies_go_by_the_law(grades):
    sets = grades.predict_set(X, 0.8)
    held = sets[np.arange(ROWS), np.searchsorted(grades.classes_, NAMES[GRADES])]
    assert held.mean() > 0.8 - 4 * np.sqrt(0.16 / ROWS)
    assert np.all(np.asarray(grades.predict_dist(X).entropy()) > 0)


def test_a_fit_goes_where_others_go(grades, tmp_path):
    grades.save(tmp_path / "model")
    back = mf.load(tmp_path / "model")
    assert np.array_equal(back.predict_proba(X), grades.predict_proba(X))
    assert back.ordinal == NAMES.tolist()
    assert clone(grades).ordinal == grades.ordinal
    grades.export(tmp_path / "export")
    about = (tmp_path / "export" / "model.json").read_text(encoding="utf-8")
    assert '"excellent"' in about
    other = clone(grades).set_params(warm_start=True)
    vars(other).update({k: v for k, v in vars(grades).items() if k.endswith("_")})
    with pytest.raises(ValueError, match="likelihood or ordinal were changed"):
        other.set_params(ordinal=False).fit(X, NAMES[GRADES])


@pytest.mark.parametrize(
    ("ordinal", "kind", "said"),
    [
        (["poor", "fair"], ValueError, "ordinal does not name 'excellent', which is a label of y"),
        ([*NAMES, "poor"], ValueError, "ordinal names a label twice"),
        ("excellent", TypeError, "ordinal must be True, False or the labels in their order, got 'excellent'"),
        (3, TypeError, "ordinal must be True, False or the labels in their order, got 3"),
    ],
)
def test_wrong_orders_raise(ordinal, kind, said, as_a_user_runs_it):
    with pytest.raises(kind, match=said):
        mf.EnsembleClassifier(ordinal=ordinal).fit(X, NAMES[GRADES])


def test_wrong_orders_of_the_law_raise(as_a_user_runs_it):
    with pytest.raises(ValueError, match=r"order must hold each of the classes 0, 1, … once, got \(1, 1\)"):
        Ordinal(2, order=(1, 1))
    with pytest.raises(ValueError, match="order has 2 classes, not 3"):
        Ordinal(3, order=(1, 0))
