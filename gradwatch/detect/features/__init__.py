"""Features that several detectors read from a history: model structure, baselines, robust statistics."""
