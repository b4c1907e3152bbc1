"""The model in training: initial weights, objectives, losses and the teacher."""
