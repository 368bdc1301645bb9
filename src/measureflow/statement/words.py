"""Numbers, measures and kernels as `describe` writes them, and what a term says of itself."""

from typing import NamedTuple

from jaxtyping import Array

from measureflow.core.pytrees import is_concrete
from measureflow.spaces.kernels import (
    AbstractKernel,
    InverseMultiquadric,
    KernelCombination,
    Matern,
    PullBack,
    RadialCombination,
    SquaredExponential,
    Whiten,
)


class Words(NamedTuple):
    """A term in words: its formula as a summand of L(Q), what it adds to V (with its sign), W, τ and the
    rest, and notes on what it assumes."""

    formula: str
    potential: str = ""
    interaction: str = ""
    temperature: str = ""
    rest: str = ""
    notes: tuple[str, ...] = ()


def number(value: Array) -> str:
    """Four digits; "w" while its value is being traced."""
    return f"{float(value):.4g}" if is_concrete(value) and value.ndim == 0 else "w"


def kernel_words(kernel: AbstractKernel) -> str:
    """A kernel and its lengthscale."""
    if isinstance(kernel, RadialCombination | KernelCombination):
        terms = zip(kernel.weights, kernel.kernels, strict=True)
        return "(" + " + ".join(f"{number(w)}·{kernel_words(k)}" for w, k in terms) + ")"
    if isinstance(kernel, PullBack):
        return f"{kernel_words(kernel.kernel)}∘f"
    name = type(kernel).__name__ + (f"-{kernel.nu:g}" if isinstance(kernel, Matern) else "")
    lengthscale = getattr(kernel, "lengthscale", None)
    return name if lengthscale is None else f"{name}(σ={number(lengthscale)})"


def is_characteristic(kernel: AbstractKernel) -> bool:
    """Whether MMD is known to vanish for equal measures only; a pull-back may lose information."""
    if isinstance(kernel, RadialCombination | KernelCombination):
        return any(map(is_characteristic, kernel.kernels))
    if isinstance(kernel, PullBack):
        return isinstance(kernel.features, Whiten) and is_characteristic(kernel.kernel)
    return isinstance(kernel, SquaredExponential | Matern | InverseMultiquadric)
