"""What could be stated before the core was opened gives the same particles as then."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stored_runs import STORED, machine

import measureflow as mf

PROGRAM = "import sys; import numpy as np; from stored_runs import runs; np.savez(sys.argv[1], **runs())"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """In a process of its own: the tests' flags of the compiler change the last bits."""
    out = tmp_path_factory.mktemp("stored") / "runs.npz"
    folders = [str(STORED.parent), str(Path(mf.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders), "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-c", PROGRAM, str(out)], env=environment, check=True)
    return dict(np.load(out))


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
