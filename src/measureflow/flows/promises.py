"""What flows of particles say of themselves in `describe`."""

from typing import Any

from measureflow.flows.entropies import Noise
from measureflow.flows.integrators import EulerMaruyama
from measureflow.statement.problem import Problem

WITHOUT_NOISE = "No noise is drawn: each particle descends to where its force is 0."


def of_particles(flow: Any, problem: Problem) -> list[str]:
    """What noise, or what stands in its place, makes of the entropy in a `WassersteinFlow`."""
    if problem.temperature() is None:
        return [WITHOUT_NOISE]
    if not isinstance(flow.entropy, Noise):
        return [
            "An estimate of −τ∇log q from the particles takes the place of noise: the limit is biased by the "
            "width of its kernel, little in one dimension and much in twenty; particles lie more evenly than "
            "draws."
        ]
    if flow.metropolis:
        return ["Steps are accepted or rejected: the law is exp(−V/τ) for any η. Particles do not interact."]
    if flow.momentum is not None or isinstance(flow.integrator, EulerMaruyama):
        return ["Noise realises the entropy: at a finite η the law is off by O(η)."]
    return [
        "Noise realises the entropy: at a finite η the law is off by O(η²), and not at all for quadratic V."
    ]
