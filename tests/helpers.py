"""What the tests share: particles on pytrees, and NumPy formulas that know nothing of measureflow."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

import measureflow as mf

# Shapes of one particle. Leaves are ravelled in the order of their names.
SMALL = {"matrix": (2, 2), "scalar": (), "vector": (3,)}  # J = 8: distances coordinate by coordinate
LARGE = {"matrix": (5, 9), "scalar": (), "vector": (14,)}  # J = 60: distances from inner products


def jit(function):
    """Compiled with little effort: a program that runs once costs what its compilation costs."""
    effort = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return eqx.filter_jit(lambda *arguments: function(*arguments), compiler_options=effort)


def key(seed=0):
    return jax.random.key(seed)


def draw(shapes, n, seed=0):
    """n particles whose typical distance is about 2 in any dimension."""
    rng = np.random.default_rng(seed)
    spread = 1.4 / np.sqrt(sum(int(np.prod(shape)) for shape in shapes.values()))
    return {
        name: jnp.asarray(spread * rng.normal(size=(n, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


def rows(particles):
    """Every particle as a float64 row, leaves in the order of their names."""
    leaves = [particles[name] for name in sorted(particles)] if isinstance(particles, dict) else [particles]
    return np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in leaves], axis=1)


def squared_distances(x, y):
    return np.sum((x[:, None, :] - y[None, :, :]) ** 2, axis=-1)


def root(xp, s):
    """√s, whose derivative at 0 is 0 also for autodiff."""
    return xp.where(s > 0, xp.sqrt(xp.where(s > 0, s, 1.0)), 0.0)


def squared_exponential(xp, s, scale):
    return xp.exp(-s / (2 * scale**2))


def inverse_multiquadric(xp, s, scale):
    return 1 / xp.sqrt(1 + s / scale**2)


def matern(xp, s, nu, scale):
    r = root(xp, s) / scale
    if nu == 0.5:
        return xp.exp(-r)
    if nu == 1.5:
        return (1 + np.sqrt(3) * r) * xp.exp(-np.sqrt(3) * r)
    return (1 + np.sqrt(5) * r + 5 * r**2 / 3) * xp.exp(-np.sqrt(5) * r)


# name: (the kernel, the same as a function of the squared distance in NumPy or jax.numpy)
RADIAL = {
    "SE": (mf.SquaredExponential(1.3), lambda xp, s: squared_exponential(xp, s, 1.3)),
    "Matern-0.5": (mf.Matern(0.5, 0.9), lambda xp, s: matern(xp, s, 0.5, 0.9)),
    "Matern-1.5": (mf.Matern(1.5, 1.1), lambda xp, s: matern(xp, s, 1.5, 1.1)),
    "Matern-2.5": (mf.Matern(2.5, 1.6), lambda xp, s: matern(xp, s, 2.5, 1.6)),
    "IMQ": (mf.InverseMultiquadric(0.7), lambda xp, s: inverse_multiquadric(xp, s, 0.7)),
    "multiple": (2.5 * mf.InverseMultiquadric(0.7), lambda xp, s: 2.5 * inverse_multiquadric(xp, s, 0.7)),
    "sum": (
        0.7 * mf.SquaredExponential(1.3) + 2.0 * (mf.Matern(0.5, 0.9) + 0.5 * mf.Matern(2.5, 1.6)),
        lambda xp, s: (
            0.7 * squared_exponential(xp, s, 1.3) + 2 * matern(xp, s, 0.5, 0.9) + matern(xp, s, 2.5, 1.6)
        ),
    ),
}


def monte_carlo(values):
    """The mean of independent values, and its standard error."""
    values = np.asarray(values, np.float64)
    return values.mean(axis=0), values.std(axis=0, ddof=1) / np.sqrt(len(values))


def assert_within(value, mean, standard_error, errors=5.0):
    """|value − mean| ≤ `errors` standard errors, with room for float32 rounding."""
    excess = np.abs(np.asarray(value, np.float64) - mean) - 2e-6 * np.abs(mean)
    assert np.all(excess <= errors * np.asarray(standard_error)), (value, mean, standard_error)


def assert_close(value, expected, relative=1e-5):
    """Equal up to `relative` of the largest entry of `expected`."""
    value, expected = np.asarray(value, np.float64), np.asarray(expected, np.float64)
    assert value.shape == expected.shape
    assert np.all(np.isfinite(value))
    error = np.max(np.abs(value - expected)) / max(np.max(np.abs(expected)), 1e-30)
    assert error <= relative, f"relative error {error:.2e}"


def equations(jaxpr):
    """All equations of a program, those of its inner programs included."""
    jaxpr = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in jaxpr.eqns:
        yield equation
        for parameter in equation.params.values():
            for inner in parameter if isinstance(parameter, tuple | list) else [parameter]:
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    yield from equations(inner)


def largest_array(jaxpr):
    """The number of entries of the largest array that a program makes."""
    return max(variable.aval.size for equation in equations(jaxpr) for variable in equation.outvars)


class Inner(mf.AbstractKernel):
    """exp(⟨x, y⟩): neither radial nor a pull-back."""

    def __call__(self, x, y):
        return jnp.exp(jnp.sum(x * y))
