"""The host side of a run, live and on replay: append rows, write them, run detectors, notify sinks."""
