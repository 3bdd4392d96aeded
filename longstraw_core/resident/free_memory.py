"""How much memory a device, or the container this process runs in, can still give."""

import os
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes of memory on `device` that can be allocated now; on a CPU, within the cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_bytes(), _cgroup_bytes())


def _host_bytes() -> int:
    """Memory available without swapping (page cache counts as available), or all of it where that is unknown."""
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_bytes() -> int:
    """Limit of the cgroup (version 2) minus what it uses, without reclaimable page cache; huge where unlimited."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 1 << 62
    if limit == "max":
        return 1 << 62
    return max(int(limit) - used + int(statistics.get("inactive_file", "0")), 0)
