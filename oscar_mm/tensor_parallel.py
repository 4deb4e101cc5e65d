"""TPGroup: processes that share the heads of a model (tensor parallelism)."""

from __future__ import annotations

import glob
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, overload

import torch
from torch import distributed, nn

from oscar_mm.errors import InputError
from oscar_mm.policy import KVPolicy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, which is split or replicated across ranks."""
    # The class is not imported to check this: the import is slow, and a single rank needs no
    # DTensor.
    return type(tensor) is not nn.Parameter and hasattr(tensor, "to_local")


@overload
def local_shard(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def local_shard(tensor: None) -> None: ...
def local_shard(tensor: Any) -> torch.Tensor | None:
    """Return this rank's part of a DTensor; return any other tensor, or None, unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@dataclass(frozen=True)
class TPGroup:
    """A tensor-parallel group: the number of ranks, and the rank of this process.

    Each rank stores the keys and values of its own heads. All ranks get the same requests, in the
    same order.

    Attributes:
        count: number of ranks; 1 if the model is not divided.
        rank: index of this rank, from 0.
        group: process group of ``torch.distributed``; None if there is only one process.
    """

    count: int = 1
    rank: int = 0
    group: Any = None

    @classmethod
    def of(cls, model: nn.Module) -> TPGroup:
        """Return the group of ranks that transformers has split a model across."""
        if not (distributed.is_available() and distributed.is_initialized()):
            return cls()
        for weight in model.parameters():
            if is_dtensor(weight):
                mesh = weight.device_mesh
                return cls(mesh.size(), mesh.get_local_rank(), mesh.get_group())
        return cls()

    def check(self, policy: KVPolicy) -> None:
        """Reject a policy that needs keys of heads on other ranks.

        Raises:
            InputError: if the policy uses one norm per token over the keys of all heads.
        """
        if self.count > 1 and policy.token_scaling == "shared":
            raise InputError(
                "policy: token_scaling='shared' uses one norm over all heads, but the heads are "
                f"split over {self.count} ranks; use policy 'channel', or the same policy with "
                "token_scaling='per_head'"
            )

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's tensor to the tensor of each rank."""
        if self.count > 1:
            distributed.broadcast(tensor, group=self.group, group_src=0)

    def all_min(self, number: int, device: torch.device) -> int:
        """Return the smallest number on any rank; a single rank does not wait for the device."""
        if self.count == 1:
            return number
        tensor = torch.tensor(number, device=device)
        distributed.all_reduce(tensor, distributed.ReduceOp.MIN, group=self.group)
        return int(tensor)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace each rank's tensor with the sum over all ranks, which is bitwise identical on
        all of them."""
        if self.count > 1:
            distributed.all_reduce(tensor, group=self.group)

    def all(self, holds: bool, device: torch.device) -> bool:
        """Return whether ``holds`` is True on every rank; the ranks exchange a tensor on
        ``device``."""
        return bool(self.all_min(int(holds), device))

    def path(self, path: str | Path) -> Path:
        """Return the path of this rank's file: ``chat.0-of-2.safetensors`` for
        ``chat.safetensors``."""
        path = Path(path)
        if self.count == 1:
            return path
        return path.with_name(f"{path.stem}.{self.rank}-of-{self.count}{path.suffix}")

    def saved_path(self, path: str | Path) -> Path:
        """Return the path of this rank's file, to read it.

        Raises:
            InputError: if it is missing, and another number of ranks has saved files by that name.
        """
        own, whole = self.path(path), Path(path)
        if own.exists():
            return own
        counts = {1} if whole.exists() else set[int]()
        named = f"{glob.escape(whole.stem)}.0-of-*{glob.escape(whole.suffix)}"
        for file in whole.parent.glob(named):
            count = file.name.removesuffix(whole.suffix).rpartition("-of-")[2]
            counts |= {int(count)} if count.isdecimal() else set()
        if counts:
            saved = " or ".join(map(str, sorted(counts)))
            processes = "process" if saved == "1" else "processes"
            raise InputError(
                f"{path}: was saved by {saved} {processes} and cannot be read by {self.count}: "
                f"start {saved}"
            )
        return own

    def __str__(self) -> str:
        """Return text such as "rank 0 of 2"."""
        return f"rank {self.rank} of {self.count}"
