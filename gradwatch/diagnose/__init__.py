"""From findings to causes, ranked, each with a way to confirm it and a remedy."""
