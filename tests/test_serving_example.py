"""The example of a service: it answers, it refuses what is wrong, and it says nothing of its inside."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

import measureflow as mf

for needed in ("flatbuffers", "fastapi", "httpx"):
    pytest.importorskip(needed, reason=f"the example needs {needed}, which is not installed")
pytestmark = pytest.mark.standard_promotion
FOLDER = Path(__file__).parent.parent / "examples" / "serving"


def module(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """The app, a client of it, and the estimator behind both."""
    import pandas as pd

    with warnings.catch_warnings():
        # Starlette's client prefers a fork of httpx.
        warnings.simplefilter("ignore")
        from fastapi.testclient import TestClient
    folder, rng = tmp_path_factory.mktemp("served") / "model", np.random.default_rng(0)
    frame = pd.DataFrame({"x": rng.normal(size=60), "kind": np.array(["a", "b"])[np.arange(60) % 2]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = mf.EnsembleRegressor(
            steps=20, hidden=(4,), encoding=0, particles=3, prior_weight=1.0, likelihood="homoscedastic"
        ).fit(frame, rng.normal(size=60))
    model.export(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MODEL", str(folder))
        app = module("app")
        yield TestClient(app.app, raise_server_exceptions=False), model, frame, app
    sys.modules.pop("predictor", None)


def test_it_predicts_what_the_estimator_does(service):
    client, model, frame, _ = service
    answer = client.post("/predict", json={"rows": frame[:5].to_dict("records")})
    assert answer.status_code == 200, answer.text
    mean, deviation = model.predict(frame[:5], return_std=True)
    np.testing.assert_allclose(answer.json()["mean"], mean, atol=1e-6)
    np.testing.assert_allclose(answer.json()["standard_deviation"], deviation, rtol=1e-6)
    assert np.shape(answer.json()["quantiles"]) == (5, 3)
    described = client.get("/").json()["columns"]
    assert described == [{"name": "x", "kind": "number"}, {"name": "kind", "kind": "category"}]


def test_hostile_requests_are_refused(service):
    client, *_ = service
    row = {"x": 0.5, "kind": "a"}
    cases = module("load").hostile(row)
    assert len(cases) > 15
    for name, (content, status) in cases.items():
        answer = client.post("/predict", content=content)
        assert answer.status_code == status, f"{name}: {answer.status_code} {answer.text[:200]}"
        assert set(answer.json()) == {"error"}
        assert len(answer.text) < 2_000
    wrong = client.post("/predict", content=json.dumps({"rows": [row | {"kind": "z"}]}))
    assert wrong.json() == {"error": "row 0, 'kind' must be one of a, b, got 'z'."}
    assert client.post("/predict", json={"rows": [row]}).status_code == 200, "it still answers"
    assert client.get("/docs").status_code == 404


def test_what_fails_inside_stays_inside(service, monkeypatch):
    client, _, _, app = service

    def broken(*_):
        raise RuntimeError("/home/secret")

    monkeypatch.setattr(app.model, "predict", broken)
    answer = client.post("/predict", json={"rows": [{"x": 0.5, "kind": "a"}]})
    assert (answer.status_code, answer.json()) == (500, {"error": "the prediction failed"})


def test_infinity_is_null(service):
    assert service[3].plain(np.array([[1.0, np.inf], [np.nan, 2.0]])) == [[1.0, None], [None, 2.0]]
