"""How many threads a memory-bound decoder should use on this machine."""

from __future__ import annotations

import os
from pathlib import Path

# Memory bandwidth saturates long before the cores of a large server do, and every thread makes each barrier dearer.
MAX_DEFAULT_THREADS = 16

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP = Path("/sys/fs/cgroup")


def usable_cpus() -> set[int]:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def physical_cores(cpus: set[int], root: Path = _CPUS) -> int:
    """Distinct cores behind those logical processors; all of them where the system does not say."""
    cores = set()
    for cpu in cpus:
        topology = root / f"cpu{cpu}" / "topology"
        try:
            package = (topology / "physical_package_id").read_text().strip()
            core = (topology / "core_id").read_text().strip()
        except OSError:
            return len(cpus)
        cores.add((package, core))
    return len(cores)


def cgroup_cpus(root: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """Processors' worth of time that the control groups (v2 or v1) allow, or None without a limit."""
    limits = []
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif "cpu" in controllers.split(","):
            base = root / "cpu"
        else:
            continue
        folder = base / path.lstrip("/")
        # A parent's limit binds its children; inside a container the path may not exist, the root then is the group.
        for group in (folder, *folder.parents):
            limits.append(_group_limit(group))
            if group == base:
                break
    return min((limit for limit in limits if limit is not None), default=None)


def default_threads() -> int:
    """One per physical core that may be used, at most MAX_DEFAULT_THREADS, within the cgroup's share."""
    cores = physical_cores(usable_cpus())
    limit = cgroup_cpus()
    if limit is not None:
        cores = min(cores, int(limit))
    return max(1, min(cores, MAX_DEFAULT_THREADS))


def _group_limit(group: Path) -> float | None:
    try:
        quota, period = (group / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    try:
        limit = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max": no limit
        return None
    return limit if limit > 0 else None  # v1 says -1
