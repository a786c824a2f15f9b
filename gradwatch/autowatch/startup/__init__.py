"""A folder for PYTHONPATH: Python imports its `sitecustomize` at the start of every process of the command."""
