"""The status document as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

STATES = ("waiting for learners", "running", "paused", "stopping", "finished")
LEARNER_STATES = ("training", "waiting", "late", "disconnected", "away", "set aside")


def metrics_text(document: dict[str, Any]) -> bytes:
    from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(document))
    ProcessCollector(registry=registry)  # memory, descriptors and processor time of the controller
    return generate_latest(registry)


class _Collector:
    """The document as metrics. Counters never decrease, not even across a restart: they are folded from the journal."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily

        document, costs, disk = self._document, self._document["costs"], self._document["disk"]
        about = {name: str(document[name]) for name in ("run", "policy", "metric")}
        yield InfoMetricFamily("metis_run", "The run that this controller serves", about)
        state = GaugeMetricFamily("metis_state", "1 for the state that the federation is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], document["state"] == name)
        yield state
        left = None if document["deadline"] is None else document["deadline"] - document["seconds"]
        for name, text, value in (
            ("community_version", "Version of the community model", document["version"]),
            ("steps", "Local steps committed to the community model", document["steps"]),
            (
                "run_seconds",
                "Seconds of the run; the clock stands still while the controller is down",
                document["seconds"],
            ),
            ("deadline_seconds", "Seconds until the next deadline of the protocol", left),
            ("learners_expected", "Learners with which the run begins", document["expected"]),
            ("target", "Value of the metric to reach", document["target"]),
            ("disk_bytes", "Bytes in the state folder", document["disk_bytes"]),
            ("disk_free_bytes", "Bytes free on its disk", disk["free_bytes"]),
            ("disk_nearly_full", "1 if little is left on its disk", disk["nearly_full"]),
            ("disk_full", "1 while nothing can be written: the federation is on hold", disk["full"]),
            ("starts", "How often this run's controller was started", document["start"]),
        ):
            yield _gauge(f"metis_{name}", text, value)
        yield from self._evaluations()
        for name, text, value in (
            ("updates", "Local models handed in", costs["update_requests"]),
            ("updates_refused", "Updates that were refused", costs["refused_updates"]),
            ("models_exchanged", "Models sent to learners and handed in", costs["models_exchanged"]),
            ("bytes_exchanged", "Bytes of these models", costs["bytes_exchanged"]),
        ):
            yield _counter(f"metis_{name}", text, value)
        energy = GaugeMetricFamily(
            "metis_energy", "Epsilon seconds, or joules where powers are in watts, by three forms", labels=["form"]
        )
        for form, value in costs["energy"].items():
            energy.add_metric([form], value)
        yield energy
        calls = _counter("metis_refused_calls", "Calls refused since this start, by gRPC status", labels=["code"])
        for code, count in document["refused_calls"].items():
            calls.add_metric([code], count)
        yield calls
        yield from self._learners()

    def _evaluations(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        latest = dict(self._document["latest"] or {})
        yield _gauge(
            "metis_evaluated_version", "Version of the community model that was measured", latest.get("version")
        )
        best = self._document["best_version"]
        yield _gauge("metis_best_version", "Version of the best community model so far", best)
        metric = GaugeMetricFamily("metis_metric", "The latest evaluation of the community model", labels=["metric"])
        for name, value in latest.items():
            if name not in ("version", "at") and value is not None:
                metric.add_metric([name], value)
        yield metric

    def _learners(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import GaugeMetricFamily

        learners, steps = self._document["learners"], self._document["costs"]["steps_by_learner"]
        counted = [learner["state"] for learner in learners]
        states = GaugeMetricFamily("metis_learners", "Learners in each state", labels=["state"])
        state = GaugeMetricFamily(
            "metis_learner_state", "1 for the state that a learner is in", labels=["learner", "state"]
        )
        for name in LEARNER_STATES:
            states.add_metric([name], counted.count(name))
            for learner in learners:
                state.add_metric([learner["name"], name], learner["state"] == name)
        yield from (states, state)
        for key, name, text in (
            ("connected", "connected", "Whether its stream is open"),
            ("examples", "examples", "Training examples that it holds"),
            ("time_per_batch", "seconds_per_batch", "Measured by itself, warm-up excluded"),
            ("silent_seconds", "silent_seconds", "Since its last sign of life"),
            ("steps_of_task", "task_steps", "Steps of its current task, as of its latest heartbeat"),
            ("compression_error", "compression_error", "Share of its latest update that waits for the next one"),
            # Not counters: work in progress counts as active until it is known how much of it was transfer.
            ("active", "active_seconds", "Spent training"),
            ("idle", "idle_seconds", "Spent waiting for a task"),
            ("transfer", "transfer_seconds", "Spent sending and receiving models"),
        ):
            gauge = GaugeMetricFamily(f"metis_learner_{name}", text, labels=["learner"])
            for learner in learners:
                if learner.get(key) is not None:
                    gauge.add_metric([learner["name"]], learner[key])
            yield gauge
        done = GaugeMetricFamily("metis_learner_steps", "Local steps of its updates", labels=["learner"])
        for name, count in steps.items():
            done.add_metric([name], count)
        yield done
        for key, name, text in (
            ("updates", "updates", "Local models that it handed in"),
            ("refused", "updates_refused", "Its updates that were refused"),
        ):
            counter = _counter(f"metis_learner_{name}", text, labels=["learner"])
            for learner in learners:
                counter.add_metric([learner["name"]], learner[key])
            yield counter


def _gauge(name: str, text: str, value: float | None) -> Metric:
    """A gauge, without a sample if there is no value."""
    from prometheus_client.metrics_core import GaugeMetricFamily

    gauge = GaugeMetricFamily(name, text)
    if value is not None:
        gauge.add_metric([], value)
    return gauge


def _counter(name: str, text: str, value: float | None = None, labels: list[str] | None = None) -> Any:
    from prometheus_client.metrics_core import CounterMetricFamily

    counter = CounterMetricFamily(name, text, labels=labels)
    if value is not None:
        counter.add_metric([], value)
    return counter
