"""Any network as a pure function of its parameters: plain, Equinox or Flax."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles, shown_shapes, strong_tree
from measureflow.core.showing import counted, or_fields
from measureflow.core.validation import (
    positive_number,
    require_count,
    require_leading_axis,
    require_representable,
    typed_key,
)
from measureflow.saving.registry import require, saved
from measureflow.spaces.measures import Gaussian

# By name: JAX's own functions do not pickle.
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "elu": jax.nn.elu,
    "gelu": jax.nn.gelu,
    "leaky_relu": jax.nn.leaky_relu,
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sin": jnp.sin,
    "softplus": jax.nn.softplus,
    "tanh": jnp.tanh,
}
_KAIMING = math.sqrt(2)
# Networks in files are looked at layer by layer.
_MOST_LAYERS, _LARGEST_LAYER = 100, 2**31


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
        _require_activation(activation)
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
        template, rest = _equinox_parts(make, jax.random.key(0))
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
        structure, rest = _nnx_parts(make, jax.random.key(0))
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


@saved(code=("function",))
class RowsOfOutputs(eqx.Module):
    """`function`(θ, inputs), as (rows, outputs)."""

    function: Callable

    def __call__(self, theta: Parameters, inputs: PyTree) -> Float[Array, "rows outputs"]:
        outputs = self.function(theta, require_representable("inputs", inputs))
        if not hasattr(outputs, "shape"):
            raise TypeError(
                f"apply must return one array (rows, outputs), got {type(outputs).__name__}; join several "
                "with jnp.concatenate(..., axis=-1)."
            )
        rows = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(inputs)}
        if len(outputs.shape) not in (1, 2) or not rows <= {outputs.shape[:1]}:
            raise ValueError(
                f"apply must map (rows, ...) to (rows, outputs), got outputs of shape {outputs.shape} for "
                f"inputs of shape {shown_shapes(inputs)}; give it a whole batch, and let the network end in "
                "one axis."
            )
        return outputs[:, None] if len(outputs.shape) == 1 else outputs


class OutputsAt(eqx.Module):
    """θ ↦ f_θ(inputs)."""

    apply: Callable
    inputs: PyTree

    def __call__(self, theta: Parameters) -> Float[Array, "rows outputs"]:
        return self.apply(theta, self.inputs)


@saved(check=lambda init: _require_sizes(init.sizes))
class PerceptronInit(eqx.Module):
    """Weights N(0, 2/in), biases 0."""

    sizes: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""]) -> list[dict[str, Array]]:
        keys = jax.random.split(key, len(self.sizes) - 1)
        return [
            {"weight": math.sqrt(2 / fan_in) * jax.random.normal(k, (fan_in, out)), "bias": jnp.zeros(out)}
            for k, (fan_in, out) in zip(keys, itertools.pairwise(self.sizes), strict=True)
        ]


@saved(check=lambda apply: (_require_sizes(apply.sizes), _require_activation(apply.activation)))
class PerceptronApply(eqx.Module):
    """x ← σ(x W + b) for every hidden layer, then x W + b."""

    sizes: tuple[int, ...] = eqx.field(static=True)
    activation: str = eqx.field(static=True)

    def __call__(self, theta: list[dict[str, Array]], inputs: ArrayLike) -> Array:
        inputs = jnp.asarray(inputs)
        if inputs.ndim != 2 or inputs.shape[1] != self.sizes[0]:
            raise ValueError(
                f"inputs must have shape (rows, {self.sizes[0]}), got {inputs.shape}; the network was "
                f"built for features={self.sizes[0]}."
            )
        *hidden, last = theta
        for layer in hidden:
            inputs = _activated(self.activation, _affine(layer, inputs))
        return _affine(last, inputs)


def _require_activation(names: Any) -> None:
    known = isinstance(names, str) and len(names) < 1000 and set(names.split("+")) <= set(_ACTIVATIONS)
    if not known:
        raise ValueError(
            f"activation is unknown, got {str(names)[:100]!r}; use {', '.join(_ACTIVATIONS)}, or several of "
            "them joined by +."
        )


def _require_sizes(sizes: Any) -> None:
    widths = isinstance(sizes, tuple) and 2 <= len(sizes) <= _MOST_LAYERS
    widths = widths and all(type(size) is int and 1 <= size <= _LARGEST_LAYER for size in sizes)
    require(widths, f"sizes are not widths of at most {_MOST_LAYERS} layers")


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


def _activated(names: str, units: Array) -> Array:
    """Each activation of its share of the units, in order."""
    functions = [_ACTIVATIONS[name] for name in names.split("+")]
    ends = [(i + 1) * units.shape[1] // len(functions) for i in range(len(functions))]
    shares = zip(functions, [0, *ends[:-1]], ends, strict=True)
    return jnp.concatenate([function(units[:, first:end]) for function, first, end in shares], axis=1)


def _affine(layer: dict[str, Array], inputs: Array) -> Array:
    return inputs @ layer["weight"] + layer["bias"][None, :]


@saved(code=("apply",), check=lambda apply: jnp.finfo(apply.dtype))
class CastApply(eqx.Module):
    """f_θ(x), computed in another precision than θ has."""

    apply: Callable
    dtype: str = eqx.field(static=True)

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        kept = jnp.result_type(*jax.tree.leaves(theta))
        outputs = self.apply(*jax.tree.map(self._cast, (theta, inputs)))
        return outputs.astype(kept)

    def _cast(self, leaf: ArrayLike) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf.astype(self.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


@saved(code=("init",), check=lambda init: require_count("count", init.count, 1, ""))
class ConstantsInit(eqx.Module):
    """(θ, 0)."""

    init: Callable
    count: int = eqx.field(static=True)

    def __call__(self, key: Key[Array, ""]) -> dict[str, PyTree]:
        theta = self.init(key)
        dtype = jnp.result_type(jax.tree.leaves(theta)[0])
        return {"network": theta, "constants": jnp.zeros((self.count,), dtype)}


@saved(code=("apply",))
class ConstantsApply(eqx.Module):
    """(f_θ(x), c)."""

    apply: Callable

    def __call__(self, theta: dict[str, PyTree], inputs: PyTree) -> Array:
        outputs = self.apply(theta["network"], inputs)
        constants = theta["constants"].astype(outputs.dtype)[None, :]
        repeated = jnp.broadcast_to(constants, (outputs.shape[0], constants.shape[1]))
        return jnp.concatenate([outputs, repeated], axis=1)


# Compiled, as is the same for nnx below, so that parameters, which are left aside, are never drawn.
@eqx.filter_jit
def _equinox_parts(make: Callable, key: Key[Array, ""]) -> tuple[PyTree, PyTree]:
    """The shapes of θ, and all else."""
    module = make(key)
    _require_pure_equinox(module)
    theta, rest = eqx.partition(module, eqx.is_inexact_array)
    return jax.eval_shape(lambda: theta), rest


@saved(build=lambda make: Network.equinox(make).init, code=("make",))
class EquinoxInit(eqx.Module):
    """The floating-point arrays of make(key)."""

    make: Callable
    template: PyTree[jax.ShapeDtypeStruct]

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        # The structure of every draw is that of the first: functions made afresh by `make` would tell
        # particles and prior apart.
        leaves = jax.tree.leaves(eqx.filter(self.make(key), eqx.is_inexact_array))
        return jax.tree.unflatten(jax.tree.structure(self.template), leaves)


@saved(build=lambda make: Network.equinox(make).apply.function, code=("make",))
class EquinoxApply(eqx.Module):
    """The module with arrays θ, on every row."""

    make: Callable
    rest: PyTree

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        return jax.vmap(eqx.combine(theta, self.rest))(inputs)


def _require_pure_equinox(module: Any) -> None:
    """A function of its arrays and of one example, as far as can be seen."""
    if not callable(module):
        raise TypeError(
            f"make must return an Equinox module that can be called, got {type(module).__name__}; if it is "
            "a pair (module, state), use layers without state, such as GroupNorm for BatchNorm."
        )
    kinds = (eqx.nn.State, eqx.nn.StateIndex, eqx.nn.Dropout)
    found = jax.tree.leaves(module, is_leaf=lambda node: isinstance(node, kinds))
    if any(isinstance(node, kinds[:2]) for node in found):
        raise ValueError(
            "make returns a module with state, got an eqx.nn.StateIndex; use layers without state, such as "
            "GroupNorm or LayerNorm for BatchNorm."
        )
    active = [node.p for node in found if isinstance(node, eqx.nn.Dropout) and not node.inference and node.p]
    if active:
        raise ValueError(
            f"make returns a module that needs a key in every call, got eqx.nn.Dropout({active[0]}); leave "
            "it out, or pass lambda key: eqx.nn.inference_mode(make(key))."
        )


class Held:
    """A value that is compared as it is, but hashed by its type: Flax modules may hold lists."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and (self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash(type(self.value))


class LinenInit(eqx.Module):
    """module.init(key, inputs)["params"]."""

    module: Held = eqx.field(static=True)
    inputs: PyTree

    def __call__(self, key: Key[Array, ""]) -> PyTree:
        return self.module.value.init(key, self.inputs).get("params", {})


class LinenApply(eqx.Module):
    """module.apply({"params": θ}, inputs)."""

    module: Held = eqx.field(static=True)

    def __call__(self, theta: PyTree, inputs: PyTree) -> Array:
        return self.module.value.apply({"params": theta}, inputs)


@eqx.filter_jit
def _nnx_parts(make: Callable, key: Key[Array, ""]) -> tuple[Any, dict]:
    """The static structure, and all values but the parameters."""
    from flax import nnx

    module = make(nnx.Rngs(key))
    if not isinstance(module, nnx.Module):
        raise TypeError(
            f"make must return a flax.nnx.Module, got {module!r}; for flax.linen use Network.linen."
        )
    structure, _, statistics, rest = nnx.split(module, nnx.Param, nnx.BatchStat, ...)
    if jax.tree.leaves(statistics):
        names = ", ".join(_by_path(nnx.to_pure_dict(statistics)))
        raise ValueError(
            f"make returns a module with batch statistics, got {names}; use layers without state, such as "
            "GroupNorm or LayerNorm for BatchNorm."
        )
    return structure, nnx.to_pure_dict(rest)


@saved(build=lambda make: Network.nnx(make).init, code=("make",))
class NnxInit(eqx.Module):
    """The parameters of make(rngs), as nested dictionaries of arrays."""

    make: Callable

    def __call__(self, key: Key[Array, ""]) -> dict:
        from flax import nnx

        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))


@saved(build=lambda make: Network.nnx(make).apply.function, code=("make",))
class NnxApply(eqx.Module):
    """The module with parameters θ, on a batch."""

    make: Callable
    structure: Any = eqx.field(static=True)
    rest: dict

    def __call__(self, theta: dict, inputs: PyTree) -> Array:
        from flax import nnx

        module = nnx.merge(self.structure, theta, self.rest)
        outputs = module(inputs)
        _, _, rest = nnx.split(module, nnx.Param, ...)
        after = _by_path(nnx.to_pure_dict(rest))
        # By identity, not by value: the values may be traced.
        changed = [path for path, leaf in _by_path(self.rest).items() if after.get(path) is not leaf]
        if changed:
            raise ValueError(
                f"the module changes its own variables when called, got {', '.join(changed)}; a network is a "
                "function of θ and inputs alone: leave Dropout out, or call module.eval() in make."
            )
        return outputs


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


def _by_path(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _require_parameters(theta: PyTree) -> None:
    leaves = _by_path(theta)
    if not leaves:
        raise ValueError("the network has no parameters: init returns no arrays; there is nothing to learn.")
    for path, leaf in leaves.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameters must be floating-point arrays, got {leaf.dtype} at θ{path}; keep constants "
                "inside apply."
            )
