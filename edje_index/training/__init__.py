"""Trains the adapter and the joint encoder on features of the frozen vision tower.

In the order of a run: `config` defines the settings and presets; `start` makes the
initial weights; `dataset` prepares captions in shards; `batches` makes batches; `step`
computes the losses; `loop` runs the optimiser steps and makes the bundle;
`fit_weights` and `pooled_similarity` fit its final score.
"""
