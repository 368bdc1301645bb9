"""What a problem is, in words: its algorithm, its normal form, and what the theory promises."""

from jaxtyping import Array

from measureflow.spaces.measures import Flat
from measureflow.statement.divergences import KL, SquaredMMD
from measureflow.statement.functionals import AbstractFunctional, ExpectedLoss
from measureflow.statement.words import Words

Terms = tuple[tuple[Array, AbstractFunctional], ...]

# The paper's algorithms, keyed by (has MMD², has KL): name, which minimiser, and whether particles reach it.
ALGORITHMS = {
    (False, False): (
        "deep ensemble (DE)",
        "The minimiser is not unique: every measure on the global minima of ℓ.",
        "Particles do not reach it: each falls into the local minimum of its basin, so the limit is "
        "Σᵢ Q₀(Θᵢ) δ(mᵢ) (Theorem 1).",
    ),
    (False, True): (
        "deep Langevin ensemble (DLE)",
        "The minimiser is unique: q* ∝ exp(−V/τ), that is exp(−ℓ/τ)·p.",
        "Particles reach it, independently of one another, as t → ∞ and η → 0 (Appendix D).",
    ),
    (True, False): (
        "deep repulsive ensemble (DRE)",
        "The minimiser is unique if κ is characteristic.",
        "Particles do not reach it in general: stationary measures are not unique (Theorem 7, Appendix F).",
    ),
    (True, True): (
        "deep repulsive Langevin ensemble (DRLE)",
        "The minimiser is unique: log q* = −(V + ∫W(·,θ′) dq*(θ′))/τ + const.",
        "Particles reach it as N → ∞, t → ∞ and η → 0 (Theorem 2).",
    ),
}


def formula(terms: Terms) -> str:
    """L(Q), summand by summand."""
    return " + ".join(functional.words(weight).formula for weight, functional in terms)


def describe(terms: Terms) -> str:
    """The text of `Problem.describe`: every term is asked what it is."""
    words = [functional.words(weight) for weight, functional in terms]
    name, *promises = _of_the_paper(terms) if _is_of_the_paper(terms) else _beyond_the_paper(terms, words)
    rest = " + ".join(w.rest for w in words if w.rest)
    lines = [
        name,
        f"  L(Q) = {formula(terms)}",
        f"  V    = {_potential(words)}",
        f"  W    = {' + '.join(w.interaction for w in words if w.interaction) or '0'}",
        f"  τ    = {' + '.join(w.temperature for w in words if w.temperature) or '0'}",
        *([f"  rest = {rest}"] if rest else []),
        "What the theory promises here:",
        *[f"  - {note}" for note in [*promises, *_conditions(terms, words)]],
    ]
    return "\n".join(lines)


def _is_of_the_paper(terms: Terms) -> bool:
    return all(isinstance(functional, ExpectedLoss | KL | SquaredMMD) for _, functional in terms)


def _has(kind: type, terms: Terms) -> bool:
    return any(isinstance(functional, kind) for _, functional in terms)


def _of_the_paper(terms: Terms) -> tuple[str, ...]:
    return ALGORITHMS[_has(SquaredMMD, terms), _has(KL, terms)]


def _beyond_the_paper(terms: Terms, words: list[Words]) -> tuple[str, ...]:
    """What follows from convexity alone."""
    name = f"Wasserstein gradient flow of {' + '.join(functional.name for _, functional in terms)}"
    unknown = [f.name for _, f in terms if f.convexity not in ("linear", "convex", "strictly convex")]
    if unknown:
        conditions = {f.convexity for _, f in terms if f.name in unknown} - {"not known"}
        where = f" ({', '.join(sorted(conditions))})" if conditions else ""
        return (
            name,
            f"The convexity of {', '.join(unknown)} is not known to the theory{where}: there may be several "
            "minimisers.",
            "Whether particles reach one is not known either: compare with mf.theory.minimiser on a grid.",
        )
    if any(w.temperature for w in words):
        return (
            name,
            "L is strictly convex, since the entropy is and every other term is convex: there is at most one "
            "minimiser, log q* = −(δ(L − τ∫log q)/δQ)[q*]/τ + const.",
            "Particles reach it as N → ∞, t → ∞ and η → 0 where a log-Sobolev inequality holds (mean-field "
            "Langevin dynamics: Chizat, 2022; Nitanda, Wu and Suzuki, 2022); whether one does "
            "here is not checked.",
        )
    return (
        name,
        "L is convex: every minimiser is global, but without an entropy it need not be unique.",
        "Particles need not reach it: without noise each stays in its basin.",
    )


def _potential(words: list[Words]) -> str:
    """Summands with their signs: a leading plus is left out."""
    summands = [w.potential for w in words if w.potential]
    signed = [s if s.startswith("− ") else f"+ {s}" for s in summands]
    return " ".join(signed).removeprefix("+ ") or "0"


def _conditions(terms: Terms, words: list[Words]) -> list[str]:
    """Which of the assumptions, a proper P and a characteristic κ, hold for this problem."""
    notes = []
    references = [reference for _, functional in terms for reference in functional.references()]
    if any(isinstance(reference, Flat) for reference in references):
        notes.append(
            "P is flat, not a probability measure: a minimiser exists only if ℓ itself grows fast enough "
            "to keep the mass together; infinite constants are left out of L."
        )
    elif references:
        names = dict.fromkeys(type(reference).__name__ for reference in references)
        notes.append(f"P is proper ({', '.join(names)}): holds.")
    if any(w.temperature for w in words):
        notes.append(
            "Between well separated modes t is longer than any run: there, particles keep the masses of "
            "their start; mf.sample tempers, or says so."
        )
    where = "" if _has(KL, terms) else "; without it, minimisers need not be unique"
    notes += [f"{note}{where}." for w in words for note in w.notes]
    if any(w.interaction for w in words) and _has(SquaredMMD, terms):
        notes.append("A single particle (N = 1) does not repel itself: only μ_P then acts on it.")
    return notes
