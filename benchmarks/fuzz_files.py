"""What `measureflow.load` makes of files that were damaged, or made to do harm.

Every file is one that `save` wrote, changed in one way. Some changes are damage: a bit, a piece, the length.
Others are a stranger's: any value of the description, any array's name, shape, dtype or bytes, with check
sums that are right again. Each such file must be refused with a `FileFormatError`, or be loaded as something
sound, and nothing may happen meanwhile: no import, no code, no process, no file opened but that one.
Python's audit hooks watch, in a process of its own, so that a crash would be seen, too.

    python benchmarks/fuzz_files.py [--number 1000] [--seed 0] [--out FILE]
"""

import argparse
import collections
import contextlib
import copy
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd

import measureflow as mf
from measureflow.runs.solution import Restart
from measureflow.saving import container
from measureflow.saving.container import FileFormatError
from measureflow.saving.documents import load, save
from measureflow.tables.choosing import Choice, Trial
from measureflow.tables.classifier import EnsembleClassifier
from measureflow.tables.methods import Candidate
from measureflow.tables.regressor import EnsembleRegressor
from measureflow.tables.training import Ensemble

# What one load may take: memory by the file's size, of which JSON needs some thirty times as much once it is
# read, and a little more, and so many seconds.
MEMORY_PER_BYTE, MORE_MEMORY, MOST_TIME = 60, 2**26, 30.0


# The files.


def fitted(estimator, y, rows=None):
    """The estimator as `fit` leaves it, but for the training."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(len(y), 2)) if rows is None else rows
    models = estimator._prepare(rows, np.asarray(y), None).models
    particles = particles_of(models[0].loss.network, estimator.particles)
    scores = {Trial(0, Candidate(1.0)): -1.25, Trial(0, Candidate(0.3, 0.5)): -1.5}
    history = mf.History({"step": np.array([0, 500]), "loss": np.array([2.0, 1.5], np.float32)})
    shares = dict.fromkeys(scores, 0.5)
    choice = Choice((Trial(0, Candidate(0.3)),), (1.1, 0.5), 0.8, scores, shares)
    estimator._take(Ensemble(choice, particles, 500, 500, history), models)
    return estimator


def particles_of(network, n, seed=1):
    """Draws that compile nothing."""
    rng, theta = np.random.default_rng(seed), jax.eval_shape(network.init, jax.random.key(0))
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=(n, *leaf.shape)), leaf.dtype), theta)


def things():
    """One of each kind, as a function of nothing."""
    prior = mf.Gaussian({"a": jnp.zeros(2), "b": [jnp.ones((1, 3))]}, 0.5)
    particles = {"a": jnp.asarray(np.arange(8.0).reshape(4, 2)), "b": [jnp.asarray(np.ones((4, 1, 3)))]}
    problem = mf.Problem(loss, mf.KL(prior))
    network = mf.Network.mlp(2, (3,), 1, "relu+tanh").with_constants(1)
    targets = np.arange(8.0)
    return {
        "solution": solution(problem, mf.WassersteinFlow(0.1, momentum=0.9), particles),
        "solution with Optax": solution(
            mf.Problem(loss), mf.WassersteinFlow(optimiser=optax.adam(0.1)), particles
        ),
        "Gaussian": mf.Gaussian(jnp.arange(3.0), jnp.diag(jnp.ones(3))),
        "Predictive": mf.Predictive(
            network, mf.likelihoods.Homoscedastic(), particles_of(network, 3), 1.0, 2.0, 0.9
        ),
        "regressor": fitted(EnsembleRegressor(hidden=(3,), particles=3), targets),
        "bins": fitted(EnsembleRegressor(encoding=4, likelihood="log_mixture", particles=2), targets + 1),
        "counts": fitted(EnsembleRegressor(hidden=(3,), particles=3, likelihood="poisson"), targets),
        "frame": fitted(EnsembleRegressor(hidden=(3,), particles=3), np.arange(12.0) ** 2, frame()),
        "classifier": fitted(EnsembleClassifier(hidden=(3,), particles=3), ["a", "b", "long"] * 3),
        "pytree": {
            "θ": (jnp.ones(2, jnp.bfloat16), None, [np.arange(3), True]),
            "nested": {"key": jax.random.key(3), "number": np.float64(0.1), "text": np.array(["x", "yz"])},
            "floats": [0.1, float("nan"), -float("inf"), 12345678901234567890],
        },
    }


def frame():
    """A column of each kind."""
    sizes = pd.Categorical(["S", "M", "L"] * 4, categories=["S", "M", "L"], ordered=True)
    return pd.DataFrame(
        {
            "number": [None, 1.5, -2.0] * 4,
            "text": ["one", "two"] * 6,
            "size": sizes,
            "date": pd.date_range("2024-02-28", periods=12, freq="7h"),
            "duration": pd.to_timedelta(np.arange(12), unit="h"),
            "boolean": [True, False, False] * 4,
            "constant": "x",
        }
    )


def solution(problem, flow, initial):
    """As `solve` makes it, but for the steps."""
    state = flow.init(problem, initial)
    history = mf.History(step=np.arange(3), loss=np.array([0.5, np.nan, 0.25], np.float32))
    return mf.Solution(flow.measure(state), history, state, (Restart(1, (0, 2), (1, 1)),))


def loss(theta):
    return jnp.sum(theta["a"] ** 2) + jnp.sum(theta["b"][0] ** 2)


def saved(thing, folder):
    path = Path(folder) / "saved.safetensors"
    save(thing, path, force=True)
    return path.read_bytes()


# Taking a file apart, and putting one together whose check sums are right.


def parts(content):
    """The document, the arrays' descriptions, and the arrays' bytes; all without the check sum."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    document = json.loads(header.pop("__metadata__")["measureflow"])
    begin, end = header.pop("sha256")["data_offsets"]
    for entry in header.values():
        entry["data_offsets"] = [place if place <= begin else place - 32 for place in entry["data_offsets"]]
    return document, header, data[:begin] + data[end:]


def sealed(document, header, data):
    """A file of these parts. The document, or the header, may be a text that is no JSON."""
    text = document if isinstance(document, str) else json.dumps(document)
    try:
        arrays = [
            (name, entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in header.items()
        ]
        check_sum = container.check_sum(text, arrays).tobytes()
    except (AttributeError, KeyError, TypeError):
        check_sum = bytes(32)
    place = {"dtype": "U8", "shape": [32], "data_offsets": [len(data), len(data) + 32]}
    whole = {"__metadata__": {"measureflow": text}, **header, "sha256": place}
    return with_header(json.dumps(whole), data + check_sum)


def with_header(text, data):
    content = text.encode()
    return len(content).to_bytes(8, "little") + content + data


# Damage. Each changes the bytes of a file.


def flipped_bit(content, rng):
    place = int(rng.integers(len(content)))
    return content[:place] + bytes([content[place] ^ (1 << int(rng.integers(8)))]) + content[place + 1 :]


def truncated(content, rng):
    return content[: int(rng.integers(len(content)))]


def piece_lost(content, rng):
    begin, end = sorted(rng.integers(len(content), size=2).tolist())
    return content[:begin] + content[end + 1 :]


def piece_of_noise(content, rng):
    begin, end = sorted(rng.integers(len(content), size=2).tolist())
    return content[:begin] + rng.bytes(end - begin) + content[end:]


def longer(content, rng):
    return content + rng.bytes(int(rng.integers(1, 100)))


def noise(content, rng):
    return rng.bytes(int(rng.integers(2000)))


def length_of_header(content, rng):
    lengths = [0, 1, 7, 2**24, 2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1]
    return int(rng.choice(np.array(lengths, np.uint64))).to_bytes(8, "little") + content[8:]


# A stranger's work. Each changes a document, a header or data, and leaves check sums that are right.

JUNK = [
    None,
    True,
    0,
    -1,
    3,
    2**31,
    2**70,
    10**400,
    0.5,
    -0.0,
    1e308,
    "",
    "relu",
    "../../../tmp/stranger",
    "/etc/passwd",
    "\0",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [1, 2, 3],
    {"list": []},
    {"tuple": [1, 2]},
    {"tuple": "ab"},
    {"dict": {}},
    {"dict": []},
    {"float": "nan"},
    {"float": "inf"},
    {"float": 1},
    {"jax": "no such array"},
    {"numpy": 3},
    {"scalar": None},
    {"key": "x", "implementation": "y"},
    {"texts": ["b", "a"]},
    {"texts": [1]},
    {"text": "no such array"},
    {"object": "Flat", "fields": {}},
    {"object": "Gaussian", "fields": {}},
    {"object": "os.system", "fields": {"command": "id"}},
    {"object": [], "fields": []},
    {"object": "PerceptronInit", "fields": {"sizes": {"tuple": [10**9] * 3}, "skip": False}},
    {"object": "PerceptronInit", "fields": {"sizes": {"tuple": [1] * 50_000}, "skip": False}},
    {
        "object": "PerceptronApply",
        "fields": {"sizes": {"tuple": [2, 3, 1]}, "activation": "relu", "skip": False},
    },
    {"object": "RowsOfOutputs", "fields": {"function": {"import": "os:system"}}},
    {"object": "Categorical", "fields": {"targets": 1, "classes": 10**12}},
    {"leaves": {}, "structure": ""},
    {"leaves": {".x": 1}, "structure": 3},
    {"import": "os:system"},
    {"import": "os:system", "fields": {"command": "id"}},
    {"import": "tabnanny:check"},
    {"import": "../x:y"},
    {"import": ":"},
    {"__class__": "x"},
]


# What a node calls an array of the file.
REFERENCES = ("jax", "numpy", "scalar", "key", "text")


def places(node, found=None):
    """Every place in a JSON value: its container, and the key."""
    found = [] if found is None else found
    for key in list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        found.append((node, key))
        places(node[key], found)
    return found


def chosen(options, rng):
    return options[int(rng.integers(len(options)))]


def other_value(document, header, data, rng):
    node, key = chosen(places(document), rng)
    node[key] = copy.deepcopy(chosen(JUNK, rng))
    return document, header, data


def code_named(document, header, data, rng):
    """In the place of any value: functions, classes, and modules that nobody has imported yet."""
    names = [
        "os:system",
        "subprocess:Popen",
        "builtins:exec",
        "pickle:loads",
        "tabnanny:check",
        "sched:scheduler",
    ]
    names += ["measureflow.runs.loop:run", "jax:devices", "equinox:Module", "__main__:main", "sys:exit"]
    node, key = chosen(places(document["fields"]), rng)
    node[key] = {"import": chosen(names, rng)}
    if rng.integers(2):
        node[key]["fields"] = chosen([{}, {"args": {"list": ["id"]}}, {"command": "id"}], rng)
    return document, header, data


def other_number(document, header, data, rng):
    numbers = [(n, k) for n, k in places(document) if isinstance(n[k], int | float)]
    node, key = chosen(numbers, rng)
    node[key] = chosen([node[key] + 1, -node[key], node[key] * 1e30, node[key] / 3, 0, float(node[key])], rng)
    return document, header, data


def part_missing(document, header, data, rng):
    node, key = chosen(places(document), rng)
    del node[key]
    return document, header, data


def part_added(document, header, data, rng):
    objects = [document, *(n[k] for n, k in places(document) if isinstance(n[k], dict))]
    chosen(objects, rng)[chosen(["extra", "__reduce__", "import", "fields", "state"], rng)] = chosen(
        JUNK, rng
    )
    return document, header, data


def parts_swapped(document, header, data, rng):
    (one, i), (other, j) = chosen(places(document), rng), chosen(places(document), rng)
    one[i], other[j] = copy.deepcopy(other[j]), copy.deepcopy(one[i])
    return document, header, data


def other_reference(document, header, data, rng):
    """One array in the place of another."""
    references = [(n, k) for n, k in places(document) if k in REFERENCES]
    node, key = chosen(references, rng)
    node[key] = chosen(list(header), rng)
    if rng.integers(2):
        kind = chosen(["jax", "numpy", "scalar", "text"], rng)
        node[kind] = node.pop(key)
    return document, header, data


def array_of_other_shape(document, header, data, rng):
    entry = chosen(list(header.values()), rng)
    shape, size = entry["shape"], int(np.prod(entry["shape"]))
    shapes = [
        shape[::-1],
        [size],
        [1, *shape],
        [*shape, 1],
        [size, 1, 1],
        [2**31, 2**31],
        [0, 2**62],
        [-1],
        [1] * 40,
    ]
    entry["shape"] = chosen([*shapes, None, "3", [1.0], [True], [[]]], rng)
    return document, header, data


def array_of_other_dtype(document, header, data, rng):
    entry = chosen(list(header.values()), rng)
    same_size = {"F32": ["I32", "U32"], "F64": ["I64", "U64"], "I32": ["F32", "U32"], "I64": ["F64", "U64"]}
    entry["dtype"] = chosen([*same_size.get(entry["dtype"], []), "BOOL", "F8_E5M2", "O", "", None, 3], rng)
    return document, header, data


def array_elsewhere(document, header, data, rng):
    entry = chosen(list(header.values()), rng)
    begin, end = entry["data_offsets"]
    moves = [
        [begin + 4, end + 4],
        [end, begin],
        [0, end - begin],
        [-4, end],
        [begin, 2**62],
        [0.0, 1.0],
        [0],
        None,
    ]
    entry["data_offsets"] = chosen(moves, rng)
    return document, header, data


def array_of_other_name(document, header, data, rng):
    name = chosen(list(header), rng)
    other = chosen(
        ["../../../tmp/stranger", "/etc/passwd", "C:\\x", "", "\0", "\ud800", "x" * 10_000, "a/b"], rng
    )
    header[other] = header.pop(name)
    if rng.integers(2):
        for node, key in places(document):
            if node[key] == name and key in REFERENCES:
                node[key] = other
    return document, header, data


def array_of_other_bytes(document, header, data, rng):
    entry = chosen(
        [entry for entry in header.values() if entry["data_offsets"][1] > entry["data_offsets"][0]], rng
    )
    begin, end = entry["data_offsets"]
    content = chosen([rng.bytes(end - begin), b"\xff" * (end - begin), b"\0" * (end - begin)], rng)
    return document, header, data[:begin] + content + data[end:]


def much_asked_for(document, header, data, rng):
    """Little is said, and much would have to be done."""
    reference = {chosen(["jax", "numpy", "text"], rng): chosen(list(header), rng)}
    sizes = {"tuple": [1] * 100}
    network = {
        "init": {"object": "PerceptronInit", "fields": {"sizes": sizes, "skip": False}},
        "apply": {
            "object": "PerceptronApply",
            "fields": {"sizes": sizes, "activation": "relu", "skip": False},
        },
        "output_axis": -1,
    }
    wide = {"tuple": [2**31] * 100}
    questions = [
        {"strings": ["a"], "dtype": "<U16777216"},
        {"strings": ["a"] * 1000, "dtype": "<U16000"},
        {"object": "Network", "fields": network},
        {"object": "PerceptronInit", "fields": {"sizes": wide, "skip": False}},
        {"object": "ConstantsInit", "fields": {"init": network["init"], "count": 2**40}},
        {"object": "Flat", "fields": {}},
        {"object": "Gaussian", "fields": {"mean": reference, "scale": reference}},
        {"object": "Categorical", "fields": {"targets": 2**20, "classes": 2**40}},
        {"texts": [""] * 1000},
        {"list": [reference] * 1000},
    ]
    node, key = chosen(places(document["fields"]) or [(document, "fields")], rng)
    node[key] = {"list": [chosen(questions, rng)] * chosen([24, 60, 2000], rng)}
    return document, header, data


def document_that_is_none(document, header, data, rng):
    text = json.dumps(document)
    nested = "[" * 100_000 + "]" * 100_000
    deep = '{"list":[' * 500 + "1" + "]}" * 500
    field = next(iter(document["fields"]), "x")
    texts = [
        "",
        "null",
        "[]",
        "{}",
        text[:-1],
        nested,
        text.replace("{", '{"format":"measureflow",', 1),
        text.replace('"fields": {', f'"fields": {{"{field}": NaN, ', 1),
        text.replace('"fields": {', '"fields": {"x": 1e999, ', 1),
        text.replace('"fields": {', '"fields": {"x": ' + "9" * 5000 + ", ", 1),
        json.dumps({**document, "fields": dict.fromkeys(document["fields"], 0)}).replace(": 0", f": {deep}"),
        "\ufeff" + text,
    ]
    return chosen(texts, rng), header, data


def other_version(document, header, data, rng):
    document["format_version"] = chosen([0, -1, 2, 10**30, "1", 1.0, True, None, [1]], rng)
    if rng.integers(2):
        document["measureflow_version"] = chosen(["99.0", "x" * 10_000, 3, None], rng)
    return document, header, data


def header_that_is_none(document, header, data, rng):
    """As a text, since JSON's writers do not write such."""
    whole = sealed(document, header, data)
    length = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + length].decode()
    name = json.dumps(next(iter(header), "x"))
    texts = [
        "{" + text,
        "[" * 100_000,
        text.replace("{", "{" + name + ":{},", 1),
        text.replace('"shape":', '"shape":NaN,"other":', 1),
        text.replace('"__metadata__"', '"__metadata"', 1),
        text.replace('"__metadata__": {', '"__metadata__": {"extra": "text", ', 1),
        json.dumps({"__metadata__": {"measureflow": document}, **header}),
        " " * (container.LARGEST_HEADER + 1),
        "{" + ",".join(f'"{i}":[]' for i in range(100_000)) + "}",
    ]
    return with_header(chosen(texts, rng), data)


DAMAGE = [flipped_bit, truncated, piece_lost, piece_of_noise, longer, noise, length_of_header]
STRANGERS = [
    other_value,
    other_value,
    other_value,
    code_named,
    other_number,
    part_missing,
    part_added,
    parts_swapped,
    other_reference,
    array_of_other_shape,
    array_of_other_dtype,
    array_elsewhere,
    array_of_other_name,
    array_of_other_bytes,
    much_asked_for,
    document_that_is_none,
    other_version,
    header_that_is_none,
]


CHANGES = (*DAMAGE, *STRANGERS)


def mutant(contents, number, seed):
    """The name of the change, the name of the file, and the changed bytes."""
    rng = np.random.default_rng([seed, number])
    change = CHANGES[number % len(CHANGES)]
    name = chosen(list(contents), rng)
    if change in DAMAGE:
        return change.__name__, name, change(contents[name], rng)
    document, header, data = parts(contents[name])
    made = change(document, header, data, rng)
    return change.__name__, name, made if isinstance(made, bytes) else sealed(*made)


# Loading them.


def outcome(path, original, folder, watching=contextlib.nullcontext):
    """What comes of it, and the thing: "refused", "equal" to what was saved, or "other". Others raise."""
    try:
        with warnings.catch_warnings(), watching():
            warnings.simplefilter("ignore")
            thing = load(path)
    except FileFormatError as error:
        require_words(str(error), str(path))
        return "refused", None
    return ("equal" if saved(thing, folder) == original else "other"), thing


def require_words(message, path):
    assert path in message, "the path is not in the message"
    assert "; " in message, "no remedy in the message"
    assert len(message) < 2000, "a message that nobody reads"


def require_sound(thing):
    """It can be used: what is promised of its shapes holds."""
    if isinstance(thing, EnsembleRegressor | EnsembleClassifier):
        thing = thing._predictive()
    if isinstance(thing, mf.Predictive):
        theta = jax.eval_shape(thing.network.init, jax.random.key(0))
        layers = theta["network"] if isinstance(theta, dict) else theta
        rows = jax.ShapeDtypeStruct((5, layers[0]["weight"].shape[0]), jnp.float32)
        shape = jax.eval_shape(lambda rows: thing(rows).sample(jax.random.key(0)), rows).shape
        assert shape[0] == 5, shape
    elif isinstance(thing, mf.Solution):
        assert isinstance(thing.history, mf.History)
        assert len({len(column) for column in thing.history.values()}) <= 1
        require_sound(thing.measure)
    elif isinstance(thing, mf.Empirical | mf.Gaussian | mf.Uniform):
        draws = jax.eval_shape(lambda: thing.sample(jax.random.key(0), 7))
        assert all(leaf.shape[0] == 7 for leaf in jax.tree.leaves(draws))


# Watching.

WATCHED = (
    "compile",
    "exec",
    "import",
    "open",
    "pickle.find_class",
    "marshal.loads",
    "subprocess.Popen",
    "socket.connect",
    "ctypes.dlopen",
)


class Watch:
    """What Python's audit hooks report while it is on, but for reading the file that is loaded."""

    def __init__(self, path):
        self.path, self.on, self.seen, self.seconds = str(path), False, [], 0.0
        sys.addaudithook(self.hook)

    def hook(self, event, arguments):
        if not self.on or not (event in WATCHED or event.startswith(("os.", "shutil.", "tempfile."))):
            return
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and str(arguments[0]) == self.path and not arguments[2] & writing:
            return
        self.seen.append(f"{event} {arguments!r}"[:300])

    @contextlib.contextmanager
    def __call__(self):
        self.seen, self.on, began = [], True, time.perf_counter()
        try:
            yield
        finally:
            self.on, self.seconds = False, time.perf_counter() - began


def child(number, seed):
    """Loads them all, and says what came of each: lines of JSON."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        contents = {name: saved(thing, folder) for name, thing in things().items()}
        path = folder / "mutant.safetensors"
        watch = Watch(path)
        originals = loaded_and_saved(contents, path, folder)
        files, memory = sorted(folder.iterdir()), peak_memory()
        for i in range(number):
            change, name, content = mutant(contents, i, seed)
            path.write_bytes(content)
            say(begin=i, change=change, file=name)
            before = peak_memory()
            try:
                kind, thing = outcome(path, originals[name], folder, watch)
                taken = peak_memory() - before
                assert taken < MEMORY_PER_BYTE * len(content) + MORE_MEMORY, f"{taken} bytes were taken"
                assert not watch.seen, f"while it was loaded: {watch.seen}"
                assert sorted(folder.iterdir()) == files, "a file appeared"
                require_sound(thing)
                say(outcome=kind, seconds=watch.seconds)
            except BaseException as error:
                say(outcome="failed", error=f"{type(error).__name__}: {error}"[:500])
        say(memory=peak_memory() - memory)


def loaded_and_saved(contents, path, folder):
    """What comes of files that nobody changed; whatever is imported late is imported by then."""
    found = {}
    for name, content in contents.items():
        path.write_bytes(content)
        kind, thing = outcome(path, content, folder)
        # Without `like`, the state of Optax is left out.
        assert kind == "equal" or name == "solution with Optax", name
        require_sound(thing)
        found[name] = saved(thing, folder)
    return found


def peak_memory():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def say(**what):
    print(json.dumps(what), flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.number, options.seed)
        return
    numbers = ["--number", str(options.number), "--seed", str(options.seed)]
    done = subprocess.run(
        [sys.executable, __file__, "--child", *numbers], stdout=subprocess.PIPE, text=True, check=False
    )
    table = {change.__name__: collections.Counter() for change in CHANGES}
    failures, slowest, memory, current = [], (0.0, ""), None, {}
    for line in map(json.loads, done.stdout.splitlines()):
        current = line if "begin" in line else current
        memory = line.get("memory", memory)
        if "outcome" in line:
            slowest = max(slowest, (line.get("seconds", 0.0), current["change"]))
            table[current["change"]][line["outcome"]] += 1
            failures += [current | line] if line["outcome"] == "failed" else []
    total = sum(table.values(), collections.Counter())
    kinds = ("refused", "equal", "other", "failed")
    print(f"{'change':24}" + "".join(f"{kind:>9}" for kind in kinds))
    for change, row in [*table.items(), ("all", total)]:
        print(f"{change:24}" + "".join(f"{row[kind]:9}" for kind in kinds))
    for failure in failures:
        print("FAILED", json.dumps(failure))
    crashed = done.returncode != 0 or total.total() != options.number
    if crashed:
        print(f"the process ended with {done.returncode} at {current}")
    grown = (memory or 0) / 2**20
    print(f"slowest load {slowest[0]:.2f} s ({slowest[1]}); memory grew by {grown:.0f} MiB")
    if options.out:
        result = {"outcomes": table, "slowest_s": slowest[0], "memory_bytes": memory, "failures": failures}
        options.out.write_text(json.dumps(result | {"crashed": crashed}, indent=1))
    if failures or crashed or memory is None or slowest[0] > MOST_TIME:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
