"""Boosted trees: NGBoost, CatBoost, LightGBM and XGBoost.

NGBoost and CatBoost fit a law. LightGBM and XGBoost do not: the law around their mean is a Gaussian whose
deviation is the root mean square error of held-out rows, the same everywhere; or they regress quantiles. All
stop early on the held-out rows, and predict with the best number of trees.
"""

from importlib import import_module
from typing import Any

import numpy as np

from measureflow.study.tables.cases import Case, Prediction, UnsuitedError
from measureflow.study.tables.laws import LEVELS, Gaussian, LogNormal, Quantiles

NGBOOST = {"n_estimators": 2000, "learning_rate": 0.01, "early_stopping_rounds": 50}
CATBOOST = {"iterations": 2000, "early_stopping_rounds": 50, "virtual_ensembles_count": 10}
LIGHTGBM = {"n_estimators": 2000, "learning_rate": 0.05, "early_stopping_rounds": 50}
XGBOOST = {"n_estimators": 2000, "learning_rate": 0.05, "early_stopping_rounds": 50}


def gaussian_of_held_out(mean: np.ndarray, held_mean: np.ndarray, held_y: np.ndarray) -> Gaussian:
    """N(mean, s²), s the root mean square error of rows that were held out."""
    deviation = float(np.sqrt(np.mean((np.asarray(held_mean, np.float64) - held_y) ** 2)))
    # A table that is predicted exactly has no deviation, and no density.
    deviation = max(deviation, 1e-6 * float(np.std(held_y)), np.finfo(np.float64).tiny)
    mean = np.asarray(mean, np.float64)
    return Gaussian(mean, np.full(mean.shape, deviation))


def ngboost_normal(case: Case) -> Prediction:
    """A Normal law, natural gradients; for classes a categorical one."""
    ngboost, laws = import_module("ngboost"), import_module("ngboost.distns")
    if case.classes:
        model, test = _ngboost(case, ngboost.NGBClassifier, laws.k_categorical(case.classes), case.y)
        return lambda: np.asarray(model(test).probs.T, np.float64)
    model, test = _ngboost(case, ngboost.NGBRegressor, laws.Normal, case.y)

    def predict() -> Gaussian:
        law = model(test).params
        return Gaussian(np.asarray(law["loc"], np.float64), np.asarray(law["scale"], np.float64))

    return predict


def ngboost_lognormal(case: Case) -> Prediction:
    """The same with a LogNormal law."""
    ngboost, laws = import_module("ngboost"), import_module("ngboost.distns")
    if np.any(case.y <= 0):
        raise UnsuitedError("LogNormal needs targets above 0")
    model, test = _ngboost(case, ngboost.NGBRegressor, laws.LogNormal, case.y)

    def predict() -> LogNormal:
        # SciPy's parameters: s is the deviation of the logarithm, and scale the exponential of its mean.
        law = model(test).params
        return LogNormal(np.log(np.asarray(law["scale"], np.float64)), np.asarray(law["s"], np.float64))

    return predict


def _ngboost(case: Case, kind: Any, law: Any, y: np.ndarray) -> tuple[Any, np.ndarray]:
    """What gives the laws of rows at the best number of trees, and the test rows."""
    train, test = case.one_hot()
    learn, held = case.held_out()
    model = kind(
        Dist=law,
        n_estimators=NGBOOST["n_estimators"],
        learning_rate=NGBOOST["learning_rate"],
        random_state=case.seed,
        verbose=False,
    )
    model.fit(
        train[learn],
        y[learn],
        X_val=train[held],
        Y_val=y[held],
        early_stopping_rounds=NGBOOST["early_stopping_rounds"],
    )
    best = model.best_val_loss_itr
    return (lambda rows: model.pred_dist(rows, max_iter=None if best is None else best + 1)), test


def catboost(case: Case) -> Prediction:
    """A Normal law by RMSEWithUncertainty; for classes probabilities."""
    if case.classes:
        model, test = _catboost(case, "CatBoostClassifier", {})
        return lambda: np.asarray(model.predict_proba(test), np.float64)
    return _catboost_regression(case, {}, _catboost_law)


def catboost_virtual_ensembles(case: Case) -> Prediction:
    """The variance is that of the members' means and their mean variance."""
    return _catboost_regression(case, {"posterior_sampling": True}, _virtual_ensembles_law)


def _catboost_regression(case: Case, settings: dict[str, Any], law: Any) -> Prediction:
    model, test = _catboost(case, "CatBoostRegressor", {"loss_function": "RMSEWithUncertainty"} | settings)
    return lambda: law(model, test)


def _catboost_law(model: Any, test: Any) -> Gaussian:
    found = np.asarray(model.predict(test, prediction_type="RMSEWithUncertainty"), np.float64)
    return Gaussian(found[:, 0], np.sqrt(found[:, 1]))


def _virtual_ensembles_law(model: Any, test: Any) -> Gaussian:
    found = np.asarray(
        model.virtual_ensembles_predict(
            test,
            prediction_type="TotalUncertainty",
            virtual_ensembles_count=CATBOOST["virtual_ensembles_count"],
        ),
        np.float64,
    )
    return Gaussian(found[:, 0], np.sqrt(found[:, 1] + found[:, 2]))


def _catboost(case: Case, kind: str, settings: dict[str, Any]) -> tuple[Any, Any]:
    """A fitted model, and the test rows as it takes them."""
    library = import_module("catboost")
    columns, text = case.natively()
    table = np.stack(columns, axis=1)
    learn, held = (case.train[part] for part in case.held_out())

    def pool(rows: np.ndarray) -> Any:
        return library.Pool(table[rows], case.task.targets[rows], cat_features=list(text))

    model = getattr(library, kind)(
        iterations=CATBOOST["iterations"],
        early_stopping_rounds=CATBOOST["early_stopping_rounds"],
        random_seed=case.seed,
        thread_count=case.threads,
        allow_writing_files=False,
        verbose=False,
        **settings,
    )
    model.fit(pool(learn), eval_set=pool(held))
    return model, pool(case.test)


def lightgbm(case: Case) -> Prediction:
    """The mean, with a constant deviation; for classes probabilities."""
    rows = _Coded(case)
    if case.classes:
        model = _lightgbm(case, rows, "LGBMClassifier", {})
        return lambda: np.asarray(model.predict_proba(rows.test), np.float64)
    model = _lightgbm(case, rows, "LGBMRegressor", {"objective": "regression"})
    return lambda: gaussian_of_held_out(model.predict(rows.test), model.predict(rows.held), rows.held_y)


def lightgbm_quantiles(case: Case) -> Prediction:
    """One model for each level."""
    rows = _Coded(case)
    models = [
        _lightgbm(case, rows, "LGBMRegressor", {"objective": "quantile", "alpha": level}) for level in LEVELS
    ]

    def predict() -> Quantiles:
        return Quantiles(LEVELS, np.stack([model.predict(rows.test) for model in models], axis=1))

    return predict


class _Coded:
    """Rows as LightGBM takes them: categories are numbers, and what is unknown or missing is NaN."""

    def __init__(self, case: Case):
        columns, self.categorical = case.natively()
        coded = [_codes(column, case.train) if column.dtype == object else column for column in columns]
        table = np.stack(coded, axis=1)
        learn, held = (case.train[part] for part in case.held_out())
        self.learn, self.held, self.test = table[learn], table[held], table[case.test]
        self.learn_y, self.held_y = case.task.targets[learn], case.task.targets[held]


def _codes(column: np.ndarray, train: np.ndarray) -> np.ndarray:
    text = column.astype(str)
    known = np.unique(text[train])
    place = np.minimum(np.searchsorted(known, text), len(known) - 1)
    return np.where(known[place] == text, place, np.nan).astype(np.float64)


def _lightgbm(case: Case, rows: _Coded, kind: str, settings: dict[str, Any]) -> Any:
    library = import_module("lightgbm")
    model = getattr(library, kind)(
        n_estimators=LIGHTGBM["n_estimators"],
        learning_rate=LIGHTGBM["learning_rate"],
        random_state=case.seed,
        n_jobs=case.threads,
        verbosity=-1,
        **settings,
    )
    return model.fit(
        rows.learn,
        rows.learn_y,
        eval_set=[(rows.held, rows.held_y)],
        categorical_feature=list(rows.categorical) or "auto",
        callbacks=[library.early_stopping(LIGHTGBM["early_stopping_rounds"], verbose=False)],
    )


def xgboost(case: Case) -> Prediction:
    """The mean, with a constant deviation; for classes probabilities."""
    if case.classes:
        model, test, _, _ = _xgboost(case, "XGBClassifier", {})
        return lambda: np.asarray(model.predict_proba(test), np.float64)
    model, test, held, held_y = _xgboost(case, "XGBRegressor", {"objective": "reg:squarederror"})
    return lambda: gaussian_of_held_out(model.predict(test), model.predict(held), held_y)


def xgboost_quantiles(case: Case) -> Prediction:
    """One model for all levels."""
    settings = {"objective": "reg:quantileerror", "quantile_alpha": np.array(LEVELS)}
    model, test, _, _ = _xgboost(case, "XGBRegressor", settings)
    return lambda: Quantiles(LEVELS, np.asarray(model.predict(test), np.float64))


def _xgboost(
    case: Case, kind: str, settings: dict[str, Any]
) -> tuple[Any, np.ndarray, np.ndarray, np.ndarray]:
    """A fitted model, test rows, and held-out rows with their targets."""
    train, test = case.one_hot()
    learn, held = case.held_out()
    make = getattr(import_module("xgboost"), kind)
    model = make(**XGBOOST, random_state=case.seed, n_jobs=case.threads, verbosity=0, **settings)
    model.fit(train[learn], case.y[learn], eval_set=[(train[held], case.y[held])], verbose=False)
    return model, test, train[held], case.y[held]
