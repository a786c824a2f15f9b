"""Training scripts built from questions that people ask: 24 have a fault, 12 are repaired twins, 12 look odd."""
