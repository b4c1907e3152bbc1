"""The parts of the model that only training needs: initial weights, objectives, losses and the teacher."""
