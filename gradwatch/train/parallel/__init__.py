"""Train on several ranks: the process group, the wrapper of the model, and the part of each batch."""
