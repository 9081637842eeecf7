"""Partitions: the paper's exact lists, and the contract of every partitioner for any labels and sizes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from metis.data import load_dataset, partition
from metis.data.partition import (
    classes_per_learner,
    describe,
    dirichlet,
    explicit_sizes,
    iid,
    non_iid,
    power_law_sizes,
    skewed_sizes,
    target_ranges,
    uniform_sizes,
    zipf_sizes,
)
from metis.errors import DataError

CIFAR10 = np.repeat(np.arange(10), 5000)
CIFAR100 = np.repeat(np.arange(100), 500)
SIZE_FUNCTIONS = [uniform_sizes, skewed_sizes, power_law_sizes, zipf_sizes]

many = settings(max_examples=200)


def generator(seed=1990):
    return np.random.default_rng(seed)


def batches(sizes, batch_size=100):
    return [math.ceil(size / batch_size) for size in sizes]


@st.composite
def labels_and_sizes(draw, highest_label=6):
    """Any labels, in any order and with gaps between the classes, and any sizes that they allow."""
    labels = draw(st.lists(st.integers(0, highest_label), min_size=1, max_size=120))
    used = draw(st.integers(1, len(labels)) | st.just(len(labels)))
    learners = draw(st.integers(1, min(8, used)))
    cuts = draw(st.lists(st.integers(1, max(1, used - 1)), min_size=learners - 1, max_size=learners - 1, unique=True))
    edges = [0, *sorted(cuts), used]
    return np.array(labels), [after - before for before, after in itertools.pairwise(edges)]


def assert_contract(divide, labels, sizes, seed=1990):
    """Sizes as asked, disjoint, complete if all were asked for, sorted int64, the same again for a seed."""
    parts = divide(labels, sizes, generator(seed))
    together = np.concatenate(parts)
    assert [len(part) for part in parts] == list(sizes)
    assert len(np.unique(together)) == len(together) == sum(sizes)
    assert together.min() >= 0
    assert together.max() < len(labels)
    if sum(sizes) == len(labels):
        assert np.array_equal(np.sort(together), np.arange(len(labels)))
    again = divide(labels, sizes, generator(seed))
    for part, same in zip(parts, again, strict=True):
        assert part.dtype == np.int64
        assert np.array_equal(part, np.sort(part))
        assert np.array_equal(part, same)
    return parts


# --- sizes ----------------------------------------------------------------------------------------


def test_power_law_gives_the_batches_of_the_papers_tables():
    """Ten learners over 50,000 examples: 505 batches of 100, 302 fast and 203 slow (reading R16)."""
    sizes = power_law_sizes(50_000, 10)
    assert sum(sizes) == 50_000
    assert batches(sizes) == [170, 114, 76, 51, 34, 23, 15, 10, 7, 5]
    assert sum(batches(sizes)[::2]) == 302
    assert sum(batches(sizes)[1::2]) == 203


def test_power_law_sizes_are_the_rounded_geometric_series():
    """Each size is within one example of its share 1.5 ** -rank."""
    weights = [1.5**-rank for rank in range(10)]
    for size, weight in zip(power_law_sizes(50_000, 10), weights, strict=True):
        assert abs(size - 50_000 * weight / sum(weights)) < 1


def test_zipf_sizes_are_the_other_reading():
    """rank ** -1.5 gives the head 251 batches, which the paper's tables rule out (R16)."""
    assert batches(zipf_sizes(50_000, 10))[0] == 251


def test_skewed_sizes_decline_linearly_from_the_papers_largest_learner():
    """The largest of ten holds 81 batches (R15), and all steps down are equal up to rounding."""
    sizes = skewed_sizes(50_000, 10)
    steps = -np.diff(sizes)
    assert sizes[0] == 81 * 100
    assert sum(sizes) == 50_000
    assert steps.max() - steps.min() <= 2


def test_uniform_sizes_differ_by_at_most_one():
    """What cannot be divided evenly goes to the first learners."""
    assert uniform_sizes(50_000, 10) == [5000] * 10
    assert uniform_sizes(11, 4) == [3, 3, 3, 2]


@many
@given(st.sampled_from(SIZE_FUNCTIONS), st.integers(1, 300), st.integers(0, 2000))
def test_sizes_descend_and_sum_to_the_examples(sizes_of, learners, surplus):
    """For any numbers: every learner has at least one example, none is lost, larger ones come first."""
    sizes = sizes_of(learners + surplus, learners)
    assert len(sizes) == learners
    assert sum(sizes) == learners + surplus
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)


def test_thousands_of_learners_fit_under_a_power_law():
    """1.5 ** 5000 is beyond the floats, yet the sizes are right."""
    sizes = power_law_sizes(100_000, 5000)
    assert sum(sizes) == 100_000
    assert min(sizes) == 1


def test_explicit_sizes_keep_the_users_order():
    """Explicit sizes belong to the learners in the order given, and may leave examples over."""
    assert explicit_sizes(100, [10, 70, 15]) == [10, 70, 15]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: uniform_sizes(3, 5), "3 examples cannot be divided among 5 learners"),
        (lambda: uniform_sizes(3, 0), "number of learners must be at least 1, not 0"),
        (lambda: skewed_sizes(3, -1), "number of learners must be at least 1, not -1"),
        (lambda: power_law_sizes(10, 2, 0.5), "exponent of at least 1, not 0.5"),
        (lambda: zipf_sizes(10, 2, float("nan")), "exponent of at least 0, not nan"),
        (
            lambda: explicit_sizes(10, [5, 6]),
            "2 learners are to hold 11 examples in all, but there are only 10",
        ),
        (lambda: explicit_sizes(10, [5, 0]), "learner 1 is to hold 0 examples"),
        (lambda: explicit_sizes(10, []), "the list of sizes is empty"),
    ],
)
def test_impossible_sizes_are_refused_with_the_numbers(call, message):
    """One sentence that says what was asked and what there is."""
    with pytest.raises(DataError, match=message):
        call()


# --- the contract of every partitioner ------------------------------------------------------------


@many
@given(labels_and_sizes())
def test_iid_contract(case):
    """Disjoint, complete and reproducible for any labels and sizes."""
    assert_contract(iid, *case)


@many
@given(labels_and_sizes(), st.sampled_from([1e-9, 0.01, 0.1, 0.5, 1.0, 100.0, 1e9]))
def test_dirichlet_contract(case, alpha):
    """Disjoint, complete and reproducible for any labels, sizes and alpha."""
    assert_contract(lambda labels, sizes, rng: dirichlet(labels, sizes, alpha, rng), *case)


@many
@given(labels_and_sizes())
def test_target_ranges_contract(case):
    """Disjoint, complete and reproducible for any targets and sizes."""
    labels, sizes = case
    assert_contract(target_ranges, labels / 3, sizes)


@many
@given(labels_and_sizes(), st.integers(1, 7), st.booleans())
def test_non_iid_contract(case, x, at_random):
    """Either the partition is as asked, each learner with exactly its number of classes, or a DataError."""
    labels, sizes = case
    try:
        numbers = classes_per_learner(sizes, np.bincount(labels).tolist(), x)
        parts = assert_contract(lambda labels, sizes, rng: non_iid(labels, sizes, x, rng, at_random), labels, sizes)
    except DataError as error:
        assert any(character.isdigit() for character in str(error))
        return
    held = (describe(parts, labels) > 0).sum(axis=1)
    assert held.tolist() == numbers
    assert all(number >= x for number in numbers)


def exists(sizes, numbers, counts):
    """Whether a division exists, by trying them all: the slow twin of the search."""
    if not sizes:
        return sum(counts) == 0
    rows = itertools.product(*(range(min(count, sizes[0]) + 1) for count in counts))
    return any(
        exists(sizes[1:], numbers[1:], [count - amount for count, amount in zip(counts, row, strict=True)])
        for row in rows
        if sum(row) == sizes[0] and sum(amount > 0 for amount in row) == numbers[0]
    )


@settings(max_examples=50)
@given(st.data())
def test_non_iid_finds_a_partition_exactly_if_one_exists(data):
    """For small cases, of which all divisions can be tried, success and refusal are both right."""
    counts = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    examples, classes = sum(counts), len(counts)
    sizes = uniform_sizes(examples, data.draw(st.integers(1, min(4, examples))))
    numbers = [data.draw(st.integers(1, classes)) for _ in sizes]
    labels = np.repeat(np.arange(classes), counts)
    try:
        parts = non_iid(labels, sizes, numbers, generator(), at_random=data.draw(st.booleans()))
    except DataError:
        assert not exists(sizes, numbers, counts)
    else:
        assert (describe(parts, labels) > 0).sum(axis=1).tolist() == numbers


def test_seeds_differ():
    """Another generator gives another partition."""
    sizes = uniform_sizes(50_000, 10)
    first, second = (non_iid(CIFAR10, sizes, 5, generator(seed)) for seed in (1, 2))
    assert not np.array_equal(first[0], second[0])


# --- IID ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes_of", SIZE_FUNCTIONS)
def test_iid_gives_every_learner_every_class_in_proportion(sizes_of):
    """Every learner's count of every class is within two of its proportional share."""
    sizes = sizes_of(50_000, 10)
    shares = np.outer(sizes, np.full(10, 1 / 10))
    assert np.abs(describe(iid(CIFAR10, sizes, generator()), CIFAR10) - shares).max() < 2


def test_iid_takes_regression_targets():
    """Targets that are not whole numbers are divided at random."""
    ages = generator().uniform(45, 80, 500)
    parts = assert_contract(iid, ages, skewed_sizes(500, 8))
    assert all(abs(ages[part].mean() - ages.mean()) < 8 for part in parts)


# --- Non-IID(x) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "x", "published"),
    [
        (CIFAR10, 5, [8, 7, 6] + [5] * 7),
        (CIFAR10, 3, [8, 4] + [3] * 8),
        (CIFAR100, 50, [84, 76, 68, 64, 55] + [50] * 5),
        (CIFAR100[::5], 50, [84, 76, 68, 64, 55] + [50] * 5),
    ],
)
def test_power_law_heads_hold_the_papers_numbers_of_classes(labels, x, published):
    """Ten power law learners under Non-IID(x) hold exactly the published numbers of classes (Sec. 6)."""
    sizes = power_law_sizes(len(labels), 10)
    parts = assert_contract(lambda labels, sizes, rng: non_iid(labels, sizes, x, rng), labels, sizes)
    assert (describe(parts, labels) > 0).sum(axis=1).tolist() == published
    assert classes_per_learner(sizes, np.bincount(labels).tolist(), x) == published


@pytest.mark.parametrize("sizes_of", [uniform_sizes, skewed_sizes])
@pytest.mark.parametrize(("labels", "x"), [(CIFAR10, 2), (CIFAR10, 3), (CIFAR10, 5), (CIFAR100, 50)])
def test_uniform_and_skewed_learners_hold_exactly_x_classes(sizes_of, labels, x):
    """Only the head of a power law holds more classes than asked."""
    sizes = sizes_of(len(labels), 10)
    parts = assert_contract(lambda labels, sizes, rng: non_iid(labels, sizes, x, rng), labels, sizes)
    assert (describe(parts, labels) > 0).sum(axis=1).tolist() == [x] * 10


SKEWED = [8050, 7750, 7650, 5650, 5650, 4150, 3950, 2750, 2650, 1750]  # of the paper's tables


def classes_in_common(parts):
    held = (describe(parts, CIFAR10) > 0).astype(int)
    return (held @ held.T)[np.triu_indices(len(parts), 1)]


@pytest.mark.parametrize("seed", range(1990, 1996))
def test_with_classes_at_random_learners_share_some_and_not_all(seed):
    """Those who take what is left are two groups without a class in common; those with classes at random are not."""
    assert (classes_in_common(non_iid(CIFAR10, SKEWED, 5, generator(seed))) == 0).sum() >= 20
    assert (classes_in_common(non_iid(CIFAR10, SKEWED, 5, generator(seed), at_random=True)) == 0).sum() <= 3


def test_classes_at_random_are_others_for_another_seed():
    """Not only other names for the same division: other learners share classes."""
    first, second = (non_iid(CIFAR10, SKEWED, 5, generator(seed), at_random=True) for seed in (1, 2))
    assert classes_in_common(first).tolist() != classes_in_common(second).tolist()


def test_non_iid_1_with_as_many_equal_learners_as_classes():
    """Each learner is one whole class."""
    counts = describe(non_iid(CIFAR10, uniform_sizes(50_000, 10), 1, generator()), CIFAR10)
    assert sorted(counts.argmax(axis=1)) == list(range(10))
    assert (counts.max(axis=1) == 5000).all()


def test_a_learners_classes_are_about_equally_large():
    """Uniform Non-IID(5) of ten equal classes divides without a remainder: 1,000 of each class."""
    counts = describe(non_iid(CIFAR10, uniform_sizes(50_000, 10), 5, generator()), CIFAR10)
    assert set(counts[counts > 0].tolist()) == {1000}


def test_unlisted_power_laws_follow_the_rule():
    """Without a published list the head gets what its share needs: it does not fit in 3 x 5,000."""
    sizes = power_law_sizes(50_000, 10)
    numbers = classes_per_learner(sizes, [5000] * 10, 2)
    assert numbers[0] >= math.ceil(sizes[0] / 5000)
    assert sum(numbers) >= 10 + 10
    assert numbers[-1] == 2
    counts = describe(non_iid(CIFAR10, sizes, 2, generator()), CIFAR10)
    assert (counts > 0).sum(axis=1).tolist() == numbers


def test_explicit_numbers_of_classes():
    """A list gives each learner its own number of classes."""
    counts = describe(non_iid(CIFAR10, [20_000, 20_000, 10_000], [10, 6, 3], generator()), CIFAR10)
    assert (counts > 0).sum(axis=1).tolist() == [10, 6, 3]


def test_fewer_examples_than_there_are():
    """Ten learners of 100 examples each out of 50,000, of two classes each."""
    counts = describe(non_iid(CIFAR10, [100] * 10, 2, generator()), CIFAR10)
    assert counts.sum(axis=1).tolist() == [100] * 10
    assert (counts > 0).sum(axis=1).tolist() == [2] * 10


def test_a_hundred_learners_with_a_hundred_classes():
    """Larger federations work alike."""
    parts = non_iid(CIFAR100, skewed_sizes(50_000, 100), 20, generator())
    assert (describe(parts, CIFAR100) > 0).sum(axis=1).tolist() == [20] * 100


@pytest.mark.parametrize(
    ("sizes", "x", "message"),
    [
        (uniform_sizes(50_000, 10), 12, r"Non-IID\(12\) cannot be: each learner has 1 to 10 classes"),
        (uniform_sizes(50_000, 10), 0, r"Non-IID\(0\) cannot be"),
        (uniform_sizes(50_000, 7), 1, r"Non-IID\(1\) cannot be: each of the 7 learners .* 7142 .* have 5000"),
        (
            uniform_sizes(50_000, 7),
            2,
            "50000 examples in 10 classes among 7 learners x 2 .*14 slots, where 16",
        ),
        ([49_999, 1], 2, "learner 1 cannot hold 2 classes with only 1 examples"),
        ([25_000, 25_000], [5, 4], "learner 1 cannot hold 25000 examples of 4 classes: .* have 20000"),
        ([15_000] * 3 + [5000], [3, 3, 3, 11], "learner 3 cannot hold 11 classes"),
        ([25_000, 25_000], [5, 5, 5], "3 numbers of classes were given for 2 learners"),
        ([50_001], 10, "1 learners are to hold 50001 examples in all, but there are only 50000"),
    ],
)
def test_impossible_class_distributions_are_refused_with_the_numbers(sizes, x, message):
    """A partition that cannot exist is one sentence with the numbers that forbid it."""
    with pytest.raises(DataError, match=message):
        non_iid(CIFAR10, sizes, x, generator())


def test_too_few_places_for_all_classes():
    """Three learners of one class each cannot hold five classes between them."""
    labels = np.repeat(np.arange(5), [60, 50, 50, 1, 1])
    with pytest.raises(DataError, match="3 learners x 1 classes = 3 slots cannot hold all 5 classes"):
        non_iid(labels, [60, 52, 50], 1, generator())


def test_too_many_slots_for_the_examples():
    """A class of one example cannot be at two learners."""
    labels = np.array([0] * 10 + [1])
    with pytest.raises(DataError, match=r"2 learners x 2 classes = 4 slots .* 11 examples in 2 classes fill at most 3"):
        non_iid(labels, [6, 5], 2, generator())


def test_class_distributions_need_whole_labels():
    """A regression target has no classes; the message says what to use."""
    for divide in (lambda y: non_iid(y, [2], 1, generator()), lambda y: dirichlet(y, [2], 1.0, generator())):
        with pytest.raises(DataError, match="use iid or ranges of the target"):
            divide(np.array([0.5, 1.5]))


# --- Dirichlet ------------------------------------------------------------------------------------


def test_dirichlet_approaches_iid_for_a_large_alpha():
    """Every learner holds about a tenth of each class."""
    counts = describe(dirichlet(CIFAR10, uniform_sizes(50_000, 10), 1e6, generator()), CIFAR10)
    assert np.abs(counts - 500).max() < 25


def test_dirichlet_concentrates_for_a_small_alpha():
    """The smaller alpha, the larger the share of a learner's largest class."""
    sizes = skewed_sizes(50_000, 10)
    shares = [
        (describe(dirichlet(CIFAR10, sizes, alpha, generator()), CIFAR10).max(axis=1) / sizes).mean()
        for alpha in (0.01, 0.5, 100.0)
    ]
    assert shares[0] > shares[1] > shares[2]


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_dirichlet_needs_a_positive_alpha(alpha):
    """Zero, negative and endless alphas are refused."""
    with pytest.raises(DataError, match="positive alpha"):
        dirichlet(CIFAR10, [10], alpha, generator())


# --- ranges of a target ---------------------------------------------------------------------------


def test_target_ranges_do_not_overlap():
    """Sorted by their lowest age, each learner ends where the next begins."""
    ages = generator(3).uniform(45, 80, 8356)
    parts = assert_contract(target_ranges, ages, skewed_sizes(8356, 8))
    ranges = sorted((ages[part].min(), ages[part].max()) for part in parts)
    assert all(highest <= lowest for (_, highest), (lowest, _) in itertools.pairwise(ranges))


def test_target_ranges_in_a_given_order():
    """`order` names the learners from the lowest range to the highest."""
    targets = np.array([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    parts = target_ranges(targets, [1, 2, 3], generator(), order=[2, 0, 1])
    assert [sorted(targets[part]) for part in parts] == [[4.0], [5.0, 6.0], [1.0, 2.0, 3.0]]


def test_target_ranges_refuse_bad_input():
    """An order that is not a permutation, and targets that are not numbers."""
    with pytest.raises(DataError, match="each of 2 learners once"):
        target_ranges(np.arange(4.0), [2, 2], generator(), order=[0, 0])
    with pytest.raises(DataError, match="one finite number"):
        target_ranges(np.array([1.0, np.nan]), [1, 1], generator())


# --- real data ------------------------------------------------------------------------------------


def test_describe_counts_classes_by_learner():
    """One row a learner, one column a class, also for a class that nobody holds."""
    labels = np.array([0, 0, 2, 2, 2])
    assert describe([np.array([0, 2]), np.array([3])], labels).tolist() == [[1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize(("sizes_of", "x"), [(power_law_sizes, 3), (power_law_sizes, 5), (skewed_sizes, 5)])
def test_real_cifar10_divides_as_in_the_paper(data_folder, sizes_of, x):
    """The environments of Tables 2 and 3 on the real labels."""
    if not (data_folder / "cifar10.npz").is_file():
        pytest.skip("the folder that METIS_DATA names has no cifar10.npz")
    with np.load(data_folder / "cifar10.npz", allow_pickle=False) as stored:
        labels = stored["y_train"]
    parts = non_iid(labels, sizes_of(len(labels), 10), x, generator())
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(50_000))
    held = (describe(parts, labels) > 0).sum(axis=1).tolist()
    published = {3: [8, 4] + [3] * 8, 5: [8, 7, 6] + [5] * 7}
    assert held == (published[x] if sizes_of is power_law_sizes else [x] * 10)


@pytest.mark.parametrize("sizes_of", SIZE_FUNCTIONS)
@pytest.mark.parametrize("x", [2, 3, 5])
def test_the_bundled_digits_divide(sizes_of, x):
    """The demonstration's data: classes of unequal size, 1,437 examples."""
    labels = load_dataset("digits").y_train
    sizes = sizes_of(len(labels), 10)
    parts = assert_contract(lambda labels, sizes, rng: non_iid(labels, sizes, x, rng), labels, sizes)
    numbers = classes_per_learner(sizes, np.bincount(labels).tolist(), x)
    assert (describe(parts, labels) > 0).sum(axis=1).tolist() == numbers


# --- shards and classes by Dirichlet --------------------------------------------------------------


def test_shards_give_each_learner_few_classes_and_its_size():
    """Two shards of sorted labels each: every example once, the sizes as asked for, at most two classes a shard."""
    labels = np.repeat(np.arange(10), 50)
    sizes = [60, 50, 40, 350]
    parts = partition.shards(labels, sizes, 2, np.random.default_rng(3))
    assert [len(part) for part in parts] == sizes
    assert sorted(np.concatenate(parts).tolist()) == list(range(500))
    assert all(len(np.unique(labels[part])) <= 4 for part in parts[:3])


def test_classes_by_dirichlet_are_all_given_away():
    """Every example once, nobody without; a small alpha leaves learners with few of the classes."""
    labels = np.repeat(np.arange(10), 100)
    for alpha, fewest in ((0.1, 0), (1000.0, 10)):
        parts = partition.class_dirichlet(labels, 5, alpha, np.random.default_rng(3))
        assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
        assert min(len(part) for part in parts) >= 1
        assert min(len(np.unique(labels[part])) for part in parts) >= fewest
    assert {len(part) for part in parts} <= set(range(180, 221))


@pytest.mark.parametrize(
    ("divide", "message"),
    [
        (lambda labels, rng: partition.shards(labels, [2, 2], 3, rng), "with 2 examples cannot have 3 shards"),
        (lambda labels, rng: partition.shards(labels / 2, [2, 2], 1, rng), "one whole number or name as the label"),
        (lambda labels, rng: partition.class_dirichlet(labels, 5, 0.01, rng), "without examples a thousand times"),
        (lambda labels, rng: partition.class_dirichlet(labels, 2, 0, rng), "needs a positive alpha, not 0"),
        (lambda labels, rng: partition.natural(np.array(["a", None], object)), "some have none"),
    ],
)
def test_an_impossible_partition_is_one_sentence(divide, message):
    """With the numbers that do not fit."""
    with pytest.raises(DataError, match=message):
        divide(np.array([0, 0, 1, 1]), np.random.default_rng(0))


def test_a_column_of_a_table_names_the_silos():
    """A pandas column of texts, or numbers, is the division that the data came with."""
    pandas = pytest.importorskip("pandas")
    parts, names = partition.natural(pandas.Series(["b", "a", "b"]))
    assert names == ["b", "a"] and [part.tolist() for part in parts] == [[0, 2], [1]]
    assert partition.natural(pandas.Series([3, 1, 3]))[1] == ["3", "1"]


def test_labels_may_be_names_and_a_number_of_learners_divides_evenly() -> None:
    """As columns of tables have them; the parts are those of the names' numbers."""
    pandas = pytest.importorskip("pandas")
    names = np.random.default_rng(1).choice(["cat", "dog", "fox", "owl"], 100)
    numbers = np.unique(names, return_inverse=True)[1]
    column = pandas.Series(names)
    sizes = partition.uniform_sizes(100, 5)
    for divide in (
        partition.iid,
        lambda labels, sizes, rng: partition.dirichlet(labels, sizes, 0.3, rng),
        lambda labels, sizes, rng: partition.shards(labels, sizes, 2, rng),
        lambda labels, sizes, rng: partition.non_iid(labels, sizes, 2, rng),
    ):
        wanted = divide(numbers, sizes, np.random.default_rng(2))
        for labels in (names, names.tolist(), column, column.astype("category")):
            found = divide(labels, 5, 2)  # a seed does as well
            assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))
    with pytest.raises(DataError, match="some have none"):
        partition.shards(pandas.Series(["cat", None, "dog"]), 2, 1, np.random.default_rng(2))
