"""Scripts of NVFlare's Client API as sites, with the real package: simulated, deployed, bounded, and when they fail."""

from __future__ import annotations

import contextlib
import math
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import metis
from metis.errors import ConfigError, DataError
from metis.experiments.build import build_federation
from metis.experiments.config.load import load_config
from metis.learning import Learner
from metis.nvflare.engine import NVFlareEngine, client_of, examples_of_script
from metis.nvflare.source import NVFlareSource

pytest.importorskip("nvflare")

EXAMPLE = Path(__file__).parents[2] / "examples" / "nvflare"
HANG = 300

HEAD = """
import numpy as np
import nvflare.client as flare

flare.init()
while flare.is_running():
    received = flare.receive()
"""


def script(folder: Path, body: str, network: str = "") -> str:
    """A script with one array, and what makes its initial model."""
    (folder / "train.py").write_text(HEAD + body, "utf-8")
    text = network or "import numpy as np\n\n\ndef start():\n    return {'w': np.zeros((2, 2), np.float32)}\n"
    (folder / "start.py").write_text(text, "utf-8")
    return NVFlareSource(str(folder / "train.py"), network="start.py:start", learners=("site-1",)).spec


def engine_of(spec: str) -> NVFlareEngine:
    from metis.learning.engine import EngineJob

    return NVFlareEngine(EngineJob(network=lambda: client_of(spec)))


def learner_of(spec: str, name: str = "site-1") -> Learner:
    examples = examples_of_script(spec, name)
    return Learner(name, 0, examples, np.arange(len(examples)), examples.batch_size, metis.VanillaSGD(0.1))


def example() -> str:
    return NVFlareSource(str(EXAMPLE / "train.py"), "--epochs 2", "model.py:Net", ("site-1", "site-2")).spec


def test_a_script_is_bounded_to_the_step() -> None:
    """Its own two epochs are ten steps each; it makes as many as it is given, fewer or more."""
    spec = example()
    engine, learner = engine_of(spec), learner_of(spec)
    assert (len(learner.indices), learner.batch_size, learner.epoch_steps) == (160, 16, 10)
    start = engine.initial_model(0)
    for steps in (1, 7, 33):
        trained = learner.train(engine, start, 1, steps)
        assert trained.steps == steps
        counted = trained.model.tensors()["layers.1.num_batches_tracked"]
        assert int(counted) == steps, "BatchNorm counts the batches that were really trained"
    longer = learner.train(engine, start, 1, 60)
    assert engine.evaluate(longer.model, learner.examples)["accuracy"] > 0.8


def test_the_same_task_gives_the_same_bits() -> None:
    """A script starts from its first line in each task, so nothing of another one is in it."""
    spec = example()
    engine, learner, other = engine_of(spec), learner_of(spec), learner_of(spec, "site-2")
    start = engine.initial_model(3)
    first = learner.train(engine, start, 1, 12).model
    different = other.train(engine, start, 1, 12).model
    assert first.sha256() == learner.train(engine, start, 1, 12).model.sha256() != different.sha256()


def test_a_federation_of_scripts_is_simulated(tmp_path: Path) -> None:
    """From its file; the fast site trains ten times as much as the slow one in a period."""
    config = load_config(EXAMPLE / "federation.toml")
    run = build_federation(config).simulate(metis.semisync_fedavg(1), rounds=3)
    steps = {name: costs.steps for name, costs in run.costs.by_learner.items()}
    assert steps["site-1"] > 5 * steps["site-2"]
    assert run.final_metric is not None and run.final_metric > 0.8
    again = build_federation(config).simulate(metis.semisync_fedavg(1), rounds=3, workers=2)
    assert again.community_model.sha256() == run.community_model.sha256()


def test_a_script_without_torch_is_called_as_a_whole(tmp_path: Path) -> None:
    """It gets its own model back until the budget ends; numpy arrays stay numpy arrays, differences are added."""
    body = """
    assert isinstance(received.params["w"], np.ndarray)
    meta = {"NUM_STEPS_CURRENT_ROUND": 5}
    flare.send(flare.FLModel(params={"w": received.params["w"] + 1}, metrics={"eval_loss": 2.0}, meta=meta))
"""
    spec = script(tmp_path, body)
    engine, learner = engine_of(spec), learner_of(spec)
    assert (len(learner.indices), learner.epoch_steps) == (5, 1)
    trained = learner.train(engine, engine.initial_model(0), 0, 3)
    assert trained.steps == 3 and (trained.model.vector == 3).all() and trained.loss == 2.0

    difference = body.replace('received.params["w"] + 1}', 'np.ones((2, 2))}, params_type="DIFF"')
    (tmp_path / "other").mkdir()
    spec = script(tmp_path / "other", difference)
    engine, learner = engine_of(spec), learner_of(spec)
    assert (learner.train(engine, engine.initial_model(0), 0, 2).model.vector == 2).all()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "    raise ValueError('no data here')",
            r"train.py of 'site-1' failed: train.py:\d+: ValueError: no data here",
        ),
        ("    raise SystemExit(3)", "train.py of 'site-1' ended with 3"),
        ("    break", "came to its end without sending a model"),
        (
            "    flare.send(flare.FLModel(params={'w': np.zeros(3)}))",
            r"sent another model than it was given: tensor 'w' has shape \(3,\), not \(2, 2\)",
        ),
        (
            "    flare.send(flare.FLModel(params={'v': np.zeros((2, 2))}))",
            "sent another model than it was given: .*missing \\['w'\\], unknown \\['v'\\]",
        ),
    ],
)
def test_a_script_that_fails_is_one_sentence(tmp_path: Path, body: str, sentence: str) -> None:
    spec = script(tmp_path, body + "\n")
    with pytest.raises(DataError, match=sentence) as problem:
        examples_of_script(spec, "site-1")
    assert "\n" not in str(problem.value)


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script, what makes its model, the package, and a release that is too old."""
    import importlib.metadata

    spec = script(tmp_path, "    break\n")
    with pytest.raises(ConfigError, match=r"there is no file .* with a script of NVFlare"):
        examples_of_script(NVFlareSource(str(tmp_path / "no.py"), network="start.py:start").spec, "site-1")
    source = NVFlareSource.of(spec)
    for network, sentence in (
        (None, "does not say what model it starts with"),
        ("other.py:start", "there is no .*other.py"),
        ("start.py:begin", "cannot be made"),
        ("start.py:np", "it must make a torch module or a dictionary of arrays"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            engine_of(NVFlareSource(source.script, network=network).spec).layout
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.3.1")
    with pytest.raises(ConfigError, match=r"nvflare 2\.3\.1 is installed, and Metis works with 2\.7 and later"):
        client_of(NVFlareSource("a.py").spec)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"needs the package nvflare; .* pip install '.\[nvflare\]'"):
        client_of(NVFlareSource("b.py").spec)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ('nvflare = "train.py"\nfile = "site.py"', "has file and nvflare; keep one of them"),
        ('nvflare = "train.py"\nrun_config = {lr = 1}', "is given, but only a Flower app has it"),
        ('file = "site.py"\nargs = "--x 1"', "is given, but only an NVFlare script has it"),
        ("", "missing; it must be given, or flower or nvflare in its place"),
    ],
)
def test_the_table_of_a_file_is_checked(tmp_path: Path, table: str, sentence: str) -> None:
    text = (EXAMPLE / "federation.toml").read_text("utf-8")
    head, _, rest = text.partition("[site]")
    file = tmp_path / "federation.toml"
    file.write_text(f"{head}[site]\n{table}\n\n[[learners]]" + rest.partition("[[learners]]")[2], "utf-8")
    with pytest.raises(ConfigError, match=sentence):
        load_config(file)


def test_layers_that_a_script_would_ignore_are_refused() -> None:
    from metis.experiments.bridges import site_path

    config = load_config(EXAMPLE / "federation.toml", ["policy.0.proximal={term=0.1}"])
    with pytest.raises(ConfigError, match="proximal changes the steps of a learner"):
        site_path(config)


LIGHTNING = """
import numpy as np
import nvflare.client.lightning as flare
import torch
from net import Lit
from pytorch_lightning import Trainer
from torch.utils.data import DataLoader, TensorDataset

rng = np.random.default_rng(0)
x = torch.from_numpy(rng.normal(size=(96, 6)).astype(np.float32))
y = (x.sum(1) > 0).long()
loader = DataLoader(TensorDataset(x, y), batch_size=8)
model = Lit()
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False)
flare.patch(trainer)
while flare.is_running():
    trainer.validate(model, loader, verbose=False)
    trainer.fit(model, loader)
"""
LIT = """
import torch
from pytorch_lightning import LightningModule


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(6, 2), torch.nn.BatchNorm1d(6)

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layer(self.seen(batch[0])), batch[1])

    def validation_step(self, batch, index):
        self.log("accuracy", (self.layer(self.seen(batch[0])).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
HUGGING_FACE = """
import numpy as np
import nvflare.client.hf as flare
import torch
from net import Net
from transformers import Trainer, TrainingArguments

rng = np.random.default_rng(0)
x = rng.normal(size=(96, 6)).astype(np.float32)
rows = [{"x": row, "labels": int(row.sum() > 0)} for row in x]
arguments = TrainingArguments("out", num_train_epochs=1, per_device_train_batch_size=8, report_to=[],
                              disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no",
                              learning_rate=0.05)
trainer = Trainer(Net(), arguments, train_dataset=rows, eval_dataset=rows)
flare.patch(trainer)
while flare.is_running():
    trainer.evaluate()
    trainer.train()
"""
NET = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(6, 2), torch.nn.BatchNorm1d(6)

    def forward(self, x, labels=None):
        logits = self.layer(self.seen(x))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "text", "net", "name", "extra"),
    [
        ("pytorch_lightning", LIGHTNING, LIT, "Lit", 0),
        ("transformers", HUGGING_FACE, NET, "Net", 1),  # it fetches one batch ahead, which changes no weight
    ],
    ids=["lightning", "hugging face"],
)
def test_nvflares_own_integrations_are_bounded_too(
    tmp_path: Path, package: str, text: str, net: str, name: str, extra: int
) -> None:
    """An unchanged script of Lightning or of Hugging Face's Trainer makes exactly the steps that it is given."""
    pytest.importorskip(package)
    (tmp_path / "train.py").write_text(text, "utf-8")
    (tmp_path / "net.py").write_text(net, "utf-8")
    code = f"""
import numpy as np, metis
from metis.learning import Learner
from metis.learning.engine import EngineJob
from metis.nvflare.engine import NVFlareEngine, examples_of_script, client_of
from metis.nvflare.source import NVFlareSource

spec = NVFlareSource({str(tmp_path / "train.py")!r}, network="net.py:{name}", learners=("site-1",)).spec
engine, examples = NVFlareEngine(EngineJob(network=lambda: client_of(spec))), examples_of_script(spec, "site-1")
learner = Learner("site-1", 0, examples, np.arange(len(examples)), examples.batch_size, metis.VanillaSGD(0.1))
assert (len(examples), examples.batch_size) == (96, 8), (len(examples), examples.batch_size)
start = engine.initial_model(0)
for steps in (5, 20):
    trained = learner.train(engine, start, 1, steps)
    counted = int(trained.model.tensors()["seen.num_batches_tracked"])
    assert trained.steps == steps and steps <= counted <= steps + {extra} * (1 + steps // 12), (trained.steps, counted)
assert trained.model.sha256() == learner.train(engine, start, 1, 20).model.sha256()
before, after = (engine.evaluate(model, examples) for model in (start, trained.model))
print(before, after)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_scripts_are_deployed(tmp_path: Path) -> None:
    """A controller and two learners as processes; each learner names its own copy of the script."""
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    base = [sys.executable, "-c", "from metis.cli.app import main; main()"]
    file = str(EXAMPLE / "federation.toml")
    commands: list[list[str]] = [
        [
            "controller",
            file,
            "--state",
            "state",
            "--insecure",
            "--listen",
            address,
            "--http",
            "",
            "--set",
            "stop.rounds=2",
        ],
        *(
            ["learner", "--controller", address, "--insecure", "--name", name, "--nvflare", str(EXAMPLE / "train.py")]
            for name in ("site-1", "site-2")
        ),
    ]
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((tmp_path / f"{number}.log").open("w+")) for number in range(3)]
        processes = [
            stack.enter_context(subprocess.Popen([*base, *command], cwd=tmp_path, stdout=log, stderr=log))
            for command, log in zip(commands, logs, strict=True)
        ]
        try:
            codes = [processes[0].wait(HANG)]
            if codes == [0]:
                codes += [process.wait(HANG) for process in processes[1:]]
        finally:
            for process in processes:
                process.kill()
    text = "\n".join((tmp_path / f"{number}.log").read_text("utf-8") for number in range(3))
    assert codes == [0, 0, 0], text
    run = metis.Run.load(tmp_path / "state" / "run")
    assert run.rounds >= 2 and run.final_metric is not None and math.isfinite(run.final_metric)
