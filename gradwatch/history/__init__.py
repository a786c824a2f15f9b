"""Store the recorded data of a run, in memory and on disk. All later stages read only the history."""
