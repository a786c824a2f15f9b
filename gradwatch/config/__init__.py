"""Read, override, validate and describe strict YAML configs, without torch."""
