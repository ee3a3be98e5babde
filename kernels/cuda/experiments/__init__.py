"""What single ideas of fast int4 decoding are worth on a GPU, each as a small kernel of its own: `flint bench kernels`.

*.cu, *.cuh   the kernels
formats.py    what the random bytes they read mean, in numpy: the reference
levers.py     the levers by name
hardware.py, products.py, mlps.py
              their variants: which kernels are compared, how they are launched, checked, and why one should win
launching.py  blocks, stages and shared memory, as the kernels expect them
sweep.py      what an experiment is made of
gpu.py        buffers, launches and timing on a real GPU
"""
