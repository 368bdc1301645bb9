"""What a network makes of a row: it sees columns, or the bins that they are cut into; by its layers, or as a
linear function.

Networks with different views have parameters of one shape, and weights that are 0 for what is not seen: they
are trained as one program, and are particles of one ensemble.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from measureflow.core.pytrees import Parameters
from measureflow.networks.losses import NegativeLogLikelihood
from measureflow.networks.network import Network
from measureflow.networks.priors import perceptron
from measureflow.spaces.measures import Gaussian
from measureflow.tables.encoding import PiecewiseLinear


class View(NamedTuple):
    """Whether a network sees bins, and whether it is linear in what it sees: of bins, that is a sum of one
    function for each column. Either may be traced, as 0.0 or 1.0."""

    binned: Any = False
    linear: Any = False


class Views(eqx.Module):
    """What a multilayer perceptron sees of its inputs: `seen[0]` if columns are not binned, `seen[1]` if they
    are. Where it has a `skip`, a linear network is that and a bias, and others are without it."""

    seen: Float[Array, "2 features"]
    skip: bool = eqx.field(static=True)

    @classmethod
    def of(cls, network: Network, encoding: PiecewiseLinear | None) -> "Views | None":
        """None where all is seen: there are no bins, and no linear networks."""
        inner = perceptron(network)
        assert inner is not None
        if encoding is None and not inner.skip:
            return None
        seen = [np.ones(inner.sizes[0]) if encoding is None else encoding.seen(b) for b in (False, True)]
        return cls(jnp.asarray(np.stack(seen), jnp.float32), inner.skip)

    def __call__(self, view: View) -> list[Float[Array, " seen"]]:
        """1 for what is seen, else 0: by the first layer, and with a skip by that, and by the last layer."""
        seen = jnp.where(jnp.asarray(view.binned) > 0, self.seen[1], self.seen[0])
        if not self.skip:
            return [seen]
        linear = jnp.asarray(view.linear, seen.dtype)
        return [(1 - linear) * seen, linear * seen, (1 - linear)[None]]

    def prior(self, prior: Gaussian, view: View) -> Gaussian:
        """With the fan-in of what is seen."""

        def scaled(scale: Array, seen: Array) -> Array:
            # What sees nothing keeps its prior, which nothing changes.
            share = jnp.mean(seen)
            return scale / jnp.sqrt(jnp.where(share > 0, share, 1.0))

        scales = [scaled(*pair) for pair in zip(self._weights(prior.scale), self(view), strict=True)]
        return eqx.tree_at(lambda p: self._weights(p.scale), prior, scales)

    def pruned(self, theta: Parameters, view: View) -> Parameters:
        """The same network without weights for what it does not see: it then may be shown everything."""
        pairs = zip(self._weights(theta), self(view), strict=True)
        return eqx.tree_at(self._weights, theta, [weight * seen[:, None] for weight, seen in pairs])

    def loss(self, loss: NegativeLogLikelihood, view: View) -> NegativeLogLikelihood:
        """That of networks with a view."""
        return eqx.tree_at(lambda of: of.network.apply, loss, _Pruned(loss.network.apply, self, view))

    def _weights(self, theta: Any) -> list[Any]:
        """Those that may not see, below the constants that some likelihoods have."""
        layers = theta["network"] if isinstance(theta, dict) else theta
        first, last = layers[0], layers[-1]
        return [first["weight"], last["skip"], last["weight"]] if self.skip else [first["weight"]]


class _Pruned(eqx.Module):
    """f_θ(x), of θ without what is not seen."""

    apply: Callable
    views: Views
    view: View

    def __call__(self, theta: Parameters, inputs: PyTree) -> Float[Array, "rows outputs"]:
        return self.apply(self.views.pruned(theta, self.view), inputs)
