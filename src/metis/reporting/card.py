"""A model card: how a community model was trained, from how many sites, at what cost and under what privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from metis.reporting.provenance import facts, versions
from metis.runs.run import Run
from metis.text import plural

# Layers of a policy that protect what leaves a site, in words for somebody who does not know Metis.
_PROTECTED = {
    "secure_sum": "Secure sums: the controller saw sums of updates only, never the update of a single site.",
    "ckks": "Homomorphic encryption (CKKS): the controller saw no model in the clear; each site's key opens them all.",
}


def model_card(run: Run, title: str, configuration: Mapping[str, Any] | None, version: str, use: str) -> str:
    """As Markdown with the header that model hubs read; `use` shows how to load what was written."""
    setting, costs = run.setting, run.costs
    metric, sites = setting.metric, len(setting.learners)
    value = run.best_metric if version == "best" else run.final_metric
    energy, unit = costs.energy, run.summary()["energy_unit"]
    where = "Deployed: the sites trained on their own machines." if setting.real_time else (
        "Simulated: all sites were computed on one machine, in virtual time; no data of real sites is behind it."
    )  # fmt: skip
    header = [
        "---",
        "tags:",
        "- federated-learning",
        "- metis",
        *(
            []
            if value is None
            else [
                "model-index:",
                f"- name: {_quoted(title)}",
                "  results:",
                "  - task: {type: other}",
                f"    dataset: {{name: {_quoted(str(setting.facts.get('dataset', 'of the sites')))}, type: other}}",
                "    metrics:",
                f"    - {{type: {_quoted(metric)}, value: {value:.6g}}}",
            ]
        ),
        "---",
    ]
    rows = [
        ("sites", f"{sites:,}"),
        ("training examples", f"{sum(learner.examples for learner in setting.learners):,}"),
        ("policy", setting.label),
        ("rounds", f"{run.rounds:,}"),
        ("ended", run.finish_reason),
        ("model", f"version {run.best_version if version == 'best' else 'at the end'}"),
        *([] if value is None else [(metric, f"{value:.4g}")]),
        *facts(run),
    ]
    prices = [
        ("time from start to end", f"{costs.parallel_time:,.0f} s"),
        ("time of all sites together, training", f"{costs.cumulative_time:,.0f} s"),
        ("time of all sites together, waiting", f"{costs.idle_time:,.0f} s"),
        ("local steps", f"{costs.steps:,}"),
        ("models handed in", f"{costs.update_requests:,}"),
        ("bytes exchanged", f"{costs.bytes_exchanged:,}"),
        ("energy, training", f"{energy.active:,.1f} {unit}s"),
        ("energy, with waiting", f"{energy.idle_charged:,.1f} {unit}s"),
    ]
    return (
        "\n\n".join(
            [
                "\n".join(header),
                f"# {title}",
                f"A community model, trained by federated learning with Metis: {plural(sites, 'site')} trained on data "
                f"that did not leave them. {where}",
                "## How it was trained",
                _table(rows),
                "## What it cost",
                _table(prices),
                "## Privacy",
                "\n".join(f"- {sentence}" for sentence in privacy_sentences(configuration)),
                "## Use",
                f"```python\n{use.strip()}\n```",
                f"Made with {versions(run)}. SHA-256 of the weights: `{run.community_model.sha256()}`"
                if version == "final"
                else f"Made with {versions(run)}.",
            ]
        )
        + "\n"
    )


def privacy_sentences(configuration: Mapping[str, Any] | None) -> list[str]:
    """What protected the sites' data, from the run's own configuration."""
    if configuration is None:
        return ["Not known: the run was made from Python, without a file."]
    said = ["Models left the sites, data did not; without the protections below, models can reveal training data."]
    groups: Sequence[Mapping[str, Any]] = configuration.get("learners", ())
    private = [(group, group["privacy"]) for group in groups if group.get("privacy")]
    for group, settings in private:
        budget = settings.get("budget")
        spent = f"at most epsilon {budget:g}" if budget else "no limit of epsilon"
        said.append(
            f"Differential privacy of records at '{group.get('name', 'sites')}' (DP-SGD): noise {settings['noise']:g}, "
            f"clip {settings.get('clip', 1.0):g}, {spent} at delta {settings.get('delta', 1e-5):g}."
        )
    if not private:
        said.append("Differential privacy: none.")
    elif len(private) < len(groups):
        said.append("Differential privacy: none at the other sites.")
    policies: Sequence[Mapping[str, Any]] = configuration.get("policy", ())
    layers = {key for policy in policies for key, value in policy.items() if isinstance(value, dict)}
    protected = [sentence for key, sentence in _PROTECTED.items() if key in layers]
    return said + (protected or ["Secure sums and encryption: none; the controller saw the model of each site."])


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value.replace('|', '/')} |" for name, value in rows)])


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', "'") + '"'
