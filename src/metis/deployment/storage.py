"""How models are kept on disk: as they are, or sealed with a key, so that a stolen disk holds none of them.

A sealed file is a header (magic, key identity, 16 random bytes) and chunks of up to 64 KiB, each as nonce, ciphertext
and tag of AES-256-GCM under a key of this file alone: HKDF-SHA256(key, the random bytes). What is authenticated beside
the content is the number of the chunk and whether it is the last, so that chunks cannot be exchanged, moved, left out
or cut off; and any part of a file can be read without the rest. Nonces are drawn, because a resumed file may get
another chunk in the place of one that was cut off. A file without a last chunk is unfinished: it can be resumed,
and only that.

A process chooses its storage once, at its start: where files lie must not depend on what is in them.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from metis.errors import ConfigError, DataError, StateError
from metis.files import durable_file, replacing, sync
from metis.system import disk, random_bytes

if TYPE_CHECKING:
    import numpy as np
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from numpy.typing import NDArray

    from metis.core.model import Model

CHUNK = 1 << 16  # bytes of content
_MAGIC, _VERSION = b"METISEAL", b"\x01"
_NONCE, _TAG, _SALT, _IDENTITY = 12, 16, 16, 8
_HEADER = len(_MAGIC) + len(_VERSION) + _IDENTITY + _SALT
_SEALED = _NONCE + CHUNK + _TAG
_CHUNKS_AT_ONCE = 8
_AT_ONCE = 1 << 20  # bytes in one call; for more the system takes larger pages, which it may have given away
_CHANGED = "a sealed model was damaged, changed or cut off after it was written; restore it from a copy"
VARIABLE = "METIS_STORAGE_KEY"
MARK = "SEALED"  # in a folder whose models are sealed: the identity of the key


class Digest(Protocol):
    """What gets all bytes of a model, and then tells them from others."""

    def update(self, data: bytes | memoryview, /) -> object: ...

    def digest(self) -> bytes: ...


class Writer(Protocol):
    """Appends content to an open file."""

    def resume(self, limit: int) -> Iterator[bytes]:
        """What the file has already, at most so much; the rest of it is cut off when all was taken."""

    def write(self, data: memoryview) -> None:
        """All of it, or an OSError."""

    def finish(self) -> None:
        """There is no more."""


class Storage:
    """Files as they are."""

    sealed = False

    def size(self, path: Path) -> int:
        """Bytes of content of a file."""
        return path.stat().st_size

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        """Content of an open file; fewer bytes only at its end."""
        return disk().pread(descriptor, count, offset)

    def read_cached(self, descriptor: int, buffer: memoryview, offset: int) -> bool:
        """Fill the buffer with content that is in memory already; False if it takes a thread."""
        return disk().pread_cached(descriptor, buffer, offset)

    def writer(self, file: BinaryIO) -> Writer:
        """Appends to this file, which is opened without a buffer to read and write."""
        return _PlainWriter(file)

    def save_arrays(self, path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
        from metis.runs.storage import save_arrays

        save_arrays(path, arrays, metadata)

    def load_arrays(self, path: Path, *, mapped: bool = False) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        from metis.runs.storage import load_arrays

        return load_arrays(path, mapped=mapped)

    def named(self, path: Path) -> Path:
        """What a file for other programs is called, which cannot read it if it is sealed."""
        return path

    def save_model(self, path: Path, model: Model, metadata: Mapping[str, str]) -> None:
        """Write a model for other programs, to `named(path)`."""
        from metis.runs.storage import save_model

        save_model(path, model, metadata)

    def check_folder(self, folder: Path) -> None:
        """Refuse a folder whose models are kept otherwise."""
        if (folder / MARK).exists():
            raise StateError(f"the models in {folder} are sealed; give their key with --storage-key")

    @property
    def environment(self) -> dict[str, str] | None:
        """Of a child process that reads and writes the same files; None: that of this process."""
        return None


class _PlainWriter:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def resume(self, limit: int) -> Iterator[bytes]:
        descriptor, done = self._file.fileno(), 0
        length = min(limit, os.fstat(descriptor).st_size) & ~3  # it may have been cut anywhere
        try:
            while done < length:
                piece = disk().pread(descriptor, min(_AT_ONCE, length - done), done)
                done += len(piece)
                yield piece
        except OSError:
            pass  # a bad sector: it is received again from there on
        self._file.truncate(done)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data[:_AT_ONCE]) :]

    def finish(self) -> None:
        pass


class SealedStorage(Storage):
    """Files sealed with this key."""

    sealed = True

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.identity = hmac.digest(key, b"metis storage key identity", "sha256")[:_IDENTITY]

    def size(self, path: Path) -> int:
        body = max(0, path.stat().st_size - _HEADER)
        return max(0, body - -(-body // _SEALED) * (_NONCE + _TAG))

    def read(self, descriptor: int, count: int, offset: int) -> bytes:
        body = os.fstat(descriptor).st_size - _HEADER
        chunks = -(-body // _SEALED)
        cipher = self._opened(descriptor)
        if body - (chunks - 1) * _SEALED < _NONCE + _TAG:  # a whole file ends with a chunk, which may be empty
            raise DataError(_CHANGED)
        first, last = offset // CHUNK, min(-(-(offset + count) // CHUNK), chunks)
        if first >= last:
            return b""
        content = b"".join(self._chunks(descriptor, cipher, range(first, last), chunks))
        begin = offset - first * CHUNK
        return content[begin : begin + count]

    def read_cached(self, descriptor: int, buffer: memoryview, offset: int) -> bool:
        return False

    def _chunks(self, descriptor: int, cipher: AESGCM, numbers: range, chunks: int) -> Iterator[bytes]:
        """The content of some chunks; a few are read at a time, into memory that stays in the cache."""
        for at in range(0, len(numbers), _CHUNKS_AT_ONCE):
            group = numbers[at : at + _CHUNKS_AT_ONCE]
            raw = memoryview(self._raw(descriptor, len(group) * _SEALED, _HEADER + group[0] * _SEALED))
            for place, number in enumerate(group):
                piece = raw[place * _SEALED : (place + 1) * _SEALED]
                yield self._open_chunk(cipher, piece, number, number == chunks - 1)

    @staticmethod
    def _raw(descriptor: int, count: int, offset: int) -> bytes:
        pieces = []
        while count and (piece := disk().pread(descriptor, count, offset)):
            pieces.append(piece)
            count, offset = count - len(piece), offset + len(piece)
        return b"".join(pieces)

    def _opened(self, descriptor: int) -> AESGCM:
        header = self._raw(descriptor, _HEADER, 0)
        if len(header) < _HEADER or not header.startswith(_MAGIC + _VERSION):
            raise DataError("a model is not sealed, or its file is cut off; restore it from a copy")
        if header[len(_MAGIC) + len(_VERSION) :][:_IDENTITY] != self.identity:
            raise DataError("a model is sealed with another key than the one that was given with --storage-key")
        return self.cipher(header[-_SALT:])

    @staticmethod
    def _open_chunk(cipher: AESGCM, raw: memoryview, number: int, last: bool) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            return cipher.decrypt(bytes(raw[:_NONCE]), bytes(raw[_NONCE:]), _place(number, last))
        except (InvalidTag, ValueError) as problem:  # ValueError: shorter than a nonce and a tag
            raise DataError(_CHANGED) from problem

    def cipher(self, salt: bytes) -> AESGCM:
        """Of one file."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        return AESGCM(HKDF(SHA256(), 32, salt, b"metis sealed model").derive(self.key))

    def writer(self, file: BinaryIO) -> Writer:
        return _SealedWriter(self, file)

    def save_arrays(self, path: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> None:
        from safetensors.numpy import save

        with replacing(path) as new:
            self.write_file(new, save(dict(arrays), dict(metadata)))

    def load_arrays(self, path: Path, *, mapped: bool = False) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
        from safetensors.numpy import load

        content = read_file(path)
        length = int.from_bytes(content[:8], "little")
        return load(content), dict(json.loads(content[8 : 8 + length]).get("__metadata__", {}))

    def named(self, path: Path) -> Path:
        return path.with_name(f"{path.name}.sealed")

    def save_model(self, path: Path, model: Model, metadata: Mapping[str, str]) -> None:
        from metis.runs.storage import model_arrays

        path.parent.mkdir(parents=True, exist_ok=True)
        self.save_arrays(self.named(path), *model_arrays(model, metadata))

    def write_file(self, path: Path, content: bytes) -> None:
        """A whole file."""
        with path.open("w+b", buffering=0) as file:
            writer = self.writer(file)
            writer.write(memoryview(content))
            writer.finish()

    def check_folder(self, folder: Path) -> None:
        mark = folder / MARK
        if mark.exists():
            if mark.read_text("ascii", "replace").strip() != self.identity.hex():
                raise StateError(f"the models in {folder} are sealed with another key than the one that was given")
            return
        if folder.is_dir() and any((folder / name).exists() for name in ("controller.db", "membership.json")):
            raise StateError(f"the models in {folder} are not sealed, because it was begun without --storage-key")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.mark(folder)

    def mark(self, folder: Path) -> None:
        """From now on the models of this folder are sealed with this key."""
        with durable_file(folder / MARK) as file:
            file.write(f"{self.identity.hex()}\n".encode())
        sync(folder)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, VARIABLE: self.key.hex()}


class _SealedWriter:
    """The last chunk is kept back until there is more, or no more: only then it is known whether it is the last."""

    def __init__(self, storage: SealedStorage, file: BinaryIO) -> None:
        self._storage, self._file = storage, file
        self._cipher: AESGCM | None = None
        self._pending = bytearray()
        self._number = 0

    def resume(self, limit: int) -> Iterator[bytes]:
        descriptor, done = self._file.fileno(), 0
        try:
            self._cipher = self._storage._opened(descriptor)
            while done + CHUNK <= limit:
                raw = self._storage._raw(descriptor, _SEALED, _HEADER + self._number * _SEALED)
                piece = self._storage._open_chunk(self._cipher, memoryview(raw), self._number, False)
                done, self._number = done + len(piece), self._number + 1
                yield piece
        except (OSError, DataError):
            pass  # cut off, damaged or of another key: it is received again from there on
        self._file.truncate(0 if self._cipher is None else _HEADER + self._number * _SEALED)

    def write(self, data: memoryview) -> None:
        sealed = bytearray()
        while len(self._pending) + len(data) > CHUNK:
            taken = CHUNK - len(self._pending)
            sealed += self._seal(bytes(self._pending) + bytes(data[:taken]), last=False)
            self._pending.clear()
            data = data[taken:]
            if len(sealed) >= _AT_ONCE:
                self._put(sealed)
                sealed = bytearray()
        self._put(sealed)
        self._pending += data

    def finish(self) -> None:
        self._put(self._seal(bytes(self._pending), last=True))
        self._pending.clear()

    def _seal(self, content: bytes, *, last: bool) -> bytes:
        if self._cipher is None:
            salt = random_bytes(_SALT)
            self._cipher = self._storage.cipher(salt)
            self._put(_MAGIC + _VERSION + self._storage.identity + salt)
        nonce = random_bytes(_NONCE)
        number, self._number = self._number, self._number + 1
        return nonce + self._cipher.encrypt(nonce, content, _place(number, last))

    def _put(self, data: bytes | bytearray) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def _place(number: int, last: bool) -> bytes:
    return number.to_bytes(8, "big") + bytes([last])


_chosen: Storage = Storage()


def storage() -> Storage:
    """That of this process."""
    return _chosen


def choose(chosen: Storage) -> None:
    """Keep models like this in this process from now on."""
    global _chosen  # noqa: PLW0603  # threads of any kind read and write the files of a process
    _chosen = chosen


def read_file(path: Path, offset: int = 0, count: int | None = None) -> bytes:
    """Content of a file, all of it from the offset on unless it says how much."""
    descriptor = disk().open(path, os.O_RDONLY)
    try:
        wanted = storage().size(path) - offset if count is None else count
        return storage().read(descriptor, wanted, offset)
    except DataError as problem:
        raise DataError(f"{path}: {problem}") from problem
    finally:
        disk().close(descriptor)


def map_file(path: Path, count: int) -> NDArray[np.uint8]:
    """The first bytes of a file, mapped, so that memory need not hold them; read if they are sealed."""
    import numpy as np  # a state folder can be looked at without it

    if (found := storage().size(path)) < count:
        raise DataError(f"{path} has {found} bytes, not {count}")
    if storage().sealed or not count:
        return np.frombuffer(read_file(path, count=count), np.uint8)
    return np.memmap(path, np.uint8, mode="r", shape=(count,))


def file_sha256(path: Path) -> str:
    """Of the content; a DataError if it is sealed and damaged."""
    return file_digest(path, hashlib.sha256()).hex()


def file_digest(path: Path, digest: Digest) -> bytes:
    """What this digest says of the content; a DataError if it is sealed and damaged."""
    descriptor = disk().open(path, os.O_RDONLY)
    try:
        offset = 0
        while piece := storage().read(descriptor, _AT_ONCE, offset):
            digest.update(piece)
            offset += len(piece)
        return digest.digest()
    finally:
        disk().close(descriptor)


def key_of(source: str) -> bytes:
    """The key that `file:PATH`, `env:NAME` or `command:COMMAND` gives: 32 bytes in hexadecimal digits or base64."""
    kind, _, where = source.partition(":")
    try:
        if kind == "file" and where:
            text = Path(where).read_text("ascii")
        elif kind == "env" and where:
            text = os.environ[where]
        elif kind == "command" and where:
            done = subprocess.run(shlex.split(where), check=True, capture_output=True, timeout=60)
            text = done.stdout.decode("ascii")
        else:
            raise ConfigError(f"--storage-key is '{kind[:40]}...'; it must be file:PATH, env:NAME or command:COMMAND")
    except KeyError:
        raise ConfigError(f"--storage-key: the environment variable {where} is not set") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--storage-key: {kind}:{where} does not give text") from None
    except (OSError, ValueError) as problem:
        raise ConfigError(f"--storage-key: {kind}:{where} cannot be read: {problem}") from None
    except subprocess.SubprocessError as problem:
        how = f"ended with code {problem.returncode}" if isinstance(problem, subprocess.CalledProcessError) else "hangs"
        raise ConfigError(f"--storage-key: the command {where} {how}") from None
    return _key(text.strip(), f"{kind}:{where}")


def _key(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text) if len(text) == 64 else base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(
            f"--storage-key: {where} does not give a key of 32 bytes in hexadecimal digits or base64; make one with "
            "openssl rand -hex 32"
        )
    return key


def choose_from_environment() -> None:
    """In a child process: the storage of its parent."""
    if VARIABLE in os.environ:
        choose(SealedStorage(bytes.fromhex(os.environ[VARIABLE])))


def rotate(folder: Path, old: SealedStorage, new: SealedStorage) -> int:
    """Seal every model of a folder that nobody uses with another key; returns how many. It can be repeated."""
    mark = (folder / MARK).read_text("ascii", "replace").strip() if (folder / MARK).exists() else ""
    if mark not in (old.identity.hex(), new.identity.hex()):
        raise StateError(f"the models in {folder} are not sealed with the old key")
    changed, before = 0, storage()
    try:
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            with path.open("rb") as file:
                header = file.read(_HEADER)
            if not header.startswith(_MAGIC) or header[len(_MAGIC) + len(_VERSION) :][:_IDENTITY] == new.identity:
                continue
            if path.name.startswith(("partial.", "tmp.")) or path.suffix in (".part", ".new"):
                path.unlink()  # unfinished: it is sent again
                continue
            choose(old)
            content = read_file(path)
            with replacing(path) as fresh:
                new.write_file(fresh, content)
                sync(fresh)
            changed += 1
        new.mark(folder)
    finally:
        choose(before)
    return changed
