"""Integrators against the exact laws of their discrete chains; each test fails on a wrong one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from verification.laws import dle, drle, exact

import measureflow as mf
from measureflow.flows import integrators, kinetic, metropolis

A, TAU, N = 2.0, 0.7, 40_000
# A sample variance of N normal draws has relative standard error √(2/N).
ERROR = np.sqrt(2 / N)
KEY = jax.random.key(3)


def quadratic(theta):
    return 0.5 * A * jnp.sum(theta**2)


HARMONIC = mf.deep_langevin_ensemble(quadratic, mf.Flat(), kl=TAU)


def variance(flow, problem=HARMONIC, steps=200):
    """Of N independent chains once they have forgotten their beginning."""
    state = flow.init(problem, jnp.zeros((N, 1)))
    run = jax.jit(lambda state: mf.run(problem, flow, state, None, KEY, steps))
    return float(jnp.var(run(state).particles))


def noise_times(factor, of="noise_like"):
    real = getattr(integrators, of)
    return lambda *arguments: jax.tree.map(lambda z: np.float32(np.sqrt(factor)) * z, real(*arguments))


@pytest.mark.few(3)
@pytest.mark.parametrize(("eta", "g"), [(0.05, None), (0.4, None), (0.9, None), (0.4, 0.5), (0.2, 3.0)])
def test_leimkuhler_matthews_has_the_right_variance_for_every_step_size(eta, g):
    preconditioner = None if g is None else mf.FixedPreconditioner(g)
    found = variance(mf.WassersteinFlow(eta, preconditioner))
    assert abs(found / (TAU / A) - 1) < 4 * ERROR
    euler = variance(mf.WassersteinFlow(eta, preconditioner, integrator=mf.EulerMaruyama()))
    assert abs(euler / (TAU / (A * (1 - eta * (g or 1.0) * A / 2))) - 1) < 4 * ERROR


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.1, 2.0])
def test_the_variance_test_has_power(factor, monkeypatch):
    monkeypatch.setattr(integrators, "mean_normal_of_words", noise_times(factor, "mean_normal_of_words"))
    assert abs(variance(mf.WassersteinFlow(0.4)) / (TAU / A) - 1) > 4 * ERROR


class Quadratic(mf.AbstractKernel):
    """κ(x, y) = −x·y."""

    def __call__(self, x, y):
        return -jnp.sum(x * y)


def test_leimkuhler_matthews_is_right_with_a_quadratic_interaction():
    """The mean's own equation has curvature a − 1, deviations from it have a: both exact."""
    n, runs, eta = 4, 4_000, 0.4
    problem = mf.Problem(quadratic, 0.5 * mf.SquaredMMD(mf.Empirical(jnp.zeros((1, 1))), Quadratic()))
    energy = problem.free_energy()
    assert np.all(energy.interaction_gradient(jnp.ones((2, 1))) == -1.0)
    problem = mf.Problem(quadratic, problem.regulariser + TAU * mf.KL(mf.Flat()))
    flow = mf.WassersteinFlow(eta)

    def one(key):
        state = flow.init(problem, jnp.zeros((n, 1)))
        return mf.run(problem, flow, state, None, key, 100).particles[:, 0]

    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, runs)))
    of_mean, within = found.mean(axis=1).var(), found.var(axis=1, ddof=1).mean()
    assert abs(of_mean / (TAU / n / (A - 1)) - 1) < 4 * np.sqrt(2 / runs)
    assert abs(within / (TAU / A) - 1) < 4 * np.sqrt(2 / (runs * (n - 1)))


def test_leimkuhler_matthews_resumes_exactly():
    problem = drle()
    flow = mf.WassersteinFlow(lambda step: 0.01 * 0.9 ** step.astype(float), mf.RMSPreconditioner(5))
    start = jnp.linspace(-1, 1, 12)[:, None]
    whole = mf.solve(problem, flow, start, 9, KEY).state.particles
    part = mf.solve(problem, flow, start, 4, KEY).state
    assert np.array_equal(whole, mf.solve(problem, flow, part, 5, KEY).state.particles)


def kinetic_variance(scheme, eta, friction, g):
    """Of position, by the Lyapunov equation of the linear map that one step is."""
    h, a, c = eta, A * g, np.exp(-friction * eta)
    drift, kick = np.array([[1, h / 2], [0, 1]]), np.array([[1, 0], [-h * a, 1]])
    if scheme == "BAOAB":
        noise = np.array([[0, 0], [0, TAU * (1 - c**2)]])
        step = drift @ np.diag([1, c]) @ drift @ kick
        added = drift @ noise @ drift.T
    elif scheme == "OBABO":
        half, whole = np.array([[1, 0], [-h * a / 2, 1]]), np.array([[1, h], [0, 1]])
        step = whole @ half @ np.diag([1, c]) @ half
        added = whole @ half @ np.array([[0, 0], [0, TAU * (1 - c**2)]]) @ half.T @ whole.T
    else:
        e = np.exp(-friction * h / 2)
        free = np.array([[1, (1 - e) / friction], [0, e]])
        covariance = (1 - e) ** 2 / friction
        of_path = (friction * h - 3 + 4 * e - e**2) / friction**2
        noise = TAU * np.array([[of_path, covariance], [covariance, 1 - e**2]])
        step = free @ kick @ free
        added = noise + free @ kick @ noise @ kick.T @ free.T
    return g * scipy.linalg.solve_discrete_lyapunov(step, added)[0, 0]


@pytest.mark.few(4)
@pytest.mark.parametrize("scheme", ["BAOAB", "OBABO", "UBU"])
@pytest.mark.parametrize(("eta", "friction", "g"), [(0.2, 1.0, 1.0), (0.9, 0.5, 1.0), (0.5, 2.0, 2.0)])
def test_kinetic_schemes_have_the_variance_of_their_own_chain(scheme, eta, friction, g):
    expected = kinetic_variance(scheme, eta, friction, g)
    known = {"BAOAB": TAU / A, "OBABO": TAU / (A * (1 - eta**2 * g * A / 4))}
    assert expected == pytest.approx(known.get(scheme, expected), rel=1e-10)
    flow = mf.KineticFlow(eta, friction, scheme, mass=mf.FixedPreconditioner(g))
    assert abs(variance(flow) / expected - 1) < 4 * ERROR


@pytest.mark.parametrize("scheme", ["BAOAB", "UBU"])
@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_kinetic_test_has_power(scheme, factor, monkeypatch):
    monkeypatch.setattr(kinetic, "noise_like", noise_times(factor))
    found = variance(mf.KineticFlow(0.9, 0.5, scheme))
    assert abs(found / kinetic_variance(scheme, 0.9, 0.5, 1.0) - 1) > 4 * ERROR


# ---- Metropolis: from exact draws of a law with two modes, the law stays, whatever the step size. ----

FLOWS = {
    "MALA": lambda eta: mf.WassersteinFlow(eta, mf.FixedPreconditioner(0.8), metropolis=True),
    "gHMC": lambda eta: mf.KineticFlow(
        np.sqrt(2 * eta), 1.0, "OBABO", mf.FixedPreconditioner(0.8), metropolis=True
    ),
}


def deviations(flow, steps=20):
    """Of four moments from those of q*, in standard errors, after some steps from exact draws."""
    problem = dle()
    law = exact(problem)
    start = jnp.asarray(law.sample(np.random.default_rng(0), (N, 1)), jnp.float32)
    run = jax.jit(lambda state: mf.run(problem, flow, state, None, KEY, steps))
    end = np.asarray(run(flow.init(problem, start)).particles, np.float64)[:, 0]
    u = (np.arange(200_000) + 0.5) / 200_000
    points = law.quantile(u)
    errors = []
    for f in (lambda x: x, np.square, lambda x: x < 0, lambda x: np.abs(x + 2) < 0.3):
        truth, seen = f(points), f(end)
        errors.append((seen.mean() - truth.mean()) / (truth.std() / np.sqrt(N)))
    return np.array(errors)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("eta", [0.02, 0.15, 0.5])
def test_metropolis_keeps_the_law_for_any_step_size(name, eta):
    assert np.all(np.abs(deviations(FLOWS[name](eta))) < 4)


def test_without_metropolis_large_steps_do_not():
    assert np.any(np.abs(deviations(mf.WassersteinFlow(0.15))) > 4)


def no_proposal_ratio(monkeypatch):
    monkeypatch.setattr(metropolis, "squared_sizes", lambda x: jnp.zeros(len(x), x.dtype))
    monkeypatch.setattr(kinetic, "squared_sizes", lambda x: jnp.zeros(len(x), x.dtype))


def energy_times(factor):
    def patch(monkeypatch):
        right = metropolis.acceptance
        for module in (metropolis, kinetic):
            monkeypatch.setattr(module, "acceptance", lambda ratio: right(factor * ratio))

    return patch


def wrong_noise(factor):
    def patch(monkeypatch):
        wrong = noise_times(factor)
        for module in (metropolis, kinetic):
            monkeypatch.setattr(module, "noise_like", wrong)

    return patch


MISTAKES = [
    ("MALA", no_proposal_ratio),
    ("gHMC", no_proposal_ratio),
    ("MALA", energy_times(0.5)),
    ("gHMC", energy_times(0.5)),
    ("MALA", wrong_noise(0.5)),
    ("MALA", wrong_noise(2.0)),
    ("gHMC", wrong_noise(0.5)),
    ("gHMC", wrong_noise(2.0)),
]


@pytest.mark.few(3)
@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_the_metropolis_test_has_power(name, mistake, monkeypatch):
    mistake(monkeypatch)
    assert np.any(np.abs(deviations(FLOWS[name](0.15))) > 4)


def test_metropolis_has_detailed_balance():
    """From exact draws, a pair (θ, θ′) is as probable as (θ′, θ): of h antisymmetric, E h = 0."""
    problem, flow = dle(), FLOWS["MALA"](0.3)
    start = jnp.asarray(exact(problem).sample(np.random.default_rng(1), (N, 1)), jnp.float32)
    step = jax.jit(lambda state: mf.run(problem, flow, state, None, KEY, 1))
    x, y = (np.asarray(p, np.float64)[:, 0] for p in (start, step(flow.init(problem, start)).particles))
    for h in (x * y**2 - y * x**2, (x < 0) * y - (y < 0) * x, np.sin(x) * y - np.sin(y) * x):
        assert abs(h.mean()) < 4 * h.std() / np.sqrt(N)
    assert 0.3 < np.mean(x != y) < 0.99


def test_history_records_the_acceptance():
    for flow in (FLOWS["MALA"](0.15), FLOWS["gHMC"](0.15)):
        history = mf.solve(dle(), flow, jnp.linspace(-2, 1, 400)[:, None], 60, KEY, record_every=20).history
        assert np.all((history.acceptance > 0.3) & (history.acceptance < 1))


def data_loss(theta, batch):
    return jnp.mean(jnp.square(theta[None] - batch))


def test_metropolis_is_refused_where_it_is_not_exact():
    start, data = jnp.zeros((4, 1)), jnp.ones((10, 1))
    for flow in (FLOWS["MALA"](0.1), FLOWS["gHMC"](0.1)):
        with pytest.raises(ValueError, match="metropolis=True was given for a problem with an interaction"):
            flow.init(drle(), start)
        posed = mf.deep_langevin_ensemble(data_loss, mf.Gaussian(jnp.zeros(1), 1.0), kl=0.1)
        with pytest.raises(ValueError, match=r"together with batches.*leave batch_size out"):
            mf.solve(posed, flow, start, 3, KEY, data=data, batch_size=5)
        with pytest.raises(ValueError, match="together with batches"):
            mf.run(posed, flow, flow.init(posed, start), data, KEY, 2, batch_size=5)
        assert mf.solve(posed, flow, start, 3, KEY, data=data).state.step == 3
    with pytest.raises(ValueError, match="without temperature"):
        FLOWS["MALA"](0.1).init(mf.deep_ensemble(quadratic), start)
    with pytest.raises(ValueError, match="without temperature"):
        FLOWS["gHMC"](0.1).init(mf.deep_ensemble(quadratic), start)
    score = mf.LogScore(lambda t, y: -jnp.sum((t[None] - y) ** 2, axis=1))
    scored = mf.Problem(score, 0.1 * mf.KL(mf.Flat()))
    with pytest.raises(ValueError, match="a nonlinear functional"):
        FLOWS["MALA"](0.1).init(scored, start)


def test_what_does_not_go_together_is_refused(as_a_user_runs_it):
    with pytest.raises(ValueError, match=r"either momentum or LeimkuhlerMatthews\(\)"):
        mf.WassersteinFlow(0.1, momentum=0.9, integrator=mf.LeimkuhlerMatthews())
    with pytest.raises(ValueError, match="either metropolis=True or momentum"):
        mf.WassersteinFlow(0.1, momentum=0.9, metropolis=True)
    with pytest.raises(ValueError, match=r"either metropolis=True or LeimkuhlerMatthews\(\)"):
        mf.WassersteinFlow(0.1, integrator=mf.LeimkuhlerMatthews(), metropolis=True)
    with pytest.raises(TypeError, match=r"integrator must say how noise enters.*mf.EulerMaruyama\(\)"):
        mf.WassersteinFlow(0.1, integrator="euler")
    with pytest.raises(ValueError, match="scheme must be one of BAOAB, OBABO, UBU, got 'ABC'"):
        mf.KineticFlow(0.1, 1.0, "ABC")
    with pytest.raises(ValueError, match='needs scheme="OBABO"'):
        mf.KineticFlow(0.1, 1.0, metropolis=True)
    with pytest.raises(ValueError, match="friction must be > 0"):
        mf.KineticFlow(0.1, 0.0)
    with pytest.raises(ValueError, match='scheme="UBU" moves before'):
        mf.KineticFlow(0.1, 1.0, "UBU", mf.RMSPreconditioner(5))


def test_kinetic_flow_resumes_exactly_and_reaches_the_minimiser_with_an_interaction():
    problem, flow = drle(), mf.KineticFlow(0.2, 1.0)
    start = jnp.linspace(-1, 1, 12)[:, None]
    whole = mf.solve(problem, flow, start, 9, KEY).state.particles
    part = mf.solve(problem, flow, start, 4, KEY).state
    assert np.array_equal(whole, mf.solve(problem, flow, part, 5, KEY).state.particles)
    law = exact(problem)
    ends = mf.solve(problem, flow, jnp.zeros((2_000, 1)), 150, KEY, record_every=150).measure.particles
    mean, deviation = law.expected_wasserstein_1(np.random.default_rng(0), 2_000)
    assert law.wasserstein_1(ends) < mean + 4 * deviation
