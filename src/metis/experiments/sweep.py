"""Grids over the settings of a file, and the seeds of a comparison; all are checked before any of them runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from metis.core.layers import LAYERS
from metis.core.policies import POLICIES
from metis.errors import ConfigError
from metis.experiments.config.load import ExperimentConfig, PolicyConfig, did_you_mean, slug
from metis.experiments.config.tables import table_model

_HOW = "write KEY=VALUE,VALUE,..., as in training.learning_rate=0.01,0.05"


@dataclass(frozen=True)
class Axis:
    """One setting of the file and the values that it takes, as they are written."""

    path: str
    values: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """The axes of a grid from texts such as `training.learning_rate=0.01,0.05`, several of them separated by spaces."""
    axes: list[Axis] = []
    for text in (part for given in texts for part in _split(given, " ")):
        path, equals, listed = text.partition("=")
        path, values = path.strip(), [value.strip() for value in _split(listed, ",")]
        if not equals or not path or not values:
            raise ConfigError(f"--sweep {text}: {_HOW}")
        if path in ("seed", "seeds"):
            raise ConfigError(f"--sweep {text}: seeds are not swept, they are averaged; use --seeds {listed}")
        if path.partition(".")[0] in ("run", "deployment"):
            raise ConfigError(f"--sweep {text}: [{path.partition('.')[0]}] does not change the result")
        if len(set(values)) != len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise ConfigError(f"--sweep {text}: has the value {twice} twice")
        if path in [axis.path for axis in axes]:
            raise ConfigError(f"--sweep {path} is given twice; write all its values in one list")
        axes.append(Axis(path, tuple(values)))
    return axes


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that are outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        if letter == separator and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def parse_seeds(text: str | None, config: ExperimentConfig) -> list[int]:
    """The seeds of a comparison: so many from the file's seed on, or a list; without a text those of the file."""
    if text is None:
        return checked_seeds(config.seeds or [config.seed])
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in numbers):
        raise ConfigError(f"--seeds is '{text}'; write how many, as in 5, or which, as in 1,2,3")
    if len(numbers) == 1:
        return seeds_from(int(text), config.seed)
    return checked_seeds([int(part) for part in numbers])


def seeds_from(seeds: int | Sequence[int], first: int) -> list[int]:
    """So many seeds from the first on, or those that are listed."""
    if not isinstance(seeds, int):
        return checked_seeds(seeds)
    if not 1 <= seeds <= 10_000:
        raise ConfigError(f"seeds is {seeds}; it must be a number from 1 to 10,000, or a list of seeds")
    return list(range(first, first + seeds))


def checked_seeds(seeds: Sequence[int]) -> list[int]:
    """Seeds that are whole numbers and all different."""
    if not seeds or any(type(seed) is not int or not 0 <= seed < 2**63 for seed in seeds):
        raise ConfigError(f"seeds must be whole numbers, 0 or more, not {list(seeds)}")
    if len(set(seeds)) != len(seeds):
        twice = next(seed for seed in seeds if list(seeds).count(seed) > 1)
        raise ConfigError(f"seeds has {twice} twice; a run with the same seed is the same run")
    return list(seeds)


# --- grids --------------------------------------------------------------------------------------


def variants(
    config: ExperimentConfig, axes: Sequence[Axis], load: Callable[[list[str]], ExperimentConfig], *, numbered: bool
) -> list[ExperimentConfig]:
    """One configuration with one policy for each point of the grid, all checked; `load` reads the file with changes.

    An axis `policy.KEY` is for the policies that take the key. `numbered` says that the file lists its policies.
    """
    for axis in axes:
        if not any(_takes(index, policy, axis) for index, policy in enumerate(config.policy)):
            known = sorted({name for policy in config.policy for name in _keys(policy)})
            raise ConfigError(f"--sweep {axis.path}: no policy of the file takes it; {did_you_mean(axis.name, known)}")
    found: list[ExperimentConfig] = []
    for index, policy in enumerate(config.policy):
        own = [axis for axis in axes if _takes(index, policy, axis)]
        points = []
        for values in itertools.product(*(axis.values for axis in own)):
            changes = [
                f"{_path(axis, index) if numbered else axis.path}={value}"
                for axis, value in zip(own, values, strict=True)
            ]
            try:
                varied = load(changes)
            except ConfigError as problem:
                text = str(problem).replace("--set ", "--sweep ")
                where = "" if text.startswith("--sweep ") else f"--sweep {' '.join(changes)}: "
                raise ConfigError(f"{where}{text}") from None
            points.append((values, varied.model_copy(update={"policy": [varied.policy[index]]})))
        found += _labelled(own, points)
    _check_labels(found)
    return found


def _path(axis: Axis, index: int) -> str:
    """The path in a file that lists its policies, where those of a policy are numbered."""
    first, _, rest = axis.path.partition(".")
    return axis.path if first != "policy" or rest.partition(".")[0].isdecimal() else f"{first}.{index}.{rest}"


def _keys(policy: PolicyConfig) -> list[str]:
    return [*table_model(POLICIES[policy.name]).model_fields, *LAYERS, *PolicyConfig.model_fields]


def _takes(index: int, policy: PolicyConfig, axis: Axis) -> bool:
    first, _, rest = axis.path.partition(".")
    key = rest.partition(".")[0]
    return first != "policy" or (int(key) == index if key.isdecimal() else key in _keys(policy))


def _labelled(
    axes: Sequence[Axis], points: Sequence[tuple[tuple[str, ...], ExperimentConfig]]
) -> list[ExperimentConfig]:
    """A label for each point: that of its policy, and the swept values that the label does not show already."""
    labels = [str(config.policy[0].label) for _, config in points]
    names = [axis.name for axis in axes]
    hidden = []
    for position, axis in enumerate(axes):
        rest = {values[:position] + values[position + 1 :] for values, _ in points}
        shown = all(
            len({label for (values, _), label in zip(points, labels, strict=True)
                 if values[:position] + values[position + 1 :] == other}) == len(axis.values)
            for other in rest
        )  # fmt: skip
        if not shown:
            hidden.append((position, axis.name if names.count(axis.name) == 1 else axis.path))
    made = []
    for (values, config), label in zip(points, labels, strict=True):
        words = ", ".join([label, *(f"{name}={values[position]}" for position, name in hidden)])
        policy = config.policy[0].model_copy(update={"label": words})
        made.append(config.model_copy(update={"policy": [policy]}))
    return made


def _check_labels(configs: Sequence[ExperimentConfig]) -> None:
    seen: set[str] = set()
    for config in configs:
        name = slug(str(config.policy[0].label))
        if name in seen:
            raise ConfigError(
                f"two variants would be called '{config.policy[0].label}'; give each policy a label of its own"
            )
        seen.add(name)
