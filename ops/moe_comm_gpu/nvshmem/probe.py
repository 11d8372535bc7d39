"""Whether NVSHMEM can run here, in words: looks at files and packages, never at a device, and never raises.

NVSHMEM's host library reports success from ``init`` without a GPU, and binding a module before ``init`` ends the
process; so nothing here calls it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

#: Oldest driver branch that runs each major version of CUDA.
_OLDEST_DRIVER = {12: 525, 13: 580}
DRIVER_FILE = Path("/proc/driver/nvidia/version")
DEVICE_FOLDER = Path("/dev")


@dataclass(frozen=True)
class Library:
    """An installed NVSHMEM.

    Attributes:
        version: of the host library.
        folder: where it lies, with the device library of the same version.
    """

    version: str
    folder: Path

    def device_library(self, capability: int) -> Path:
        """The bitcode for a GPU of this compute capability (90 for 9.0), of the version of the host library.

        Raises:
            FileNotFoundError: there is none.
        """
        paths = {
            int(match[1]): path
            for path in self.folder.glob("libnvshmem_device_sm_*.bc")
            if (match := re.fullmatch(r"libnvshmem_device_sm_(\d+)\.bc", path.name))
        }
        fitting = [known for known in paths if known <= capability]
        if fitting:
            return paths[max(fitting)]
        single = self.folder / "libnvshmem_device.bc"
        if single.exists():
            return single
        raise FileNotFoundError(f"no device library (libnvshmem_device*.bc) for sm_{capability} in {self.folder}")


def probe() -> str | None:
    """Why NVSHMEM cannot run here, or None."""
    try:
        return _no_driver() or _no_torch_cuda() or _no_library()
    except Exception as error:  # noqa: BLE001 - a probe says what is wrong, whatever that is
        return f"{type(error).__name__}: {error}"


def find_library() -> Library:
    """The NVSHMEM that this process loads or has loaded.

    Raises:
        ModuleNotFoundError: nvshmem4py is not installed.
        RuntimeError: the host library is not found.
    """
    core = importlib.import_module("nvshmem.core")
    pathfinder = importlib.import_module("cuda.pathfinder")
    version = str(core.get_version().libnvshmem_version)
    return Library(version, Path(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path).parent)


def _no_driver() -> str | None:
    if not DRIVER_FILE.exists():
        return "no NVIDIA driver on this machine"
    if not any(re.fullmatch(r"nvidia\d+", path.name) for path in DEVICE_FOLDER.glob("nvidia*")):
        return "an NVIDIA driver, but no GPU, on this machine"
    return None


def _no_torch_cuda() -> str | None:
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA; install a CUDA build of torch"
    needed = _OLDEST_DRIVER.get(int(torch.version.cuda.split(".")[0]), 0)
    found = re.search(r"\b(\d{3,})\.\d+", DRIVER_FILE.read_text())
    if found and int(found[1]) < needed:
        return f"the NVIDIA driver {found[0]} is too old for CUDA {torch.version.cuda}, which needs {needed} or newer"
    return None


def _no_library() -> str | None:
    try:
        library = find_library()
    except ModuleNotFoundError as error:
        return f"{error.name} not installed; install accelerator-ops[moe-gpu]"
    except RuntimeError as error:
        return f"NVSHMEM's host library does not load ({error}); install nvidia-nvshmem"
    if not list(library.folder.glob("libnvshmem_device*.bc")):
        return f"NVSHMEM {library.version} in {library.folder} has no device library (libnvshmem_device*.bc)"
    return None
