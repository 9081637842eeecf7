"""What the figures of the paper show, taken from runs, schedules and divisions of the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from metis.core.stop import StopRule
from metis.errors import DataError
from metis.experiments.config.load import ExperimentConfig
from metis.experiments.data import divide
from metis.reproduction.environments import Environment, Scale, load_environments, varied
from metis.reproduction.figures import (
    Curve,
    Drawn,
    Holding,
    MixingCurve,
    Panel,
    Silos,
    active_idle_figure,
    age_figure,
    class_figure,
    convergence_figure,
    mixing_figure,
    silos_figure,
)
from metis.reproduction.schedule import dry_run
from metis.reproduction.tables import Evidence, MixingTime, slowest_learner_epochs, solver_of
from metis.runs.run import Run


def draw_figures(
    evidence: Evidence,
    results: Sequence[str],
    folder: Path,
    *,
    left_out: Callable[[str, DataError], None] | None = None,
) -> Drawn:
    """Draw every figure asked for whose runs are there.

    Who holds what (Figures 5 and 6) is drawn from the data themselves; with `left_out` they need not be there.
    """
    drawn = Drawn()
    for name in ("figure7", "figure8", "figure9", "figure10", "figure11"):
        panels = [_panel(evidence, environment) for environment in evidence.of(name) if evidence.cells(environment)]
        if name in results and panels:
            second = "rounds" if name == "figure11" else "update_requests"
            drawn.add(name, folder, lambda panels=panels, second=second: convergence_figure(panels, second))  # type: ignore[misc]
    if "figure2" in results:
        timelines = _idle_panels()
        drawn.add("figure2", folder, lambda: active_idle_figure(timelines))
    if "figure4" in results and evidence.mixing_times:
        curves = _mixing_curves(evidence.mixing_times)
        drawn.add("figure4", folder, lambda: mixing_figure(curves))
    if "figure5" in results and (classes := _held(lambda: _class_holdings(evidence.scale), "figure5", left_out)):
        drawn.add("figure5", folder, lambda: class_figure(classes))
    if "figure6" in results and (ages := _held(lambda: _age_holdings(evidence), "figure6", left_out)):
        drawn.add("figure6", folder, lambda: age_figure(ages))
    silos = [_silos(evidence, environment) for environment in evidence.of("figure12") if evidence.alone(environment)]
    if "figure12" in results and silos:
        drawn.add("figure12", folder, lambda: silos_figure(silos))
    return drawn


def _panel(evidence: Evidence, environment: Environment) -> Panel:
    centralized = evidence.centralized(environment)
    curves = [
        Curve(cell.label, run, cell.policy.name, solver_of(cell), slowest_learner_epochs(cell))
        for cell, run in evidence.cells(environment)
    ]
    title = environment.paper.distribution
    return Panel(title, curves, None if centralized is None else centralized.best_metric)


def _of_domain(environments: Mapping[str, Environment], domain: str) -> ExperimentConfig:
    return next(found for found in environments.values() if found.paper.domain == domain).config


def _idle_panels() -> list[tuple[str, Run]]:
    """Figure 2 needs no training: the idle time of the schedules at the paper's scale."""
    environments = load_environments("paper", results=["figure8", "figure9"])
    panels = []
    for domain, network in (("CIFAR-10", "2-CNN CIFAR-10"), ("CIFAR-100", "ResNet-50 CIFAR-100")):
        config = _of_domain(environments, domain)
        for title, policy in (
            ("Sync", {"name": "sync_fedavg", "local_epochs": 4.0}),
            ("SemiSync (λ=2)", {"name": "semisync_fedavg", "slowest_learner_epochs": 2.0, "timings": "cold_start"}),
        ):
            changed = varied(config, partition={"sizes": "uniform", "classes": "iid"}, policy=[policy])
            # As long as five synchronous rounds: enough to see the cold start and the rounds after it.
            rounds = 5 if title == "Sync" else 10
            panels.append((f"{network}\n{title}", dry_run(changed, StopRule(rounds=rounds))))
    return panels


def _mixing_curves(measured: Sequence[MixingTime]) -> list[MixingCurve]:
    curves = []
    for network in dict.fromkeys(row.network for row in measured):
        rows = sorted((row for row in measured if row.network == network), key=lambda row: row.learners)
        curves.append(
            MixingCurve(
                network,
                [row.learners for row in rows],
                [row.cached for row in rows],
                [row.full_pass for row in rows],
            )
        )
    return curves


def _class_holdings(scale: Scale) -> list[Holding]:
    """The three distributions that the paper shows; not all of them are used for training."""
    environments = load_environments(scale, results=["figure8", "figure9", "figure10"])
    holdings = []
    for domain, partition, title in (
        ("CIFAR-10", {"sizes": "uniform", "classes": "non_iid", "classes_per_learner": 5}, "Uniform & Non-IID(5)"),
        ("CIFAR-100", {"sizes": "skewed", "classes": "non_iid", "classes_per_learner": 50}, "Skewed & Non-IID(50)"),
        ("ExtendedMNIST", {"sizes": "power_law", "classes": "iid"}, "Power Law & IID"),
    ):
        config = _of_domain(environments, domain)
        division = divide(varied(config, partition=partition))
        shown = "MNIST for ExtendedMNIST" if config.data.dataset == "mnist" else domain
        names = [assignment.name for assignment in division.assignments]
        holdings.append(Holding(f"{shown}\n{title}", names, division.counts))
    return holdings


def _held(
    holdings: Callable[[], list[Holding]], name: str, left_out: Callable[[str, DataError], None] | None
) -> list[Holding]:
    try:
        return holdings()
    except DataError as problem:
        if left_out is None:
            raise
        left_out(name, problem)
        return []


def _age_holdings(evidence: Evidence) -> list[Holding]:
    return [_age_holding(environment) for environment in evidence.of("figure6")]


def _age_holding(environment: Environment) -> Holding:
    division = divide(environment.config)
    ages = [division.dataset.y_train[assignment.indices] for assignment in division.assignments]
    return Holding(
        environment.paper.distribution, [assignment.name for assignment in division.assignments], targets=ages
    )


def _silos(evidence: Evidence, environment: Environment) -> Silos:
    alone = {run.setting.learners[0].name: run.best_metric for run in evidence.alone(environment)}
    together = {cell.label.removesuffix(" w/ Vanilla"): run.best_metric for cell, run in evidence.cells(environment)}
    centralized = evidence.centralized(environment)
    return Silos(
        environment.paper.distribution,
        str(environment.config.evaluation.metric),
        {name: value for name, value in alone.items() if value is not None},
        {name: value for name, value in together.items() if value is not None},
        None if centralized is None else centralized.best_metric,
    )
