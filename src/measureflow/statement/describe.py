"""What a problem is, in words: its algorithm, its normal form, and what the theory promises."""

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
from measureflow.spaces.measures import AbstractMeasure, Flat
from measureflow.statement.divergences import KL, AbstractDivergence, SquaredMMD

# Keyed by (has MMD², has KL).
ALGORITHMS = {
    (False, False): "deep ensemble (DE)",
    (False, True): "deep Langevin ensemble (DLE)",
    (True, False): "deep repulsive ensemble (DRE)",
    (True, True): "deep repulsive Langevin ensemble (DRLE)",
}

_PROMISES = {
    (False, False): (
        "The minimiser is not unique: every measure on the global minima of ℓ.",
        "Particles do not reach it: each falls into the local minimum of its basin, so the limit is "
        "Σᵢ Q₀(Θᵢ) δ(mᵢ) (Theorem 1).",
    ),
    (False, True): (
        "The minimiser is unique: q* ∝ exp(−V/τ), that is exp(−ℓ/τ)·p.",
        "Particles reach it, independently of one another, as t → ∞ and η → 0 (Appendix D).",
    ),
    (True, False): (
        "The minimiser is unique if κ is characteristic.",
        "Particles do not reach it in general: stationary measures are not unique (Theorem 7, Appendix F).",
    ),
    (True, True): (
        "The minimiser is unique: log q* = −(V + ∫W(·,θ′) dq*(θ′))/τ + const.",
        "Particles reach it as N → ∞, t → ∞ and η → 0 (Theorem 2).",
    ),
}


def describe(terms: tuple[tuple[Array, AbstractDivergence], ...]) -> str:
    """The text of `Problem.describe`."""
    repulsion = [(w, d) for w, d in terms if isinstance(d, SquaredMMD)]
    entropy = [(w, d) for w, d in terms if isinstance(d, KL)]
    kind = (bool(repulsion), bool(entropy))
    objective = ["∫ ℓ dQ"] + [f"{_number(w)}·{d.name}(Q, {_measure(d.reference)})" for w, d in terms]
    potential = ["ℓ"]
    potential += [f"{_number(w)}·log p" for w, d in entropy if not isinstance(d.reference, Flat)]
    potential += [f"{_number(2 * w)}·μ_P" for w, d in repulsion if d.embedding is not None]
    interaction = " + ".join(f"{_number(2 * w)}·{_kernel(d.kernel)}" for w, d in repulsion) or "0"
    temperature = " + ".join(_number(w) for w, _ in entropy) or "0"
    unique, reach = _PROMISES[kind]
    lines = [
        f"{ALGORITHMS[kind]}",
        f"  L(Q) = {' + '.join(objective)}",
        f"  V    = {' − '.join(potential)}",
        f"  W    = {interaction}",
        f"  τ    = {temperature}",
        "What the theory promises here:",
        f"  - {unique}",
        f"  - {reach}",
        *[f"  - {note}" for note in _conditions(kind, repulsion, entropy)],
    ]
    return "\n".join(lines)


def _conditions(kind: tuple[bool, bool], repulsion: list, entropy: list) -> list[str]:
    """Which of the assumptions, a proper P and a characteristic κ, hold for this problem."""
    notes = []
    references = {type(d.reference).__name__: d.reference for _, d in [*repulsion, *entropy]}
    if "Flat" in references:
        notes.append(
            "P is flat, not a probability measure: a minimiser exists only if ℓ itself grows fast enough "
            "to keep the mass together; infinite constants are left out of L."
        )
    elif references:
        notes.append(f"P is proper ({', '.join(references)}): holds.")
    for _, d in repulsion:
        holds = "holds" if _is_characteristic(d.kernel) else "not known to hold (features may lose some)"
        where = "" if kind[1] else "; without it, minimisers need not be unique"
        notes.append(f"κ characteristic ({_kernel(d.kernel)}): {holds}{where}.")
    if repulsion:
        notes.append("A single particle (N = 1) does not repel itself: only μ_P then acts on it.")
    return notes


def _is_characteristic(kernel: AbstractKernel) -> bool:
    """Whether MMD is known to vanish for equal measures only; a pull-back may lose information."""
    if isinstance(kernel, RadialCombination | KernelCombination):
        return any(map(_is_characteristic, kernel.kernels))
    if isinstance(kernel, PullBack):
        return isinstance(kernel.features, Whiten) and _is_characteristic(kernel.kernel)
    return isinstance(kernel, SquaredExponential | Matern | InverseMultiquadric)


def _number(value: Array) -> str:
    return f"{float(value):.4g}" if is_concrete(value) and value.ndim == 0 else "w"


def _measure(measure: AbstractMeasure) -> str:
    return type(measure).__name__


def _kernel(kernel: AbstractKernel) -> str:
    if isinstance(kernel, RadialCombination | KernelCombination):
        terms = zip(kernel.weights, kernel.kernels, strict=True)
        return "(" + " + ".join(f"{_number(w)}·{_kernel(k)}" for w, k in terms) + ")"
    if isinstance(kernel, PullBack):
        return f"{_kernel(kernel.kernel)}∘f"
    name = type(kernel).__name__ + (f"-{kernel.nu:g}" if isinstance(kernel, Matern) else "")
    lengthscale = getattr(kernel, "lengthscale", None)
    return name if lengthscale is None else f"{name}(σ={_number(lengthscale)})"
