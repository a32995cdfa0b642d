"""NaN and infinite numbers where weights enter."""

import math

import micro
import pytest
import torch

from ssd_train.backbones.janus import Janus
from ssd_train.finite import require_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_is_named(dtype, value):
    tensors = {"good": torch.zeros(3, dtype=dtype), "bad": torch.zeros(2, 2, dtype=dtype), "ids": torch.tensor([1])}
    require_finite(tensors, "get it again")
    tensors["bad"][1, 0] = value
    with pytest.raises(ValueError, match=r"^NaN or infinite numbers in bad: get it again$"):
        require_finite(tensors, "get it again")


def test_many_are_counted_and_some_hold_nothing():
    nan = torch.tensor([math.nan])
    require_finite({"empty": torch.empty(0), "meta": torch.empty(2, device="meta")}, "")
    with pytest.raises(KeyError, match="in a, b, c and 2 more tensors"):
        require_finite(dict.fromkeys("abcde", nan), "", KeyError)


@pytest.mark.parametrize("name", ["model.language_model.norm.weight", "model.vqmodel.decoder.conv_in.weight"])
def test_a_backbone_with_broken_weights_is_refused_by_the_tensors_name(name):
    model = micro.janus_model()
    with torch.no_grad():
        model.get_parameter(name)[0] = math.nan
    with pytest.raises(ValueError, match=rf"numbers in {name}: the weights of micro are damaged"):
        Janus(model, None, micro.generation_config(), name="micro", grid=(2, 3))
