"""What the paper claims, and whether runs confirm it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from metis.reproduction import checks
from metis.reproduction.checks import Check, MissingEvidence
from metis.reproduction.tables import Evidence

Verdict = Literal["confirmed", "not confirmed", "not testable here", "not run"]


@dataclass(frozen=True)
class Claim:
    """One statement of the paper and the verdict on it."""

    where: str  # in the paper
    text: str
    verdict: Verdict
    sentence: str


def check_claims(evidence: Evidence) -> list[Claim]:
    """Every claim, in the order of the paper."""
    claims = []
    for where, text, needs, check in _CLAIMS:
        try:
            holds, sentence = check(evidence)
            claims.append(Claim(where, text, "confirmed" if holds else "not confirmed", sentence))
        except MissingEvidence as missing:
            if reason := str(missing):
                claims.append(Claim(where, text, "not testable here", reason))
            else:
                claims.append(Claim(where, text, "not run", f"run it with: metis reproduce {needs}"))
    return claims


# Where it stands in the paper, what it says, which results it needs, and how it is checked.
_CLAIMS: tuple[tuple[str, str, str, Check], ...] = (
    ("Tables 2 and 3", "The iterations of synchronous and semi-synchronous policies follow from the schedule (Eq. 5).",
     "table2 table3", checks.iterations_follow),
    ("Table 1", "The characteristics of the three protocols.", "table1", checks.characteristics_agree),
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
     "table2", checks.cheapest("table2", "parallel_time", 2, " s")),
    ("Table 2", "Homogeneous: SemiSync with Momentum (λ=4) needs the fewest update requests.",
     "table2", checks.cheapest("table2", "communication_cost", 4)),
    ("Table 2", "Homogeneous: SemiSync with Momentum (λ=2) needs the least energy (here: active time only).",
     "table2", checks.cheapest("table2", "energy_active", 2)),
    ("Figure 7", "Homogeneous: AsyncFedAvg and FedRec are comparable on skewed data, AsyncFedAvg is faster on power "
     "law.", "table2", checks.asynchronous_when_homogeneous),
    ("Table 3, Figure 8", "Heterogeneous: SemiSync with Momentum (λ=2) reaches the target first.",
     "table3", checks.cheapest("table3", "parallel_time", 2, " s")),
    ("Table 3", "Heterogeneous: SemiSync with Momentum (λ=2) needs the fewest update requests.",
     "table3", checks.cheapest("table3", "communication_cost", 2)),
    ("Table 3", "Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy (active time only, as in the "
     "table).", "table3", checks.cheapest("table3", "energy_active", 2)),
    ("Table 3", "Heterogeneous: SemiSync with Momentum (λ=2) needs the least energy (idle time charged).",
     "table3", checks.cheapest("table3", "energy_idle_charged", 2)),
    ("Tables 2 and 3", "SemiSync reaches the target before its synchronous counterpart, with any local solver.",
     "table2 table3", checks.semisync_is_faster),
    ("Section 6, costs", "SemiSync saves about 40 % energy on average against its synchronous counterpart.",
     "table2 table3", checks.energy_saving),
    ("Section 6, costs", "Momentum with SemiSync needs 3 to 9 times less energy than synchronous Vanilla SGD.",
     "table2 table3", checks.momentum_energy),
    ("Section 6, CIFAR-10", "Sync with Momentum fails on power law data; FedProx rescues it.",
     "table2 table3", checks.momentum_on_power_law),
    ("Section 6", "FedRec is the fastest asynchronous policy on heterogeneous clusters.",
     "table3 figure9 figure10", checks.fedrec_is_fastest),
    ("Figure 8", "Asynchronous policies need many more update requests for the same accuracy.",
     "table3", checks.asynchronous_requests),
    ("Section 6, CIFAR-10",
     "With Non-IID(5), power law data gives a higher accuracy than skewed data, as its head has 8 classes.",
     "figure7", checks.not_testable("the paper publishes no numbers for power law with Non-IID(5)")),
    ("Figure 9", "CIFAR-100: SemiSync with Momentum (λ=0.5) converges fastest.",
     "figure9", checks.converges_fastest("figure9", 0.5)),
    ("Figure 10", "ExtendedMNIST: SemiSync with Vanilla SGD (λ=1) converges fastest.",
     "figure10", checks.converges_fastest("figure10", 1.0)),
    ("Figure 10", "ExtendedMNIST: at the start of training the asynchronous policies are ahead.",
     "figure10", checks.asynchronous_lead_early),
    ("Figure 11", "BrainAge: SemiSync (λ=3, λ=4) converges faster than Sync.",
     "figure11", checks.brainage_beats_sync("parallel_time", (3.0, 4.0), " s")),
    ("Figure 11", "BrainAge: SemiSync (λ=4) needs fewer update requests than Sync.",
     "figure11", checks.brainage_beats_sync("communication_cost", (4.0,))),
    ("Figure 11", "BrainAge, Skewed & IID: SemiSync (λ=3) has the lowest error, close to the centralized model.",
     "figure11", checks.brainage_error),
    ("Figure 12", "BrainAge: the federation's model is better than that of any silo alone.",
     "figure12", checks.federation_beats_silos),
)  # fmt: skip
