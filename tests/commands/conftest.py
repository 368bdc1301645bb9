"""One small table, and a model of it, for all tests of the commands."""

from types import SimpleNamespace

import pytest
from tests.commands.flats import TINY, flats, invoke


@pytest.fixture(scope="session")
def fitted(tmp_path_factory):
    """A folder with a table, new rows, and a model of each task. Folds of two have as many rows as the new
    ones: another number of rows is other programs to compile."""
    folder = tmp_path_factory.mktemp("commands")
    paths = {name: folder / name for name in ("train.csv", "new.csv", "rent.mf", "cheap.mf")}
    flats(120, 0).to_csv(paths["train.csv"], index=False)
    flats(60, 1).to_csv(paths["new.csv"], index=False)
    rent = invoke(
        "fit", paths["train.csv"], "--target", "rent", "--drop", "cheap",
        "--likelihood", "heteroscedastic", "--out", paths["rent.mf"], *TINY,
    )  # fmt: skip
    assert rent.exit_code == 0, rent.output
    cheap = invoke(
        "fit",
        paths["train.csv"],
        "--target",
        "cheap",
        "--drop",
        "rent",
        "--type",
        "floor=category",
        "--out",
        paths["cheap.mf"],
        *TINY,
    )
    assert cheap.exit_code == 0, cheap.output
    return SimpleNamespace(
        folder=folder,
        train=paths["train.csv"],
        new=paths["new.csv"],
        rent=paths["rent.mf"],
        cheap=paths["cheap.mf"],
        said=rent.stderr,
        said_of_classes=cheap.stderr,
    )
