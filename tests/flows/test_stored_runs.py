"""What could be stated before the core was opened gives the same particles as then."""

import numpy as np
import pytest
from stored_runs import STORED, machine, runs


@pytest.fixture(scope="module")
def found():
    return runs()


def test_the_four_ensembles_give_the_particles_they_gave(found):
    stored = np.load(STORED)
    names = set(stored.files) - {"machine"}
    assert names == set(found)
    assert len(names) == 8
    for name in names:
        if str(stored["machine"]) == machine():
            np.testing.assert_array_equal(found[name], stored[name], err_msg=name)
        else:
            # Another compiler, or other instructions, round otherwise; sixty steps do not amplify that.
            np.testing.assert_allclose(found[name], stored[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_other_physics_would_be_noticed(found):
    """The runs differ by method far more than rounding does."""
    for kind in ("toy", "network"):
        methods = [found[f"{kind} {name}"] for name in ("DE", "DLE", "DRE", "DRLE")]
        for i, one in enumerate(methods):
            for other in methods[:i]:
                assert np.abs(one - other).max() > 1e-3
