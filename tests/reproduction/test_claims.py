"""Verdicts on the paper's claims, from made-up runs that support them and from others that do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

import metis.reproduction.verdicts as verdicts_module
from metis.core.events import Action, CommunityPublished, Evaluated, Event
from metis.core.model import Model
from metis.core.stop import StopRule, Target
from metis.reproduction import readings
from metis.reproduction.claims import Claim, check_claims
from metis.reproduction.curves import Steady, settings_digest
from metis.reproduction.effort import effort, reason
from metis.reproduction.environments import Cell, Environment, load_environments
from metis.reproduction.schedule import dry_run
from metis.reproduction.tables import Evidence, MixingTime, characteristics, cost_table
from metis.reproduction.verdicts import (
    Comparison,
    Cost,
    Finding,
    Outcome,
    Part,
    Ratio,
    Spread,
    _unexplained,
    deviations,
    ours,
)
from metis.runs.run import Run

TABLE_3 = {environment.name: environment for environment in load_environments("paper", results=["table3"]).values()}
BRAIN = load_environments("paper", results=["figure11"])

SPREAD = 0.1  # from seed to seed, in ln(cost)

# After how many published models the target is reached, if the paper is right; 0 is never.
AS_THE_PAPER_SAYS = {
    "Sync w/ Vanilla": 20,
    "SemiSync (λ=2) w/ Vanilla": 8,
    "Sync w/ Momentum": 10,
    "SemiSync (λ=2) w/ Momentum": 4,
    "Sync w/ FedProx": 20,
    "SemiSync (λ=2) w/ FedProx": 8,
    "FedRec": 800,
    "AsyncFedAvg": 1400,
    "FedAsync": 0,
}


@pytest.fixture(autouse=True)
def little_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    """One seed decides, because made-up runs differ by less than a factor of two."""
    monkeypatch.setattr(verdicts_module, "PRIOR_SPREAD", SPREAD)


def made_up(cell: Cell, versions: int, best: float | None = None) -> Run:
    """A run whose schedule is real and whose metric reaches the target with the given version."""
    target, metric = cell.config.evaluation.target, cell.config.evaluation.metric
    assert target is not None and metric is not None
    never = 30 if cell.policy.name.endswith("sync_fedavg") else 1500
    dry = dry_run(cell.config, StopRule(rounds=max(versions or never, 12)))
    worse = target + 1.0 if metric == "mae" else target - 0.01
    events: list[tuple[float, Event | Action]] = []
    for now, item in dry.events:
        events.append((now, item))
        if isinstance(item, CommunityPublished):
            reached = versions and item.stamp.version >= versions
            events.append((now, Evaluated(item.stamp.version, {metric: (best or target) if reached else worse})))
    return Run(dry.setting, events, Model.empty(), 1.0)


def evidence(
    environments: Mapping[str, Environment], versions: Mapping[str, int], **changed: Mapping[str, int]
) -> Evidence:
    """Runs of every policy; `changed` says otherwise for one distribution."""
    runs = {}
    for environment in environments.values():
        own = {**versions, **changed.get(environment.config.partition.sizes, {})}
        runs |= {cell.name: made_up(cell, own[cell.label]) for cell in environment.cells}
    return Evidence("paper", dict(environments), runs)


def verdicts(evidence: Evidence, *words: str) -> list[Claim]:
    """The claims whose text has all of these words."""
    found = check_claims(evidence, words)
    assert found, words
    return found


@pytest.fixture(scope="module")
def supporting() -> Evidence:
    """Runs that come out as the paper says, with Sync w/ Momentum failing on power law data."""
    return evidence(TABLE_3, AS_THE_PAPER_SAYS, power_law={"Sync w/ Momentum": 0})


@pytest.fixture(scope="module")
def contradicting() -> Evidence:
    """Runs in which Sync w/ Momentum is first everywhere, and FedRec the slowest of its kind."""
    return evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "Sync w/ Momentum": 1, "FedRec": 1100, "FedAsync": 400})


@pytest.mark.parametrize(
    "words",
    [
        ("Heterogeneous", "first"),
        ("Heterogeneous", "fewest"),
        ("before Sync", "Momentum"),
        ("fails on power law",),
        ("FedRec is the fastest",),
    ],
)
def test_a_claim_follows_the_runs(words: tuple[str, ...], supporting: Evidence, contradicting: Evidence) -> None:
    """Confirmed by runs that support it, contradicted by others, with the numbers of either."""
    (yes,), (no,) = verdicts(supporting, *words), verdicts(contradicting, *words)

    assert yes.verdict == "confirmed", yes.sentence
    assert no.verdict == "contradicted", no.sentence
    assert yes.sentence != no.sentence


def test_momentum_that_reaches_the_target_does_not_fail() -> None:
    """Whether or not vanilla SGD reaches it too."""
    found = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "Sync w/ Momentum": 8, "Sync w/ Vanilla": 0})
    assert verdicts(found, "fails on power law")[0].verdict == "contradicted"


@pytest.mark.parametrize(
    ("measured", "reached_at"),
    [
        ([(5, 0.3), (10, 0.31), (15, 0.62), (20, 0.3)], None),  # one lucky model of a policy that jumps
        ([(5, 0.3), (10, 0.62), (45, 0.59), (50, 0.61)], 50),  # lucky first, then at the target
        ([(47, 0.3), (94, 0.61)], 94),  # a policy that publishes seldom
        ([(30, 0.1), (60, 0.6)], 60),  # what is as old as the window does not count
        ([(5, 0.57), (10, 0.59), (15, 0.6)], 15),
    ],
)
def test_a_lucky_model_of_a_jumping_policy_does_not_count(
    measured: list[tuple[float, float]], reached_at: float | None
) -> None:
    """The target is reached when the median of the last 30 s is close to it, too."""
    steady = Steady(Target("accuracy", 0.6))
    found = [at for at, value in measured if steady.note(at, {"accuracy": value})]
    assert found == ([] if reached_at is None else [reached_at])


def test_a_stricter_rule_about_luck() -> None:
    """A longer window or a smaller tolerance."""
    measured = [(5, 0.5), (20, 0.59), (40, 0.58), (45, 0.61)]
    rules: tuple[tuple[dict[str, float], list[int]], ...] = (
        ({}, [45]),
        ({"seconds": 50.0}, [45]),
        ({"within": 0.0}, []),
        ({"within": 0.01}, [45]),
    )
    for rule, reached in rules:
        steady = Steady(Target("accuracy", 0.6), **rule)
        assert [at for at, value in measured if steady.note(at, {"accuracy": value})] == reached, rule


def test_an_error_in_years_does_not_jump() -> None:
    """The first model at the target counts; without a target nothing does."""
    steady = Steady(Target("mae", 5.0, higher_is_better=False))
    assert [steady.note(at, {"mae": value}) for at, value in ((1, 9.0), (2, 8.0), (3, 4.9))] == [False, False, True]
    assert not Steady(None).note(1, {"accuracy": 1.0})


def test_the_numbers_in_a_sentence_are_those_of_the_runs(supporting: Evidence) -> None:
    """Four rounds of SemiSync on uniform data: a cold start of 15 s and three periods of 30 s."""
    (claim,) = verdicts(supporting, "Heterogeneous", "first")

    assert f"Uniform & IID: SemiSync (λ=2) w/ Momentum {15 + 3 * 30} s" in claim.sentence


def test_energy_has_a_verdict_by_each_definition(supporting: Evidence) -> None:
    """SemiSync lets fast learners train instead of wait, which costs energy unless waiting does as well."""
    found = {claim.text.rpartition(" (")[2]: claim for claim in verdicts(supporting, "saves about 40 %")}
    rows = [row for there in TABLE_3.values() for row in cost_table(there, supporting)["ratios"]]

    assert len(found) == 3
    assert found["active time only)."].paper == found["by the paper's equation)."].paper == "fails"
    assert "by its column EC it holds: +4" in found["active time only)."].paper_sentence
    for row in rows:
        if row["energy_active"]["ours"] is not None:
            assert row["energy_active"]["ours"] < row["energy_idle_charged"]["ours"]


def test_the_papers_tables_are_judged_by_the_same_rule(supporting: Evidence) -> None:
    """They hold its headline; its learners were not idle-free, and by its equation SemiSync costs more energy."""
    assert verdicts(supporting, "Heterogeneous", "first")[0].paper == "holds"
    assert verdicts(supporting, "no idle time")[0].paper == "fails"
    assert verdicts(supporting, "3 to 9 times", "equation")[0].paper == "fails"
    assert "×2.01" in verdicts(supporting, "Heterogeneous", "first")[0].paper_sentence


def test_a_table_that_does_not_decide_is_not_one_that_says_nothing(supporting: Evidence) -> None:
    """Sync w/ Momentum never gets there on power law data, so that the paper's mean is open; an accuracy has no row."""
    assert verdicts(supporting, "Momentum SGD needs less time")[0].paper == "open"
    assert verdicts(supporting, "CIFAR-100", "final")[0].paper == ""


def test_what_was_not_run_is_undecided(supporting: Evidence) -> None:
    """It says what is missing, and which results decide it."""
    (missing,) = verdicts(supporting, "CIFAR-100", "fastest")
    assert (missing.verdict, missing.needs) == ("undecided", "figure9")
    partly = Evidence("paper", supporting.environments, dict(list(supporting.runs.items())[:-3]))
    assert verdicts(partly, "Heterogeneous", "first")[0].verdict == "undecided"


def test_an_undecided_claim_says_which_runs_would_decide_it(supporting: Evidence) -> None:
    """Runs that were not made or not far enough; and seeds, where one does not decide."""
    runs = {name: run for name, run in supporting.runs.items() if "fedrec" not in name}
    (first,) = verdicts(Evidence("paper", supporting.environments, runs), "Heterogeneous", "first")
    assert "to be run further: FedRec (cifar10-heterogeneous-uniform-iid)" in first.open, first.open
    close = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "SemiSync (λ=2) w/ Vanilla": 5})
    (first,) = verdicts(close, "Heterogeneous", "first")
    assert "up to 2 seeds of SemiSync (λ=2) w/ Momentum and SemiSync (λ=2) w/ Vanilla" in first.open, first.open
    assert not verdicts(supporting, "Heterogeneous", "first")[0].open


@pytest.mark.parametrize(
    ("mean", "least", "among", "seeds"),
    [
        (2.0, 1.0, 1, 2),  # 1.96 * 0.3 * sqrt(2 / 2) < ln 2
        (1.1, 1.0, 1, 45),  # clearly above 1 and as soon within 1.25, whichever comes first
        (1.0, 1.0, 1, 17),  # a tie
        (0.5, 1.0, 22, 4),  # one of many contradicts a claim only if it is clearer
        (2.9, 3.0, 1, 605),  # no tie: the question is not whether costs are equal
    ],
)
def test_seeds_that_would_decide(mean: float, least: float, among: int, seeds: int) -> None:
    """As many as make the interval so narrow that it decides, and no fewer."""
    ratio = Ratio(mean, "exact", 1, 0.3)
    assert ratio.seeds_to_decide(least, among=among) == seeds
    assert ratio.with_seeds(seeds).above(least, among=among) != "open"
    assert seeds == 1 or ratio.with_seeds(seeds - 1).above(least, among=among) == "open"


def test_no_number_of_seeds_decides_a_bound() -> None:
    """It has to be run further: so many times as far."""
    bound = Ratio(1.2, "at least", 1, 0.1)
    assert bound.seeds_to_decide() is None
    times = bound.short_of()
    assert replace(bound, mean=1.2 * times * 1.001).above() == "holds"
    assert replace(bound, mean=1.2 * times * 0.999).above() == "open"
    bound = Ratio(0.9, "at most", 3, 0.1)
    times = bound.short_of(among=5)
    assert replace(bound, mean=0.9 / times * 0.999).above(among=5) == "fails"
    assert replace(bound, mean=0.9 / times * 1.001).above(among=5) == "open"


def test_nobody_at_the_target_is_undecided() -> None:
    """Neither confirmed nor contradicted: the target was out of reach."""
    nobody = evidence(TABLE_3, dict.fromkeys(AS_THE_PAPER_SAYS, 0))

    for words in (
        ("Heterogeneous", "first"),
        ("before Sync", "Momentum"),
        ("FedRec is the fastest",),
        ("saves about", "active"),
    ):
        assert verdicts(nobody, *words)[0].verdict == "undecided"


@pytest.mark.parametrize(
    ("pairs", "outcome", "shown"),
    [
        ([(Cost(10), Cost(20))], "holds", "2.00 [1.52, 2.64]"),
        ([(Cost(10), Cost(12))], "open", "1.20 [0.91, 1.58]"),
        ([(Cost(10), Cost(12))] * 3, "holds", "1.20 [1.02, 1.41]"),
        ([(Cost(10 * seed), Cost(11 * seed)) for seed in range(1, 10)], "holds", "1.10 [1.08, 1.12]"),
        ([(Cost(10), Cost(10 + seed)) for seed in range(-4, 5)], "open", "0.97 [0.77, 1.20]"),
        ([(Cost(10), Cost(10.4))], "open", "1.04 [0.79, 1.37]"),
        ([(Cost(10), Cost(10.4))] * 3, "tie", "1.04 [0.89, 1.22]"),
        ([(Cost(20), Cost(10))], "fails", "0.50 [0.38, 0.66]"),
        ([(Cost(10), Cost(50, reached=False))], "holds", "≥ 5.00"),
        ([(Cost(10), Cost(5, reached=False))], "open", "≥ 0.50"),
        ([(Cost(50, reached=False), Cost(10))], "fails", "≤ 0.20"),
        # A run that has only begun says nothing beside others that have ended; one that went on for longer says more.
        ([(Cost(10), Cost(20))] * 2 + [(Cost(10), Cost(1, reached=False))], "holds", "2.00 [1.64, 2.43]"),
        ([(Cost(10), Cost(20))] * 2 + [(Cost(10), Cost(25, reached=False))], "holds", "2.21 [1.87, 2.61]"),
        ([(Cost(20), Cost(10))] * 2 + [(Cost(99, reached=False), Cost(10))], "fails", "0.29 [0.25, 0.34]"),
        ([(Cost(10), Cost(20))] * 3 + [(Cost(40, reached=False), Cost(10))], "holds", "1.19 [1.03, 1.36]"),
        (
            [(Cost(10), Cost(20))] * 3 + [(Cost(40, reached=False), Cost(10)), (Cost(10), Cost(50, reached=False))],
            "holds",
            "1.59 [1.40, 1.80]",
        ),
        # More than six seeds have a spread of their own, which those that never reach the target make larger.
        (
            [(Cost(10), Cost(16 + seed)) for seed in range(9)] + [(Cost(25, reached=False), Cost(20))],
            "holds",
            "1.79 [1.39, 2.30]",
        ),
        (
            [(Cost(10), Cost(16 + seed)) for seed in range(6)] + [(Cost(500, reached=False), Cost(20))] * 4,
            "open",
            "0.19 [0.02, 2.12]",
        ),
        ([(Cost(10), Cost(20)), (Cost(10), Cost(1, reached=False))], "open", "≥ 0.45"),
        ([(Cost(50, reached=False), Cost(70, reached=False))], "open", "not known"),
        ([(Cost(10), Cost(50, reached=False)), (Cost(50, reached=False), Cost(10))], "open", "not known"),
    ],
)
def test_a_comparison_over_seeds(pairs: list[tuple[Cost, Cost]], outcome: str, shown: str) -> None:
    """A run that did not reach the target gives a bound; what overlaps 1 is open, or a tie if there are seeds."""
    ratio = Ratio.of(pairs, Spread(SPREAD))
    assert (ratio.above(), str(ratio)) == (outcome, shown)


def test_a_run_that_has_only_begun_changes_no_interval() -> None:
    """With six others it must not count as the seventh, from which on a comparison has a spread of its own."""
    six = [(Cost(10), Cost(12 + seed)) for seed in range(6)]
    begun = [(Cost(10), Cost(0.5, reached=False))]
    assert str(Ratio.of(six + begun, Spread(SPREAD))) == str(Ratio.of(six, Spread(SPREAD)))
    assert Ratio.of([*six, (Cost(10), Cost(11))], Spread(SPREAD)).freedom == 6


@pytest.mark.parametrize(
    ("among", "freedom", "quantile"),
    [(1, math.inf, 1.96), (24, math.inf, 3.08), (1, 6, 2.447), (24, 6, 5.166), (24, 9, 4.269), (24, 15, 3.713)],
)
def test_few_values_make_an_interval_wider(among: int, freedom: float, quantile: float) -> None:
    """By the quantiles of Student's distribution, at the level that one of many comparisons asks for."""
    assert deviations(among, freedom) == pytest.approx(quantile, rel=0.01)
    ratio = Ratio(2.0, "exact", 2, 0.3, freedom)
    assert ratio.above(math.exp(math.log(2) - 0.3 * deviations(1, freedom)) + 0.001) == "open"


def test_the_freedom_of_a_mean_over_environments() -> None:
    """Half of the variance is known from six degrees of freedom, the other from as many: twice as many in all."""
    few, many = Ratio(2.0, "exact", 2, 0.1, 6), Ratio(2.0, "exact", 2, 0.1)
    assert Ratio.on_the_whole([few, few]).freedom == pytest.approx(12)
    assert Ratio.on_the_whole([few, few], ["a", "a"]).freedom == pytest.approx(6)
    assert Ratio.on_the_whole([many, many]).freedom == math.inf


def test_a_claim_fails_in_one_place_and_ties_everywhere_are_a_tie() -> None:
    def verdict(*outcomes: Outcome) -> Outcome:
        return Finding([Part(outcome, "") for outcome in outcomes]).outcome

    assert verdict("holds", "fails", "open") == "fails"
    assert verdict("holds", "open") == "open" and verdict() == "open"
    assert verdict("holds", "tie") == "holds" and verdict("tie", "tie") == "tie"


def test_arithmetic_and_idle_time_hold(supporting: Evidence) -> None:
    """The schedule is the paper's whatever the metric does; idle time is measured from the same events."""
    assert verdicts(supporting, "follow from the schedule")[0].verdict == "confirmed"
    idle = verdicts(supporting, "no idle time")[0]
    assert idle.verdict == "confirmed" and "18% to 33%" in idle.paper_sentence


def test_the_cache(supporting: Evidence) -> None:
    """Flat within a tenth with the cache, proportional without."""

    def verdict(cached: float, full_pass: float) -> Claim:
        rows = [MixingTime("ResNet-20", 1, 100, 1.0, 10.0), MixingTime("ResNet-20", 1, 1000, cached, full_pass)]
        return verdicts(Evidence("paper", {}, {}, rows), "cache")[0]

    assert verdict(1.05, 100.0).verdict == "confirmed"
    assert verdict(1.2, 100.0).verdict == verdict(1.0, 20.0).verdict == "contradicted"


def test_brain_age() -> None:
    """lambda = 3 and 4 against Sync, in time and in requests."""
    labels = ("Sync w/ Vanilla", "SemiSync (λ=3) w/ Vanilla", "SemiSync (λ=4) w/ Vanilla")
    good, bad = (evidence(BRAIN, dict(zip(labels, versions, strict=True))) for versions in ((9, 6, 6), (3, 9, 9)))

    for words in (("BrainAge", "faster than Sync"), ("BrainAge", "fewer update requests")):
        assert verdicts(good, *words)[0].verdict == "confirmed"
        assert verdicts(bad, *words)[0].verdict == "contradicted"


@pytest.mark.parametrize(("rounds", "verdict"), [(6, "confirmed"), (8, "confirmed"), (20, "contradicted")])
def test_as_many_requests_on_brain_age(rounds: int, verdict: str) -> None:
    """Within a factor of 1.5, whichever needs more."""
    labels = ("Sync w/ Vanilla", "SemiSync (λ=3) w/ Vanilla", "SemiSync (λ=4) w/ Vanilla")
    found = evidence(BRAIN, dict(zip(labels, (7, rounds, 7), strict=True)))
    spread = {"BrainAge IID": Spread(0.05, 10), "BrainAge Non-IID": Spread(0.05, 10)}
    (claim,) = check_claims(found, ("BrainAge", "about as many"), spread=spread)
    assert claim.verdict == verdict, claim.sentence
    assert claim.effect


def test_the_head_of_power_law_is_compared_in_the_same_time() -> None:
    """A run that went on for longer is not better for that."""
    power, skewed = (f"cifar10-heterogeneous-{name}-noniid5" for name in ("power-law", "skewed"))
    found = {name: one for name, one in load_environments("paper", results=["figure8"]).items() if "noniid5" in name}
    cells = {
        name: next(cell for cell in one.cells if cell.label == "SemiSync (λ=2) w/ Momentum")
        for name, one in found.items()
    }
    for versions, verdict in (((3, 9), "confirmed"), ((9, 3), "contradicted")):
        runs = {
            cells[name].name: made_up(cells[name], when, best=0.9)
            for name, when in zip((power, skewed), versions, strict=True)
        }
        runs = {
            name: Run(run.setting, [(at, item) for at, item in run.events if at < 400], Model.empty(), 1.0)
            if name == cells[power].name
            else run
            for name, run in runs.items()
        }
        assert verdicts(Evidence("paper", found, runs), "its head has 8 classes")[0].verdict == verdict


@pytest.mark.parametrize(("rounds", "known"), [(3, False), (6, True)])
def test_table_1_waits_for_a_policy_that_may_be_the_cheapest(supporting: Evidence, rounds: int, known: bool) -> None:
    """SemiSync w/ Momentum takes four rounds: one of its kind that has not reached the target by then costs more."""
    cell = next(cell for cell in TABLE_3["cifar10-heterogeneous-uniform-iid"].cells if "(λ=2) w/ Vanilla" in cell.label)
    run = supporting.runs[cell.name]
    ends = [n for n, (_, item) in enumerate(run.events) if isinstance(item, Evaluated) and item.version == rounds]
    cut = Run(run.setting, run.events[: ends[0] + 1], Model.empty(), 1.0)
    table = characteristics(replace(supporting, runs={**supporting.runs, cell.name: cut}))
    assert all((row["ours"]["parallel_time"]["relative"] is not None) is known for row in table["rows"])


def test_table_1_is_computed(supporting: Evidence) -> None:
    """Levels by the stated rule, from our runs and from the published numbers; idle and stale from events."""
    table = characteristics(supporting)
    rows = {row["protocol"]: row for row in table["rows"]}

    semi, sync, asynchronous = rows["Semi-Synchronous"], rows["Synchronous"], rows["Asynchronous"]
    assert semi["ours"]["parallel_time"] == {"relative": 1.0, "environments": 3}
    assert sync["ours"]["parallel_time"]["relative"] > 3
    assert (sync["idle_free"], sync["stale_free"]) == (False, True)
    assert (semi["idle_free"], semi["stale_free"]) == (True, True)
    assert (asynchronous["idle_free"], asynchronous["stale_free"]) == (True, False)
    assert semi["from_published"]["parallel_time"]["relative"] == 1.0
    # Sync is cheapest with Momentum on uniform and skewed data, and with Vanilla SGD on power law data.
    relative = sync["from_published"]["parallel_time"]["relative"]
    assert relative == pytest.approx(((540 / 269) * (2179 / 1059) * (2021 / 438)) ** (1 / 3))


def test_a_cost_table_has_ours_and_theirs(supporting: Evidence) -> None:
    """Efficiency is the energy of Sync w/ Vanilla over that of the row, in each definition and as published."""
    table = cost_table(TABLE_3["cifar10-heterogeneous-uniform-iid"], supporting)
    rows = {row["label"]: row for row in table["rows"]}

    own = rows["SemiSync (λ=2) w/ Momentum"]
    assert own["iterations"] == 500 + 3 * 5500 and own["communication_cost"] == 40
    assert own["fast"] + own["slow"] == own["iterations"]
    base = rows["Sync w/ Vanilla"]
    for kind in ("equation", "active", "idle_charged"):
        assert own["efficiency"][kind] == pytest.approx(base["energy"][kind] / own["energy"][kind])
    assert own["published"]["efficiency"] == pytest.approx(17286 / 1889)
    assert not rows["FedAsync"]["reached"] and rows["FedAsync"]["iterations"] is None


def test_each_kind_of_data_has_its_own_spread() -> None:
    """A seed that is slow for every policy is none; one that is slow for some is, and says nothing about images."""
    brain = load_environments("decisive", results=["figure11"])

    def spread(versions: Callable[[int, int], int]) -> Mapping[str, Spread]:
        runs = {}
        for environment in brain.values():
            for seed, seeded in enumerate(environment.seeded()[:4]):
                runs |= {cell.name: made_up(cell, versions(policy, seed)) for policy, cell in enumerate(seeded.cells)}
        return ours(Evidence("decisive", {**brain, **TABLE_3}, runs)).spread

    alike, apart = spread(lambda policy, seed: 4 * 2**seed), spread(lambda policy, seed: 4 * 2 ** ((seed + policy) % 4))
    for found in (alike, apart):
        assert found["CIFAR-10 IID"] == found["CIFAR-10 Non-IID"] == Spread(SPREAD)
    for kind in ("BrainAge IID", "BrainAge Non-IID"):
        assert alike[kind].deviation < 0.2 < math.log(2) * 0.8 < apart[kind].deviation


def test_what_neither_policy_nor_seed_explains() -> None:
    """Three policies, three seeds: four degrees of freedom; the only run with a seed says nothing."""
    effects = {"a": 1.0, "b": 2.0, "c": 5.0}
    values = {(policy, seed): effect + 0.1 * seed for policy, effect in effects.items() for seed in range(3)}
    assert _unexplained(values) == (pytest.approx(0, abs=1e-12), 4)
    assert _unexplained({**values, ("d", 9): 7.0}) == (pytest.approx(0, abs=1e-12), 4)
    # Of one run that is late, (1 - 1/3)(1 - 1/3) is left: the rest is taken for its policy and its seed.
    assert _unexplained({**values, ("a", 0): 1.9})[0] == pytest.approx(0.9**2 * (2 / 3) ** 2)


def test_one_of_many_comparisons_contradicts_less_easily() -> None:
    """The worst of 24 ratios of policies that cost the same is below 1 by two deviations more often than not."""
    cheaper, dearer = Ratio(0.7, "exact", 3, 0.2), Ratio(1.5, "exact", 3, 0.2)
    assert (cheaper.above(), cheaper.above(among=24)) == ("fails", "open")
    assert Ratio(0.5, "exact", 3, 0.2).above(among=24) == "fails"
    assert dearer.above() == dearer.above(among=24) == "holds"


def test_seeds_that_agree_to_the_round_do_not_mean_that_there_is_no_spread() -> None:
    """All reach the target in the fourth round: the time between the third and the fourth is not known better."""
    environment = TABLE_3["cifar10-heterogeneous-uniform-iid"]
    decisive = load_environments("decisive", results=["table3"])[environment.name]
    runs = {
        cell.name: made_up(cell, 4)
        for seeded in decisive.seeded()
        for cell in seeded.cells
        if cell.policy.name.endswith("sync_fedavg")
    }
    spread = ours(Evidence("decisive", {decisive.name: decisive}, runs)).spread["CIFAR-10 IID"]
    assert spread.deviation >= math.log(4 / 3) / math.sqrt(12)


def test_no_levels_before_every_policy_has_run(supporting: Evidence) -> None:
    """Where Sync alone has been run it is the cheapest, which says nothing."""
    some = {name: run for name, run in supporting.runs.items() if "/sync-" in name}
    assert verdicts(supporting, "Processing time")[0].verdict != "undecided"
    early = verdicts(Evidence("paper", TABLE_3, some), "Processing time")[0]
    assert early.verdict == "undecided", early.sentence


def test_a_seed_that_is_still_running_does_not_undo_a_level() -> None:
    """It counts once it has cost more than the seeds that have reached the target."""
    environments = load_environments("decisive", results=["table1"])
    runs = {
        cell.name: made_up(cell, AS_THE_PAPER_SAYS[cell.label]) for one in environments.values() for cell in one.cells
    }
    before = characteristics(Evidence("decisive", environments, runs))
    second = environments["cifar10-heterogeneous-uniform-iid"].seeded()[1]
    cell = next(cell for cell in second.cells if cell.label == "SemiSync (λ=2) w/ Momentum")
    begun = dry_run(cell.config, StopRule(rounds=2))

    after = characteristics(Evidence("decisive", environments, {**runs, cell.name: begun}))
    assert after == before
    late = characteristics(Evidence("decisive", environments, {**runs, cell.name: made_up(cell, 0)}))
    assert late != before


def test_a_level_is_an_order_of_protocols(contradicting: Evidence) -> None:
    """Confirmed if the higher level costs more, contradicted if it costs less."""
    as_said = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "FedRec": 150})
    yes, no = (verdicts(found, "Processing time")[0] for found in (as_said, contradicting))
    assert (yes.verdict, no.verdict) == ("confirmed", "contradicted")
    assert [part.partition(" ×")[0] for part in yes.parts] == [
        "Synchronous (high) over Asynchronous (low)",
        "Synchronous (high) over Semi-Synchronous (low)",
        "Semi-Synchronous (low) over Asynchronous (low)",
    ]
    assert no.paper == yes.paper == "fails"  # its asynchronous rows take longer than Sync


def test_a_level_too_close_to_another_is_open(supporting: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    """With intervals wider than the protocols are apart; it says how many more seeds would decide."""
    monkeypatch.setattr(verdicts_module, "PRIOR_SPREAD", 3.0)
    found = verdicts(supporting, "Energy: Sync high", "equation")[0]
    assert found.verdict == "undecided"
    assert "the mean over the environments" in found.why and "is too close to ×1" in found.why
    assert "times as many seeds" in found.open


def test_a_level_is_that_of_seeds_that_both_have() -> None:
    """A slow seed that only one of two policies was run with makes it neither dearer nor cheaper."""
    environments = load_environments("decisive", results=["table1"])
    runs = {
        cell.name: made_up(cell, AS_THE_PAPER_SAYS[cell.label]) for one in environments.values() for cell in one.cells
    }
    before = characteristics(Evidence("decisive", environments, runs))
    second = environments["cifar10-heterogeneous-uniform-iid"].seeded()[1]
    cell = next(cell for cell in second.cells if cell.label == "Sync w/ Momentum")
    slow = {**runs, cell.name: made_up(cell, 3 * AS_THE_PAPER_SAYS[cell.label])}
    after = characteristics(Evidence("decisive", environments, slow))
    assert [row["ours"]["parallel_time"] for row in after["rows"]] == [
        row["ours"]["parallel_time"] for row in before["rows"]
    ]


def test_a_reason_counts_what_is_close_and_what_ends_too_early() -> None:
    """The threshold of a claim is not always 1."""
    cells = TABLE_3["cifar10-heterogeneous-uniform-iid"].cells
    close, early = Ratio(2.9, "exact", 3, 0.2), Ratio(2.0, "at least", 1, 0.2)
    compared = [Comparison(cells[0], cells[1], ratio, 3.0) for ratio in (close, early, Ratio(9.0, "exact", 3, 0.2))]
    found = Finding([Part("open", "a sentence", compared)])
    assert reason(found) == (
        "1 of 3 comparisons too close to ×3 for so few seeds (×2.90); 1 of 3 comparisons with runs that end too early "
        "or were not made"
    )
    assert reason(Finding([Part("open", "a sentence")])) == "a sentence"


EXACT = Ratio(2.0, "exact", 1, 0.1)


@pytest.mark.parametrize(
    ("ratios", "mean", "kind"),
    [
        ([EXACT, Ratio(8.0, "exact", 1, 0.1)], 4.0, "exact"),
        ([EXACT, Ratio(8.0, "at least", 1, 0.1)], 4.0, "at least"),
        ([EXACT, Ratio(8.0, "at most", 1, 0.1)], 4.0, "at most"),
        ([EXACT, Ratio()], 2.0, "exact"),  # half of them are known
        ([EXACT, Ratio(), Ratio()], math.nan, "unknown"),
        ([Ratio(8.0, "at least", 1, 0.1), Ratio(8.0, "at most", 1, 0.1)], math.nan, "unknown"),
        ([EXACT, Ratio(math.inf, "at least", 1)], 2.0, "at least"),  # in the paper's tables: never reached
        ([Ratio(math.inf, "at least", 1)], math.inf, "at least"),
        ([], math.nan, "unknown"),
    ],
)
def test_a_mean_over_environments(ratios: list[Ratio], mean: float, kind: str) -> None:
    whole = Ratio.on_the_whole(ratios)
    assert whole.mean == pytest.approx(mean, nan_ok=True)
    assert whole.kind == kind


def test_the_error_of_a_mean_over_environments() -> None:
    """It falls with their number, except for those with the same data, which err together."""
    four = [Ratio(2.0, "exact", 2, 0.1)] * 4
    assert Ratio.on_the_whole(four).error == pytest.approx(0.1 / 2)
    assert Ratio.on_the_whole(four, ["a"] * 4).error == pytest.approx(0.1)
    assert Ratio.on_the_whole(four, ["a", "a", "b", "b"]).error == pytest.approx(0.1 / math.sqrt(2))


def test_a_claim_says_what_the_other_reading_would(supporting: Evidence) -> None:
    """Sync that is slower everywhere but in one environment is slower on the whole."""
    runs = dict(supporting.runs)
    cell = next(
        cell for cell in TABLE_3["cifar10-heterogeneous-skewed-noniid5"].cells if cell.label == "Sync w/ Momentum"
    )
    runs[cell.name] = made_up(cell, 1)
    found = Evidence("paper", TABLE_3, runs)
    (general,) = verdicts(found, "before Sync", "Momentum")
    assert (general.reading, general.verdict, general.other) == ("whole", "confirmed", "contradicted")
    (every,) = verdicts(found, "Heterogeneous", "fewest")
    assert (every.reading, every.verdict, every.other) == ("every", "contradicted", "confirmed")


def test_two_protocols_of_the_same_level_must_be_closer_than_others(supporting: Evidence) -> None:
    """Asynchronous ones that take as long as Sync, or longer, are not low as SemiSync is."""
    slow = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "Sync w/ Momentum": 12, "Sync w/ Vanilla": 30, "FedRec": 0})
    (claim,) = verdicts(slow, "Processing time")
    assert claim.verdict == "contradicted", claim.sentence


def test_a_mean_that_is_only_a_bound_names_what_has_to_be_run_further(supporting: Evidence) -> None:
    """Sync that ends before SemiSync is there says little."""
    cells = {label: cell for cell in TABLE_3["cifar10-heterogeneous-uniform-iid"].cells for label in [cell.label]}
    semi, sync = cells["SemiSync (λ=2) w/ Momentum"], cells["Sync w/ Momentum"]
    bound = Comparison(semi, sync, Ratio(0.5, "at least", 1, 0.1))
    found = readings.in_general({"": [bound]}, "a rule")
    assert found.outcome == "open"
    assert found.open == [bound]
    assert reason(found).startswith("the mean over the environments is ×≥ 0.50")
    assert effort(found, supporting).startswith("to be run further: Sync w/ Momentum")


@pytest.mark.parametrize(("vanilla", "verdict"), [(10, "confirmed"), (40, "contradicted"), (2, "contradicted")])
def test_a_range_of_savings(vanilla: int, verdict: str) -> None:
    """Too much is as wrong as too little."""
    found = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, "Sync w/ Vanilla": vanilla, "FedRec": 100, "AsyncFedAvg": 100})
    assert verdicts(found, "3 to 9 times", "idle")[0].verdict == verdict


@pytest.mark.parametrize(("rounds", "verdict"), [(5, "confirmed"), (40, "contradicted")])
def test_momentum_against_the_other_solvers(rounds: int, verdict: str) -> None:
    """By time and by requests, under Sync and SemiSync."""
    changed = {"Sync w/ Momentum": rounds, "SemiSync (λ=2) w/ Momentum": rounds}
    found = evidence(TABLE_3, {**AS_THE_PAPER_SAYS, **changed, "FedRec": 100, "AsyncFedAvg": 100})
    (claim,) = verdicts(found, "Momentum SGD needs less time")
    assert claim.verdict == verdict, claim.sentence
    assert [part.partition(" ×")[0] for part in claim.parts] == [
        "parallel time of Vanilla",
        "parallel time of FedProx",
        "update requests of Vanilla",
        "update requests of FedProx",
    ]


def test_lambda_4_needs_fewer_requests_where_it_reaches_the_target_in_fewer_rounds() -> None:
    environments = load_environments("paper", results=["table2"])
    for rounds, verdict in ((4, "confirmed"), (16, "contradicted")):
        runs = {}
        for environment in environments.values():
            for cell in environment.cells:
                made = {"SemiSync (λ=2) w/ Momentum": 8, "SemiSync (λ=4) w/ Momentum": rounds}.get(cell.label)
                if made:
                    runs[cell.name] = made_up(cell, made)
        found = verdicts(Evidence("paper", environments, runs), "λ=4 than with λ=2")[0]
        assert found.verdict == verdict, found.sentence


@pytest.mark.parametrize(("rounds", "verdict"), [(4, "undecided"), (6, "confirmed"), (2, "contradicted")])
def test_lambda_4_takes_longer_where_its_rounds_are_not_half_as_many(rounds: int, verdict: str) -> None:
    """Its rounds are twice as long; by time and by energy."""
    environments = load_environments("paper", results=["table2"])
    runs = {}
    for environment in environments.values():
        for cell in environment.cells:
            if made := {"SemiSync (λ=2) w/ Momentum": 8, "SemiSync (λ=4) w/ Momentum": rounds}.get(cell.label):
                runs[cell.name] = made_up(cell, made)
    found = check_claims(Evidence("paper", environments, runs), ("λ=4 than with λ=2",))
    assert [claim.verdict for claim in found if "longer" in claim.text or "energy" in claim.text] == [verdict] * 4


def test_claims_have_the_papers_words(supporting: Evidence) -> None:
    """All but those of Table 1, which has words and marks instead of sentences."""
    assert {claim.where for claim in check_claims(supporting) if not claim.quote} == {"Table 1"}


def test_a_verdict_is_marked_by_what_it_rests_on(supporting: Evidence) -> None:
    """One seed, or a tie among wins; where one of many comparisons contradicts, the others do not matter."""
    cell = next(iter(TABLE_3["cifar10-heterogeneous-uniform-iid"].cells))

    def compared(mean: float, seeds: int) -> Comparison:
        return Comparison(cell, cell, Ratio(mean, "exact", seeds, 0.1))

    def marks(outcome: Outcome, *several: Comparison) -> list[str]:
        return Finding([Part(outcome, "", several)], reading="every").marks

    assert marks("holds", compared(3.0, 4), compared(2.0, 1)) == ["partly by one seed"]
    assert marks("holds", compared(3.0, 4), compared(2.0, 2)) == marks("open", compared(2.0, 1)) == []
    assert marks("fails", compared(0.3, 4), compared(0.5, 1), compared(2.0, 1)) == []
    assert marks("fails", compared(0.3, 1), compared(2.0, 4)) == ["by one seed"]
    # A mean is of all of its ratios, also of those that are not decided by themselves.
    mean = Finding([Part("holds", "", [compared(3.0, 4), compared(1.01, 1)])], reading="whole")
    assert mean.marks == ["partly by one seed"]
    assert Finding([Part("holds", "")], note="by construction").marks == ["by construction"]
    assert Finding([Part("holds", ""), Part("tie", "")]).marks == ["with a tie"]
    assert Finding([Part("tie", "")]).marks == []
    assert any("one seed" in mark for claim in verdicts(supporting) for mark in claim.marks)


def test_one_of_many_that_contradicts_has_the_interval_of_all(contradicting: Evidence) -> None:
    """The verdict is read off the number that is shown."""
    spread = {"CIFAR-10 IID": Spread(0.05, 10), "CIFAR-10 Non-IID": Spread(0.05, 10)}
    claims = check_claims(contradicting, ("Heterogeneous", "first"), spread=spread)
    environment = next(iter(contradicting.environments.values()))
    rivals = (len(environment.cells) - 1) * 3
    assert claims[0].verdict == "contradicted" and claims[0].effect.startswith("Sync w/ Momentum")
    shown = [float(end) for end in re.findall(r"\[(.*), (.*)\]", claims[0].effect)[0]]
    mean = float(re.findall(r"×([0-9.]+)", claims[0].effect)[0])
    half = deviations(rivals, 10) * 0.05 * math.sqrt(2)
    assert shown == pytest.approx([mean * math.exp(-half), mean * math.exp(half)], abs=0.01 + 0.01 * math.exp(half))


def test_the_speeds_of_the_papers_rows_are_not_called_constant() -> None:
    """Under SemiSync they change after the cold start, so that its learners wait there."""
    timed = load_environments("paper", results=["table3"], timings="published")
    (claim,) = [claim for claim in check_claims(Evidence("paper", timed, {})) if "no idle time" in claim.text]
    assert "constant" not in claim.sentence and "by construction" not in claim.marks


FIGURE_9 = load_environments("decisive", results=["figure9"])


def at_the_end(**accuracy: float) -> Evidence:
    """Runs of Figure 9 that go on for longer than the plan asks, at these accuracies; without one there is no run."""
    runs = {}
    for environment in FIGURE_9.values():
        assert environment.plan is not None and environment.plan.final_seconds is not None
        for cell in environment.cells:
            if cell.policy.name in accuracy:
                dry = dry_run(cell.config, StopRule(seconds=environment.plan.final_seconds + 100))
                metrics = {"accuracy": accuracy[cell.policy.name]}
                events: list[tuple[float, Event | Action]] = [(0.0, Evaluated(0, {"accuracy": 0.01}))]
                for now, item in dry.events:
                    events.append((now, item))
                    if isinstance(item, CommunityPublished) and item.stamp.version > 0:
                        events.append((now, Evaluated(item.stamp.version, metrics)))
                runs[cell.name] = Run(dry.setting, events, Model.empty(), 1.0)
    return Evidence("decisive", FIGURE_9, runs)


@pytest.mark.parametrize(
    ("accuracy", "verdict", "words"),
    [
        ({"fedasync": 0.27}, "confirmed", "FedAsync 0.270 (1 seed)"),
        ({"fedasync": 0.29}, "undecided", "FedAsync 0.290 (1 seed)"),  # closer than 0.02
        ({"fedasync": 0.33}, "contradicted", "FedAsync 0.330 (1 seed)"),
        ({}, "undecided", "not run as far: FedAsync"),
    ],
)
def test_final_accuracy(accuracy: Mapping[str, float], verdict: str, words: str) -> None:
    """Every policy at the same moment; one that was not run as far leaves it open."""
    others = {"sync_fedavg": 0.1, "fedrec": 0.2, "async_fedavg": 0.2}
    (claim,) = verdicts(at_the_end(semisync_fedavg=0.3, **others, **accuracy), "final accuracy")
    assert claim.verdict == verdict, claim.sentence
    assert all(words in part for part in claim.parts), claim.parts
    assert claim.marks == ([] if verdict == "undecided" else ["by one seed", "early: Sync has had one round or two"])
    assert (claim.effect == "") is (verdict == "undecided" and not accuracy)
    assert "nothing to compare" in verdicts(at_the_end(), "final accuracy")[0].sentence


def test_a_second_target_is_judged_beside_the_first() -> None:
    """The same runs; a claim that has nothing to do with targets says nothing of it."""
    environments = load_environments("decisive", results=["table3"])
    others = {name: one.at_other_target() or one for name, one in environments.items()}
    reached = {**AS_THE_PAPER_SAYS, "Sync w/ Momentum": 9, "FedRec": 600, "AsyncFedAvg": 600, "FedAsync": 600}
    first, second = evidence(environments, reached), evidence(others, {**reached, "FedAsync": 1})
    (claim,) = check_claims(first, ("Heterogeneous", "first"), second=second)
    assert claim.verdict != claim.at_other_target == "contradicted", claim.at_other_target_sentence
    assert claim.at_other_target_sentence != claim.sentence
    (claim,) = check_claims(first, ("no idle time",), second=second)
    assert claim.at_other_target == claim.at_other_target_sentence == ""
    assert check_claims(first, ("Heterogeneous", "first"))[0].at_other_target == ""


def test_a_second_target_is_above_or_below_the_first() -> None:
    """Which is the same environment in everything else."""
    for environment in load_environments("decisive").values():
        other = environment.at_other_target()
        assert (other is None) == (environment.plan is None or environment.plan.other_target is None)
        if other is not None and environment.plan is not None:
            own, second = environment.config.evaluation.target, other.config.evaluation.target
            assert own is not None and second is not None
            assert (second > own) == (environment.plan.low_target is None), environment.name
            assert other.cells[0].name == environment.cells[0].name
            for one, same in zip(environment.seeded(), other.seeded(), strict=True):
                assert [settings_digest(cell) for cell in one.cells] == [settings_digest(cell) for cell in same.cells]
