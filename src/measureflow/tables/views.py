"""Two ways to see the numbers of a row, in one network: its columns, or the bins that they are cut into.

The network reads both, and a view is 0 where it does not look. Networks with different views have parameters
of one shape: they are trained as one program, and are particles of one ensemble.
"""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from measureflow.core.pytrees import Parameters
from measureflow.spaces.measures import Gaussian
from measureflow.tables.encoding import PiecewiseLinear


class Views(eqx.Module):
    """What a multilayer perceptron sees of its inputs: `seen[0]` if columns are not `binned`, `seen[1]` if
    they are. Here `binned` is 0.0 or 1.0, and may be traced."""

    seen: Float[Array, "2 features"]

    @classmethod
    def of(cls, encoding: PiecewiseLinear | None) -> "Views | None":
        """None where there are no bins: then all is seen."""
        if encoding is None:
            return None
        return cls(jnp.stack([jnp.asarray(encoding.seen(binned)) for binned in (False, True)]))

    def __call__(self, binned: Float[Array, ""]) -> Float[Array, " features"]:
        """1 for what is seen, else 0."""
        return jnp.where(binned > 0, self.seen[1], self.seen[0])

    def prior(self, prior: Gaussian, binned: Float[Array, ""]) -> Gaussian:
        """With the fan-in of the inputs that are seen."""
        seen = self(binned)
        factor = jnp.sqrt(seen.shape[0] / jnp.sum(seen))
        return eqx.tree_at(lambda p: _first_weights(p.scale), prior, factor * _first_weights(prior.scale))

    def pruned(self, theta: Parameters, binned: Float[Array, ""]) -> Parameters:
        """The same network without weights for what it does not see: it then may be shown everything."""
        weights = _first_weights(theta)
        return eqx.tree_at(_first_weights, theta, weights * self(binned)[:, None])


def _first_weights(theta: Any) -> Any:
    """Those of the first layer, below the constants that some likelihoods have."""
    layers = theta["network"] if isinstance(theta, dict) else theta
    return layers[0]["weight"]
