"""The program as its user starts it, in this process."""

from __future__ import annotations

import pytest

from polyneuron.cli.main import main


def run(*words: object) -> int:
    """The program's exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    code = ended.value.code
    assert isinstance(code, int)
    return code
