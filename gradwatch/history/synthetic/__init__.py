"""Build synthetic histories of healthy and faulty runs, for examples and tests of detectors."""
