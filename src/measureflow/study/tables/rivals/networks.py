"""Networks: bde (Microcanonical Langevin Ensembles), RealMLP and TabM.

bde gives a law, and has the settings of its documentation's examples. RealMLP and TabM predict numbers: the
law around them is a Gaussian whose deviation is the root mean square error of held-out rows.
"""

from importlib import import_module

import numpy as np

from measureflow.study.tables.cases import Case, Prediction
from measureflow.study.tables.laws import GaussianMixture
from measureflow.study.tables.rivals.boosting import gaussian_of_held_out

BDE = {
    "hidden_layers": [16, 16],
    "n_members": 8,
    "epochs": 200,
    "validation_split": 0.15,
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "warmup_steps": 5000,
    "n_samples": 2000,
    "n_thinning": 2,
    "patience": 10,
}
#: Its mixture has a component for each draw of each member; as many, evenly, are scored.
BDE_COMPONENTS = 200


def bde(case: Case) -> Prediction:
    """Its predictive mixture, thinned."""
    library, losses = import_module("bde"), import_module("bde.loss")
    train, test = (part.astype(np.float32) for part in case.standardised())
    if case.classes:
        classifier = library.BdeClassifier(seed=case.seed, loss=losses.CategoricalCrossEntropy(), **BDE)
        classifier.fit(x=train, y=case.y)
        return lambda: np.asarray(classifier.predict_proba(test), np.float64)
    mean, scale = case.y.mean(), case.y.std()
    regressor = library.BdeRegressor(seed=case.seed, loss=losses.GaussianNLL(), **BDE)
    regressor.fit(x=train, y=((case.y - mean) / scale).reshape(-1, 1))

    def predict() -> GaussianMixture:
        # Members and their samples, of each row a mean and what softplus makes a scale.
        raw = np.asarray(regressor.predict(test, raw=True), np.float64).reshape(-1, len(test), 2)
        raw = raw[:: max(1, len(raw) // BDE_COMPONENTS)]
        return GaussianMixture(mean + scale * raw[..., 0], scale * (np.logaddexp(0.0, raw[..., 1]) + 1e-6))

    return predict


def realmlp(case: Case) -> Prediction:
    """The tuned defaults of pytabkit."""
    return _pytabkit(case, "RealMLP_TD_Classifier" if case.classes else "RealMLP_TD_Regressor")


def tabm(case: Case) -> Prediction:
    """The defaults of pytabkit."""
    return _pytabkit(case, "TabM_D_Classifier" if case.classes else "TabM_D_Regressor")


def _pytabkit(case: Case, kind: str) -> Prediction:
    train, test = case.one_hot()
    learn, held = case.held_out()
    model = getattr(import_module("pytabkit"), kind)(
        device="cpu", random_state=case.seed, n_threads=case.threads
    )
    model.fit(train[learn], case.y[learn], X_val=train[held], y_val=case.y[held])
    if case.classes:
        return lambda: np.asarray(model.predict_proba(test), np.float64)
    return lambda: gaussian_of_held_out(
        np.ravel(model.predict(test)), np.ravel(model.predict(train[held])), case.y[held]
    )
