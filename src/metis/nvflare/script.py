"""One run of a script under NVFlare's Client API: it receives a model, sends another, and comes to its end.

`flare.init` finds the interface on NVFlare's data bus. A script runs in this process, from its first line on in each
task, so nothing is left of one task in the next; it is bounded, timed and seeded by `metis.learning.torch.foreign`.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.client import api as client_api
from nvflare.client.api_spec import CLIENT_API_KEY
from nvflare.client.config import ConfigKey, ExchangeFormat, TransferType
from nvflare.client.in_process.api import InProcessClientAPI
from nvflare.fuel.data_event.data_bus import DataBus

from metis.errors import DataError, MetisError, described

TRAIN, EVALUATE, SUBMIT = "train", "validate", "submit_model"
STEPS, SECONDS = "metis-steps", "metis-seconds"  # the budget of a task, in the meta of the model that a script receives

Arrays = dict[str, NDArray[Any]]


class _Over(BaseException):
    """The script asked for more than there is; nothing of its own may catch this."""


class Sent:
    """What a script sent: arrays as a whole model, metrics, and what it says of itself."""

    def __init__(self, arrays: Arrays | None, metrics: dict[str, float], meta: dict[str, Any]) -> None:
        self.arrays, self.metrics, self.meta = arrays, metrics, meta


class MetisClientAPI(InProcessClientAPI):  # type: ignore[misc]
    """The interface that `flare.init` gives a script; it hands out models without a server."""

    def __init__(
        self, site: str, task: str, tensors: bool, number: int, budget: dict[str, Any], again: Callable[[Sent], bool]
    ) -> None:
        form = ExchangeFormat.PYTORCH if tensors else ExchangeFormat.NUMPY
        super().__init__(
            {
                FLMetaKey.SITE_NAME: site,
                FLMetaKey.JOB_ID: "metis",
                ConfigKey.TASK_NAME: task,
                ConfigKey.TASK_EXCHANGE: {
                    ConfigKey.TRAIN_WITH_EVAL: False,
                    ConfigKey.EXCHANGE_FORMAT: form,
                    ConfigKey.SERVER_EXPECTED_FORMAT: form,
                    ConfigKey.TRANSFER_TYPE: TransferType.FULL,
                    ConfigKey.TRAIN_TASK_NAME: TRAIN,
                    ConfigKey.EVAL_TASK_NAME: EVALUATE,
                    ConfigKey.SUBMIT_MODEL_TASK_NAME: SUBMIT,
                },
            }
        )
        self._tensors, self._number, self._budget, self._again = tensors, number, budget, again
        self._waiting: Arrays | None = None
        self._received: Arrays = {}

    def offer(self, arrays: Arrays) -> None:
        """The next model that the script receives."""
        self._waiting, self.fl_model = arrays, None

    def receive(self, timeout: float | None = None) -> FLModel:
        if self.fl_model is None:
            if self._waiting is None:
                raise _Over
            self._received, self._waiting = self._waiting, None
            self.fl_model = FLModel(
                params_type=ParamsType.FULL,
                params={name: self._own(array) for name, array in self._received.items()},
                current_round=self._number,
                total_rounds=self._number + 1,
                meta={FLMetaKey.SITE_NAME: self.get_site_name(), **self._budget},
            )
        self.receive_called = True
        return self.fl_model

    def is_running(self) -> bool:
        offered: Any = self.fl_model  # also while it is trained on
        return offered is not None or self._waiting is not None

    def send(self, model: Any, clear_cache: bool = True) -> None:
        if not self.receive_called:
            raise RuntimeError("the script sends a model before it has received one")
        arrays = None if model.params is None else self._whole(model.params, model.params_type == ParamsType.DIFF)
        numbers = {str(name): float(value) for name, value in (model.metrics or {}).items() if _is_number(value)}
        self.fl_model, self.receive_called = None, False
        if not self._again(Sent(arrays, numbers, dict(model.meta or {}))):
            self._waiting = None
            if self.meta[ConfigKey.TASK_NAME] == EVALUATE:
                raise _Over  # a script that knows nothing of this task would go on to train
        elif arrays is not None:
            self.offer(arrays)

    def log(self, key: str, value: Any, data_type: Any, **kwargs: Any) -> None:
        """Nothing of a site's logs leaves it."""

    def clear(self) -> None:
        """As after `send`: the model that was offered next is still there."""
        self.fl_model, self.receive_called = None, False

    def shutdown(self) -> None:
        self._waiting = None

    def _own(self, array: NDArray[Any]) -> Any:
        if not self._tensors:
            return np.array(array)
        from metis.learning.torch.flat import from_numpy

        return from_numpy(array)

    def _whole(self, params: Any, difference: bool) -> Arrays:
        if not isinstance(params, dict):
            raise RuntimeError(f"the script sends params of type {type(params).__name__}; they must be a dictionary")
        arrays = {str(name): _array(value) for name, value in params.items()}
        if difference:
            arrays = {name: self._received[name] + array for name, array in arrays.items() if name in self._received}
        return arrays


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return np.array(value.float().numpy() if "bfloat16" in str(value.dtype) else value.numpy())
    return np.array(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def run_script(script: Path, args: str, api: MetisClientAPI, site: str) -> None:
    """From its first line to its end; what it raises becomes one sentence."""
    bus = DataBus()
    bus.put_data(CLIENT_API_KEY, api)
    _forget_context()
    try:
        with _as_main(script, shlex.split(args.replace("{site}", site))), contextlib.suppress(_Over):
            runpy.run_path(str(script), run_name="__main__")
    except (MetisError, KeyboardInterrupt):
        raise
    except SystemExit as problem:
        if problem.code:
            raise DataError(f"the NVFlare script {script.name} of '{site}' ended with {problem.code}") from problem
    except Exception as problem:
        raise DataError(f"the NVFlare script {script.name} of '{site}' failed: {described(problem)}") from problem
    finally:
        api.close()
        bus.put_data(CLIENT_API_KEY, None)
        _forget_context()


def _forget_context() -> None:
    """A script's `flare.init` finds no context of an earlier one, and its `flare.patch` no other trainer."""
    client_api.context_dict.clear()
    client_api.default_context = None
    hugging_face = sys.modules.get("nvflare.app_opt.hf.api")
    if hugging_face is not None:
        vars(hugging_face)["_ACTIVE_STATE"] = None


@contextlib.contextmanager
def _as_main(script: Path, arguments: list[str]) -> Iterator[None]:
    """As `python script.py arguments` would run it, in an empty folder; what it prints is not an answer of Metis."""
    kept, folder = (sys.argv, [*sys.path]), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="metis-nvflare-") as own:
        sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
        os.chdir(own)
        try:
            with contextlib.redirect_stdout(_Quiet()):
                yield
        finally:
            os.chdir(folder)
            sys.argv, sys.path[:] = kept


class _Quiet(io.TextIOBase):
    """Goes to stderr, where a deployed learner keeps what its site prints."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()
