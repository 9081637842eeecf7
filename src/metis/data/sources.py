"""The data sets that Metis knows by name, and where each comes from: files, a table or a seed."""

from __future__ import annotations

import gzip
import inspect
import string
import struct
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from metis.data import medmnist, tables, volumes
from metis.data.dataset import Dataset, Task
from metis.registry import Registry

Arrays: TypeAlias = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class RemoteFile:
    """One original file: the addresses that serve it, in the order to try, and its published MD5 checksum."""

    name: str
    urls: tuple[str, ...]
    md5: str


@dataclass(frozen=True)
class DatasetSource:
    """What is known about a data set before it is loaded, and where it comes from: files, a table or a seed."""

    name: str
    title: str
    shape: tuple[int, ...]
    class_names: tuple[str, ...]
    train: int
    test: int
    files: tuple[RemoteFile, ...] = ()
    convert: Callable[[Mapping[str, Path]], Arrays] | None = None
    task: Task = "classification"
    read: Callable[..., Dataset] | None = None  # a CSV file that cannot be downloaded; more arguments are options
    generate: Callable[..., Dataset] | None = None  # from a seed; the arguments are options
    origin: str = ""  # where a file that cannot be downloaded comes from

    @property
    def bundled(self) -> bool:
        """Whether the set comes with the package, or is made by it, and never needs a download."""
        return not self.files and self.read is None

    @property
    def file(self) -> str:
        """The name of its file in the user's folder."""
        return f"{self.name}.npz" if self.read is None else f"{self.name}.csv"

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that `load_dataset` accepts for this set."""
        function = self.generate or self.read
        if function is None:
            return ()
        kinds = inspect.signature(function).parameters.values()
        return tuple(parameter.name for parameter in kinds if parameter.kind is parameter.KEYWORD_ONLY)


def _medmnist(files: Mapping[str, Path]) -> Arrays:
    (path,) = files.values()
    with np.load(path, allow_pickle=False) as stored:
        return medmnist.from_archive(stored)


DATASETS: Registry[DatasetSource] = Registry("data set", "metis.datasets")


def _cifar10(files: Mapping[str, Path]) -> Arrays:
    archive = files["cifar-10-binary.tar.gz"]
    members = [f"cifar-10-batches-bin/data_batch_{batch}.bin" for batch in range(1, 6)]
    return _cifar(archive, members, "cifar-10-batches-bin/test_batch.bin", label_bytes=1)


def _cifar100(files: Mapping[str, Path]) -> Arrays:
    archive = files["cifar-100-binary.tar.gz"]
    # Two label bytes, the coarse class and then the fine one, which is the label.
    return _cifar(archive, ["cifar-100-binary/train.bin"], "cifar-100-binary/test.bin", label_bytes=2)


def _cifar(archive: Path, train: list[str], test: str, label_bytes: int) -> Arrays:
    """A record is its label bytes and then the red, green and blue planes of 32 x 32."""
    blocks = {}
    with tarfile.open(archive) as tar:
        # Members are read, never unpacked, so that no path in the archive is trusted.
        for member in [*train, test]:
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{member} is not a file")
            blocks[member] = np.frombuffer(stream.read(), np.uint8).reshape(-1, label_bytes + 3 * 32 * 32)
    arrays = {}
    for split, members in (("train", train), ("test", [test])):
        records = np.concatenate([blocks[member] for member in members])
        planes = records[:, label_bytes:].reshape(-1, 3, 32, 32)
        arrays[f"x_{split}"] = np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
        arrays[f"y_{split}"] = records[:, label_bytes - 1].astype(np.int64)
    return arrays


def _mnist(files: Mapping[str, Path]) -> Arrays:
    arrays = {}
    for split, prefix in (("train", "train"), ("test", "t10k")):
        for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
            with gzip.open(files[f"{prefix}-{kind}-ubyte.gz"]) as stream:
                arrays[f"{key}_{split}"] = _idx(stream)
    return _with_long_labels(arrays)


def _emnist(files: Mapping[str, Path]) -> Arrays:
    arrays = {}
    with zipfile.ZipFile(files["gzip.zip"]) as archive:
        for split in ("train", "test"):
            for key, kind in (("x", "images-idx3"), ("y", "labels-idx1")):
                member = f"gzip/emnist-byclass-{split}-{kind}-ubyte.gz"
                with archive.open(member) as packed, gzip.open(packed) as stream:
                    arrays[f"{key}_{split}"] = _idx(stream)
            # EMNIST stores its images column by column; turned, they stand upright like those of MNIST.
            arrays[f"x_{split}"] = np.ascontiguousarray(arrays[f"x_{split}"].transpose(0, 2, 1))
    return _with_long_labels(arrays)


def _idx(stream: IO[bytes] | gzip.GzipFile) -> NDArray[np.uint8]:
    """An IDX file of bytes: 0, 0, 8, the number of axes, their lengths (big endian), the values."""
    zero, kind, axes = struct.unpack(">HBB", stream.read(4))
    if (zero, kind) != (0, 8):
        raise ValueError("not an IDX file of unsigned bytes")
    shape = struct.unpack(f">{axes}I", stream.read(4 * axes))
    return np.frombuffer(stream.read(), np.uint8).reshape(shape)


def _with_long_labels(arrays: Arrays) -> Arrays:
    return {key: array.astype(np.int64) if key.startswith("y_") else array for key, array in arrays.items()}


# --- the data sets --------------------------------------------------------------------------------


def _idx_files(md5_by_name: Mapping[str, str], *homes: str) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, tuple(home + name for home in homes), md5) for name, md5 in md5_by_name.items())


_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/"

_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"

_CIFAR100_CLASSES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
    dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
    leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
    otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
    road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
    wardrobe whale willow_tree wolf woman worm
"""

_FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

for _known in (
    DatasetSource(
        name="digits",
        title="Optical Recognition of Handwritten Digits (UCI), as in scikit-learn; in the package",
        shape=(8, 8),
        class_names=tuple(string.digits),
        train=1437,
        test=360,
    ),
    DatasetSource(
        name="cifar10",
        title="CIFAR-10",
        shape=(32, 32, 3),
        class_names=tuple(_CIFAR10_CLASSES.split()),
        train=50_000,
        test=10_000,
        files=(
            RemoteFile(
                "cifar-10-binary.tar.gz",
                (_CIFAR_HOME + "cifar-10-binary.tar.gz",),
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        convert=_cifar10,
    ),
    DatasetSource(
        name="cifar100",
        title="CIFAR-100, the 100 fine classes",
        shape=(32, 32, 3),
        class_names=tuple(_CIFAR100_CLASSES.split()),
        train=50_000,
        test=10_000,
        files=(
            RemoteFile(
                "cifar-100-binary.tar.gz",
                (_CIFAR_HOME + "cifar-100-binary.tar.gz",),
                "03b5dce01913d631647c71ecec9e9cb8",
            ),
        ),
        convert=_cifar100,
    ),
    DatasetSource(
        name="mnist",
        title="MNIST",
        shape=(28, 28),
        class_names=tuple(string.digits),
        train=60_000,
        test=10_000,
        files=_idx_files(
            {
                "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
                "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
                "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
                "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
            },
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        convert=_mnist,
    ),
    DatasetSource(
        name="fashion_mnist",
        title="Fashion-MNIST",
        shape=(28, 28),
        class_names=_FASHION_CLASSES,
        train=60_000,
        test=10_000,
        files=_idx_files(
            {
                "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
                "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
                "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
            },
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
        ),
        convert=_mnist,
    ),
    DatasetSource(
        name="emnist",
        title="EMNIST By Class (digits, capital and small letters)",
        shape=(28, 28),
        class_names=tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase),
        train=697_932,
        test=116_323,
        files=(
            RemoteFile(
                "gzip.zip",
                (
                    "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
                    "https://www.itl.nist.gov/iaui/vip/cs_links/EMNIST/gzip.zip",
                ),
                "58c8d27c78d21e728a6bc7b3cc06412e",
            ),
        ),
        convert=_emnist,
    ),
    DatasetSource(
        name="fcon1000_brain_age",
        title="Brain age from MRI measures, 1000 Functional Connectomes Project (23 sites)",
        shape=(218,),
        class_names=(),
        train=860,
        test=218,
        task="regression",
        read=tables.fcon1000_brain_age,
        origin="data/fcon1000.csv of github.com/predictive-clinical-neuroscience/PCNtoolkit-demo, unchanged",
    ),
    DatasetSource(
        name="ixi_brain_age",
        title="Brain age from cortical thickness, IXI (3 hospitals)",
        shape=(70,),
        class_names=(),
        train=444,
        test=112,
        task="regression",
        read=tables.ixi_brain_age,
        origin="IXI_aparc_thickness.csv of that PCNtoolkit-demo, with IXI.xls of brain-development.org",
    ),
    DatasetSource(
        name="heart_disease",
        title="Heart Disease (UCI; 4 hospitals)",
        shape=(22,),
        class_names=("no disease", "disease"),
        train=736,
        test=184,
        read=tables.heart_disease,
        origin="the four processed.*.data of UCI (doi 10.24432/C52P4X) with a column hospital in front",
    ),
    DatasetSource(
        name="brain_phantoms",
        title="Synthetic 3D brain phantoms with ages; made from a seed",
        shape=(1, 24, 24, 24),
        class_names=(),
        train=800,
        test=200,
        task="regression",
        generate=volumes.phantom_dataset,
    ),
):
    DATASETS.add(_known.name, _known)

for _name, _set in medmnist.SETS.items():
    DATASETS.add(
        _name,
        DatasetSource(
            name=_name,
            title=_set.title,
            shape=(28, 28) if _set.channels == 1 else (28, 28, _set.channels),
            class_names=_set.class_names,
            train=_set.train,
            test=_set.test,
            files=(RemoteFile(f"{_name}.npz", (medmnist.ADDRESS.format(_name),), _set.md5),),
            convert=_medmnist,
        ),
    )
