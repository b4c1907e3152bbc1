"""Training of the adapter and the joint encoder on cached features of the frozen vision tower.

`config` defines the settings, and `presets` holds named sets of settings. `data` makes batches. `model` holds the
objectives and the initial weights. `loop` runs the optimiser steps. `fitting` fits the weights of the final score after
training. Importing the package itself loads neither torch nor NumPy.
"""
