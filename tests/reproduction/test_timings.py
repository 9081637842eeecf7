"""The paper's rows with their own times: without training, iterations and parallel time come out as published."""

from __future__ import annotations

import pytest

from metis.errors import ConfigError
from metis.reproduction.command import timings_named
from metis.reproduction.environments import Cell, load_environments
from metis.reproduction.schedule import schedule_cell
from metis.reproduction.tables import ASYNC, SEMISYNC, protocol_of
from metis.reproduction.timings import row_times, timed, training_share
from metis.reproduction.verdicts import published

NOMINAL = load_environments("paper", results=["table2", "table3"])
PUBLISHED = load_environments("paper", results=["table2", "table3"], timings="published")
ROWS = [cell for there in PUBLISHED.values() for cell in there.cells if cell.published and cell.published.iterations]


def named(cell: Cell) -> str:
    return cell.name.replace("cifar10-", "").replace("-published-timings", "")


@pytest.mark.parametrize("cell", [cell for cell in ROWS if protocol_of(cell) == ASYNC], ids=named)
def test_asynchronous_rows_are_met_within_5_per_cent(cell: Cell) -> None:
    """Until the published number of update requests: as many iterations, in as much time."""
    costs, published = schedule_cell(cell).run.costs, cell.published
    assert published is not None
    assert costs.steps == pytest.approx(published.iterations, rel=0.05)
    assert costs.parallel_time == pytest.approx(published.parallel_time, rel=0.05)


@pytest.mark.parametrize("cell", [cell for cell in ROWS if protocol_of(cell) != ASYNC], ids=named)
def test_rows_with_rounds_keep_their_iterations_and_take_the_published_time(cell: Cell) -> None:
    """SemiSync's steps are those of the nominal times, which its learners then do not keep."""
    schedule, published = schedule_cell(cell), cell.published
    assert published is not None
    assert schedule.iterations == published.iterations
    assert schedule.run.costs.parallel_time == pytest.approx(published.parallel_time, rel=0.01)


def test_the_time_per_batch_of_a_row() -> None:
    """Cumulative time over iterations; the paper states 30 and 300 ms for all of them."""
    uniform = {cell.label: cell for cell in NOMINAL["cifar10-heterogeneous-uniform-iid"].cells}
    fedrec, semisync = row_times(uniform["FedRec"]), row_times(uniform["SemiSync (λ=2) w/ Momentum"])
    assert fedrec is not None and semisync is not None
    assert 1000 * fedrec["gpu"].time_per_batch == pytest.approx(31.3, abs=0.1)
    assert fedrec["cpu"].beside_request == pytest.approx(276, abs=1)
    assert 1000 * semisync["cpu"].time_per_batch == pytest.approx(541, abs=1)


def test_equal_tasks_have_no_share_of_the_batches() -> None:
    """Where all tasks are equally long, what comes with a request and what comes with a batch cannot be told apart."""
    for cell in NOMINAL["cifar10-heterogeneous-uniform-iid"].cells:
        if protocol_of(cell) == ASYNC:
            assert all(times.beside_batch == 0 for times in (row_times(cell) or {}).values())


def test_what_is_beside_training_is_not_active_time() -> None:
    """Without it the active energy of an asynchronous row is the published one, but for tasks that had not ended."""
    skewed = {cell.label: cell for cell in NOMINAL["cifar10-heterogeneous-skewed-noniid5"].cells}
    for label in ("FedRec", "AsyncFedAvg"):
        cell = skewed[label]
        assert cell.published is not None and cell.published.energy is not None
        (cost,) = published().costs(cell, "energy_active").values()
        assert cost.value == pytest.approx(cell.published.energy, rel=0.06)
    assert training_share(skewed["FedRec"]) < 0.7
    assert training_share(skewed["Sync w/ Vanilla"]) == training_share(skewed["FedAsync"]) == 1


def test_what_the_paper_does_not_report_keeps_the_nominal_times() -> None:
    cell = next(cell for cell in NOMINAL["cifar10-heterogeneous-skewed-noniid5"].cells if cell.label == "FedAsync")
    assert timed(cell, "published") is cell and row_times(cell) is None
    with pytest.raises(ConfigError, match="must be one of nominal, published"):
        timings_named("real")


def test_the_equation_charges_the_cold_start_a_whole_period() -> None:
    """R t_max = 5 x 30 s, where the run takes 15 + 4 x 30 s; likewise the energy (ten learners draw 15)."""
    cell = next(cell for cell in NOMINAL["cifar10-heterogeneous-uniform-iid"].cells if "λ=2) w/ Momentum" in cell.label)
    schedule = schedule_cell(cell)
    assert protocol_of(cell) == SEMISYNC
    assert schedule.run.costs.parallel_time == pytest.approx(135)
    assert schedule.by_equation() == pytest.approx({"parallel_time": 150, "energy": 150 * 15})
    assert schedule_cell(NOMINAL["cifar10-heterogeneous-uniform-iid"].cells[0]).by_equation() is None
