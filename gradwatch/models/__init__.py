"""Models, one file each; a file is found by its name and builds with keyword arguments from YAML."""
