"""Define models, one file each: the file's name is the model's name, and its keyword arguments come from YAML."""
