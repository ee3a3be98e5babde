"""How many threads the CPU decoder takes by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu import threads


def topology(root: Path, cores: dict[int, tuple[int, int]]) -> Path:
    """cores: logical cpu -> (package, core)."""
    for cpu, (package, core) in cores.items():
        folder = root / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{package}\n")
        (folder / "core_id").write_text(f"{core}\n")
    return root


def test_siblings_count_once(tmp_path: Path) -> None:
    root = topology(tmp_path, {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1), 4: (1, 0)})
    assert threads.physical_cores({0, 1, 2, 3}, root) == 2
    assert threads.physical_cores({0, 1, 2, 3, 4}, root) == 3
    assert threads.physical_cores({0, 2}, root) == 1


def test_without_topology_every_logical_cpu_counts(tmp_path: Path) -> None:
    assert threads.physical_cores({0, 1, 2}, tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "membership", "limit"),
    [
        ({"a/cpu.max": "150000 100000"}, "0::/a", 1.5),
        ({"a/cpu.max": "max 100000"}, "0::/a", None),
        ({"cpu.max": "400000 100000", "a/cpu.max": "max 100000"}, "0::/a", 4.0),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "200000 100000"}, "0::/a/b", 2.0),
        ({"cpu.max": "200000 100000"}, "0::/not/visible/here", 2.0),
        (
            {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"},
            "4:memory:/a\n2:cpu,cpuacct:/a",
            0.5,
        ),
        ({"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, "2:cpu,cpuacct:/a", None),
        ({"a/cpu.max": "garbage"}, "0::/a", None),
        ({}, "", None),
    ],
)
def test_cgroup_limits(tmp_path: Path, files: dict[str, str], membership: str, limit: float | None) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    (tmp_path / "membership").write_text(membership + "\n" if membership else "")
    assert threads.cgroup_cpus(root, tmp_path / "membership") == limit


@pytest.mark.parametrize(
    ("cores", "limit", "expected"), [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (64, None, 16), (4, 32.0, 4)]
)
def test_the_default(monkeypatch: pytest.MonkeyPatch, cores: int, limit: float | None, expected: int) -> None:
    monkeypatch.setattr(threads, "physical_cores", lambda cpus: cores)
    monkeypatch.setattr(threads, "cgroup_cpus", lambda: limit)
    assert threads.default_threads() == expected
