"""What the paper claims, what our runs say to it, and what its own tables say by the same rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from metis.reproduction import checks, levels, metric_checks
from metis.reproduction.effort import effort, reason
from metis.reproduction.lookup import Check, NoEvidence
from metis.reproduction.tables import RESULTS, Evidence
from metis.reproduction.verdicts import COLUMN, Finding, Outcome, Part, Source, Spread, ours, published

Verdict = Literal["confirmed", "contradicted", "tie", "undecided"]
VERDICTS: dict[Outcome, Verdict] = {
    "holds": "confirmed",
    "fails": "contradicted",
    "tie": "tie",
    "open": "undecided",
}


PAPER_WORDS: dict[Outcome, str] = {"holds": "holds", "fails": "does not hold", "tie": "is a tie", "open": "is open"}


@dataclass(frozen=True)
class Statement:
    """One statement of the paper, and how it is checked."""

    where: str  # in the paper
    text: str  # what we ask
    quote: str  # the paper's own words; nothing where they are ours, or a mark in a table
    needs: str  # the results whose runs decide it
    check: Check


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and the verdict on it."""

    where: str  # in the paper
    text: str
    verdict: Verdict
    sentence: str  # the numbers, or what is missing
    rule: str
    paper: str  # whether its own tables hold it, by the same rule: holds, fails, tie, open, or nothing
    paper_sentence: str
    needs: str  # the results whose runs decide it
    open: str = ""  # what an undecided one needs, as far as that can be said
    why: str = ""  # it is undecided
    parts: Sequence[str] = ()  # of the sentence, such as one for each environment
    quote: str = ""  # the paper's own words
    reading: Literal["every", "whole", ""] = ""  # asked of every environment, or of their mean
    other: Verdict | Literal[""] = ""  # by the other reading
    at_other_target: Verdict | Literal[""] = ""  # at the second target of its environments, where they have one
    at_other_target_sentence: str = ""
    environments: Sequence[str] = ()  # in which it is open
    policies: Sequence[str] = ()  # for which it is open
    marks: Sequence[str] = ()  # what a reader of the verdict alone should know
    effect: str = ""  # the number that decides, with its interval


def check_claims(
    evidence: Evidence,
    about: Sequence[str] = (),
    *,
    second: Evidence | None = None,
    results: Collection[str] = RESULTS,
    spread: Mapping[str, Spread] | None = None,
) -> list[Claim]:
    """Every claim whose text has all of these words and that these results decide, in the order of the paper.

    With `second` also what the same runs say at the second targets. The spread from seed to seed is that of these runs
    unless it is given.
    """
    mine, theirs = ours(evidence, spread), published()
    other_target = None if second is None else ours(second, spread=mine.spread)
    claims = []
    for one in CLAIMS:
        if not all(word in one.text for word in about) or not set(one.needs.split()) <= set(results):
            continue
        found, own = _found(one.check, evidence, mine), _found(one.check, evidence, theirs)
        said = own.sentence
        if ACTIVE in one.text:
            column = _found(one.check, evidence, published(column=True))
            said += f"; by {COLUMN} it {PAPER_WORDS[column.outcome]}: {column.sentence}"
        undecided = found.outcome == "open"
        elsewhere = None
        if second is not None and other_target is not None:
            elsewhere = _found(one.check, second, other_target)
            if elsewhere.sentence == found.sentence:  # no target has to do with it
                elsewhere = None
        claims.append(
            Claim(
                one.where,
                one.text,
                VERDICTS[found.outcome],
                found.sentence,
                found.rule,
                own.outcome if own.outcome != "open" or any(part.compared for part in own.parts) else "",
                said,
                one.needs,
                "" if not undecided else _MORE_SEEDS if evidence.scale == "small" else effort(found, evidence),
                reason(found) if undecided else "",
                [part.text for part in found.parts],
                one.quote,
                found.reading,
                "" if found.other is None else VERDICTS[found.other],
                "" if elsewhere is None else VERDICTS[elsewhere.outcome],
                "" if elsewhere is None else elsewhere.sentence,
                list(dict.fromkeys(one.own.environment.name for one in found.open)) if undecided else [],
                list(dict.fromkeys(c.label for one in found.open for c in (one.own, one.rival))) if undecided else [],
                found.marks,
                found.effect,
            )
        )
    return claims


def _found(check: Check, evidence: Evidence, source: Source) -> Finding:
    try:
        return check(evidence, source)
    except NoEvidence as missing:
        return Finding([Part("open", str(missing))])


_MORE_SEEDS = "longer runs with several seeds: --scale decisive"
ACTIVE = "active time only"
_ENERGIES = (
    ("equation", "by the paper's equation"),
    ("active", ACTIVE),
    ("idle_charged", "idle time charged"),
)
_TIME, _REQUESTS = "parallel_time", "communication_cost"

_BEST = (
    "In both homogeneous and heterogeneous domains, SemiSync with Momentum (λ=2) performs best in terms of the "
    "(parallel/wall-clock) time to reach the desired target accuracy and in terms of the energy cost (with depends on "
    "the cumulative processing time across all learners needed to reach that accuracy)."
)
_LAMBDA_4 = (
    "In homogeneous domains SemiSync with Momentum (λ=4) is more communication efficient, but with slightly slower "
    "convergence and larger energy cost, when compared to (λ=2)."
)
_OUTPERFORMS = "Semi-Synchronous with Momentum outperforms all other policies in time, communication, and energy costs."

# Where it stands in the paper, what we ask, the paper's own words, which results it needs, and how it is checked.
CLAIMS: tuple[Statement, ...] = tuple(Statement(*one) for one in (
    ("Tables 2 and 3", "The iterations of synchronous and semi-synchronous policies follow from the schedule (Eq. 5).",
     "The term B_k denotes the number of steps (batches) learner k needs to perform before issuing an update request, "
     "which depends on its computational speed", "table2 table3", checks.iterations_follow),
    ("Table 1", "Processing time: Sync high, asynchronous low, SemiSync low.", "", "table1",
     levels.table_1("parallel_time")),
    ("Table 1", "Communication: Sync low, asynchronous high, SemiSync low.", "", "table1",
     levels.table_1("communication_cost")),
    *(("Table 1", f"Energy: Sync high, asynchronous medium, SemiSync low ({words}).", "", "table1",
       levels.table_1(f"energy_{kind}"))
      for kind, words in _ENERGIES),
    ("Table 1", "Idle-free: asynchronous and SemiSync, not Sync.", "", "table1", levels.without("idle_free")),
    ("Table 1", "Stale-free: Sync and SemiSync, not asynchronous.", "", "table1", levels.without("stale_free")),
    ("Section 6, Figure 2",
     "Semi-synchronous and asynchronous training have no idle time; synchronous training has.",
     "For the synchronous policies, idle time still occurs due to the different data amount in the Skewed and Power "
     "Law data distributions. For SemiSync and asynchronous policies, there is no idle time.",
     "table3", checks.no_idle_time),
    ("Figure 4", "With the cache the time of a community model does not depend on the number of learners; without it, "
     "the time grows.",
     "A caching approach that enables computation of the community model in constant time in asynchronous Federated "
     "Learning environments", "figure4", checks.cache_is_constant),
    ("Section 6, CIFAR-10",
     "With equal learners and equal amounts of data all protocols do the same work for each update request, with as "
     "many local epochs as λ.",
     "for a homogeneous computational environment with an equal number of data points (Uniform) across learners, all "
     "policies are equivalent", "table2", checks.equal_learners),
    ("Table 2, Figure 7", "Homogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
     "SemiSync with Momentum and λ=2 results in the fastest convergence across the experiments",
     "table2", checks.cheapest("table2", _TIME, 2, " s")),
    ("Section 6, costs", "Homogeneous: SemiSync with Momentum needs fewer update requests with λ=4 than with λ=2.",
     _LAMBDA_4, "table2", checks.fewer_requests_with(4, 2)),
    ("Section 6, costs", "Homogeneous: SemiSync with Momentum takes longer with λ=4 than with λ=2.", _LAMBDA_4,
     "table2", checks.dearer_with(4, 2, _TIME)),
    *(("Section 6, costs", f"Homogeneous: SemiSync with Momentum needs more energy with λ=4 than with λ=2 ({words}).",
       _LAMBDA_4, "table2", checks.dearer_with(4, 2, f"energy_{kind}")) for kind, words in _ENERGIES),
    *(("Section 6, costs", f"Homogeneous: SemiSync with Momentum (λ=2) needs the least energy ({words}).", _BEST,
       "table2", checks.cheapest("table2", f"energy_{kind}", 2)) for kind, words in _ENERGIES),
    ("Figure 7", "Homogeneous: AsyncFedAvg and FedRec are comparable on skewed data, AsyncFedAvg is faster on power "
     "law.",
     "When the amounts of data across learners is not too great (Skewed data distributions) AsyncFedAvg and FedRec "
     "have comparable performance, but as the difference in data increases (PowerLaw data distributions), AsyncFedAvg "
     "is more efficient compared to the staleness-aware weighting scheme of both FedRec and FedAsync.",
     "table2", checks.asynchronous_when_homogeneous),
    ("Table 3, Figure 8", "Heterogeneous: SemiSync with Momentum (λ=2) reaches the target first.", _OUTPERFORMS,
     "table3", checks.cheapest("table3", _TIME, 2, " s")),
    ("Table 3", "Heterogeneous: SemiSync with Momentum (λ=2) needs the fewest update requests.", _OUTPERFORMS,
     "table3", checks.cheapest("table3", _REQUESTS, 2)),
    *(("Table 3", f"Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy ({words}).", _OUTPERFORMS,
       "table3", checks.cheapest("table3", f"energy_{kind}", 2)) for kind, words in _ENERGIES),
    *(("Section 1", f"SemiSync reaches the target before Sync, whatever the solver: {words}.",
       "Our training scheme leads to faster convergence regardless of the optimizer used to train the local models.",
       "table2 table3", checks.semisync_is_faster(solver))
      for solver, words in (("momentum", "Momentum"), ("vanilla", "Vanilla SGD"), ("fedprox", "FedProx"))),
    *(("Section 6, costs", f"SemiSync saves about 40 % energy on average against its Sync counterpart ({words}).",
       "when our SemiSync strategy is combined with any local optimizer and compared to its synchronous counterpart, "
       "it yields significant energy savings close to an average 40% energy cost reduction in both homogeneous and "
       "heterogeneous computational environments",
       "table2 table3", checks.energy_saving(kind)) for kind, words in _ENERGIES),
    ("Section 6, costs", "Momentum SGD needs less time and fewer update requests than Vanilla SGD and FedProx.",
     "Momentum SGD provides accelerated convergence with a lower communication overhead compared to Vanilla SGD and "
     "FedProx.", "table2 table3", checks.momentum_is_better),
    *(("Section 6, costs", f"SemiSync with Momentum needs 3 to 9 times less energy than Sync with Vanilla ({words}).",
       "Momentum SGD is the most energy-efficient policy, compared to the Synchronous Vanilla SGD baseline, with a "
       "reduction of 3 to 9 times the energy cost.",
       "table2 table3", checks.momentum_energy(kind)) for kind, words in _ENERGIES),
    ("Section 6, CIFAR-10", "Sync with Momentum fails on power law data.",
     "For Power Law data distributions SyncFedAvg with Momentum fails to learn, but SyncFedAvg with FedProx learns and "
     "efficiently uses communication.",
     "table2 table3", checks.momentum_fails_on_power_law),
    ("Section 6, CIFAR-10", "FedProx rescues Sync on power law data.",
     "SyncFedAvg with Momentum converges very slowly in Power Law data distributions, but using FedProx as a local "
     "optimizer rescues it.",
     "table2 table3", checks.fedprox_rescues),
    ("Section 6", "FedRec is the fastest asynchronous policy on heterogeneous clusters.",
     "FedRec dominates other asynchronous policies on convergence rate, especially in IID environments and in Power "
     "Law distributions. In Uniform and Skewed Non-IID environments, its performance is comparable to AsyncFedAvg.",
     "table3 figure9 figure10", checks.fedrec_is_fastest),
    ("Figure 8", "Asynchronous policies need many more update requests for the same accuracy.",
     "asynchronous policies require many more update requests to achieve the same (or worse) level of accuracy",
     "table3", checks.asynchronous_requests),
    ("Section 6, CIFAR-10",
     "With Non-IID(5), power law data gives a higher accuracy than skewed data, as its head has 8 classes.",
     "in some learning environments, such as Skewed & Non-IID(5) and Power Law & Non-IID(5) in Figures 7 and 8, the "
     "optimal accuracy is higher in the Power Law case compared to its Skewed counterpart",
     "figure7 figure8", metric_checks.head_of_power_law),
    ("Figure 9", "CIFAR-100: SemiSync with Momentum (λ=0.5) converges fastest.",
     "Our SemiSync with Momentum (λ=0.5) policy yields the fastest convergence rate and final accuracy",
     "figure9", checks.converges_fastest("figure9", 0.5)),
    ("Figure 9", "CIFAR-100: SemiSync with Momentum (λ=0.5) has the highest final accuracy.",
     "Our SemiSync with Momentum (λ=0.5) policy yields the fastest convergence rate and final accuracy",
     "figure9", metric_checks.final_accuracy),
    ("Figure 10", "ExtendedMNIST: SemiSync with Vanilla SGD (λ=1) converges fastest.",
     "SemiSync with Vanilla SGD (λ=1) outperforms all other policies, with faster convergence and less communication "
     "cost.", "figure10", checks.converges_fastest("figure10", 1.0)),
    ("Figure 10", "ExtendedMNIST: at the start of training the asynchronous policies are ahead.",
     "asynchronous policies have faster convergence at the beginning of the federated training",
     "figure10", metric_checks.asynchronous_lead_early),
    ("Figure 11", "BrainAge: SemiSync (λ=3, λ=4) converges faster than Sync.",
     "SemiSync with λ=3,4 provides faster convergence for both Skewed IID and Non-IID distributions compared to the "
     "synchronous policy", "figure11", checks.brainage_beats_sync(_TIME, (3.0, 4.0), " s")),
    ("Figure 11", "BrainAge: SemiSync (λ=4) needs fewer update requests than Sync.",
     "SemiSync with λ=4 is more communication efficient for both data distributions, with λ=3 being comparable to "
     "synchronous.",
     "figure11", checks.brainage_beats_sync(_REQUESTS, (4.0,))),
    ("Figure 11", "BrainAge: SemiSync (λ=3) needs about as many update requests as Sync.",
     "SemiSync with λ=4 is more communication efficient for both data distributions, with λ=3 being comparable to "
     "synchronous.",
     "figure11", checks.brainage_requests_comparable(3.0)),
    ("Figure 11", "BrainAge, Skewed & IID: SemiSync (λ=3) has the lowest error, close to the centralized model.",
     "For IID, SemiSync with λ=3 leads to the smallest mean absolute error, which is very close to the error reached "
     "by the centralized model.", "figure11", metric_checks.brainage_error),
    ("Figure 12", "BrainAge: the federation's model is better than that of any silo alone.",
     "the community model obtained by the federation significantly outperforms the model achieved by any single site",
     "figure12", metric_checks.federation_beats_silos),
))  # fmt: skip
