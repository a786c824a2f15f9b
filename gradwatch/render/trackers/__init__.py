"""Send a run to an experiment tracker (Weights & Biases, MLflow, Trackio) or to a function of the user."""
