"""Clients of other systems as sites: what a file or the command line names, and what Metis makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig
from metis.experiments.config.schema import TrainingConfig
from metis.flower.project import FlowerSource, parse_node_config, require_flower, with_settings
from metis.nvflare.source import NVFlareSource, require_nvflare, with_settings as with_settings_of_script

if TYPE_CHECKING:
    from metis.experiments.site import Site

# Layers that change how a learner steps, which a client of another system does by itself.
_UNUSED = {name: TrainingConfig.model_fields[name].default for name in ("solver", "learning_rate", "weight_decay")}
_OF_THE_SOLVER = ("proximal", "control_variates", "rate", "nova")


def is_bridge(path: Path | str) -> bool:
    """Whether this is not the path of a site file, but stands for a client of another system."""
    return FlowerSource.is_spec(path) or NVFlareSource.is_spec(path)


def _source(path: Path | str) -> FlowerSource | NVFlareSource:
    return FlowerSource.of(path) if FlowerSource.is_spec(path) else NVFlareSource.of(path)


def site_path(config: ExperimentConfig, local: Path | None = None) -> Path:
    """What `load_site` loads: the site's own file or client, else that of the federation's file."""
    site = config.site
    if local is not None and not is_bridge(local):
        return local
    if site is None:
        return local or Path()
    if local is None and site.file is not None:
        return Path(site.file)
    source: FlowerSource | NVFlareSource
    if local is not None:
        source = _source(local)
    else:
        source = FlowerSource(site.flower) if site.flower is not None else NVFlareSource(str(site.nvflare))
    names = [name for group in config.learners for name in group.learner_names]
    _check(config, source)
    start = config.training.initial_model
    if isinstance(source, NVFlareSource):
        return Path(with_settings_of_script(source, names, site.args, site.network, site.unit, start).spec)
    return Path(with_settings(source, names, site.node_config or {}, site.run_config or {}, site.unit, start).spec)


def flower_path(app: str, node_config: str | None, start: Path | None = None) -> Path:
    """What the command line says of a Flower app."""
    require_flower()
    place, colon, name = app.partition(":")
    path = Path(place).expanduser()
    if path.exists():
        app = f"{path.resolve()}{colon}{name}"
    pairs = {} if node_config is None else parse_node_config(node_config)
    if start is not None and not start.is_file():
        raise ConfigError(f"there is no file {start} with an initial model")
    whole = None if start is None else str(start.resolve())
    return Path(FlowerSource(app, node_config=tuple(pairs.items()), start=whole).spec)


def nvflare_path(script: Path, args: str | None) -> Path:
    """What the command line says of a script of NVFlare."""
    require_nvflare()
    if not script.is_file():
        raise ConfigError(f"there is no file {script} with a script of NVFlare")
    return Path(NVFlareSource(str(script.resolve()), args or "").spec)


def _check(config: ExperimentConfig, source: FlowerSource | NVFlareSource) -> None:
    for policy in config.policy:
        for key in _OF_THE_SOLVER:
            if key in policy.layers:
                raise ConfigError(
                    f"policy {policy.name}: {key} changes the steps of a learner, and {source.title} makes them itself"
                )
        if any(getattr(policy.training, name) not in (None, default) for name, default in _UNUSED.items()):
            raise ConfigError(
                f"training: solver, learning_rate and weight_decay are given, but {source.title} makes its steps "
                "itself; leave them out and set its own options"
            )
    if any(group.privacy is not None for group in config.learners):
        raise ConfigError(f"learners: privacy needs the gradients of each record, and {source.title} keeps them")


def site_table(path: Path) -> dict[str, str]:
    """The table [site] of a federation whose only site this is."""
    if not is_bridge(path):
        return {"file": str(path)}
    source = _source(path)
    return {"flower": source.app} if isinstance(source, FlowerSource) else {"nvflare": source.script}


def title_of(path: Path) -> str:
    """How messages and reports call it."""
    return _source(path).title if is_bridge(path) else path.name


def bridged_site(path: Path) -> Site:
    """The site that this stands for."""
    if NVFlareSource.is_spec(path):
        return _nvflare_site(path)
    from metis.experiments.site import Site
    from metis.flower.engine import FlowerEngine, client_of, examples_of_client

    spec = str(path)

    def evaluation_data(site: str) -> Any:
        examples = examples_of_client(spec, site, evaluation=True)
        return examples if len(examples) else None

    return Site(
        path=path,
        network=lambda: client_of(spec),
        training_data=lambda site: examples_of_client(spec, site),
        evaluation_data=evaluation_data,
        engine=FlowerEngine,
        measure=lambda site: tuple(client_of(spec).measured(site)[0]),
    )


def _nvflare_site(path: Path) -> Site:
    from metis.experiments.site import Site
    from metis.nvflare.engine import NVFlareEngine, client_of, examples_of_script, measured

    spec = str(path)

    def evaluation_data(site: str) -> Any:
        return examples_of_script(spec, site) if measured(spec, site) else None

    return Site(
        path=path,
        network=lambda: client_of(spec),
        training_data=lambda site: examples_of_script(spec, site),
        evaluation_data=evaluation_data,
        engine=NVFlareEngine,
        measure=lambda site: measured(spec, site),
    )
