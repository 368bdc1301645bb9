"""PyTorch's modules as functions of JAX, beside PyTorch itself: `make torch` where it is not installed."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats as st
from helpers import jit, key

import measureflow as mf
from measureflow.networks.network import Network

torch = pytest.importorskip("torch", reason="PyTorch is not installed; run `make torch`")
nn, F = torch.nn, torch.nn.functional
pytestmark = pytest.mark.standard_promotion
RNG = np.random.default_rng(0)


def floats(*shape):
    return RNG.normal(size=shape).astype(np.float32)


class Function(nn.Module):
    """A function of a hidden layer, so that there is something to learn."""

    def __init__(self, function, features=8):
        super().__init__()
        self.first, self.function = nn.Linear(features, features), function

    def forward(self, x):
        return self.function(self.first(x))


class ResidualBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=1e-3)
        self.down = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(F.relu_(y), 1), 1))


class Tokens(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=0)
        self.position = nn.Parameter(torch.randn(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens) + self.position).mean(dim=1))


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 2)

    def forward(self, x):
        q, k, v = self.qkv(x).view(x.size(0), 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.tril(torch.ones(5, 5)) == 0
        weights = (q @ k.transpose(-2, -1) / 2.0).masked_fill(mask, float("-inf")).softmax(-1)
        return self.out((y + weights @ v).transpose(1, 2).reshape(x.size(0), 5, 8)[:, -1])


class Tied(nn.Module):
    """One weight under two names; a buffer; operations in place on parts."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)
        self.decode.weight = self.encode.weight
        self.register_buffer("shift", torch.arange(6.0))
        self.register_buffer("hidden", torch.ones(6), persistent=False)

    def forward(self, x):
        y = self.encode(x) + self.shift * self.hidden
        y[:, 0] = 0.0
        y[:, 1:3] *= 2
        y[:, 3].add_(1)
        return self.decode(torch.tanh_(y))


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Bilinear(4, 3, 2)

    def forward(self, x, y):
        first, second = self.a(x).chunk(2, dim=-1)
        return torch.cat([first * second.sigmoid(), self.b(x, y), x.amax(1, keepdim=True)], dim=1)


def convolved(*layers, channels=4):
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


def pooled(layer, dimension=2):
    convolution = {1: nn.Conv1d, 2: nn.Conv2d}[dimension](3, 4, 1)
    return nn.Sequential(convolution, layer, nn.Flatten())


IMAGES, SERIES, ROWS = (5, 3, 9, 7), (5, 3, 11), (5, 8)
# name: (module, shapes of inputs)
MODULES = {
    "residual block": (ResidualBlock, (5, 2, 6, 6)),
    "transformer": (Tokens, "tokens"),
    "transformer, gelu, norm first": (lambda: Tokens(activation="gelu", norm_first=True), "tokens"),
    "attention": (Causal, (5, 5, 8)),
    "tied weights, in place": (Tied, (5, 6)),
    "conv1d": (lambda: pooled(nn.Conv1d(4, 6, 4, stride=2, padding=3, dilation=2, groups=2), 1), SERIES),
    "conv1d, circular": (lambda: pooled(nn.Conv1d(4, 6, 4, padding=2, padding_mode="circular"), 1), SERIES),
    "conv2d, same": (lambda: pooled(nn.Conv2d(4, 4, (2, 3), padding="same", dilation=(1, 2))), IMAGES),
    "conv2d, reflect": (lambda: pooled(nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="reflect")), IMAGES),
    "conv2d, replicate": (lambda: pooled(nn.Conv2d(4, 4, 3, padding=1, padding_mode="replicate")), IMAGES),
    "conv2d, depthwise": (lambda: pooled(nn.Conv2d(4, 8, 3, groups=4, stride=(1, 2))), IMAGES),
    "transposed": (
        lambda: pooled(nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, output_padding=1, groups=2)),
        IMAGES,
    ),
    "transposed, dilated": (lambda: pooled(nn.ConvTranspose1d(4, 2, 3, stride=3, dilation=2), 1), SERIES),
    "max pool, ceil": (lambda: pooled(nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)), IMAGES),
    "max pool, ceil 2": (lambda: pooled(nn.MaxPool2d(2, 3, ceil_mode=True)), IMAGES),
    "max pool 1d": (lambda: pooled(nn.MaxPool1d(3), 1), SERIES),
    "mean pool": (lambda: pooled(nn.AvgPool2d(3, 2, padding=1)), IMAGES),
    "mean pool, ceil": (lambda: pooled(nn.AvgPool2d(3, 2, padding=1, ceil_mode=True)), (5, 3, 8, 10)),
    "mean pool, no padding": (
        lambda: pooled(nn.AvgPool2d(2, 2, padding=1, ceil_mode=True, count_include_pad=False)),
        IMAGES,
    ),
    "mean pool, divisor": (lambda: pooled(nn.AvgPool2d(2, divisor_override=3)), IMAGES),
    "mean pool 1d": (lambda: pooled(nn.AvgPool1d(4, 3), 1), SERIES),
    "adaptive": (lambda: pooled(nn.AdaptiveAvgPool2d((4, 3))), IMAGES),
    "adaptive, max": (lambda: pooled(nn.AdaptiveMaxPool2d((2, None))), IMAGES),
    "upsample": (lambda: pooled(nn.Upsample(scale_factor=2)), IMAGES),
    "batch norm 1d": (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4, affine=False)), ROWS),
    "group norm": (lambda: pooled(nn.GroupNorm(2, 4, eps=1e-2)), IMAGES),
    "instance norm": (lambda: pooled(nn.InstanceNorm2d(4, affine=True)), IMAGES),
    "layer norm": (lambda: pooled(nn.LayerNorm([4, 9, 7])), IMAGES),
    "rms norm": (lambda: Function(nn.RMSNorm(8)), ROWS),
    "prelu": (lambda: pooled(nn.PReLU(4)), IMAGES),
    "softmax": (lambda: Function(nn.Softmax(dim=-1)), ROWS),
    "log softmax": (lambda: Function(nn.LogSoftmax(dim=1)), ROWS),
    "two inputs": (Several, ((5, 4), (5, 3))),
    **{
        name: (lambda layer=layer: Function(layer), ROWS)
        for name, layer in {
            "gelu": nn.GELU(),
            "gelu, tanh": nn.GELU(approximate="tanh"),
            "elu": nn.ELU(0.7),
            "celu": nn.CELU(1.3),
            "selu": nn.SELU(),
            "leaky": nn.LeakyReLU(0.2),
            "softplus": nn.Softplus(beta=3, threshold=1),
            "hard": nn.Sequential(nn.Hardswish(), nn.Hardtanh(-0.3, 0.4), nn.ReLU6(), nn.Hardsigmoid()),
            "others": nn.Sequential(nn.SiLU(), nn.Mish(), nn.LogSigmoid(), nn.Tanhshrink(), nn.Softsign()),
            "glu": nn.GLU(),
            "threshold": nn.Threshold(0.1, -2.0),
            "dropout, in prediction": nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5)),
        }.items()
    },
    "arithmetic": (
        lambda: Function(
            lambda x: (
                (2 - x) / (x.abs() + 1)
                + x**3
                - x.pow(2).clamp(min=0.1) * torch.exp(-x)
                + (x > 0).float() // 1
            )
        ),
        ROWS,
    ),
    "reductions": (
        lambda: Function(
            lambda x: torch.stack(
                [
                    x.mean(1),
                    x.var(1),
                    x.std(1, unbiased=False),
                    x.norm(dim=1),
                    x.max(1).values,
                    x.logsumexp(1),
                ],
                1,
            )
        ),
        ROWS,
    ),
    "shapes": (
        lambda: Function(
            lambda x: torch.einsum("ri,rj->rij", x, x.roll(1, 1)).triu(1).flip(2)[:, ::2].squeeze(2).sum(1)
        ),
        ROWS,
    ),
    "choices": (
        lambda: Function(
            lambda x: torch.where(x > 0, x, 0.5)[:, torch.tensor([3, -1, 0])] + F.pad(x, (1, -6))
        ),
        ROWS,
    ),
}


def inputs_of(shape, rows):
    if shape == "tokens":
        return RNG.integers(0, 11, (rows, 5))
    if isinstance(shape[0], tuple):
        return tuple(floats(rows, *one[1:]) for one in shape)
    return floats(rows, *shape[1:])


def settled(module, shape):
    """In prediction, after some batches, so that running statistics are no longer 0 and 1."""
    torch.manual_seed(0)
    module = module()
    with torch.no_grad():
        for _ in range(3):
            module.train()(*tensors(inputs_of(shape, 6)))
    return module.eval()


def tensors(inputs):
    return tuple(torch.from_numpy(np.array(x)) for x in (inputs if isinstance(inputs, tuple) else (inputs,)))


def theta_of(network, module):
    return jax.tree.map(lambda leaf: leaf[0], network.start_from(module, key(), 1, noise=0.0))


def assert_equal(found, expected):
    size = np.max(np.abs(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * max(size, 1e-3))


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_those_of_pytorch(name):
    make, shape = MODULES[name]
    module = settled(make, shape)
    network = Network.torch(module, inputs_of(shape, 3))
    theta, evaluate = theta_of(network, module), eqx.filter_jit(network.apply)
    for rows in (1, 5):
        inputs = inputs_of(shape, rows)
        with torch.no_grad():
            expected = module(*tensors(inputs)).numpy()
        assert_equal(evaluate(theta, inputs), expected)


# --- training, and back


class Digits(nn.Module):
    """A residual block with BatchNorm, with momentum and eps of its own."""

    def __init__(self, rate=0.0):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, stride=2, bias=False), nn.BatchNorm2d(4, momentum=0.3)
        self.inner, self.again = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4, eps=1e-2)
        self.dropout, self.head = nn.Dropout(rate), nn.Linear(36, 10)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(torch.flatten(F.relu(x + self.again(self.inner(x))), 1)))


IMAGES_8, LABELS = floats(40, 1, 8, 8), RNG.integers(0, 10, 40).astype(np.int32)


def test_statistics_are_those_of_a_training_loop_of_pytorch():
    """Four steps of SGD: parameters, running means, unbiased running variances and numbers of batches."""
    torch.manual_seed(1)
    module = Digits()
    network = Network.torch(module, IMAGES_8[:2], training=True)
    start = network.start_from(module, key(), 1, noise=0.0)
    problem = mf.deep_ensemble(mf.NegativeLogLikelihood(network, mf.likelihoods.Categorical(10)))
    batches = [(IMAGES_8[i : i + 10], LABELS[i : i + 10]) for i in range(0, 40, 10)]
    flow = mf.WassersteinFlow(optimiser=optax.sgd(0.1))
    solution = mf.solve(problem, flow, start, 4, key(), data=iter([*batches, batches[0]]))
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for images, labels in batches:
        optimiser.zero_grad()
        F.cross_entropy(module.train()(torch.from_numpy(images)), torch.from_numpy(labels).long()).backward()
        optimiser.step()
    found, expected = network.state_dict(solution.measure.particles, 0), module.state_dict()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        np.testing.assert_allclose(found[name].numpy(), tensor.numpy(), rtol=2e-4, atol=2e-6, err_msg=name)
    assert found["norm.num_batches_tracked"] == 4
    # And in prediction, in another module.
    other = Digits().eval()
    other.load_state_dict(found)
    predicted = eqx.filter_jit(network.apply)(
        jax.tree.map(lambda x: x[0], solution.measure.particles), IMAGES_8
    )
    assert_equal(predicted, other(torch.from_numpy(IMAGES_8)).detach().numpy())
    assert module.training, "the module is in the mode that it was in"


def test_dropout_has_its_law():
    """Kept with probability 1 − p and divided by it, for every particle and key anew."""
    module = nn.Sequential(nn.Linear(1, 1000, bias=False), nn.Dropout(0.25))
    network = Network.torch(module, np.ones((2, 1)), training=True)
    theta = {"0.weight": jnp.ones((1000, 1))}
    draws = np.stack([network.training(theta, {}, np.ones((3, 1), np.float32), key(i))[0] for i in range(2)])
    assert set(np.unique(draws)) == {0.0, np.float32(1 / 0.75)}
    kept = draws > 0
    assert abs(kept.mean() - 0.75) < 5 * np.sqrt(0.75 * 0.25 / kept.size)
    assert np.any(kept[0] != kept[1])


def test_parameters_start_as_pytorch_starts_them():
    """Kolmogorov and Smirnov's test against PyTorch's own draws; what is constant there is constant here."""
    torch.manual_seed(2)

    def make():
        return nn.Sequential(nn.Conv2d(3, 40, 3), nn.Flatten(), nn.Linear(360, 30), nn.LayerNorm(30))

    module = make()
    network = Network.torch(module, floats(2, 3, 5, 5))
    drawn = jit(network.init)(key(1))
    for name, tensor in make().state_dict().items():
        found, expected = np.ravel(drawn[name]), tensor.numpy().ravel()
        if len(np.unique(expected)) == 1:
            np.testing.assert_array_equal(found, expected)
        else:
            assert st.ks_2samp(found, expected).pvalue > 1e-4, name
    prior = network.prior(weight=1.0)
    np.testing.assert_allclose(prior.deviations()["0.weight"], 1 / np.sqrt(27), rtol=1e-6)


def test_frozen_and_shared_parameters():
    """requires_grad=False is a constant; a weight with two names is one, and comes back under both."""
    module = Tied()
    module.decode.bias.requires_grad_(False)
    network = Network.torch(module, floats(2, 6))
    particles = network.start_from(module, key(), 3)
    assert set(particles) == {"encode.weight"}
    back = network.state_dict(particles, 2)
    assert set(back) == set(module.state_dict())
    np.testing.assert_array_equal(back["decode.weight"], np.asarray(particles["encode.weight"][2]))
    np.testing.assert_array_equal(back["decode.bias"], module.decode.bias.numpy())
    network = pickle.loads(pickle.dumps(network))
    other = Tied()
    other.load_state_dict(back)
    x = floats(4, 6)
    assert_equal(
        network.apply({"encode.weight": particles["encode.weight"][2]}, x),
        other(torch.from_numpy(x)).detach().numpy(),
    )


def test_an_index_beyond_the_table_is_nan():
    network = Network.torch(nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), np.array([[0], [4]]))
    theta = {"0.weight": jnp.ones((5, 3))}
    outputs = np.asarray(network.apply(theta, np.array([[4], [5], [-1]])))
    np.testing.assert_array_equal(np.isnan(outputs[:, 0]), [False, True, True])


class Returns(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), function

    def forward(self, x):
        return self.function(self.linear(x))


THREE = floats(2, 3)


@functools.cache
def small():
    return Network.torch(nn.Linear(3, 2), THREE)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.reader = nn.LSTM(3, 4, batch_first=True)

    def forward(self, x):
        return self.reader(x)[0][:, -1]


def with_norm(**options):
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, **options))


# name: (mistake, words of its message)
MISTAKES = {
    "lstm": (lambda: Network.torch(Memory(), floats(2, 5, 3)), ["lstm", "LSTM 'reader'", "Flax or Equinox"]),
    "sort": (lambda: Network.torch(Returns(lambda x: x.sort(1).values), THREE), ["sort", "Returns"]),
    "training mode": (
        lambda: Network.torch(with_norm(), THREE),
        ["training mode", "BatchNorm1d '1'", "eval()", "training=True"],
    ),
    "active dropout": (
        lambda: Network.torch(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), THREE),
        ["training mode", "Dropout '1'", "eval()"],
    ),
    "no running statistics": (
        lambda: Network.torch(with_norm(track_running_stats=False).eval(), THREE),
        ["BatchNorm1d", "batch"],
    ),
    "no running statistics, trained": (
        lambda: Network.torch(with_norm(track_running_stats=False), THREE, training=True),
        ["BatchNorm1d", "track_running_stats=True"],
    ),
    "momentum": (
        lambda: Network.torch(with_norm(momentum=None), THREE, training=True),
        ["momentum=None", "0.1"],
    ),
    "nothing to train": (
        lambda: Network.torch(nn.Linear(3, 2), THREE, training=True),
        ["leave training out"],
    ),
    "not a module": (lambda: Network.torch(nn.Linear, THREE), ["torch.nn.Module", "type"]),
    "double": (
        lambda: Network.torch(nn.Linear(3, 2).double(), THREE),
        ["float64", "'weight'", "module.float()"],
    ),
    "half": (lambda: Network.torch(nn.Linear(3, 2).half(), THREE), ["float16", "module.float()"]),
    "frozen": (lambda: Network.torch(nn.Linear(3, 2).requires_grad_(False), THREE), ["requires_grad"]),
    "two outputs": (lambda: Network.torch(Returns(lambda x: (x, x + 1)), THREE), ["one tensor", "2 outputs"]),
    "values": (
        lambda: Network.torch(Returns(lambda x: x if x.sum() > 0 else -x), THREE),
        ["torch.export", "Returns"],
    ),
    "rows": (lambda: Network.torch(Returns(lambda x: x.view(2, 3)), THREE), ["rows"]),
    "rows, by their number": (
        lambda: Network.torch(Returns(lambda x: x if x.shape[0] < 4 else -x), THREE),
        ["number of rows"],
    ),
    "columns at first": (lambda: Network.torch(nn.Linear(3, 2), floats(2, 4)), ["torch.export", "Linear"]),
    "no rows": (lambda: Network.torch(nn.Linear(3, 2), np.ones(())), ["inputs", "leading axis"]),
    "columns": (lambda: small().apply({}, floats(5, 4)), ["(rows, 3)", "(5, 4)"]),
    "integers": (lambda: small().apply({}, np.ones((5, 3), int)), ["floats", "int"]),
    "index": (lambda: small().state_dict(small().sample(key(), 2), 2), ["index", "2"]),
    "state dict of another": (
        lambda: Network.mlp(3).state_dict(Network.mlp(3).sample(key(), 2), 0),
        ["Network.torch"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name):
    act, pieces = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError, IndexError)) as caught:
        act()
    for piece in pieces:
        assert piece in str(caught.value), f"{piece!r} not in: {caught.value}"
