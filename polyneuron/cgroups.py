"""Control groups around this process, version 1 and 2, as the kernel's files tell them."""

from __future__ import annotations

from pathlib import Path


def cgroup_folders(root: Path, controller: str) -> list[str]:
    """This process's cgroup of a controller and those around it, outermost first.

    Folders below `root`, which holds /proc and /sys; none where nothing is mounted.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        number, names, path = parts
        if controller in names.split(","):
            base = f"sys/fs/cgroup/{names}"
            if not (root / base).exists():
                base = f"sys/fs/cgroup/{controller}"
        elif number == "0" and not names:
            base = "sys/fs/cgroup"
        else:
            continue
        steps = [step for step in path.split("/") if step]
        folders = ["/".join([base, *steps[:n]]) for n in range(len(steps) + 1)]
        if any((root / folder).exists() for folder in folders):
            return folders
    return []


def cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the cgroups allow; None: all there is."""
    quotas = []
    for folder in cgroup_folders(root, "cpu"):
        words = text_of(root / folder / "cpu.max").split()
        if not words:
            names = (root / folder / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
            words = [text_of(path) for path in names]
        if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cpuset_lists(root: Path) -> list[str]:
    """What the cgroups say of the cores they allow, a core list each; none without a limit."""
    names = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")
    lists = []
    for folder in cgroup_folders(root, "cpuset"):
        found = (text_of(root / folder / name) for name in names)
        lists.append(next((text for text in found if text), ""))
    return [text for text in lists if text]


def text_of(path: Path) -> str:
    """A kernel file's text without the blanks around it; empty where there is no such file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return ""
    return raw.decode(errors="replace").strip("\0 \n")
