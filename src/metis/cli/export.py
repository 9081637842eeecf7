"""`metis export`: the community model of a finished run in the form of other tools, with a model card."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from metis.cli.output import add, say
from metis.cli.report import run_folders
from metis.errors import ConfigError

if TYPE_CHECKING:
    from metis.core.model import Model
    from metis.experiments.config.load import ExperimentConfig
    from metis.runs.run import Run

CARD = "README.md"
_TAG = "\n- metis\n"  # in the head of every card that an export writes
_WRITTEN = (
    CARD,
    *("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json"),
    *("adapter_config.json", "adapter_model*.safetensors"),  # of peft
    "model.onnx", "model.onnx.data",
    *("MLmodel", "conda.yaml", "python_env.yaml", "requirements.txt"),
    "????????-????-????-????-????????????*",  # MLflow calls a large model's tensors like this
)  # fmt: skip


class Format(str, Enum):
    huggingface = "huggingface"
    onnx = "onnx"
    mlflow = "mlflow"


_USES = {
    Format.huggingface: """
from safetensors.torch import load_file

network.load_state_dict(load_file("model.safetensors"))  # the network that was trained
""",
    Format.onnx: """
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {inputs})[0]
""",
    Format.mlflow: """
import mlflow

model = mlflow.pyfunc.load_model(".")  # the folder of this file
outputs = model.predict({inputs})
""",
}


def register(app: typer.Typer) -> None:
    add(
        app,
        export,
        "metis export runs/first --to onnx",
        "metis export state --to mlflow --site site.py --best",
    )


def export(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or of a controller's state.")
    ],
    to: Annotated[Format, typer.Option("--to", help="What to write.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="New folder; by default RUN/FORMAT.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="The best model instead of the last.")] = False,
    site: Annotated[
        Path | None,
        typer.Option("--site", metavar="FILE", help="Site file with the network and an example, if it is not where the "
                     "run found it."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model in its card.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:  # fmt: skip
    """Write the community model for other tools, with a model card.

    huggingface: model.safetensors and config.json; a network of transformers is saved as its library does it. onnx: a
    network that needs no Python. mlflow: a model with a signature. Each with README.md, the model card.
    """
    from metis.experiments.trained import run_config
    from metis.runs.run import Run

    runs = run_folders(folder)
    if len(runs) != 1:
        names = ", ".join(str(path) for path in runs)
        raise ConfigError(f"{folder} has {len(runs)} runs; export one of them: {names}")
    if site is not None and not site.is_file():
        raise ConfigError(f"there is no site file {site}")
    run = Run.load(runs[0])
    model = run.best_model if best else run.community_model
    if model is None:
        raise ConfigError(f"{runs[0]} has no best model, because nothing was measured; leave --best out")
    target = out or folder / to.value
    _check_target(target, runs[0], folder / to.value, force)
    config = run_config(runs[0])
    title = name or f"{run.setting.facts.get('network', 'network')}, {run.setting.label}"
    place = target.resolve()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".export-") as text:
        made = Path(text) / "model"
        note, inputs = _written(to, made, config, model, run, site)
        from metis.reporting.card import model_card

        use = _USES[to].replace("{inputs}", inputs)
        document = None if config is None else config.model_dump(exclude_none=True)
        (made / CARD).write_text(model_card(run, title, document, "best" if best else "final", use), "utf-8")
        with _aside(place, Path(text) / "earlier"):
            made.rename(place)
    say(f"written to {target}: {note}")


def _check_target(target: Path, run: Path, default: Path, force: bool) -> None:
    """Refuse a folder that has anything but an earlier export, or that an export would mix with a run."""
    from metis.cli.running import holds_run

    place = target.resolve()
    if run.resolve().is_relative_to(place) or (place.is_dir() and holds_run(place)):
        raise ConfigError(f"{target} has a run in it; choose another --out")
    above = next((path for path in place.parents if holds_run(path)), None)
    if above is not None and place != default.resolve():
        raise ConfigError(f"{target} is inside {above}, which has a run; choose an --out elsewhere")
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file; choose another --out")
    if not force:
        raise ConfigError(f"{target} exists already; give --force to replace an earlier export, or another --out")
    names = sorted(path.name for path in target.iterdir())
    foreign = [name for name in names if not _is_written(target / name)]
    if not foreign and names and not _has_card(target):
        foreign = names
    if foreign:
        raise ConfigError(
            f"{target} contains {foreign[0]}, which no export of Metis wrote; remove it, or choose another --out"
        )


def _is_written(path: Path) -> bool:
    """Whether an export may have written this, by its name; an export has no folders, and no links."""
    return path.is_file() and not path.is_symlink() and any(fnmatch(path.name, name) for name in _WRITTEN)


def _has_card(folder: Path) -> bool:
    try:
        return _TAG in (folder / CARD).read_text("utf-8")
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def _aside(folder: Path, earlier: Path) -> Iterator[None]:
    """Move a folder out of the way during the block; if the block fails, it is put back."""
    there = folder.exists()
    if there:
        folder.rename(earlier)
    try:
        yield
    except BaseException:
        if there:
            earlier.rename(folder)
        raise


def _written(
    to: Format, made: Path, config: ExperimentConfig | None, model: Model, run: Run, site: Path | None
) -> tuple[str, str]:
    """A sentence about what was written, and the inputs as the card shows them."""
    from metis.experiments.trained import trained_network

    if to is Format.huggingface:
        made.mkdir()
        return _huggingface(made, config, model, run, site), ""
    if config is None:
        raise ConfigError(f"{run.folder} has no config.toml that names the network; use --to huggingface")
    from metis.learning.torch.export import export_onnx

    module, batch = trained_network(config, model, site)
    file = made.parent / "model.onnx"
    exported = export_onnx(module, batch, file)
    shown = ", ".join(f'"{name}": {name}' for name in exported.inputs)
    checked = "not compared, because onnxruntime is not installed"
    if exported.difference is not None:
        checked = f"outputs of both differ by at most {exported.difference:.2g}"
    if to is Format.onnx:
        made.mkdir()
        file.rename(made / file.name)
        return f"model.onnx ({checked})", f"{{{shown}}}"
    from metis.reporting.mlflow_model import save_mlflow

    facts = {
        "policy": run.setting.label,
        "sites": len(run.setting.learners),
        "rounds": run.rounds,
        "metis": "federated",
    }
    save_mlflow(file, made, exported.inputs, exported.outputs, facts)
    return f"an MLflow model ({checked})", f"{{{shown}}}"


def _huggingface(made: Path, config: ExperimentConfig | None, model: Model, run: Run, site: Path | None) -> str:
    from metis.runs.storage import save_arrays

    module = _pretrained(config, model, site)
    if module is not None:
        module.save_pretrained(made)
        return f"a model of transformers, {type(module).__name__}.from_pretrained('{made.name}') loads it"
    save_arrays(made / "model.safetensors", model.network.tensors(), {"format": "pt"})
    facts: dict[str, Any] = {
        "library_name": "metis",
        "network": run.setting.facts.get("network"),
        "tensors": {spec.name: list(spec.shape) for spec in model.network.layout.tensors},
    }
    (made / "config.json").write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    return "model.safetensors and config.json"


def _pretrained(config: ExperimentConfig | None, model: Model, site: Path | None) -> Any:
    """The network, if it is one of transformers or peft, which know their own layout."""
    from metis.experiments.trained import trained_network

    if config is None or (config.site is None and site is None):
        return None
    if config.site is not None and config.site.file is None and site is None:
        return None
    try:
        module, _ = trained_network(config, model, site)
    except ConfigError:
        if site is not None:
            raise
        return None
    return module if hasattr(module, "save_pretrained") else None
