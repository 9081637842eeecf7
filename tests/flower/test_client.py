"""An unchanged ClientApp as a site: simulated, trained by the step or by the call, legacy and not."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from metis.core.events import Budget, TaskFailed, UpdateRequest
from metis.core.model import Model
from metis.core.solvers import VanillaSGD
from metis.errors import ClientFailed, ConfigError
from metis.experiments.bridges import flower_path, site_path
from metis.experiments.build import build_federation, build_policies
from metis.experiments.config.load import ExperimentConfig, resolve_config
from metis.experiments.silo import build_silo
from metis.flower.engine import FlowerClient, FlowerEngine, client_of, examples_of_client
from metis.flower.project import FlowerSource, load_project, parse_node_config
from metis.learning.engine import Allotted, EngineJob
from metis.learning.torch.foreign import bounded, seeded
from metis.runs.run import Run

pytest.importorskip("flwr")

PROJECT = Path(__file__).parent / "project"
TINY = str(PROJECT)


def federation_file(**changes: Any) -> ExperimentConfig:
    tables = {
        "site": {"flower": TINY},
        "learners": [{"name": "site", "count": 2, "time_per_batch": 0.1}],
        "policy": {"name": "sync_fedavg", "local_epochs": 1},
        "stop": {"rounds": 2},
        **changes,
    }
    return resolve_config(tables, "test")


def simulated(config: ExperimentConfig, **options: Any) -> Run:
    federation = build_federation(config)
    (policy, _), *_ = build_policies(config)
    return federation.simulate(policy, rounds=config.stop.rounds, **options)


def engine_of(app: str, **settings: Any) -> tuple[FlowerEngine, str]:
    source = FlowerSource(app, learners=("a", "b"), **settings)
    return FlowerEngine(EngineJob(network=lambda: client_of(source.spec))), source.spec


def trained(engine: FlowerEngine, spec: str, steps: int, memory: Any = None) -> Any:
    examples = examples_of_client(spec, "a")
    turns = Allotted(iter([examples.batch(np.arange(1))] * steps), Budget(steps))
    return engine.train(engine.initial_model(0), turns, VanillaSGD(0.1), memory, seed=5)


# --- what a federation of it is ----------------------------------------------------------------------------


def test_a_stranger_sets_nothing_but_the_app() -> None:
    run = simulated(federation_file())
    by_learner = run.costs.by_learner
    assert {name: learner.steps for name, learner in by_learner.items()} == {"site-1": 8, "site-2": 10}
    assert run.final_metric is not None and run.final_metric > 0.6
    names = [spec.name for spec in run.community_model.layout.tensors]
    assert names[0] == "norm.weight" and "norm.num_batches_tracked" in names


def test_it_is_the_same_in_worker_processes() -> None:
    config = federation_file(policy={"name": "semisync_fedavg", "slowest_learner_epochs": 0.5})
    runs = [simulated(config, pool=pool) for pool in ("inline", "processes")]
    assert runs[0].community_model.sha256() == runs[1].community_model.sha256()
    assert runs[0].events == runs[1].events


class LoopbackGrid:
    """Delivers messages to a ClientApp in this process, each with the seed that Metis gives the task."""

    def __init__(self, client: FlowerClient, seeds: Callable[[int], int]) -> None:
        self.client, self.seeds, self.count = client, seeds, itertools.count()

    def get_node_ids(self) -> Iterable[int]:
        return [2, 3]

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        from flwr.app import RecordDict

        from metis.flower.opening import context_of

        replies = []
        for message in sorted(messages, key=lambda message: int(message.metadata.dst_node_id)):
            index = message.metadata.dst_node_id - 2
            learner = self.client.source.learners[index]
            context = context_of(self.client.project, index + 2, self.client.source.node(learner), RecordDict())
            train = message.metadata.message_type == "train"
            with seeded(self.seeds(next(self.count)) if train else 0):
                replies.append(self.client.project.client_app(message, context))
        return replies


def test_synchronous_training_equals_flowers_own() -> None:
    from flwr.app import ArrayRecord, ConfigRecord
    from flwr.serverapp.strategy import FedAvg

    from metis.flower.opening import identify
    from metis.learning.learner import torch_seed

    config = federation_file(stop={"rounds": 3})
    run = simulated(config)
    client = client_of(str(site_path(config)))

    def seeds(task: int) -> int:
        return torch_seed(np.random.SeedSequence(config.seed, spawn_key=(task % 2, task, 2)))

    initial = build_federation(config).engine.initial_model(config.seed)
    identify()
    from metis.flower.records import record_of

    result = FedAvg(fraction_evaluate=0.0).start(
        grid=LoopbackGrid(client, seeds),
        initial_arrays=record_of(initial),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=3,
    )
    assert isinstance(result.arrays, ArrayRecord)
    ours = run.community_model.tensors()
    theirs = {name: array.numpy() for name, array in result.arrays.items()}
    assert ours.keys() == theirs.keys()
    for name in ours:
        if ours[name].dtype.kind == "f":
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


# --- how it trains -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_steps_are_those_of_the_budget_whatever_the_clients_epochs(steps: int) -> None:
    engine, spec = engine_of(TINY)
    result = trained(engine, spec, steps)
    assert result.steps == steps
    assert result.memory["flower_calls"].tolist() == [1]


def test_what_a_client_keeps_is_kept() -> None:
    engine, spec = engine_of(TINY)
    first = trained(engine, spec, 4)
    second = trained(engine, spec, 4, first.memory)
    from metis.flower.records import state_of

    assert state_of(second.memory["flower_state"])["kept"]["calls"] == 2
    assert second.memory["flower_calls"].tolist() == [2]


def test_a_loop_that_knows_nothing_ends_with_the_budget_and_evaluation_does_not() -> None:
    sys.path.insert(0, TINY)
    from tiny.task import Net, load_data, test, train  # type: ignore[import-not-found]

    loader, held_out = load_data(0, 2, 10)
    with bounded(iter([None] * 2)) as bound:
        train(Net(), loader, 5, 0.1)
        assert test(Net(), held_out)[1] >= 0  # all of it, under torch.no_grad()
        assert sum(1 for _ in held_out) == 4  # also with gradients, because nothing is trained from it
        assert sum(1 for _ in loader) == 0
    assert (bound.steps, bound.batch_size, bound.epoch_steps, bound.ended) == (3, 10, 4, True)
    assert sum(1 for _ in loader) == 4


def test_what_is_raised_at_a_boundary_comes_out() -> None:
    engine, spec = engine_of(TINY)

    class Enough(Exception):
        pass

    def turns() -> Any:
        yield examples_of_client(spec, "a").batch(np.arange(1))
        raise Enough

    with pytest.raises(Enough):
        engine.train(engine.initial_model(0), turns(), VanillaSGD(0.1))


def test_by_the_call_where_there_is_no_loop_to_bound(tmp_path: Path) -> None:
    weights = tmp_path / "start.safetensors"
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3, np.float32)}, weights)
    others = str(PROJECT / "tiny" / "others.py")
    engine, spec = engine_of(f"{others}:plain", start=str(weights))
    examples = examples_of_client(spec, "a")
    assert (len(examples), examples.batch_size) == (7, 7)  # a call is a batch and an epoch
    result = trained(engine, spec, 3)
    assert result.model.vector.tolist() == [3, 3, 3] and result.steps == 3 and not result.evenly
    engine, spec = engine_of(f"{others}:aware", start=str(weights))
    result = trained(engine, spec, 5)
    assert result.model.vector.tolist() == [5, 5, 5] and result.steps == 5 and result.evenly


def test_by_the_call_because_the_file_wants_it() -> None:
    run = simulated(federation_file(site={"flower": TINY, "unit": "call"}))
    assert {learner.steps for learner in run.costs.by_learner.values()} == {2}


def test_legacy_clients_and_strategies(tmp_path: Path) -> None:
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    project = project.replace("tiny.server_app:app", "tiny.legacy:server").replace(
        "tiny.client_app:app", "tiny.legacy:app"
    )
    (tmp_path / "pyproject.toml").write_text(project, encoding="utf-8")
    (tmp_path / "tiny").symlink_to(PROJECT / "tiny")
    run = simulated(federation_file(site={"flower": str(tmp_path)}))
    assert {learner.steps for learner in run.costs.by_learner.values()} == {8, 10}
    assert run.final_metric is not None and run.final_metric > 0.6
    assert [spec.name for spec in run.community_model.layout.tensors][:2] == ["0", "1"]
    client = client_of(FlowerSource(str(tmp_path), learners=("a",)).spec)
    assert client.opening().contents["train"]["fitins.config"]["epochs"] == 2


def test_a_legacy_client_without_a_server_says_what_it_starts_with() -> None:
    engine, spec = engine_of(f"{PROJECT / 'tiny' / 'legacy.py'}:app")
    with pytest.raises(ConfigError, match=r"cannot be imported: .*No module named 'tiny'"):
        engine.initial_model(0)
    sys.path.insert(0, TINY)
    engine, spec = engine_of("tiny.legacy:app")
    assert engine.initial_model(0).layout.size > 0
    assert trained(engine, spec, 2).steps == 2


# --- what goes wrong ------------------------------------------------------------------------------------------


def test_a_client_that_fails_later_does_not_end_the_federation(monkeypatch: pytest.MonkeyPatch) -> None:
    config = federation_file(learners=[{"name": "site", "count": 3, "time_per_batch": 0.1}], stop={"rounds": 3})
    federation = build_federation(config)
    from tiny import client_app

    original = client_app.app._registered_funcs["train.default"]

    def broken(message: Any, context: Any) -> Any:
        if context.node_config["partition-id"] == 1:
            raise RuntimeError("no scanner today")
        return original(message, context)

    monkeypatch.setitem(client_app.app._registered_funcs, "train.default", broken)
    (policy, _), *_ = build_policies(config)
    run = federation.simulate(policy, rounds=3)
    failed = [event for _, event in run.events if isinstance(event, TaskFailed)]
    assert {event.learner for event in failed} == {"site-2"}
    assert "the Flower client of 'site-2' failed" in failed[0].reason and "no scanner today" in failed[0].reason
    assert run.rounds == 3 and any(isinstance(event, UpdateRequest) for _, event in run.events)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("failing", "the Flower client of 'a' failed: .*no scanner today"),
        ("growing", r"returned another model than it was given: tensor 'w' has shape \(9, 9\)"),
        ("silent", "does not say how many examples it has"),
        ("missing", "has no ClientApp 'missing'"),
    ],
)
def test_one_sentence_each(name: str, sentence: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(3, np.float32)}, tmp_path / "start.safetensors")
    source = f"{PROJECT / 'tiny' / 'others.py'}:{name}"
    with pytest.raises((ClientFailed, ConfigError), match=sentence) as raised:
        examples_of_client(FlowerSource(source, ("a",), start=str(tmp_path / "start.safetensors")).spec, "a")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"site": {"flower": TINY, "file": "x.py"}}, "has file and flower; keep one of them"),
        ({"site": {"flower": "nowhere/at-all"}}, "there is no Flower project"),
        ({"site": {"flower": TINY, "run_config": {"lr": 1}}}, "run_config has 'lr', which"),
        ({"evaluation": {"metric": "auc"}}, "metric is 'auc', but the Flower app project measures eval_loss"),
        ({"policy": {"name": "sync_fedavg", "proximal": {"term": 0.1}}}, "proximal changes the steps of a learner"),
        ({"training": {"clip_norm": 1.0}}, "up to the Flower client"),
        (
            {"training": {"solver": "AdamW"}},
            "training: solver, learning_rate and weight_decay are given, but the Flower",
        ),
        ({"training": {"learning_rate": 0.1}}, "makes its steps itself; leave them out and set its own options"),
    ],
)
def test_files_that_cannot_be(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as raised:
        simulated(federation_file(**changes))
    assert "Traceback" not in str(raised.value)


def test_wrong_versions_and_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9.0")
    with pytest.raises(ConfigError, match=r"flwr 1.9.0 is installed, and Metis works with 1.27 and later"):
        load_project(FlowerSource(TINY))

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"needs the package flwr; .*\[flower\]"):
        load_project(FlowerSource(TINY))
    for module in ("flwr.app", "flwr"):  # as if it were not there
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "metis.flower.opening", raising=False)
    with pytest.raises(ConfigError, match=r"needs the package flwr; .*\[flower\]"):
        simulated(federation_file())


# --- at a site ------------------------------------------------------------------------------------------------


def test_the_site_says_what_its_node_is_and_the_federation_the_rest() -> None:
    from metis.experiments.deploy import settings_document

    config = federation_file(site={"flower": TINY, "run_config": {"data.batch-size": 20}})
    path = flower_path(TINY, 'partition-id=3 num-partitions=4 folder="/data//scans"')
    silo = build_silo(settings_document(config), path, "site-2", 1)
    assert silo.learner is not None and silo.evaluation is not None
    assert (len(silo.learner.indices), silo.learner.batch_size) == (70, 20)
    model = silo.engine.initial_model(0)
    clock = itertools.count()
    result = silo.learner.train_while(silo.engine, model, 0, Budget(steps=3), lambda: float(next(clock)))
    assert result.steps == 3 == len(result.batch_times)
    found = silo.engine.evaluate(result.model, silo.evaluation)
    assert found.keys() >= {"eval_acc", "eval_loss", "accuracy", "loss"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("partition-id=0 num-partitions=2", {"partition-id": 0, "num-partitions": 2}),
        ('path="/a b" rate=0.5 fast=true', {"path": "/a b", "rate": 0.5, "fast": True}),
    ],
)
def test_node_configurations_are_written_as_for_flower(text: str, found: dict[str, Any]) -> None:
    assert parse_node_config(text) == found


def test_a_source_travels_as_one_string() -> None:
    source = FlowerSource("/a//b:c", ("x", "y"), (("k", "/v//w"),), (("lr", 0.1),), "call", "m.safetensors")
    assert FlowerSource.of(Path(source.spec)) == source
    assert dataclasses.replace(source, unit=None) != source


def test_the_generators_of_others_are_left_as_they_were() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    engine, spec = engine_of(TINY)
    once, again = trained(engine, spec, 3), trained(engine, spec, 3)
    assert isinstance(once.model, Model) and once.model.sha256() == again.model.sha256()
    assert torch.equal(before, torch.get_rng_state())


def test_a_federation_is_written_from_a_projects_own_configuration(tmp_path: Path) -> None:
    from metis.experiments.config.load import load_config
    from metis.flower.project import federation_file

    target = tmp_path / "federation.toml"
    target.write_text(federation_file(PROJECT / "pyproject.toml", target), encoding="utf-8")
    config = load_config(target)
    assert config.site is not None and config.site.flower == TINY
    assert config.stop.rounds == 3 and [policy.name for policy in config.policy] == ["sync_fedavg", "semisync_fedavg"]
    # In all as many as the project has nodes: some divide their data for exactly that many.
    project = tmp_path / "pyproject.toml"
    project.write_text(
        (PROJECT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.flwr.federations")[0]
        + "[tool.flwr.federations.local]\noptions.num-supernodes = 4\n",
        encoding="utf-8",
    )
    four = tmp_path / "four.toml"
    four.write_text(federation_file(project, four), encoding="utf-8")
    assert [group.count for group in load_config(four).learners] == [3, 1]
    project.unlink()
    assert '# "data.batch-size" = 10' in target.read_text(encoding="utf-8")
    run = simulated(config.model_copy(update={"policy": config.policy[:1]}))
    assert run.rounds == 3
    with pytest.raises(ConfigError, match=r"there is no .*pyproject.toml; a Flower project has a pyproject.toml"):
        federation_file(tmp_path, target)
    (tmp_path / "client.py").write_text("import flwr\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"client.py is not the pyproject.toml of a Flower project"):
        federation_file(tmp_path / "client.py", target)


def test_paths_of_nodes_may_name_the_learner() -> None:
    source = FlowerSource(TINY, ("a", "b"), (("data", "/data/{learner}/{partition}"),))
    assert source.node("b") == {"partition-id": 1, "num-partitions": 2, "data": "/data/b/1"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the older typer that Flower pins
def test_options_of_the_learner(tmp_path: Path) -> None:
    from metis.cli.learner import _own_site

    with pytest.raises(ConfigError, match="--node-config is for a Flower app"):
        _own_site(None, None, "a=1", None, None, None)
    with pytest.raises(ConfigError, match="exclude each other"):
        _own_site(tmp_path, TINY, None, None, None, None)
    with pytest.raises(ConfigError, match=r"there is no file .*with an initial model"):
        _own_site(None, TINY, None, tmp_path / "nothing", None, None)
    with pytest.raises(ConfigError, match="write it as for flower-supernode"):
        _own_site(None, TINY, "partition-id", None, None, None)
    path = _own_site(None, f"{TINY}:app", "partition-id=1", None, None, None)
    assert path is not None and FlowerSource.of(path) == FlowerSource(f"{TINY}:app", node_config=(("partition-id", 1),))


def test_an_app_without_a_server_takes_its_start_from_a_file(tmp_path: Path) -> None:
    engine, spec = engine_of(f"{PROJECT / 'tiny' / 'others.py'}:plain")
    with pytest.raises(ConfigError, match=r"has no ServerApp that says what model it starts with; .*--start FILE"):
        engine.initial_model(0)
    (tmp_path / "broken").write_text("no weights")
    engine, spec = engine_of(f"{PROJECT / 'tiny' / 'others.py'}:plain", start=str(tmp_path / "broken"))
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        examples_of_client(spec, "a")
