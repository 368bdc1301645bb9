"""Any network as a pure function of its parameters: plain, Equinox, Flax or PyTorch."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, PyTree

from measureflow.core.pytrees import Parameters, Particles
from measureflow.core.showing import counted, or_fields
from measureflow.core.statistics import WithStatistics
from measureflow.core.validation import (
    require_count,
    typed_key,
)
from measureflow.networks.adapters import (
    EquinoxApply,
    EquinoxInit,
    NnxApply,
    NnxInit,
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
    as_batch,
    require_activation,
    require_parameters,
)
from measureflow.networks.linen import linen_parts
from measureflow.networks.pretrained import started
from measureflow.networks.priors import gaussian_prior, outputs_of
from measureflow.networks.stateful import equinox_trained, nnx_trained
from measureflow.networks.training import PointApply, Training, require_training
from measureflow.saving.registry import saved
from measureflow.spaces.measures import Gaussian

_KAIMING = math.sqrt(2)


# How a network is trained is not saved: it is code.
@saved(
    build=lambda init, apply, output_axis: Network(init, apply, output_axis),
    code=("init", "apply"),
    check=lambda network: outputs_of(network),
)
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
    training
        Where training is different from prediction (BatchNorm, Dropout): a `Training`. Then `apply` is given
        `WithStatistics` in the place of θ.
    """

    init: Callable[[Key[Array, ""]], Parameters]
    apply: Callable[[Parameters, PyTree], Float[Array, "rows outputs"]]
    output_axis: int = eqx.field(static=True)
    training: Training | None

    def __init__(
        self, init: Callable, apply: Callable, output_axis: int = -1, training: Training | None = None
    ):
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
        require_training(training)
        if training is not None:
            apply = PointApply(apply)
        self.init, self.training = init, training
        self.apply = apply if isinstance(apply, RowsOfOutputs) else RowsOfOutputs(apply)
        self.output_axis = output_axis
        require_parameters(jax.eval_shape(init, jax.random.key(0)))

    @or_fields
    def __repr__(self) -> str:
        shapes = jax.tree.leaves(jax.eval_shape(self.init, jax.random.key(0)))
        return f"Network({counted(sum(leaf.size for leaf in shapes), 'parameter')})"

    def __deepcopy__(self, memo: dict) -> "Network":
        # It never changes, and copies of JAX's functions are new functions: a clone would compile again.
        return self

    @classmethod
    def mlp(
        cls,
        features: int,
        hidden: Sequence[int] = (50,),
        outputs: int = 1,
        activation: str = "relu",
        *,
        skip: bool = False,
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
            hidden layer: some functions are made of edges, some are smooth, and most are both. Units of
            "identity" pass a linear function on through all layers.
        skip
            Whether a linear function of the inputs is added to the outputs: then the last layer of θ has
            "skip": (features, outputs), too.
        """
        if not isinstance(hidden, Sequence) or isinstance(hidden, str):
            raise TypeError(f"hidden must be a sequence of layer widths, got {hidden!r}; pass hidden=(50,).")
        require_activation(activation)
        sizes = (
            require_count("features", features, 1, "it counts the columns of the inputs."),
            *(require_count("hidden", width, 1, "hidden=() leaves hidden layers out.") for width in hidden),
            require_count("outputs", outputs, 1, "it counts the numbers that the network returns."),
        )
        if not isinstance(skip, bool):
            raise TypeError(f"skip must be True or False, got {skip!r}; True adds a linear function of x.")
        return cls(PerceptronInit(sizes, skip), PerceptronApply(sizes, activation, skip))

    @classmethod
    def equinox(cls, make: Callable[[Key[Array, ""]], Any], *, training: bool = False) -> "Network":
        """An Equinox module, such as `lambda key: eqx.nn.MLP(2, 1, 50, 2, key=key)`.

        It acts on one example, as Equinox modules do. θ is its floating-point arrays; all else (functions,
        integers) is taken once, from one call of `make`. A module with BatchNorm is the pair (module, state)
        of `eqx.nn.make_with_state`: in inference mode its statistics are constants.

        Parameters
        ----------
        make
            A function of a key that returns the module, or the pair (module, state).
        training
            Whether active BatchNorm and Dropout are: every particle then has statistics and keys of its own
            while it is trained (`WithStatistics`), and predicts in inference mode. The module is called as
            `module(x)`, or `module(x, state)`, with `key=` if it takes one.
        """
        if not callable(make):
            raise TypeError(f"make must be a function of a key, got {make!r}; pass lambda key: module.")
        if not training:
            template, rest = equinox_parts(make, jax.random.key(0))
            return cls(EquinoxInit(make, template), EquinoxApply(make, rest), output_axis=0)
        template, trained, start = equinox_trained(make, jax.random.key(0))
        carried = Training(trained.trained, start)
        return cls(EquinoxInit(make, template), trained.predicted, output_axis=0, training=carried)

    @classmethod
    def linen(
        cls,
        module: Any,
        inputs: PyTree,
        *,
        prediction: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> "Network":
        """A `flax.linen` module. θ is its collection "params".

        BatchNorm and Dropout are told what to do by arguments of the module's call: with
        `prediction={"train": False}` and `training={"train": True}`, every particle has statistics and keys
        of its own while it is trained (`WithStatistics`). With `variables` and without `training`, statistics
        are constants.

        Parameters
        ----------
        module
            An instance of `flax.linen.Module`.
        inputs
            A batch that it takes, to find its shapes; one row is enough.
        prediction
            Arguments of its call in prediction, by name; None is none.
        training
            Arguments of its call in training, by name; None where that is the same.
        variables
            Collections besides "params", such as {"batch_stats": ...}: what every particle's start from, or
            constants.
        """
        if importlib.util.find_spec("flax") is None:
            raise _no_flax("linen")
        parts = linen_parts(module, as_batch(inputs), prediction, training, variables)
        init, apply, carried = parts
        return cls(init, apply, training=carried)

    @classmethod
    def nnx(cls, make: Callable[[Any], Any], *, training: bool = False) -> "Network":
        """A `flax.nnx` module, such as `lambda rngs: nnx.Linear(2, 1, rngs=rngs)`.

        θ is the values of its `nnx.Param`s, in nested dictionaries; all else is taken once, from one call of
        `make`: after `module.eval()` there, batch statistics are constants. A module that changes its own
        variables when called raises, unless `training` says that it may.

        Parameters
        ----------
        make
            A function of `nnx.Rngs` that returns the module.
        training
            Whether the module is trained in the mode of `module.train()`, in which every particle has batch
            statistics and keys of its own (`WithStatistics`), and predicts in that of `module.eval()`.
        """
        try:
            from flax import nnx
        except ModuleNotFoundError as error:
            raise _no_flax("nnx") from error
        if not callable(make) or isinstance(make, nnx.Module):
            raise TypeError(f"make must be a function of nnx.Rngs, got {make!r}; pass lambda rngs: module.")
        if not training:
            structure, rest = nnx_parts(make, jax.random.key(0))
            return cls(NnxInit(make), NnxApply(make, structure, rest))
        trained, start = nnx_trained(make, jax.random.key(0))
        return cls(NnxInit(make), trained.predicted, training=Training(trained.trained, start))

    @classmethod
    def torch(cls, module: Any, inputs: Any, *, training: bool = False) -> "Network":
        """A PyTorch module: its architecture as a function of its parameters, by `torch.export`.

        θ is {name: array} of its parameters, those with `requires_grad=False` left out, which are constants,
        as buffers are. It starts as PyTorch's layers do by default, whatever initialiser the module has had;
        parameters of other layers start where the module has them. The module's own weights are the beginning
        with `start_from(module, key, n)`, and `state_dict(particles, i)` gives a particle back to PyTorch.
        What is computed is compared with what the module itself gives for `inputs`. Operations that are not
        covered raise, with the layer's name.

        Parameters
        ----------
        module
            A `torch.nn.Module` of float32 whose call takes a batch, or several, and returns one tensor.
        inputs
            A batch that it takes, or a tuple of them: arrays or tensors, rows first, to find shapes and to
            compare with. Any number of rows may follow.
        training
            Whether the module is trained as in `module.train()`, in which every particle has running
            statistics and keys of its own (`WithStatistics`), and predicts as in `module.eval()`. Else the
            module is taken in the mode that it is in, and may not change its buffers or draw random numbers.
        """
        from measureflow.networks.torch_modules import torch_parts

        init, apply, carried = torch_parts(module, inputs, training)
        return cls(init, apply, output_axis=0, training=carried)

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
        particles = jax.vmap(self.init)(jax.random.split(typed_key(key), n))
        if self.training is None:
            return particles
        start = jax.tree.map(lambda leaf: jnp.stack([leaf] * n), self.training.statistics)
        return WithStatistics(particles, start)

    def point(self) -> PyTree[jax.ShapeDtypeStruct]:
        """The shapes of one particle: θ, with statistics where the network has `training`."""
        theta, training = jax.eval_shape(self.init, jax.random.key(0)), self.training
        if training is None:
            return theta
        return WithStatistics(theta, jax.eval_shape(lambda: training.statistics))

    def start_from(
        self, pretrained: Any, key: Key[Array, ""], n: int, *, noise: Any = 0.1, new: Sequence[str] = ()
    ) -> Particles:
        """n particles about pretrained weights θ:

            θᵢ = θ + noise·r(θ)·Zᵢ,   r the root mean square of each array, Zᵢ standard normal.

        Without noise all particles would be one, and stay so where nothing else parts them. Statistics, where
        the network carries some, are those of `pretrained`, without noise.

        Parameters
        ----------
        pretrained
            A pytree like θ; an Equinox module, or its pair with a state; Flax's variables {"params": ...}, or
            an nnx module; a PyTorch module, or its state dict.
        key
            A JAX random key.
        n
            How many particles.
        noise
            Relative to the size of each array; 0 is allowed where something is new, or for one particle.
        new
            The beginnings of names, such as "head": arrays that are drawn from the network's own initialiser
            for each particle, and need not be in `pretrained`.
        """
        return started(self, pretrained, typed_key(key), n, noise, new)

    def state_dict(self, particles: Particles, index: int) -> dict[str, Any]:
        """The particle of this number as PyTorch has it:
        `module.load_state_dict(network.state_dict(particles, 0))`. Of a network of `Network.torch` alone.

        Parameters
        ----------
        particles
            Those of a solution, `solution.measure.particles`.
        index
            Which one.
        """
        from measureflow.networks.torch_modules import state_dict

        return state_dict(self, particles, index)

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
        return gaussian_prior(self.init, self.output_axis, weight, bias)

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
        return OutputsAt(self.apply, as_batch(inputs))

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
        _require_no_training(self, "computed_in")
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
        _require_no_training(self, "with_constants")
        return Network(ConstantsInit(self.init, count), ConstantsApply(self.apply), self.output_axis)


def _require_no_training(network: Network, method: str) -> None:
    if network.training is not None:
        raise ValueError(
            f"{method} is not known for a network that is trained with BatchNorm or Dropout; build it into "
            "the module, or leave `training` out."
        )


def _no_flax(route: str) -> ImportError:
    return ImportError(f"Network.{route} needs Flax, which is not installed; run `pip install flax`.")
