"""The estimators' programs, their shapes checked, and compiled with little effort: tests run many small ones,
each a few times."""

import contextlib
import os

import equinox as eqx
import pytest
from jaxtyping import install_import_hook

# Not the estimators themselves: scikit-learn wants a constructor that takes anything.
with install_import_hook("measureflow", "beartype.beartype"):
    from measureflow.prediction import predictive
    from measureflow.tables import side_by_side, training, trials

_EFFORT = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
if "fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
    _EFFORT["xla_cpu_use_fusion_emitters"] = False


def _with_little_effort(program):
    return eqx.filter_jit(program.__wrapped__, compiler_options=_EFFORT)


@contextlib.contextmanager
def compiled_quickly():
    """As long as it lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_observe", "_log_densities"):
            patch.setattr(trials, name, _with_little_effort(getattr(trials, name)))
        for name in ("_alone", "_together"):
            patch.setattr(side_by_side, name, _with_little_effort(getattr(side_by_side, name)))
        for name in ("_compiled_outputs", "_compiled_map"):
            patch.setattr(predictive, name, _with_little_effort(getattr(predictive, name)))
        yield training


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    with compiled_quickly() as programs:
        yield programs
