"""NumPyro models as problems."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

import measureflow as mf

pytestmark = pytest.mark.standard_promotion
KEY = jax.random.key(0)
Y = np.array([1.0, 2.0, 0.5], np.float32)


def model(y, width=2.0):
    mu = numpyro.sample("mu", dist.Normal(0, width))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    numpyro.deterministic("ratio", mu / sigma)
    numpyro.sample("y", dist.Normal(mu * share[0], sigma), obs=y)


def test_the_potential_is_the_negative_log_density_with_its_jacobian():
    converted = mf.from_numpyro(model, Y, width=3.0)
    particles = converted.initial(KEY, 5)
    assert {name: leaf.shape for name, leaf in particles.items()} == {
        "mu": (5,),
        "share": (5, 2),
        "sigma": (5,),
    }
    sites = converted.constrained(particles)
    assert sites["share"].shape == (5, 3)
    np.testing.assert_allclose(sites["sigma"], np.exp(particles["sigma"]), rtol=1e-5)
    np.testing.assert_allclose(sites["ratio"], sites["mu"] / sites["sigma"], rtol=1e-5)
    for i in range(5):
        theta = jax.tree.map(lambda leaf, i=i: leaf[i], particles)
        share = dist.transforms.StickBreakingTransform()
        expected = (
            dist.Normal(0, 3.0).log_prob(sites["mu"][i])
            + dist.HalfNormal(1.0).log_prob(sites["sigma"][i])
            + theta["sigma"]
            + dist.Dirichlet(jnp.ones(3)).log_prob(sites["share"][i])
            + share.log_abs_det_jacobian(theta["share"], share(theta["share"]))
            + dist.Normal(sites["mu"][i] * sites["share"][i, 0], sites["sigma"][i]).log_prob(Y).sum()
        )
        likelihood = dist.Normal(sites["mu"][i] * sites["share"][i, 0], sites["sigma"][i]).log_prob(Y).sum()
        value = converted.problem.free_energy().potential(theta)
        assert float(value) == pytest.approx(-float(expected), rel=1e-4)
        assert float(converted.loss(theta)) == pytest.approx(-float(likelihood), rel=1e-4)
        assert float(converted.prior.log_density(theta)) == pytest.approx(
            float(expected - likelihood), rel=1e-4
        )


def test_the_prior_is_a_reference():
    """Its draws are those of its density, Jacobians and all; draws of another width are not."""
    converted = mf.from_numpyro(model, Y)
    before = mf.Problem(lambda theta: 0.0 * theta["mu"], mf.KL(converted.prior))
    draws = converted.prior.sample(KEY, 1_000)
    assert before.certify(draws)
    assert not before.certify(draws | {"sigma": 1.5 * draws["sigma"]})
    assert not converted.problem.certify(draws)
    reference = mf.Empirical(jax.tree.map(lambda leaf: leaf[:50], draws))
    both = mf.Problem(
        converted.loss, 0.5 * mf.KL(converted.prior) + mf.SquaredMMD(reference, mf.SquaredExponential(1.0))
    )
    assert "DRLE" in both.describe()


def test_draws_come_back_with_their_leading_axes():
    converted = mf.from_numpyro(model, Y)
    draws = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), converted.initial(KEY, 6))
    sites = converted.constrained(draws)
    assert sites["share"].shape == (2, 3, 3)
    assert sites["mu"].shape == (2, 3)


def discrete(kind):
    def of(y):
        k = numpyro.sample("k", kind)
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + k, 1), obs=y)

    return of


def test_discrete_sites():
    with pytest.raises(ValueError, match="the sites k are discrete and cannot be enumerated"):
        mf.from_numpyro(discrete(dist.Poisson(2.0)), Y)
    if importlib.util.find_spec("funsor") is None:
        with pytest.raises(ImportError, match=r"the sites k are discrete; .* pip install funsor"):
            mf.from_numpyro(discrete(dist.Bernoulli(0.5)), Y)
    else:
        assert set(mf.from_numpyro(discrete(dist.Bernoulli(0.5)), Y).template) == {"mu"}


def test_improper_sites_are_allowed_and_models_without_latent_sites_are_not():
    def improper(y):
        x = numpyro.sample("x", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        numpyro.sample("y", dist.Normal(x[0], 1), obs=y)
        numpyro.factor("density", -0.5 * jnp.sum(x**2))

    assert mf.from_numpyro(improper, Y).template["x"].shape == (2,)
    with pytest.raises(ValueError, match="the model has no latent site"):
        mf.from_numpyro(lambda y: numpyro.sample("y", dist.Normal(0, 1), obs=y), Y)
