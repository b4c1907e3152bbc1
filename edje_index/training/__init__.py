"""Trains the adapter and the joint encoder on stored features of the frozen vision tower.

`config` defines the settings, and `presets` contains named sets of settings. `data` makes batches. `model` contains the
objectives and the initial weights. `loop` runs the optimiser steps. After training, `fitting` fits the weights of the
final score.
"""
