"""The loss functions of the paper's experiments (Appendix G)."""

import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

_FOUR_CENTRES = ((3.0, 3.0), (3.0, -3.0), (-3.0, 3.0), (-3.0, -3.0))


def quartic_loss(theta: Float[Array, "..."]) -> Float[Array, ""]:
    """ℓ(θ) = 3⁄2 (θ⁴/4 + θ³/3 − θ²) − 3⁄8: global minimum −2, maximum 0, local minimum 1 (Figure 2)."""
    return jnp.sum(1.5 * (theta**4 / 4 + theta**3 / 3 - theta**2) - 3 / 8)


def four_modes_loss(theta: Float[Array, "2"]) -> Float[Array, ""]:
    """ℓ(θ) = −log Σᵢ ¼ N(θ; μᵢ, I₂), μᵢ = (±3, ±3) (Figure 3)."""
    squares = jnp.sum(jnp.square(theta[None, :] - jnp.asarray(_FOUR_CENTRES, theta.dtype)), axis=1)
    return jnp.log(8 * jnp.pi) - logsumexp(-squares / 2)


def many_modes_loss(theta: Float[Array, "..."]) -> Float[Array, ""]:
    """ℓ(θ) = −|sin θ|: a minimum at every π/2 + iπ (Figure 4)."""
    return -jnp.sum(jnp.abs(jnp.sin(theta)))
