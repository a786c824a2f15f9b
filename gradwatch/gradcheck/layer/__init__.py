"""Check the properties of a layer by trials: batch sizes, extreme inputs, formats, state, and independent samples."""
