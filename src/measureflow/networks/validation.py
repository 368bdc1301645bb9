"""What may be passed as a network and as a likelihood."""

from typing import Any

from numpyro.distributions import Distribution

from measureflow.networks.network import Network

# By the library of a class; many have a method `apply`, which means something else in each.
_ADAPTERS = {
    "torch": "pass Network.torch(module, inputs), where inputs is a batch that PyTorch's module takes.",
    "keras": "Keras' layers hold their own state: build the network with Network.mlp, or in Equinox or Flax.",
    "flax.linen": "pass Network.linen(module, inputs).",
    "flax.nnx": "pass Network.nnx(make), where make(rngs) returns the module.",
    "equinox": "pass Network.equinox(make), where make(key) returns the module.",
}


def require_network(network: Any) -> None:
    """`network` is a Network, and not something else with a method of the name `apply`."""
    if not isinstance(network, Network):
        kind = type(network)
        raise TypeError(
            f"network must be a Network, got {kind.__module__}.{kind.__name__}; "
            f"{adapter_of(network) or 'pass Network(init, apply).'}"
        )


def adapter_of(module: Any) -> str | None:
    """How to make a Network of a module of another library; None for anything else."""
    bases = [f"{base.__module__}." for base in type(module).__mro__]
    found = [how for library, how in _ADAPTERS.items() if any(b.startswith(f"{library}.") for b in bases)]
    return found[0] if found else None


def require_likelihood(likelihood: Any) -> None:
    """`likelihood` is a function outputs ↦ distribution, not one of its own class or a distribution."""
    if not callable(likelihood) or isinstance(likelihood, type | Distribution):
        raise TypeError(
            f"likelihood must be a function outputs ↦ distribution, got {likelihood!r}; pass "
            "Heteroscedastic(), or lambda outputs: numpyro.distributions.Normal(outputs[..., 0], 1.0)."
        )
