"""Flower in both directions: its clients run under Metis, and the policies of Metis run in a Flower deployment.

- `ServerApp(policy)`: a Flower `ServerApp` that trains by a policy of Metis.
- `budget_mod`: a mod for a Flower `ClientApp`, which ends its training with the budget that the policy sent.
"""

from __future__ import annotations

from typing import Any

__all__ = ["ServerApp", "budget_mod"]

_HOMES = {"ServerApp": "metis.flower.server", "budget_mod": "metis.flower.mod"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'metis.flower' has no attribute '{name}'")
    import importlib

    from metis.flower.project import require_flower

    require_flower()
    return getattr(importlib.import_module(_HOMES[name]), name)
