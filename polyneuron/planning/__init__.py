"""Decisions made before anything runs: the arena's layout and the step programs."""
