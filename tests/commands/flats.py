"""A small table, and how tests run commands."""

import numpy as np
import pandas as pd
from typer.testing import CliRunner

from measureflow import cli

#: Fits of a second: nothing is chosen.
TINY = ("--steps", "60", "--hidden", "4", "--encoding", "0", "--particles", "4", "--prior-weight", "1")


def flats(rows: int, seed: int) -> pd.DataFrame:
    """Numbers, a category, a code, a date, gaps, and a rent."""
    rng = np.random.default_rng(seed)
    area, district = rng.normal(70, 15, rows), rng.choice(["Mitte", "Nord", "Süd"], rows)
    days = rng.integers(0, 366, rows)
    rent = 12 * area + 150 * (district == "Mitte") + rng.normal(0, 40 + 30 * (district == "Nord"), rows)
    return pd.DataFrame(
        {
            "district": district,
            "area": [
                None if gone else round(value, 2)
                for value, gone in zip(area, rng.random(rows) < 0.1, strict=True)
            ],
            "floor": rng.integers(0, 9, rows),
            "listed": [str(np.datetime64("2024-01-01") + day) for day in days],
            "rent": rent.round(1),
            "cheap": np.where(rent < 870, "yes", "no"),
        }
    )


def invoke(*arguments, stdin=None):
    """A command, as a shell runs it."""
    return CliRunner().invoke(cli.app, [str(part) for part in arguments], input=stdin)
