"""Any network as a pure function of its parameters: plain, Equinox or Flax."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, strong_tree
from measureflow.core.showing import counted, or_fields
from measureflow.core.validation import (
    positive_number,
    require_count,
    require_leading_axis,
    require_representable,
    typed_key,
)
from measureflow.networks.adapters import (
    EquinoxApply,
    EquinoxInit,
    Held,
    LinenApply,
    LinenInit,
    NnxApply,
    NnxInit,
    by_path,
    equinox_parts,
    nnx_parts,
)
from measureflow.networks.functions import (
    CastApply,
    ConstantsApply,
    ConstantsInit,
    OutputsAt,
    PerceptronApply,
    PerceptronInit,
    RowsOfOutputs,
    require_activation,
)
from measureflow.saving.registry import saved
from measureflow.spaces.measures import Gaussian

_KAIMING = math.sqrt(2)


@saved(code=("init", "apply"), check=lambda network: outputs_of(network))
class Network(eqx.Module):
    """θ ↦ f_θ: a network as a pure function of its parameters.

    Any pair of functions will do, such as those of a Flax module whose call takes more than inputs:

        Network(lambda key: module.init(key, inputs)["params"],
                lambda theta, x: module.apply({"params": theta}, x, train=False))

    Build a network once: a new lambda is a new program. Those of `mlp` with equal arguments are equal, and
    pickle; others pickle if their functions do.

    Parameters
    ----------
    init
        A function of a key: one draw of θ from the network's own initialiser.
    apply
        A function of (θ, inputs) that takes a whole batch, from (rows, ...) to (rows, outputs); one
        number per row, shape (rows,), becomes (rows, 1).
    output_axis
        The axis of a weight that counts its outputs: −1 for (..., in, out), as in Flax, or 0 for (out,
        in, ...), as in Equinox. It decides the fan-in of `prior`.
    """

    init: Callable[[Key[Array, ""]], Parameters]
    apply: Callable[[Parameters, PyTree], Float[Array, "rows outputs"]]
    output_axis: int = eqx.field(static=True)

    def __init__(self, init: Callable, apply: Callable, output_axis: int = -1):
        for name, function in (("init", init), ("apply", apply)):
            if not callable(function):
                raise TypeError(
                    f"{name} must be a function, got {function!r}; pass init(key) -> θ and "
                    "apply(θ, inputs) -> outputs."
                )
        if output_axis not in (0, -1):
            raise ValueError(
                f"output_axis must be -1 or 0, got {output_axis!r}; weights (..., in, out) are -1, weights "
                "(out, in, ...) are 0."
            )
        self.init = init
        self.apply = apply if isinstance(apply, RowsOfOutputs) else RowsOfOutputs(apply)
        self.output_axis = output_axis
        _require_parameters(jax.eval_shape(init, jax.random.key(0)))

    @or_fields
    def __repr__(self) -> str:
        shapes = jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0)))
        return f"Network({counted(sum(leaf.size for leaf in shapes), 'parameter')})"

    def __deepcopy__(self, memo: dict) -> "Network":
        # It never changes, and copies of JAX's functions are new functions: a clone would compile again.
        return self

    @classmethod
    def mlp(
        cls, features: int, hidden: Sequence[int] = (50,), outputs: int = 1, activation: str = "relu"
    ) -> "Network":
        """The multilayer perceptron: θ is a list with {"weight": (in, out), "bias": (out,)} for each layer.

        It starts from weights N(0, 2/in) (He et al., 2015) and biases 0.

        Parameters
        ----------
        features
            The number of columns of the inputs.
        hidden
            The widths of the hidden layers; () is a linear model.
        outputs
            The number of outputs.
        activation
            The name of an activation. Several joined by +, as in "relu+tanh", share the units of every
            hidden layer: some functions are made of edges, some are smooth, and most are both.
        """
        if not isinstance(hidden, Sequence) or isinstance(hidden, str):
            raise TypeError(f"hidden must be a sequence of layer widths, got {hidden!r}; pass hidden=(50,).")
        require_activation(activation)
        sizes = (
            require_count("features", features, 1, "it counts the columns of the inputs."),
            *(require_count("hidden", width, 1, "hidden=() leaves hidden layers out.") for width in hidden),
            require_count("outputs", outputs, 1, "it counts the numbers that the network returns."),
        )
        return cls(PerceptronInit(sizes), PerceptronApply(sizes, activation))

    @classmethod
    def equinox(cls, make: Callable[[Key[Array, ""]], Any]) -> "Network":
        """An Equinox module, such as `lambda key: eqx.nn.MLP(2, 1, 50, 2, key=key)`.

        It acts on one example, as Equinox modules do. θ is its floating-point arrays; all else (functions,
        integers) is taken once, from one call of `make`. State (BatchNorm) and keys (Dropout) are not
        supported: a network here is a function of θ and inputs alone.
        """
        if not callable(make):
            raise TypeError(f"make must be a function of a key, got {make!r}; pass lambda key: module.")
        template, rest = equinox_parts(make, jax.random.key(0))
        return cls(EquinoxInit(make, template), EquinoxApply(make, rest), output_axis=0)

    @classmethod
    def linen(cls, module: Any, inputs: PyTree) -> "Network":
        """A `flax.linen` module. `inputs` is a batch that it takes, to find its shapes; one row is enough.

        θ is its collection "params". A module with other collections (batch_stats), or that draws random
        numbers when applied (Dropout), raises.
        """
        try:
            from flax import errors, linen
        except ModuleNotFoundError as error:
            raise _no_flax("linen") from error
        if not isinstance(module, linen.Module):
            raise TypeError(
                f"module must be an instance of flax.linen.Module, got {module!r}; for nnx use Network.nnx."
            )
        inputs = _batch(inputs)
        collections = jax.eval_shape(module.init, jax.random.key(0), inputs)
        others = sorted(set(collections) - {"params"})
        if others:
            raise ValueError(
                f"module has variables besides its parameters, got {', '.join(others)}; use layers without "
                "state, such as GroupNorm or LayerNorm for BatchNorm."
            )
        held = Held(module)
        network = cls(LinenInit(held, inputs), LinenApply(held))
        try:
            jax.eval_shape(network.apply, jax.eval_shape(network.init, jax.random.key(0)), inputs)
        except errors.InvalidRngError as error:
            raise ValueError(
                f"module draws random numbers when applied, got: {error}; leave Dropout out, or make it "
                "deterministic."
            ) from error
        return network

    @classmethod
    def nnx(cls, make: Callable[[Any], Any]) -> "Network":
        """A `flax.nnx` module, such as `lambda rngs: nnx.Linear(2, 1, rngs=rngs)`.

        θ is the values of its `nnx.Param`s, in nested dictionaries; all else is taken once, from one call of
        `make`. A module with batch statistics raises, as does one that changes its own variables when
        called, as active Dropout does.
        """
        try:
            from flax import nnx
        except ModuleNotFoundError as error:
            raise _no_flax("nnx") from error
        if not callable(make) or isinstance(make, nnx.Module):
            raise TypeError(f"make must be a function of nnx.Rngs, got {make!r}; pass lambda rngs: module.")
        structure, rest = nnx_parts(make, jax.random.key(0))
        return cls(NnxInit(make), NnxApply(make, structure, rest))

    def sample(self, key: Key[Array, ""], n: int) -> Particles:
        """n particles, each from the network's own initialiser: the initial measure Q₀.

        Parameters
        ----------
        key
            A JAX random key.
        n
            How many particles.
        """
        n = require_count("n", n, 1, "it counts the particles.")
        return jax.vmap(self.init)(jax.random.split(typed_key(key), n))

    def prior(self, weight: Any = _KAIMING, bias: Any = 1.0) -> Gaussian:
        """The Gaussian in which every number is independent, and

            a weight is N(0, weight²/fan-in);   a bias, or a scale of a normalisation, N(m, bias²).

        Weights are the leaves with two axes or more, but for those named `bias` (convolutions of Equinox
        have such). Their fan-in is the product of all axes but `output_axis`. For every other leaf, m is
        where the initialiser always starts it (biases at 0, normalisation scales at 1), if two keys give
        the same; else 0.

        Only shapes and that one name are looked at. Where they say too little (tables of embeddings,
        attention's kernels with three axes, normalisation over several axes), state the `Gaussian` by
        hand; its `mean` and `scale` are pytrees like θ.

        Parameters
        ----------
        weight
            The factor of the weights: √2 is right for relu, 1 for tanh.
        bias
            The standard deviation of the biases.
        """
        weight = positive_number("weight", weight, "√2 is right for relu, 1 for tanh.")
        bias = positive_number("bias", bias, "it is a standard deviation.")
        mean = _centre(self.init, jax.random.key(0), jax.random.key(1))

        def scale(path: tuple, leaf: Array) -> Array:
            fan_in = leaf.size // leaf.shape[self.output_axis] if _is_weight(path, leaf) else None
            return bias if fan_in is None else weight / math.sqrt(fan_in)

        return Gaussian(mean, jax.tree_util.tree_map_with_path(scale, mean))

    def at(self, inputs: PyTree) -> "OutputsAt":
        """The features θ ↦ f_θ(inputs), for repulsion between functions instead of weights:

            reference = mf.Empirical(prior.sample(key, 100))
            mf.SquaredMMD(reference, kernel.on(network.at(anchors)))

        Other spaces to repel in: the first layer of an `mlp`, `kernel.on(lambda theta: theta[0])`, and
        coordinates whitened by the prior, `kernel.on(mf.Whiten(prior))`. These two are affine, so that
        `mf.SquaredMMD(prior, ...)` has a closed form.

        Parameters
        ----------
        inputs
            A batch of inputs, the anchors.
        """
        return OutputsAt(self.apply, _batch(inputs))

    def computed_in(self, dtype: Any) -> "Network":
        """The network whose parameters stay what they are, and whose outputs are computed in `dtype`:

            f_θ(x) in bfloat16, θ in float32, and gradients in float32 again.

        On a GPU or TPU `network.computed_in(jnp.bfloat16)` is faster for wide networks. Steps are taken in
        the precision of θ: a small one would be lost in bfloat16.

        Parameters
        ----------
        dtype
            A floating-point type, such as jnp.bfloat16.
        """
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"dtype must be of floating-point numbers, got {dtype}; try jnp.bfloat16.")
        return Network(self.init, CastApply(self.apply, dtype.name), self.output_axis)

    def with_constants(self, count: int) -> "Network":
        """The network with `count` more outputs, which are parameters and do not depend on the input:

            f_(θ, c)(x) = (f_θ(x), c),   parameters {"network": θ, "constants": c},   c = 0 at the start.

        So a likelihood gets a noise scale that all inputs share.

        Parameters
        ----------
        count
            How many.
        """
        count = require_count("count", count, 1, "without constants, use the network itself.")
        return Network(ConstantsInit(self.init, count), ConstantsApply(self.apply), self.output_axis)


def perceptron(network: Any) -> PerceptronApply | None:
    """The multilayer perceptron that a network is, but for constants and precision."""
    apply = network.apply
    while isinstance(apply, RowsOfOutputs | ConstantsApply | CastApply):
        apply = apply.function if isinstance(apply, RowsOfOutputs) else apply.apply
    return apply if isinstance(apply, PerceptronApply) else None


def outputs_of(network: Network) -> int | None:
    """How many numbers it gives for a row, where that can be told."""
    inner = perceptron(network)
    if inner is None:
        return None
    theta = jax.eval_shape(network.init, jax.random.key(0))
    rows = jax.ShapeDtypeStruct((1, inner.sizes[0]), jax.tree.leaves(theta)[0].dtype)
    return jax.eval_shape(network.apply, theta, rows).shape[1]


def _no_flax(route: str) -> ImportError:
    return ImportError(f"Network.{route} needs Flax, which is not installed; run `pip install flax`.")


def _batch(inputs: PyTree) -> PyTree:
    inputs = require_representable("inputs", require_leading_axis("inputs", inputs, "row"))
    return jax.tree.map(jnp.asarray, inputs)


# Compiled, so that weights, which are not looked at, are never drawn.
@eqx.filter_jit
def _centre(init: Callable, key: Key[Array, ""], other_key: Key[Array, ""]) -> Parameters:
    """Where the initialiser always starts a leaf that is not a weight; else 0."""

    def centre(path: tuple, leaf: Array, other: Array) -> Array:
        zero = jnp.zeros_like(leaf)
        return zero if _is_weight(path, leaf) else jnp.where(jnp.all(leaf == other), leaf, zero)

    draws = strong_tree(init(key)), strong_tree(init(other_key))
    return jax.tree_util.tree_map_with_path(centre, *draws)


def _is_weight(path: tuple, leaf: Array) -> bool:
    return leaf.ndim >= 2 and jax.tree_util.keystr(path[-1:], simple=True) != "bias"


def _require_parameters(theta: PyTree) -> None:
    leaves = by_path(theta)
    if not leaves:
        raise ValueError("the network has no parameters: init returns no arrays; there is nothing to learn.")
    for path, leaf in leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameters must be floating-point arrays, got {leaf.dtype} at θ{path}; keep constants "
                "inside apply."
            )
