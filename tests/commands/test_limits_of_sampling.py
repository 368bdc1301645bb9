"""What `--time` says where nothing has steps."""

import numpy as np
import pytest

import measureflow as mf
from measureflow.commands.limits import fit_within


def test_time_does_not_limit_a_sampler():
    with pytest.raises(ValueError, match=r"--time 20 limits steps, .* leave out --time, or use --method DLE"):
        fit_within(mf.EnsembleRegressor(method="posterior"), np.zeros((60, 1)), np.zeros(60), 20.0)
