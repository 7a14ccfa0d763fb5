"""The stand-in for CUDA computes what the CPU computes, and refuses what CUDA refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fake_cuda import Device, FakeCuda, fake_cuda

X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture
def cuda() -> Iterator[Device]:
    with fake_cuda() as device:
        yield device


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1, 2], device="cuda:0"),
        lambda: torch.arange(3, device=torch.device("cuda")),
        lambda: X.to("cuda"),
        lambda: X.cuda(),
        lambda: X.to(torch.device("cuda", 0), torch.float64),
        lambda: X.to(device="cuda", dtype=torch.float64),
        lambda: X.to(X.cuda()),
        lambda: torch.zeros_like(X.cuda()),
        lambda: X.cuda().new_zeros(3),
        lambda: X.cuda().sum(),
        lambda: X.cuda()[0],
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_what_is_made_there_is_there(cuda: Device, make: Callable[[], Tensor], inference: bool) -> None:
    with torch.inference_mode(inference):
        tensor = make()
    assert isinstance(tensor, FakeCuda)
    assert tensor.device == torch.device("cuda", 0) and tensor.is_cuda


@pytest.mark.parametrize(
    "mixed",
    [
        lambda x: x + X,
        lambda x: X * x,
        lambda x: x.sum() + X,
        lambda x: torch.cat([x, X]),
        lambda x: torch.stack([x[0, 0], X[0, 0]]),
        lambda x: X[torch.tensor([0], device="cuda")],
        lambda x: x @ X.T,
        lambda x: torch.where(x > 1, X, x),
        lambda x: x.gather(1, torch.tensor([[0], [1]])),
        lambda x: x.add_(X),
        lambda x: x.masked_fill(X > 1, 0.0),
        lambda x: torch.add(x, x, out=torch.zeros(2, 3)),
        lambda x: nn.functional.embedding(torch.tensor([0]), x),
        lambda x: torch.multinomial(x, 1, generator=torch.Generator()),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_mixed_devices_raise(cuda: Device, mixed: Callable[[Tensor], Tensor], inference: bool) -> None:
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match="device"):
        mixed(X.cuda())


def test_no_numpy_of_it(cuda: Device) -> None:
    with pytest.raises(TypeError, match="cuda"):
        X.cuda().numpy()
    assert (X.cuda().cpu().numpy() == X.numpy()).all()


@pytest.mark.parametrize("inference", [False, True])
def test_it_computes_what_the_cpu_computes(cuda: Device, inference: bool) -> None:
    with torch.inference_mode(inference):
        x = X.cuda()
        assert (x * 2 + torch.tensor(1.0)).tolist() == (X * 2 + 1).tolist()  # a CPU scalar may be mixed in
        assert x[torch.tensor([1, 0])].tolist() == X[[1, 0]].tolist()  # and CPU indices
        assert x.T.argmax(0).tolist() == [2, 2] and float(x.max()) == 5.0 and bool((x > -1).all())
        x[0, 1:].add_(10.0)  # a view, in place
        x[1] = X[0].cuda()
        x.index_put_((torch.tensor([1]), torch.tensor([2])), torch.tensor([9.0], device="cuda"))
        assert x.cpu().tolist() == [[0.0, 11.0, 12.0], [0.0, 1.0, 9.0]]
        out = torch.empty(2, 3, device="cuda")
        assert torch.mul(x, 2.0, out=out) is out and out.tolist() == (x.cpu() * 2).tolist()
        assert x.mul_(1.0) is x


def test_copies_share_no_memory(cuda: Device) -> None:
    x = X.cuda()
    for inference in (False, True):
        with torch.inference_mode(inference):
            back = x.cpu()
            assert not isinstance(back, FakeCuda)
            back += 1.0
            x.to("cpu").zero_()
            torch.zeros(2, 3).copy_(x).zero_()
    assert x.tolist() == X.tolist()
    assert x.to("cuda") is x


def test_a_module_moves(cuda: Device) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    moved = copy.deepcopy(net).to("cuda")
    assert all(isinstance(w, nn.Parameter) and w.is_cuda for w in moved.parameters())
    assert moved(X.cuda()).tolist() == net(X).tolist() == copy.deepcopy(moved)(X.cuda()).tolist()
    with pytest.raises(RuntimeError, match="device"):
        moved(X)


def test_synchronisations_are_counted(cuda: Device) -> None:
    torch.cuda.synchronize()
    torch.cuda.synchronize(torch.device("cuda", 0))
    assert cuda.synchronised == 2


def test_nothing_is_left_behind() -> None:
    before = torch.cuda.is_available()
    with fake_cuda():
        assert torch.cuda.is_available()
    assert torch.cuda.is_available() == before
    assert not isinstance(X + X, FakeCuda)
