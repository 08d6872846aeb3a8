"""Runs a text through a model, layer by layer: activation statistics and predictors."""
