"""Where initial values come from: a checkpoint, safetensors files, a function, or rank 0.

Every source fills tensors in place: whole ones, or a rank's part of DTensors.
"""

from __future__ import annotations

import inspect
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from autopar.capture.module_state import named_tensors, torch_generators_restored
from autopar.errors import InputError
from autopar.runtime.checkpoints.choice import choose
from autopar.runtime.checkpoints.contents import MODEL
from autopar.runtime.checkpoints.participants import Participants
from autopar.runtime.checkpoints.reading import alone_warning_off, metadata_of, read

Targets = Mapping[str, torch.Tensor]  # by original name
InitFunction = Callable[[str, torch.Tensor], object]


class Source(Protocol):
    """Of the values of some tensors."""

    def shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        """Of the whole tensors that it has, by name; None: it makes any."""

    def fill(self, targets: Targets) -> None:
        """Write values into this rank's tensors. All ranks fill at the same time."""


@dataclass(frozen=True)
class CheckpointSource:
    """A directory of `autopar.save`."""

    folder: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {
            key.removeprefix(MODEL): tuple(entry.size)
            for key, entry in metadata_of(self.folder).state_dict_metadata.items()
            if key.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def fill(self, targets: Targets) -> None:
        read(self.folder, {MODEL + name: tensor for name, tensor in targets.items()})


@dataclass(frozen=True)
class SafetensorsSource:
    """A file, or all of a directory's. A rank reads its slices."""

    path: Path

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        with self._reader() as reader:
            found = reader.read_metadata().state_dict_metadata
        return {name: tuple(entry.size) for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}

    def fill(self, targets: Targets) -> None:
        alone_warning_off()
        with self._reader() as reader:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            dcp.load(dict(targets), storage_reader=reader, planner=planner, no_dist=True)

    @contextmanager
    def _reader(self) -> Iterator[FileSystemReader]:
        try:
            import safetensors.torch  # noqa: F401
        except ImportError:
            raise InputError(
                'weights in safetensors files need safetensors: pip install "autopar[safetensors]"'
            ) from None
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        if self.path.is_dir():
            yield HuggingFaceStorageReader(str(self.path))
            return
        with tempfile.TemporaryDirectory() as folder:  # torch's reader takes all files of a directory
            (Path(folder) / self.path.name).symlink_to(self.path)
            yield HuggingFaceStorageReader(folder)


@dataclass(frozen=True)
class FunctionSource:
    """`make(name, tensor)` writes a whole tensor, one at a time; the rank keeps its part.

    Random numbers are seeded by the tensor's name, so that all ranks and all plans get the same values.
    """

    make: InitFunction
    seed: int

    def __post_init__(self) -> None:
        """Raises InputError for a function that does not take these arguments."""
        try:
            signature = inspect.signature(self.make)
        except (TypeError, ValueError):  # of a builtin, or no function
            return
        try:
            signature.bind("", torch.empty(0))
        except TypeError as error:
            raise InputError(
                f"init_fn must take (name, tensor) and write the values of that tensor, got {signature}: {error}"
            ) from None

    def shapes(self) -> None:
        return None

    def fill(self, targets: Targets) -> None:
        for name, target in targets.items():
            whole = torch.empty(target.shape, dtype=target.dtype)  # on the CPU: GPUs draw other numbers
            with torch_generators_restored(), torch.no_grad():
                torch.manual_seed((self.seed + zlib.crc32(name.encode())) % 2**63)
                self.make(name, whole)
            _write(whole, target)


def _write(whole: torch.Tensor, target: torch.Tensor) -> None:
    """This rank's part of a whole tensor, without a collective."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            cut: Any = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(cut.to_local())
        else:
            target.copy_(whole)


class _Part(NamedTuple):
    """What a rank has of a tensor."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))]


class FirstRankSource:
    """Rank 0, which has the whole model, sends each rank its parts, one after another."""

    def __init__(self, team: Participants, model: torch.nn.Module, names: Sequence[str]) -> None:
        """`names`: what some rank lacks."""
        self._team = team
        tensors = named_tensors(model)
        # The tensors' memory: the parameters that have it become hollow when they are placed.
        self._whole = {name: tensors[name].detach() for name in names} if team.rank == 0 else {}
        self._shapes = {name: tuple(tensors[name].shape) for name in names}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def fill(self, targets: Targets) -> None:
        """Collective. Rank 0 lets go of the whole tensors at the end.

        What fails on one rank ends the sending: before each part, both ends say whether they go on.
        """
        wanted = self._team.each(
            "the parts cannot be described", lambda: [_part(name, tensor) for name, tensor in targets.items()]
        )
        own = wanted[self._team.rank]
        if self._team.rank:
            self._receive(targets, own)
            return
        failure: Exception | None = None
        try:
            for part in own:
                _local(targets[part.name]).copy_(part.of(self._whole[part.name]))
        except Exception as error:
            failure = error
        for rank, of_rank in enumerate(wanted[1:], start=1):
            failure = self._send(rank, of_rank, failure)
        self._whole.clear()
        if failure is not None:
            raise failure

    def _send(self, rank: int, parts: Sequence[_Part], failure: Exception | None) -> Exception | None:
        """To a rank, unless rank 0 has failed, until one of both does. Returns why rank 0 failed."""
        for part in parts:
            if 0 in part.sizes:
                continue
            piece = torch.empty(0)
            if failure is None:
                try:
                    (piece,) = _bytes(part.of(self._whole[part.name]))
                except Exception as error:
                    failure = error
            if not self._both_go_on(rank, failure is None):
                break
            dist.send(piece, rank, group=self._team.group)
        return failure

    def _receive(self, targets: Targets, parts: Sequence[_Part]) -> None:
        failure: Exception | None = None
        for part in parts:
            if 0 in part.sizes:
                continue
            piece = torch.empty(0)
            if failure is None:
                try:
                    received = torch.empty(part.sizes, dtype=targets[part.name].dtype)
                    (piece,) = _bytes(received)
                except Exception as error:
                    failure = error
            if not self._both_go_on(0, failure is None):
                raise failure or RuntimeError("rank 0 could not send its values")
            dist.recv(piece, 0, group=self._team.group)
            try:
                _local(targets[part.name]).copy_(received)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _both_go_on(self, rank: int, this: bool) -> bool:
        """Whether this rank and another one are ready for the next part."""
        own, theirs = torch.tensor([this]), torch.tensor([False])
        pending = dist.isend(own.view(torch.uint8), rank, group=self._team.group)
        dist.recv(theirs.view(torch.uint8), rank, group=self._team.group)
        assert pending is not None, "this rank is a member of the group"
        pending.wait()
        return this and bool(theirs)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _bytes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """A tensor as its bytes on the CPU, which gloo sends whatever the dtype; nothing for an empty one."""
    return [tensor.cpu().contiguous().reshape(-1).view(torch.uint8)] if tensor.numel() else []


def _part(name: str, tensor: torch.Tensor) -> _Part:
    """Where a rank's part lies in the whole tensor, as torch.distributed.checkpoint would save it."""
    if not isinstance(tensor, DTensor):
        return _Part(name, (0,) * tensor.dim(), tuple(tensor.shape))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({name: tensor})
    (item,) = planner.create_local_plan().items
    assert item.tensor_data is not None
    chunk = item.tensor_data.chunk
    return _Part(name, tuple(chunk.offsets), tuple(chunk.sizes))


def source_at(team: Participants, path: str | os.PathLike[str]) -> Source:
    """A file of safetensors, a directory of them, or one of checkpoints.

    Raises InputError for a path that is none of them, CheckpointError where no checkpoint can be used.
    """
    place = Path(path).absolute()
    if place.suffix == ".safetensors":
        if not place.is_file():
            raise InputError(f"weights={str(path)!r}: there is no file {place}")
        return SafetensorsSource(place)
    if not place.is_dir():
        raise InputError(
            f"weights={str(path)!r}: there is no directory {place}; give a directory of autopar.save, a file that ends "
            "in .safetensors, or a directory of such files"
        )
    if any(place.glob("*.safetensors")):
        return SafetensorsSource(place)
    folder = choose(team, place, None, required=True)
    assert folder is not None
    return CheckpointSource(folder)
