"""What single ideas of fast int4 decoding are worth on a GPU, each as a small kernel of its own: `flint bench kernels`.

*.cu, *.cuh   the kernels
formats.py    what the random bytes they read mean, in numpy: the reference
levers.py     which kernels are compared, how they are launched, checked, and why one should win
gpu.py        buffers, launches and timing on a real GPU
"""
