"""posteriors' SGLD: https://normal-computing.github.io/posteriors (sgmcmc.sgld; temperature and log posterior
"constructed in tandem"), its update vmapped over networks with `torch.func`, as torch's ensembles are.

PyTorch runs one step at a time from Python. Small tensors can be slower on several threads than on one: it
gets the better of the two.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.peers.guests import needed
from benchmarks.targets import STEP_SIZE, TEMPERATURE, Target, squared_error
from benchmarks.timing import AbsentError, seconds


class Peer:
    """posteriors on a target: relu networks and the squared error."""

    def __init__(self, target: Target):
        self.posteriors, self.torch = needed("posteriors"), needed("torch")
        if jax.default_backend() != "cpu" and not self.torch.cuda.is_available():
            raise AbsentError("torch has no GPU here")
        if target.loss is not squared_error:
            raise ValueError("this peer is written for the squared error only.")
        self.device = "cpu" if jax.default_backend() == "cpu" else "cuda"
        # torch's layers hold the transposed weight.
        self.parameters = {
            f"{2 * index}.{name}": self._tensor(np.swapaxes(leaf, 1, 2) if name == "weight" else leaf)
            for index, layer in enumerate(target.particles)
            for name, leaf in layer.items()
        }
        self.batch = tuple(self._tensor(part) for part in target.data)
        self.network = self._network(target.particles)

    def _tensor(self, array: Any) -> Any:
        return self.torch.tensor(np.array(array), device=self.device)

    def _network(self, particles: Any) -> Any:
        nn, layers = self.torch.nn, []
        for layer in particles:
            inputs, outputs = layer["weight"].shape[1:]
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*layers[:-1]).to(self.device)

    def log_posterior(self, parameters: dict[str, Any], batch: tuple) -> tuple[Any, Any]:
        x, y = batch
        output = self.torch.func.functional_call(self.network, parameters, (x,))
        log_prior = self.posteriors.diag_normal_log_prob(parameters, normalize=False)
        loss = self.torch.nn.functional.mse_loss(output, y)
        return TEMPERATURE * log_prior - loss, self.torch.tensor([])

    def drift(self) -> Any:
        gradient = self.torch.func.grad(lambda parameters: self.log_posterior(parameters, self.batch)[0])
        found = self.torch.func.vmap(gradient)(self.parameters)
        layers = sorted({int(name.partition(".")[0]) for name in found})
        return [
            {
                "weight": np.swapaxes(found[f"{index}.weight"].cpu().numpy(), 1, 2),
                "bias": found[f"{index}.bias"].cpu().numpy(),
            }
            for index in layers
        ]

    def run(self, steps: int) -> Callable[[], Any]:
        transform = self.posteriors.sgmcmc.sgld.build(
            self.log_posterior, lr=STEP_SIZE, temperature=TEMPERATURE
        )
        update = self.torch.func.vmap(transform.update, in_dims=(0, None), randomness="different")
        started = self.torch.func.vmap(transform.init)(self.parameters)

        def sample(steps: int = steps) -> Any:
            state = started
            for _ in range(steps):
                state, _ = update(state, self.batch)
            if self.device == "cuda":
                self.torch.cuda.synchronize()
            return state

        self._choose_threads(sample)
        return sample

    def _choose_threads(self, sample: Callable[[int], Any]) -> None:
        times = {}
        for threads in {1, self.torch.get_num_threads()}:
            self.torch.set_num_threads(threads)
            sample(2)
            times[threads] = min(seconds(lambda: sample(5)) for _ in range(3))
        self.torch.set_num_threads(min(times, key=lambda threads: times[threads]))
