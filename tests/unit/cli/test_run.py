"""What `run` tells beside the text."""

from polyneuron.cli.run import hot_changes
from polyneuron.config import EngineConfig


def test_hot_clusters_follow_the_batch() -> None:
    config = EngineConfig(hot_clusters=(1, 2, 2, 5), max_sequences=4)
    assert hot_changes(config, [(1, 4), (17, 3), (33, 2), (49, 1)]) == [(1, 5), (17, 2), (49, 1)]
    assert hot_changes(EngineConfig(), [(1, 2), (9, 1)]) == [(1, 0)]
    assert hot_changes(config, []) == []
