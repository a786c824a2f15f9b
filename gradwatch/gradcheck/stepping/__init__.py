"""Run a step again and again from one state, and follow its custom Functions and where it leaves the graph."""
