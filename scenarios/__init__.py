"""Scripted runs: a device, a model, a workload and faults, replayed on real actors or simulated.

A scenario is a data file; the modules here read it, play it and check what must hold throughout.
"""
