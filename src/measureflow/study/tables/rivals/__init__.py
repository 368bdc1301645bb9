"""The rivals, each by its documentation's recipe. They are optional: none is a dependency of measureflow."""

import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

from measureflow.study.tables.cases import Case, Prediction
from measureflow.study.tables.rivals import boosting, classical, networks

BOTH, REGRESSION = ("regression", "classes"), ("regression",)


class Rival(NamedTuple):
    """`fit(case)` learns, and returns what predicts. `package` is imported before any clock runs."""

    package: str
    kinds: tuple[str, ...]
    fit: Callable[[Case], Prediction]
    settings: dict[str, Any]


RIVALS = {
    "NGBoost": Rival("ngboost", BOTH, boosting.ngboost_normal, boosting.NGBOOST),
    "NGBoost-LogNormal": Rival("ngboost", REGRESSION, boosting.ngboost_lognormal, boosting.NGBOOST),
    "CatBoost": Rival("catboost", BOTH, boosting.catboost, boosting.CATBOOST),
    "CatBoost-virtual-ensembles": Rival(
        "catboost", REGRESSION, boosting.catboost_virtual_ensembles, boosting.CATBOOST
    ),
    "LightGBM": Rival("lightgbm", BOTH, boosting.lightgbm, boosting.LIGHTGBM),
    "LightGBM-quantiles": Rival("lightgbm", REGRESSION, boosting.lightgbm_quantiles, boosting.LIGHTGBM),
    "XGBoost": Rival("xgboost", BOTH, boosting.xgboost, boosting.XGBOOST),
    "XGBoost-quantiles": Rival("xgboost", REGRESSION, boosting.xgboost_quantiles, boosting.XGBOOST),
    "HistGradientBoosting": Rival("sklearn.ensemble", BOTH, classical.histogram_boosting, {}),
    "quantile-forest": Rival("quantile_forest", REGRESSION, classical.quantile_forest, {}),
    "Gaussian-process": Rival(
        "sklearn.gaussian_process", REGRESSION, classical.gaussian_process, classical.GAUSSIAN_PROCESS
    ),
    "linear": Rival("sklearn.linear_model", BOTH, classical.linear, {}),
    "constant": Rival("numpy", BOTH, classical.constant, {}),
    "bde": Rival("bde", BOTH, networks.bde, networks.BDE),
    "RealMLP": Rival("pytabkit", BOTH, networks.realmlp, {}),
    "TabM": Rival("pytabkit", BOTH, networks.tabm, {}),
}


def missing(name: str) -> str | None:
    """Why a rival cannot take part here; None if it can."""
    package = RIVALS[name].package
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        return f"the package {package} is not installed"
    return None
