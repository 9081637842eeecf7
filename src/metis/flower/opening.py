"""How a Flower run begins: the initial model and the configs that its ServerApp would send in the first round.

The ServerApp runs on a grid that delivers nothing: as soon as it has sent a message of type train and one of type
evaluate, everything is known, and it ends. A legacy strategy is asked directly, and a client without a ServerApp for
its own parameters.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from metis.errors import ConfigError, described
from metis.flower.project import FlowerProject, FlowerSource
from metis.flower.records import EXAMPLES, ROUND, arrays_of

_NODES = 100  # that a strategy can sample from before anybody is there
_RUN, _SERVER = 1, 1
TRAIN, EVALUATE = "train", "evaluate"


@dataclass(frozen=True)
class Opening:
    """What every client of the run is sent: contents to put a model into, by type of message."""

    arrays: dict[str, NDArray[Any]] | None  # the initial model; None if nobody knows it here
    contents: dict[str, RecordDict]


class _Known(BaseException):
    """Everything is known; no strategy may catch this."""


def identify(node: int = _SERVER) -> None:
    """Who this process is, as Flower's own processes say it before they make messages."""
    with contextlib.suppress(ImportError):  # older releases did not ask
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = _RUN, node, 1


def context_of(project: FlowerProject, node: int, node_config: dict[str, Any], state: RecordDict) -> Context:
    identify(node)
    return Context(_RUN, node, node_config, state, dict(project.run_config))


def is_legacy(client_app: Any) -> bool:
    """Whether it is made of a `client_fn`, whose messages have other names."""
    return getattr(client_app, "_call", None) is not None


def open_run(project: FlowerProject, source: FlowerSource) -> Opening:
    """From the project's ServerApp; else from a file, or from a legacy client itself."""
    if source.start is not None:
        arrays = _from_file(Path(source.start))
        if project.server_app is None:
            return Opening(arrays, _plain_contents(project.client_app, arrays))
        return Opening(arrays, _from_server(project).contents)
    if project.server_app is not None:
        return _from_server(project)
    if is_legacy(project.client_app):
        own = _parameters_of_client(project, source)
        return Opening(own, _plain_contents(project.client_app, own))
    return Opening(None, _plain_contents(project.client_app, {}))


def _from_file(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as problem:
        raise ConfigError(f"the initial model {path} cannot be read as safetensors: {problem}") from None


def _plain_contents(client_app: Any, arrays: dict[str, NDArray[Any]]) -> dict[str, RecordDict]:
    """As Flower's own strategies name the records."""
    contents = {}
    for kind, legacy in ((TRAIN, "fitins"), (EVALUATE, "evaluateins")):
        names = (f"{legacy}.parameters", f"{legacy}.config") if is_legacy(client_app) else ("arrays", "config")
        contents[kind] = RecordDict({names[0]: ArrayRecord(), names[1]: ConfigRecord({ROUND: 1})})
    return contents


def _from_server(project: FlowerProject) -> Opening:
    app: Any = project.server_app
    context = context_of(project, _SERVER, {}, RecordDict())
    try:
        if getattr(app, "_main", None) is None:
            return _from_strategy(project, app, context)
        grid = _Grid(project.client_app)
        with _elsewhere(), contextlib.suppress(_Known):
            app(grid, context)
    except ConfigError:
        raise
    except (Exception, SystemExit) as problem:
        raise ConfigError(f"the ServerApp of {project.name} cannot say how the run begins: {described(problem)}") from (
            problem
        )
    train = grid.seen.get(TRAIN)
    if train is None:
        raise ConfigError(f"the ServerApp of {project.name} ended without a message of type train, so nothing is known")
    contents = {TRAIN: train, EVALUATE: grid.seen.get(EVALUATE, train)}
    return Opening(arrays_of(train), contents)


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """In a folder that is thrown away, for what a ServerApp writes before its first round."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="metis-flower-") as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def _from_strategy(project: FlowerProject, app: Any, context: Context) -> Opening:
    """Of a legacy ServerApp, which has a strategy and no main function."""
    from flwr.server.client_manager import SimpleClientManager
    from flwr.server.strategy import FedAvg

    made: Any = app if app._server_fn is None else app._server_fn(context)
    strategy = getattr(made, "strategy", None) or getattr(made, "_strategy", None) or FedAvg()
    clients = SimpleClientManager()
    for number in range(_NODES):
        clients.register(_proxy(number + 1))
    parameters = strategy.initialize_parameters(clients)
    if parameters is None:
        arrays: dict[str, NDArray[Any]] = _parameters_of_client(project, FlowerSource(""))
    else:
        arrays = _arrays_of_parameters(parameters)
        strategy_parameters = parameters
    contents = _plain_contents(project.client_app, arrays)
    if parameters is not None:
        for kind, configure in ((TRAIN, strategy.configure_fit), (EVALUATE, strategy.configure_evaluate)):
            asked = configure(1, strategy_parameters, clients)
            if asked:
                name = next(iter(contents[kind].config_records))
                contents[kind][name] = ConfigRecord({ROUND: 1, **asked[0][1].config})
    return Opening(arrays, contents)


def _proxy(number: int) -> Any:
    from flwr.server.client_proxy import ClientProxy

    class Nobody(ClientProxy):  # type: ignore[misc]
        """Can be sampled, and answers nothing."""

        def get_properties(self, *_: Any) -> Any: ...
        def get_parameters(self, *_: Any) -> Any: ...
        def fit(self, *_: Any) -> Any: ...
        def evaluate(self, *_: Any) -> Any: ...
        def reconnect(self, *_: Any) -> Any: ...

    return Nobody(str(number))


def _arrays_of_parameters(parameters: Any) -> dict[str, NDArray[Any]]:
    from flwr.common import parameters_to_ndarrays

    return {str(index): np.asarray(array) for index, array in enumerate(parameters_to_ndarrays(parameters))}


def _parameters_of_client(project: FlowerProject, source: FlowerSource) -> dict[str, NDArray[Any]]:
    node_config = source.node(source.learners[0]) if source.learners else {"partition-id": 0, "num-partitions": 1}
    context = context_of(project, _SERVER, dict(node_config), RecordDict())
    content = RecordDict({"getparametersins.config": ConfigRecord()})
    message = Message(content, dst_node_id=_SERVER, message_type="get_parameters")
    try:
        return arrays_of(project.client_app(message, context).content)
    except (Exception, SystemExit) as problem:
        raise ConfigError(
            f"the client of {project.name} does not say what model it starts with ({described(problem)}); give its "
            "weights as a safetensors file: training.initial_model"
        ) from problem


class _Grid(Grid):  # type: ignore[misc]
    """Delivers nothing, notes what a ServerApp sends first, and answers so that it goes on to evaluate."""

    def __init__(self, client_app: Any) -> None:
        self.seen: dict[str, RecordDict] = {}
        self._client_app = client_app
        self._pushed: list[Message] = []
        self._run: Any = None

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        from flwr.supercore.run import Run

        return self._run or Run.create_empty(_RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)

    def get_node_ids(self) -> Iterable[int]:
        return list(range(1, _NODES + 1))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._pushed = list(messages)
        self._note(self._pushed)
        return [str(number) for number in range(len(self._pushed))]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._answer(self._pushed[int(number)]) for number in message_ids]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        sent = list(messages)
        self._note(sent)
        return [self._answer(message) for message in sent[:2]]

    def _note(self, messages: list[Message]) -> None:
        for message in messages:
            kind = message.metadata.message_type.partition(".")[0]
            if kind in self.seen or (kind == EVALUATE and TRAIN not in self.seen):
                raise _Known  # the second round, or one that begins without training
            if kind in (TRAIN, EVALUATE):
                self.seen[kind] = message.content
            if kind == EVALUATE:
                raise _Known
            break

    def _answer(self, message: Message) -> Message:
        if message.metadata.message_type.partition(".")[0] != TRAIN:
            raise _Known
        arrays = next(iter(message.content.array_records.values()), ArrayRecord())
        numbers = MetricRecord({EXAMPLES[0]: 1})
        return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=message)
