"""What the paper claims, what our runs say to it, and what its own tables say by the same rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from metis.reproduction import checks, levels
from metis.reproduction.effort import effort, reason
from metis.reproduction.lookup import Check, NoEvidence
from metis.reproduction.tables import Evidence
from metis.reproduction.verdicts import COLUMN, Finding, Outcome, Part, Source, ours, published

Verdict = Literal["confirmed", "contradicted", "tie", "undecided"]
VERDICTS: dict[Outcome, Verdict] = {
    "holds": "confirmed",
    "fails": "contradicted",
    "tie": "tie",
    "open": "undecided",
}


PAPER_WORDS: dict[Outcome, str] = {"holds": "holds", "fails": "does not hold", "tie": "is a tie", "open": "is open"}


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and the verdict on it."""

    where: str  # in the paper
    text: str
    verdict: Verdict
    sentence: str  # the numbers, or what is missing
    rule: str
    paper: str  # whether its own tables hold it, by the same rule: holds, fails, tie, or nothing
    paper_sentence: str
    needs: str  # the results whose runs decide it
    open: str = ""  # what an undecided one needs, as far as that can be said
    why: str = ""  # it is undecided
    parts: Sequence[str] = ()  # of the sentence, such as one for each environment


def check_claims(evidence: Evidence, about: Sequence[str] = ()) -> list[Claim]:
    """Every claim whose text has all of these words, in the order of the paper."""
    mine, theirs = ours(evidence), published()
    claims = []
    for where, text, needs, check in CLAIMS:
        if not all(word in text for word in about):
            continue
        found, own = _found(check, evidence, mine), _found(check, evidence, theirs)
        said = own.sentence
        if ACTIVE in text:
            column = _found(check, evidence, published(column=True))
            said += f"; by {COLUMN} it {PAPER_WORDS[column.outcome]}: {column.sentence}"
        undecided = found.outcome == "open"
        claims.append(
            Claim(
                where,
                text,
                VERDICTS[found.outcome],
                found.sentence,
                found.rule,
                "" if own.outcome == "open" else own.outcome,
                said,
                needs,
                effort(found, evidence) if undecided else "",
                reason(found) if undecided else "",
                [part.text for part in found.parts],
            )
        )
    return claims


def _found(check: Check, evidence: Evidence, source: Source) -> Finding:
    try:
        return check(evidence, source)
    except NoEvidence as missing:
        return Finding([Part("open", str(missing))])


ACTIVE = "active time only"
_ENERGIES = (
    ("equation", "by the paper's equation"),
    ("active", ACTIVE),
    ("idle_charged", "idle time charged"),
)
_TIME, _REQUESTS = "parallel_time", "communication_cost"

# Where it stands in the paper, what it says, which results it needs, and how it is checked.
CLAIMS: tuple[tuple[str, str, str, Check], ...] = (
    ("Tables 2 and 3", "The iterations of synchronous and semi-synchronous policies follow from the schedule (Eq. 5).",
     "table2 table3", checks.iterations_follow),
    ("Table 1", "Processing time: Sync high, asynchronous low, SemiSync low.", "table1",
     levels.table_1("parallel_time")),
    ("Table 1", "Communication: Sync low, asynchronous high, SemiSync low.", "table1",
     levels.table_1("communication_cost")),
    *(("Table 1", f"Energy: Sync high, asynchronous medium, SemiSync low ({words}).", "table1",
       levels.table_1(f"energy_{kind}")) for kind, words in _ENERGIES),
    ("Table 1", "Idle-free: asynchronous and SemiSync, not Sync.", "table1", levels.table_1("idle_free")),
    ("Table 1", "Stale-free: Sync and SemiSync, not asynchronous.", "table1", levels.table_1("stale_free")),
    ("Section 4.3, Figure 2",
     "Semi-synchronous and asynchronous training have no idle time; synchronous training has.",
     "table3", checks.no_idle_time),
    ("Section 4.3", "Transmission takes less than 0.5 % of the time of computation (CIFAR-10, heterogeneous).",
     "table3", checks.transmission),
    ("Figure 4", "With the cache the time of a community model does not depend on the number of learners; without it, "
     "the time grows.", "figure4", checks.cache_is_constant),
    ("Section 6, CIFAR-10", "With equal learners and equal amounts of data all protocols are equivalent.",
     "table2", checks.equal_learners),
    ("Table 2, Figure 7", "Homogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
     "table2", checks.cheapest("table2", _TIME, 2, " s")),
    ("Table 2", "Homogeneous: SemiSync with Momentum (λ=4) needs the fewest update requests.",
     "table2", checks.cheapest("table2", _REQUESTS, 4)),
    *(("Table 2", f"Homogeneous: SemiSync with Momentum (λ=2) needs the least energy ({words}).",
       "table2", checks.cheapest("table2", f"energy_{kind}", 2)) for kind, words in _ENERGIES),
    ("Figure 7", "Homogeneous: AsyncFedAvg and FedRec are comparable on skewed data, AsyncFedAvg is faster on power "
     "law.", "table2", checks.asynchronous_when_homogeneous),
    ("Table 3, Figure 8", "Heterogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
     "table3", checks.cheapest("table3", _TIME, 2, " s")),
    ("Table 3", "Heterogeneous: SemiSync with Momentum (λ=2) needs the fewest update requests.",
     "table3", checks.cheapest("table3", _REQUESTS, 2)),
    *(("Table 3", f"Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy ({words}).",
       "table3", checks.cheapest("table3", f"energy_{kind}", 2)) for kind, words in _ENERGIES),
    *(("Tables 2 and 3", f"SemiSync reaches the target before its synchronous counterpart: {words}.",
       "table2 table3", checks.semisync_is_faster(solver))
      for solver, words in (("momentum", "Momentum"), ("vanilla", "Vanilla SGD"), ("fedprox", "FedProx"))),
    *(("Section 6, costs", f"SemiSync saves about 40 % energy on average against its Sync counterpart ({words}).",
       "table2 table3", checks.energy_saving(kind)) for kind, words in _ENERGIES),
    *(("Section 6, costs", f"SemiSync with Momentum needs 3 to 9 times less energy than Sync with Vanilla ({words}).",
       "table2 table3", checks.momentum_energy(kind)) for kind, words in _ENERGIES),
    ("Section 6, CIFAR-10", "Sync with Momentum fails on power law data.",
     "table2 table3", checks.momentum_fails_on_power_law),
    ("Section 6, CIFAR-10", "FedProx rescues Sync on power law data.", "table2 table3", checks.fedprox_rescues),
    ("Section 6", "FedRec is the fastest asynchronous policy on heterogeneous clusters.",
     "table3 figure9 figure10", checks.fedrec_is_fastest),
    ("Figure 8", "Asynchronous policies need many more update requests for the same accuracy.",
     "table3", checks.asynchronous_requests),
    ("Section 6, CIFAR-10",
     "With Non-IID(5), power law data gives a higher accuracy than skewed data, as its head has 8 classes.",
     "figure7 figure8", checks.head_of_power_law),
    ("Figure 9", "CIFAR-100: SemiSync with Momentum (λ=0.5) converges fastest.",
     "figure9", checks.converges_fastest("figure9", 0.5)),
    ("Figure 10", "ExtendedMNIST: SemiSync with Vanilla SGD (λ=1) converges fastest.",
     "figure10", checks.converges_fastest("figure10", 1.0)),
    ("Figure 10", "ExtendedMNIST: at the start of training the asynchronous policies are ahead.",
     "figure10", checks.asynchronous_lead_early),
    ("Figure 11", "BrainAge: SemiSync (λ=3, λ=4) converges faster than Sync.",
     "figure11", checks.brainage_beats_sync(_TIME, (3.0, 4.0), " s")),
    ("Figure 11", "BrainAge: SemiSync (λ=4) needs fewer update requests than Sync.",
     "figure11", checks.brainage_beats_sync(_REQUESTS, (4.0,))),
    ("Figure 11", "BrainAge, Skewed & IID: SemiSync (λ=3) has the lowest error, close to the centralized model.",
     "figure11", checks.brainage_error),
    ("Figure 12", "BrainAge: the federation's model is better than that of any silo alone.",
     "figure12", checks.federation_beats_silos),
)  # fmt: skip
