"""A fitted estimator as files that other programs run without measureflow: its network, law and particles as
one function of jax.export, and a table of how rows become its inputs."""

import importlib.util
import json
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jaxtyping import Array

from measureflow.prediction.logarithmic import LogMixture
from measureflow.prediction.predictive import Predictive
from measureflow.prediction.yeo_johnson import YeoJohnsonMixture
from measureflow.saving.container import PathLike
from measureflow.tables.inputs import require_fitted

# What a folder holds.
PROGRAM, ABOUT, SCRIPT = "predict.bin", "model.json", "predictor.py"
_PLATFORMS = ("cpu", "cuda")
# The number that says how to read model.json.
_FORMAT = 1


class Exportable:
    """Estimators that other programs can run."""

    def export(self, folder: PathLike, *, force: bool = False, missing: Sequence[str] = ()) -> None:
        """Write what is needed to predict without measureflow: see `docs/serving.md`.

        `predict.bin` is a function of jax.export for any number of rows, on CPU and GPU; `model.json` says
        how rows become its inputs and its outputs predictions; `predictor.py` does both with jax, numpy
        and flatbuffers alone.

        Parameters
        ----------
        folder
            A folder, which is made.
        force
            Whether an earlier export in that folder may be overwritten.
        missing
            Texts that say that there is no value, as "NA" does in tables of the command line.
        """
        place = require_folder(folder, force)
        require_fitted(self)
        contents = {
            PROGRAM: _program(self),
            ABOUT: (json.dumps(_about(self, missing), indent=1, allow_nan=False) + "\n").encode(),
            SCRIPT: files("measureflow.tables").joinpath(SCRIPT).read_bytes(),
        }
        place.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            _write(place / name, content)


def require_folder(folder: PathLike, force: bool) -> Path:
    """Where an export can be written: found out before anything is computed."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise ImportError(
            "export needs flatbuffers, which jax.export writes with; run pip install flatbuffers."
        )
    place = Path(folder)
    if place.exists() and not place.is_dir():
        raise FileExistsError(f"{place} is a file, and an export is a folder; pass another path.")
    if place.is_dir() and any(place.iterdir()):
        if not force:
            raise FileExistsError(f"{place} exists and is not empty; pass force=True, or another path.")
        if strange := sorted({one.name for one in place.iterdir()} - {PROGRAM, ABOUT, SCRIPT, "__pycache__"}):
            raise FileExistsError(f"{place} holds {strange[0]}, which is no export; pass another path.")
    return place


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as temporary:
        temporary.write(content)
    whole = Path(temporary.name)
    whole.chmod(0o644)
    whole.replace(path)


def _program(estimator: Any) -> bytes:
    """(inputs, p, 1 − p) ↦ mean, deviation, epistemic share and p-quantiles of every row, or the classes'
    probabilities: in the units that the network sees. Inputs are standardised."""
    rows, levels = jax_export.symbolic_shape("rows, levels")
    width = len(estimator.input_mean_)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width), (levels,), (levels,))]
    predictive = estimator._predictive(*estimator._inner())
    outputs = _probabilities if hasattr(estimator, "classes_") else _laws
    encoding, said = estimator.encoding_, _smoother(estimator, shapes[0])

    def predict(inputs: Array, p: Array, c: Array) -> tuple[Array, ...]:
        seen = inputs if encoding is None else encoding.of(inputs, jnp)
        if said is not None:
            seen = jnp.concatenate([seen, said.call(inputs)], axis=1)
        return outputs(predictive, seen, p, c)

    exported = jax_export.export(jax.jit(predict), platforms=_PLATFORMS)(*shapes)
    return bytes(exported.serialize())


def _smoother(estimator: Any, inputs: jax.ShapeDtypeStruct) -> jax_export.Exported | None:
    """What the smoother says of inputs, as a program of its own, which has double precision."""
    smoother = estimator.smoother_
    if smoother is None:
        return None

    def said(rows: Array) -> Array:
        return smoother.of_rows(rows.astype(jnp.float64), jnp).astype(jnp.float32)

    with jax.enable_x64(True):
        return jax_export.export(jax.jit(said), platforms=_PLATFORMS)(inputs)


def _laws(predictive: Predictive, inputs: Array, p: Array, c: Array) -> tuple[Array, ...]:
    law = predictive(inputs)
    variance = jnp.maximum(law.variance, jnp.finfo(jnp.float32).tiny)
    law_of_each = law.marginals if law.event_shape else law
    # Quantiles of log y stay such: exponentials of them in double precision lose no digits.
    seen = law_of_each.logarithm.standardised if isinstance(law_of_each, LogMixture) else law_of_each
    listed = [level.reshape(-1, *(1,) * len(seen.batch_shape)) for level in (p, c)]
    at = seen.back(seen.inner._at(*listed)) if isinstance(seen, YeoJohnsonMixture) else seen._at(*listed)
    quantiles = jnp.moveaxis(at, 0, -1)
    return law.mean, jnp.sqrt(variance), law.epistemic_variance / variance, quantiles


def _probabilities(predictive: Predictive, inputs: Array, p: Array, c: Array) -> tuple[Array, ...]:
    # Levels of quantiles are not used, and stay arguments, so that all exports are called alike.
    return (predictive(inputs).probs + 0 * (jnp.sum(p) + jnp.sum(c)),)


def _about(estimator: Any, missing: Sequence[str]) -> dict[str, Any]:
    import measureflow

    columns = estimator.columns_
    if columns is None:
        names = getattr(estimator, "feature_names_in_", None)
        names = (
            [str(i) for i in range(estimator.n_features_in_)] if names is None else [str(n) for n in names]
        )
        described = [{"name": name, "kind": "number", "parts": [""], "median": None} for name in names]
    else:
        described = [_column(column) for column in columns.columns]
    about = {
        "format": _FORMAT,
        "measureflow": measureflow.__version__,
        "jax": jax.__version__,
        "task": "classification" if hasattr(estimator, "classes_") else "regression",
        "columns": described,
        "missing": list(missing),
        "numbers": [f"{one['name']}{part}" for one in described for part in one["parts"]],
        "input_mean": estimator.input_mean_.tolist(),
        "input_scale": estimator.input_scale_.tolist(),
    }
    if about["task"] == "classification":
        return about | {"classes": estimator.classes_.tolist()}
    has_units = estimator._has_units()
    location, scale = estimator._units() if has_units else (np.zeros(()), np.ones(()))
    if (transform := estimator._transform()) is not None:
        location, scale = transform.location, transform.scale
    about |= {"target_mean": np.asarray(location).tolist(), "target_scale": np.asarray(scale).tolist()}
    return about | {"target_is_log": bool(estimator._sees_logarithms())}


def _column(column: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": column.name, "kind": column.kind, "parts": list(column.parts)}
    for field in ("median", "zone"):
        if hasattr(column, field):
            found[field] = getattr(column, field)
    if column.kind == "ordered":
        found["levels"] = list(column.levels)
    return found
