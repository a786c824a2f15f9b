"""Build synthetic histories of healthy and sick runs, for examples and tests of detectors."""
