"""Memory limits from made-up /proc and cgroup trees."""

from pathlib import Path

import pytest

from polyneuron.host_memory import HostMemory

GIB = 1 << 30


def make_host(
    root: Path, *, available: int = 8 * GIB, cgroup: str = "0::/\n", files: dict[str, str]
) -> HostMemory:
    """A machine whose cgroup files are `files`, by path below /sys/fs/cgroup."""
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = cgroups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory(proc, cgroups)


class TestAvailable:
    def test_no_cgroup_leaves_mem_available(self, tmp_path: Path) -> None:
        limit = make_host(tmp_path, files={}).available()
        assert (limit.num_bytes, limit.source) == (8 * GIB, "MemAvailable")

    def test_v2_limit_less_use_counts_reclaimable_cache_as_free(self, tmp_path: Path) -> None:
        files = {
            "job/memory.max": f"{3 * GIB}\n",
            "job/memory.current": f"{2 * GIB}\n",
            "job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        }
        limit = make_host(tmp_path, cgroup="0::/job\n", files=files).available()
        assert (limit.num_bytes, limit.source) == (2 * GIB, "cgroup job")

    def test_v2_max_is_no_limit(self, tmp_path: Path) -> None:
        files = {"job/memory.max": "max\n", "job/memory.current": "5\n"}
        limit = make_host(tmp_path, cgroup="0::/job\n", files=files).available()
        assert limit.num_bytes == 8 * GIB

    def test_v2_outer_cgroup_binds_too(self, tmp_path: Path) -> None:
        files = {
            "outer/memory.max": f"{GIB}\n",
            "outer/memory.current": "0\n",
            "outer/inner/memory.max": f"{3 * GIB}\n",
            "outer/inner/memory.current": "0\n",
        }
        limit = make_host(tmp_path, cgroup="0::/outer/inner\n", files=files).available()
        assert (limit.num_bytes, limit.source) == (GIB, "cgroup outer")

    def test_v1_limit(self, tmp_path: Path) -> None:
        files = {
            "memory/job/memory.limit_in_bytes": f"{2 * GIB}\n",
            "memory/job/memory.usage_in_bytes": f"{GIB}\n",
            "memory/job/memory.stat": "total_inactive_file 0\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
        cgroup = "4:cpu:/\n3:memory:/job\n0::/\n"
        limit = make_host(tmp_path, cgroup=cgroup, files=files).available()
        assert (limit.num_bytes, limit.source) == (GIB, "cgroup job")

    def test_default_budget_leaves_a_margin(self, tmp_path: Path) -> None:
        host = make_host(tmp_path, files={})
        assert 0.9 * 8 * GIB < host.default_budget() < 8 * GIB

    def test_small_machine_in_a_big_cgroup(self, tmp_path: Path) -> None:
        files = {"job/memory.max": f"{64 * GIB}\n", "job/memory.current": "0\n"}
        host = make_host(tmp_path, available=GIB, cgroup="0::/job\n", files=files)
        assert host.available().source == "MemAvailable"


class TestPeak:
    @pytest.mark.parametrize(
        ("cgroup", "files"),
        [
            ("0::/job\n", {"job/memory.max": f"{GIB}", "job/memory.peak": "77"}),
            (
                "3:memory:/job\n",
                {
                    "memory/job/memory.limit_in_bytes": f"{GIB}",
                    "memory/job/memory.max_usage_in_bytes": "77",
                },
            ),
        ],
    )
    def test_reads_the_limited_cgroup(
        self, tmp_path: Path, cgroup: str, files: dict[str, str]
    ) -> None:
        assert make_host(tmp_path, cgroup=cgroup, files=files).peak() == 77

    def test_none_without_a_limit(self, tmp_path: Path) -> None:
        assert make_host(tmp_path, files={}).peak() is None
