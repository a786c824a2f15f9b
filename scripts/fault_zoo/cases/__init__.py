"""Training scripts, by set."""
