"""Measurements of a model and of this machine: perplexity, and speed beside other engines."""
