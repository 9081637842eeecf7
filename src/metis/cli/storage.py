"""`metis storage`: models that are sealed on disk, opened again or sealed with another key."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from metis.cli.output import add, deployed, say
from metis.errors import ConfigError, LockHeld
from metis.text import plural

KeyOption = Annotated[
    str | None,
    typer.Option(
        "--storage-key",
        metavar="SOURCE",
        help="Seal models on disk with the key that file:PATH, env:NAME or command:COMMAND gives.",
    ),
]
_Key = Annotated[
    str, typer.Option("--storage-key", metavar="SOURCE", help="The key: file:PATH, env:NAME or command:COMMAND.")
]


def choose(source: str | None, folder: Path) -> None:
    """Keep the models of this folder as the option --storage-key says; refuse one in which they are kept otherwise."""
    storage = deployed("metis.deployment.storage")
    if source is not None:
        storage.choose(_sealed(storage, source))
    storage.storage().check_folder(folder)


def _sealed(storage: Any, source: str) -> Any:
    return storage.SealedStorage(storage.key_of(source))


def register(app: typer.Typer) -> None:
    group = typer.Typer(
        no_args_is_help=True, help="Models that are sealed on disk (--storage-key of controller and learner)."
    )
    add(group, open_, "metis storage open state/run/community.safetensors.sealed --storage-key file:key", name="open")
    add(group, rotate, "metis storage rotate state --storage-key file:key --new-key file:new-key")
    app.add_typer(group, name="storage")


def open_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A sealed file, such as community.safetensors.sealed.")],
    storage_key: _Key,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="What to write; by default without .sealed.")
    ] = None,
) -> None:
    """Write a sealed file in the clear."""
    target = out if out is not None else file.with_suffix("")
    if not file.is_file():
        raise ConfigError(f"there is no file {file}")
    if target == file or (out is None and file.suffix != ".sealed"):
        raise ConfigError(f"say with --out where {file} is to be written in the clear")
    storage = deployed("metis.deployment.storage")
    storage.choose(_sealed(storage, storage_key))
    target.write_bytes(storage.read_file(file))
    say(f"written to {target}")


def rotate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="State folder or work folder; nobody may use it.")],
    storage_key: _Key,
    new_key: Annotated[str, typer.Option("--new-key", metavar="SOURCE", help="The key from now on.")],
) -> None:
    """Seal everything in a folder with another key; if it is interrupted, repeat it."""
    from metis.files import locked  # which takes longer to import than the help to show

    storage = deployed("metis.deployment.storage")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}")
    try:
        with locked(folder / "LOCK"):
            changed = storage.rotate(folder, _sealed(storage, storage_key), _sealed(storage, new_key))
    except LockHeld as held:
        raise ConfigError(f"{folder} is in use by {held.holder or 'another process'}; stop it first") from None
    say(f"{plural(changed, 'file')} sealed with the new key")
