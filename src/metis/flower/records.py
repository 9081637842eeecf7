"""Models as the records of Flower's messages, and back; every record is checked where it enters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from numpy.typing import NDArray

from metis.core.model import Layout, Model
from metis.errors import ClientFailed

# The budget of a task in the config of a message of type train, and what a client may answer.
STEPS = "metis-steps"  # how many steps to make; what was really made, in the metrics of the reply
SECONDS = "metis-seconds"  # how long to train at most
TIME_PER_BATCH = "metis-time-per-batch"  # seconds, in the metrics of a reply
BATCH_SIZE = "metis-batch-size"
ROUND = "server-round"
EXAMPLES = ("num-examples", "num_examples")


def arrays_of(content: RecordDict) -> dict[str, NDArray[Any]]:
    """The arrays of the only ArrayRecord."""
    records = list(content.array_records.values())
    if len(records) != 1:
        raise ClientFailed(f"a message of the Flower app has {len(records)} ArrayRecords; it must have one")
    try:
        return {str(name): array.numpy() for name, array in records[0].items()}
    except (TypeError, ValueError, OSError, EOFError) as problem:
        raise ClientFailed(f"the arrays of a Flower message cannot be read: {problem}") from None


def model_of(content: RecordDict, layout: Layout) -> Model:
    """The model that a reply carries; other names or shapes are refused in one sentence."""
    try:
        return Model.from_tensors(arrays_of(content), layout)
    except ValueError as problem:
        raise ClientFailed(f"the Flower client returned another model than it was given: {problem}") from None


def record_of(model: Model) -> ArrayRecord:
    arrays = {name: np.asarray(array) for name, array in model.tensors().items()}
    for spec in model.layout.tensors:
        if spec.dtype == "float16":
            arrays[spec.name] = arrays[spec.name].astype(np.float16)
    from flwr.app import Array

    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def content_with(template: RecordDict, model: Model, config: Mapping[str, Any]) -> RecordDict:
    """A copy of the template with this model in it, and with these keys added to its config."""
    content = RecordDict()
    for name, record in template.items():
        if isinstance(record, ArrayRecord):
            content[name] = record_of(model)
        elif isinstance(record, ConfigRecord):
            content[name] = ConfigRecord({**record, **config})
        else:
            content[name] = record
    return content


def numbers_of(reply: Message) -> dict[str, float]:
    """All single numbers of a reply: the metrics of the message API, and those of a legacy client."""
    content, found = reply.content, {}
    for record in (*content.metric_records.values(), *content.config_records.values()):
        for name, value in record.items():
            if isinstance(value, (int, float)) and name not in ("code",):
                found[str(name)] = float(value)
    return found


def examples_of(numbers: Mapping[str, float]) -> int:
    """How many examples a reply speaks for; 0 if it does not say."""
    for name in EXAMPLES:
        value = numbers.get(name, 0.0)
        if math.isfinite(value) and value >= 1:
            return int(value)
    return 0


def metrics_of(numbers: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a reply; `loss` and `accuracy` also under these names, whatever the client calls them."""
    found = {name: value for name, value in numbers.items() if name not in EXAMPLES and not name.startswith("metis-")}
    for name, part in (("loss", "loss"), ("accuracy", "acc")):
        alias = next((key for key in found if part in key.lower()), None)
        if alias is not None:
            found.setdefault(name, found[alias])
    return found


def state_bytes(state: RecordDict) -> NDArray[np.uint8]:
    """What a client keeps in its context, as the memory of a learner keeps it."""
    whole: bytes = recorddict_to_proto(state).SerializeToString(deterministic=True)
    kept: NDArray[np.uint8] = np.frombuffer(whole, np.uint8).copy()
    return kept


def state_of(kept: NDArray[np.uint8]) -> RecordDict:
    proto = ProtoRecordDict()
    proto.ParseFromString(kept.tobytes())
    return recorddict_from_proto(proto)
