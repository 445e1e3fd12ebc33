"""Which device a rank has, what it is called in plans, and over what its tensors travel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from autopar import InputError
from autopar.runtime.ranks.messages.channels import HostChannel
from autopar.runtime.ranks.places import Place
from autopar.runtime.ranks.rank_device import check_devices, gpu_names, own_device, sends_over_nccl
from autopar.runtime.ranks.signatures import _without_numbers

CPU = torch.device("cpu")


def place(machine: str, gpu: str = "") -> Place:
    return Place(machine, "", frozenset({0}), "made up", gpu, gpu and f"cuda:{gpu} (made up)", f"host-{machine}")


@pytest.mark.parametrize(
    ("there", "chosen", "environment", "expected"),
    [
        (0, 0, {"LOCAL_RANK": "1"}, CPU),
        (1, 0, {"LOCAL_RANK": "3"}, torch.device("cuda", 0)),  # each rank sees its own alone
        (4, 0, {"LOCAL_RANK": "3"}, torch.device("cuda", 3)),
        (4, 2, {"LOCAL_RANK": "3"}, torch.device("cuda", 2)),  # the script's torch.cuda.set_device
        (2, 0, {"LOCAL_RANK": "3"}, torch.device("cuda", 1)),
        (2, 0, {}, torch.device("cuda", 0)),
    ],
)
def test_a_rank_has_the_gpu_of_its_script_else_that_of_its_local_rank(
    there: int, chosen: int, environment: dict[str, str], expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    assert own_device(environment) == expected


def test_gpus_of_all_machines_have_names_of_their_own_and_sharing_shows() -> None:
    places = [place("a", "x"), place("a", "y"), place("b", "x"), place("a", "y")]
    assert gpu_names(places) == ["cuda:0", "cuda:1", "cuda:2", "cuda:1#1"]


def test_ranks_on_gpus_of_the_same_name_on_other_machines_share_nothing() -> None:
    check_devices([place("a", "x"), place("b", "x")], over_nccl=True)
    check_devices([place("a", "x"), place("a", "x")], over_nccl=False)
    with pytest.raises(InputError, match=r"ranks 1, 2 share cuda:y \(made up\) of host host-a"):
        check_devices([place("a", "x"), place("a", "y"), place("a", "y")], over_nccl=True)


@pytest.mark.parametrize("over_nccl", [True, False])
def test_ranks_of_mixed_kinds_are_refused(over_nccl: bool) -> None:
    with pytest.raises(InputError, match=r"rank 0, 2 has a GPU .*, and rank 1 on host host-b has none"):
        check_devices([place("a", "x"), place("b"), place("a", "y")], over_nccl=over_nccl)


def test_the_default_group_says_what_carries_tensors_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 1)
    for backends, expected in {
        "cpu:gloo,cuda:nccl": True,
        "cuda:nccl": True,
        "cpu:gloo,cuda:gloo,xpu:gloo": False,
    }.items():
        monkeypatch.setattr(dist, "get_backend_config", lambda group=None, text=backends: text)
        assert sends_over_nccl(gpu) is expected
        assert not sends_over_nccl(CPU)


def test_programs_of_models_on_each_ranks_own_gpu_have_one_text() -> None:
    one, other = (
        f"arange(4, device = cuda:{i}); zeros(1, device = device(type='cuda', index={i})); x.view(1{i})" for i in (0, 3)
    )
    assert _without_numbers(one) != one
    assert _without_numbers(one).replace("10", "") == _without_numbers(other).replace("13", "")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_torch_names_the_backends_of_a_group_by_type_of_device() -> None:
    """`sends_over_nccl` reads this text."""
    found = dict(one.split(":") for one in dist.get_backend_config().split(","))
    assert found["cpu"] == "gloo"
    assert found["cuda"] == "gloo"


def test_tensors_through_the_host_are_copied_when_they_have_arrived() -> None:
    class Posted:
        """The channel below: it fills a receive when that is waited for."""

        def send(self, tensor: torch.Tensor, target: int, tag: int) -> Posted:
            self.tensor = tensor
            return self

        receive = send

        def wait(self) -> None:
            self.tensor.fill_(7.0)

    channel, into = Posted(), torch.zeros(3)
    pending = HostChannel(channel).receive(into, 1, 0)
    assert channel.tensor.data_ptr() != into.data_ptr()
    assert into.tolist() == [0.0] * 3
    pending.wait()
    assert into.tolist() == [7.0] * 3
