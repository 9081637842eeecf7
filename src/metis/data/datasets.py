"""Data sets by name: one loader that looks in the user's folder, then in the cache, then downloads.

Images are kept as one plain npz file for each set (x_train, y_train, x_test, y_test), read without pickle; the
tables of several sites are CSV files (see tables.py). The small `digits` set comes with the package and the brain
phantoms are made from a seed, so that everything runs without a network.
"""

from __future__ import annotations

import os
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from metis.data import volumes
from metis.data.dataset import Dataset
from metis.data.medmnist import from_archive
from metis.data.sources import DATASETS, Arrays, DatasetSource, RemoteFile
from metis.errors import DataError
from metis.registry import did_you_mean

__all__ = [
    "DATASETS",
    "Dataset",
    "DatasetSource",
    "RemoteFile",
    "fetch_dataset",
    "find_dataset",
    "load_dataset",
]

_BUNDLED = Path(__file__).with_name("digits.npz")
_NO_POOCH = "the package 'pooch' is not installed"
_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    struct.error,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
)


# --- the interface --------------------------------------------------------------------------------


def load_dataset(
    name: str, folder: Path | str | None = None, *, download: bool = True, progress: bool = False, **options: Any
) -> Dataset:
    """Load a data set from `folder` (or else METIS_DATA), the cache, or its home page, in this order.

    A download goes to the cache; the user's folder is only read.

    - `name`: one that `metis data list` shows.
    - `folder`: where to look first.
    - `download`: whether to download what is not there.
    - `progress`: whether to show the download.
    - `options`: of some sets, which their source names.
    """
    source = _source(name)
    for option in options:
        if option not in source.options:
            known = f"its options are {', '.join(source.options)}" if source.options else "it has none"
            raise DataError(f"data set '{name}' has no option '{option}'; {known}")
    if source.generate is not None:
        return source.generate(**options)
    path = find_dataset(name, folder)
    if path is None:
        if not download or source.read is not None:
            raise DataError(f"data set '{name}' {_missing(name, folder)}; {_remedy(name)}")
        try:
            path = fetch_dataset(name, progress=progress)
        except DataError as error:
            # The same error, but it also names the folders that were searched before.
            reason = error.__cause__ if isinstance(error.__cause__, _DownloadFailed) else error
            raise DataError(
                f"data set '{name}' {_missing(name, folder)}, and could not be downloaded ({reason}); {_remedy(name)}"
            ) from error
    return _read(source, path) if source.read is None else source.read(path, **options)


def find_dataset(name: str, folder: Path | str | None = None) -> Path | None:
    """Where the file of a data set is (`folder` or else METIS_DATA, then the cache), or None.

    A set that comes with the package is always there; for one made from a seed it is the module that makes it.
    """
    source = _source(name)
    if source.bundled:
        return _BUNDLED if source.generate is None else Path(volumes.__file__)
    for candidate in (_user_folder(folder), _cache_folder()):
        if candidate is not None and (candidate / source.file).is_file():
            return candidate / source.file
    return None


def fetch_dataset(name: str, folder: Path | str | None = None, progress: bool = True) -> Path:
    """Download a data set into `folder` (or else the cache), check it, and convert it to one npz file.

    The file appears only when it is complete; a failed or interrupted download leaves nothing behind.
    """
    source = _source(name)
    present = find_dataset(name, folder) if source.bundled else None
    if present is not None:
        return present
    if source.read is not None:
        raise DataError(f"data set '{name}' cannot be downloaded; {_remedy(name)}")
    target = Path(folder).expanduser() if folder is not None else _cache_folder()
    if target is None:
        raise _failure(source, _DownloadFailed(_NO_POOCH))
    final = target / f"{name}.npz"
    is_new = not target.exists()
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Inside the target folder, so that the last step is a rename within one file system.
        with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=target) as scratch:
            files = {remote.name: _download(remote, Path(scratch), progress) for remote in source.files}
            partial = Path(scratch) / f"{name}.npz"
            arrays = _convert(source, files)
            np.savez(
                partial,
                x_train=arrays["x_train"],
                y_train=arrays["y_train"],
                x_test=arrays["x_test"],
                y_test=arrays["y_test"],
            )
            _read(source, partial)
            partial.replace(final)
    except BaseException as error:
        if is_new:
            with suppress(OSError):
                target.rmdir()
        if isinstance(error, _DownloadFailed):
            raise _failure(source, error) from error
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise DataError(f"data set '{name}' could not be stored in {target}: {reason}") from error
        raise
    return final


# --- folders --------------------------------------------------------------------------------------


def _source(name: str) -> DatasetSource:
    if name not in DATASETS:
        raise DataError(f"there is no data set '{name}'; {did_you_mean(name.lower().replace('-', '_'), DATASETS)}")
    return DATASETS[name]


def _user_folder(folder: Path | str | None) -> Path | None:
    if folder is not None:
        return Path(folder).expanduser()
    named = os.environ.get("METIS_DATA", "")
    return Path(named).expanduser() if named else None


def _cache_folder() -> Path | None:
    try:
        import pooch
    except ImportError:
        return None
    return Path(pooch.os_cache("metis"))


def _missing(name: str, folder: Path | str | None) -> str:
    searched = _user_folder(folder)
    if searched is None:
        return "is not in the cache"
    if not searched.is_dir():
        return f"is not in the cache (there is no folder {searched} either)"
    return f"is not in {searched} nor in the cache"


def _remedy(name: str) -> str:
    source = DATASETS[name]
    origin = f"; it comes from {source.origin}" if source.origin else ""
    return f"put {source.file} in a folder and name that with METIS_DATA or data.folder{origin}"


# --- downloads ------------------------------------------------------------------------------------


class _DownloadFailed(Exception):
    """The reason, in a few words, why the original files could not be downloaded."""


def _failure(source: DatasetSource, reason: _DownloadFailed) -> DataError:
    return DataError(f"data set '{source.name}' could not be downloaded ({reason}); {_remedy(source.name)}")


def _download(remote: RemoteFile, folder: Path, progress: bool) -> Path:
    """Fetch one file from the first address that gives the right bytes."""
    try:
        import pooch
        import requests
    except ImportError as error:
        raise _DownloadFailed(_NO_POOCH) from error
    path = folder / remote.name
    reasons = []
    for url in remote.urls:
        host = urlsplit(url).hostname
        meter = _Meter(remote.name) if progress else False
        try:
            pooch.HTTPDownloader(progressbar=meter, chunk_size=1 << 16, timeout=30)(url, str(path), None)
        except requests.HTTPError as error:
            status = error.response.status_code if error.response is not None else "an error"
            reasons.append(f"{host} answered {status}")
            continue
        except requests.Timeout:
            reasons.append(f"{host} did not answer in time")
            continue
        except requests.ConnectionError:
            reasons.append(f"no connection to {host}")
            continue
        except requests.RequestException:
            reasons.append(f"the connection to {host} broke off")
            continue
        md5 = pooch.file_hash(str(path), alg="md5")
        if md5 == remote.md5:
            return path
        reasons.append(f"{remote.name} from {host} has the MD5 checksum {md5} and not {remote.md5}")
    raise _DownloadFailed(", ".join(reasons))


class _Meter:
    """One line on standard error that shows how far a download is; pooch calls it like a tqdm bar."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.done, self.shown = name, 0, 0, -1

    def update(self, size: int) -> None:
        self.done += size
        percent = min(100, 100 * self.done // self.total) if self.total else 0
        if percent != self.shown and sys.stderr.isatty():
            self.shown = percent
            sys.stderr.write(f"\r{self.name}  {percent} % of {self.total / 1e6:.0f} MB ")
            sys.stderr.flush()

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        start = "\r" if sys.stderr.isatty() else ""
        sys.stderr.write(f"{start}{self.name}  {self.done / 1e6:.1f} MB downloaded\n")


# --- formats --------------------------------------------------------------------------------------


def _convert(source: DatasetSource, files: Mapping[str, Path]) -> Arrays:
    assert source.convert is not None
    try:
        return source.convert(files)
    except _DAMAGE as error:
        raise DataError(f"data set '{source.name}' was downloaded but could not be read: {error}") from error


def _read(source: DatasetSource, path: Path) -> Dataset:
    """The arrays of an npz file, checked; a part of a set is accepted and noted."""
    try:
        # Opened here, because numpy leaves a file that turns out not to be an archive open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            arrays = from_archive(stored) if "train_images" in stored else {key: stored[key] for key in _ARRAYS}
    except KeyError as error:
        raise DataError(f"{path} is not a data set: it needs the arrays {', '.join(_ARRAYS)}") from error
    except (*_DAMAGE, TypeError) as error:  # TypeError: a single array, which is not an archive
        if isinstance(error, OSError) and error.strerror:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        raise DataError(
            f"{path} is damaged or not an npz file with the arrays {', '.join(_ARRAYS)}; "
            "put the right file there, or move this one away to have it downloaded"
        ) from error
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or x.shape[1:] != source.shape:
            raise DataError(
                f"{path}: x_{split} has the shape {x.shape} and dtype {x.dtype}; "
                f"'{source.name}' needs {('n', *source.shape)} of uint8".replace("'n'", "n")
            )
        if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
            raise DataError(
                f"{path}: y_{split} must hold one whole number for each example, not {y.shape} of {y.dtype}"
            )
        if len(y) and not 0 <= y.min() <= y.max() < len(source.class_names):
            raise DataError(
                f"{path}: y_{split} has labels from {y.min()} to {y.max()}; "
                f"'{source.name}' has 0 to {len(source.class_names) - 1}"
            )
        arrays[f"y_{split}"] = y.astype(np.int64)
    train, test = len(arrays["y_train"]), len(arrays["y_test"])
    note = ""
    if (train, test) != (source.train, source.test):
        note = f"{train:,} of {source.train:,} training and {test:,} of {source.test:,} test examples"
    return Dataset(source.name, **arrays, class_names=source.class_names, note=note)
