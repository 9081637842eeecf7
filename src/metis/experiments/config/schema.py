"""The tables and keys of an experiment's file: the fields of the classes below.

Three tables are open: `[[policy]]` takes the parameters of the policy that it names and a table for each layer,
`[training]` the settings of the solver that it names, `[network]` the options of the network that it names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, cast, get_args

import tomlkit
from pydantic import Field, FiniteFloat

from metis.core.layers import LAYERS
from metis.core.policies import POLICIES
from metis.experiments.config.kinds import Count, Hour, NamedTable, NotNegative, OpenTable, Positive, Seconds, Table
from metis.experiments.config.site import SiteConfig
from metis.learning.engine import METRICS as METRICS  # noqa: PLC0414
from metis.registry import parameters_of

# Tables whose content a site file brings.
REPLACED_BY_SITE = ("data", "partition", "network")

NotifyEvent = Literal[
    "finished", "failed", "stopped", "away", "back", "quorum_lost", "quorum_regained", "disk_nearly_full", "disk_full",
    "disk_free", "certificate", "set_aside", "update_held", "rollback",
]  # fmt: skip


class Operation(NamedTable):
    """One step of an augmentation."""

    name: Literal["random_crop", "horizontal_flip", "random_contrast", "standardize"] = Field(
        description="the options of the operation go next to it"
    )


class DataConfig(Table):
    """Which examples there are."""

    dataset: str = Field(default="digits", description="name of a data set; `metis data list` shows them")
    folder: str | None = Field(default=None, description="folder with NAME.npz; else METIS_DATA, the cache, a download")
    train_examples: Count | None = Field(default=None, description="use this many training examples, drawn at random")
    test_examples: Count | None = Field(
        default=None, description="evaluate on this many test examples, drawn at random"
    )
    validation: Annotated[FiniteFloat, Field(gt=0, lt=1)] | None = Field(
        default=None, description="share of the training examples that is held out to choose the best model by"
    )
    smallest_site: Count | None = Field(
        default=None, description="merge sites of fewer people, for the sets that come from several sites"
    )
    normalise: bool = Field(
        default=True, description="to mean 0 and standard deviation 1 a channel, as measured in training"
    )
    augment: list[Operation] = Field(default=[], description="batched operations on the training images, in this order")


Classes: TypeAlias = Literal[
    "iid", "non_iid", "random_classes", "shards", "dirichlet", "class_dirichlet", "target_ranges"
]


class PartitionConfig(Table):
    """Who holds how much of what."""

    sizes: Literal["uniform", "skewed", "power_law", "zipf", "explicit", "natural"] = Field(
        default="uniform", description="natural: one learner for each silo that the data set names"
    )
    exponent: Positive | None = Field(
        default=None, description="of power_law (exponent^-rank) or zipf (rank^-exponent); 1.5"
    )
    explicit: list[Count] | None = Field(default=None, description="examples of each learner, for sizes = 'explicit'")
    classes: Classes = Field(
        default="iid",
        description="which examples: of all classes alike, of few, or of a range of a regression's target; with "
        "non_iid a learner takes the classes of which most is left, with random_classes any; with class_dirichlet "
        "each class is divided, and the sizes follow",
    )
    classes_per_learner: Count | list[Count] | None = Field(
        default=None, description="x of Non-IID(x), or one for each learner; the shards of each for 'shards'"
    )
    alpha: Positive | None = Field(default=None, description="of Dirichlet(alpha): small is few classes a learner")
    test: Literal["shared", "own"] = Field(
        default="shared", description="own: test examples are divided like the training examples, for each learner"
    )
    assignment: Literal["alternate", "in_order"] = Field(
        default="alternate",
        description="largest share to the first group, next to the second, and so on; or group by group",
    )


class AvailabilityConfig(Table):
    """When the learners of a group are there."""

    kind: Literal["always", "random", "daily", "trace"] = Field(
        default="always",
        description="random: present and away for exponentially distributed times; daily: from one hour to another",
    )
    mean_present: Positive | None = Field(default=None, description="seconds, for kind = 'random'")
    mean_away: Positive | None = Field(default=None, description="seconds, for kind = 'random'")
    opens: Hour | None = Field(default=None, description="hour of the day, for kind = 'daily'; a run begins at 0:00")
    closes: Hour | None = Field(default=None, description="hour of the day; over midnight if it is before `opens`")
    day_seconds: Positive | None = Field(default=None, description="length of a day, for kind = 'daily'; 86400")
    file: str | None = Field(
        default=None, description="CSV with columns leaves,back and optionally learner, for kind = 'trace'"
    )


class LinkConfig(Table):
    """How far the learners of a group are from the controller."""

    latency: Seconds = Field(default=0.0, description="seconds, one way")
    upload_mbps: Positive | None = Field(
        default=None, description="megabits a second; without it transfers take no time"
    )
    download_mbps: Positive | None = Field(default=None, description="megabits a second")
    cut_every: Positive | None = Field(
        default=None, description="mean seconds until the line is cut, for chance; needs cut_seconds"
    )
    cut_seconds: Positive | None = Field(default=None, description="mean seconds that a cut takes")
    resumed: bool = Field(
        default=True, description="whether a transfer that was cut goes on, as in a deployment, or begins again"
    )


class FaultsConfig(Table):
    """What goes wrong at the controller of a simulation; a deployment ignores it."""

    write_seconds: Seconds = Field(
        default=0.0, description="that the disk takes for each update; updates wait for each other"
    )
    stall_every: Positive | None = Field(
        default=None, description="mean seconds until the disk stalls; needs stall_seconds"
    )
    stall_seconds: Positive | None = Field(default=None, description="mean seconds that a stall takes")
    restart_every: Positive | None = Field(
        default=None, description="mean seconds until the controller goes down; needs restart_seconds"
    )
    restart_seconds: Positive | None = Field(default=None, description="mean seconds until it is back")
    restarts: list[Annotated[list[NotNegative], Field(min_length=2, max_length=2)]] = Field(
        default=[], description="[[second, seconds], ...]: when it goes down, and for how long"
    )


class PrivacyConfig(Table):
    """How the learners of a group protect their records (DP-SGD); a site may demand more in its own policy."""

    noise: Positive = Field(description="standard deviation of the noise in a step, as a multiple of clip")
    clip: Positive = Field(default=1.0, description="largest norm of one record's gradient; longer ones are cut to it")
    budget: Positive | None = Field(
        default=None, description="epsilon that a data set may spend, over all runs; without it there is no limit"
    )
    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)] = Field(
        default=1e-5, description="of (epsilon, delta); well below 1 / records"
    )
    larger_batches: bool = Field(
        default=True, description="fill a period that the budget leaves empty with larger batches, at the same epsilon"
    )


class PoisonConfig(Table):
    """An attack that the learners of a group carry out, in a simulation."""

    attack: Literal["sign_flip", "scale", "label_flip", "collusion"] = Field(
        description="the delta the other way, the delta many times, mirrored targets, or a small shift that all share"
    )
    strength: Positive | None = Field(
        default=None, description="how strongly; 1, or 100 for scale, or 1.5 for collusion"
    )


class LearnerGroup(Table):
    """Learners that are alike."""

    name: str = Field(min_length=1, description="the learners are called name-1, name-2, ...")
    names: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = Field(
        default=None, description="what each learner is called instead; their number is the count"
    )
    count: Count = Field(default=1, description="how many learners")
    batch_size: Count = Field(description="examples in a batch, beta_k")
    time_per_batch: Positive | None = Field(
        default=None, description="seconds, t_beta_k; a simulation needs it, or speed_trace; a deployment measures it"
    )
    jitter: Annotated[FiniteFloat, Field(ge=0, le=2)] = Field(
        default=0.0, description="standard deviation of the logarithm of a batch's time; at most 2"
    )
    drift: list[Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(
        default=[], description="[[second, factor], ...]: from then on a batch takes factor times as long"
    )
    speed_trace: str | None = Field(
        default=None, description="CSV with columns at,time_per_batch and optionally learner"
    )
    availability: AvailabilityConfig = AvailabilityConfig()
    network: LinkConfig = LinkConfig()
    privacy: PrivacyConfig | None = Field(default=None, description="how they protect their records")
    poison: PoisonConfig | None = Field(default=None, description="a rehearsed attack; a deployment ignores it")
    max_examples: Count | None = Field(
        default=None, description="a real learner that claims more is refused; deployment.max_examples if not given"
    )
    epsilon: NotNegative | None = Field(
        default=None, description="relative power while training (the paper: GPU 2, CPU 1)"
    )
    idle_epsilon: NotNegative | None = Field(
        default=None, description="relative power while idle; without it as while training"
    )
    watts: NotNegative | None = Field(default=None, description="power while training, instead of epsilon")
    idle_watts: NotNegative | None = Field(default=None, description="power while idle")

    @property
    def learner_names(self) -> list[str]:
        """What the learners of this group are called."""
        return self.names or [f"{self.name}-{number}" for number in range(1, self.count + 1)]


class NetworkConfig(NamedTable):
    """What is trained: a network by name, with its own options next to the name."""

    name: str = Field(default="mlp", description="one of the built-in networks; its options go next to the name")


class SolverConfig(NamedTable):
    """How one gradient changes the weights; what is not given comes from [training]."""

    solver: str | None = Field(default=None, description="local update rule; its own settings go next to the name")
    learning_rate: Positive | None = Field(default=None, description="eta")
    weight_decay: NotNegative | None = Field(default=None, description="added to the gradient, times the weights")


Patterns = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class ParametersConfig(Table):
    """Which parameters are federated, by patterns of their names; the first that matches counts, and others are."""

    federated: Patterns | None = Field(default=None, description="these travel; given alone, others are frozen")
    local: Patterns | None = Field(default=None, description="trained in each silo and never sent: personal parts")
    frozen: Patterns | None = Field(default=None, description="neither trained nor sent")

    def to_patterns(self) -> dict[str, list[str]]:
        """As the engine takes them."""
        return self.model_dump(exclude_none=True)


class PersonalConfig(NamedTable):
    """A model of its own for each site beside the federated one, with its settings next to the name."""

    name: str = Field(description="ditto, with pull, or apfl, with share and adapt next to it")


class TrainingConfig(OpenTable):
    """How learners train; the policies may differ in the solver, whose own settings go next to its name."""

    solver: str = Field(default="vanilla", description="local update rule; its own settings go next to the name")
    learning_rate: Positive = Field(default=0.05, description="eta")
    weight_decay: NotNegative = Field(default=0.0, description="added to the gradient, times the weights")
    engine: str = Field(
        default="torch", description="what computes: PyTorch, or an engine that a package or the site file adds"
    )
    task: Literal["classification", "regression"] | None = Field(
        default=None, description="if not that of the data set"
    )
    device: str = Field(default="cpu", description="of torch, as in cuda or cuda:1")
    dtype: Literal["float32", "float64", "float16", "bfloat16"] = Field(
        default="float32",
        description="of the weights at learners; 16 bits lose small steps, so for speed use precision; models are "
        "mixed, stored and counted as float32",
    )
    precision: Literal["float32", "tf32", "bf16", "fp16", "auto"] = Field(
        default="float32",
        description="of the forward pass in training, with weights and mixing in float32; metis probe measures whether "
        "bf16 pays here; tf32 and fp16 need a GPU; auto: bf16 where the hardware has it",
    )
    threads: Count = Field(default=1, description="torch threads of each process; at most its processors")
    buffers: Literal["average", "local"] = Field(
        default="average", description="BatchNorm statistics: mixed or kept (R10)"
    )
    initial_model: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="safetensors file, state dict of torch or folder of Hugging Face to start from"
    )
    clip_norm: Positive | None = Field(default=None, description="largest norm of a step's gradient")
    accumulate: Count = Field(default=1, description="batches whose mean gradient makes one step of the solver")
    parameters: ParametersConfig | None = Field(default=None, description="which are federated, local or frozen")
    personal: PersonalConfig | None = Field(
        default=None, description="a model of its own for each site beside the federated one, which is never sent"
    )


class PolicyConfig(NamedTable):
    """A policy by name, with its own parameters next to the name and a table for each layer on top of it."""

    name: str = Field(description="one of the policies; its parameters go next to the name")
    label: str | None = Field(default=None, min_length=1, description="how tables and figures call it")
    training: SolverConfig = Field(default=SolverConfig(), description="solver settings of this policy only")

    @property
    def layers(self) -> dict[str, dict[str, Any]]:
        """The tables of its layers, by key."""
        own = parameters_of(POLICIES[self.name]) if self.name in POLICIES else {}
        return {key: table for key, table in self.extras.items() if key in LAYERS and key not in own}

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of the policy itself."""
        layers = self.layers
        return {key: value for key, value in self.extras.items() if key not in layers}


class StopConfig(Table):
    """The run ends at whichever comes first."""

    rounds: Count | None = Field(default=None, description="published community models")
    seconds: Positive | None = Field(default=None, description="of virtual time")
    update_requests: Count | None = Field(default=None, description="local models handed in")
    steps: Count | None = Field(default=None, description="local steps of all learners together")
    at_target: bool = Field(default=False, description="stop as soon as evaluation.target is reached")
    patience: Count | None = Field(
        default=None, description="stop after so many evaluations without a better metric (on validation examples)"
    )


class EvaluationConfig(Table):
    """How the community model is judged, on the test examples and outside virtual time."""

    metric: str | None = Field(
        default=None,
        description="accuracy, loss, auc, f1, precision, recall, balanced_accuracy, dice; for a regression mae, loss, "
        "mse, rmse, r2; or one of a site file",
    )
    metrics: list[str] = Field(default=[], description="further metrics to measure, by the same names")
    higher_is_better: bool | None = Field(
        default=None, description="of a metric that a site file brings, if the site file does not say it"
    )
    target: FiniteFloat | None = Field(default=None, description="the value of the metric that costs are compared at")
    every_seconds: Seconds = Field(default=0.0, description="of virtual time; 0 is every published community model")


TRACKERS = ("csv", "tensorboard", "mlflow", "wandb")


class RunConfig(Table):
    """How it is run; apart from `refusals_allowed` and, in the last bits, `batched` none of it changes the result."""

    pool: Literal["inline", "processes", "ray"] | None = Field(
        default=None,
        description="where learners train: in this process, in worker processes here, or on a Ray cluster; without it "
        "in worker processes if there are workers",
    )
    workers: Annotated[int, Field(ge=0)] = Field(
        default=0, description="processes that train; 0 trains in this one, or in as many as the pool has room for"
    )
    ray_address: str | None = Field(
        default=None, description="of a running Ray cluster; else RAY_ADDRESS, else Ray is started on this machine"
    )
    gpus_per_learner: NotNegative = Field(
        default=0.0, description="GPUs, or a part of one, for each worker of the pool 'ray'"
    )
    batched: Count = Field(
        default=1,
        description="maximum learners of small networks without convolutions that are trained as one computation; "
        "1 trains each alone",
    )
    store: Literal["memory", "disk"] = Field(default="memory", description="where the learners' latest models are kept")
    refusals_allowed: Annotated[int, Field(ge=0)] = Field(
        default=3, description="refused updates in a row after which a learner is set aside"
    )
    checkpoint_every: Positive = Field(default=60.0, description="seconds of real time between checkpoints")
    trackers: list[str] = Field(
        default=[],
        description="csv, tensorboard, mlflow, wandb, each also as NAME:WHERE: where else the run is followed",
    )


class NotifyConfig(Table):
    """Who hears of what the operator of a controller should know."""

    command: list[str] = Field(
        default=[], description="program and arguments; run without a shell, gets a JSON document on its input"
    )
    webhook: str | None = Field(
        default=None, description="https://... to which the document is posted; http:// to this machine only"
    )
    events: list[NotifyEvent] = Field(default=list(get_args(NotifyEvent)), description="of which to notify")
    away_after: Positive = Field(default=3600.0, description="seconds after which a learner counts as away")


class DeploymentConfig(Table):
    """How a real federation is run: `metis controller`; a simulation ignores it."""

    listen: str = Field(default="0.0.0.0:7443", description="where learners connect to")
    http: str = Field(default="127.0.0.1:9464", description="status, health and metrics; '' for none")
    minimum: Count | None = Field(
        default=None, description="learners that are enough to begin with and to go on with; all, and 1, if not given"
    )
    wait_seconds: Seconds | None = Field(
        default=None, description="after the first learner came; then the minimum is enough; for ever if not given"
    )
    heartbeat: Positive = Field(default=5.0, description="seconds between two signs of life of a learner")
    lease: Positive = Field(default=30.0, description="seconds of silence after which a learner has left")
    linger: Seconds = Field(default=30.0, description="seconds at the end in which learners fetch the final model")
    durability: Literal["power", "process"] = Field(
        default="power", description="an acknowledged update survives a loss of power, or only the end of the process"
    )
    evaluate_at_learners: bool = Field(default=True, description="those that have evaluation data measure models too")
    evaluation_wait: Seconds = Field(
        default=60.0, description="seconds from the first report of a model on in which other sites are waited for"
    )
    evaluation_sites: Count = Field(
        default=2, description="sites whose reports make a federated value; 1 in a federation of one"
    )
    target_share: Annotated[FiniteFloat, Field(gt=0, le=1)] = Field(
        default=0.5, description="share of the members whose reports can end the federation at its target"
    )
    largest_number: Positive = Field(default=1e10, description="an update with a number beyond is refused")
    max_examples: Count = Field(default=10**9, description="a learner that claims more is refused")
    step_guard: Literal["off", "report", "clip", "refuse"] = Field(
        default="clip", description="what becomes of an update that goes much farther than others did"
    )
    step_limit: Annotated[FiniteFloat, Field(ge=1)] = Field(
        default=10.0, description="times what is usual that an update may go"
    )
    keep_models: Count = Field(
        default=5,
        description="newest community models that stay on disk, for a rollback; the first and the best do too",
    )
    notify: NotifyConfig | None = Field(default=None, description="notifications by a command or a webhook")


class ExperimentConfig(Table):
    """Everything that one file says."""

    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = Field(
        default=1990, description="all chance comes from it: the same seed gives the same bits"
    )
    seeds: Annotated[list[Annotated[int, Field(ge=0, le=2**63 - 1)]], Field(min_length=1)] | None = Field(
        default=None, description="for `metis compare`: every policy is run with each of them, instead of with `seed`"
    )
    site: SiteConfig | None = Field(default=None, description="instead of [data], [partition] and [network]")
    data: DataConfig = DataConfig()
    partition: PartitionConfig = PartitionConfig()
    learners: list[LearnerGroup] = Field(min_length=1)
    network: NetworkConfig = NetworkConfig()
    training: TrainingConfig = TrainingConfig()
    policy: list[PolicyConfig] = Field(min_length=1)
    stop: StopConfig = StopConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()
    faults: FaultsConfig = FaultsConfig()
    deployment: DeploymentConfig = DeploymentConfig()

    @property
    def learner_count(self) -> int:
        return sum(group.count for group in self.learners)

    def to_dict(self) -> dict[str, Any]:
        """Plain values without what was left open: the content of a TOML file."""
        replaced = None if self.site is None else set(REPLACED_BY_SITE)
        return cast("dict[str, Any]", without_nones(self.model_dump(exclude=replaced)))

    def to_toml(self) -> str:
        """A TOML file that loads to the same configuration."""
        return tomlkit.dumps(self.to_dict())


def task_of(config: ExperimentConfig) -> Literal["classification", "regression"]:
    """Classification or regression: as the file says, else as the data set is."""
    from metis.data.datasets import DATASETS

    if config.training.task is not None:
        return config.training.task
    if config.site is not None:
        return "classification"
    return DATASETS[config.data.dataset].task if config.data.dataset in DATASETS else "classification"


def without_nones(value: Any) -> Any:
    """What TOML can write of it; a list with a None in it is left out, because only a default can be one."""
    if isinstance(value, dict):
        left_open = {
            key for key, item in value.items() if item is None or (isinstance(item, (list, tuple)) and None in item)
        }
        return {key: without_nones(item) for key, item in value.items() if key not in left_open}
    return [without_nones(item) for item in value] if isinstance(value, (list, tuple)) else value
