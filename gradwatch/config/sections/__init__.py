"""Define the sections of a config as pydantic models: types, defaults and meaning of every setting."""
