"""Allocation under the mode: the right tensors come from managed memory, with the values PyTorch would give them."""

import dataclasses

import pytest
import torch

from sglang_uvm_offload.experts.takeover import AllocationMode, expert_tensors, move_into_managed

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


def test_what_a_repack_leaves_outside_is_moved_with_names_values_strides_and_aliases(pool):
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.arange(24.0).view(E, 3, 2), requires_grad=False)
    module.transposed = module.weight.data.transpose(1, 2)
    module.register_buffer("scale", torch.ones(E, 3))
    module.other = torch.ones(E + 1)
    parameter = module.weight
    before = [held.tensor.clone() for held in expert_tensors([module], E)]
    move_into_managed([module], E, pool.holds, pool)
    after = [held.tensor for held in expert_tensors([module], E)]
    assert module.weight is parameter
    assert {id(tensor) for tensor in after[1:]} == {id(module.scale), id(module.transposed)}
    assert all(pool.holds(moved) and torch.equal(moved, tensor) for moved, tensor in zip(after, before, strict=True))
    assert module.transposed.untyped_storage().data_ptr() == module.weight.untyped_storage().data_ptr()
    module.weight.data[2, 1, 0] = -1
    assert module.transposed[2, 0, 1] == -1


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
    move_into_managed([torch.nn.Module(), method], E, pool.holds, pool)
    assert pool.holds(method.weights.storage.data)
    assert pool.holds(method.weights.scale)
    assert torch.equal(method.weights.storage.data, weights)
    assert [held.tensor.shape for held in expert_tensors([method], E)] == [(E, 3, 2), (E, 3)]


def test_experts_that_interleave_stay_where_they_are(pool):
    module = torch.nn.Module()
    module.weight = torch.arange(12.0).view(3, E).t()
    address = module.weight.data_ptr()
    move_into_managed([module], E, pool.holds, pool)
    assert module.weight.data_ptr() == address
    assert not pool.given


def test_a_tensor_that_shares_storage_with_one_that_interleaves_stays(pool):
    module = torch.nn.Module()
    whole = torch.arange(32.0).view(E, 8)
    module.weight = whole[:, :4]
    module.flat_part = whole.view(-1)[:E]
    move_into_managed([module], E, pool.holds, pool)
    assert not pool.given
