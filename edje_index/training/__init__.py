"""Trains the adapter and the joint encoder on features of the frozen vision tower.

In the order of a run: `config` defines the settings and presets; `start` makes the
initial weights; `captions` prepares captions in shards; `features` and `batches` make
batches; `step` computes the losses; `loop` runs the optimiser steps; `finish` makes the
bundle and fits its final score.
"""
