"""`measureflow export`: what other programs predict is what `measureflow predict` does."""

import csv

import numpy as np
import pandas as pd
import pytest
from tests.commands.flats import invoke

from measureflow.tables.predictor import Predictor

pytest.importorskip("flatbuffers", reason="jax.export writes with flatbuffers, which is not installed")
pytestmark = [pytest.mark.standard_promotion, pytest.mark.xdist_group("commands")]


def test_cells_of_a_file_are_rows_of_the_export(fitted, tmp_path):
    done = invoke("export", fitted.rent, "--out", tmp_path / "exported")
    assert done.exit_code == 0, done.stderr
    assert invoke("predict", fitted.rent, fitted.new, "--out", tmp_path / "found.csv").exit_code == 0
    expected = pd.read_csv(tmp_path / "found.csv")
    model = Predictor(tmp_path / "exported")
    with fitted.new.open(encoding="utf-8", newline="") as lines:
        rows = [{name: row[name] for name in model.columns} for row in csv.DictReader(lines)]
    rows[0]["area"] = rows[0]["area"] or "NA"
    found = model.predict(rows)
    np.testing.assert_allclose(found["mean"], expected["mean"], rtol=1e-6)
    np.testing.assert_allclose(found["standard_deviation"], expected["standard_deviation"], rtol=1e-6)
    np.testing.assert_allclose(found["quantiles"][:, 0], expected["quantile_0.05"], rtol=2e-6)
    np.testing.assert_allclose(found["epistemic_share"], expected["epistemic_share"], rtol=1e-5)


def test_bad_input_exits_with_2_and_writes_nothing(fitted, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    for out, said in (
        (tmp_path / "mine", "pass --force, or another --out"),
        (tmp_path / "mine" / "thesis.tex", "is a file, and an export is a folder"),
    ):
        refused = invoke("export", fitted.rent, "--out", out)
        assert refused.exit_code == 2
        assert said in refused.stderr
    assert invoke("export", fitted.rent, "--out", tmp_path / "mine", "--force").exit_code == 2
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert invoke("export", fitted.new, "--out", tmp_path / "new").exit_code == 2
    assert invoke("export", tmp_path / "nowhere.mf", "--out", tmp_path / "new").exit_code == 2
    assert not (tmp_path / "new").exists()
