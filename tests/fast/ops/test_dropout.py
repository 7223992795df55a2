"""Dropout by one kernel: the same elements fall away as in the plain model, in both directions."""

import pytest
import torch

from some_moe.model.dropout import Dropout
from some_moe.model.tokens import TokenInfo

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 7, 24), (3, 130, 384), (1, 1, 1025)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_the_same_elements_fall_away(share: float, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from some_moe.fast.ops.dropout import dropout

    plain = Dropout(share, 5).cuda()
    rows = torch.tensor([4, 1, 2**31 + 9][: shape[0]], device="cuda")
    info = TokenInfo.of(shape[:2], rows.device, seed=3, step=11, rows=rows)
    x = torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    grad = torch.randn_like(x)
    wanted, found = plain(x, info), dropout(again, info.rows, info.salt, plain.words, share)
    wanted.backward(grad)
    found.backward(grad)
    assert torch.equal(wanted == 0, found == 0)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]  # the scale may differ in its last digit
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=0.0)
    torch.testing.assert_close(again.grad, x.grad, rtol=tolerance, atol=0.0)


def test_strided_inputs_are_read_as_they_are_meant() -> None:
    from some_moe.fast.ops.dropout import dropout

    plain = Dropout(0.3, 2).cuda()
    x = torch.randn(24, 9, 3, device="cuda").permute(2, 1, 0)
    info = TokenInfo.of(x.shape[:2], x.device, step=1)
    torch.testing.assert_close(dropout(x, info.rows, info.salt, plain.words, 0.3), plain(x.requires_grad_(), info))
