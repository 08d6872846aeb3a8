"""How many tokens a second the simulator plays: `make bench-simulate`, or
`python -m tests.bench.simulated`.

Bamboo-7B's shape with half of its feed forward on flash, policy by policy, with the timeline that
`polyneuron simulate` hashes and without. Processor seconds of one core are counted, not those that
pass: prompts, events and the timeline's bytes are part of them, starting Python and reading the
scenario are not. The best run counts, the slowest is beside it.
"""

from __future__ import annotations

import argparse
import time

from polyneuron.scenarios.library import find_scenario
from polyneuron.scenarios.script import Script, load_script
from polyneuron.scenarios.simulation import simulate
from polyneuron.scenarios.timeline_sink import KeptTimeline, sha256_of

SCENARIO = "paper/ladder"
POLICIES = ("powerinfer2", "pipeline", "cache", "bundles", "llmflash", "mmap")
PROMPT_TOKENS = 64
WANTED = 1000
"""Simulated tokens a second of a 7B shape under `powerinfer2`."""


def played(policy: str, tokens: int) -> Script:
    """One long answer under a policy."""
    return load_script(
        find_scenario(SCENARIO),
        {
            "engine.policy": policy,
            "engine.context": PROMPT_TOKENS + tokens,
            "requests.0.prompt_tokens": PROMPT_TOKENS,
            "requests.0.output_tokens": tokens,
        },
    )


def tokens_per_second(script: Script, tokens: int, *, has_timeline: bool) -> float:
    """Of one run, by the processor time of this process."""
    begin = time.process_time()
    timeline = KeptTimeline() if has_timeline else None
    simulate(script, timeline)
    if timeline is not None:
        sha256_of(timeline.text())
    return tokens / (time.process_time() - begin)


def row(policy: str, tokens: int, runs: int) -> str:
    """Both ways in turn, so that what else runs here meets both."""
    script, plain, told = played(policy, tokens), [], []
    for _ in range(runs):
        plain.append(tokens_per_second(script, tokens, has_timeline=False))
        told.append(tokens_per_second(script, tokens, has_timeline=True))
    return (
        f"{policy:12} simulated tokens a second: {max(plain):5.0f} without a timeline "
        f"(slowest {min(plain):.0f}), {max(told):5.0f} with one ({min(told):.0f})"
    )


def main() -> None:
    """A line for each policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", "--tokens", type=int, default=2000)
    parser.add_argument("-r", "--runs", type=int, default=5)
    parser.add_argument("policies", nargs="*", default=POLICIES)
    given = parser.parse_args()
    for policy in given.policies:
        print(row(policy, given.tokens, given.runs), flush=True)
    print(f"wanted of powerinfer2: {WANTED}")


if __name__ == "__main__":
    main()
