"""An exception of this package's own code is never told as SGLang's refusal of a model."""

import pytest
from sglang.srt.layers.quantization import get_quantization_config
from transformers import PretrainedConfig

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.whose_error import own_errors_reported
from sglang_uvm_offload.sizing.moe_shape import moe_shape

pytestmark = pytest.mark.sglang


def test_a_configuration_that_this_package_cannot_read_is_its_own_problem():
    with pytest.raises(FlagError) as raised, own_errors_reported("maker/model"):
        moe_shape(PretrainedConfig(num_experts=8, num_hidden_layers=2, moe_layer_freq=[]))
    (problem,) = raised.value.problems
    assert problem.startswith("sglang-uvm-offload cannot read the configuration of maker/model: IndexError in moe_shape.py:")
    assert "SGLang cannot serve" not in problem


def test_what_sglang_raises_stays_as_it_is():
    with pytest.raises(ValueError, match="no-such-method") as raised, own_errors_reported("maker/model"):
        get_quantization_config("no-such-method")
    assert not isinstance(raised.value, FlagError)


def test_refusals_of_flags_are_left_alone():
    with pytest.raises(FlagError, match="as it was"), own_errors_reported("maker/model"):
        raise FlagError(["as it was"])
