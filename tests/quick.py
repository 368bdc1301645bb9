"""The estimators, their annotations checked, and their programs compiled with little effort: tests run many
small ones, each a few times."""

import equinox as eqx
import pytest
from jaxtyping import install_import_hook

with install_import_hook("measureflow", "beartype.beartype"):
    from measureflow import estimators, recipe  # noqa: F401

_EFFORT = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@pytest.fixture(autouse=True, scope="module")
def quickly_compiled():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_start", "_members", "_log_densities"):
            program = eqx.filter_jit(getattr(recipe, name).__wrapped__, compiler_options=_EFFORT)
            patch.setattr(recipe, name, program)
        program = eqx.filter_jit(
            recipe._advance.__wrapped__, donate="all-except-first", compiler_options=_EFFORT
        )
        patch.setattr(recipe, "_advance", program)
        yield
