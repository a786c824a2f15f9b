"""Layers with planted mistakes, for the tests of `gradwatch.check_layer`."""
