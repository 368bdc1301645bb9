"""How often `certify` rejects exact draws, and wrong ones: `python -m verification.certificate [runs]`."""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import measureflow as mf

RNG = np.random.default_rng(0)
SIZES = [(1_000, 2), (1_000, 10), (1_000, 50), (300, 5), (100, 30), (50, 60), (20, 3)]
Law = Callable[[int, int], tuple[np.ndarray, Callable]]


def gaussian(n: int, number: int) -> tuple[np.ndarray, Callable]:
    """Standard normal."""
    return RNG.normal(size=(n, number)), lambda theta: 0.5 * jnp.sum(jnp.square(theta))


def log_gamma(n: int, number: int) -> tuple[np.ndarray, Callable]:
    """Skewed, and stiff to one side."""
    return np.log(RNG.gamma(2, size=(n, number))), lambda theta: jnp.sum(jnp.exp(theta) - 2 * theta)


def student(n: int, number: int) -> tuple[np.ndarray, Callable]:
    """Heavy tails: five degrees of freedom."""
    return RNG.standard_t(5, size=(n, number)), lambda theta: jnp.sum(3 * jnp.log1p(jnp.square(theta) / 5))


def rejected(problem: mf.Problem, rows: np.ndarray) -> bool:
    """Whether the certificate rejects these draws."""
    return not problem.certify(jnp.asarray(rows))


def size(law: Law, n: int, number: int, runs: int) -> float:
    """The share of exact ensembles that are rejected."""
    problem = mf.Problem(law(1, number)[1], mf.KL(mf.Flat()))
    return float(np.mean([rejected(problem, law(n, number)[0]) for _ in range(runs)]))


def power(kind: str, n: int, number: int, condition: float, runs: int) -> float:
    """The share of ensembles that are rejected, for one wrong direction: a mean that is off by 0.3 standard
    deviations, a standard deviation that is 1.2 or 0.8 times the right one."""
    scale = np.logspace(0, -0.5 * np.log10(condition), number)
    turn = np.linalg.qr(RNG.normal(size=(number, number)))[0]
    inverse = jnp.asarray(turn / scale)
    problem = mf.Problem(lambda theta: 0.5 * jnp.sum(jnp.square(theta @ inverse)), mf.KL(mf.Flat()))
    count = 0
    for _ in range(runs):
        z, along = RNG.normal(size=(n, number)), RNG.normal(size=number)
        along /= np.linalg.norm(along)
        z += {"mean": 0.3, "1.2": 0.2 * (z @ along)[:, None], "0.8": -0.2 * (z @ along)[:, None]}[
            kind
        ] * along
        count += rejected(problem, (z * scale) @ turn.T)
    return count / runs


def main(runs: int) -> None:
    """Two tables."""
    print("Exact draws rejected (limit: 0.1%)")
    for law in (gaussian, log_gamma, student):
        shares = [f"{n} × {number}: {size(law, n, number, runs):.2%}" for n, number in SIZES]
        print(f"  {law.__name__}: {', '.join(shares)}", flush=True)
    print("Wrong draws rejected, for condition numbers 1 and 10⁶")
    for n, number in ((1_000, 5), (1_000, 10), (1_000, 25), (1_000, 50), (300, 5)):
        cells = []
        for kind in ("mean", "1.2", "0.8"):
            both = [power(kind, n, number, condition, max(runs // 10, 20)) for condition in (1.0, 1e6)]
            cells.append(f"{kind} {both[0]:.0%} {both[1]:.0%}")
        print(f"  {n} × {number}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000)
