"""The tracker `tensorboard`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metis.reporting.trackers.tracker import at_target, flat
from metis.runs.folds import HistoryPoint, RunFold
from metis.runs.setting import Setting


class TensorBoardTracker:
    """Event files for `tensorboard --logdir`; its relative time is the run's own clock."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._started = 0.0

    def begin(self, setting: Setting, config: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._writer, self._started = EventFileWriter(str(self._folder), flush_secs=5), time.time()
        # Hides what an earlier, interrupted attempt at this run left: all of it comes again.
        self._writer.add_event(Event(wall_time=self._started, step=0, session_log=SessionLog(status=SessionLog.START)))
        content = {"policy": setting.policy, "seed": setting.seed, **setting.facts, **dict(flat(config))}
        self._text("configuration", "\n".join(f"    {name} = {value}" for name, value in content.items()))

    def _text(self, name: str, text: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        value = Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)
        self._writer.add_event(Event(wall_time=self._started, step=0, summary=Summary(value=[value])))

    def record(self, point: HistoryPoint, fresh: Mapping[str, float]) -> None:
        self._scalars(point.version, point.at, fresh)

    def _scalars(self, step: int, at: float, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        content = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.add_event(Event(wall_time=self._started + at, step=step, summary=Summary(value=content)))

    def end(self, fold: RunFold) -> None:
        if fold.costs_at_target is not None:
            self._scalars(fold.version, fold.now, at_target(fold.costs_at_target))
        self._text("ended", fold.finish_reason or "interrupted")
        self._writer.close()
