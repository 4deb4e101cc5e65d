"""Self-check: enable a kernel only after its output matches the PyTorch reference.

When a specialization of an operation is first used on a device, its kernel is run on a small
problem and the result is compared. The verdict is stored next to the compiled code, under the hash
of source, options, architecture, device and driver, so later processes do not check again. A kernel
that disagrees, now or in an earlier process, is not used, and this is logged.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch

from oscar_mm.kernels.compile import KernelError, cache_folder, key_of, load_file, store_file
from oscar_mm.kernels.launch import (
    SWITCH,
    Kernel,
    architecture,
    kernels_disabled,
    load_kernel,
    warn_once,
)

_log = logging.getLogger(__name__)


class Compiled(Protocol):
    """Any object to check, with a key that identifies its code, as in ``Kernel.key``."""

    @property
    def key(self) -> str:
        """Value that changes whenever the code changes."""
        ...


@dataclass(frozen=True)
class Verdict:
    """A kernel's disagreement with PyTorch operations, and its bound."""

    disagreement: float
    bound: float

    @property
    def agrees(self) -> bool:
        """Whether the disagreement is within the bound; False for NaN."""
        return self.disagreement <= self.bound


S = TypeVar("S", bound=Hashable)
K = TypeVar("K", bound=Compiled)


class CheckedKernels(Generic[S, K]):
    """The kernels of one operation, by specialization and device: compiled, checked and cached."""

    def __init__(
        self,
        operation: str,
        make: Callable[[S, torch.device], K],
        disagreement: Callable[[S, K, torch.device], float],
        bound: float,
    ) -> None:
        """
        Args:
            operation: name of the operation, for messages and file names.
            make: function that compiles the kernel for a specialization; raises KernelError if
                there is none.
            disagreement: function that runs the kernel and PyTorch operations on a small problem,
                and returns the difference, or 0 if there is none. It must not depend on the user's
                data, since the verdict is stored.
            bound: maximum disagreement of a correct kernel.
        """
        self.operation, self.bound = operation, bound
        self._make, self._disagreement = make, disagreement
        self._chosen: dict[tuple[S, torch.device, str | None], K | None] = {}
        self._choosing = threading.RLock()

    def kernel(self, specialization: S, device: torch.device) -> K | None:
        """Return the kernel to use, or None to use PyTorch operations; log the reason once.

        Raises:
            RuntimeError: if the first use is during a CUDA graph capture, in which nothing can be
                compiled or compared; run the step once beforehand.
        """
        key = (specialization, device, os.environ.get(SWITCH))
        try:
            return self._chosen[key]
        except KeyError:
            pass
        if kernels_disabled():
            return None
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"oscar_mm.{self.operation} is used for the first time during a CUDA graph "
                "capture, where its kernel cannot be checked: run the same step once beforehand"
            )
        with self._choosing:
            if key not in self._chosen:
                self._chosen[key] = self._choose(specialization, device)
        return self._chosen[key]

    def check(self, specialization: S, device: torch.device) -> Verdict:
        """Check a kernel now, regardless of any stored verdict, and store the new verdict.

        Raises:
            KernelError: if there is no kernel for the specialization.
        """
        return self.verdict(specialization, self._make(specialization, device), device)

    def verdict(self, specialization: S, kernel: K, device: torch.device) -> Verdict:
        """Check a compiled kernel; see ``check``."""
        verdict = Verdict(self._disagreement(specialization, kernel, device), self.bound)
        path, key = self._file(kernel, device)
        if path is not None:
            store_file(path, key, json.dumps({"disagreement": verdict.disagreement}).encode())
        return verdict

    def _choose(self, specialization: S, device: torch.device) -> K | None:
        try:
            kernel = self._make(specialization, device)
            path, key = self._file(kernel, device)
            verdict = self._remembered(path, key)
            if verdict is None:
                verdict = self.verdict(specialization, kernel, device)
        except KernelError as error:
            warn_once(self.operation, str(error))
            return None
        if verdict.agrees:
            return kernel
        _log.error(
            "the %s kernel disagrees with PyTorch operations on %s (error %.3g, limit %.3g): it is "
            "not used, and %s is slow. Please report this with the output of `oscar-mm doctor`. "
            "The result is stored%s; delete it to check the kernel again",
            self.operation,
            device,
            verdict.disagreement,
            verdict.bound,
            self.operation,
            "" if path is None else f" in {path}",
        )
        return None

    def _remembered(self, path: Path | None, key: str) -> Verdict | None:
        content = None if path is None else load_file(path, key)
        return None if content is None else Verdict(json.loads(content)["disagreement"], self.bound)

    def _file(self, kernel: K, device: torch.device) -> tuple[Path | None, str]:
        key = key_of([self.operation, self.bound, kernel.key, _identity(device)])
        folder = cache_folder()
        return None if folder is None else folder / f"{self.operation}-{key}.verdict", key


class OperationKernel(ABC, Generic[S]):
    """The kernels of an operation for one specialization on one device, compiled on construction.

    A subclass passes its operation's name and the bound of ``CheckedKernels`` as class arguments,
    loads the kernels in ``__init__`` and is called with the operation's arguments. ``of`` returns
    the instance to use. Calling the instance saves 7 us per call compared with the operation, which
    goes through torch's dispatcher and checks its arguments.

    Attributes:
        checked: instances of all specializations that agree with PyTorch operations.
        key: hash of the code.
    """

    checked: ClassVar[CheckedKernels[Any, Any]]

    def __init_subclass__(cls, operation: str, bound: float) -> None:
        cls.checked = CheckedKernels(operation, cls, cls.disagreement, bound)

    def __init__(self, specialization: S, device: torch.device) -> None:
        """Compile the kernels; raise KernelError if there are none for this device."""
        if architecture(device) is None:
            raise KernelError(
                f"{device}: an NVIDIA GPU with compute capability 8.0 or newer is required"
            )
        self.specialization, self.device, self.key = specialization, device, ""

    @classmethod
    def of(cls, specialization: S, device: torch.device) -> Self | None:
        """Return the kernels to use; None to fall back to PyTorch, and log the reason once."""
        return cls.checked.kernel(specialization, device) if device.type == "cuda" else None

    @staticmethod
    @abstractmethod
    def disagreement(
        specialization: Any, kernel: Callable[..., Any], device: torch.device
    ) -> float:
        """Compare kernels, or a callable in their place, with PyTorch operations on a small
        problem.

        Returns:
            0 if both give the same result, NaN if either gives NaN.
        """

    def _load(
        self, source: str, macros: Mapping[str, str | int], name: str | None = None
    ) -> Kernel:
        """Load a kernel of this operation; see ``load_kernel``."""
        kernel = load_kernel(source, macros, self.device, name)
        self.key += kernel.key
        return kernel


def random_normal(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Return a function that returns normally distributed numbers in a given shape, the same in
    each process."""
    generator = torch.Generator(device).manual_seed(0)
    # Numbers are drawn in this dtype, because float32 copies would take extra memory next to a
    # loaded model.
    return functools.partial(torch.randn, generator=generator, device=device, dtype=dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest |found - expected| / |expected| of any row (the last dimension); NaN if
    any element is NaN."""
    found, expected = found.double(), expected.double()
    return worst((found - expected).norm(dim=-1) / expected.norm(dim=-1))


def worst(errors: torch.Tensor | Sequence[float]) -> float:
    """Return the largest error; NaN if any error is NaN."""
    # Python's max() would drop NaN.
    return float(torch.as_tensor(errors).max())


@functools.cache
def _identity(device: torch.device) -> list[str]:
    """Return the device's name and driver, on which a verdict depends in addition to the code."""
    if device.type != "cuda":
        return [str(device)]
    from cuda.bindings import driver  # pyright: ignore[reportAttributeAccessIssue]

    try:
        text = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        text = ""
    return [torch.cuda.get_device_name(device), str(driver.cuDriverGetVersion()[1]), text]
