"""The state of a training as plain data: random generators, copies in memory, folders on disk.

safetensors files are read by the library and written by hand: `safetensors.torch.save_file` (0.8) takes all tensors at
once, so that a model on a GPU would first be copied to the host as a whole. It also refuses tensors that are strided or
share memory, hides the error number of a full disk, and leaves the checksum to a second pass over the file.
"""
