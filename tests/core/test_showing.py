"""What `print` shows of the main objects is one short line."""

import jax
import jax.numpy as jnp
import optax
import pytest

import measureflow as mf

NETWORK = mf.Network.mlp(3, (50,), 2)
PRIOR = mf.Gaussian(jnp.zeros(2), 1.0)
KERNEL = mf.SquaredExponential(0.7)
PARTICLES = PRIOR.sample(jax.random.key(0), 5)
REGULARISER = 0.5 * mf.SquaredMMD(PRIOR, KERNEL) + 1.0 * mf.KL(PRIOR)
LOSS = mf.NegativeLogLikelihood(NETWORK, mf.likelihoods.Heteroscedastic())
PREDICTIVE = mf.Predictive(
    NETWORK, mf.likelihoods.Heteroscedastic(), NETWORK.prior().sample(jax.random.key(0), 5)
)

SHOWN = {
    "Gaussian(mean=[0, 0], scale=[1, 1])": PRIOR,
    "Gaussian(2 dimensions, full covariance)": mf.Gaussian(jnp.zeros(2), jnp.eye(2)),
    "Gaussian(302 dimensions, independent coordinates)": NETWORK.prior(),
    "Empirical(5 particles in 2 dimensions)": mf.Empirical(PARTICLES),
    "Empirical(1 particle in 1 dimension, weighted)": mf.Empirical(jnp.zeros((1, 1)), jnp.ones(1)),
    "0.5 * SquaredExponential(lengthscale=0.7) + 1 * Matern(nu=1.5, lengthscale=2)": 0.5 * KERNEL
    + mf.Matern(1.5, 2.0),
    "SquaredExponential(lengthscale=0.7).on(OutputsAt)": KERNEL.on(NETWORK.at(jnp.zeros((4, 3)))),
    "SquaredMMD(reference=Gaussian(mean=[0, 0], scale=[1, 1]), kernel=SquaredExponential(lengthscale=0.7))": (
        mf.SquaredMMD(PRIOR, KERNEL)
    ),
    "0.5·MMD²(Q, Gaussian) + 1·KL(Q, Gaussian)": REGULARISER,
    "Problem(L(Q) = ∫ ℓ dQ + 0.5·MMD²(Q, Gaussian) + 1·KL(Q, Gaussian))": mf.Problem(LOSS, REGULARISER),
    "FreeEnergy(V, W, τ=1)": mf.Problem(LOSS, REGULARISER).free_energy(),
    "Network(302 parameters)": NETWORK,
    "NegativeLogLikelihood(network=Network(302 parameters), likelihood=Heteroscedastic())": LOSS,
    "WassersteinFlow(step_size=0.001)": mf.WassersteinFlow(1e-3),
    "WassersteinFlow(step_size=schedule, preconditioner=RMSPreconditioner(adapt_steps=100))": (
        mf.WassersteinFlow(optax.cosine_decay_schedule(1e-2, 100), mf.RMSPreconditioner(100))
    ),
    "RMSPreconditioner(adapt_steps=100, decay=0.9)": mf.RMSPreconditioner(100, decay=0.9),
    "ParametricFlow(family=MeanFieldGaussian(), optimiser=<Optax optimiser>)": (
        mf.ParametricFlow(mf.MeanFieldGaussian(), optax.adam(1e-2))
    ),
    "ParticleState(particles=f32[5,2], step=0)": mf.WassersteinFlow(1e-3).init(mf.Problem(LOSS), PARTICLES),
    "Predictive(Empirical(5 particles in 302 dimensions), likelihood Heteroscedastic())": PREDICTIVE,
    "Mixture(5 particles, Normal, batch shape (4,), event shape ())": PREDICTIVE(jnp.zeros((4, 3))),
    "EnsembleRegressor(steps=3)": mf.EnsembleRegressor(steps=3),
}


@pytest.mark.parametrize("text", SHOWN)
def test_objects_are_shown_in_one_line(text):
    assert str(SHOWN[text]) == repr(SHOWN[text]) == text


@pytest.mark.parametrize(
    "thing", [PRIOR, mf.Empirical(PARTICLES), mf.Problem(LOSS, REGULARISER), NETWORK, PREDICTIVE]
)
def test_what_jax_makes_of_them_is_shown_as_well(thing):
    texts = [repr(jax.tree.map(lambda leaf, other=other: other, thing)) for other in (None, True, "?")]
    assert all(text.startswith(type(thing).__name__) for text in texts)
