"""Langevin dynamics of networks: DLE, which is SGLD, and DRLE, which does more, against BlackJAX and
posteriors. Same target, particles, steps and gradients."""

import functools
from collections.abc import Callable
from typing import Any

from benchmarks import ours
from benchmarks.peers import blackjax_sgld, posteriors_sgld
from benchmarks.peers.guests import Guests
from benchmarks.targets import Target, disagreement, drift, regression
from benchmarks.timing import Contender, Job, Ratio, comparison

ROUNDS = 5
# Networks: steps to time, of the compiled loops and of the loop in Python.
SIZES = {5: (2000, 50), 20: (1000, 50), 100: (300, 20)}
MODULES = {"BlackJAX SGLD": blackjax_sgld, "posteriors SGLD": posteriors_sgld}
WANTED = [
    Ratio("BlackJAX SGLD", "DLE"),
    Ratio("BlackJAX SGLD", "DRLE", at_least=1.0),
    Ratio("posteriors SGLD", "DLE"),
    Ratio("posteriors SGLD", "DRLE", at_least=1.0),
]


def jobs(*, quick: bool = False) -> list[Job]:
    """One job for each number of networks."""
    sizes = {2: (3, 2)} if quick else SIZES
    return [_job(regression(n), steps, 1 if quick else ROUNDS) for n, steps in sizes.items()]


def _job(target: Target, steps: tuple[int, int], rounds: int) -> Job:
    def run(tick) -> dict[str, Any]:
        contenders = {
            method: Contender(ours.run(target, method, steps[0]), steps[0]) for method in ("DLE", "DRLE")
        }
        guests = Guests()
        for (name, module), count in zip(MODULES.items(), steps, strict=True):
            guests.invite(name, functools.partial(_come, module.Peer, target, count), count)
        contenders |= guests.contenders
        return comparison(target.title, contenders, WANTED, rounds, tick, unit="step", **guests.record())

    return Job(f"SGLD, {target.title}", rounds + 1, run)


def _come(make: Callable[[Target], Any], target: Target, steps: int) -> tuple[Callable[[], Any], float]:
    peer = make(target)
    return peer.run(steps), disagreement(peer.drift(), drift(target))
