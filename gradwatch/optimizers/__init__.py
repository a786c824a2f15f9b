"""Define optimizers that torch lacks, one file each: the file's name is the optimizer's name in a config."""
