"""Training of the adapter and the joint encoder on cached features of the frozen vision tower.

`config` holds the settings and `presets` named sets of them. `data` makes batches, `model` holds the objectives and the
initial weights, `loop` runs the optimiser steps, and `fitting` fits the final score to the trained weights. Importing
the package loads nothing heavy.
"""
