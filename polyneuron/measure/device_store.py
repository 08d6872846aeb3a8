"""Keeps device profiles in the cache folder, a file for each machine and disk."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from polyneuron.config import cache_folder
from polyneuron.errors import FormatError
from polyneuron.io.whole_file import write_whole
from polyneuron.measure.device_profile import Progress, device_key, profile_device
from polyneuron.planning.device import DeviceKey, DeviceProfile


def stored_path(key: DeviceKey) -> Path:
    """Where a profile with that key is kept."""
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return cache_folder() / "devices" / f"{digest[:16]}.json"


def load_profile(folder: Path) -> DeviceProfile | None:
    """The profile of this machine and that folder's disk; None when none can be used.

    A file of another version, of another machine, or damaged counts as none.
    """
    key = device_key(folder)
    try:
        profile = DeviceProfile.from_dict(json.loads(stored_path(key).read_bytes()))
    except (OSError, ValueError, AttributeError, TypeError, FormatError):
        return None
    return profile if profile.key == key else None


def store_profile(profile: DeviceProfile) -> Path:
    """Write it whole or not at all; returns where it is."""
    path = stored_path(profile.key)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(profile.as_dict(), indent=1).encode())
    return path


def measure_and_store(folder: Path, progress: Progress) -> DeviceProfile:
    """Measure anew, and keep it for the planner."""
    profile = profile_device(folder, progress)
    store_profile(profile)
    return profile
