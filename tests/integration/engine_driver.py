"""A program with an engine of its own, for tests that end it in various ways."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.engines import PROMPT, open_engine


def main(path: str, mode: str) -> None:
    """Open the model, say that text has come, then go on generating or end as the mode says."""
    with open_engine(Path(path)) as engine:
        stream = iter(engine.stream(PROMPT, ignore_eos=True))
        next(stream)
        print("ready", *(status.pid for status in engine.executors()), flush=True)
        if mode == "raise":
            raise RuntimeError("on purpose")
        while mode == "generate":
            engine.generate(PROMPT, ignore_eos=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
