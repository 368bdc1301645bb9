"""What a network makes of a row: it sees columns, or the bins that they are cut into, and beside them what a
smoother says of the row, or not; by its layers, or as a linear function.

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
    """Whether a network sees bins, whether it is linear in what it sees (of bins, that is a sum of one
    function for each column), and whether it sees what a smoother says, too. Each may be traced, as 0.0 or
    1.0."""

    binned: Any = False
    linear: Any = False
    smoothed: Any = False


class Views(eqx.Module):
    """What a multilayer perceptron sees of its inputs: `seen[0]` if columns are not binned, `seen[1]` if they
    are, and `said` if it sees what a smoother says. Where it has a `skip`, a linear network is that and a
    bias, and others are without it."""

    seen: Float[Array, "2 features"]
    said: Float[Array, " features"]
    skip: bool = eqx.field(static=True)

    @classmethod
    def of(cls, network: Network, encoding: PiecewiseLinear | None, said: int = 0) -> "Views | None":
        """Of a network whose last inputs are so many that a smoother says. None where all is seen: there are
        neither bins nor a smoother, and no linear networks."""
        inner = perceptron(network)
        assert inner is not None
        if encoding is None and not inner.skip and not said:
            return None
        width = inner.sizes[0] - said
        seen = [np.ones(width) if encoding is None else encoding.seen(binned) for binned in (False, True)]
        of_smoother = np.repeat([0.0, 1.0], [width, said])
        seen = np.pad(np.stack(seen), [(0, 0), (0, said)])
        return cls(jnp.asarray(seen, jnp.float32), jnp.asarray(of_smoother, jnp.float32), inner.skip)

    def __call__(self, view: View) -> list[Float[Array, " seen"]]:
        """1 for what is seen, else 0: by the first layer, and with a skip by that, and by the last layer."""
        seen = jnp.where(jnp.asarray(view.binned) > 0, self.seen[1], self.seen[0])
        seen = seen + jnp.asarray(view.smoothed, seen.dtype) * self.said
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

    def narrowed(self, particles: Any) -> Any:
        """Particles without the inputs that a smoother has, where there is none."""
        seen = np.flatnonzero(np.asarray(self.said) == 0)
        of_inputs = self._weights(particles)[: 2 if self.skip else 1]
        return eqx.tree_at(
            lambda theta: self._weights(theta)[: len(of_inputs)], particles, [w[:, seen] for w in of_inputs]
        )

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
