"""Allocation under the mode: the right tensors come from managed memory, with the values PyTorch would give them."""

import dataclasses

import pytest
import torch

from sglang_uvm_offload.experts.takeover import AllocationMode, WatchWrites, expert_storages

E = 4


class Pool:
    """Memory that remembers what it gave."""

    def __init__(self):
        self.given = {}

    def __call__(self, expert_bytes, device, description):
        flat = torch.full((E * expert_bytes,), 0xAB, dtype=torch.uint8)
        self.given[flat.data_ptr()] = description
        return flat

    def holds(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.given


@pytest.fixture
def pool():
    return Pool()


SOURCE = torch.arange(8.0).view(4, 2)
MAKERS = {
    "zeros": lambda: torch.zeros(E, 3, dtype=torch.int32),
    "ones": lambda: torch.ones(E, 3),
    "full": lambda: torch.full((E, 3), 2.5, dtype=torch.bfloat16),
    "full of ints": lambda: torch.full((E, 3), 7),
    "zeros_like": lambda: torch.zeros_like(SOURCE),
    "ones_like": lambda: torch.ones_like(SOURCE, dtype=torch.int8),
    "full_like": lambda: torch.full_like(SOURCE, 3),
    "new_zeros": lambda: SOURCE.new_zeros(E, 5),
    "new_ones": lambda: SOURCE.new_ones((E, 5)),
    "new_full": lambda: SOURCE.new_full((E, 5), 9.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_allocations_keep_their_values_dtypes_and_shapes(name, pool):
    expected = MAKERS[name]()
    with AllocationMode(E, pool):
        made = MAKERS[name]()
    assert pool.holds(made)
    assert (made.dtype, made.shape, made.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(E, 3, dtype=torch.float8_e4m3fn),
        lambda: torch.empty(E, 3, 2, dtype=torch.int32),
        lambda: torch.empty_like(SOURCE),
        lambda: SOURCE.new_empty(E, 2),
        lambda: torch.empty_strided((E, 2), (2, 1)),
        lambda: torch.rand(E, 2),
        lambda: torch.randn(E, 2),
    ],
)
def test_uninitialised_and_random_tensors_are_taken_over(make, pool):
    with AllocationMode(E, pool):
        assert pool.holds(make())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(E + 1, 3),
        lambda: torch.empty(0, 3),
        lambda: torch.tensor(1.0),
        lambda: torch.empty(E, 3, device="meta"),
        lambda: torch.empty_strided((E, 2), (1, E)),
    ],
)
def test_other_tensors_are_left_alone(make, pool):
    with AllocationMode(E, pool):
        make()
    assert not pool.given


def moved(pool, *holders):
    """Moves what has a run of bytes for each expert, and nothing else. Returns the expert tensors."""
    for found in expert_storages(holders, E):
        nbytes = found.expert_bytes(E)
        if nbytes is not None:
            found.move(pool(nbytes, found.device, "moved"))
    return [held.tensor for found in expert_storages(holders, E) for held in found.held]


def test_a_storage_moves_with_the_names_values_strides_and_aliases_of_its_tensors(pool):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.arange(24.0).view(E, 3, 2), requires_grad=False)
    module.transposed = module.weight.data.permute(2, 1, 0)
    module.register_buffer("scale", torch.ones(E, 3))
    module.other = torch.ones(E + 1)
    parameter = module.weight
    before = [held.tensor.clone() for found in expert_storages([module], E) for held in found.held]
    after = moved(pool, module)
    assert module.weight is parameter
    assert len(after) == len(before) == 3
    assert {id(tensor) for tensor in after} >= {id(module.scale), id(module.transposed)}
    assert all(pool.holds(now) and torch.equal(now, tensor) for now, tensor in zip(after, before, strict=True))
    assert len(pool.given) == 2
    assert module.transposed.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
    module.weight.data[2, 1, 0] = -1
    assert module.transposed[0, 1, 2] == -1


def test_a_storage_may_move_without_its_bytes(pool):
    module = torch.nn.Module()
    module.weight = torch.ones(E, 3)
    (found,) = expert_storages([module], E)
    found.move(pool(12, found.device, "moved"), copy=False)
    assert pool.holds(module.weight)
    assert (module.weight.view(torch.uint8) == 0xAB).all()


@dataclasses.dataclass
class Storage:
    data: torch.Tensor
    owner: object = None


@dataclasses.dataclass(frozen=True)
class KernelWeights:
    storage: Storage
    scale: torch.Tensor
    experts: int = E


class Method:
    """What computes for a module."""


def test_what_a_method_keeps_inside_dataclasses_is_moved_too(pool):
    method, weights = Method(), torch.arange(24.0).view(E, 3, 2)
    method.weights = KernelWeights(Storage(weights), scale=torch.ones(E, 3))
    method.weights.storage.owner = method.weights
    assert [tensor.shape for tensor in moved(pool, torch.nn.Module(), method)] == [(E, 3, 2), (E, 3)]
    assert pool.holds(method.weights.storage.data)
    assert pool.holds(method.weights.scale)
    assert torch.equal(method.weights.storage.data, weights)
    assert [str(found.held[0]) for found in expert_storages([method], E)] == [
        "weights.storage.data (float32[4, 3, 2])",
        "weights.scale (float32[4, 3])",
    ]


WITHOUT_RUNS = {
    "experts interleave": lambda: [torch.arange(12.0).view(3, E).t()],
    "one value for all": lambda: [torch.ones(1).expand(E)],
    "more rows than experts": lambda: [torch.ones(E + 1, 3)[:E]],
    "behind something else": lambda: [torch.ones(E + 1, 3)[1:]],
    "shares its storage with one that interleaves": lambda: [(w := torch.arange(32.0).view(E, 8))[:, :4], w.view(-1)[:E]],
}


@pytest.mark.parametrize("what", WITHOUT_RUNS)
def test_a_storage_without_a_run_of_bytes_for_each_expert_is_told_apart(what):
    module = torch.nn.Module()
    for index, tensor in enumerate(WITHOUT_RUNS[what]()):
        setattr(module, f"tensor{index}", tensor)
    (found,) = expert_storages([module], E)
    assert found.expert_bytes(E) is None


WRITES = {
    "in place": lambda tensor: tensor.fill_(1),
    "an item": lambda tensor: tensor.__setitem__((2, 0), 1.0),
    "a slice": lambda tensor: tensor[1:3].copy_(torch.ones(2, 3)),
    "data": lambda tensor: tensor.data.add_(1),
    "a view of another type": lambda tensor: tensor.view(torch.uint8)[0].zero_(),
    "a transposed view": lambda tensor: tensor.t()[0].mul_(2),
    "out": lambda tensor: torch.add(torch.ones(E, 3), 1, out=tensor),
    "one of several": lambda tensor: torch._foreach_add_([torch.ones(1), tensor], 1),
    "by index": lambda tensor: tensor.index_copy_(0, torch.tensor([1]), torch.ones(1, 3)),
    "where": lambda tensor: tensor.masked_fill_(torch.ones(E, 3) > 0, 3),
    "random": lambda tensor: torch.nn.init.normal_(tensor),
}
READS = {
    "a sum": lambda tensor: tensor.sum(),
    "a copy of it": lambda tensor: torch.ones(E, 3).copy_(tensor),
    "a view": lambda tensor: tensor.view(-1)[2:],
    "an operand": lambda tensor: torch.ones(E, 3).add_(tensor),
}


@pytest.mark.parametrize("what", [*WRITES, *READS])
def test_writes_are_watched_and_reads_are_not(what):
    tensor, seen = torch.zeros(E, 3), []
    with torch.no_grad(), WatchWrites(lambda storage: seen.append(storage.data_ptr())):
        (WRITES | READS)[what](tensor)
    assert (tensor.data_ptr() in seen) == (what in WRITES)


def test_writes_are_watched_below_an_allocation_mode(pool):
    seen = []
    with WatchWrites(lambda storage: seen.append(storage.data_ptr())), AllocationMode(E, pool):
        made, empty = torch.ones(E, 3), torch.empty(E, 3)
        assert seen == [made.data_ptr()]
        empty[1] = 2
    assert seen[-1] == empty.data_ptr()
