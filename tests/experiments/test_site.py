"""A site file: what it may say, what is wrong with one, and the same file in a rehearsal and at a site."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from metis.cli.app import app
from metis.core.events import Budget
from metis.core.solvers import MomentumSGD
from metis.errors import ConfigError
from metis.experiments.build import build_federation, build_policies, build_stop
from metis.experiments.config.load import ExperimentConfig, load_config, resolve_config
from metis.experiments.silo import build_controller_side, build_silo, read_settings
from metis.experiments.site import SiteFunction, load_site, rehearsal, settled
from metis.learning import ArrayExamples, JoinedExamples
from metis.runs.storage import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "site"

SITE = """
import numpy as np
from torch import nn

SIZES = {"cleveland": 60, "zurich": 25}

def network():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def records(site, seed):
    rng = np.random.default_rng([len(site), seed])
    inputs = rng.normal(size=(SIZES[site], 3))
    return inputs, (inputs.sum(axis=1) > 0).astype(np.int32)

def training_data(site):
    return records(site, 1)

def evaluation_data(site):
    return records(site, 2)
"""

FEDERATION: dict[str, Any] = {
    "site": {"file": "site.py"},
    "learners": [{"name": "all", "names": ["cleveland", "zurich"], "batch_size": 10, "time_per_batch": 0.1}],
    "training": {"learning_rate": 0.1},
    "policy": {"name": "semisync_fedavg", "slowest_learner_epochs": 1},
    "stop": {"rounds": 3},
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    path = tmp_path / "site.py"
    path.write_text(SITE)
    return path


def experiment(folder: Path, **changes: Any) -> ExperimentConfig:
    tables = {**FEDERATION, **changes}
    return resolve_config({key: value for key, value in tables.items() if value is not None}, "x.toml", folder=folder)


def settings(config: ExperimentConfig, policy: int = 0) -> dict[str, Any]:
    """What the controller sends, after a trip through JSON."""
    document: dict[str, Any] = json.loads(json.dumps({"experiment": config.to_dict(), "policy": policy}))
    return document


# --- the file -------------------------------------------------------------------------------------


def test_a_site_file_may_leave_out_all_but_network_and_training_data(tmp_path: Path) -> None:
    """The rest has defaults."""
    path = tmp_path / "small.py"
    path.write_text("def network(): return None\ndef training_data(site): return site\n")

    loaded = load_site(path)

    assert loaded.training_data("zurich") == "zurich"
    assert (loaded.evaluation_data, loaded.test_data, loaded.task, loaded.metrics, loaded.loss) == (None,) * 5


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "site.py has no network; write: def network()"),
        ("def network(): ...", "site.py has no training_data; write: def training_data(site)"),
        ("def network(): ...\ndef training_data(): ...", "site.py:2: training_data does not take the arguments "
         "that Metis passes; write: def training_data(site)"),
        ("def network(size): ...\ndef training_data(site): ...", "site.py:1: network does not take the arguments that "
         "Metis passes; write: def network()"),
        ("import torch\nnetwork = torch.nn.Linear(1, 1)\ndef training_data(site): ...",
         "site.py: network is not a function; write: def network()"),
        ("network = 3\ndef training_data(site): ...", "site.py: network is not a function; write: def network()"),
        ("\nx = = 3\n", "the site file cannot be used: site.py:2: SyntaxError: invalid syntax"),
        ("import sys\n\nraise OSError('no disk')\n", "the site file cannot be used: site.py:3: OSError: no disk"),
        ("import nosuchmodule\n", "the site file cannot be used: site.py:1: ModuleNotFoundError: No module named "
         "'nosuchmodule'"),
        ("raise SystemExit('bye')", "the site file cannot be used: site.py:1: SystemExit: bye"),
        (SITE + "task = 'ranking'", "site.py: task is 'ranking'; allowed: classification, regression"),
        (SITE + "metrics = [max]", "site.py: metrics must be a list of names or a dictionary of names and functions, "
         'as in metrics = {"auc": auc} with def auc(outputs, targets)'),
        (SITE + "def collate(): ...", "collate does not take the arguments that Metis passes; write: def "
         "collate(items)"),
        (SITE + "def step(batch): ...", "step does not take the arguments that Metis passes; write: def step(module, "
         "batch)"),
        (SITE + "metrics = {'loss': max}", "site.py: metrics has 'loss', which is always measured; define the function "
         "loss instead"),
        (SITE + "metric = max", "site.py: metric is <built-in function max>; it must be a string"),
        (SITE + "higher_is_better = 1", "site.py: higher_is_better is 1; it must be True or False"),
        (SITE + "def augment(inputs): ...", "augment does not take the arguments that Metis passes; write: def "
         "augment(inputs, generator)"),
    ],
)  # fmt: skip
def test_a_fault_in_a_site_file_is_one_sentence_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    """No traceback of Metis: the site's author reads what to mend and where."""
    path = tmp_path / "site.py"
    path.write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_site(path)

    assert str(caught.value).endswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_python_is_told(tmp_path: Path) -> None:
    """The path is the operator's own; it is named in full."""
    with pytest.raises(ConfigError, match=f"there is no site file {tmp_path}/nowhere.py"):
        load_site(tmp_path / "nowhere.py")
    (tmp_path / "site.txt").write_text("")
    with pytest.raises(ConfigError, match=r"site\.txt must be a Python file, whose name ends in \.py"):
        load_site(tmp_path / "site.txt")


def test_a_site_file_may_import_its_neighbours(tmp_path: Path) -> None:
    """Its folder is on the path while it is loaded and called, and not afterwards."""
    import sys

    (tmp_path / "reader_of_this_test.py").write_text("NUMBER = 7\n")
    (tmp_path / "other_reader_of_this_test.py").write_text("NUMBER = 8\n")
    path = tmp_path / "site.py"
    path.write_text(
        "import reader_of_this_test\nimport numpy as np\nfrom torch import nn\n"
        "def network(): return nn.Linear(1, 2)\n"
        "def training_data(site):\n"
        "    import other_reader_of_this_test as other\n"
        "    return np.full((other.NUMBER, 1), reader_of_this_test.NUMBER), np.zeros(other.NUMBER, int)\n"
    )
    before = list(sys.path)

    silo = build_silo(settings(experiment(tmp_path)), path, "zurich", 1)

    assert silo.learner is not None and len(silo.learner.indices) == 8
    assert sys.path == before


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return open('/nowhere/patients.csv')", r"site.py: training_data\('zurich'\) failed: site.py:\d+: "
         r"FileNotFoundError: .*patients.csv"),
        ("return None", r"site.py: training_data\('zurich'\) returns None; it must return a pair of arrays"),
        ("return np.zeros((0, 3)), np.zeros(0, int)", r"training_data\('zurich'\) returns no examples"),
        ("return np.zeros((5, 3)), np.zeros(4, int)", r"training_data\('zurich'\): there are 5 inputs but 4 targets"),
        ("return 3", r"training_data\('zurich'\): int is not a map-style dataset"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_told_with_the_function_that_gave_it(
    tmp_path: Path, body: str, sentence: str
) -> None:
    """Before anything starts."""
    path = tmp_path / "site.py"
    path.write_text(f"import numpy as np\nfrom torch import nn\ndef network(): return nn.Linear(3, 2)\n"
                    f"def training_data(site):\n    {body}\n")  # fmt: skip
    with pytest.raises(ConfigError, match=sentence):
        build_silo(settings(experiment(tmp_path)), path, "zurich", 1)


# --- the experiment's file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"dataset": "digits"}}, "data: is given together with [site], whose file says it all; keep one of "
         "them"),
        ({"network": {"name": "mlp"}}, "network: is given together with [site], whose file says it all; keep one of "
         "them"),
        ({"site": {"file": "nowhere.py"}}, "site.file: there is no file FOLDER/nowhere.py"),
        ({"site": {}}, "site.file: missing; it must be given, or flower or nvflare in its place"),
        ({"learners": [{**FEDERATION["learners"][0], "count": 3}]}, "learners.0.count: is 3, but names has 2; leave "
         "it out"),
        ({"learners": [{**FEDERATION["learners"][0], "names": ["a", "a"]}]}, "learners.0.names: has 'a', which another "
         "learner is called already"),
        ({"learners": [{**FEDERATION["learners"][0], "names": []}]}, "learners.0.names: is [], must have at least 1 "
         "entry"),
        ({"site": None, "evaluation": {"higher_is_better": True}}, "evaluation.higher_is_better: is given, but only a "
         "metric that a [site] brings needs it"),
    ],
)  # fmt: skip
def test_a_fault_around_the_site_table_is_told(site: Path, changes: dict[str, Any], sentence: str) -> None:
    """In the terms of the file."""
    with pytest.raises(ConfigError) as caught:
        experiment(site.parent, **changes)
    assert str(caught.value) == f"x.toml: {sentence}".replace("FOLDER", str(site.parent))


def test_a_resolved_experiment_with_a_site_loads_again(site: Path) -> None:
    """What `metis resume` and the controller's settings rely on."""
    config = settled(experiment(site.parent), load_site(site))
    again = resolve_config(config.to_dict(), "config.toml")
    assert again.to_dict() == config.to_dict()
    assert not {"data", "partition", "network"} & config.to_dict().keys()


@pytest.mark.parametrize(
    ("tail", "evaluation", "metric", "higher"),
    [
        ("", {}, "accuracy", True),
        ("task = 'regression'", {}, "mae", False),
        ("def auc(o, t): ...\ndef brier(o, t): ...\nmetrics = {'auc': auc, 'brier': brier}", {}, "auc", True),
        ("metrics = {'auc': max, 'brier': max}\nmetric = 'brier'\nhigher_is_better = False", {}, "brier", False),
        ("metrics = {'brier': max}", {"metric": "loss"}, "loss", False),
        ("metrics = {'brier': max}", {"higher_is_better": False}, "brier", False),
    ],
)
def test_the_site_file_says_what_is_measured(
    tmp_path: Path, tail: str, evaluation: dict[str, Any], metric: str, higher: bool
) -> None:
    """The experiment's file may choose; without a choice the first metric counts."""
    path = tmp_path / "site.py"
    path.write_text(SITE + tail)
    config = settled(experiment(tmp_path, evaluation=evaluation), load_site(path))
    assert (config.evaluation.metric, config.evaluation.higher_is_better) == (metric, higher)
    stop = build_stop(settled(
        experiment(tmp_path, evaluation={**evaluation, "target": 0.5}, stop={"rounds": 2, "at_target": True}),
        load_site(path),
    ))  # fmt: skip
    assert stop.target is not None and stop.target.higher_is_better == higher


def test_a_site_and_an_experiment_that_contradict_each_other_are_told(site: Path) -> None:
    """Neither wins in silence."""
    with pytest.raises(ConfigError, match=r"metric is 'mae'; site\.py measures accuracy, loss"):
        settled(experiment(site.parent, evaluation={"metric": "mae"}), load_site(site))
    site.write_text(SITE + "task = 'classification'")
    with pytest.raises(
        ConfigError, match=r"has task = 'classification', but the experiment has training\.task = 'regre"
    ):
        settled(experiment(site.parent, training={"task": "regression"}), load_site(site))


# --- rehearsal ------------------------------------------------------------------------------------


def test_joined_examples_are_those_of_each_part() -> None:
    """A batch of one part is exactly the part's own; a batch across parts keeps its order."""
    parts = [ArrayExamples(np.full((n, 2), k, np.float32), np.arange(n)) for k, n in enumerate((3, 1, 4))]
    joined = JoinedExamples(parts)

    inputs, targets = joined.batch(np.array([7, 0, 3, 4, 2]))

    assert len(joined) == 8
    assert [joined.indices(k).tolist() for k in range(3)] == [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert inputs[:, 0].tolist() == [2, 0, 1, 2, 0]
    assert targets.tolist() == [3, 0, 0, 0, 2]
    own = parts[2].batch(np.array([1, 3]))
    assert all(torch.equal(a, b) for a, b in zip(joined.batch(np.array([5, 7])), own, strict=True))


def test_joined_examples_of_different_shapes_are_told() -> None:
    """Where they would have to share a batch."""
    parts = [ArrayExamples(np.zeros((2, n), np.float32), np.zeros(2, np.int64)) for n in (3, 4)]
    with pytest.raises(ConfigError, match=r"cannot share a batch: their shapes are \(3,\), \(4,\)"):
        JoinedExamples(parts).batch(np.arange(4))


def test_a_rehearsal_gives_each_site_its_own_data(site: Path) -> None:
    """Named in [[learners]], with the classes that a report shows; measured on all sites' evaluation data."""
    setup = rehearsal(experiment(site.parent), load_site(site))

    assert [(assignment.name, len(assignment.indices)) for assignment in setup.assignments] == [
        ("cleveland", 60),
        ("zurich", 25),
    ]
    assert setup.test is not None and len(setup.test) == 85
    assert setup.class_counts is not None and setup.class_counts.sum(axis=1).tolist() == [60, 25]


def test_a_rehearsal_measures_as_the_sites_together_would(site: Path) -> None:
    """The mean over all held-out examples is that of the sites, weighted by their examples."""
    config = experiment(site.parent)
    federation = build_federation(config)
    model = federation.initial_model
    assert federation.test is not None
    together = federation.engine.evaluate(model, federation.test)

    silos = [build_silo(settings(config), site, name, k) for k, name in enumerate(("cleveland", "zurich"))]
    parts = []
    for silo in silos:
        assert silo.evaluation is not None
        parts.append((len(silo.evaluation), silo.engine.evaluate(model, silo.evaluation)))
    for name, value in together.items():
        assert value == pytest.approx(sum(n * metrics[name] for n, metrics in parts) / 85)


@pytest.mark.slow
def test_workers_give_the_same_bits(tmp_path: Path) -> None:
    """The example as it is in the repository, by the command line, with 0 and 2 processes."""
    runs = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        arguments = ["simulate", str(EXAMPLE / "federation.toml"), "--workers", str(workers), "--out", str(out)]
        done = CliRunner().invoke(app, [*arguments, "--set", "stop.rounds=4"])
        assert done.exit_code == 0, done.output
        runs.append((load_model(out / "community.safetensors").sha256(), (out / "events.jsonl").read_bytes()))
    assert runs[0] == runs[1]


def test_the_parts_of_a_rehearsal_survive_a_spawned_process(site: Path) -> None:
    """With a GPU, workers are spawned: functions and data travel as the file's path."""
    site.write_text(SITE + "metrics = {'half': lambda o, t: 0.5}\ndef augment(inputs, generator): return inputs\n")
    setup = rehearsal(experiment(site.parent), load_site(site))
    assert setup.metrics is not None
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_look, args=(theirs, setup.network, setup.train, setup.metrics["half"]))
    child.start()
    theirs.close()
    seen = ours.recv()
    child.join()
    assert seen == ("Sequential", 85, setup.train.batch(np.arange(70, 75))[1].tolist(), 0.5)


def _look(connection: Any, network: Any, train: Any, half: Any) -> None:
    batch = train.batch(np.arange(70, 75))[1].tolist()
    connection.send((type(network()).__name__, len(train), batch, half(None, None)))


def test_simulate_and_resume_by_the_command_line(site: Path) -> None:
    """The site file is found from the directory of the run, wherever it is."""
    import tomlkit

    file = site.parent / "federation.toml"
    file.write_text(tomlkit.dumps(FEDERATION))
    out = site.parent / "run"
    done = CliRunner().invoke(app, ["simulate", str(file), "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    finished = load_model(out / "community.safetensors").sha256()
    (out / "summary.json").unlink()  # as if it had been cut off before its first checkpoint
    done = CliRunner().invoke(app, ["resume", str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert load_model(out / "community.safetensors").sha256() == finished
    done = CliRunner().invoke(app, ["data", "show", str(file)])
    assert done.exit_code == 2 and "each site brings its own data in" in done.output


# --- one machine of a deployment --------------------------------------------------------------------


def test_a_silo_of_a_site_file_trains_as_in_the_rehearsal(site: Path) -> None:
    """The same index, seed and task give the same local model, bit for bit."""
    config = experiment(site.parent)
    federation = build_federation(config)
    policy, solver = build_policies(config)[0]
    rehearsed = federation._learners(solver)[1].train(federation.engine, federation.initial_model, 5, 7)

    silo = build_silo(settings(config), site, "zurich", 1)
    assert silo.learner is not None
    trained = silo.learner.train_while(silo.engine, federation.initial_model, 5, Budget(steps=7), lambda: 0.0)

    assert policy.layers == ()
    assert trained.model.sha256() == rehearsed.model.sha256()
    assert (silo.metric, silo.higher_is_better, silo.seed) == ("accuracy", True, 1990)


def test_a_silo_of_a_built_in_data_set_is_the_seat_of_its_name() -> None:
    """Its share is drawn with the federation's seed; momentum and FedAsync's proximal term come along."""
    tables: dict[str, Any] = {
        "data": {"dataset": "digits", "train_examples": 200},
        "learners": [
            {"name": "fast", "count": 2, "batch_size": 10, "time_per_batch": 0.1},
            {"name": "slow", "names": ["zurich"], "batch_size": 20, "time_per_batch": 0.1},
        ],
        "partition": {"sizes": "power_law"},
        "training": {"solver": "momentum", "momentum": 0.5},
        "policy": [{"name": "sync_fedavg", "local_epochs": 1}, {"name": "fedasync", "local_epochs": 1}],
        "stop": {"rounds": 1},
    }
    config = resolve_config(tables, "x.toml")
    federation = build_federation(config)

    plain = build_silo(settings(config, 0), None, "zurich", 1)
    held = build_silo(settings(config, 1), None, "zurich", 1)

    assert plain.learner is not None and held.learner is not None
    assignment = next(learner for learner in federation.learners if learner.name == "zurich")
    assert np.array_equal(plain.learner.indices, assignment.indices)
    assert plain.learner.batch_size == 20
    assert plain.evaluation is None
    assert isinstance(plain.learner.solver, MomentumSGD) and plain.learner.solver.momentum == 0.5
    assert type(held.learner.solver).__name__ == "FedProx"
    assert plain.engine.initial_model(1990).sha256() == federation.initial_model.sha256()


def test_the_controllers_side_has_the_initial_model_and_its_own_data(site: Path) -> None:
    """And never the sites' data."""
    config = experiment(site.parent)
    silo = build_controller_side(settings(config), site)
    assert silo.learner is None and silo.evaluation is None
    assert silo.engine.initial_model(silo.seed).sha256() == build_federation(config).initial_model.sha256()

    silo = build_controller_side(settings(load_config(EXAMPLE / "federation.toml")), EXAMPLE / "site.py")
    assert silo.evaluation is not None and len(silo.evaluation) == 360

    tables = {key: value for key, value in FEDERATION.items() if key != "site"}
    silo = build_controller_side(settings(resolve_config(tables, "x.toml")), None)
    assert silo.evaluation is not None and len(silo.evaluation) == 360


def test_the_settings_are_of_the_federation_but_files_and_processors_of_this_machine(site: Path) -> None:
    """A controller with more processors or its data elsewhere does not keep a site from taking part."""
    config = experiment(site.parent)
    document = settings(config)
    document["experiment"]["training"]["threads"] = 4096
    document["experiment"]["site"]["file"] = "/of/the/controller/site.py"

    silo = build_silo(document, site, "zurich", 1)

    assert silo.learner is not None and len(silo.learner.indices) == 25


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        (None, "the controller's settings are not valid: they must have the keys experiment and policy"),
        ({"experiment": {}}, "they must have the keys experiment and policy"),
        ({"experiment": [], "policy": 0}, "experiment must be a table"),
        ({"experiment": {}, "policy": 0}, "the controller's settings: learners: missing; .*; the controller's "
         "settings: policy: missing"),
        ("two policies", "policy is 1, but there are 1"),
        ("no number", "policy is True, but there are 1"),
        ("typo", "learners.0.batch_sise: unknown key; did you mean 'batch_size'?"),
    ],
)  # fmt: skip
def test_settings_that_are_not_understood_are_one_sentence(site: Path, document: Any, sentence: str) -> None:
    """Nothing that comes over the network becomes a default."""
    if isinstance(document, str):
        kind, document = document, settings(experiment(site.parent))
        if kind == "two policies":
            document["policy"] = 1
        elif kind == "no number":
            document["policy"] = True
        else:
            document["experiment"]["learners"][0]["batch_sise"] = 3
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_settings(document)
    assert "\n" not in str(caught.value)


def test_a_learner_that_the_experiment_does_not_have_is_refused(site: Path) -> None:
    """With one group everybody belongs to it; with several a learner must be named."""
    one = experiment(site.parent)
    site.write_text(SITE.replace('"zurich": 25', '"zurich": 25, "basel": 9'))
    silo = build_silo(settings(one), site, "basel", 7)
    assert silo.learner is not None and silo.learner.batch_size == 10
    two = experiment(
        site.parent,
        learners=[*FEDERATION["learners"], {**FEDERATION["learners"][0], "name": "others", "names": ["budapest"]}],
    )
    with pytest.raises(ConfigError, match="has no learner 'zurick'; did you mean 'zurich'"):
        build_silo(settings(two), site, "zurick", 0)
    tables = {key: value for key, value in FEDERATION.items() if key != "site"}
    with pytest.raises(ConfigError, match="no learner 'basel'; choose one of clevel"):
        build_silo(settings(resolve_config(tables, "x.toml")), None, "basel", 0)


def test_a_federation_of_site_files_needs_one_here(site: Path) -> None:
    """The controller's path means nothing on this machine and is never opened."""
    for build in (lambda: build_silo(settings(experiment(site.parent)), None, "zurich", 0),
                  lambda: build_controller_side(settings(experiment(site.parent)), None)):  # fmt: skip
        with pytest.raises(ConfigError, match="have their own network and data: give --site FILE"):
            build()


def test_a_function_of_a_site_file_has_a_name(site: Path) -> None:
    """The same in every process, so that a run can be resumed."""
    assert repr(SiteFunction(site, "augment")) == "site.py:augment"
