"""Tests of polyneuron."""
