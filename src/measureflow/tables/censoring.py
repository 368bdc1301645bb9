"""Tables whose targets are known by bounds only."""

from typing import Any, NamedTuple

import numpy as np

from measureflow.networks.censoring import CensoredLikelihood, knows_masses
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.tables.models import Model
from measureflow.tables.targets import OF_LOGARITHMS, OF_POWERS, law_of

#: The laws that know the mass between two bounds, by name.
OF_BOUNDS = ("heteroscedastic", "homoscedastic", "mixture", *OF_LOGARITHMS, *OF_POWERS)


class Bounds(NamedTuple):
    """Targets as bounds: (low, high) of every row, float64."""

    bounds: np.ndarray


def censored(model: Model) -> Model:
    """The model, for targets that are bounds."""
    network, likelihood = model.loss.network, model.loss.likelihood
    law: Any = law_of(network, likelihood)
    if not knows_masses(law):
        raise ValueError(
            f"censoring needs a law that is Normal, or a mixture of Normals, of one target, got "
            f"likelihood={model.shape.likelihood!r}; use one of {', '.join(OF_BOUNDS)}."
        )
    return model._replace(loss=NegativeLogLikelihood(network, CensoredLikelihood(likelihood)))
