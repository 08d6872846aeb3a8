"""Builders and oracles that the tests share."""
