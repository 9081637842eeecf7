"""The torch engine: one flat tensor, nothing kept between calls, the arithmetic of a plain torch loop."""

import math
import pickle
import re
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from metis.core.model import Model
from metis.core.solvers import FedProx, MomentumSGD, VanillaSGD
from metis.errors import ConfigError, DataError
from metis.learning import ArrayExamples, Batch, TorchEngine, mlp, small_cnn

NETWORK = partial(mlp, (5,), 3, hidden=(7,))


def batches(count: int, seed: int = 0, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 5, generator=generator), torch.randint(3, (size,), generator=generator))
        for _ in range(count)
    ]


def bits(model: Model) -> bytes:
    return model.vector.tobytes()


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class TestFlatTensor:
    def test_parameters_and_gradients_are_views(self) -> None:
        """Each parameter lies in the flat tensor where the layout says, its gradient at the same offset."""
        engine = TorchEngine(NETWORK)
        for name, parameter in engine.module.named_parameters():
            where = engine.layout.slices[name]
            assert parameter.data_ptr() == engine._flat[where].data_ptr()
            assert parameter.grad is not None
            assert parameter.grad.data_ptr() == engine._gradient[where].data_ptr()
        engine.train(engine.initial_model(0), batches(2), VanillaSGD(0.1))
        assert all(
            p.grad is not None and p.grad.data_ptr() == engine._gradient[engine.layout.slices[n]].data_ptr()
            for n, p in engine.module.named_parameters()
        )

    def test_buffers_are_views_behind_the_parameters(self) -> None:
        """Running statistics are written straight into the vector that is sent."""
        engine = TorchEngine(with_batch_norm)
        roles = [spec.role for spec in engine.layout.tensors]
        assert roles == ["parameter"] * 6 + ["buffer"] * 2 + ["counter"]
        for name in ("1.running_mean", "1.running_var"):
            buffer = engine.module.get_buffer(name)
            assert buffer.data_ptr() == engine._flat[engine.layout.slices[name]].data_ptr()

    def test_a_loaded_model_is_what_the_network_holds(self) -> None:
        """load() shows a model's tensors in the module, by name."""
        engine = TorchEngine(with_batch_norm)
        model = engine.initial_model(4)
        state = engine.load(model).state_dict()
        for name, array in model.tensors().items():
            assert np.array_equal(state[name].numpy(), array)

    def test_a_tied_parameter_is_one_tensor(self) -> None:
        """It lies in the vector once, gets both gradients, and stays tied."""

        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(5, 5, bias=False)
                self.second = nn.Linear(5, 5, bias=False)
                self.second.weight = self.first.weight

            def forward(self, inputs: Tensor) -> Tensor:
                outputs: Tensor = self.second(self.first(inputs))
                return outputs

        engine = TorchEngine(Tied)
        assert engine.layout.size == 25
        trained = engine.train(engine.initial_model(0), batches(3), VanillaSGD(0.1))

        twin = Tied()
        with torch.no_grad():
            twin.first.weight.copy_(torch.tensor(engine.initial_model(0).tensors()["first.weight"]))
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for inputs, targets in batches(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(twin(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert trained.model.vector == pytest.approx(twin.first.weight.detach().numpy().ravel(), abs=1e-6)

    def test_frozen_parameters_are_not_stepped(self) -> None:
        """Not even by weight decay; they are still part of the model."""

        def network() -> nn.Module:
            module = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
            module[0].requires_grad_(False)
            return module

        engine = TorchEngine(network)
        start = engine.initial_model(0)
        end = engine.train(start, batches(3), VanillaSGD(0.1, weight_decay=0.1)).model
        assert np.array_equal(end.tensors()["0.weight"], start.tensors()["0.weight"])
        assert not np.array_equal(end.tensors()["1.weight"], start.tensors()["1.weight"])

    def test_a_network_without_parameters_can_be_measured_and_trains_to_itself(self) -> None:
        """Its model is empty; steps and loss are counted all the same."""
        engine = TorchEngine(nn.Identity)
        model = engine.initial_model(0)
        assert model.layout.size == 0
        trained = engine.train(model, batches(2), MomentumSGD(0.1, 0.9))
        assert trained.steps == 2
        assert trained.loss > 0

    def test_non_persistent_buffers_are_no_part_of_a_model(self) -> None:
        """Constants of a layer are neither sent nor averaged."""

        class Shifted(nn.Linear):
            def __init__(self) -> None:
                super().__init__(5, 3)
                self.register_buffer("constant", torch.ones(3), persistent=False)

        names = [spec.name for spec in TorchEngine(Shifted).layout.tensors]
        assert names == ["weight", "bias"]

    def test_a_buffer_that_the_network_replaces_is_still_sent(self) -> None:
        """`self.seen = self.seen + ...` makes a new tensor; its value counts, the next task starts clean."""

        class Counting(nn.Linear):
            seen: Tensor

            def __init__(self) -> None:
                super().__init__(5, 3)
                self.register_buffer("seen", torch.zeros(1))

            def forward(self, inputs: Tensor) -> Tensor:
                self.seen = self.seen + len(inputs)
                return super().forward(inputs)

        engine = TorchEngine(Counting)
        for _ in range(2):
            trained = engine.train(engine.initial_model(0), batches(3, size=8), VanillaSGD(0.1))
            assert trained.model.tensors()["seen"] == [3 * 8]


class TestTraining:
    def test_equals_a_bare_torch_loop(self) -> None:
        """Momentum SGD over the same batches gives torch.optim.SGD's weights, to float tolerance."""
        engine = TorchEngine(partial(small_cnn, (1, 8, 8), 3, channels=(4, 6), kernel=3))
        generator = torch.Generator().manual_seed(1)
        data = [
            (torch.randn(10, 1, 8, 8, generator=generator), torch.randint(3, (10,), generator=generator))
            for _ in range(12)
        ]
        start = engine.initial_model(7)
        trained = engine.train(start, data, MomentumSGD(0.05, 0.75, weight_decay=0.001))

        twin = small_cnn((1, 8, 8), 3, channels=(4, 6), kernel=3)
        twin.load_state_dict({name: torch.tensor(array) for name, array in start.tensors().items()})
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.75, weight_decay=0.001)
        losses = []
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(twin(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
        for name, tensor in twin.state_dict().items():
            assert trained.model.tensors()[name] == pytest.approx(tensor.numpy(), abs=1e-5), name
        assert trained.steps == len(data)
        assert trained.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    def test_loss_is_a_mean_over_examples(self) -> None:
        """A short last batch weighs by its size."""
        engine = TorchEngine(NETWORK)
        data = [*batches(1, size=9), *batches(1, seed=1, size=3)]
        start = engine.initial_model(0)
        first = engine.train(start, data[:1], VanillaSGD(0.1))
        second = engine.train(first.model, data[1:], VanillaSGD(0.1))
        both = engine.train(start, data, VanillaSGD(0.1))
        assert both.loss == pytest.approx((9 * first.loss + 3 * second.loss) / 12)
        assert bits(both.model) == bits(second.model)

    def test_same_seed_same_bits(self) -> None:
        """Two engines, two calls, or a pickled engine: the same task gives the same bits."""
        first, second = TorchEngine(NETWORK), TorchEngine(NETWORK)
        copied: TorchEngine = pickle.loads(pickle.dumps(first))
        results = [
            bits(engine.train(engine.initial_model(5), batches(4), MomentumSGD(0.1, 0.9), seed=3).model)
            for engine in (first, second, copied, first)
        ]
        assert len(set(results)) == 1
        assert bits(first.initial_model(5)) != bits(first.initial_model(6))

    def test_nothing_is_left_over_from_another_learner(self) -> None:
        """All learners share one engine, so a task between two equal tasks changes nothing."""
        engine = TorchEngine(with_batch_norm)
        model = engine.initial_model(0)
        alone = engine.train(model, batches(3), MomentumSGD(0.1, 0.9))
        engine.train(model, batches(5, seed=9), MomentumSGD(0.5, 0.9), seed=8)
        again = engine.train(model, batches(3), MomentumSGD(0.1, 0.9))
        assert bits(alone.model) == bits(again.model)
        assert again.memory["counters"].tolist() == [3]

    def test_the_community_model_is_left_alone(self) -> None:
        """Models are shared; a read-only one, such as a memory-mapped one, trains as well."""
        engine = TorchEngine(NETWORK)
        model = engine.initial_model(0)
        before = bits(model)
        locked = model.with_vector(model.vector.copy())
        locked.vector.flags.writeable = False
        results = [engine.train(m, batches(3), FedProx(0.1, 0.5)).model for m in (model, locked)]
        assert bits(model) == before
        assert bits(results[0]) == bits(results[1])
        assert not np.shares_memory(results[0].vector, results[1].vector)

    def test_dropout_is_reproducible_and_leaves_torch_alone(self) -> None:
        """The task's seed rules dropout; the caller's global generator is as before."""
        engine = TorchEngine(partial(mlp, (5,), 3, hidden=(16,), dropout=0.5))
        model = engine.initial_model(0)
        torch.manual_seed(11)
        state = torch.get_rng_state()
        one, same, other = (engine.train(model, batches(3), VanillaSGD(0.1), seed=seed).model for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        assert bits(one) == bits(same)
        assert bits(one) != bits(other)

    def test_momentum_starts_anew_unless_kept(self) -> None:
        """R5: with keep_momentum two tasks in a row equal one long task; without, they do not."""
        engine = TorchEngine(NETWORK)
        start, data = engine.initial_model(0), batches(6)
        for keep in (False, True):
            solver = MomentumSGD(0.1, 0.9, keep_momentum=keep)
            whole = engine.train(start, data, solver)
            first = engine.train(start, data[:3], solver)
            second = engine.train(first.model, data[3:], solver, first.memory)
            assert (bits(second.model) == bits(whole.model)) is keep

    def test_stops_early_when_the_loss_is_not_finite(self) -> None:
        """The rest of a diverged task is not worth computing."""
        engine = TorchEngine(NETWORK)
        inputs, targets = batches(1)[0]
        trained = engine.train(engine.initial_model(0), [(inputs * math.nan, targets)] * 50, VanillaSGD(0.1))
        assert trained.steps == 1
        assert math.isnan(trained.loss)

    def test_batches_are_drawn_one_at_a_time(self) -> None:
        """An endless source is fine as long as somebody limits it; no batch is drawn in advance."""
        drawn: list[int] = []

        def endless() -> Any:
            while True:
                drawn.append(len(drawn))
                yield batches(1)[0]

        engine = TorchEngine(NETWORK)
        engine.train(engine.initial_model(0), islice(endless(), 3), VanillaSGD(0.1))
        assert len(drawn) == 3

    @pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
    def test_other_precisions(self, dtype: str) -> None:
        """The network computes in this dtype; models and kept memory stay arrays that numpy knows."""
        engine = TorchEngine(with_batch_norm, dtype=dtype, buffers="local")
        solver = MomentumSGD(0.1, 0.9, keep_momentum=True)
        first = engine.train(engine.initial_model(0), batches(2), solver)
        second = engine.train(first.model, batches(2), solver, first.memory)
        reference = TorchEngine(with_batch_norm, buffers="local")
        expected = reference.train(reference.initial_model(0), batches(2), solver)
        assert {p.dtype for p in engine.module.parameters()} == {getattr(torch, dtype)}
        assert second.model.vector.dtype == np.float32
        tolerance = 1e-5 if dtype == "float64" else 0.1
        assert first.model.vector == pytest.approx(expected.model.vector, abs=tolerance)


class TestBatchNorm:
    def test_average_shares_the_running_statistics(self) -> None:
        """They are part of the model, as a plain torch module would have them after the same batches."""
        engine = TorchEngine(with_batch_norm, buffers="average")
        inputs, targets = batches(1)[0]
        start = engine.initial_model(0)
        trained = engine.train(start, [(inputs, targets)], VanillaSGD(0.1))
        first = start.tensors()
        activations = inputs.numpy() @ first["0.weight"].T + first["0.bias"]
        momentum = 0.1  # of torch's BatchNorm
        mean = (1 - momentum) * 0 + momentum * activations.mean(0)
        variance = (1 - momentum) * 1 + momentum * activations.var(0, ddof=1)
        assert trained.model.tensors()["1.running_mean"] == pytest.approx(mean, abs=1e-6)
        assert trained.model.tensors()["1.running_var"] == pytest.approx(variance, abs=1e-6)

    def test_counters_stay_in_the_silo(self) -> None:
        """The model handed in carries the initial counter; the learner's own counts on in its memory."""
        engine = TorchEngine(with_batch_norm)
        start = engine.initial_model(0)
        first = engine.train(start, batches(3), VanillaSGD(0.1))
        second = engine.train(first.model, batches(2), VanillaSGD(0.1), first.memory)
        assert first.model.counters.tolist() == second.model.counters.tolist() == [0]
        assert second.memory["counters"].tolist() == [5]

    def test_local_keeps_the_running_statistics_in_the_silo(self) -> None:
        """They are not in the layout but in the memory; with it, two tasks go on where the first ended."""
        engine = TorchEngine(with_batch_norm, buffers="local")
        shared = TorchEngine(with_batch_norm, buffers="average")
        assert {spec.role for spec in engine.layout.tensors} == {"parameter", "counter"}
        assert engine.layout.size == shared.layout.size - 2 * 6
        first = engine.train(engine.initial_model(0), batches(2), VanillaSGD(0.1))
        second = engine.train(first.model, batches(3, seed=1), VanillaSGD(0.1), first.memory)
        expected = shared.train(
            shared.initial_model(0), [*batches(2), *batches(3, seed=1)], VanillaSGD(0.1)
        ).model.tensors()
        statistics = np.concatenate([expected["1.running_mean"], expected["1.running_var"]])
        assert second.memory["buffers"] == pytest.approx(statistics, abs=1e-6)
        forgotten = engine.train(first.model, batches(3, seed=1), VanillaSGD(0.1))
        assert forgotten.memory["buffers"] != pytest.approx(statistics, abs=1e-6)

    def test_local_evaluates_with_a_memory_or_with_the_statistics_of_the_data(self) -> None:
        """Without a learner's memory the batch's own statistics stand in, never the untrained ones."""
        engine = TorchEngine(with_batch_norm, buffers="local")
        inputs, targets = batches(1, size=40)[0]
        inputs = 5 + 3 * inputs
        examples = ArrayExamples(inputs, targets)
        trained = engine.train(engine.initial_model(0), [(inputs, targets)] * 60, VanillaSGD(0.1))
        module = engine.load(trained.model, trained.memory)
        with torch.inference_mode():
            with_memory = nn.functional.cross_entropy(module(inputs), targets).item()
            module[1].train()  # type: ignore[index]
            without = nn.functional.cross_entropy(module(inputs), targets).item()
        assert engine.evaluate(trained.model, examples, trained.memory)["loss"] == pytest.approx(with_memory)
        assert engine.evaluate(trained.model, examples)["loss"] == pytest.approx(without, abs=1e-6)


class TestEvaluation:
    def test_classification(self) -> None:
        """Cross entropy and accuracy, as means over all examples whatever the evaluation batch."""
        inputs, targets = batches(1, size=23)[0]
        examples = ArrayExamples(inputs, targets)
        engine = TorchEngine(NETWORK, evaluation_batch=5)
        model = engine.initial_model(2)
        with torch.inference_mode():
            outputs = engine.load(model)(inputs)
        expected = {
            "loss": nn.functional.cross_entropy(outputs, targets).item(),
            "accuracy": (outputs.argmax(1) == targets).sum().item() / 23,
        }
        assert engine.evaluate(model, examples) == pytest.approx(expected, rel=1e-5)
        assert TorchEngine(NETWORK).evaluate(model, examples) == pytest.approx(expected, rel=1e-5)

    def test_regression_learns_a_line(self) -> None:
        """Mean squared and mean absolute error; a network with one output fits targets without an axis."""
        rng = np.random.default_rng(0)
        inputs = rng.normal(size=(64, 2)).astype(np.float32)
        targets = (inputs @ np.array([2.0, -1.0]) + 0.5).astype(np.float32)
        engine = TorchEngine(partial(nn.Linear, 2, 1), "regression")
        start = engine.initial_model(0)
        examples = ArrayExamples(inputs, targets)
        before = engine.evaluate(start, examples)
        trained = engine.train(start, [examples.batch(np.arange(64))] * 200, VanillaSGD(0.1))
        after = engine.evaluate(trained.model, examples)
        guess = inputs @ start.tensors()["weight"].ravel() + start.tensors()["bias"]
        expected = {"loss": np.mean((guess - targets) ** 2), "mae": np.mean(np.abs(guess - targets))}
        assert before == pytest.approx(expected, rel=1e-5)
        assert after["mae"] < 1e-3
        assert trained.model.tensors()["weight"] == pytest.approx(np.array([[2.0, -1.0]]), abs=1e-3)

    def test_outputs_that_would_be_broadcast_are_refused(self) -> None:
        """Two outputs for one target is a mistake, not a mean."""
        engine = TorchEngine(partial(nn.Linear, 5, 2), "regression")
        examples = ArrayExamples(np.zeros((4, 5), np.float32), np.zeros(4, np.float32))
        with pytest.raises(ConfigError, match=r"outputs have shape \(4, 2\), the targets \(4,\)"):
            engine.evaluate(engine.initial_model(0), examples)

    @pytest.mark.parametrize("loss", [None, nn.functional.cross_entropy, nn.CrossEntropyLoss()])
    @pytest.mark.parametrize(
        ("targets", "sentence"),
        [
            (np.zeros((4, 1), np.float32), 'floating-point numbers: write task = "regression", or give a loss such as'),
            (np.zeros(4, np.float32), 'floating-point numbers: write task = "regression", or give a loss such as'),
            (np.zeros(4, np.int64), "cross-entropy is always 0: give it one for each class, or give a loss such as"),
        ],
    )
    def test_a_cross_entropy_of_one_output_is_refused(self, targets: Any, sentence: str, loss: Any) -> None:
        """It is 0 whatever the weights are, so a regression that is taken for a classification would learn nothing."""
        engine = TorchEngine(partial(nn.Linear, 5, 1), loss=loss)
        examples, model = ArrayExamples(np.ones((4, 5), np.float32), targets), engine.initial_model(0)
        with pytest.raises(ConfigError, match=f"the network has one output.*{re.escape(sentence)}"):
            engine.train(model, [examples.batch(np.arange(4))], VanillaSGD(0.1))
        with pytest.raises(ConfigError, match=f"the network has one output.*{re.escape(sentence)}"):
            engine.evaluate(model, examples)

    def test_a_binary_cross_entropy_of_one_output_is_not(self) -> None:
        engine = TorchEngine(partial(nn.Linear, 5, 1), loss=nn.BCEWithLogitsLoss(), metrics={})
        examples = ArrayExamples(np.ones((4, 5), np.float32), np.ones((4, 1), np.float32))
        model = engine.initial_model(0)
        trained = engine.train(model, [examples.batch(np.arange(4))], VanillaSGD(0.1)).model
        assert engine.evaluate(trained, examples)["loss"] < engine.evaluate(model, examples)["loss"]

    def test_a_user_brings_a_loss_and_metrics(self) -> None:
        """Both are functions of outputs and targets."""

        def sum_of_squares(outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs - targets).square().sum() / len(targets)

        engine = TorchEngine(
            partial(nn.Linear, 5, 2),
            "regression",
            loss=sum_of_squares,
            metrics={"worst": lambda o, t: (o - t).abs().max()},
        )
        examples = ArrayExamples(np.ones((4, 5), np.float32), np.zeros((4, 2), np.float32))
        model = engine.initial_model(0).with_vector(np.ones(12, np.float32))
        assert engine.evaluate(model, examples) == pytest.approx({"loss": 2 * 6.0**2, "worst": 6.0})

    def test_no_examples(self) -> None:
        """The mean over nothing is undefined."""
        engine = TorchEngine(NETWORK)
        with pytest.raises(DataError, match="no examples"):
            engine.evaluate(engine.initial_model(0), ArrayExamples(np.zeros((0, 5)), np.zeros(0, np.int64)))


class TestWhatAUserBrings:
    def test_a_module_brings_its_own_weights(self) -> None:
        """An instance is copied; its weights are the initial model whatever the seed; it is never trained."""
        module = nn.Linear(5, 3)
        before = module.weight.detach().clone()
        engine = TorchEngine(module)
        start = engine.initial_model(1)
        assert np.array_equal(start.tensors()["weight"], before.numpy())
        engine.train(start, batches(2), VanillaSGD(0.5))
        assert torch.equal(module.weight, before)
        assert bits(engine.initial_model(2)) == bits(start)

    def test_a_module_is_left_alone_however_it_is_given(self) -> None:
        """An instance, a function of one instance and one of a shared part start from the same bits, also again."""
        pretrained = NETWORK()
        before = {name: tensor.clone() for name, tensor in pretrained.state_dict().items()}
        shas = set()
        for network in (pretrained, lambda: pretrained, lambda: nn.Sequential(pretrained), lambda: pretrained):
            engine = TorchEngine(network)
            start = engine.initial_model(1)
            shas.add(start.vector.tobytes())
            trained = engine.train(start, batches(3), VanillaSGD(0.1)).model
            assert trained.sha256() != start.sha256()
            assert engine.initial_model(2).sha256() == start.sha256(), "training must not change the start"
        assert len(shas) == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in pretrained.state_dict().items())
        fresh = TorchEngine(NETWORK)
        assert fresh.initial_model(1).sha256() != fresh.initial_model(2).sha256(), (
            "a fresh network has the seed's start"
        )

    def test_a_module_that_cannot_be_copied_must_be_made_each_time(self) -> None:
        """One sentence, instead of a module that is trained in place."""

        def with_a_result() -> nn.Module:
            network: Any = NETWORK()
            network.kept = network(torch.zeros(1, 5))  # torch refuses to copy what is not a leaf
            return nn.Sequential(network)

        one = with_a_result()
        with pytest.raises(ConfigError, match="network is one module that cannot be copied, so make it each time"):
            TorchEngine(lambda: one)
        with pytest.raises(ConfigError, match="cannot be copied"):
            TorchEngine(one)
        assert TorchEngine(with_a_result).initial_model(1).layout.size == TorchEngine(NETWORK).layout.size

    def test_channels_last_changes_the_strides_and_not_the_result(self) -> None:
        """Both memory formats give the same model to float tolerance."""
        generator = torch.Generator().manual_seed(0)
        data = [(torch.randn(6, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2]))] * 3
        network = partial(small_cnn, (3, 8, 8), 3, kernel=3)
        results = []
        for channels_last in (True, False):
            engine = TorchEngine(network, channels_last=channels_last)
            results.append(engine.train(engine.initial_model(0), data, VanillaSGD(0.1)).model.vector)
        assert results[0] == pytest.approx(results[1], abs=1e-5)

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"task": "clustering"}, "task is 'clustering'; allowed: classification, regression"),
            ({"dtype": "int8"}, "dtype is 'int8'; allowed: float16"),
            ({"buffers": "shared"}, "buffers is 'shared'; allowed: average, local"),
            ({"threads": 0}, "threads is 0"),
            ({"evaluation_batch": 0}, "evaluation_batch is 0"),
            ({"device": "abacus"}, "device 'abacus' cannot be used"),
        ],
    )
    def test_impossible_options_are_refused(self, options: dict[str, Any], sentence: str) -> None:
        """Before anything starts, with what is allowed."""
        with pytest.raises(ConfigError, match=sentence):
            TorchEngine(NETWORK, **options)

    def test_lazy_layers_are_refused(self) -> None:
        """A layer without a shape cannot be part of a layout."""
        with pytest.raises(ConfigError, match="lazy layers"):
            TorchEngine(partial(nn.LazyLinear, 3))

    def test_a_foreign_model_is_refused(self) -> None:
        """A model of another network does not fit."""
        engine = TorchEngine(NETWORK)
        with pytest.raises(ConfigError, match="layouts must be equal"):
            engine.train(Model.empty(), batches(1), VanillaSGD(0.1))
