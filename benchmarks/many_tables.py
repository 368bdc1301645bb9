"""Many fits as one program: `mf.cross_validate` of an estimator with its defaults.

    python -m benchmarks.many_tables [--fits 100] [--rows 500] [--steps STEPS]

Each fit sees its own rows of a made-up table, and as many rows as a fifth of them are left for its score.
Printed are the seconds of one fit and of all together, compiling included, and again with programs that are
compiled already; and the score, which shows that all of them learn.
"""

import argparse
import os
import time
import warnings

# The time to compile is part of what is measured.
os.environ.setdefault("MEASUREFLOW_CACHE", "off")

import jax
import numpy as np
from sklearn.exceptions import ConvergenceWarning

import measureflow as mf


def table(rows: int, columns: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, and a target with noise whose size depends on the first of them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns))
    noise = rng.normal(size=rows) * (0.1 + 0.3 / (1 + np.exp(-2 * x[:, 0])))
    return x, np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + noise


def splits(fits: int, rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(train, test) of every fit: rows that no other has."""
    each = rows + rows // 5
    return [
        (np.arange(k * each, k * each + rows), np.arange(k * each + rows, (k + 1) * each))
        for k in range(fits)
    ]


def timed(fits: int, rows: int, settings: dict) -> tuple[float, np.ndarray]:
    """Seconds, and the NLL of every fit."""
    x, y = table(fits * (rows + rows // 5))
    began = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        found = mf.cross_validate(
            mf.EnsembleRegressor(random_state=0, **settings), x, y, cv=splits(fits, rows)
        )
    return time.perf_counter() - began, found["negative_log_likelihood"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fits", type=int, default=100)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--steps", type=int, help="of training; by default the estimator's own")
    asked = parser.parse_args()
    settings = {} if asked.steps is None else {"steps": asked.steps}
    print(f"{jax.devices()[0].device_kind}, JAX {jax.__version__}, {asked.rows} rows in 8 columns")
    for fits in (1, asked.fits):
        for compiled in ("compiling included", "compiled already"):
            seconds, scores = timed(fits, asked.rows, settings)
            print(
                f"{fits} fits, {compiled}: {seconds:.1f} s, {seconds / fits:.2f} s each; "
                f"NLL {scores.mean():.3f} ± {scores.std() / max(fits - 1, 1) ** 0.5:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
