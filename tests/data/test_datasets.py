"""Data sets: the bundled digits, the user's folder, the cache, and downloads from a server on this machine."""

import dataclasses
import gzip
import hashlib
import http.server
import io
import socket
import struct
import tarfile
import threading
import zipfile

import numpy as np
import pytest

from metis.data import datasets
from metis.data.datasets import DATASETS, Dataset, RemoteFile, fetch_dataset, find_dataset, load_dataset
from metis.data.medmnist import SETS as MEDMNIST
from metis.errors import DataError

DOWNLOADABLE = [name for name, source in DATASETS.items() if source.files]


@pytest.fixture(autouse=True)
def own_folders(tmp_path, monkeypatch):
    """No test sees the user's folder, cache or proxy."""
    monkeypatch.delenv("METIS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(datasets, "_cache_folder", lambda: tmp_path / "cache" / "metis")


# --- small files in the original formats ----------------------------------------------------------


def small_images(name, train=20, test=10):
    """Arrays of the right shape for a data set, a few examples only."""
    source, rng = DATASETS[name], np.random.default_rng(7)
    arrays = {}
    for split, examples in (("train", train), ("test", test)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (examples, *source.shape), dtype=np.uint8)
        arrays[f"y_{split}"] = rng.integers(0, len(source.class_names), examples)
    return arrays


def cifar_records(images, *labels):
    """Label bytes, then the red, green and blue plane, for each image."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.hstack([*(label[:, None].astype(np.uint8) for label in labels), planes]).tobytes()


def tar_gz(members):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def idx_gz(array):
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def original_files(name, arrays):
    """The files that the home page of a data set would serve, by file name."""
    x_train, y_train, x_test, y_test = (arrays[key] for key in ("x_train", "y_train", "x_test", "y_test"))
    if name == "cifar10":
        batches = {
            f"cifar-10-batches-bin/data_batch_{k + 1}.bin": cifar_records(x, y)
            for k, (x, y) in enumerate(zip(np.split(x_train, 5), np.split(y_train, 5), strict=True))
        }
        batches["cifar-10-batches-bin/test_batch.bin"] = cifar_records(x_test, y_test)
        return {"cifar-10-binary.tar.gz": tar_gz(batches)}
    if name == "cifar100":
        coarse_train, coarse_test = y_train // 5, y_test // 5
        members = {
            "cifar-100-binary/train.bin": cifar_records(x_train, coarse_train, y_train),
            "cifar-100-binary/test.bin": cifar_records(x_test, coarse_test, y_test),
        }
        return {"cifar-100-binary.tar.gz": tar_gz(members)}
    if name == "emnist":
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for split in ("train", "test"):
                columns_first = arrays[f"x_{split}"].transpose(0, 2, 1)
                archive.writestr(f"gzip/emnist-byclass-{split}-images-idx3-ubyte.gz", idx_gz(columns_first))
                labels = idx_gz(arrays[f"y_{split}"])
                archive.writestr(f"gzip/emnist-byclass-{split}-labels-idx1-ubyte.gz", labels)
        return {"gzip.zip": packed.getvalue()}
    if name in MEDMNIST:
        packed = io.BytesIO()
        splits = {"train": (x_train, y_train), "val": (x_test, y_test), "test": (x_test, y_test)}
        images = {f"{split}_images": x for split, (x, _) in splits.items()}
        labels = {f"{split}_labels": y[:, None].astype(np.uint8) for split, (_, y) in splits.items()}
        np.savez(packed, **images, **labels)
        return {f"{name}.npz": packed.getvalue()}
    return {
        "train-images-idx3-ubyte.gz": idx_gz(x_train),
        "train-labels-idx1-ubyte.gz": idx_gz(y_train),
        "t10k-images-idx3-ubyte.gz": idx_gz(x_test),
        "t10k-labels-idx1-ubyte.gz": idx_gz(y_test),
    }


# --- a server on this machine ---------------------------------------------------------------------


class Site:
    """A web server with files; it can break off in the middle of one."""

    def __init__(self):
        self.files, self.broken, self.asked = {}, set(), []
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                name = self.path.rpartition("/")[2]
                site.asked.append(self.path)
                if name not in site.files or self.path.startswith("/nothing/"):
                    self.send_error(404)
                    return
                content = site.files[name]
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if name in site.broken else content)

            def log_message(self, *arguments):
                """Keep the test output clean."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def home(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def site():
    """A server that serves nothing yet."""
    site = Site()
    yield site
    site.close()


@pytest.fixture
def serve(site, monkeypatch):
    """Let the site serve a small version of a data set instead of its home page; returns its arrays."""

    def serve(name, mirrors=("",)):
        arrays = small_images(name)
        files = original_files(name, arrays)
        site.files.update(files)
        remote = tuple(
            RemoteFile(
                file.name,
                tuple(f"{site.home}{mirror}/{file.name}" for mirror in mirrors),
                hashlib.md5(files[file.name]).hexdigest(),
            )
            for file in DATASETS[name].files
        )
        monkeypatch.setitem(DATASETS, name, dataclasses.replace(DATASETS[name], files=remote))
        return arrays

    return serve


def nothing_left(folder):
    return not folder.exists() or list(folder.rglob("*")) == []


# --- digits ---------------------------------------------------------------------------------------


def test_digits_are_those_of_scikit_learn():
    """Every fifth example of each class (in class order) is the test set, the rest in order the training set."""
    bundled = load_dataset("digits")
    original = pytest.importorskip("sklearn.datasets").load_digits()
    test = np.sort(np.argsort(original.target, kind="stable")[::5])
    train = np.setdiff1d(np.arange(len(original.target)), test)
    assert np.array_equal(bundled.x_train, original.images[train])
    assert np.array_equal(bundled.y_train, original.target[train])
    assert np.array_equal(bundled.x_test, original.images[test])
    assert np.array_equal(bundled.y_test, original.target[test])


def test_digits_need_no_folder_and_no_network(site):
    """Types as promised, ten classes, a stratified split, nothing noted, nothing asked of any server."""
    digits = load_dataset("digits", download=False)
    assert (digits.x_train.shape, digits.x_test.shape) == ((1437, 8, 8), (360, 8, 8))
    assert (digits.x_train.dtype, digits.y_train.dtype) == (np.uint8, np.int64)
    assert (digits.classes, digits.task, digits.note) == (10, "classification", "")
    shares = np.bincount(digits.y_test) / np.bincount(np.append(digits.y_train, digits.y_test))
    assert np.all(np.abs(shares - 1 / 5) < 0.01)
    assert find_dataset("digits") == fetch_dataset("digits")
    assert site.asked == []


# --- downloads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOWNLOADABLE)
def test_a_download_gives_the_original_arrays(name, serve, tmp_path):
    """Each original format becomes one npz file with upright, channels-last images and plain labels."""
    arrays = serve(name)
    path = fetch_dataset(name, tmp_path / "mine", progress=False)
    loaded = load_dataset(name, tmp_path / "mine", download=False)
    assert path == tmp_path / "mine" / f"{name}.npz"
    assert list(path.parent.iterdir()) == [path]
    for key, array in arrays.items():
        assert np.array_equal(getattr(loaded, key), array)
    assert loaded.y_train.dtype == np.int64
    assert loaded.note.startswith("20 of ")


@pytest.mark.parametrize("name", DOWNLOADABLE)
def test_sources_are_complete(name):
    """Every source has as many class names as labels, addresses for every file, and MD5 checksums."""
    source = DATASETS[name]
    classes = {
        "cifar100": 100, "emnist": 62, "pathmnist": 9, "dermamnist": 7, "octmnist": 4, "pneumoniamnist": 2,
        "breastmnist": 2, "bloodmnist": 8, "tissuemnist": 8, "organamnist": 11, "organcmnist": 11, "organsmnist": 11,
    }  # fmt: skip
    assert len(set(source.class_names)) == classes.get(name, 10)
    for file in source.files:
        assert all(url.startswith("http") and url.endswith(file.name) for url in file.urls)
        assert len(bytes.fromhex(file.md5)) == hashlib.md5().digest_size


def test_loading_downloads_once_into_the_cache(serve, site, tmp_path):
    """The user's folder is only read; the second load asks nobody."""
    serve("mnist")
    (tmp_path / "mine").mkdir()
    load_dataset("mnist", tmp_path / "mine")
    asked = len(site.asked)
    load_dataset("mnist", tmp_path / "mine")
    assert find_dataset("mnist") == tmp_path / "cache" / "metis" / "mnist.npz"
    assert list((tmp_path / "mine").iterdir()) == []
    assert len(site.asked) == asked == 4


def test_progress_goes_to_standard_error(serve, tmp_path, capsys):
    """One line for each file, and standard output stays clean for results."""
    serve("mnist")
    fetch_dataset("mnist", tmp_path, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.split()[0] for line in printed.err.splitlines()] == [file.name for file in DATASETS["mnist"].files]


def test_a_mirror_takes_over(serve, tmp_path):
    """If the first address fails, the second is asked."""
    serve("mnist", mirrors=("/nothing", ""))
    assert fetch_dataset("mnist", tmp_path, progress=False).is_file()


def test_a_wrong_checksum_is_refused(serve, site, tmp_path):
    """A file that is not the original is named with both checksums, and nothing is kept."""
    serve("cifar10")
    expected = DATASETS["cifar10"].files[0].md5
    site.files["cifar-10-binary.tar.gz"] += b"!"
    found = hashlib.md5(site.files["cifar-10-binary.tar.gz"]).hexdigest()
    with pytest.raises(DataError, match=f"MD5 checksum {found} and not {expected}"):
        fetch_dataset("cifar10", tmp_path / "mine", progress=False)
    assert nothing_left(tmp_path / "mine")


def test_a_connection_that_breaks_off_leaves_nothing_behind(serve, site, tmp_path):
    """Half a file is not accepted, even if earlier files of the set were complete."""
    serve("mnist")
    site.broken.add("t10k-labels-idx1-ubyte.gz")
    with pytest.raises(DataError, match=r"could not be downloaded .*127\.0\.0\.1"):
        fetch_dataset("mnist", tmp_path / "mine", progress=False)
    assert nothing_left(tmp_path / "mine")


def test_an_interrupt_leaves_nothing_behind(serve, monkeypatch, tmp_path):
    """Ctrl-C stays Ctrl-C, and what was there before is still there."""
    serve("mnist")

    def interrupted(files):
        raise KeyboardInterrupt

    monkeypatch.setitem(DATASETS, "mnist", dataclasses.replace(DATASETS["mnist"], convert=interrupted))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mnist.npz").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt):
        fetch_dataset("mnist", tmp_path / "mine", progress=False)
    assert [file.read_bytes() for file in (tmp_path / "mine").iterdir()] == [b"before"]


def test_a_damaged_original_is_refused(serve, site, monkeypatch, tmp_path):
    """A file with the right checksum but the wrong content is one sentence, and nothing is kept."""
    serve("cifar100")
    content = tar_gz({"cifar-100-binary/train.bin": b"too short"})
    site.files["cifar-100-binary.tar.gz"] = content
    file = dataclasses.replace(DATASETS["cifar100"].files[0], md5=hashlib.md5(content).hexdigest())
    monkeypatch.setitem(DATASETS, "cifar100", dataclasses.replace(DATASETS["cifar100"], files=(file,)))
    with pytest.raises(DataError, match="'cifar100' was downloaded but could not be read"):
        fetch_dataset("cifar100", tmp_path / "mine", progress=False)
    assert nothing_left(tmp_path / "mine")


def test_without_a_network_one_sentence_says_what_to_do(serve, monkeypatch, tmp_path):
    """The folders that were searched, the reason, and the two remedies; nothing is left behind."""
    serve("cifar10")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/cifar-10-binary.tar.gz"
    file = dataclasses.replace(DATASETS["cifar10"].files[0], urls=(url,))
    monkeypatch.setitem(DATASETS, "cifar10", dataclasses.replace(DATASETS["cifar10"], files=(file,)))
    with pytest.raises(DataError) as raised:
        load_dataset("cifar10", tmp_path)
    assert str(raised.value) == (
        f"data set 'cifar10' is not in {tmp_path} nor in the cache, and could not be downloaded "
        "(no connection to 127.0.0.1); put cifar10.npz in a folder and name that with METIS_DATA or data.folder"
    )
    assert nothing_left(tmp_path / "cache")


def test_a_server_that_answers_with_an_error(serve, site, tmp_path):
    """The host and its answer are named."""
    serve("emnist")
    site.files.clear()
    with pytest.raises(DataError, match=r"127\.0\.0\.1 answered 404"):
        load_dataset("emnist", tmp_path)


def test_a_folder_that_cannot_be_made(serve, tmp_path):
    """A file where the folder should be is reported, not overwritten."""
    serve("mnist")
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(DataError, match=r"could not be stored in .*mine"):
        fetch_dataset("mnist", tmp_path / "mine", progress=False)
    assert (tmp_path / "mine").read_text() == "a file"


# --- the user's folder ----------------------------------------------------------------------------


def test_metis_data_names_the_folder(tmp_path, monkeypatch):
    """The argument comes first, then METIS_DATA."""
    for folder in ("named", "given"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "mnist.npz", **small_images("mnist"))
    monkeypatch.setenv("METIS_DATA", str(tmp_path / "named"))
    assert find_dataset("mnist") == tmp_path / "named" / "mnist.npz"
    assert find_dataset("mnist", tmp_path / "given") == tmp_path / "given" / "mnist.npz"


@pytest.mark.parametrize(("train", "note"), [(50, "50 of 50,000 training"), (200, "200 of 50,000 training")])
def test_a_part_of_a_set_is_accepted_and_noted(tmp_path, train, note):
    """The number of classes is that of the whole set, and that it is a part is noted; further arrays are ignored."""
    arrays = small_images("cifar100", train=train)
    np.savez(tmp_path / "cifar100.npz", **arrays, coarse_train=arrays["y_train"] // 5)
    part = load_dataset("cifar100", tmp_path)
    assert note in part.note
    assert part.classes == 100
    assert np.array_equal(part.x_train, arrays["x_train"])


def test_no_download_unless_wanted(site, tmp_path):
    """With download=False a missing set is reported at once."""
    with pytest.raises(DataError, match=r"'mnist' is not in .* nor in the cache; put mnist\.npz in a folder"):
        load_dataset("mnist", tmp_path, download=False)
    with pytest.raises(DataError, match=r"'mnist' is not in the cache \(there is no folder .*/nowhere either\); put"):
        load_dataset("mnist", tmp_path / "nowhere", download=False)
    with pytest.raises(DataError, match="'mnist' is not in the cache; put"):
        load_dataset("mnist", download=False)
    assert site.asked == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_train": np.zeros((20, 28, 28, 1), np.uint8)}, r"x_train has the shape \(20, 28, 28, 1\)"),
        ({"x_test": np.zeros((10, 28, 28), np.float32)}, "dtype float32"),
        ({"y_train": np.full(20, 10)}, "labels from 10 to 10; 'mnist' has 0 to 9"),
        ({"y_train": np.full(20, 0.5)}, "one whole number for each example"),
        ({"y_test": np.zeros(9, np.int64)}, "10 test inputs but 9 targets"),
        (
            {"y_train": np.array([None] * 20)},
            "damaged or not an npz file with the arrays x_train, y_train, x_test, y_test; put",
        ),
    ],
)
def test_files_that_are_no_such_data_set(tmp_path, change, message):
    """What is wrong with a file is reported before anything starts; objects (pickle) are never loaded."""
    np.savez(tmp_path / "mnist.npz", **{**small_images("mnist"), **change})
    with pytest.raises(DataError, match=message):
        load_dataset("mnist", tmp_path)


def test_files_that_are_no_npz(tmp_path):
    """Noise, half a file, a single array, an archive without the arrays."""
    file = tmp_path / "mnist.npz"
    np.savez(file, **small_images("mnist"))
    half = file.read_bytes()[: file.stat().st_size // 2]
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    for content in (b"noise", b"", half, single.getvalue()):
        file.write_bytes(content)
        with pytest.raises(DataError, match="damaged or not an npz file with the arrays x_train") as caught:
            load_dataset("mnist", tmp_path)
        assert "pickle" not in str(caught.value) and "delete" not in str(caught.value)
    np.savez(file, x_train=np.zeros(3))
    with pytest.raises(DataError, match="it needs the arrays x_train, y_train, x_test, y_test"):
        load_dataset("mnist", tmp_path)


def test_unknown_names_get_the_nearest_known_one():
    """A typo is answered with a suggestion."""
    with pytest.raises(DataError, match=r"no data set 'CIFAR-10'; did you mean 'cifar10'\?"):
        load_dataset("CIFAR-10")


def test_a_users_own_arrays_are_checked():
    """Inputs and targets must be equally many; a regression has no classes."""
    x, ages = np.zeros((4, 3), np.float32), np.array([50.0, 61, 47, 72], np.float32)
    assert Dataset("ages", x, ages, x[:0], ages[:0], task="regression").classes == 0
    with pytest.raises(DataError, match="'ages' has 4 training inputs but 3 targets"):
        Dataset("ages", x, ages[:3], x, ages)


# --- real data ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sha256_of_x_test"),
    [
        ("cifar10", "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"),
        ("mnist", "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161"),
    ],
)
def test_real_sets_load_whole(data_folder, name, sha256_of_x_test):
    """The pixels are those of the original test set, and every example is there."""
    if not (data_folder / f"{name}.npz").is_file():
        pytest.skip(f"the folder that METIS_DATA names has no {name}.npz")
    real = load_dataset(name, data_folder, download=False)
    assert real.note == ""
    assert (len(real.y_train), real.classes) == (DATASETS[name].train, 10)
    assert hashlib.sha256(real.x_test.tobytes()).hexdigest() == sha256_of_x_test


def test_real_cifar100_may_be_a_part(data_folder):
    """All 100 classes are there, equally many of each, and a part is noted."""
    if not (data_folder / "cifar100.npz").is_file():
        pytest.skip("the folder that METIS_DATA names has no cifar100.npz")
    real = load_dataset("cifar100", data_folder, download=False)
    assert real.classes == 100
    assert len(set(np.bincount(real.y_train).tolist())) == 1
    assert (real.note == "") == (len(real.y_train) == DATASETS["cifar100"].train)
