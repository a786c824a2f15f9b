"""Hold the state of a training as plain data: random generators, copies in memory, folders on disk.

The safetensors library reads the files; gradwatch writes them itself. `safetensors.torch.save_file` (0.8) needs all
tensors at once. The whole model would first be copied from a GPU to the host. `save_file` also refuses tensors that are
strided or share memory. It hides the error number of a full disk, and a checksum needs a second pass over the file.
"""
