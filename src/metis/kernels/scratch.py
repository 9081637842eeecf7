"""Memory for large sums in files without a name, so that the system can write it out and drop it when it is short.

Such memory holds nothing that must survive: it goes with the process. Where the disk has no room for it, or the system
knows no such files, ordinary memory serves.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_LARGE = 1 << 24  # numbers; less memory is not worth the disk's time
_Number = TypeVar("_Number", bound=np.floating[Any])


class Scratch:
    """Large arrays in this folder, which must not be on a disk that is to hold no model in the clear."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def zeros(self, size: int, dtype: type[_Number]) -> NDArray[_Number] | None:
        """So many zeros; None if ordinary memory is to be used."""
        if size < _LARGE:
            return None
        length = size * np.dtype(dtype).itemsize
        try:
            with tempfile.TemporaryFile(dir=self._folder) as file:
                os.posix_fallocate(file.fileno(), 0, length)  # writing to a mapping without room would end the process
                return np.memmap(file, dtype, "r+", shape=(size,))
        except (AttributeError, OSError):  # another system, or a full disk
            return None


def release(pieces: Iterable[NDArray[Any]]) -> None:
    """Give back the memory of pieces that are in a file as well; reading them again gets them from there."""
    for piece in pieces:
        # Of a mapping that is shared with its file; a copy of one has none.
        mapped: mmap.mmap | None = getattr(piece, "_mmap", None)
        if mapped is not None and piece.size and hasattr(mmap, "MADV_DONTNEED"):
            begin = _address(piece) - _address(np.frombuffer(mapped, np.uint8, 1))
            page = begin // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, page, begin + piece.nbytes - page)


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
